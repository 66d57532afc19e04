"""Waits until the stand-in passes a milestone, kills one of its processes with SIGKILL, and tells when.

usage: pounce.py MILESTONE api|engine|worker|none [any] [watched]     prints "PID TIME", seconds since the epoch

It waits for a start that begins after it; with ``any``, one that passed the milestone before will do. With
``watched`` it kills only once firstlight watches the start, which the journal tells.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

MILESTONES = Path("/var/lib/vllm/milestones")
TITLES = {"engine": "VLLM::EngineCore", "worker": "VLLM::Worker_TP1"}
LIMIT_S = 150.0
_FIRST_LOOK_S = 1.5  # from the module's first word to its first look at the processes


def passed(milestone: str, since: float) -> int:
    """Pid of the API server that has passed the milestone since then; 0 if none has."""
    with contextlib.suppress(OSError):
        if MILESTONES.stat().st_mtime >= since:
            found = re.search(rf"^{milestone} (\d+)$", MILESTONES.read_text("utf-8"), re.MULTILINE)
            return int(found[1]) if found else 0
    return 0


def victim(api: int, role: str) -> int:
    """The process to kill; 0 while it cannot be seen."""
    if role not in TITLES:
        return api if role == "api" else 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(TITLES[role].encode()):
                return int(folder.name)
    return 0


def watched(since: float) -> bool:
    """Whether the module that waits for readiness has begun since then."""
    argv = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--since=@{since:.0f}", "--lines=1"]
    found = subprocess.run([*argv, "SYSLOG_IDENTIFIER=ansible-firstlight.vllm.ready"], capture_output=True, check=True)
    return bool(found.stdout.strip())


def main() -> None:
    """Wait, kill, tell."""
    milestone, role = sys.argv[1:3]
    began = time.time()
    since = 0.0 if "any" in sys.argv[3:] else began
    print("waiting", flush=True)
    while time.time() < began + LIMIT_S:
        api = passed(milestone, since)
        if api and ("watched" not in sys.argv[3:] or watched(began)):
            time.sleep(_FIRST_LOOK_S if "watched" in sys.argv[3:] else 0.0)
            pid = victim(api, role)
            if pid:
                os.kill(pid, signal.SIGKILL)
            print(pid, time.time(), flush=True)
            return
        time.sleep(0.02)
    sys.exit(f"nothing passed {milestone} within {LIMIT_S:g} s")


if __name__ == "__main__":
    main()
