"""GPUs and who holds their memory, as ``nvidia-smi`` tells it (memory in MiB).

A host without ``nvidia-smi`` has no GPUs as far as firstlight is concerned: the answers are empty lists. An
``nvidia-smi`` that is there and fails is an error, since then nobody can tell whether memory is free.
"""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from .errors import FirstlightError
from .host_command import CommandResult, Runner, run_command

_TIMEOUT_S = 60.0  # without persistence mode the driver is loaded by the first call, which takes many seconds
_GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``compute_capability`` is like ``9.0``, or empty when the driver is too old to tell it."""

    index: int
    uuid: str
    name: str
    memory_total_mib: int
    memory_used_mib: int
    driver_version: str
    compute_capability: str


@dataclass(frozen=True)
class GpuHolder:
    """A process that holds memory of one GPU.

    ``used_mib`` is None where the driver does not tell it (some virtual machines and MIG). ``graphics`` is
    true for a desktop's kind of use. The name is the driver's word for the process; it helps when ``/proc``
    cannot show the process, as happens across containers.
    """

    pid: int
    gpu_uuid: str
    used_mib: int | None
    name: str = ""
    graphics: bool = False


def installed() -> bool:
    """Whether this host has ``nvidia-smi``."""
    return shutil.which("nvidia-smi") is not None


def query(run: Runner | None = None) -> list[Gpu]:
    """All GPUs of this host, by index; empty when there is no ``nvidia-smi``.

    Raises:
        FirstlightError: ``nvidia-smi`` failed, or does not tell the memory.
    """
    if run is None:
        if not installed():
            return []
        run = run_command
    answer = _ask(run, "gpu", _GPU_FIELDS)
    without_capability = answer.status != 0 and "compute_cap" in answer.stdout + answer.stderr
    if without_capability:  # drivers before 510 do not know the field; their version is what matters to the user
        answer = _ask(run, "gpu", _GPU_FIELDS[:-1])
    _require_success(answer)
    return parse_gpus(answer.stdout)


def holders(run: Runner | None = None) -> list[GpuHolder]:
    """Tell which processes compute on a GPU, in 20 ms; empty when there is no ``nvidia-smi``.

    Desktops are not among them: see :func:`all_holders`.

    Raises:
        FirstlightError: ``nvidia-smi`` failed.
    """
    if run is None:
        if not installed():
            return []
        run = run_command
    answer = _ask(run, "compute-apps", ("pid", "gpu_uuid", "used_gpu_memory", "process_name"))
    _require_success(answer)
    return parse_compute_apps(answer.stdout)


def all_holders(run: Runner | None = None) -> list[GpuHolder]:
    """Every process on a GPU, desktops included (0.1 s a GPU); empty when there is no ``nvidia-smi``.

    Raises:
        FirstlightError: ``nvidia-smi`` failed or wrote no readable report.
    """
    if run is None:
        if not installed():
            return []
        run = run_command
    answer = run(["nvidia-smi", "-q", "-x"], _TIMEOUT_S)
    _require_success(answer)
    return parse_report(answer.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Read ``--query-gpu`` of ``_GPU_FIELDS`` in CSV without header and units."""
    found = []
    for row in _rows(text, len(_GPU_FIELDS) - 1):
        index, uuid, name, total, used, driver = row[:6]
        found.append(
            Gpu(
                index=_whole(index, "index"),
                uuid=uuid,
                name=name,
                memory_total_mib=_whole(total, "memory.total"),
                memory_used_mib=_whole(used, "memory.used"),
                driver_version=driver,
                compute_capability=row[6] if len(row) > 6 and row[6][:1].isdigit() else "",  # noqa: PLR2004
            )
        )
    return sorted(found, key=lambda gpu: gpu.index)


def parse_compute_apps(text: str) -> list[GpuHolder]:
    """Read ``--query-compute-apps=pid,gpu_uuid,used_gpu_memory,process_name``; a name may hold commas."""
    return [GpuHolder(_whole(row[0], "pid"), row[1], _mib(row[2]), name=", ".join(row[3:])) for row in _rows(text, 4)]


def parse_report(text: str) -> list[GpuHolder]:
    """Read the processes out of ``nvidia-smi -q -x``."""
    try:
        root = ET.fromstring(text)  # noqa: S314 -- written by the driver's own tool, run as root
    except ET.ParseError as error:
        raise _unreadable(f"its XML report cannot be read ({error})") from error
    return [
        GpuHolder(
            pid=_whole(process.findtext("pid", ""), "pid"),
            gpu_uuid=gpu.findtext("uuid", ""),
            used_mib=_mib(process.findtext("used_memory", "")),
            name=process.findtext("process_name", ""),
            graphics="C" not in process.findtext("type", "C"),
        )
        for gpu in root.iter("gpu")
        for process in gpu.iter("process_info")
    ]


def _ask(run: Runner, what: str, fields: tuple[str, ...]) -> CommandResult:
    argv = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    return run(argv, _TIMEOUT_S)


def _rows(text: str, at_least: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    for row in rows:
        if len(row) < at_least:
            raise _unreadable(f"it wrote {', '.join(row)!r} where {at_least} values were expected")
    return rows


def _whole(text: str, field: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _unreadable(f"it tells {text!r} for {field}, which is not a number") from None


def _mib(text: str) -> int | None:
    words = text.split()
    return int(words[0]) if words and words[0].isdecimal() else None


def _require_success(answer: CommandResult) -> None:
    if answer.status != 0:
        raise _unreadable(f"it failed with status {answer.status}: {answer.complaint}")


def _unreadable(what: str) -> FirstlightError:
    return FirstlightError(
        f"the state of the GPUs is unknown: {what}.",
        where="nvidia-smi",
        why="Without it nobody can tell whether GPU memory is free.",
        fix="Run `nvidia-smi` on the host and mend the driver (after a driver update, reboot).",
        kind="nvidia-smi-failed",
    )
