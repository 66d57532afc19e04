"""Starts the isolated process, holds it to its limits from outside, and refuses it when its walls do not stand."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import sandbox_child, sandbox_gate, sandbox_isolation
from .errors import FirstlightError

#: Without every one of these the code is not run. ``sandbox_isolation.prove`` says what each means.
REQUIRED = ("unprivileged", "no-network", "no-files", "no-new-processes", "no-other-processes", "limits")

_MAX_RESULT_BYTES = 1024 * 1024
_STARTUP_S = 20.0
_BOOTSTRAP = """\
import sys, types, json
config = json.loads(sys.stdin.buffer.readline())
package = types.ModuleType("firstlight_sandbox")
package.__path__ = []
sys.modules["firstlight_sandbox"] = package
for name, source in config.pop("sources"):
    module = types.ModuleType("firstlight_sandbox." + name)
    module.__package__ = "firstlight_sandbox"
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
package.sandbox_child.main(config)
"""


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Attributes:
        cpu_s: CPU seconds; the kernel kills at this point.
        wall_s: seconds of wall clock from sending the code to the last value.
        memory_mib: MiB of address space beyond the bare interpreter's.
    """

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_mib: int = 256


@dataclass
class Ended:
    """How the process ended: its messages, its exit status, and what this process did to it."""

    messages: list[dict[str, Any]]
    status: int
    killed_for: str = ""


@contextlib.contextmanager
def empty_directory() -> Iterator[str]:
    """Make a directory that becomes the isolated process's root, and take it away afterwards."""
    path = tempfile.mkdtemp(prefix="firstlight-sandbox-")
    try:
        Path(path).chmod(0o555)
        yield path
    finally:
        with contextlib.suppress(OSError):
            Path(path).rmdir()


def execute(job: bytes, empty_dir: str, limits: Limits) -> tuple[dict[str, Any], Ended]:
    """Start the process, read what it proves, send the job, collect until it ends."""
    read_fd, write_fd = os.pipe()
    try:
        process = _spawn(write_fd)
    except OSError as error:
        os.close(read_fd)
        raise unavailable(f"the interpreter could not be started: {error}") from None
    finally:
        os.close(write_fd)
    talk = _Talk(process, read_fd)
    try:
        config = {
            "sources": _sources(),
            "result_fd": write_fd,
            "empty_dir": empty_dir,
            "limits": {"cpu_s": limits.cpu_s, "memory_bytes": limits.memory_mib * 1024 * 1024},
        }
        talk.send(json.dumps(config).encode() + b"\n", time.monotonic() + _STARTUP_S)
        first = talk.message(time.monotonic() + _STARTUP_S)
        report = _accept(first, talk)
        deadline = time.monotonic() + limits.wall_s
        talk.send(job, deadline)
        return report, talk.finish(deadline)
    finally:
        talk.close()


def _spawn(write_fd: int) -> subprocess.Popen[bytes]:
    # isolated mode: no site packages, no environment, no current directory on the path
    return subprocess.Popen(  # noqa: S603
        [sys.executable or "/usr/bin/python3", "-I", "-S", "-B", "-c", _BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"LC_ALL": "C.UTF-8"},
        cwd="/",
        close_fds=True,
        pass_fds=(write_fd,),
        start_new_session=True,
    )


def _sources() -> list[tuple[str, str]]:
    # through the import system: on a managed host these files lie in a zip archive
    modules = (sandbox_gate, sandbox_isolation, sandbox_child)
    return [(module.__name__.rpartition(".")[2], inspect.getsource(module)) for module in modules]


def _accept(first: dict[str, Any] | None, talk: _Talk) -> dict[str, Any]:
    """Let only a report pass that says of every required wall that it holds."""
    if first is None or not isinstance(first.get("isolation"), dict):
        said = first.get("broken") if first else None
        raise unavailable(str(said or talk.complaint() or "the isolated process ended without a word"))
    report: dict[str, Any] = first["isolation"]
    held = report.get("held", {})
    missing = [name for name in REQUIRED if held.get(name) is not True]
    if missing:
        raise unavailable(f"these walls do not hold here: {', '.join(missing)}")
    return report


def unavailable(reason: str) -> FirstlightError:
    """The error that says that nothing was run, and what it takes."""
    return FirstlightError(
        f"the code of the answer was not run, because this host cannot isolate it: {reason}.",
        where="sandbox",
        why="Code written by a model runs only as a user without rights, without network, files and new processes, "
        "under limits of CPU and memory.",
        fix="run the play as root (become), on a kernel with seccomp or with namespaces, and with Python's ctypes.",
        kind="sandbox-unavailable",
    )


class _Talk:
    """The pipes to one isolated process, with deadlines and a limit on what it may say."""

    def __init__(self, process: subprocess.Popen[bytes], result_fd: int) -> None:
        self._process, self._result_fd = process, result_fd
        self._buffer, self._total = b"", 0
        self._ended = False
        assert process.stdin is not None  # noqa: S101 - Popen was asked for the pipe
        self._stdin_fd = process.stdin.fileno()
        for descriptor in (self._stdin_fd, result_fd):
            os.set_blocking(descriptor, False)

    def send(self, data: bytes, deadline: float) -> None:
        """Write all of it unless the process is gone or the deadline passes; what follows from that shows later."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin_fd, selectors.EVENT_WRITE)
            while data and selector.select(max(0.0, deadline - time.monotonic())):
                try:
                    data = data[os.write(self._stdin_fd, data) :]
                except BrokenPipeError:
                    return

    def message(self, deadline: float) -> dict[str, Any] | None:
        """The next line as JSON object; None at the end, at the deadline, or beyond the limit of bytes."""
        while b"\n" not in self._buffer:
            if not self._read(deadline):
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def finish(self, deadline: float) -> Ended:
        """Collect messages until the process ends, and see that it does."""
        messages: list[dict[str, Any]] = []
        while (message := self.message(deadline)) is not None:
            messages.append(message)
        reason = ""
        if self._total > _MAX_RESULT_BYTES:
            reason = "flooded its output"
        elif not self._ended:
            reason = "ran longer than its wall-clock limit"
        if not reason:
            try:
                return Ended(messages, self._process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                reason = "ran longer than its wall-clock limit"
        self._kill()
        return Ended(messages, self._process.wait(), reason)

    def complaint(self) -> str:
        """The last line of the process's standard error."""
        self._kill()
        _, errors = self._process.communicate()
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def close(self) -> None:
        """End the process and all it may have started, and close the pipes."""
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None and not stream.closed:
                with contextlib.suppress(OSError):
                    stream.close()
        os.close(self._result_fd)

    def _read(self, deadline: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._result_fd, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return False
        data = os.read(self._result_fd, 65536)
        if not data:
            self._ended = True
            return False
        self._buffer += data
        self._total += len(data)
        return self._total <= _MAX_RESULT_BYTES

    def _kill(self) -> None:
        if self._process.returncode is None:  # not yet waited for, so the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
