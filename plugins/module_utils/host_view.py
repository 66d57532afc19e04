"""One look at a host: its processes, the sockets on the port, the GPUs with their holders, units and containers.

All rules on what may be stopped work on such a view, so that a test can make one up.
"""

from __future__ import annotations

import dataclasses
import pwd
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from . import gpus as gpus_
from . import processes as processes_
from .containers import ContainerRef, Engines, container_of
from .gpus import Gpu, GpuHolder
from .processes import Listener, Process
from .systemd import Systemd

#: A unit's command that starts SGLang, wherever it stands in it.
SERVER_COMMAND = re.compile(r"(?:^|[\s/])sglang(?:\.|/)launch_server(?:\.py)?\b|(?:^|[\s/])sglang\s+serve\b")
_PYTHON = re.compile(r"python[\d.]*$")
#: What SGLang's children call themselves.
TITLE = re.compile(r"^sglang::")
#: Children that Python's multiprocessing starts beside the ones with a title.
HELPER = re.compile(r"multiprocessing\.(?:spawn|resource_tracker|forkserver)\b")


class Host:
    """The real host. Tests derive from it and override what they make up."""

    def __init__(self, systemd: Systemd | None = None, engines: Engines | None = None) -> None:
        self.systemd = systemd or Systemd()
        self.engines = engines or Engines()

    def has_systemd(self) -> bool:
        """Whether systemd is this host's service manager, as sd_booted(3) tells it."""
        return Path("/run/systemd/system").is_dir()

    def processes(self) -> list[Process]:
        """All processes."""
        return processes_.list_processes()

    def listeners(self, port: int) -> list[Listener]:
        """Sockets that listen on a TCP port."""
        return processes_.listeners(port)

    def gpus(self) -> list[Gpu]:
        """All GPUs."""
        return gpus_.query()

    def gpu_holders(self) -> list[GpuHolder]:
        """Every process on a GPU."""
        return gpus_.all_holders()


@dataclass(frozen=True)
class View:
    """What a host looks like at one moment.

    Attributes:
        processes: all living processes by pid; zombies are left out, they hold nothing.
        listeners: sockets on the port that the new server needs.
        gpus: the GPUs that it needs.
        holders: who holds memory of these GPUs.
        base: the control group that systemd itself lives in; other than ``/`` inside a container.
    """

    processes: dict[int, Process]
    listeners: tuple[Listener, ...]
    gpus: tuple[Gpu, ...]
    holders: tuple[GpuHolder, ...]
    base: str = "/"

    def relative(self, process: Process) -> str:
        """A process's control group as seen from this host's root."""
        if self.base != "/" and process.cgroup.startswith(self.base):
            return process.cgroup[len(self.base) :] or "/"
        return process.cgroup

    def unit_of(self, process: Process) -> str:
        """The system service that a process belongs to; empty for sessions, containers and user services."""
        path = self.relative(process)
        if path.startswith("/user.slice/") or container_of(path):
            return ""
        return next((part for part in path.split("/") if part.endswith(".service")), "")

    def container_of(self, process: Process) -> ContainerRef | None:
        """The container that a process lives in."""
        return container_of(self.relative(process))

    def in_unit(self, unit: str) -> list[Process]:
        """Processes of a system service."""
        return [process for process in self.processes.values() if self.unit_of(process) == unit]

    def in_container(self, container_id: str) -> list[Process]:
        """Processes of a container, as the host sees them."""
        found = []
        for process in self.processes.values():
            ref = self.container_of(process)
            if ref is not None and ref.id == container_id:
                found.append(process)
        return found

    def tree(self, root: Process) -> list[Process]:
        """A process and all of its descendants."""
        return [root, *processes_.descendants(root.pid, self.processes.values())]

    def gpu_pids(self) -> set[int]:
        """Pids that hold memory of the GPUs in view."""
        return {holder.pid for holder in self.holders}

    def gpu_mib(self, pids: Iterable[int]) -> int:
        """MiB that these processes hold, all GPUs in view together; unknown amounts count as 0."""
        wanted = set(pids)
        return sum(holder.used_mib or 0 for holder in self.holders if holder.pid in wanted)


def look(host: Host, port: int, gpu_indices: Iterable[int] = ()) -> View:
    """Take a view of a host.

    Args:
        host: the host.
        port: TCP port that the new server needs.
        gpu_indices: GPUs that it needs; none given means all.

    Raises:
        FirstlightError: the state of the GPUs cannot be read.
    """
    wanted = set(gpu_indices)
    gpus = tuple(gpu for gpu in host.gpus() if not wanted or gpu.index in wanted)
    uuids = {gpu.uuid for gpu in gpus}
    holders = tuple(holder for holder in host.gpu_holders() if holder.gpu_uuid in uuids) if gpus else ()
    return dataclasses.replace(
        look_at_processes(host), listeners=tuple(host.listeners(port)), gpus=gpus, holders=holders
    )


def look_at_processes(host: Host) -> View:
    """Take a view of a host's processes alone."""
    everyone = {process.pid: process for process in host.processes() if process.state not in {"Z", "X"}}
    init = everyone.get(1)
    base = init.cgroup.removesuffix("/init.scope") or "/" if init else "/"
    return View(everyone, (), (), (), base)


def serves_sglang(process: Process) -> bool:
    """Whether a process is SGLang's launcher (HTTP server), by its command line.

    What is run decides, not what is mentioned: an editor or ``grep`` with the same words is none.
    """
    words = list(process.cmdline)
    if words and _PYTHON.match(PurePath(words[0]).name):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] not in {"-m", "-c"}:
            words = words[2 if words[0] in {"-W", "-X"} else 1 :]
        if words[:1] == ["-m"]:
            return words[1:2] == ["sglang.launch_server"] or words[1:3] == ["sglang", "serve"]
        if words and PurePath(words[0]).parts[-2:] == ("sglang", "launch_server.py"):
            return True
    return bool(words) and PurePath(words[0]).name in {"sglang", "sglang.py"} and words[1:2] == ["serve"]


def is_sglang(process: Process) -> bool:
    """Whether a process is any part of SGLang, by its command line. Never enough to stop it."""
    return serves_sglang(process) or bool(process.cmdline and TITLE.match(process.cmdline[0]))


def is_helper(process: Process) -> bool:
    """Whether a process is a child that Python's multiprocessing made for its parent."""
    return bool(HELPER.search(" ".join(process.cmdline)))


def argument(cmdline: Iterable[str], name: str) -> str:
    """The value of an option in a command line, ``--name value`` or ``--name=value``; empty when absent."""
    words = list(cmdline)
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word[len(name) + 1 :]
    return ""


def user_name(uid: int) -> str:
    """A user's name, or ``uid 1234`` when there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def describe(view: View, pid: int, name: str = "") -> str:
    """Tell people who a pid is: ``pid 4711 (alice): python train.py``."""
    process = view.processes.get(pid)
    if process is None:
        return f"pid {pid} (not visible from here): {name or 'unknown'}"
    return f"pid {pid} ({user_name(process.uid)}): {process.command}"
