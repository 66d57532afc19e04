"""The smoke test: short coding tasks, their answers run, speculation measured, and the server held under load.

Order: read the counters; ask every prompt a few times, one request at a time; judge speculation by the difference;
send bursts of requests at once, looking after each whether the engine lives and the counters moved; read again.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from . import acceptance, code_block, metrics, sandbox
from .acceptance import Acceptance, Reading
from .errors import FirstlightError
from .openai_api import ChatAnswer, Server
from .prompts import Prompt
from .sandbox import Verdict
from .sandbox_process import Limits
from .smoke_plan import Plan

_SETTLE_S = 3.0
_LOOK_AGAIN_S = 0.1
_EXCERPT = 400

Runner = Callable[[str, str, Sequence[sandbox.Case], Limits], Verdict]


@dataclass
class Report:
    """What was seen, filled as the test goes, so that a failure's report holds all that came before it."""

    answer: str = ""
    verdict: str = ""
    prompts: list[dict[str, Any]] = field(default_factory=list)
    acceptance: dict[str, Any] | None = None
    acceptance_alone: dict[str, Any] | None = None
    acceptance_under_load: dict[str, Any] | None = None
    load: list[dict[str, Any]] = field(default_factory=list)
    isolation: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For module results."""
        return dict(vars(self))


class SmokeFailure(FirstlightError):  # noqa: N818 - it reads as what it is
    """The server did not pass.

    Args:
        fault: what is wrong.
        seen: the facts it was concluded from, most telling first.
        report: what was seen before.
    """

    def __init__(self, fault: FirstlightError, seen: Sequence[str], report: Report) -> None:
        super().__init__(fault.what, where=fault.where, fix=fault.fix, why=fault.why, kind=fault.kind)
        self.seen, self.report = list(seen), report

    def as_failure(self) -> dict[str, Any]:
        """The failure as results carry it: ``id``, ``cause``, ``remedy``, ``seen``."""
        cause = f"{self.where}: {self.what}" + (f" {self.why}" if self.why else "")
        return {"id": self.kind, "cause": cause, "remedy": self.fix, "seen": self.seen}


def run(server: Server, plan: Plan, runner: Runner = sandbox.run) -> Report:
    """Put a server to the test.

    Args:
        server: the server's HTTP side.
        plan: what to ask and to demand.
        runner: runs code of answers; tests of the order of things replace it.

    Raises:
        SmokeFailure: it did not pass; the report so far is in it.
    """
    return _Smoke(server, plan, runner).run()


class _Smoke:
    def __init__(self, server: Server, plan: Plan, runner: Runner) -> None:
        self.server, self.plan, self.runner = server, plan, runner
        self.report = Report()
        self.max_tokens = plan.max_tokens
        self._random = random.Random(secrets.randbits(128))  # noqa: S311 - seeded from the system's source
        self._judged: dict[tuple[str, str], Verdict] = {}

    def run(self) -> Report:
        started = time.monotonic()
        try:
            self._run()
        except SmokeFailure:
            raise
        except FirstlightError as fault:
            raise SmokeFailure(fault, [fault.what], self.report) from fault
        finally:
            self.report.seconds = round(time.monotonic() - started, 3)
        return self.report

    def _run(self) -> None:
        self._fit_max_tokens(self.server.model(self.plan.model))
        before = self._settled()
        self._demand_counters(before)
        steady = self._ask_alone()
        alone = self._settled()
        self.report.acceptance_alone = self._gate(before, alone, "with one request at a time")
        self.report.acceptance = self.report.acceptance_alone
        after = self._load(steady, alone)
        if self.plan.bursts:
            self.report.acceptance_under_load = self._gate(alone, after, "under load")
            if self.plan.speculation:  # no need to judge: both parts have passed
                self.report.acceptance = acceptance.between(before, after).as_dict()

    def _fit_max_tokens(self, model: Mapping[str, Any]) -> None:
        longest = model.get("max_model_len")
        if isinstance(longest, int) and longest > 1:
            self.max_tokens = min(self.max_tokens, longest // 2)

    # counters

    def _settled(self) -> Reading:
        """Read the counters once no request runs: the last step is counted a moment after its answer is sent."""
        deadline = time.monotonic() + _SETTLE_S
        reading, running = self._read()
        while time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
            earlier = reading
            reading, running = self._read()
            if not running and reading == earlier:
                break
        return reading

    def _read(self) -> tuple[Reading, bool]:
        samples = metrics.parse(self.server.metrics())
        reading = Reading(metrics.speculation(samples), metrics.start_time(samples), metrics.requests_finished(samples))
        return reading, bool(samples.total(metrics.RUNNING))

    def _demand_counters(self, before: Reading) -> None:
        if self.plan.speculation and before.counters is None:
            acceptance.between(before, before)  # raises, before a single request is spent

    def _gate(self, before: Reading, after: Reading, during: str) -> dict[str, Any] | None:
        acceptance.same_process(before, after)
        if not self.plan.speculation:
            return None
        measured = acceptance.between(before, after)
        self._judge_acceptance(measured, during)
        return measured.as_dict()

    def _judge_acceptance(self, measured: Acceptance, during: str) -> None:
        plan = self.plan
        judgement = acceptance.judge(
            measured, min_length=plan.min_length, warn_length=plan.warn_length, evidence=plan.evidence
        )
        if not judgement.passed:
            self.report.acceptance = measured.as_dict()
            fault = acceptance.low_acceptance(measured, judgement, min_length=plan.min_length, during=during)
            raise SmokeFailure(fault, judgement.causes, self.report)
        self.report.warnings.extend(f"{during}: {warning}" for warning in judgement.warnings)

    # answers

    def _chat(self, prompt: Prompt, timeout_s: float) -> ChatAnswer:
        return self.server.chat(
            self.plan.model,
            prompt.prompt,
            self.max_tokens,
            temperature=self.plan.temperature,
            extra=self.plan.extra,
            timeout_s=timeout_s,
        )

    def _verdict(self, prompt: Prompt, answer: ChatAnswer) -> Verdict:
        """Judge an answer's text; the same text for the same prompt is run once."""
        key = (prompt.name, answer.text)
        if key not in self._judged:
            self._judged[key] = self._run_code(prompt, answer)
        return self._judged[key]

    def _run_code(self, prompt: Prompt, answer: ChatAnswer) -> Verdict:
        code = code_block.extract(answer.text, prompt.function)
        if code is None:
            return Verdict("no-code", _why_no_code(prompt, answer, self.max_tokens))
        verdict = self.runner(code, prompt.function, prompt.cases(self._random), self.plan.limits)
        self.report.isolation = verdict.isolation or self.report.isolation
        return verdict

    def _ask_alone(self) -> list[Prompt]:
        """Ask each prompt its samples; returns the prompts that were right every time (all, if none was)."""
        steady: list[Prompt] = []
        unlucky: list[tuple[Prompt, Verdict]] = []
        for prompt in self.plan.prompts:
            verdicts = [self._sample(prompt, first=not self.report.prompts and not n) for n in range(self.plan.samples)]
            right = sum(verdict.name == "right" for verdict in verdicts)
            fault = next((verdict for verdict in verdicts if verdict.name != "right"), None)
            self.report.prompts.append(_prompt_result(prompt, verdicts, right))
            if fault is None:
                steady.append(prompt)
            elif right * 2 > len(verdicts):
                self.report.warnings.append(
                    f"prompt {prompt.name}: {len(verdicts) - right} of {len(verdicts)} answers not right "
                    f"({fault.name}: {fault.detail})"
                )
            else:
                unlucky.append((prompt, fault))
        if unlucky:
            raise self._wrong_answers(unlucky)
        return steady or list(self.plan.prompts)

    def _sample(self, prompt: Prompt, *, first: bool) -> Verdict:
        # kernels may be compiled for the first answer just as for the first burst
        plan = self.plan
        answer = self._chat(prompt, plan.first_burst_timeout_s if first else plan.request_timeout_s)
        verdict = self._verdict(prompt, answer)
        if first:
            self.report.answer, self.report.verdict = answer.text or answer.reasoning, verdict.name
        return verdict

    def _wrong_answers(self, faults: Sequence[tuple[Prompt, Verdict]]) -> SmokeFailure:
        seen = [f"prompt {prompt.name}: {verdict.name}: {verdict.detail}" for prompt, verdict in faults]
        fault = FirstlightError(
            f"the model's answers are not right: {'; '.join(seen)}.",
            where=f"{self.server.base_url}/v1/chat/completions",
            why="The server speaks, but what it says is not what this model says: weights, tokenizer, chat template "
            "or kernels are at fault. A prompt fails when no more than half of its answers are right.",
            fix="read the answer in this report; compare the same request on a server without speculation.",
            kind="answers-wrong",
        )
        return SmokeFailure(fault, [*seen, f"first answer: {self.report.answer[:_EXCERPT]!r}"], self.report)

    # load

    def _load(self, steady: Sequence[Prompt], before: Reading) -> Reading:
        for number, size in enumerate(self.plan.bursts):
            timeout_s = self.plan.request_timeout_s if number else self.plan.first_burst_timeout_s
            before = self._burst(number + 1, [steady[i % len(steady)] for i in range(size)], timeout_s, before)
        return before

    def _burst(self, number: int, asked: Sequence[Prompt], timeout_s: float, before: Reading) -> Reading:
        started = time.monotonic()
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            results = list(pool.map(lambda prompt: self._try_chat(prompt, timeout_s), asked))
        seconds = time.monotonic() - started
        faults = [result for result in results if isinstance(result, FirstlightError)]
        answers = [(p, r) for p, r in zip(asked, results, strict=True) if isinstance(r, ChatAnswer)]
        entry: dict[str, Any] = {
            "requests": len(asked), "answered": len(answers), "right": 0, "seconds": round(seconds, 3)
        }  # fmt: skip
        self.report.load.append(entry)
        what = f"burst {number} of {len(self.plan.bursts)} ({len(asked)} requests at once)"
        self._engine_lives(what, faults)
        verdicts = [(prompt, self._verdict(prompt, answer)) for prompt, answer in answers]
        entry["right"] = sum(verdict.name == "right" for _, verdict in verdicts)
        wrong = [f"prompt {p.name}: {v.name}: {v.detail}" for p, v in verdicts if v.name != "right"]
        if wrong:
            raise self._load_failure(
                "wrong-under-load",
                f"{what}: {len(wrong)} of {len(asked)} answers were not right.",
                "Asked alone the same prompts were answered right.",
                list(dict.fromkeys(wrong)),
            )
        after = self._settled()
        self._counters_moved(what, len(asked), before, after)
        return after

    def _try_chat(self, prompt: Prompt, timeout_s: float) -> ChatAnswer | FirstlightError:
        try:
            return self._chat(prompt, timeout_s)
        except FirstlightError as fault:
            return fault

    def _engine_lives(self, what: str, faults: Sequence[FirstlightError]) -> None:
        health = self.server.health()
        seen = list(dict.fromkeys(fault.what for fault in faults))
        if not health.ok:
            seen.append(f"/health afterwards: {self.server.failure(health, '/health').what}")
            raise self._load_failure(
                "died-under-load",
                f"{what}: the engine is dead afterwards; {len(faults)} requests failed.",
                "Single requests were answered right.",
                seen,
            )
        if faults:
            raise self._load_failure(
                "failed-under-load",
                f"{what}: {len(faults)} requests failed; /health still says 200, which a hung engine says too.",
                "Single requests were answered right.",
                seen,
            )

    def _counters_moved(self, what: str, requests: int, before: Reading, after: Reading) -> None:
        acceptance.same_process(before, after)
        if before.finished is not None and after.finished is not None:
            counted = after.finished - before.finished
            if counted < requests:
                raise self._load_failure(
                    "counters-stuck",
                    f"{what}: all were answered, and the server counted {counted} finished requests.",
                    "The answers came from another process than the counters.",
                    [f"vllm:request_success_total: {before.finished} before, {after.finished} after"],
                )
        if self.plan.speculation:
            acceptance.between(before, after)  # raises when not one draft was made

    def _load_failure(self, kind: str, what: str, why: str, seen: Sequence[str]) -> SmokeFailure:
        fault = FirstlightError(
            what,
            where="load",
            why=why,
            fix="read the journal above the first error, and set vllm_server_cudagraph_mode: PIECEWISE; where it is "
            "set already, vllm_server_extra_args: {enforce-eager: true} or {no-async-scheduling: true}, or a smaller "
            "vllm_server_max_num_seqs.",
            kind=kind,
        )
        return SmokeFailure(fault, seen, self.report)


def _prompt_result(prompt: Prompt, verdicts: Sequence[Verdict], right: int) -> dict[str, Any]:
    return {
        "name": prompt.name,
        "samples": len(verdicts),
        "right": right,
        "verdicts": [verdict.as_dict() for verdict in verdicts],
    }


def _why_no_code(prompt: Prompt, answer: ChatAnswer, max_tokens: int) -> str:
    if answer.only_reasoning:
        text = "the model thought and never answered (content is empty, reasoning is not)"
    elif not answer.text.strip():
        text = "the answer is empty"
    else:
        text = f"the answer defines no function {prompt.function}"
    if answer.finish_reason == "length":
        text += f"; it was cut at {max_tokens} tokens"
    return text
