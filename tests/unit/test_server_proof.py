"""Whose socket answers after a restore: real servers that share one port, and who of them counts as the old one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import processes
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import (
    ContainerRecipe,
    OldServer,
    ProcessRecipe,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import look_at_processes
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import Listener, Process
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Found
from ansible_collections.firstlight.vllm.plugins.module_utils.server_proof import examine, is_fronted
from support_hosts import DOCKER_ID, INIT, FakeUnits, MadeUpHost, container, free_port, process
from support_restore import Cutover

SERVE = """\
import http.server, json, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "old-model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
UNIT = OldServer("unit", "sglang.service", enabled=True)


class Shared(MadeUpHost):
    """This machine's processes and sockets; a made-up systemd, in whose units some of them are."""

    def __init__(self, units: FakeUnits) -> None:
        super().__init__(units=units)
        self.groups: dict[int, str] = {}

    def processes(self) -> list[Process]:
        real = [each for each in processes.list_processes() if each.pid != 1]
        return [INIT, *(replace(each, cgroup=self.groups.get(each.pid, "/session.scope")) for each in real)]

    def listeners(self, port: int) -> list[Listener]:
        return processes.listeners(port)


class Case(Cutover):
    """A cutover whose old server answers, or should, on a port that others can share."""

    host: Shared

    def __init__(self, tmp_path: Path) -> None:
        host = Shared(FakeUnits(on_start=self._started))
        super().__init__(tmp_path, host, free_port(), Limits(1, 1, 0.1), no_progress_s=0.5)
        self.running: list[subprocess.Popen[bytes]] = []
        self.loads = True  # whether the old server ever comes to listen

    def argv(self, address: str = "127.0.0.1") -> list[str]:
        return [sys.executable, "-I", "-S", "-c", SERVE, address, str(self.port)]

    def serve(self, address: str = "127.0.0.1") -> int:
        """Start one more server on the port; returns its pid."""
        started = subprocess.Popen(self.argv(address), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.running.append(started)

        def listens() -> bool:
            return any(each.pid == started.pid for each in processes.listeners(self.port))

        assert processes.wait_until(listens, 20)
        return started.pid

    def end(self, pid: int) -> None:
        for each in self.running:
            if each.pid == pid:
                each.kill()
                each.wait()

    def _started(self, unit: str) -> None:
        if unit == "sglang.service" and self.loads:
            self.host.groups[self.serve()] = "/system.slice/sglang.service"


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path)
    yield made
    for each in made.running:
        made.end(each.pid)


def test_the_socket_of_the_restored_unit_is_the_proof(case: Case) -> None:
    case.record(UNIT)
    result = case.restore()
    assert (result["answering"], result["warnings"], case.phase()) == (True, [], "restored")


def test_a_stray_alone_on_the_port_is_no_proof_though_it_names_the_same_model(case: Case) -> None:
    case.record(UNIT)
    case.loads = False
    stray = case.serve()
    with pytest.raises(FirstlightError, match=rf"Another one answers in its place: port .* pid {stray} ") as caught:
        case.restore()
    assert caught.value.kind == "restore-failed"
    assert f"Fix: Ask its owner to stop it (`kill {stray}`)" in caught.value.message
    assert (case.phase(), case.disarmed) == ("stopped", 0)


def test_a_stray_beside_the_old_server_is_named_and_the_old_server_stays(case: Case) -> None:
    case.record(UNIT)
    stray = case.serve()
    with pytest.raises(FirstlightError, match=rf"it is not alone: port .* is held by pid {stray} ") as caught:
        case.restore()
    assert caught.value.kind == "restore-unproven"
    assert f"Fix: Ask its owner to stop it (`kill {stray}`), then run `firstlight rollback`" in caught.value.message
    # nothing undoes the restore: the old server runs, the cutover is over, the guard is gone
    assert case.units.units["sglang.service"]["ActiveState"] == "active"
    assert (case.phase(), case.disarmed) == ("restored", 1)
    assert "not alone" in case.store.load().note  # type: ignore[union-attr]
    assert case.units.did("stop") == []

    told = case.restore(check=True, committed=True)
    assert told["answering"] is False
    assert f"`kill {stray}`" in str(told["warnings"])
    case.end(stray)
    proven = case.restore(committed=True)
    assert (proven["changed"], proven["answering"], proven["warnings"]) == (False, True, [])


def test_a_stray_does_not_pass_for_an_old_server_that_was_never_stopped(case: Case) -> None:
    case.record(UNIT, "recorded")
    case.units.add("sglang.service", ActiveState="active")
    case.loads = False
    case.serve()
    with pytest.raises(FirstlightError, match="Another one answers"):
        case.restore()


def test_a_stray_at_another_address_of_the_host_cannot_have_answered(case: Case) -> None:
    case.record(UNIT)
    case.serve("127.0.0.2")
    assert case.restore()["answering"]


def test_a_process_that_was_never_stopped_is_known_by_its_tree(case: Case) -> None:
    own = case.serve()
    found = processes.read_process(own)
    assert found is not None
    recipe = ProcessRecipe(found.cmdline[0], found.cmdline, "/", {}, found.uid, 0, (), 0o022, {})
    case.record(OldServer("process", process=recipe), "recorded")
    assert case.restore()["reason"] == "the old server serves"


def test_a_process_is_known_by_the_unit_that_it_was_brought_back_in(case: Case) -> None:
    recipe = ProcessRecipe("/v/bin/python", ("python", "-m", "sglang.launch_server"), "/", {}, 0, 0, (), 0o022, {})
    old = case.record(OldServer("process", process=recipe))
    pid = case.serve()
    assert not examine(case.host, old, "firstlight-old-vllm.service").old
    case.host.groups[pid] = "/system.slice/firstlight-old-vllm.service"
    proof = examine(case.host, old, "firstlight-old-vllm.service")
    assert (proof.old, proof.strangers) == (True, ())


def test_the_engines_own_proxy_stands_for_the_container_that_runs(case: Case) -> None:
    old = case.record(OldServer("container", container=ContainerRecipe("docker", DOCKER_ID, "sglang", "no")))
    case.serve()

    def seen(running: bool, holder: Process) -> tuple[bool, int]:
        document = {**container(), "State": {"Running": running}}
        sockets = [Listener(holder.pid, "127.0.0.1", case.port)]
        host = MadeUpHost([holder], listeners=sockets, units=case.units, containers=[document])
        proof = examine(host, old, "")
        return proof.old, len(proof.strangers)

    proxy = process(700, "/usr/bin/docker-proxy", cgroup="/system.slice/docker.service")
    inside = process(701, "python", cgroup=f"/system.slice/docker-{DOCKER_ID}.scope")
    assert seen(True, proxy) == (True, 0)
    assert seen(True, inside) == (True, 0)
    assert seen(False, proxy) == (False, 1)
    assert seen(True, process(702, "python")) == (False, 1)


def test_a_socket_that_systemd_holds_for_the_unit_is_the_units(case: Case) -> None:
    old = case.record(UNIT)
    case.serve()
    case.units.add("sglang.service", TriggeredBy="sglang.socket")
    host = MadeUpHost(listeners=[Listener(1, "127.0.0.1", case.port)], units=case.units)
    assert examine(host, old, "").old


def test_a_reverse_proxy_that_stood_before_the_old_server_is_told_not_taken_for_a_stray(case: Case) -> None:
    proxy = case.serve()
    server = process(700, "python", cgroup="/system.slice/sglang.service")
    url = f"http://127.0.0.1:{case.port}"
    behind = Found("unit", processes=(server,))
    view = look_at_processes(case.host)
    assert is_fronted(case.host, view, behind, url)
    assert not is_fronted(case.host, view, Found("unit", processes=(view.processes[proxy],)), url)
    assert not is_fronted(case.host, view, behind, "")
    case.record(replace(UNIT, fronted=True))
    case.loads = False
    result = case.restore()
    assert result["answering"]
    assert "another program answers" in str(result["warnings"])


def test_the_record_keeps_that_another_program_answers_for_the_server(case: Case) -> None:
    case.record(replace(UNIT, fronted=True))
    record = case.store.load()
    assert record is not None
    assert record.old.fronted
