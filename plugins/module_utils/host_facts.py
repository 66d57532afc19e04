"""What preflight reads on a host: one look, no change."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import FirstlightError
from .gpus import Gpu, query
from .processes import listeners, read_process


@dataclass(frozen=True)
class Listener:
    """Who holds a TCP port: process id (None when it cannot be seen), address, command line without secrets."""

    pid: int | None
    address: str
    command: str


@dataclass(frozen=True)
class HostFacts:
    """A host at one moment.

    Attributes:
        os_id: ``ID`` of os-release; os_version: its ``VERSION_ID``.
        glibc: version, for instance ``(2, 36)``; empty when unknown (another libc).
        machine: CPU architecture as ``uname -m`` says.
        python: version of the interpreter that venvs are made from, or empty when it is missing.
        systemd: whether systemd is PID 1.
        cpus: CPUs usable; memory_mib: main memory in MiB.
        disk_free_gib: free space in GiB of each folder asked about (or its nearest parent that exists).
        gpus: as nvidia-smi reports them.
        listeners: processes on the port asked about.
    """

    os_id: str
    os_version: str
    glibc: tuple[int, ...]
    machine: str
    python: tuple[int, ...]
    systemd: bool
    cpus: int
    memory_mib: int
    disk_free_gib: dict[str, float]
    gpus: Sequence[Gpu]
    listeners: Sequence[Listener]

    def as_dict(self) -> dict[str, Any]:
        """For module results."""
        return asdict(self)


def os_release(text: str) -> dict[str, str]:
    """Parse ``/etc/os-release``."""
    pairs = re.findall(r"^([A-Z_]+)=(.*)$", text, re.MULTILINE)
    return {name: value.strip().strip("\"'") for name, value in pairs}


def version(text: str) -> tuple[int, ...]:
    """Numbers of a dotted version; ``"2.36"`` → ``(2, 36)``; empty when there are none."""
    found = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def free_gib(folder: str) -> float:
    """Free space in GiB where ``folder`` is or would be made."""
    path = Path(folder)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 2**30


def memory_mib(meminfo: str) -> int:
    """``MemTotal`` in MiB out of ``/proc/meminfo``; 0 when absent."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found.group(1)) // 1024 if found else 0


def _interpreter(python: str, run: Callable[[Sequence[str]], tuple[int, str]]) -> tuple[int, ...]:
    if Path(python).resolve() == Path(sys.executable).resolve():
        return tuple(sys.version_info[:3])
    try:
        code, out = run([python, "-c", "import platform; print(platform.python_version())"])
    except (FirstlightError, OSError):  # not there, a folder, not executable
        return ()
    return version(out) if code == 0 else ()


def read(
    *, python: str, folders: Sequence[str], port: int, run: Callable[[Sequence[str]], tuple[int, str]]
) -> HostFacts:
    """Read the host.

    Args:
        python: interpreter that venvs are made from.
        folders: folders whose free space matters.
        port: TCP port of the new server.
        run: runs a command; gives exit status and output, raises FirstlightError when it is missing.
    """
    release = os_release(Path("/etc/os-release").read_text()) if Path("/etc/os-release").exists() else {}
    libc, libc_version = platform.libc_ver()
    holders = []
    for listener in listeners(port):
        process = read_process(listener.pid) if listener.pid else None
        holders.append(Listener(listener.pid, listener.address, process.command if process else ""))
    return HostFacts(
        os_id=release.get("ID", ""),
        os_version=release.get("VERSION_ID", ""),
        glibc=version(libc_version) if libc == "glibc" else (),
        machine=platform.machine(),
        python=_interpreter(python, run),
        systemd=Path("/run/systemd/system").is_dir(),
        cpus=len(os.sched_getaffinity(0)),
        memory_mib=memory_mib(Path("/proc/meminfo").read_text()),
        disk_free_gib={folder: round(free_gib(folder), 1) for folder in folders},
        gpus=query(),
        listeners=holders,
    )
