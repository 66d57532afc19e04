"""Bringing the old server back: what is started, what counts as proof, and when it is given up."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import (
    ContainerRecipe,
    CutoverStore,
    OldServer,
    ProcessRecipe,
    Record,
    Trigger,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult
from ansible_collections.firstlight.vllm.plugins.module_utils.release import compose, save_state
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import stage
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_settle import commit
from support_hosts import FakeUnits, MadeUpHost, container, process
from support_restore import Cutover


class Answering:
    """A server that answers `/health` and `/v1/models` while it is on."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"data": [{"id": outer.model}]}).encode()
                self.send_response(200 if outer.on else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.on, self.model = False, "old-model"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def old() -> Iterator[Answering]:
    server = Answering()
    yield server
    server.close()


class Case(Cutover):
    """A cutover whose old server answers when its unit is started, and no more when that is stopped."""

    def __init__(self, tmp_path: Path, server: Answering) -> None:
        self.server = server
        host = MadeUpHost(units=FakeUnits(on_start=self._started, on_stop=self._stopped))
        super().__init__(tmp_path, host, server.port, Limits(term_s=1, kill_s=1, free_s=1), no_progress_s=0.6)

    def _started(self, unit: str) -> None:
        self.server.on = self.server.on or unit == "sglang.service"

    def _stopped(self, unit: str) -> None:
        self.server.on = self.server.on and unit != "sglang.service"


@pytest.fixture
def case(tmp_path: Path, old: Answering) -> Case:
    return Case(tmp_path, old)


UNIT = OldServer("unit", "sglang.service", enabled=True)


def test_a_unit_is_started_and_proven_by_the_model_it_names(case: Case) -> None:
    case.record(UNIT)
    result = case.restore()
    assert (result["changed"], result["answering"], result["models"]) == (True, True, ["old-model"])
    assert (case.phase(), case.disarmed) == ("restored", 1)
    assert case.units.did("start") == ["sglang.service"]


def test_restoring_twice_changes_nothing_the_second_time(case: Case) -> None:
    case.record(UNIT)
    case.restore()
    assert case.restore()["changed"] is False
    assert case.units.did("start") == ["sglang.service"]


def test_an_old_server_that_already_serves_is_left_alone(case: Case) -> None:
    case.record(UNIT, "recorded")
    case.units.add("sglang.service")
    case.server.on = True
    assert case.restore()["changed"] is False
    assert case.phase() == "restored"


def test_without_a_cutover_there_is_nothing_to_restore(case: Case) -> None:
    assert case.restore()["changed"] is False
    assert case.units.runner.ran == []


def test_a_committed_cutover_is_undone_only_on_request(case: Case) -> None:
    case.record(UNIT, "committed")
    case.units.add("vllm.service", MainPID="0")
    assert case.restore()["changed"] is False
    result = case.restore(committed=True)
    assert result["changed"]
    assert case.units.units["vllm.service"]["ActiveState"] == "inactive"
    assert case.units.units["vllm.service"]["UnitFileState"] == "disabled"
    assert case.units.units["sglang.service"]["UnitFileState"] == "enabled"


def test_the_new_server_is_stopped_before_the_old_one_starts(case: Case) -> None:
    case.record(UNIT, "started")
    case.units.add("vllm.service", MainPID="0", UnitFileState="disabled")
    case.restore()
    ran = case.units.runner.ran
    assert next(at for at, text in enumerate(ran) if "stop" in text and "vllm" in text) < ran.index(
        "systemctl start --no-block -- sglang.service"
    )


def test_the_new_server_answering_in_its_place_is_no_proof(case: Case) -> None:
    case.record(UNIT, "started")
    case.units.add("vllm.service", MainPID="0")
    case.server.on = True  # the new one, serving a model of the same name
    assert case.restore()["changed"]
    assert case.units.units["sglang.service"]["ActiveState"] == "active"


def test_the_new_server_answering_in_a_processes_place_is_no_proof_either(case: Case) -> None:
    recipe = ProcessRecipe("/v/bin/python", ("python",), "/srv", {}, 1000, 100, (), 0o022, {})
    case.record(OldServer("process", process=recipe), "started")
    case.units.add("vllm.service", MainPID="0")
    case.server.on = True
    case.units.runner.answers["systemd-run"] = lambda argv: case.units.add("firstlight-old-vllm.service") or ""
    assert case.restore()["changed"]
    assert any(text.startswith("systemd-run") for text in case.units.runner.ran)


def test_another_model_at_its_address_is_refused_by_name(case: Case) -> None:
    case.record(UNIT)
    case.server.model = "somebody-else"
    with pytest.raises(FirstlightError, match="it names somebody-else") as caught:
        case.restore()
    assert caught.value.kind == "restore-failed"
    assert (case.phase(), case.disarmed) == ("stopped", 0)


def test_an_old_server_that_dies_is_told_at_once_with_its_last_line(case: Case) -> None:
    case.record(UNIT)
    line = json.dumps({"MESSAGE": "CUDA out of memory", "__CURSOR": "c", "__REALTIME_TIMESTAMP": "1"})
    case.units.runner.answers["journalctl"] = lambda argv: line + "\n"
    died = {"ActiveState": "failed", "ExecMainCode": "1", "ExecMainStatus": "3", "InvocationID": "ab"}

    def die(unit: str) -> None:
        case.units.units[unit].update(died)

    case.units.on_start = die
    with pytest.raises(FirstlightError, match=r"exit status 3.*CUDA out of memory"):
        case.restore(no_progress_s=60.0)


def test_an_old_server_in_a_crash_loop_is_given_up(case: Case) -> None:
    case.record(UNIT)
    case.units.on_start = lambda unit: case.units.units[unit].update(ActiveState="activating", NRestarts="3")
    with pytest.raises(FirstlightError, match="its unit is activating"):
        case.restore(no_progress_s=60.0)


def test_sockets_and_timers_come_back_with_the_unit(case: Case) -> None:
    case.units.add("sglang.timer", ActiveState="inactive", UnitFileState="disabled")
    case.record(replace(UNIT, triggers=(Trigger("sglang.timer", active=True, enabled=True),)))
    case.restore()
    assert case.units.units["sglang.timer"]["ActiveState"] == "active"
    assert case.units.units["sglang.timer"]["UnitFileState"] == "enabled"


def test_a_process_comes_back_as_its_user_with_its_environment_out_of_sight(case: Case) -> None:
    environment = {"HF_TOKEN": "hunter2", "TEXT": 'a "quoted" $value\\', "BASH_FUNC_x%%": "() { :; }"}
    argv = ("python", "-m", "sglang.launch_server", "--chat-template", "$x")
    recipe = ProcessRecipe("/v/bin/python", argv, "/srv", environment, 1000, 100, (100, 44), 0o027, {"NOFILE": "9:9"})
    case.record(OldServer("process", process=recipe))

    def launch(argv: list[str]) -> str:
        case.units.add("firstlight-old-vllm.service")
        case.server.on = True
        return ""

    case.units.runner.answers["systemd-run"] = launch
    assert case.restore()["changed"]
    command = next(text for text in case.units.runner.ran if text.startswith("systemd-run"))
    assert "--uid=1000 --gid=100 --property=SupplementaryGroups=100 44 --property=UMask=0027" in command
    assert command.endswith("-- /v/bin/python -m sglang.launch_server --chat-template $$x")
    assert "hunter2" not in command
    file = case.store.folder / "old-server.env"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text() == 'HF_TOKEN="hunter2"\nTEXT="a \\"quoted\\" \\$value\\\\"\n'


def test_a_process_that_was_never_stopped_is_not_started_twice(case: Case) -> None:
    argv = ("python", "-m", "sglang.launch_server")
    recipe = ProcessRecipe("/v/bin/python", argv, "/srv", {}, 1000, 100, (), 0o022, {})
    case.record(OldServer("process", process=recipe), "recorded")
    case.host.everyone.append(process(700, *argv, uid=1000))
    case.units.runner.answers["systemd-run"] = lambda argv: CommandResult(1, "", "must not be called")
    threading.Timer(0.3, lambda: setattr(case.server, "on", True)).start()
    case.restore()


def test_a_container_is_started_by_its_engine_with_its_restart_policy(case: Case) -> None:
    case.record(OldServer("container", container=ContainerRecipe("docker", "d0", "sglang", "unless-stopped")))
    case.host = MadeUpHost(units=case.units, containers=[container()])

    def begin(argv: list[str]) -> str:
        case.server.on = True
        return ""

    case.host.engine.answers["docker start"] = begin
    case.restore()
    changing = [text for text in case.host.engine.ran if not text.startswith(("docker ps", "docker container"))]
    assert changing == ["docker update --restart=unless-stopped sglang", "docker start sglang"]


def test_an_earlier_release_comes_back_with_its_own_unit_file(case: Case) -> None:
    releases = [compose(config="{}", unit=f"# {name} @RELEASE@\n", environment={}, meta={}) for name in "ab"]
    for release in releases:
        stage(case.layout, release, secrets={}, dropin="", check=False)
    case.layout.unit_file.parent.mkdir()
    case.layout.unit_file.write_text(releases[1].files["unit.service"])
    case.record(OldServer("release", "vllm.service", enabled=True, release=releases[0].id), "started")
    case.units.add("vllm.service", MainPID="0", UnitFileState="disabled")
    case.units.on_start = lambda unit: setattr(case.server, "on", unit == "vllm.service")
    assert case.restore()["changed"]
    assert case.layout.unit_file.read_text() == f"# a {releases[0].id}\n"
    assert case.units.units["vllm.service"]["UnitFileState"] == "enabled"


def test_nothing_served_before_means_nothing_to_start_but_the_new_server_ends(case: Case) -> None:
    case.store.save(Record(OldServer("none"), "stopped"))
    case.units.add("vllm.service", MainPID="0")
    assert case.restore()["changed"]
    assert case.units.units["vllm.service"]["ActiveState"] == "inactive"
    assert case.phase() == "restored"


def test_check_mode_changes_nothing(case: Case) -> None:
    case.record(UNIT)
    before = case.store.path.read_bytes()
    assert case.restore(check=True)["changed"]
    assert case.units.did("start") == []
    assert case.store.path.read_bytes() == before
    assert not (case.store.folder / "cutover.lock").exists()


def test_a_new_server_that_was_already_recorded_as_the_deployment_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.record(UNIT)
    case.units.add("vllm.service", UnitFileState="enabled", MainPID="4")
    state = {"release": "0123456789ab", "inputs": "", "files": {}, "meta": {}, "committed_at": 2000.0}
    save_state(case.layout, state)
    module = "ansible_collections.firstlight.vllm.plugins.module_utils.server_restore.running_release"
    monkeypatch.setattr(module, lambda state: "0123456789ab")
    case.restore()
    assert case.phase() == "committed"
    assert case.units.units["vllm.service"]["ActiveState"] == "active"
    assert case.units.units["sglang.service"]["UnitFileState"] == "disabled"


def test_a_broken_record_of_the_deployment_does_not_keep_the_old_server_away(case: Case) -> None:
    case.record(UNIT)
    case.units.add("vllm.service", MainPID="0")
    case.layout.state.write_text("{")
    result = case.restore()
    assert result["answering"]
    assert "cannot be read" in str(result["warnings"])


def test_going_back_to_the_origin_skips_firstlights_own_releases(case: Case) -> None:
    url = f"http://127.0.0.1:{case.server.port}"
    origin = replace(UNIT, url=url, models=("old-model",))
    case.record(OldServer("release", "vllm.service", release="0123456789ab"), "committed", origin=origin)
    case.units.add("vllm.service", MainPID="0")
    case.restore(committed=True, origin=True)
    assert case.units.units["sglang.service"]["ActiveState"] == "active"


def test_a_release_that_was_removed_gives_way_to_the_server_before_it(case: Case) -> None:
    url = f"http://127.0.0.1:{case.server.port}"
    origin = replace(UNIT, url=url, models=("old-model",))
    case.record(OldServer("release", "vllm.service", release="0123456789ab"), "committed", origin=origin)
    case.restore(committed=True)
    assert case.units.units["sglang.service"]["ActiveState"] == "active"


def test_a_commit_switches_the_boot_from_the_old_server_to_the_new(case: Case) -> None:
    case.units.add("sglang.timer", UnitFileState="enabled")
    case.units.add("vllm.service", UnitFileState="disabled")
    case.record(replace(UNIT, triggers=(Trigger("sglang.timer", active=False, enabled=True),)))
    changed, record, warnings = commit(case.host, case.store, "vllm.service", case._disarm, check=False)
    assert (changed, record.phase, warnings, case.disarmed) == (True, "committed", [], 1)
    states = {unit: told["UnitFileState"] for unit, told in case.units.units.items()}
    assert states == {"sglang.service": "disabled", "sglang.timer": "disabled", "vllm.service": "enabled"}
    enabled_first = [text.split()[1] for text in case.units.runner.ran if "able" in text.split()[1]]
    assert enabled_first == ["enable", "disable", "disable"]
    assert commit(case.host, case.store, "vllm.service", case._disarm, check=False)[0] is False


def test_a_commit_after_the_old_server_was_restored_is_refused(case: Case) -> None:
    case.record(UNIT, "restored", note="nobody committed the cutover in time")
    with pytest.raises(FirstlightError, match="nobody committed") as caught:
        commit(case.host, case.store, "vllm.service", case._disarm, check=False)
    assert caught.value.kind == "cutover-restored"


def test_a_container_that_the_engine_cannot_keep_from_starting_is_told(case: Case) -> None:
    case.record(OldServer("container", container=ContainerRecipe("docker", "d0", "sglang", "always")))
    case.host = MadeUpHost(units=case.units, containers=[container()])
    case.host.engine.answers["docker update"] = lambda argv: CommandResult(1, "", "not supported")
    _, _, warnings = commit(case.host, case.store, "vllm.service", case._disarm, check=False)
    assert "not supported" in warnings[0]


def test_two_runs_at_once_are_kept_apart(case: Case) -> None:
    case.record(UNIT)
    with case.store.lock(), pytest.raises(FirstlightError, match="another run"), contextlib.ExitStack() as stack:
        stack.enter_context(CutoverStore("vllm", case.store.folder.parent).lock(timeout_s=0.2))
