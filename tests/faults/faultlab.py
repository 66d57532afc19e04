"""The host that faults are injected on, the controller that runs playbooks against it, and what both look like."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab" / "lab.sh"
CACHE = Path(os.environ.get("FIRSTLIGHT_LAB", "/var/cache/firstlight-lab"))
INVENTORY = ROOT / "extensions" / "molecule" / "faults" / "inventory"
HOST, CONTAINER = "faults", "firstlight-faults"
OLD, NEW = "sglang", "vllm"  # the units that may serve
OLD_MODEL, NEW_MODEL = "/srv/models/tiny-qwen3", "tiny-qwen3"
PORT = 30000
_FATAL = re.compile(r"^fatal: \[faults\]: (FAILED|UNREACHABLE)! => (\{.*\})$")
_TASK = re.compile(r"^TASK \[(.*)\] \*+$")
_RUN_LIMIT_S = 240.0


@dataclass(frozen=True)
class Failure:
    """One task that failed, as the run told it.

    Attributes:
        task: its name.
        time_s: when the run told it, seconds since the epoch; this machine and the host share one clock.
        message: what the user reads.
        id: of the failure, where the module gives one.
        unreachable: the host could not be reached.
    """

    task: str
    time_s: float
    message: str
    id: str
    unreachable: bool


@dataclass
class Run:
    """A playbook that runs, or has run."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    _reader: threading.Thread | None = None

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    @property
    def ok(self) -> bool:
        return self.process.returncode == 0

    @property
    def changed(self) -> int:
        """Number of tasks that changed the host, of the run's recap."""
        found = re.search(r"^faults +: ok=\d+ +changed=(\d+)", self.text, re.MULTILINE)
        return int(found[1]) if found else -1

    @property
    def failures(self) -> list[Failure]:
        found, task = [], ""
        for time_s, line in self.lines:
            if named := _TASK.match(line):
                task = named[1]
            if fatal := _FATAL.match(line):
                result = json.loads(fatal[2])
                told = result.get("failure") or {}
                name = str(told.get("id") or told.get("kind") or "")
                found.append(Failure(task, time_s, str(result.get("msg")), name, fatal[1] == "UNREACHABLE"))
        return found

    def wait(self) -> Run:
        """Wait for its end."""
        began = time.monotonic()
        try:
            self.process.wait(_RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run was not done after {_RUN_LIMIT_S:.0f} s\n{self.text}") from None
        if self._reader:
            self._reader.join()
        self.seconds += time.monotonic() - began
        return self

    def kill(self) -> None:
        """SIGKILL the controller with all its children, as a crash of its machine does."""
        doomed = family(self.process.pid)
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def read(self) -> None:
        """Take its output in as it comes."""

        def take() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.lines.append((time.time(), line.rstrip("\n")))

        self._reader = threading.Thread(target=take, daemon=True)
        self._reader.start()


def family(pid: int) -> list[int]:
    """A process and all below it; Ansible's workers lead sessions of their own."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text("utf-8", "replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found


class OnHost:
    """A program that runs on the host beside a playbook; its lines are waited for."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [LAB, "exec", HOST, *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def line(self, limit_s: float = 120.0) -> str:
        """Its next line."""
        try:
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise AssertionError(f"{self.process.args!r} said nothing for {limit_s:.0f} s") from None
        assert line is not None, f"{self.process.args!r} ended"
        return line

    def close(self) -> None:
        """Let it end."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Lab:
    """The host, and the controller."""

    def __init__(self) -> None:
        self.serving = ""  # what the last test left in service: OLD, NEW, or "" when that is not known
        self.figures: list[str] = []

    # the controller

    def start(self, playbook: str, variables: Mapping[str, Any] | None = None) -> Run:
        """Start a playbook."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment.update(
            ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"),
            ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"),
            ANSIBLE_CALLBACK_RESULT_FORMAT="json",
            ANSIBLE_HOST_KEY_CHECKING="false",
            # molecule asks for colours, which win over this one, and colours would hide what is read here
            ANSIBLE_FORCE_COLOR="false",
            ANSIBLE_NOCOLOR="1",
        )
        argv = ["ansible-playbook", "-i", str(INVENTORY), str(ROOT / "playbooks" / f"{playbook}.yml")]
        if variables:
            argv += ["-e", json.dumps(dict(variables))]
        run = Run(
            subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        run.read()
        return run

    def play(self, playbook: str, variables: Mapping[str, Any] | None = None) -> Run:
        """Run a playbook to its end."""
        return self.start(playbook, variables).wait()

    def require(self, serving: str) -> None:
        """Have one of the two servers in service before a test begins."""
        if self.serving == serving:
            return
        run = self.play("site") if serving == NEW else self.play("rollback", {"sglang_stop_rollback_origin": True})
        assert run.ok, run.text
        self.check(serving)

    # the host

    def exec(self, *argv: str, check: bool = True) -> str:
        """Run a program on the host, without the network."""
        done = subprocess.run([LAB, "exec", HOST, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def power_loss(self) -> None:
        """Take the host's power away and give it back; returns when it answers again."""
        environment = {**os.environ, "CONTAINERS_CONF": str(CACHE / "containers.conf")}
        for verb in (["kill"], ["start"]):
            subprocess.run(["podman", *verb, CONTAINER], env=environment, check=True, capture_output=True)
        deadline = time.monotonic() + 60
        while self.exec("systemctl", "is-system-running", check=False).strip() not in {"running", "degraded"}:
            assert time.monotonic() < deadline, "the host did not boot within 60 s"
            time.sleep(0.3)

    def stale_server(self) -> str:
        """Start a second server by hand, as the same user, with the same model on the same port; returns its pid."""
        main = next(each for each in self.look()["processes"] if "vllm serve" in each["command"])
        words = ["runuser", "-u", "vllm", "--", "env", "HOME=/srv/stale", "VLLM_CACHE_ROOT=/srv/stale"]
        self.exec("install", "-d", "-o", "vllm", "/srv/stale")
        self.exec("rm", "-f", "/srv/stale/milestones")  # an earlier one's word must not pass for this one's
        command = " ".join([*words, main["command"]])
        self.exec("sh", "-c", f"setsid {command} >/dev/null 2>&1 </dev/null &")
        deadline = time.monotonic() + 30
        while True:
            told = self.exec("sh", "-c", "cat /srv/stale/milestones || true")
            found = re.search(r"^ready (\d+)$", told, re.MULTILINE)
            if found:
                return found[1]
            assert time.monotonic() < deadline, "the stale server did not start"
            time.sleep(0.2)

    def slowness(self) -> float:
        """By how much more this machine is asked for than it has: 1 at rest."""
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def look(self) -> dict[str, Any]:
        """What the host serves, and what is left on it."""
        seen: dict[str, Any] = json.loads(self.exec("python3", "/srv/faults/look.py"))
        return seen

    def until(self, holds: Callable[[dict[str, Any]], Any], limit_s: float = 40.0) -> dict[str, Any]:
        """Look until something holds; returns what was then seen."""
        deadline = time.monotonic() + limit_s
        while True:
            seen = self.look()
            if holds(seen):
                return seen
            assert time.monotonic() < deadline, json.dumps(seen, indent=1)
            time.sleep(0.3)

    def check(self, serving: str) -> dict[str, Any]:
        """The host serves with that server, rightly and alone, and would after a reboot; nothing else is left.

        Returns:
            What was seen.
        """
        self.serving = ""
        seen = self.look()
        told = json.dumps(seen, indent=1)
        other = OLD if serving == NEW else NEW
        assert seen["models"] == [NEW_MODEL if serving == NEW else OLD_MODEL], told
        assert ("def is_prime" if serving == NEW else "stand-in for SGLang") in seen["answer"], told
        own = {process["pid"] for process in seen["processes"] if process["unit"] == f"{serving}.service"}
        assert [process for process in seen["processes"] if process["pid"] not in own] == [], told
        assert seen["listeners"] == [int(seen["units"][serving]["MainPID"])], told
        assert seen["units"][serving]["ActiveState"] == "active", told
        assert seen["units"][serving]["UnitFileState"] == "enabled", told
        assert seen["units"][other]["ActiveState"] == "inactive", told
        assert seen["units"][other]["UnitFileState"] in {"disabled", "masked", ""}, told
        assert seen["phase"] in {"", "committed", "restored"}, told
        assert seen["guard"] == [], told
        if serving == NEW:
            main = next(each for each in seen["processes"] if each["pid"] in seen["listeners"])
            assert f"/releases/{seen['release']}/" in main["command"], told
            assert len(own) == 4, told  # API server, engine, two workers
        self.serving = serving
        return seen

    def converges(self, serving: str = NEW, variables: Mapping[str, Any] | None = None) -> Run:
        """A re-run ends well; one that had to do nothing has changed nothing."""
        run = self.play("site", variables)
        assert run.ok, run.text
        self.check(serving)
        return run

    def figure(self, text: str) -> None:
        """A figure for the report."""
        print(text)
        self.figures.append(text)


def pounce(milestone: str, role: str, *more: str) -> OnHost:
    """Have one process of the next start killed when it passes a milestone."""
    killer = OnHost("python3", "/srv/faults/pounce.py", milestone, role, *more)
    assert killer.line() == "waiting"
    return killer
