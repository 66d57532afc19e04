"""A service manager that keeps its units in memory, with real child processes, and a host laid out in a folder."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import read_process, wait_until
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout, Release, compose
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import JournalEntry, Systemd, UnitState


def cmdline(pid: int) -> tuple[str, ...]:
    process = read_process(pid)
    return process.cmdline if process else ()


SLEEPER = "import sys; sys.stdin.read()"


def layout_in(folder: Path) -> Layout:
    return Layout(
        "vllm",
        config_dir=folder / "etc",
        state_dir=folder / "lib",
        unit_dir=folder / "systemd",
        cache_parent=folder / "cache",
    )


def release_of(layout: Layout, number: int = 0, base_url: str = "http://127.0.0.1:1") -> Release:
    return compose(
        config=f"port: {30000 + number}\n",
        unit=f"[Service]\nExecStart=/v/bin/vllm serve --config {layout.releases}/@RELEASE@/serve.yaml\n",
        environment={"HOME": "/var/lib/vllm"},
        meta={"model": "m", "base_url": base_url},
    )


def unit_state(**changes: Any) -> UnitState:
    values: dict[str, Any] = {
        "unit": "vllm.service", "load_state": "loaded", "active_state": "inactive", "sub_state": "dead",
        "result": "success", "main_pid": 0, "invocation_id": "", "exec_main_status": 0, "exec_main_code": "",
        "control_group": "", "n_restarts": 0, "unit_file_state": "disabled", "fragment_path": "",
        "need_daemon_reload": False, "exec_main_start": None, "exec_main_exit": None, "active_enter": None,
        "triggered_by": (), "exec_start": "", "restart": "always", "job": 0,
    }  # fmt: skip
    return UnitState(**{**values, **changes})


@dataclass
class FakeSystemd(Systemd):
    """One unit, ``vllm.service``, whose unit file lies where the layout says. ``calls`` is what was asked of it."""

    layout: Layout
    calls: list[str] = field(default_factory=list)
    masked: bool = False
    enabled: bool = False
    refuses_to_start: bool = False
    child: subprocess.Popen[bytes] | None = None
    started_at: float | None = None
    oom: list[str] = field(default_factory=list)
    journal: list[JournalEntry] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    starts: int = 0

    def show(self, unit: str) -> UnitState:
        there = self.masked or self.layout.unit_file.exists()
        up = self.child is not None and self.child.poll() is None
        values = {
            "load_state": "masked" if self.masked else "loaded" if there else "not-found",
            "active_state": "active" if up else "inactive",
            "main_pid": self.child.pid if up and self.child else 0,
            "invocation_id": f"invocation-{self.starts}",
            "exec_main_start": self.started_at,
            "unit_file_state": "enabled" if self.enabled else "disabled",
        }
        return unit_state(**{**values, **self.overrides})

    def restart(self, unit: str, **_: Any) -> None:
        self.calls.append("restart")
        self._end()
        if self.refuses_to_start:
            raise FirstlightError("it failed.", where=unit, fix="read the journal.", kind="systemctl-failed")
        self.run_unit_file()

    def run_unit_file(self) -> None:
        """Start the process that the unit file in force names."""
        found = re.search(r"^ExecStart=(.*)$", self.layout.unit_file.read_text(), re.MULTILINE)
        assert found
        self.child = subprocess.Popen([sys.executable, "-c", SLEEPER, *found.group(1).split()], stdin=subprocess.PIPE)
        # the kernel shows a new program's arguments a moment after it has closed the old one's files
        assert wait_until(lambda: self.child is not None and bool(cmdline(self.child.pid)), 5.0, 0.001)
        self.starts += 1
        self.started_at = time.time()

    def stop(self, unit: str, **_: Any) -> None:
        self.calls.append("stop")
        self._end()

    def enable(self, unit: str) -> None:
        self.calls.append("enable")
        self.enabled = True

    def disable(self, unit: str) -> None:
        self.calls.append("disable")
        self.enabled = False

    def daemon_reload(self) -> None:
        self.calls.append("daemon-reload")

    def reset_failed(self, unit: str) -> None:
        self.calls.append("reset-failed")

    def oom_kills(self, unit: str, since_s: float) -> list[str]:
        return self.oom

    def sync_journal(self) -> None:
        pass

    def journal_lines(
        self, invocation_id: str, after_cursor: str | None = None, *, unit: str | None = None
    ) -> tuple[list[JournalEntry], str | None]:
        fresh = self.journal[int(after_cursor or 0) :]
        return fresh, str(len(self.journal))

    def _end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None
