"""Ends what a stopped run leaves behind.

Ansible's workers lead sessions of their own, so neither a signal to ansible-playbook's group nor its death reaches
them. What they all have in common is the environment they inherited.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

MARK = "FIRSTLIGHT_RUN"


def marked(run: str) -> list[int]:
    """The processes of one run, this process excepted; none where the system has no /proc.

    Args:
        run: the value of ``FIRSTLIGHT_RUN`` in their environment.
    """
    mark = f"{MARK}={run}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid() and not _is_shared_connection(pid)]


def kill_marked(run: str) -> None:
    """Kill the processes of one run, and those that they started meanwhile."""
    for _ in range(10):
        pids = marked(run)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _is_shared_connection(pid: int) -> bool:
    """Whether it is ssh's ControlPersist master, which other runs may be using by now."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh: ")
    except OSError:
        return False
