"""How long after the fact a dead server, and a ready one, is told on the host; as ratios to what is promised.

Run it as ``python tests/bench/bench_ready.py``; it prints one JSON object, and fails when a limit is broken. No root,
no systemd, no vLLM: the server is the stand-in for vLLM with its real tree of processes, log and port. systemctl and
journalctl are played, each taking as long as they do. Measured is the wait of the module `firstlight.vllm.ready`
within one slice; between two slices stands what a task costs over the connection.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
STANDIN = TESTS / "standins" / "vllm"
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / ".collections"), str(TESTS / "unit"), str(STANDIN)]

from ansible_collections.firstlight.vllm.plugins.module_utils.openai_api import Server  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import (  # noqa: E402
    descendants,
    list_processes,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.readiness import (  # noqa: E402
    Expected,
    Ready,
    ServerDiedError,
    Waiter,
    Watch,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import JournalEntry, UnitState  # noqa: E402
from build import start_log  # noqa: E402
from support_release import FakeSystemd, layout_in  # noqa: E402

DEAD_WITHIN_S = 1.0
READY_WITHIN_S = 0.25
ROUNDS = 8
PROGRAM_S = 0.02  # what one call of systemctl or journalctl takes
SPREAD_S = 0.6  # a death falls at any point between two looks
PATIENCE_S = 60.0


@dataclass
class Host(FakeSystemd):
    """A service manager whose journal is what the server wrote, and whose answers take their time."""

    log: Path = Path()

    def show(self, unit: str) -> UnitState:
        time.sleep(PROGRAM_S)
        return super().show(unit)

    def journal_lines(
        self, invocation_id: str, after_cursor: str | None = None, *, unit: str | None = None
    ) -> tuple[list[JournalEntry], str | None]:
        time.sleep(PROGRAM_S)
        lines = self.log.read_text("utf-8").splitlines()
        fresh = lines[int(after_cursor or 0) :]
        return [JournalEntry(time.time(), 1, line, "") for line in fresh], str(len(lines))


@dataclass
class Start:
    """One start of the stand-in."""

    api: int
    home: Path
    waiter: Waiter

    def reached(self, milestone: str) -> bool:
        """Whether the server has passed a milestone."""
        file = self.home / "milestones"
        return file.exists() and f"{milestone} " in file.read_text("utf-8")

    def watch(self) -> Ready | None:
        """Wait as the module does, in one slice."""
        return self.waiter.watch(Watch(), slice_s=PATIENCE_S, stall_s=PATIENCE_S)


def free_port() -> int:
    """A TCP port that nobody holds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(hold: str) -> Iterator[Start]:
    """Start the server in a folder of its own; ``hold`` is a milestone and for how many seconds it stays there."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        shutil.copy(STANDIN / "vllm_standin.py", folder)
        (folder / "vllm_standin.log").write_text(start_log(), "utf-8")
        (folder / "config.json").write_text("{}", "utf-8")
        (folder / "serve.yaml").write_text(
            f"model: /m\nserved-model-name: m\nport: {port}\ntensor-parallel-size: 2\n"
            f"speculative-config:\n  model: {folder}\n",
            "utf-8",
        )
        log = folder / "journal"
        host = Host(layout_in(folder), log=log, starts=1, started_at=time.time())
        host.layout.unit_file.parent.mkdir()
        host.layout.unit_file.write_text("[Service]\n", "utf-8")
        with log.open("wb") as out:
            host.child = subprocess.Popen(
                [sys.executable, folder / "vllm_standin.py", "serve", "--config", folder / "serve.yaml"],
                env={**os.environ, "HOME": name, "VLLM_CACHE_ROOT": name, "STANDIN_HOLD": hold},
                stdout=out,
                stderr=out,
            )
        server = Server(f"http://127.0.0.1:{port}")
        try:
            yield Start(host.child.pid, folder, Waiter(Expected("vllm.service", port, "m"), server, host))
        finally:
            tree = [host.child.pid, *(each.pid for each in descendants(host.child.pid, list_processes()))]
            for pid in tree:
                if pid != host.child.pid or host.child.poll() is None:
                    os.kill(pid, signal.SIGKILL)
            host.child.wait()


def titled(api: int, title: str) -> int:
    """The process of a server that bears a title; the API server itself for none."""
    if not title:
        return api
    return next(each.pid for each in descendants(api, list_processes()) if each.command.startswith(title))


def death(title: str) -> float:
    """Seconds from a kill -9 while the model loads to the moment at which it is told."""
    with started(f"loading:{PATIENCE_S}") as start:
        killed: list[float] = []

        def kill() -> None:
            while not start.reached("loading"):
                time.sleep(0.01)
            time.sleep(0.5 + random.uniform(0, SPREAD_S))
            pid = titled(start.api, title)
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            start.watch()
        except ServerDiedError:
            told = time.monotonic()
        else:
            raise SystemExit(f"the death of {title or 'the API server'} was not noticed")
        killer.join()
        return told - killed[0]


def readiness() -> float:
    """Seconds from the moment at which the server begins to answer to the one at which it counts as ready."""
    with started(f"capturing:{random.uniform(0.2, 0.2 + SPREAD_S):.3f}") as start:
        if start.watch() is None:
            raise SystemExit("the server did not become ready")
        told = time.time()
        if not start.reached("ready"):  # the page answers a moment before the milestone is written
            time.sleep(0.05)
        return told - (start.home / "milestones").stat().st_mtime


def figures(measure: Callable[[], float], limit_s: float) -> dict[str, Any]:
    """Measure again and again; the slowest of all is held against the limit."""
    seconds = [measure() for _ in range(ROUNDS)]
    slowest = max(seconds)
    return {
        "median_s": round(statistics.median(seconds), 3),
        "slowest_s": round(slowest, 3),
        "limit_s": limit_s,
        "ratio_to_limit": round(slowest / limit_s, 2),
        "kept": slowest <= limit_s,
    }


def main() -> int:
    """Measure, print, judge."""
    result = {
        "ready": figures(readiness, READY_WITHIN_S),
        "dead_api_server": figures(lambda: death(""), DEAD_WITHIN_S),
        "dead_engine": figures(lambda: death("VLLM::EngineCore"), DEAD_WITHIN_S),
        "dead_worker": figures(lambda: death("VLLM::Worker_TP1"), DEAD_WITHIN_S),
    }
    print(json.dumps(result, indent=1))
    return 0 if all(each["kept"] for each in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
