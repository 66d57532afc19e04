"""Stop, guard, commit and restore on a host with systemd: runs tests/lab/stop_on_systemd.py there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support_hosts_lab import ROOT, Host

pytestmark = pytest.mark.slow


@pytest.fixture
def host() -> Iterator[Host]:
    # a host of no role of its own; no playbook runs on it here
    host = Host("outside")
    host.boot()
    yield host
    host.down()


def test_old_servers_of_every_kind_are_stopped_guarded_and_brought_back_by_real_systemd(host: Host) -> None:
    collection = "/opt/checkout/.collections/ansible_collections/firstlight"
    host.shell(f"mkdir -p /opt/checkout/tests {collection} && ln -s ../../.. {collection}/vllm")
    for folder in ("plugins", "tests/standins", "tests/lab"):
        host.put(ROOT / folder, f"/opt/checkout/{folder}")
    said = host.shell("cd /opt/checkout && python3 tests/lab/stop_on_systemd.py . 2>&1", check=False)
    assert said.rstrip().endswith("OK"), said
