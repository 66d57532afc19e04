"""Reading off a running process how to start it again: program, arguments, folder, environment, user."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from .cutover import ProcessRecipe
from .errors import FirstlightError
from .processes import PROC, Process

# systemd's name of each limit that servers are commonly given by hand
_LIMITS = {
    "NOFILE": resource.RLIMIT_NOFILE,
    "MEMLOCK": resource.RLIMIT_MEMLOCK,
    "STACK": resource.RLIMIT_STACK,
    "CORE": resource.RLIMIT_CORE,
}
_CAPTURED = re.compile(r"^(Umask|Gid|Groups):[ \t]*(.*)$", re.MULTILINE)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_recipe(process: Process, proc: Path = PROC) -> ProcessRecipe:
    """Read how a process was started.

    Raises:
        FirstlightError: ``not-restorable``: it cannot be told, so nobody could start the process again.
    """
    folder = proc / str(process.pid)
    try:
        environment = parse_environment((folder / "environ").read_bytes())
        cwd = str((folder / "cwd").readlink())
        status = dict(_CAPTURED.findall((folder / "status").read_text("utf-8", "replace")))
        limits = {
            name: ":".join(_limit(value) for value in resource.prlimit(process.pid, number))
            for name, number in _LIMITS.items()
        }
    except OSError as error:
        raise _not_restorable(process, f"its /proc entry cannot be read ({error.strerror})") from error
    return ProcessRecipe(
        program=_program(process, environment, cwd),
        argv=process.cmdline,
        cwd=cwd,
        environment=environment,
        uid=process.uid,
        gid=int(status["Gid"].split()[0]),
        groups=tuple(int(group) for group in status.get("Groups", "").split()),
        umask=int(status.get("Umask", "0022"), 8),
        limits=limits,
    )


def parse_environment(text: bytes) -> dict[str, str]:
    """Read ``/proc/PID/environ``; of a name set twice the first counts, as it does for the program."""
    found: dict[str, str] = {}
    for entry in text.split(b"\0"):
        name, equals, value = os.fsdecode(entry).partition("=")
        if equals and name:
            found.setdefault(name, value)
    return found


def carried_by_systemd(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what systemd cannot or must not carry: shell functions, its own variables."""
    own = {"INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "SYSTEMD_EXEC_PID"}
    return {
        name: value
        for name, value in environment.items()
        if _VARIABLE_NAME.fullmatch(name) and name not in own and _is_text(value)
    }


def _program(process: Process, environment: Mapping[str, str], cwd: str) -> str:
    first = process.cmdline[0] if process.cmdline else ""
    if "/" in first:
        candidate = os.path.normpath(os.path.join(cwd, first))  # noqa: PTH118 -- links must stay: a venv's python
        found = candidate if os.access(candidate, os.X_OK) else None
    else:
        found = shutil.which(first, path=environment.get("PATH", os.defpath)) if first else None
    if found is None:
        what = f"{first!r} is no program that can be found" if first else "it shows no command line"
        raise _not_restorable(process, f"{what} (a process may change its title)")
    return found


def _limit(value: int) -> str:
    return "infinity" if value == resource.RLIM_INFINITY else str(value)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _not_restorable(process: Process, reason: str) -> FirstlightError:
    return FirstlightError(
        f"the server runs as a plain process that could not be started again: {reason}.",
        where=f"pid {process.pid} ({process.command})",
        why="If the new server failed, the host would be left without one.",
        fix="Give the old server a systemd unit, or set sglang_stop_allow_unrestorable: true.",
        kind="not-restorable",
    )
