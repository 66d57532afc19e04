"""Reading off a running process how to start it again: program, arguments, folder, environment, user."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from .cutover import ProcessRecipe
from .errors import FirstlightError
from .processes import PROC, Process

# systemd's name of each limit that servers are commonly given by hand, and the kernel's in /proc/PID/limits
_LIMITS = {
    "NOFILE": "Max open files",
    "MEMLOCK": "Max locked memory",
    "STACK": "Max stack size",
    "CORE": "Max core file size",
}
_CAPTURED = re.compile(r"^(Umask|Gid|Groups):[ \t]*(.*)$", re.MULTILINE)
_SYSTEMDS_OWN = {
    *("INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"),
    *("SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "CREDENTIALS_DIRECTORY"),
}
_NONCHARACTERS = "".join(chr(plane << 16 | code) for plane in range(17) for code in (0xFFFE, 0xFFFF))
_NOT_CARRIED = re.compile(f"[\0\ufeff\ud800-\udfff\ufdd0-\ufdef{_NONCHARACTERS}]")
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
        limits = parse_limits((folder / "limits").read_text("ascii", "replace"))
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


def parse_limits(text: str) -> dict[str, str]:
    """Read ``/proc/PID/limits`` into ``soft:hard`` by systemd's names."""
    found = {}
    for name, words in _LIMITS.items():
        line = re.search(rf"^{words}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
        if line:
            found[name] = f"{line[1]}:{line[2]}".replace("unlimited", "infinity")
    return found


def environment_file(environment: Mapping[str, str]) -> str:
    """Text of a systemd ``EnvironmentFile`` that carries an environment, line breaks in values included.

    Left out is what systemd.exec(5) cannot carry (exported shell functions, values that are not UTF-8), and what
    systemd sets anew for each service.
    """
    carried = {
        name: value
        for name, value in sorted(environment.items())
        if _VARIABLE_NAME.fullmatch(name) and name not in _SYSTEMDS_OWN and not _NOT_CARRIED.search(value)
    }
    quoted = {name: re.sub(r'([\\"$`])', r"\\\1", value) for name, value in carried.items()}
    return "".join(f'{name}="{value}"\n' for name, value in quoted.items())


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


def _not_restorable(process: Process, reason: str) -> FirstlightError:
    return FirstlightError(
        f"the server runs as a plain process that could not be started again: {reason}.",
        where=f"pid {process.pid} ({process.command})",
        why="If the new server failed, the host would be left without one.",
        fix="Give the old server a systemd unit, or set sglang_stop_allow_unrestorable: true.",
        kind="not-restorable",
    )
