"""Stopping a server that really holds GPU memory, on a machine with an NVIDIA GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import gpus, processes
from ansible_collections.firstlight.vllm.plugins.module_utils.containers import Engines
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted
from ansible_collections.firstlight.vllm.plugins.module_utils.server_stop import StopOptions, stop_server
from support_hosts import free_port
from test_server_stop import STANDIN, serving

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU")

MIB = 4000


class GpuHost(Host):
    """This machine as it is, but for its units and containers, which a test must leave alone."""

    def __init__(self) -> None:
        super().__init__(engines=Engines(which=lambda name: None))

    def has_systemd(self) -> bool:
        return False


def stop(port: int, tmp_path: Path, term_s: float = 20.0) -> dict[str, object]:
    host, store = GpuHost(), CutoverStore("vllm", tmp_path / "var")
    options = StopOptions(
        Wanted(port, units=()),
        Layout("vllm", tmp_path / "etc", tmp_path / "var", tmp_path),
        Limits(term_s, 10, 20),
        guard_s=0,
    )
    return stop_server(host, store, Guard(store, host.systemd, unit_dir=tmp_path), options, check=False)


def wait_for_memory(amount: int) -> None:
    assert processes.wait_until(lambda: gpus.query()[0].memory_used_mib >= amount, 30, 0.2)


def test_the_memory_of_a_stopped_server_is_free_when_the_stop_returns(tmp_path: Path) -> None:
    before = gpus.query()[0].memory_used_mib
    with serving("--gpu-mib", str(MIB), "--ignore-sigterm") as server:
        wait_for_memory(before + 2 * MIB)
        result = stop(server.port, tmp_path, term_s=1.0)
        assert gpus.query()[0].memory_used_mib < before + 500
        assert gpus.holders() == []
        print(result)


def test_orphaned_schedulers_are_found_by_the_memory_that_the_driver_says_they_hold(tmp_path: Path) -> None:
    before = gpus.query()[0].memory_used_mib
    with serving("--gpu-mib", str(MIB), "--orphan") as server:
        wait_for_memory(before + 2 * MIB)
        server.launcher.kill()
        server.launcher.wait(10)
        result = stop(free_port(), tmp_path)
        assert result["found"]["how"] == "GPU memory"  # type: ignore[index]
        assert server.parts() == []
        assert gpus.query()[0].memory_used_mib < before + 500


def test_another_program_on_the_gpu_is_named_with_its_memory_and_lives_on(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(STANDIN.parent)!r}); import sglang, time; "
    script += f"sglang.hold_gpu({MIB}, 0); time.sleep(600)"
    stranger = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for_memory(MIB)
        assert {holder.pid for holder in gpus.all_holders()} == {stranger.pid}
        with serving() as server:
            with pytest.raises(FirstlightError, match=f"pid {stranger.pid}") as caught:
                stop(server.port, tmp_path)
            assert "MiB" in caught.value.what
            assert len(server.parts()) == 4
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
