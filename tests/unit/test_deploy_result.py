"""Events of a run become its result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.collect import Collector, acceptance_of, phases_of
from deploy.results import HostResult, Phase, RunResult


def failed(host: str, task: str, **res: Any) -> dict[str, Any]:
    return {"event": "runner_on_failed", "event_data": {"host": host, "task": task, "res": res}}


def ok(host: str, **res: Any) -> dict[str, Any]:
    return {"event": "runner_on_ok", "event_data": {"host": host, "task": "t", "res": res}}


def stats(**counts: dict[str, int]) -> dict[str, Any]:
    return {"event": "playbook_on_stats", "event_data": counts}


def collect(*events: dict[str, Any]) -> dict[str, HostResult]:
    collector = Collector()
    for event in events:
        collector.take(event)
    return collector.hosts()


def test_the_first_failure_that_explains_itself_is_the_cause_and_the_last_one_the_outcome() -> None:
    host = collect(
        failed("h", "probe", msg="unexplained"),
        failed("h", "gate", msg="all of it", failure={"id": "b", "cause": "B", "remedy": "R", "where": "W"}),
        failed("h", "restore", msg="not restored", failure={"kind": "c", "what": "C"}),
        stats(failures={"h": 1}, processed={"h": 1}),
    )["h"]
    assert host.failure is not None
    assert (host.failure.id, host.failure.cause, host.failure.remedy, host.failure.task) == ("b", "B", "R", "gate")
    assert (host.failure.where, host.failure.outcome) == ("W", "not restored")


def test_the_outcome_is_what_came_back_when_the_run_ends_by_telling_the_cause_once_more() -> None:
    cause = failed("h", "gate", msg="all of it", failure={"id": "b", "cause": "B"})
    restored = ok("h", reason="the old server serves again", restored={"kind": "unit"}, answering=True)
    told = collect(cause, restored, failed("h", "tell", msg="all of it"), stats(failures={"h": 1}))["h"].failure
    assert told is not None
    assert told.outcome == "the old server serves again"
    untouched = collect(failed("h", "stage", msg="all of it"), stats(failures={"h": 1}))["h"].failure
    assert untouched is not None
    assert untouched.outcome == ""


def test_a_failure_without_an_explanation_gives_its_message() -> None:
    host = collect(failed("h", "copy", msg="no space left"), stats(failures={"h": 1}))["h"]
    assert host.failure is not None
    assert (host.failure.id, host.failure.cause, host.failure.message) == (
        "task-failed",
        "no space left",
        "no space left",
    )


def test_a_censored_failure_says_that_it_is_hidden() -> None:
    host = collect(failed("h", "key", censored="the output has been hidden"), stats(failures={"h": 1}))["h"]
    assert host.failure is not None
    assert "hidden" in host.failure.cause


def test_an_ignored_failure_is_none() -> None:
    event = failed("h", "probe", msg="x")
    event["event_data"]["ignore_errors"] = True
    assert collect(event, stats(ok={"h": 1}, processed={"h": 1}))["h"].ok


def test_a_report_of_a_failed_gate_is_kept_beside_the_failure() -> None:
    report = {"acceptance": {"drafts": 208, "drafted": 3120, "accepted": 0, "rate": 0, "length": 1.0}}
    host = collect(failed("h", "gate", msg="m", firstlight_report=report), stats(failures={"h": 1}))["h"]
    assert host.acceptance is not None
    assert host.acceptance.length == 1.0
    assert not host.ok


def test_the_status_of_a_host_and_its_report_are_in_the_result() -> None:
    status = {"deployed": True, "serving": True, "report": {"verdict": "right", "release": "r1"}}
    host = collect(ok("h", firstlight_status=status), stats(ok={"h": 1}))["h"]
    assert host.state["serving"] is True
    assert (host.verdict, host.release) == ("right", "r1")


def test_a_note_neither_fails_a_host_nor_ends_its_task() -> None:
    collector = Collector()
    collector.take({"event": "runner_on_start", "event_data": {"host": "h", "task": "Wait"}})
    collector.take({"event": "verbose", "stdout": "[h] firstlight: compiling (3 s)"})
    failure = collector.hosts("timeout")["h"].failure
    assert failure is not None
    assert "'Wait'" in failure.cause


def test_a_host_that_had_nothing_to_do_is_in_the_result() -> None:
    assert collect(stats(processed={"h": 1}, ok={"h": 1}, changed={"h": 2}))["h"].changed


def test_warnings_of_report_and_tasks_come_once_each() -> None:
    host = collect(
        ok("h", warnings=["a", "b"]), ok("h", warnings=["a"], firstlight_report={"warnings": ["c", "b"]}), stats()
    )["h"]
    assert host.warnings == ("c", "b", "a")


@pytest.mark.parametrize(("reason", "words"), [("timeout", "The time limit"), ("canceled", "was canceled")])
def test_a_stopped_run_says_where_each_host_was(reason: str, words: str) -> None:
    collector = Collector()
    collector.take({"event": "runner_on_start", "event_data": {"host": "h", "task": "Wait"}})
    collector.take(ok("done"))
    hosts = collector.hosts(reason)
    assert [host.ok for host in hosts.values()] == [False, False]
    assert hosts["h"].failure is not None
    assert words in hosts["h"].failure.cause
    assert "'Wait'" in hosts["h"].failure.cause
    assert hosts["done"].failure is not None
    assert "between two tasks" in hosts["done"].failure.cause


def test_a_result_is_ok_only_when_it_ended_by_itself_with_every_host_ok() -> None:
    good, bad = HostResult(ok=True), HostResult(ok=False)
    assert RunResult("successful", {"a": good}, 1.0).ok
    assert not RunResult("successful", {"a": good, "b": bad}, 1.0).ok
    assert not RunResult("timeout", {"a": good}, 1.0).ok


def test_odd_values_in_a_report_are_left_out_not_guessed() -> None:
    assert acceptance_of({"drafts": "many"}) is None
    assert acceptance_of(None) is None
    assert phases_of("abc") == ()
    assert phases_of([{"name": "a", "seconds": 1}, {"name": "b"}, 3]) == (Phase("a", 1.0),)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
keys = ["answer", "verdict", "acceptance", "phases", "ready_s", "downtime_s", "converged", "warnings", "release"]


@given(st.dictionaries(st.sampled_from(keys), anything), anything, anything)
def test_no_report_and_no_failure_whatever_is_in_it_breaks_the_result(report: Any, failure: Any, msg: Any) -> None:
    events = (
        failed("h", "t", msg=msg, failure=failure, firstlight_report=report, warnings=report.get("warnings")),
        stats(failures={"h": 1}),
    )
    host = collect(*events)["h"]
    assert not host.ok
    assert host.as_dict()["ok"] is False
