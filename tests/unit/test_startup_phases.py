"""The phases of a start: they add up, in every order and with every milestone missing."""

# ruff: noqa: E501 - the lines of a log stay whole

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.startup_phases import (
    auxiliary_layers,
    available_kv_gib,
    compile_cache_reused,
    phases,
    progress,
)
from hypothesis import given
from hypothesis import strategies as st
from support_failure_logs import LOGS

IMPORT_S = 7.25


def _start(name: str) -> tuple[list[tuple[float, str]], float, float]:
    """A whole log with its times; when the process was started, and when the server was ready."""
    entries: list[tuple[float, str]] = []
    now: float | None = None
    for line in Path(LOGS, name).read_text(encoding="utf-8").splitlines():
        found = re.search(r"\d\d-\d\d (\d\d):(\d\d):(\d\d)", line)
        if found:
            hours, minutes, seconds = map(int, found.groups())
            now = hours * 3600.0 + minutes * 60 + seconds
        if now is not None:
            entries.append((now, line))
    ready_s = next(at for at, text in entries if "Application startup complete" in text)
    return entries, entries[0][0] - IMPORT_S, ready_s


def _seconds(name: str) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in phases(*_start(name))}


STARTS = [
    "gpu-0.20.1-dflash-tp2-ok.log",
    "gpu-0.20.1-dflash-tp2-shifted-taps.log",
    "gpu-0.20.1-dflash-tp2-stale-compile-cache.log",
    "gpu-0.20.1-no-speculation-ok.log",
    "gpu-0.20.1-27b-dummy-no-speculation-ok.log",
    "gpu-0.20.1-27b-dummy-dies-under-load.log",
    "cpu/ok-qwen3-eager.log",
    "cpu/ok-qwen3-tp2.log",
]


@pytest.mark.parametrize("name", STARTS)
def test_the_phases_of_a_real_start_add_up_to_the_wall_clock(name: str) -> None:
    entries, started_s, ready_s = _start(name)
    found = phases(entries, started_s, ready_s)
    assert sum(phase.seconds for phase in found) == pytest.approx(ready_s - started_s, abs=1e-6)
    assert all(phase.seconds >= 0 for phase in found)
    assert found[0].seconds == pytest.approx(IMPORT_S, abs=2)
    assert len({phase.name for phase in found}) == len(found)


def test_a_cold_start_with_a_drafter_shows_where_the_time_went() -> None:
    assert _seconds("gpu-0.20.1-dflash-tp2-ok.log") == {
        "imports": IMPORT_S,
        "arguments": 25,
        "engine": 32,
        "load weights": 1,
        "load drafter": 1,
        "compile target": 49,
        "profile": 89,
        "compile drafter": 24,
        "kv cache": 11,
        "graph capture": 7,
        "warm up": 0,
        "api server": 7,
    }


def test_a_start_from_the_compile_cache_spends_no_time_compiling() -> None:
    seconds = _seconds("gpu-0.20.1-dflash-tp2-stale-compile-cache.log")
    assert seconds["compile target"] + seconds["compile drafter"] <= 6


def test_without_a_drafter_nothing_is_said_of_one() -> None:
    for name in ("gpu-0.20.1-no-speculation-ok.log", "cpu/ok-qwen3-tp2.log"):
        assert not {name for name in _seconds(name) if "drafter" in name}
    assert _seconds("gpu-0.20.1-no-speculation-ok.log")["compile target"] == 35


def test_an_eager_cpu_start_has_neither_graphs_nor_compilation() -> None:
    assert list(_seconds("cpu/ok-qwen3-eager.log")) == [
        "imports",
        "arguments",
        "engine",
        "load weights",
        "profile",
        "kv cache",
        "warm up",
        "api server",
    ]


def test_a_second_worker_does_not_pass_for_the_drafter() -> None:
    def line(worker: int, text: str) -> str:
        return f"(Worker_TP{worker} pid={100 + worker}) INFO 05-12 09:00:00 [x.py:1] {text}"

    entries = [
        (1.0, line(0, "Loading drafter model...")),
        (2.0, line(0, "Model loading took 27 GiB memory and 1 seconds")),
        (10.0, line(0, "torch.compile took 8.00 s in total")),
        (11.0, line(1, "torch.compile took 8.00 s in total")),
        (20.0, line(0, "Initial profiling/warmup run took 9.00 s")),
        (30.0, line(0, "torch.compile took 9.00 s in total")),
        (31.0, line(1, "torch.compile took 9.00 s in total")),
    ]
    seconds = {phase.name: phase.seconds for phase in phases(entries, 0.0, 40.0)}
    assert (seconds["compile target"], seconds["compile drafter"], seconds["api server"]) == (8, 10, 10)


def test_a_log_that_says_nothing_is_one_phase() -> None:
    assert [(phase.name, phase.seconds) for phase in phases([], 10.0, 12.5)] == [("api server", 2.5)]
    assert phases([(11.0, "hello")], 10.0, 9.0)[0].seconds == 0


MILESTONES = [
    "█  version 0.20.1",
    "Initializing a V1 LLM engine (v0.20.1)",
    "Starting to load model /m",
    "Loading drafter model...",
    "Model loading took 1 GiB",
    "torch.compile took 1 s",
    "Initial profiling/warmup run took 1 s",
    "GPU KV cache size: 1 tokens",
    "Graph capturing finished in 1 secs",
    "init engine (profile) took 1 s",
    "Application startup complete.",
    "",
]


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.sampled_from(MILESTONES)), max_size=30),
    st.floats(-1e3, 1e3),
    st.floats(0, 1e3),
)
def test_phases_add_up_whatever_the_order(entries: list[tuple[float, str]], started_s: float, took_s: float) -> None:
    found = phases(entries, started_s, started_s + took_s)
    assert sum(phase.seconds for phase in found) == pytest.approx((started_s + took_s) - started_s, abs=1e-6)
    assert all(phase.seconds >= 0 for phase in found)


@pytest.mark.parametrize(
    ("text", "news"),
    [
        ("(APIServer pid=1) INFO 11-29 20:57:02 [utils.py:299]  ▄▄ ▄█ █ ▀▄▀ █  version 0.20.1", "vLLM 0.20.1 reads its arguments"),
        ("Loading safetensors checkpoint shards:  35% Completed | 7/20 [00:30<01:00,  4.3s/it]", "loading weights: 35% (7/20)"),
        (
            "Capturing CUDA graphs (decode, FULL):   6%|▋         | 1/16 [00:02<00:43]Capturing CUDA graphs (decode, FULL):  "
            "12%|█▎        | 2/16 [00:02<00:18,  1.33s/it]",
            "capturing CUDA graphs: 12% (2/16)",
        ),
        ("(Worker_TP0 pid=1) INFO [gpu_model_runner.py:4879] Model loading took 27.04 GiB memory and 0.8 seconds",
         "weights loaded, 27.04 GiB on each GPU"),
        ("Directly load AOT compilation from path /var/cache/x/model", "reusing a compiled graph"),
        ("torch.compile took 49.70 s in total", "compiled in 49.70 s"),
        ("Available KV cache memory: 39.62 GiB", "39.62 GiB for the KV cache"),
        ("init engine (profile, create kv cache, warmup model) took 180.92 s (compilation: 73.82 s)", "engine ready after 180.92 s"),
        ("No available shared memory broadcast block found in 60 seconds.", None),
        ("", None),
    ],
)  # fmt: skip
def test_progress_is_told_in_words_for_people(text: str, news: str | None) -> None:
    assert progress(text) == news


@given(st.text(max_size=300))
def test_progress_takes_any_line(text: str) -> None:
    assert progress(text) is None or progress(text)


@pytest.mark.parametrize(
    ("name", "layers", "reused", "gib"),
    [
        ("gpu-0.20.1-dflash-tp2-ok.log", (2, 6), False, 2.79),
        ("gpu-0.20.1-dflash-tp2-shifted-taps.log", (1, 5), True, 26.33),
        ("gpu-0.20.1-dflash-tp2-stale-compile-cache.log", (2, 6), True, 39.62),
        ("gpu-0.20.1-27b-dummy-dies-under-load.log", (2, 17, 32, 47, 62), False, 31.66),
        ("gpu-0.20.1-no-speculation-ok.log", None, False, 27.08),
        ("cpu/ok-qwen3-tp2.log", None, False, 1.0),
    ],
)
def test_facts_of_a_start_are_read_from_its_log(
    name: str, layers: tuple[int, ...] | None, reused: bool, gib: float
) -> None:
    lines = Path(LOGS, name).read_text(encoding="utf-8").splitlines()
    assert auxiliary_layers(lines) == layers
    assert compile_cache_reused(lines) is reused
    assert available_kv_gib(lines) == pytest.approx(gib)


def test_the_worker_with_least_memory_counts() -> None:
    lines = ["Available KV cache memory: 3.50 GiB", "Available KV cache memory: 2.25 GiB"]
    assert available_kv_gib(lines) == 2.25
    assert available_kv_gib(["nothing"]) is None
