"""What the new server needs, and what was found to be the old one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .containers import Container
from .cutover import Kind
from .errors import FirstlightError
from .host_view import is_sglang, serves_sglang
from .processes import Process
from .systemd import UnitState


@dataclass(frozen=True)
class Wanted:
    """What the new server needs, and what is known about the old one.

    Attributes:
        port: TCP port that must become free.
        units: services that the user names as the old server; they are stopped wherever they listen.
        gpus: indices of the GPUs that must become free; none given means all.
        own_unit: the service that firstlight manages, which is never a stranger; empty when there is none.
        patterns: further regular expressions of command lines that may be stopped.
        tolerated_gpu_mib: memory per GPU that strangers may keep, in MiB (a desktop's few).
    """

    port: int
    units: tuple[str, ...] = ("sglang.service",)
    gpus: tuple[int, ...] = ()
    own_unit: str = ""
    patterns: tuple[str, ...] = ()
    tolerated_gpu_mib: int = 512

    def serves(self, process: Process) -> bool:
        """Whether the command line is that of a server which may be stopped."""
        text = " ".join(process.cmdline)
        return serves_sglang(process) or any(re.search(pattern, text) for pattern in self.patterns)

    def related(self, process: Process) -> bool:
        """Whether the command line is that of any part of such a server."""
        return is_sglang(process) or self.serves(process)


@dataclass(frozen=True)
class Found:
    """The old server.

    Attributes:
        kind: what it is; ``release`` means that it is firstlight's own unit.
        how: what it was found by: ``unit``, ``port``, ``command line``, ``GPU memory``, or empty.
        unit: state of its service; of a transient one too, though that is recorded as a process.
        container: its container, also of a service that runs one.
        main: its first process.
        processes: all that belongs to it.
        leftovers: those of them that are orphans, outside of its control group and tree.
    """

    kind: Kind
    how: str = ""
    unit: UnitState | None = None
    container: Container | None = None
    main: Process | None = None
    processes: tuple[Process, ...] = ()
    leftovers: tuple[Process, ...] = ()

    @property
    def pids(self) -> set[int]:
        """All of its pids."""
        return {process.pid for process in self.processes}

    @property
    def name(self) -> str:
        """What people call it."""
        if self.unit is not None:
            return self.unit.unit
        if self.container is not None:
            return f"{self.container.engine} container {self.container.name}"
        return f"pid {self.main.pid} ({self.main.command})" if self.main else ""


def wanted_from(params: Mapping[str, Any]) -> Wanted:
    """Make a :class:`Wanted` of a module's options.

    Raises:
        FirstlightError: an option cannot be what it should be; nothing was looked at yet.
    """
    if not 0 < params["port"] < 65536:  # noqa: PLR2004 -- TCP's range
        raise _invalid("port", f"{params['port']} is no TCP port.", "Give a port from 1 to 65535.")
    for pattern in params.get("command_patterns", ()):
        try:
            re.compile(pattern)
        except re.error as error:
            what = f"{pattern!r} is no regular expression ({error})."
            raise _invalid("command_patterns", what, "Escape special characters with a backslash.") from error
    return Wanted(
        port=params["port"],
        units=tuple(_service(unit) for unit in params.get("units", ()) if unit),
        gpus=tuple(params["gpus"]),
        own_unit=_service(params["own_unit"]),
        patterns=tuple(params.get("command_patterns", ())),
        tolerated_gpu_mib=params["tolerated_gpu_mib"],
    )


def _service(unit: str) -> str:
    return unit if unit.endswith(".service") else f"{unit}.service"


def _invalid(option: str, what: str, fix: str) -> FirstlightError:
    return FirstlightError(what, where=f"sglang_stop_{option}", fix=fix, kind="option-invalid")
