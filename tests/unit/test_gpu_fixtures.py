"""Logs and counters of vLLM 0.20.1 on two H200s, started by firstlight's own unit: what the code makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose
from ansible_collections.firstlight.vllm.plugins.module_utils.graph_rules import captured_graphs
from ansible_collections.firstlight.vllm.plugins.module_utils.memory_fit import GIB, fit
from ansible_collections.firstlight.vllm.plugins.module_utils.metrics import parse, speculation
from ansible_collections.firstlight.vllm.plugins.module_utils.startup_phases import (
    auxiliary_layers,
    available_kv_gib,
    compile_cache_reused,
    phases,
)
from support_models import DRAFTER, TARGET

DATA = Path(__file__).parents[1] / "data" / "gpu"
_ENTRY = re.compile(r"(\d+\.\d+) (\S+?)\[(\d+)\]: ?(.*)")


def journal(name: str) -> list[tuple[float, str]]:
    """What the server wrote in one start, with the journal's times; systemd's own words left out."""
    entries = []
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        found = _ENTRY.fullmatch(line)
        if found and found[2] != "systemd":
            entries.append((float(found[1]), found[4]))
    return entries


def lines(name: str) -> list[str]:
    return [text for _, text in journal(name)]


@pytest.fixture(scope="module")
def deployed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "dflash-tp2-unit.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dflash-tp2-unit.journal", "none"),
        ("full-size-custom-all-reduce.journal", "custom-all-reduce-failed"),
        ("full-size-no-room-for-cache.journal", "no-memory-for-cache-blocks"),
        ("memory-held-by-neighbours.journal", "free-memory-below-utilization"),
        ("full-size-piecewise-graphs.journal", "none"),
        ("full-size-full-graphs-die.journal", "cudagraph-replay-fault"),
        ("full-size-flash-attn-2.journal", "none"),
        ("drafter-layers-split.journal", "drafter-mixed-attention"),
        ("shifted-taps.journal", "none"),  # right answers and no error: only the counters tell
    ],
)
def test_each_recorded_start_is_judged_by_its_cause(name: str, kind: str) -> None:
    assert diagnose(lines(name)).id == kind


def test_the_server_started_by_hand_with_too_small_a_budget_is_judged_by_its_cause() -> None:
    text = (DATA / "budget-too-small.log").read_text(encoding="utf-8")
    assert diagnose(text.splitlines()).id == "spec-batched-tokens-too-small"


def test_the_all_reduce_crash_is_cured_by_the_flag_that_cures_it() -> None:
    verdict = diagnose(lines("full-size-custom-all-reduce.journal"))
    assert "disable-custom-all-reduce: true" in verdict.remedy
    assert "custom_all_reduce.cuh" in verdict.text


def test_the_crash_of_full_graphs_is_cured_by_the_mode_that_lived() -> None:
    assert "vllm_server_cudagraph_mode: PIECEWISE" in diagnose(lines("full-size-full-graphs-die.journal")).remedy
    figures = json.loads((DATA / "full-size-figures.json").read_text(encoding="utf-8"))
    assert figures["full_graphs"]["bursts"]["died"]
    assert not figures["piecewise"]["bursts"]["died"]


def test_the_figures_that_the_page_tells_are_those_that_were_recorded() -> None:
    figures = json.loads((DATA / "full-size-figures.json").read_text(encoding="utf-8"))
    page = (Path(__file__).parents[2] / "docs" / "cuda-graphs.md").read_text(encoding="utf-8")
    row = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    piecewise, full = figures["piecewise"], figures["full_graphs"]
    bursts = [piecewise["first_bursts"], piecewise["bursts"]]
    told = row["`PIECEWISE`"]
    assert f"| {piecewise['streams_1']['tokens_per_s']:.0f} | {piecewise['streams_8']['tokens_per_s']:.0f} |" in told
    assert f"{sum(b['bursts'] for b in bursts)} bursts, {sum(b['requests'] for b in bursts)} requests" in told
    assert f"| {full['streams_1']['tokens_per_s']:.0f} |" in row["`FULL_AND_PIECEWISE` (small servers starting)"]
    answered, tokens = figures["flash_attn_2"]["answered_at"], figures["flash_attn_2"]["tokens"]
    speed = sum(tokens[1:]) / (answered[-1] - answered[0])
    assert f"| {speed:.0f} (two requests) |" in row["`FULL_AND_PIECEWISE`, FlashAttention 2 (a small server starting)"]


def test_the_engine_hung_before_it_died_with_as_many_requests_as_have_a_broken_schedule() -> None:
    told = [text for text in lines("full-size-full-graphs-die.journal") if "Running: " in text]
    running, speed = re.findall(r"generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs", told[-1])[0][::-1]
    assert 5 <= int(running) <= 12
    assert float(speed) == 0


def test_wrong_taps_were_tapped() -> None:
    assert auxiliary_layers(lines("shifted-taps.journal")) == (1, 5)


def test_the_share_that_would_have_fitted_is_computed() -> None:
    verdict = diagnose(lines("memory-held-by-neighbours.journal"))
    free, total = map(float, re.findall(r"\(([\d.]+)/([\d.]+) GiB\)", verdict.text)[0])
    share = float(re.findall(r"vllm_server_gpu_memory_utilization: (\d\.\d+)", verdict.remedy)[0])
    assert share * total <= free, "the share named fits into what was free"
    assert share * total > free - 0.05 * total, "and is not needlessly small"


def test_the_phases_of_the_recorded_start_are_those_of_its_report(deployed: dict[str, Any]) -> None:
    report = deployed["report"]
    found = phases(journal("dflash-tp2-unit.journal"), report["started_at"], report["ready_at"])
    assert sum(phase.seconds for phase in found) == pytest.approx(report["ready_s"])
    told = {phase["name"]: phase["seconds"] for phase in report["phases"]}
    assert {phase.name: phase.seconds for phase in found} == pytest.approx(told, abs=0.1)


def test_the_start_tapped_the_layers_after_the_configured_ones_and_compiled_afresh() -> None:
    assert auxiliary_layers(lines("dflash-tp2-unit.journal")) == (2, 6)
    assert not compile_cache_reused(lines("dflash-tp2-unit.journal"))


def test_the_counters_give_the_acceptance_of_the_report(deployed: dict[str, Any]) -> None:
    counters = speculation(parse((DATA / "dflash-tp2-unit.metrics").read_text(encoding="utf-8")), "tiny")
    assert counters is not None
    told = deployed["report"]["acceptance"]
    assert (counters.drafts, counters.drafted, counters.accepted) == (told["drafts"], told["drafted"], told["accepted"])
    assert told["length"] == pytest.approx(1 + counters.accepted / counters.drafts)


def test_a_cache_that_came_out_negative_is_read_as_such() -> None:
    available = available_kv_gib(lines("full-size-no-room-for-cache.journal"))
    assert available is not None
    assert available < 0


def _logged(name: str, pattern: str) -> float:
    return next(float(found[1]) for text in lines(name) if (found := re.search(pattern, text)))


TARGET_BYTES, DRAFTER_BYTES = 53_739_584_776, 3_460_432_496


@pytest.mark.parametrize(
    ("name", "weights_bytes", "drafting"),
    [
        ("full-size-no-room-for-cache.journal", TARGET_BYTES, False),
        ("full-size-custom-all-reduce.journal", TARGET_BYTES + DRAFTER_BYTES, True),
    ],
)
def test_predicted_weights_come_within_two_percent_of_the_logged(name: str, weights_bytes: int, drafting: bool) -> None:
    predicted = fit(
        TARGET, gpu_total_gib=143771 / 1024, utilization=0.9, weights_gib=weights_bytes / GIB, tensor_parallel=2,
        max_model_len=32768, k=15 if drafting else 0, drafter=DRAFTER if drafting else None,
    )  # fmt: skip
    assert predicted.weights == pytest.approx(_logged(name, r"Model loading took ([\d.]+) GiB"), rel=0.02)


@pytest.mark.parametrize(
    ("name", "mode", "utilization"),
    [("full-size-piecewise-graphs.journal", "PIECEWISE", 0.9), ("full-size-flash-attn-2.journal", "", 0.6)],
)
def test_the_predicted_cache_comes_within_five_percent_of_the_logged(name: str, mode: str, utilization: float) -> None:
    graphs = captured_graphs(max_num_seqs=16, k=15, mode=mode, batched_tokens=32768)
    [told] = {text for text in lines(name) if "Profiling CUDA graph memory" in text and "TP0" in text}
    assert sum(int(count) for count in re.findall(r"=(\d+) \(largest", told)) == graphs[0]
    predicted = fit(
        TARGET, gpu_total_gib=143771 / 1024, utilization=utilization, weights_gib=(TARGET_BYTES + DRAFTER_BYTES) / GIB,
        tensor_parallel=2, max_model_len=32768, k=15, drafter=DRAFTER, graphs=graphs,
    )  # fmt: skip
    assert predicted.cache == pytest.approx(available_kv_gib(lines(name)), rel=0.05)
