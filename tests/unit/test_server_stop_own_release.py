"""A run on a host that already serves the release that is wanted stops nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.containers import Engines
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore, OldServer, Record
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import stage, start
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted
from ansible_collections.firstlight.vllm.plugins.module_utils.server_stop import StopOptions, stop_server
from support_release import FakeSystemd, layout_in, release_of


class OneUnitHost(Host):
    """A host whose only server is firstlight's own unit."""

    def has_systemd(self) -> bool:
        return True


@pytest.fixture
def systemd(tmp_path: Path) -> FakeSystemd:
    layout = layout_in(tmp_path)
    fake = FakeSystemd(layout)
    release = release_of(layout)
    stage(layout, release, secrets={}, dropin="", check=False)
    start(layout, release, fake, check=False)
    fake.calls.clear()
    yield fake
    if fake.child is not None:
        fake.child.kill()
        fake.child.wait(5)


def stop(systemd: FakeSystemd, release: str) -> dict[str, object]:
    layout = systemd.layout
    store = CutoverStore("vllm", layout.state_dir)
    options = StopOptions(Wanted(1, own_unit="vllm.service", units=()), layout, own_release=release, guard_s=0)
    host = OneUnitHost(systemd, Engines(which=lambda name: None))
    return stop_server(host, store, Guard(store, systemd, unit_dir=layout.unit_dir), options, check=False)


def test_the_release_that_is_wanted_goes_on_serving(systemd: FakeSystemd) -> None:
    result = stop(systemd, release_of(systemd.layout).id)
    assert (result["changed"], result["phase"], result["down_since_s"]) == (False, "committed", None)
    assert not any(call.startswith(("stop", "kill")) for call in systemd.calls)
    assert systemd.child is not None
    assert systemd.child.poll() is None


def test_a_cutover_that_was_cut_off_after_the_start_is_still_to_be_committed(systemd: FakeSystemd) -> None:
    store = CutoverStore("vllm", systemd.layout.state_dir)
    store.save(Record(OldServer("unit", unit="sglang.service", enabled=True), "stopped", down_since_s=12.5))
    result = stop(systemd, release_of(systemd.layout).id)
    assert (result["changed"], result["phase"], result["down_since_s"]) == (False, "stopped", 12.5)
    record = store.load()
    assert record is not None
    assert record.old.unit == "sglang.service"
