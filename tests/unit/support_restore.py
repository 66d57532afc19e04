"""A cutover that stopped something, for tests of the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore, OldServer, Record
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import Wanted
from ansible_collections.firstlight.vllm.plugins.module_utils.server_restore import RestoreOptions, restore
from support_hosts import MadeUpHost


class Cutover:
    """A host on which a cutover of `vllm` stopped `sglang.service`, or another server, on a port.

    Args:
        tmp_path: the folder of all of it.
        host: the host, with made-up units.
        port: where the old server answered.
        limits: of what is ended on the way back.
        no_progress_s: after which the old server is given up.
    """

    def __init__(self, tmp_path: Path, host: MadeUpHost, port: int, limits: Limits, no_progress_s: float) -> None:
        self.host, self.units, self.port = host, host.units, port
        self.units.add("sglang.service", ActiveState="inactive", SubState="dead")
        self.store = CutoverStore("vllm", tmp_path / "var")
        self.layout = Layout("vllm", tmp_path / "etc", tmp_path / "var", tmp_path / "units")
        self.disarmed = 0
        wanted = Wanted(port, own_unit="vllm.service")
        self.options = RestoreOptions(wanted, self.layout, limits, no_progress_s=no_progress_s)

    def record(self, old: OldServer, phase: str = "stopped", **more: object) -> OldServer:
        """Record what was stopped; returns it with its address and its model."""
        told = replace(old, url=f"http://127.0.0.1:{self.port}", models=("old-model",))
        self.store.save(Record(told, phase, created_s=1000.0, **more))  # type: ignore[arg-type]
        return told

    def restore(self, *, check: bool = False, **more: object) -> dict[str, object]:
        """Go back, with these options of `RestoreOptions` beside the case's own."""
        options = replace(self.options, **more)  # type: ignore[arg-type]
        return restore(self.host, self.store, self._disarm, options, check=check, note="a test")

    def phase(self) -> str:
        """How far the record came; empty without one."""
        record = self.store.load()
        return record.phase if record else ""

    def _disarm(self) -> bool:
        self.disarmed += 1
        return True
