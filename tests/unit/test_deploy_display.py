"""What a user sees during a run and after it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deploy import progress
from deploy.events import Event, from_runner
from deploy.progress import LineProgress, LiveProgress, duration, progress_for
from deploy.report import acceptance_text, print_result
from deploy.results import Acceptance, Failure, HostResult, Phase, RunResult


def console(*, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text_of(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


START = Event("start", host="gpu1", task="Wait until ready", role="smoke")
DONE = Event(
    "ok", host="gpu1", task="Wait until ready", role="smoke", changed=True, seconds=91.2,
    result={"phases": [{"name": "load weights", "seconds": 12.5}]},
)  # fmt: skip


def test_plain_output_is_one_whole_line_for_each_step_and_has_no_escapes() -> None:
    out = console()
    display = LineProgress(out)
    display.event(START)
    display.note("gpu1", "loading weights " + "x" * 200)
    display.note("gpu1", "loading weights " + "x" * 200)
    display.event(DONE)
    display.event(Event("failed", host="gpu1", task="Gate", role="smoke", result={"msg": "two\nlines"}))
    display.close()
    lines = [line.split(" s  ", 1)[1] for line in text_of(out).splitlines()]
    assert lines == [
        "gpu1: smoke: Wait until ready",
        "gpu1: loading weights " + "x" * 200,
        "gpu1: changed: smoke: Wait until ready (1 min 31 s)",
        "gpu1: load weights took 12 s",
        "gpu1: failed: smoke: Gate: two lines",
    ]
    assert "\x1b" not in text_of(out)


def test_a_long_task_gives_a_sign_of_life_with_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = console()
    display = LineProgress(out)
    display.event(START)
    now += 29
    display.tick()
    now += 2
    display.note("gpu1", "capturing graphs")
    display.tick()
    display.tick()
    assert [line.split(" s  ", 1)[1] for line in text_of(out).splitlines()] == [
        "gpu1: smoke: Wait until ready",
        "gpu1: capturing graphs",
        "gpu1: smoke: Wait until ready, for 31 s: capturing graphs",
    ]


def test_phases_reported_twice_are_shown_once() -> None:
    out = console()
    display = LineProgress(out)
    display.event(DONE)
    display.event(Event("ok", host="gpu1", task="Report", result={"firstlight_report": dict(DONE.result)}))
    assert text_of(out).count("load weights took") == 1


def test_a_terminal_shows_host_task_time_and_note() -> None:
    out = console(terminal=True)
    display = progress_for(out)
    assert isinstance(display, LiveProgress)
    display.event(START)
    display.note("gpu1", "[weights] 3 of 8")  # brackets are text, not markup
    display.tick()
    display.close()
    assert "gpu1" in text_of(out)
    assert "smoke: Wait until ready: [weights] 3 of 8" in text_of(out)


def test_no_thread_runs_for_the_display() -> None:
    import threading  # noqa: PLC0415

    before = threading.active_count()
    display = LiveProgress(console(terminal=True))
    assert threading.active_count() == before
    display.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_role_is_shown_once_although_ansible_names_it_in_two_ways() -> None:
    raw = {
        "event": "playbook_on_task_start",
        "event_data": {"name": "smoke : Wait", "role": "smoke", "resolved_role": "firstlight.vllm.smoke"},
    }
    event = from_runner(raw)
    assert event is not None
    assert (event.role, event.task) == ("smoke", "Wait")


def test_the_report_shows_answer_verdict_acceptance_phases_and_failure() -> None:
    out = console()
    good = HostResult(
        ok=True,
        changed=True,
        answer="```python\ndef is_prime(n):\n    return n > 1\n```",
        verdict="right: 200 numbers checked",
        acceptance=Acceptance(10, 150, 100, 0.667, 11.0),
        phases=(Phase("imports", 2.0), Phase("load weights", 6.0)),
        ready_s=8.0,
        downtime_s=8.2,
        report={"vllm_version": "0.20.1", "answer": "not twice", "ready_at": 1795996689.5, "seconds": 5.26},
        warnings=("the window is small",),
    )
    bad = HostResult(
        ok=False, failure=Failure("oom", "out of memory", "Set it lower.", "m", "gpu 0", "Wait", "SGLang is back.")
    )
    print_result(RunResult("failed", {"gpu1": good, "gpu2": bad}, 75), out)
    text = text_of(out)
    for words in (
        "def is_prime(n):", "right: 200 numbers checked", "mean length 11.00: 100 of 150", "66.7%", "load weights",
        "start to ready", "8.0 s", "8.2 s, 1.025 times the start", "vllm version", "5.3 s",
        "warning: the window is small", "out of memory [oom]",
        "Set it lower.", "SGLang is back.", "failed: 1 of 2 hosts fine, 1 min 15 s",
    ):  # fmt: skip
        assert words in text, words
    assert "not twice" not in text
    assert "1795996689" not in text


def test_a_note_from_a_long_task_is_live_progress() -> None:
    event = from_runner({"event": "verbose", "stdout": "[gpu1] firstlight: loading weights (20 s)"})
    assert event == Event("note", host="gpu1", text="loading weights (20 s)")
    out = console()
    display = LineProgress(out)
    display.event(START)
    display.event(event)
    assert text_of(out).splitlines()[-1].endswith("gpu1: loading weights (20 s)")
    live = console(terminal=True)
    table = LiveProgress(live)
    table.event(START)
    table.event(event)
    table.tick()
    table.close()
    assert "smoke: Wait until ready: loading weights (20 s)" in text_of(live)


def test_the_state_of_a_host_is_shown_in_words() -> None:
    out = console()
    unit = {"name": "vllm.service", "active": "active", "enabled": True, "restarts": 0}
    state = {"deployed": True, "serving": False, "problem": "/health says refused", "unit": unit, "report": {}}
    print_result(RunResult("successful", {"gpu1": HostResult(ok=True, state=state)}, 2), out)
    for words in ("/health says refused", "vllm.service: active, enabled, 0 restarts"):
        assert words in text_of(out)
    out = console()
    state = {"removed": ["/opt/a", "/opt/b"], "freed_bytes": 2_500_000_000}
    print_result(RunResult("successful", {"gpu1": HostResult(ok=True, state=state)}, 2), out)
    assert "/opt/a, /opt/b" in text_of(out)
    assert "2.50 GB" in text_of(out)


def test_a_host_that_was_left_alone_says_so() -> None:
    out = console()
    print_result(RunResult("successful", {"gpu1": HostResult(ok=True, converged=True)}, 2), out)
    assert "already as asked for" in text_of(out)


def test_nothing_drafted_is_said_in_words() -> None:
    assert acceptance_text(Acceptance(0, 0, 0, None, None)) == "nothing was drafted"
    assert acceptance_text(None) is None
