"""The order and the decisions of the smoke test, against a stand-in server and with the real sandbox."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import smoke_plan, smoke_run
from ansible_collections.firstlight.vllm.plugins.module_utils.acceptance import Evidence
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.openai_api import Server
from ansible_collections.firstlight.vllm.plugins.module_utils.prompts import resolve
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox import Case, Verdict
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox_process import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_plan import Plan
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_run import Report, SmokeFailure
from support_fake_vllm import RIGHT, WRONG, FakeVllm, hold_until, serve

PRIME = resolve(["is_prime"])
PLAN = Plan(model="m", prompts=PRIME, samples=2, limits=Limits(cpu_s=2, wall_s=20, memory_mib=128))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_run, "_LOOK_AGAIN_S", 0.005)


def passes(fake: FakeVllm, **changes: Any) -> Report:
    return smoke_run.run(Server(fake.url, fake.api_key, 5), replace(PLAN, **changes))


def fails(fake: FakeVllm, **changes: Any) -> SmokeFailure:
    with pytest.raises(SmokeFailure) as error:
        passes(fake, **changes)
    failure = error.value.as_failure()
    assert failure["id"] == error.value.kind
    assert failure["cause"]
    assert failure["remedy"]
    assert failure["seen"]
    return error.value


def test_a_good_server_passes_with_its_answer_and_its_acceptance() -> None:
    with serve() as fake:
        report = passes(fake, prompts=resolve(["is_prime", "fibonacci", "count_vowels"]), bursts=(4, 4, 2))
    assert report.answer == RIGHT["is_prime"]
    assert report.verdict == "right"
    assert [(entry["name"], entry["right"]) for entry in report.prompts] == [
        ("is_prime", 2), ("fibonacci", 2), ("count_vowels", 2)
    ]  # fmt: skip
    assert report.acceptance is not None
    assert report.acceptance["length"] == 11.0
    assert report.acceptance["drafts"] == 16 * 5
    assert report.acceptance_alone is not None
    assert report.acceptance_alone["drafts"] == 6 * 5
    assert [entry["right"] for entry in report.load] == [4, 4, 2]
    assert report.warnings == []
    assert "no-network" in report.isolation["walls"]


def test_traffic_before_the_test_is_not_counted() -> None:
    with serve(drafts=10_000, accepted=0, finished=500) as fake:
        report = passes(fake)
    assert report.acceptance is not None
    assert (report.acceptance["drafts"], report.acceptance["length"]) == (10, 11.0)


def test_a_burst_is_sent_at_once() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: hold_until(fake, 8) if len(fake.requests) > 2 else None
        passes(fake, bursts=(8,))
    assert fake.most_at_once == 8


def test_the_request_is_greedy_and_does_not_think() -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with serve() as fake:
        passes(fake, extra=extra)
    assert fake.requests[0]["temperature"] == 0
    assert fake.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_no_more_tokens_are_asked_for_than_the_server_takes() -> None:
    with serve(max_model_len=512) as fake:
        passes(fake)
    assert fake.requests[0]["max_tokens"] == 256


def test_the_same_answer_is_run_once() -> None:
    runs: list[str] = []

    def runner(code: str, function: str, cases: Any, limits: Limits) -> Verdict:
        runs.append(function)
        return Verdict("right", "right")

    with serve() as fake:
        smoke_run.run(Server(fake.url), replace(PLAN, samples=5, bursts=(3,)), runner)
    assert runs == ["is_prime"]


# --- answers ---------------------------------------------------------------------------------------------------


def test_a_wrong_answer_fails_and_says_for_which_number() -> None:
    with serve(answers={"is_prime": lambda number: WRONG}) as fake:
        failure = fails(fake)
    assert failure.kind == "answers-wrong"
    assert "expected False" in failure.message
    assert failure.report.verdict == "wrong"
    assert failure.report.answer == WRONG


def test_one_unlucky_answer_of_three_does_not_decide() -> None:
    with serve(answers={"is_prime": lambda number: WRONG if number == 2 else RIGHT["is_prime"]}) as fake:
        report = passes(fake, samples=3)
    assert report.prompts[0]["right"] == 2
    assert any("1 of 3 answers not right" in warning for warning in report.warnings)


def test_half_of_the_answers_right_is_not_enough() -> None:
    with serve(answers={"is_prime": lambda number: WRONG if number == 2 else RIGHT["is_prime"]}) as fake:
        assert fails(fake, samples=2).kind == "answers-wrong"


def test_an_unsteady_prompt_is_left_out_of_the_load() -> None:
    plan = replace(PLAN, prompts=resolve(["is_prime", "fibonacci"]), samples=3, bursts=(4,))
    with serve(answers={"is_prime": lambda number: WRONG if number == 2 else RIGHT["is_prime"]}) as fake:
        smoke_run.run(Server(fake.url), plan)
    assert all("fibonacci" in request["messages"][0]["content"] for request in fake.requests[6:])


def test_one_failing_prompt_fails_the_test_though_the_others_are_right() -> None:
    with serve(answers={"fibonacci": lambda number: "I would rather not."}) as fake:
        failure = fails(fake, prompts=resolve(["is_prime", "fibonacci"]))
    assert failure.kind == "answers-wrong"
    assert "fibonacci: no-code" in failure.message
    assert "is_prime:" not in failure.message


def test_a_hostile_answer_is_contained_and_told() -> None:
    payload = "```python\nimport os\nos.system('rm -rf /')\n" + RIGHT["is_prime"].removeprefix("```python\n")
    with serve(answers={"is_prime": lambda number: payload}) as fake:
        failure = fails(fake)
    assert failure.report.verdict == "contained"
    assert "imports os" in failure.message


def test_a_cut_answer_says_that_it_was_cut() -> None:
    with serve(answers={"is_prime": lambda number: "Well, a prime is"}, finish_reason="length") as fake:
        assert "cut at 1024 tokens" in fails(fake).message


def test_a_model_that_only_thinks_is_told_as_such() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "Primes, hmm."}
    with serve(message=lambda text: message) as fake:
        assert "thought and never answered" in fails(fake).message


def test_code_is_not_judged_where_it_cannot_be_isolated() -> None:
    def refuse(code: str, function: str, cases: list[Case], limits: Limits) -> Verdict:
        raise FirstlightError("not here", where="sandbox", fix="x", kind="sandbox-unavailable")

    with serve() as fake, pytest.raises(SmokeFailure) as error:
        smoke_run.run(Server(fake.url), PLAN, refuse)  # type: ignore[arg-type]
    assert error.value.kind == "sandbox-unavailable"


# --- speculation -----------------------------------------------------------------------------------------------


def test_right_answers_with_nothing_accepted_fail_at_the_gate() -> None:
    evidence = Evidence(log_taps=(1, 5), expected_taps=(2, 6), compile_cache_reused=False)
    with serve(accepted_per_draft=0) as fake:
        failure = fails(fake, evidence=evidence, bursts=(4,))
    assert failure.kind == "drafter-low-acceptance"
    assert failure.seen[0] == "taps: the log says (1, 5) and it should say (2, 6)."
    assert failure.report.acceptance is not None
    assert failure.report.acceptance["length"] == 1.0
    assert failure.report.verdict == "right"
    assert failure.report.load == []


def test_a_middling_length_passes_with_a_warning() -> None:
    with serve(accepted_per_draft=1) as fake:
        report = passes(fake)
    assert len(report.warnings) == 1
    assert "2.00 is below 2.5" in report.warnings[0]


def test_a_drafter_that_fails_only_under_load_fails() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: setattr(fake, "accepted_per_draft", 0 if len(fake.requests) > 2 else 10)
        failure = fails(fake, bursts=(8,))
    assert failure.kind == "drafter-low-acceptance"
    assert "under load" in failure.message


def test_configured_speculation_without_counters_fails_before_any_request() -> None:
    with serve(speculating=False) as fake:
        assert fails(fake).kind == "speculation-not-measured"
    assert fake.requests == []


def test_a_server_that_need_not_speculate_passes_without_counters() -> None:
    with serve(speculating=False) as fake:
        report = passes(fake, speculation=False, bursts=(2,))
    assert report.acceptance is None


def test_a_server_that_never_drafts_fails() -> None:
    with serve(drafts_per_request=0) as fake:
        assert fails(fake).kind == "speculation-inert"


def test_a_restart_during_the_test_fails() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: setattr(fake, "started", 1.8e9)
        assert fails(fake).kind == "server-restarted"


def test_a_restart_fails_without_speculation_too() -> None:
    with serve(speculating=False) as fake:
        fake.on_chat = lambda running: setattr(fake, "started", 1.8e9)
        assert fails(fake, speculation=False).kind == "server-restarted"


# --- load ------------------------------------------------------------------------------------------------------


def dies_at(fake: FakeVllm, running: int) -> int | None:
    if running >= 4 or fake.dead:
        fake.dead = True
        return 500
    hold_until(fake, 4) if len(fake.requests) > 2 else None
    return None


def test_an_engine_that_dies_under_a_few_requests_at_once_fails() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: dies_at(fake, running)
        failure = fails(fake, bursts=(4, 4, 2))
    assert failure.kind == "died-under-load"
    assert "burst 1 of 3 (4 requests at once)" in failure.message
    assert any("HTTP 500" in seen for seen in failure.seen)
    assert any("HTTP 503" in seen for seen in failure.seen)
    assert failure.report.verdict == "right"
    assert len(failure.report.load) == 1


def test_failed_requests_fail_though_health_says_200() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: 500 if len(fake.requests) == 5 else None
        failure = fails(fake, bursts=(4,))
    assert failure.kind == "failed-under-load"
    assert failure.report.load[0]["answered"] == 3


def test_a_hung_engine_is_a_timeout_of_the_burst() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: time.sleep(0.6) if len(fake.requests) > 2 else None  # type: ignore[func-returns-value]
        failure = fails(fake, bursts=(2,), first_burst_timeout_s=0.2)
    assert failure.kind == "failed-under-load"
    assert any("no answer within" in seen for seen in failure.seen)


def test_one_wrong_answer_under_load_fails() -> None:
    with serve(answers={"is_prime": lambda number: WRONG if number == 6 else RIGHT["is_prime"]}) as fake:
        failure = fails(fake, bursts=(4,))
    assert failure.kind == "wrong-under-load"
    assert failure.report.load[0]["right"] == 3
    # vLLM's full graphs were found to do just that
    assert "vllm_server_cudagraph_mode: PIECEWISE" in str(failure)


def test_answers_that_the_counters_do_not_know_fail() -> None:
    with serve() as fake:
        fake.on_chat = lambda running: setattr(fake, "counting", len(fake.requests) <= 2)
        assert fails(fake, bursts=(4,)).kind == "counters-stuck"


def test_the_last_step_may_be_counted_a_moment_after_its_answer() -> None:
    with serve() as fake:
        read, readings = fake.metrics, []

        def late() -> str:
            readings.append(1)
            fake.running = 1 if len(readings) in (3, 4) else 0
            return read()

        fake.metrics = late  # type: ignore[method-assign]
        passes(fake)
    assert len(readings) >= 5


# --- before anything is sent -----------------------------------------------------------------------------------


def test_another_model_on_the_port_fails_before_any_request() -> None:
    with serve(model="other") as fake:
        assert fails(fake).kind == "model-not-served"
    assert fake.requests == []


def test_a_wrong_key_fails_without_showing_it() -> None:
    with serve(api_key="right") as fake, pytest.raises(SmokeFailure) as error:
        smoke_run.run(Server(fake.url, "canary-9d1e"), PLAN)
    assert error.value.kind == "api-key-rejected"
    assert "canary-9d1e" not in str(error.value.as_failure())


def test_the_default_load_is_twice_the_most_and_then_half() -> None:
    assert smoke_plan.default_bursts(16) == (16, 16, 8)
    assert smoke_plan.default_bursts(1) == (1, 1, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"samples": 0}, "samples"),
        ({"bursts": (4, 0)}, "bursts"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"min_length": 0.5}, "min_acceptance_length"),
        ({"min_length": 3.0, "warn_length": 2.0}, "warn_acceptance_length"),
        ({"request_timeout_s": 0}, "request_timeout_s"),
        ({"limits": Limits(cpu_s=0)}, "code_cpu_s"),
        ({"limits": Limits(memory_mib=1)}, "code_memory_mib"),
    ],
)
def test_numbers_that_would_prove_nothing_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(FirstlightError) as error:
        smoke_plan.validate(replace(PLAN, **change))
    assert error.value.where == name
