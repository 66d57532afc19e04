#!/usr/bin/env python3
"""Stop, guard, commit and restore on a real systemd host; run as root on a test host, standard library only.

    python3 stop_on_systemd.py CHECKOUT

makes units named ``fltest-*`` around the stand-in for SGLang and takes them away again. It is no part of the fast
tests: it needs systemd as PID 1.
"""

# ruff: noqa: PT009 -- unittest, since a test host has nothing else
from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from typing import Any

CHECKOUT = Path(sys.argv.pop(1) if len(sys.argv) > 1 else ".").resolve()
sys.path.insert(0, str(CHECKOUT / ".collections"))

from ansible_collections.firstlight.vllm.plugins.module_utils import processes  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_probe import ask  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_restore import RestoreOptions, restore  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_settle import commit  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.server_stop import StopOptions, stop_server  # noqa: E402

STANDIN = CHECKOUT / "tests" / "standins" / "sglang.py"
PORT = 31900
URL = f"http://127.0.0.1:{PORT}"
UNITS = Path("/etc/systemd/system")
SERVE = f"/usr/bin/python3 {STANDIN} serve --port {PORT}"


def systemctl(*words: str) -> str:
    return subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False).stdout.strip()


def parts() -> list[processes.Process]:
    """What runs of the stand-in."""
    return [
        each
        for each in processes.list_processes()
        if each.state != "Z" and (each.name.startswith("sglang::") or str(STANDIN) in each.cmdline)
    ]


def answering() -> bool:
    return ask(URL).healthy


class StopOnSystemd(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(self.sweep)
        root = Path(self.folder.name)
        root.chmod(0o755)
        self.host = Host()
        self.store = CutoverStore("fltest-new", root / "var")
        self.layout = Layout("fltest-new", root / "etc", root / "var")
        self.guard = Guard(self.store, self.host.systemd, config_dir=root / "etc")
        self.wanted = Wanted(PORT, units=("fltest-old.service",), own_unit="fltest-new.service")

    def sweep(self) -> None:
        for pattern in ("firstlight-guard-fltest-new.*", "fltest-*", "firstlight-old-fltest-new.service"):
            systemctl("kill", "--signal=SIGKILL", pattern)
            systemctl("stop", pattern)
        for part in parts():
            processes.send_signal(part, signal.SIGKILL)
        for path in [*UNITS.glob("fltest-*"), *UNITS.glob("firstlight-guard-fltest*")]:
            systemctl("disable", path.name)
            path.unlink(missing_ok=True)
        systemctl("daemon-reload")
        systemctl("reset-failed")

    def unit(self, name: str, service: str, *, unit: str = "", start: bool = True) -> None:
        install = "[Install]\nWantedBy=multi-user.target\n"
        (UNITS / name).write_text(f"[Unit]\n{unit}\n[Service]\n{service}\n{install}")
        systemctl("daemon-reload")
        systemctl("enable", name)
        if start:
            systemctl("start", name)
            self.assertTrue(processes.wait_until(answering, 20), systemctl("status", name))
            self.assertTrue(processes.wait_until(lambda: len(parts()) >= 4, 10))

    def stop(self, guard_s: float = 0, term_s: float = 10) -> dict[str, Any]:
        options = StopOptions(self.wanted, self.layout, Limits(term_s, 10, 10), guard_s=guard_s)
        result = stop_server(self.host, self.store, self.guard, options, check=False)
        self.assertEqual(parts(), [])
        self.assertEqual(processes.listeners(PORT), [])
        return result

    def restore(self, **more: Any) -> dict[str, Any]:
        options = RestoreOptions(self.wanted, self.layout, Limits(10, 10, 10), no_progress_s=20, **more)
        return restore(self.host, self.store, self.guard.disarm, options)

    def phase(self) -> str:
        record = self.store.load()
        return record.phase if record else ""

    def test_a_unit_that_restarts_itself_stays_down_and_comes_back_on_restore(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE}\nRestart=always\nRestartSec=0")
        result = self.stop(guard_s=600)
        self.assertEqual(result["found"]["kind"], "unit")
        self.assertEqual(len(result["found"]["processes"]), 4)
        self.assertEqual(systemctl("is-enabled", "fltest-old.service"), "enabled")
        self.assertEqual(systemctl("is-active", self.guard.timer), "active")
        self.assertEqual(systemctl("is-enabled", self.guard.service), "enabled")
        self.assertEqual(self.stop()["changed"], False)
        restored = self.restore()
        self.assertTrue(restored["changed"] and restored["answering"])
        self.assertTrue(answering())
        self.assertEqual(self.phase(), "restored")
        self.assertFalse((UNITS / self.guard.timer).exists())
        self.assertEqual(systemctl("is-active", self.guard.timer), "inactive")
        self.assertFalse(self.restore()["changed"])

    def test_orphans_that_a_unit_leaves_in_its_group_end_too(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE} --orphan\nKillMode=process")
        self.assertEqual(len(self.stop()["found"]["processes"]), 4)

    def test_a_unit_that_ignores_sigterm_for_ever_is_killed(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE} --ignore-sigterm\nTimeoutStopSec=infinity")
        self.assertEqual(len(self.stop(term_s=1)["killed"]), 4)
        self.assertTrue(self.restore()["answering"])

    def test_a_timer_that_would_start_it_again_stops_and_comes_back_with_it(self) -> None:
        timer = "[Timer]\nOnActiveSec=1\nOnUnitInactiveSec=1\nAccuracySec=100ms\n[Install]\nWantedBy=timers.target\n"
        (UNITS / "fltest-old.timer").write_text(timer)
        self.unit("fltest-old.service", f"ExecStart={SERVE}")
        systemctl("enable", "--now", "fltest-old.timer")
        self.assertEqual(self.stop()["found"]["triggers"], ["fltest-old.timer"])
        time.sleep(3)
        self.assertEqual(parts(), [])
        self.restore()
        self.assertEqual(systemctl("is-active", "fltest-old.timer"), "active")

    def test_a_unit_that_crashes_over_and_over_is_stopped_between_two_tries(self) -> None:
        self.unit("fltest-old.service", "ExecStart=/bin/false\nRestart=always\nRestartSec=60", start=False)
        systemctl("start", "--no-block", "fltest-old.service")
        state = lambda: systemctl("show", "-p", "SubState", "--value", "fltest-old.service")  # noqa: E731
        self.assertTrue(processes.wait_until(lambda: state() == "auto-restart", 10))
        self.stop()
        self.assertEqual(systemctl("is-active", "fltest-old.service"), "inactive")

    def test_a_process_comes_back_as_it_was_and_can_be_stopped_and_restored_again(self) -> None:
        argv = ["/usr/bin/python3", str(STANDIN), "serve", "--port", str(PORT), "--served-model-name", 'a $x ${y} "%n"']
        environment = {"PATH": "/usr/bin:/bin", "TEXT": 'two\nlines with "quotes", $dollar, `tick` and \\', "EMPTY": ""}
        started = subprocess.Popen(
            argv, cwd="/srv", env=environment, user=65534, group=65534, extra_groups=[44], umask=0o027,
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.assertTrue(processes.wait_until(answering, 20))
        before = Path(f"/proc/{started.pid}/status").read_text().split("Groups:")[1].split("\n")[0]

        threading.Thread(target=started.wait, daemon=True).start()
        for _ in range(2):
            result = self.stop()
            self.assertEqual(result["found"]["kind"], "process")
            restored = self.restore()
            self.assertEqual(restored["models"], ['a $x ${y} "%n"'])
            [main] = [each for each in parts() if str(STANDIN) in each.cmdline]
            self.assertEqual(main.cmdline, tuple(argv))
            self.assertEqual(main.uid, 65534)
            environ = dict(
                word.split("=", 1)
                for word in Path(f"/proc/{main.pid}/environ").read_bytes().decode().split("\0")
                if word
            )
            self.assertEqual({name: environ.get(name) for name in environment}, environment)
            status = Path(f"/proc/{main.pid}/status").read_text()
            self.assertIn("Umask:\t0027", status)
            self.assertIn("44", status.split("Groups:")[1].split("\n")[0].split())
            self.assertIn("44", before.split())
            self.assertEqual(str(Path(f"/proc/{main.pid}/cwd").readlink()), "/srv")
            self.assertEqual(self.store.path.stat().st_mode & 0o777, 0o600)

    def test_the_guard_restores_when_nobody_commits_in_time(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE}")
        self.stop(guard_s=2)
        self.assertTrue(processes.wait_until(answering, 30), self.guard_log())
        self.assertTrue(processes.wait_until(lambda: self.phase() == "restored", 10), self.guard_log())
        self.assertTrue(processes.wait_until(lambda: not (UNITS / self.guard.service).exists(), 10))
        self.assertTrue(processes.wait_until(lambda: "serves again" in self.guard_log(), 10), self.guard_log())

    def test_the_guard_restores_a_plain_process_at_boot(self) -> None:
        started = subprocess.Popen(SERVE.split(), start_new_session=True, stdout=subprocess.DEVNULL)
        self.assertTrue(processes.wait_until(answering, 20))

        threading.Thread(target=started.wait, daemon=True).start()
        self.stop(guard_s=600)
        self.assertIn(self.guard.service, systemctl("list-dependencies", "--plain", "multi-user.target"))
        systemctl("start", self.guard.service)  # what the next boot does
        self.assertTrue(processes.wait_until(lambda: self.phase() == "restored", 30), self.guard_log())
        self.assertTrue(answering())
        self.assertTrue(processes.wait_until(lambda: not (UNITS / self.guard.service).exists(), 10))

    def test_a_commit_leaves_the_boot_to_the_new_server_and_takes_the_guard_away(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE}")
        self.unit("fltest-new.service", f"ExecStart={SERVE}", start=False)
        systemctl("disable", "fltest-new.service")
        self.stop(guard_s=600)
        systemctl("start", "fltest-new.service")
        changed, _, warnings = commit(self.host, self.store, "fltest-new.service", self.guard.disarm, check=False)
        self.assertEqual((changed, warnings), (True, []))
        self.assertEqual(systemctl("is-enabled", "fltest-new.service"), "enabled")
        self.assertEqual(systemctl("is-enabled", "fltest-old.service"), "disabled")
        self.assertFalse((UNITS / self.guard.service).exists())
        self.assertTrue(self.restore(committed=True)["changed"])
        self.assertEqual(systemctl("is-active", "fltest-new.service"), "inactive")
        self.assertEqual(systemctl("is-enabled", "fltest-new.service"), "disabled")
        self.assertEqual(systemctl("is-enabled", "fltest-old.service"), "enabled")
        self.assertTrue(answering())

    def test_a_new_server_that_ignores_sigterm_is_out_of_the_way_in_time(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE}")
        self.stop()
        self.unit("fltest-new.service", f"ExecStart={SERVE} --ignore-sigterm\nTimeoutStopSec=infinity", start=False)
        systemctl("start", "fltest-new.service")
        self.assertTrue(processes.wait_until(answering, 20))
        result = self.restore()
        self.assertTrue(result["changed"])
        self.assertLess(result["seconds"], 20)
        self.assertEqual(systemctl("is-active", "fltest-old.service"), "active")

    def test_a_server_inside_a_unit_of_something_else_leaves_that_unit_running(self) -> None:
        script = (
            f"import subprocess, time; subprocess.Popen('{SERVE}'.split(), start_new_session=True); time.sleep(999)"
        )
        self.unit("fltest-other.service", f'ExecStart=/usr/bin/python3 -c "{script}"\nKillMode=control-group')
        result = self.stop()
        self.assertEqual(result["found"]["kind"], "process")
        self.assertEqual(systemctl("is-active", "fltest-other.service"), "active")

    def test_the_journal_of_one_start_holds_its_lines_and_the_managers_words(self) -> None:
        self.unit("fltest-old.service", f"ExecStart={SERVE}")
        systemctl("restart", "fltest-old.service")
        self.assertTrue(processes.wait_until(answering, 20))
        state = self.host.systemd.show("fltest-old.service")
        self.host.systemd.sync_journal()
        entries, cursor = self.host.systemd.journal_lines(state.invocation_id)
        said = [entry.text for entry in entries if "fired up" in entry.text]
        self.assertEqual(len(said), 1, [entry.text for entry in entries])
        self.assertIn(f"pid {state.main_pid}", said[0])
        self.assertEqual(self.host.systemd.journal_lines(state.invocation_id, cursor)[0], [])
        self.assertIsNotNone(state.exec_main_start)
        self.assertLess(abs((state.exec_main_start or 0) - time.time()), 60)
        self.host.systemd.kill("fltest-old.service", signal.SIGKILL)
        self.assertTrue(processes.wait_until(lambda: not self.host.systemd.show("fltest-old.service").running, 10))
        self.host.systemd.sync_journal()
        words, _ = self.host.systemd.unit_messages("fltest-old.service", state.invocation_id)
        self.assertIn("status=9/KILL", " ".join(entry.text for entry in words))
        dead = self.host.systemd.show("fltest-old.service")
        self.assertEqual((dead.active_state, dead.result, dead.exit_text), ("failed", "signal", "signal 9 (SIGKILL)"))

    def guard_log(self) -> str:
        with contextlib.suppress(OSError):
            return subprocess.run(
                ["journalctl", "-u", self.guard.service, "-o", "cat", "--no-pager"],
                capture_output=True, text=True, check=False,
            ).stdout  # fmt: skip
        return ""


if __name__ == "__main__":
    unittest.main(verbosity=2)
