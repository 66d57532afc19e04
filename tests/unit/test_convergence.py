"""Is the host already what is asked for: each difference gives its own reason, and none gives yes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.convergence import Convergence, judge, unfinished_cutover
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore, OldServer, Phase, Record
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout, Release
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import commit, stage, start
from support_release import FakeSystemd, layout_in, release_of

KEY = "0123456789abcdef"


@dataclass
class Answers:
    """What the server says; a test changes it."""

    health: int = 200
    models: int = 200
    model: str = "m"
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def base_url(answers: Answers) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.keys.append(self.headers.get("Authorization"))
            body = json.dumps({"data": [{"id": answers.model}]}) if self.path == "/v1/models" else ""
            self.send_response(answers.models if self.path == "/v1/models" else answers.health)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclass
class Host:
    """A host with a committed, serving release and one watched file."""

    layout: Layout
    systemd: FakeSystemd
    release: Release
    watched: Path

    def judge(self, inputs: str = "i", key: str = KEY) -> Convergence:
        return judge(
            self.layout, inputs=inputs, environment_secrets={"VLLM_API_KEY": key}, api_key=key, systemd=self.systemd
        )


@pytest.fixture
def host(tmp_path: Path, base_url: str) -> Iterator[Host]:
    layout = layout_in(tmp_path)
    systemd = FakeSystemd(layout)
    watched = tmp_path / "config.json"
    watched.write_text("{}")
    release = release_of(layout, base_url=base_url)
    stage(layout, release, secrets={"VLLM_API_KEY": KEY}, dropin="[Service]\n", check=False)
    start(layout, release, systemd, check=False)
    commit(
        layout, release, systemd, inputs="i", watched=[str(watched)], report={"answer": "prime"}, keep=3, check=False
    )
    yield Host(layout, systemd, release, watched)
    systemd.stop("vllm.service")


def test_a_host_that_is_what_is_asked_for_has_converged_and_tells_its_report(host: Host, answers: Answers) -> None:
    assert host.judge() == Convergence(True, "", {"answer": "prime"})
    assert f"Bearer {KEY}" in answers.keys


def test_a_blank_host_has_not(tmp_path: Path) -> None:
    layout = layout_in(tmp_path / "blank")
    found = judge(layout, inputs="i", environment_secrets={}, api_key="", systemd=FakeSystemd(layout))
    assert (found.converged, found.reason) == (False, "nothing was deployed here yet")


def take_drop_in_away(host: Host) -> None:
    host.layout.dropin.unlink()


def record(host: Host, phase: Phase) -> None:
    CutoverStore("vllm", host.layout.state_dir).save(Record(OldServer("none"), phase))


def cut_off(host: Host) -> None:
    record(host, "stopped")


def start_elsewhere(host: Host) -> None:
    other = release_of(host.layout, 1)
    stage(host.layout, other, secrets={"VLLM_API_KEY": KEY}, dropin="[Service]\n", check=False)
    text = host.layout.unit_file.read_text()
    host.layout.unit_file.write_text(text.replace(host.release.id, other.id))
    host.systemd.restart("vllm.service")
    host.layout.unit_file.write_text(text)


def touch_secrets(host: Host) -> None:
    moment = host.layout.secrets.stat().st_mtime + 60
    os.utime(host.layout.secrets, (moment, moment))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h.watched.write_text("{ }"), "config.json changed on the host"),
        (lambda h: h.watched.unlink(), "config.json changed on the host"),
        (lambda h: h.layout.unit_file.write_text("[Service]\n"), "vllm.service changed on the host"),
        (lambda h: (h.layout.releases / h.release.id / "serve.yaml").write_text("port: 1\n"), "serve.yaml changed"),
        (take_drop_in_away, "50-firstlight.conf changed on the host"),
        (cut_off, "an earlier run was cut off in the middle"),
        (lambda h: h.systemd.disable(""), "vllm.service is not enabled"),
        (lambda h: h.systemd.stop(""), "does not run release"),
        (lambda h: h.systemd.overrides.update(active_state="failed"), "does not run release"),
        (start_elsewhere, "does not run release"),
        (touch_secrets, "does not run release"),
    ],
)
def test_each_difference_on_the_host_is_told(host: Host, change: Callable[[Host], object], reason: str) -> None:
    change(host)
    found = host.judge()
    assert not found.converged
    assert reason in found.reason
    assert found.report == {}


def test_other_variables_and_another_key_are_told(host: Host) -> None:
    assert host.judge(inputs="j").reason == "the variables or firstlight itself changed"
    # the file of secrets is watched by its digest, and so is what it should hold
    assert host.judge(key="fedcba9876543210").reason == "a secret changed"
    assert host.judge(key="").reason == "a secret changed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"health": 503}, "/health does not say 200"),
        ({"model": "other"}, "does not serve 'm'"),
        ({"models": 401}, "401"),
        ({"models": 500}, "500"),
    ],
)
def test_a_server_that_does_not_answer_right_is_told(
    host: Host, answers: Answers, change: dict[str, Any], reason: str
) -> None:
    vars(answers).update(change)
    found = host.judge()
    assert not found.converged
    assert reason in found.reason


def test_a_server_that_does_not_answer_at_all_is_told(tmp_path: Path) -> None:
    layout = layout_in(tmp_path)
    systemd = FakeSystemd(layout)
    release = release_of(layout)
    stage(layout, release, secrets={}, dropin="", check=False)
    start(layout, release, systemd, check=False)
    commit(layout, release, systemd, inputs="i", watched=[], report={}, keep=3, check=False)
    try:
        found = judge(layout, inputs="i", environment_secrets={}, api_key="", systemd=systemd)
    finally:
        systemd.stop("vllm.service")
    assert found.reason == "the server's /health does not say 200"


def test_a_broken_record_is_an_error_and_not_a_blank_host(host: Host) -> None:
    host.layout.state.write_text("[]")
    with pytest.raises(FirstlightError) as caught:
        host.judge()
    assert caught.value.kind == "state-broken"


def test_an_unfinished_cutover_is_seen_by_its_record(host: Host) -> None:
    assert not unfinished_cutover(host.layout)
    for phase in ("recorded", "stopped", "started"):
        record(host, phase)
        assert unfinished_cutover(host.layout)
    for phase in ("committed", "restored"):
        record(host, phase)
        assert host.judge().converged


def test_a_broken_record_of_a_cutover_is_an_error(host: Host) -> None:
    record(host, "stopped")
    CutoverStore("vllm", host.layout.state_dir).path.write_text("{")
    with pytest.raises(FirstlightError, match=r"cutover\.json"):
        host.judge()
