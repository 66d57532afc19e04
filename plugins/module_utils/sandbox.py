"""Runs the code of a model's answer so that nothing can come of it, and judges what it returned.

The judge stays outside: it starts a fresh interpreter that confines itself (``sandbox_isolation``), reads which
walls are in force, and sends the code only when all that must hold does. The process returns values; this one
compares them, so that code cannot say of itself that it is right.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import sandbox_child, sandbox_gate
from .sandbox_process import REQUIRED, Ended, Limits, empty_directory, execute, unavailable

VerdictName = Literal["right", "wrong", "contained", "no-code"]

#: Exceptions that mean a limit was hit rather than that the code is simply wrong.
_LIMITS = {
    "MemoryError": "hit the memory limit",
    "RecursionError": "recursed without end",
    "OutputFloodError": "flooded its output",
    "PermissionError": "was refused by the kernel",
    "BlockingIOError": "was refused by the kernel",
}


@dataclass(frozen=True)
class Case:
    """One known answer: call the function with ``arguments``, expect ``expected`` (JSON's types; exact type)."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class Verdict:
    """What became of one piece of code.

    Attributes:
        name: ``right``: every case as expected. ``wrong``: it ran, or tried to, and something was not as expected.
            ``contained``: it tried what it must not, or hit a limit; nothing came of it. ``no-code``: no code.
        detail: one sentence.
        tried: for ``contained``, what it tried.
        right: cases that came out as expected.
        cases: cases asked.
        isolation: what was in force; empty when nothing was run.
    """

    name: VerdictName
    detail: str
    tried: tuple[str, ...] = ()
    right: int = 0
    cases: int = 0
    isolation: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For module results."""
        return {
            "verdict": self.name,
            "detail": self.detail,
            "tried": list(self.tried),
            "right_cases": self.right,
            "cases": self.cases,
        }


def run(code: str, function: str, cases: Sequence[Case], limits: Limits | None = None) -> Verdict:
    """Run code in isolation and hold what it returns against known answers.

    Args:
        code: Python source that defines the function.
        function: name of the function to call.
        cases: known answers; at least one.
        limits: of time and memory.

    Raises:
        FirstlightError: this host cannot isolate it, so it was not run (kind ``sandbox-unavailable``).
    """
    if len(code.encode("utf-8", "surrogatepass")) > sandbox_gate.MAX_CODE_BYTES:
        text = f"code longer than {sandbox_gate.MAX_CODE_BYTES} bytes"
        return Verdict("contained", text, tried=(text,), cases=len(cases))
    return _run(code, function, cases, limits or Limits(), gate=True)


def isolation(limits: Limits | None = None) -> dict[str, Any]:
    """Say which walls this host gives, running no foreign code.

    Raises:
        FirstlightError: not enough of them (kind ``sandbox-unavailable``).
    """
    bare = "def nothing():\n    return None\n"
    return run(bare, "nothing", [Case((), None)], limits).isolation


def _run(code: str, function: str, cases: Sequence[Case], limits: Limits, *, gate: bool) -> Verdict:
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "code": code,
        "function": function,
        "calls": [list(case.arguments) for case in cases],
        "gate": gate,
    }
    with empty_directory() as empty:
        report, ended = execute(json.dumps(job).encode() + b"\n", empty, limits)
    own = [message for message in ended.messages if message.get("nonce") == nonce or "broken" in message]
    verdict = _judge(own, ended, cases)
    return Verdict(verdict.name, verdict.detail, verdict.tried, verdict.right, len(cases), isolation=_in_force(report))


def _in_force(report: dict[str, Any]) -> dict[str, Any]:
    return {
        "walls": [name for name in REQUIRED if report["held"].get(name) is True],
        "uid": report.get("uid"),
        "namespaces": report.get("namespaces"),
        "root": report.get("root"),
        "seccomp": report.get("seccomp"),
        "limits": report.get("limits"),
    }


def _judge(messages: list[dict[str, Any]], ended: Ended, cases: Sequence[Case]) -> Verdict:
    if not any(message.get("begun") is True for message in messages):
        broken = next((message["broken"] for message in messages if "broken" in message), "it ended")
        raise unavailable(f"the isolated process failed before it touched the code: {broken}")
    for message in messages:
        if message.get("tried"):
            tried = tuple(_printable(text) for text in message["tried"])
            return Verdict("contained", f"refused before it ran: {'; '.join(tried)}", tried=tried)
        if message.get("syntax"):
            return Verdict("wrong", _printable(message["syntax"]))
        if "broken" in message:  # nothing foreign says so to its advantage: it is never right
            how = f"broke the isolated interpreter: {_printable(message['broken'])}"
            return Verdict("contained", how, tried=(how,))
        if "raised" in message and "call" not in message:
            return _raised(message, "when the code was loaded")
    return _judge_values(messages, ended, cases)


def _judge_values(messages: list[dict[str, Any]], ended: Ended, cases: Sequence[Case]) -> Verdict:
    replies = {message["call"]: message for message in messages if isinstance(message.get("call"), int)}
    right, first_fault = 0, None
    for number, case in enumerate(cases):
        reply = replies.get(number)
        if reply is None:
            break
        shown = f"for {_show_arguments(case)}"
        if "raised" in reply:
            fault = _raised(reply, shown)
            if fault.name == "contained":
                return fault
            first_fault = first_fault or fault
        elif same(reply.get("value"), case.expected):
            right += 1
        else:
            detail = f"gave {_show(reply.get('value'))} {shown}, expected {case.expected!r}"
            first_fault = first_fault or Verdict("wrong", detail)
    if ended.killed_for or not any(message.get("done") is True for message in messages):
        how = ended.killed_for or _how(ended.status)
        return Verdict("contained", f"stopped: {how}", tried=(how,), right=right)
    if first_fault is not None:
        return Verdict(first_fault.name, first_fault.detail, right=right)
    return Verdict("right", f"right for all {len(cases)} cases", right=right)


def _raised(message: dict[str, Any], where: str) -> Verdict:
    name, text = _printable(message.get("raised")), _printable(message.get("text", ""))
    if name in _LIMITS:
        return Verdict("contained", f"{_LIMITS[name]} {where}", tried=(_LIMITS[name],))
    return Verdict("wrong", f"raised {name}{': ' + text if text else ''} {where}")


def _printable(text: Any) -> str:
    """Foreign text on one line, without what a terminal would act on."""
    one_line = " ".join(str(text).split())
    return "".join(letter if letter.isprintable() else "?" for letter in one_line)


def _how(status: int) -> str:
    if status == sandbox_child.EXIT_CPU:
        return "used up its CPU time"
    if status > sandbox_child.EXIT_SIGNAL:
        number = status - sandbox_child.EXIT_SIGNAL
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"ended its process before it had answered (exit status {status})"


def same(described: Any, expected: Any) -> bool:
    """Whether a value as the isolated process describes it equals a known answer, type included.

    Sequences are alike: JSON, in which known answers are written, has one kind only.
    """
    if not isinstance(described, list) or len(described) != 2:  # noqa: PLR2004
        return False
    kind, content = described
    if isinstance(expected, (list, tuple)):
        return kind == "list" and _all_same(content, expected)
    if isinstance(expected, dict):
        return kind == "dict" and _all_same(content, list(expected.items()), pairs=True)
    return kind == type(expected).__name__ and _same_scalar(kind, content, expected)


def _same_scalar(kind: str, content: Any, expected: Any) -> bool:
    try:
        if kind == "int":
            return bool(int(content, 16) == expected)
        if kind == "float":
            return bool(float(content) == expected)
    except (TypeError, ValueError):
        return False
    return type(content) is type(expected) and bool(content == expected)


def _all_same(contents: Any, expected: Sequence[Any], *, pairs: bool = False) -> bool:
    if not isinstance(contents, list) or len(contents) != len(expected):
        return False
    # a pair of a mapping is described as a bare list of two descriptions
    return all(
        _all_same(content, item) if pairs else same(content, item)
        for content, item in zip(contents, expected, strict=True)
    )


def _show(described: Any) -> str:
    if isinstance(described, list) and len(described) == 2:  # noqa: PLR2004
        kind, content = described
        if kind == "other":
            return f"an object of type {content}"
        if kind == "int":
            with contextlib.suppress(TypeError, ValueError):
                return str(int(content, 16))[:80]
        return repr(content)[:80]
    return "nothing readable"


def _show_arguments(case: Case) -> str:
    return "(" + ", ".join(repr(argument)[:60] for argument in case.arguments) + ")"
