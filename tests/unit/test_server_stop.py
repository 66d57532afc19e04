"""Stopping real processes: launchers that die, that ignore SIGTERM, that leave orphans; and the record they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import processes
from ansible_collections.firstlight.vllm.plugins.module_utils.containers import Engines
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.gpus import Gpu, GpuHolder
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import Process
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted
from ansible_collections.firstlight.vllm.plugins.module_utils.server_stop import StopOptions, stop_server
from support_hosts import FakeUnits, free_port, gpu

STANDIN = Path(__file__).parents[1] / "standins" / "sglang.py"


class RealHost(Host):
    """This machine, without systemd and containers; GPUs are made up."""

    def __init__(self, units: FakeUnits | None = None) -> None:
        self.units = units or FakeUnits()
        super().__init__(self.units.systemd, Engines(which=lambda name: None))
        self.holders: list[GpuHolder] = []
        self.used_mib: list[int] = []

    def has_systemd(self) -> bool:
        return False

    def gpus(self) -> list[Gpu]:
        used = self.used_mib.pop(0) if self.used_mib else 0
        return [gpu(uuid="GPU-a", memory_used_mib=used)] if self.holders or used else []

    def gpu_holders(self) -> list[GpuHolder]:
        return [each for each in self.holders if processes.read_process(each.pid)]


class Server:
    """A running stand-in with all that it started."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        argv = [sys.executable, "-I", "-S", str(STANDIN), "serve", "--port", str(self.port), *options]
        environment = {**os.environ, "STANDIN_SECRET": "hunter2\nsecond line"}
        self.launcher = subprocess.Popen(
            argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        assert processes.wait_until(lambda: len(self.parts()) == 4 and bool(processes.listeners(self.port)), 20)

    def parts(self) -> list[Process]:
        """Launcher, two schedulers and detokenizer, once they have their titles."""
        session = self.launcher.pid
        mine = [each for each in processes.list_processes() if each.session == session and each.state != "Z"]
        return [each for each in mine if each.pid == session or each.name.startswith("sglang::")]

    def kill(self) -> None:
        for part in self.parts():
            with contextlib.suppress(ProcessLookupError):
                os.kill(part.pid, signal.SIGKILL)
        self.launcher.wait(10)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[Server]:
    server = Server(*options)
    # a zombie's parent must reap it; a test's parent does so only when asked
    previous = signal.signal(signal.SIGCHLD, lambda number, frame: server.launcher.poll())
    try:
        yield server
    finally:
        server.kill()
        signal.signal(signal.SIGCHLD, previous)


def options_for(port: int, tmp_path: Path, **more: object) -> StopOptions:
    wanted = Wanted(port, units=())
    limits = Limits(term_s=8, kill_s=5, free_s=5)
    options = StopOptions(wanted, Layout("vllm", tmp_path / "etc", tmp_path / "var", tmp_path), limits, guard_s=0)
    return replace(options, **more)  # type: ignore[arg-type]


def stop(host: Host, options: StopOptions, tmp_path: Path, *, check: bool = False) -> dict[str, object]:
    store = CutoverStore("vllm", tmp_path / "var")
    guard = Guard(store, host.systemd, unit_dir=tmp_path / "units")
    return stop_server(host, store, guard, options, check=check)


def test_the_whole_tree_ends_and_the_port_is_free(tmp_path: Path) -> None:
    with serving() as server:
        result = stop(RealHost(), options_for(server.port, tmp_path), tmp_path)
        assert server.parts() == []
        assert processes.listeners(server.port) == []
        assert result["changed"]
        assert result["killed"] == []
        assert len(result["found"]["processes"]) == 4  # type: ignore[index]


def test_orphans_adopted_by_init_end_with_their_launcher(tmp_path: Path) -> None:
    with serving("--orphan") as server:
        orphans = [part for part in server.parts() if part.pid != server.launcher.pid]
        assert {part.ppid for part in orphans}.isdisjoint({server.launcher.pid})
        result = stop(RealHost(), options_for(server.port, tmp_path), tmp_path)
        assert server.parts() == []
        told = {each["pid"]: each["orphan"] for each in result["found"]["processes"]}  # type: ignore[index]
        assert told == {server.launcher.pid: False, **{part.pid: True for part in orphans}}


def test_orphans_whose_launcher_was_killed_are_ended_by_the_gpu_memory_they_hold(tmp_path: Path) -> None:
    with serving("--ignore-sigterm") as server:
        scheduler = next(part for part in server.parts() if part.cmdline[0] == "sglang::scheduler_TP0")
        server.launcher.kill()
        server.launcher.wait(10)
        host = RealHost()
        host.holders = [GpuHolder(scheduler.pid, "GPU-a", 90000)]
        options = options_for(server.port, tmp_path, limits=Limits(term_s=0.5, kill_s=5, free_s=5))
        result = stop(host, options, tmp_path)
        assert server.parts() == []
        assert result["found"]["kind"] == "none"  # type: ignore[index]
        assert result["found"]["how"] == "GPU memory"  # type: ignore[index]


def test_a_server_that_ignores_sigterm_is_killed_and_told(tmp_path: Path) -> None:
    with serving("--ignore-sigterm") as server:
        parts = {part.pid for part in server.parts()}
        options = options_for(server.port, tmp_path, limits=Limits(term_s=0.5, kill_s=5, free_s=5))
        result = stop(RealHost(), options, tmp_path)
        assert set(result["killed"]) == parts  # type: ignore[call-overload]
        assert server.parts() == []


@pytest.mark.slow
def test_a_server_that_takes_its_time_is_not_killed(tmp_path: Path) -> None:
    with serving("--hold-on-exit", "1") as server:
        result = stop(RealHost(), options_for(server.port, tmp_path), tmp_path)
        assert result["killed"] == []
        assert 1.0 <= float(result["seconds"]) < 4.0  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_has_nothing_to_do_with_the_server_lives_on(tmp_path: Path) -> None:
    with serving() as server:
        # of the test's own session, as a program in another terminal tab is
        bystander = subprocess.Popen(["sleep", "60"])
        try:
            stop(RealHost(), options_for(server.port, tmp_path), tmp_path)
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()


def test_check_mode_tells_what_would_be_stopped_and_changes_nothing(tmp_path: Path) -> None:
    with serving() as server:
        result = stop(RealHost(), options_for(server.port, tmp_path), tmp_path, check=True)
        assert result["changed"]
        assert len(result["found"]["processes"]) == 4  # type: ignore[index]
        assert len(server.parts()) == 4
        assert not (tmp_path / "var").exists()


def test_nothing_is_stopped_when_a_stranger_holds_the_gpu(tmp_path: Path) -> None:
    with serving() as server:
        host = RealHost()
        host.holders = [GpuHolder(os.getpid(), "GPU-a", 5000)]
        with pytest.raises(FirstlightError, match=f"pid {os.getpid()}") as caught:
            stop(host, options_for(server.port, tmp_path), tmp_path)
        assert caught.value.kind == "foreign-holder"
        assert len(server.parts()) == 4
        assert not CutoverStore("vllm", tmp_path / "var").path.exists()


def test_a_stranger_on_the_port_is_neither_stopped_nor_recorded(tmp_path: Path) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        with pytest.raises(FirstlightError, match=f"pid {os.getpid()}"):
            stop(RealHost(), options_for(mine.getsockname()[1], tmp_path), tmp_path)


def test_a_host_without_a_server_is_left_as_it_is(tmp_path: Path) -> None:
    result = stop(RealHost(), options_for(free_port(), tmp_path), tmp_path)
    assert (result["changed"], result["phase"]) == (False, "stopped")
    assert result["down_since_s"] is None


def test_the_record_can_start_the_server_again_and_only_root_can_read_it(tmp_path: Path) -> None:
    with serving("--api-key", "s3cret", "--served-model-name", "old") as server:
        result = stop(RealHost(), options_for(server.port, tmp_path), tmp_path)
        store = CutoverStore("vllm", tmp_path / "var")
        record = store.load()
        assert record is not None
        assert record.old.process is not None
        assert record.old.process.argv[1:5] == ("-I", "-S", str(STANDIN), "serve")
        assert record.old.process.environment["STANDIN_SECRET"] == "hunter2\nsecond line"
        assert record.old.process.cwd == str(Path.cwd())
        assert record.old.models == ("old",)
        assert record.old.url == f"http://127.0.0.1:{server.port}"
        assert store.path.stat().st_mode & 0o777 == 0o600
        assert "hunter2" not in str(result)
        assert "s3cret" not in str(result)


def test_a_run_after_a_cut_off_one_keeps_the_record(tmp_path: Path) -> None:
    with serving() as server:
        options = options_for(server.port, tmp_path)
        first = stop(RealHost(), options, tmp_path)
        again = stop(RealHost(), options, tmp_path)
        assert (again["changed"], again["down_since_s"]) == (False, first["down_since_s"])
        record = CutoverStore("vllm", tmp_path / "var").load()
        assert record is not None
        assert record.old.kind == "process"


@pytest.mark.slow
def test_a_run_that_was_cut_off_before_the_stop_stops_and_keeps_what_it_knew(tmp_path: Path) -> None:
    with serving() as server:
        options = options_for(server.port, tmp_path)
        stop(RealHost(), options, tmp_path)
        store = CutoverStore("vllm", tmp_path / "var")
        store.advance("recorded")
    with serving() as revived:
        result = stop(RealHost(), options_for(revived.port, tmp_path), tmp_path)
        assert result["changed"]
        record = store.load()
        assert record is not None
        assert record.phase == "stopped"
        assert str(revived.port) in " ".join(record.old.process.argv if record.old.process else ())


def test_it_waits_until_gpu_memory_is_free_and_not_longer(tmp_path: Path) -> None:
    host = RealHost()
    host.used_mib = [90000, 90000, 60000, 30000, 100]
    began = time.monotonic()
    stop(host, options_for(free_port(), tmp_path), tmp_path)
    assert 0.2 <= time.monotonic() - began < 2.0


def test_gpu_memory_that_nobody_holds_and_that_stays_is_told_with_its_amount(tmp_path: Path) -> None:
    host = RealHost()
    host.used_mib = [90000] * 500
    options = options_for(free_port(), tmp_path, limits=Limits(term_s=1, kill_s=1, free_s=0.3))
    with pytest.raises(FirstlightError, match="GPU 0: 90000 of 143771 MiB") as caught:
        stop(host, options, tmp_path)
    assert caught.value.kind == "gpu-memory-stuck"


@pytest.mark.slow
def test_a_server_that_something_starts_again_is_told_with_its_parent(tmp_path: Path) -> None:
    loop = f'while :; do "$0" -I -S {STANDIN} serve --port "$1" --tp-size 0; done'
    port = free_port()
    keeper = subprocess.Popen(["sh", "-c", loop, sys.executable, str(port)], start_new_session=True)
    try:
        assert processes.wait_until(lambda: bool(processes.listeners(port)), 20)
        options = options_for(port, tmp_path, limits=Limits(term_s=5, kill_s=5, free_s=2))
        with pytest.raises(FirstlightError) as caught:
            stop(RealHost(), options, tmp_path)
        assert caught.value.kind == "server-came-back"
        assert f"its parent is pid {keeper.pid}" in caught.value.what
    finally:
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


@pytest.mark.slow
def test_a_process_that_hides_its_command_is_not_stopped_unless_its_loss_is_accepted(tmp_path: Path) -> None:
    with serving("--orphan") as server:
        host = RealHost()
        options = options_for(server.port, tmp_path)
        found_by = replace(options, wanted=replace(options.wanted, patterns=("sglang::detokenizer",)))
        server.launcher.kill()
        server.launcher.wait(10)
        holder = next(part for part in server.parts() if "detokenizer" in part.cmdline[0])
        hold = [processes.Listener(holder.pid, "127.0.0.1", server.port)]
        host.listeners = lambda port: hold if processes.alive(holder) else []  # type: ignore[method-assign]
        with pytest.raises(FirstlightError, match="change its title") as caught:
            stop(host, found_by, tmp_path)
        assert caught.value.kind == "not-restorable"
        assert processes.alive(holder)
        result = stop(host, replace(found_by, allow_unrestorable=True), tmp_path)
        assert not processes.alive(holder)
        assert "cannot be brought back" in str(result["warnings"])
