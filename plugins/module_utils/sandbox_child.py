"""The isolated process that runs code of an answer: ``sandbox.py`` starts it and judges what it returns.

Two processes of a fresh interpreter: the outer one leaves the namespaces, forks, waits, and says by its exit
status how the inner one ended, which the inner one cannot forge. The inner one confines itself, reports what is in
force, and only then is sent the code. It returns values and nothing but values; whether they are right is not
decided here.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from . import sandbox_gate, sandbox_isolation

#: Exit status of the outer process: how the inner one ended.
EXIT_CPU = 120
EXIT_SIGNAL = 128

_RESULT_FD = 3
_MAX_TEXT, _MAX_BITS, _MAX_ITEMS, _MAX_DEPTH = 4096, 8192, 1024, 6


def main(config: dict[str, Any]) -> None:
    """Run one job and never return.

    Args:
        config: ``limits`` (see :func:`sandbox_isolation.confine`), ``empty_dir``, ``result_fd``.
    """
    os.dup2(config["result_fd"], _RESULT_FD)
    os.closerange(_RESULT_FD + 1, 256)
    namespaces = sandbox_isolation.unshare()
    child = os.fork()
    if child == 0:
        try:
            _inner(config, namespaces)
        except BaseException as error:
            _send({"broken": f"{type(error).__name__}: {error}"[:300]})
        os._exit(0)
    os.close(0)
    os.close(_RESULT_FD)
    _, status, usage = os.wait4(child, 0)
    os._exit(_exit_status(status, usage, config["limits"]["cpu_s"]))


def _exit_status(status: int, usage: resource.struct_rusage, cpu_s: int) -> int:
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    used = usage.ru_utime + usage.ru_stime
    if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU) and used >= cpu_s - 0.2:
        return EXIT_CPU
    return EXIT_SIGNAL + os.WTERMSIG(status)


def _inner(config: dict[str, Any], namespaces: list[str]) -> None:
    os.dup2(1, 2)  # which leads nowhere: what goes wrong is told as a message
    _send({"isolation": sandbox_isolation.confine(config["limits"], config["empty_dir"], namespaces)})
    line = sys.stdin.buffer.readline()
    if not line:  # the judge did not like what it read
        return
    job = json.loads(line)
    os.close(0)  # nothing left to read, and nothing to talk to but the results
    _run(job)


def _run(job: dict[str, Any]) -> None:
    nonce, function = job["nonce"], job["function"]
    scope = sandbox_gate.environment()
    _send({"nonce": nonce, "begun": True})
    tree: Any = job["code"]
    if job["gate"]:
        tree, syntax, tried = sandbox_gate.check(job["code"])
        if tree is None:
            _send({"nonce": nonce, "syntax": syntax, "tried": tried})
            return
    else:  # only tests ask for this: they hold the second wall without the first
        scope = {"__name__": "answer"}
    try:
        # some faults of syntax (a return outside a function) show only here
        program = compile(tree, "answer.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        _send({"nonce": nonce, "syntax": f"not Python: {error}"[:200], "tried": []})
        return
    try:
        exec(program, scope)  # noqa: S102 - running foreign code is what this process is for
    except BaseException as error:
        _send({"nonce": nonce, "raised": _name(error), "text": _text(error)})
        return
    target = scope.get(function)
    if not callable(target):
        _send({"nonce": nonce, "raised": "NameError", "text": f"the code defines no function {function}"})
        return
    for number, arguments in enumerate(job["calls"]):
        _send({"nonce": nonce, "call": number, **_call(target, arguments)})
    _send({"nonce": nonce, "done": True})


def _call(target: Any, arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": _plain(target(*arguments), 0)}
    except BaseException as error:
        return {"raised": _name(error), "text": _text(error)}


def _plain(value: Any, depth: int) -> list[Any]:
    """Describe a value as ``[kind, content]``; exact types only, so that no object's own methods are asked."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return [kind.__name__, repr(value) if kind is float else value]
    if kind is int and value.bit_length() <= _MAX_BITS:
        return ["int", hex(value)]
    if kind is str and len(value) <= _MAX_TEXT:
        return ["str", value]
    if kind in (list, tuple) and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH:
        return ["list", [_plain(item, depth + 1) for item in value]]
    if kind is dict and len(value) <= _MAX_ITEMS and depth < _MAX_DEPTH:
        return ["dict", [[_plain(key, depth + 1), _plain(item, depth + 1)] for key, item in value.items()]]
    return ["other", str(getattr(kind, "__name__", "?"))[:80]]


def _name(error: BaseException) -> str:
    return type(error).__name__[:80]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def _send(message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(_RESULT_FD, data) :]
