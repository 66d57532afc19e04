"""Who runs a playbook, as far as the controller can tell, and whether such a run still lives there."""

from __future__ import annotations

import dataclasses
import getpass
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .processes import PROC, alive, read_process

_ENOUGH = 8  # more runs than that have not been cut off on one host


@dataclass(frozen=True)
class Run:
    """One run of a playbook.

    Attributes:
        id: the same for all of its tasks and hosts.
        who: user, machine and process, for people.
        controller: the machine, its boot and its space of process numbers; empty where that cannot be told.
        pid: the program there that lives as long as the run.
        ticks: that program's start.
    """

    id: str
    who: str = ""
    controller: str = ""
    pid: int = 0
    ticks: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As a module takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Run:
        """Read what :meth:`as_dict` made.

        Raises:
            ValueError, TypeError: it is something else.
        """
        return cls(
            str(told.get("id", "")),
            str(told.get("who", "")),
            str(told.get("controller", "")),
            int(told.get("pid", 0)),
            int(told.get("ticks", 0)),
        )


def this_run(pid: int, proc: Path = PROC) -> Run:
    """Identify the run whose program on this machine is ``pid``; its id follows from the program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    who = f"{user}@{socket.gethostname()} (pid {pid})"
    controller = this_controller(proc)
    program = read_process(pid, proc) if controller else None
    if program is None:
        return Run(secrets.token_hex(8), who)
    identity = f"{controller} {pid} {program.start_ticks}"
    return Run(hashlib.sha256(identity.encode()).hexdigest()[:16], who, controller, pid, program.start_ticks)


def this_controller(proc: Path = PROC) -> str:
    """Identify this machine's processes: two containers on one machine number theirs apart."""
    try:
        booted = (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{booted} {os.readlink(proc / 'self/ns/pid')}"  # noqa: PTH115 -- the link's text is the answer
    except OSError:  # no Linux
        return ""


def is_gone(run: Run) -> bool:
    """Whether a run is known to have ended: it was started on this machine, and its program is not there any more."""
    if not run.controller or run.controller != this_controller() or run.pid <= 0:
        return False
    try:
        os.kill(run.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, which /proc may hide
        pass
    try:
        program = read_process(run.pid)
    except OSError:
        return False
    return program is not None and (program.start_ticks != run.ticks or not alive(program))


def claiming(execute: Callable[[Mapping[str, Any]], dict[str, Any]], pid: int) -> dict[str, Any]:
    """Have a module claim its host, past runs of this machine that were cut off.

    Args:
        execute: runs the module with further arguments; returns its result.
        pid: the program that lives as long as this run.
    """
    run, gone = this_run(pid), list[str]()
    while True:
        answer = execute({"run": run.as_dict(), "gone": list(gone)})
        try:
            holder = Run.of((answer.get("failure") or {}).get("holder") or {})
        except (AttributeError, TypeError, ValueError):  # a host may answer anything
            return answer
        if holder.id in {"", *gone} or len(gone) >= _ENOUGH or not is_gone(holder):
            return answer
        gone.append(holder.id)
