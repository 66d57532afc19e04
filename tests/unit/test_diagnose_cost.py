"""A log cannot break the diagnosis: whatever it holds, an answer comes, and soon."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import log_lines, log_scan
from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_catalogue import BY_ID, KINDS, NONE, UNKNOWN
from hypothesis import given, settings
from hypothesis import strategies as st
from support_failure_logs import FAILED_START, LOADING, SERVING, worker_error

WORDS = sorted({matcher.text for kind in KINDS for matcher in kind.matchers})
PIECES = [
    *WORDS,
    "Traceback (most recent call last):",
    "ERROR ",
    "INFO ",
    "(Worker_TP0 pid=1) ",
    "\x1b[31m",
    "\r",
    "'",
    "/",
    ":",
    "[",
    "{",
]

WORDLESS = st.characters(blacklist_characters="\n", blacklist_categories=["Cs", "Lu", "Ll"])  # cannot spell a failure


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=6).map("".join), max_size=30)
)
def test_any_lines_get_a_verdict_that_can_be_shown(lines: list[str]) -> None:
    verdict = diagnose(lines)
    assert verdict.id in {*BY_ID, NONE, UNKNOWN}
    assert verdict.line is None or 1 <= verdict.line <= len(lines)
    assert bool(verdict.remedy) == (verdict.id != NONE)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet=WORDLESS), max_size=20))
def test_text_that_is_no_log_is_never_a_failure_that_it_is_not(lines: list[str]) -> None:
    assert diagnose(lines).id in (UNKNOWN, NONE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(alphabet=WORDLESS, max_size=60), max_size=40), st.integers(0, 40))
def test_noise_in_front_of_a_failure_does_not_hide_it(noise: list[str], at: int) -> None:
    failing = [*LOADING, *worker_error("RuntimeError: Cannot find any model weights with `/m/target`"), *FAILED_START]
    assert diagnose([*noise[:at], *failing]).id == "weights-missing"


def _patterns() -> Iterator[str]:
    for kind in KINDS:
        for matcher in kind.matchers:
            yield from filter(None, (matcher.pattern, matcher.near, matcher.apart, matcher.never))
    for _, _, pattern in log_scan._SIGNS:
        yield from filter(None, [pattern])


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "/",
        ":/a",
        "'",
        "1",
        "a/",
        ".",
        " ",
        "\\",
        "[",
        "(a ",
        "aError",
        "lib",
        "cuda/",
        "KeyError: '",
        "No such file or directory: '",
    ],
)
def test_no_pattern_runs_away_on_a_hostile_line(unit: str) -> None:
    line = (unit * log_lines.WINDOW)[: log_lines.WINDOW]
    for pattern in sorted(set(_patterns())):
        begin = time.process_time()
        log_scan._pattern(pattern).search(line)
        assert time.process_time() - begin < 0.25, pattern
    begin = time.process_time()
    log_lines.split_level(line)
    assert time.process_time() - begin < 0.1


@pytest.mark.parametrize("word", WORDS[:: max(len(WORDS) // 20, 1)])
def test_a_line_of_one_word_a_million_times_is_read_soon(word: str) -> None:
    begin = time.process_time()
    diagnose([*SERVING, (word + " ") * (300_000 // (len(word) + 1)), *(f"{word} {n}" for n in range(2000))])
    assert time.process_time() - begin < 3


def test_a_big_log_is_read_without_keeping_it() -> None:
    def lines() -> Iterator[str]:
        yield from SERVING
        for number in range(50_000):
            yield f'(APIServer pid=11) INFO:     127.0.0.1:{number} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        yield from worker_error("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")

    begin = time.process_time()
    verdict = diagnose(lines())
    assert (verdict.id, verdict.line) == ("cudagraph-replay-fault", len(SERVING) + 50_001)
    assert time.process_time() - begin < 5
