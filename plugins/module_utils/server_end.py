"""Ending a server's processes, and waiting until what they held is free.

All waiting is on facts: processes, unit, port, GPU memory, looked at every 50 to 100 ms, each with a bound.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import FirstlightError
from .host_view import Host, View, describe, look, look_at_processes, user_name
from .processes import Process, alive, send_signal
from .server_conflicts import conflicts, refuse_conflicts
from .server_find import find
from .server_kinds import Found, Wanted

_POLL_S = 0.05
_SETTLE_S = 0.15
# once the launcher is gone its children should follow; those that do not are asked themselves
_FOLLOW_S = 1.0
_IDLE_SHARE = 0.02  # of a GPU's memory: what drivers keep for themselves at rest


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds.

    Attributes:
        term_s: for the server to end after SIGTERM.
        kill_s: for the kernel to end what was killed.
        free_s: for port and GPU memory to become free after the last process.
    """

    term_s: float = 60.0
    kill_s: float = 20.0
    free_s: float = 60.0


def end(host: Host, found: Found, limits: Limits) -> list[Process]:
    """Have a server end: SIGTERM, wait, SIGKILL; its unit by systemd, its container by the engine.

    Returns:
        The processes that had to be killed.

    Raises:
        FirstlightError: ``server-unkillable``: a process outlived SIGKILL, as one stuck in the driver does.
    """
    targets = {process.pid: process for process in found.processes}
    _ask_to_end(host, found, limits)
    began, launcher_gone_at, asked_again = time.monotonic(), None, False
    while True:
        living = _living(host, found, targets)
        if not living and not _busy(host, found):
            return []
        now = time.monotonic()
        if now - began >= limits.term_s:
            return _kill(host, found, targets, limits)
        if launcher_gone_at is None and not (found.main and alive(found.main)):
            launcher_gone_at = now
        if launcher_gone_at is not None and now - launcher_gone_at >= _FOLLOW_S and not asked_again:
            asked_again = True
            if found.container is not None:
                host.engines.stop(found.container, limits.term_s)
            else:
                _signal_all(living, signal.SIGTERM)
        time.sleep(_POLL_S)


def wait_free(host: Host, wanted: Wanted, limits: Limits) -> View:
    """Wait until nobody listens on the port and the GPUs' memory is free; returns the last look.

    Raises:
        FirstlightError: ``server-came-back``, ``foreign-holder`` or ``gpu-memory-stuck``, with who holds what.
    """
    deadline = time.monotonic() + limits.free_s
    free_before = False
    while True:
        view = look(host, wanted.port, wanted.gpus)
        strangers = conflicts(view, wanted, Found("none"))
        stuck = [gpu for gpu in view.gpus if gpu.memory_used_mib > _at_rest(view, wanted, gpu.uuid)]
        free = not strangers and not stuck
        if free and free_before:
            # what restarts the server has begun by now, though it may not listen yet
            suspects = any(wanted.related(process) for process in view.processes.values())
            again = find(host, view, wanted, own_counts=False) if suspects else None
            if again is not None and again.main is not None:
                raise _came_back(view, f"port {wanted.port}", again.main)
            return view
        if not free and time.monotonic() >= deadline:
            break
        free_before = free
        time.sleep(_POLL_S if not free else _SETTLE_S)
    for stranger in strangers:
        process = view.processes.get(stranger.pid or 0)
        if process is not None and wanted.related(process):
            raise _came_back(view, stranger.resource, process)
    refuse_conflicts(strangers, "the old server has been stopped")
    told = ", ".join(f"GPU {gpu.index}: {gpu.memory_used_mib} of {gpu.memory_total_mib} MiB" for gpu in stuck)
    raise FirstlightError(
        f"GPU memory is still in use {limits.free_s:g} s after the last process ended, and the driver names no "
        f"holder ({told}).",
        where="GPU",
        why="The new server would run out of memory.",
        fix="Look for containers or virtual machines that use the GPU; else reboot the host.",
        kind="gpu-memory-stuck",
    )


def _at_rest(view: View, wanted: Wanted, uuid: str) -> float:
    gpu = next(each for each in view.gpus if each.uuid == uuid)
    kept = sum(holder.used_mib or 0 for holder in view.holders if holder.gpu_uuid == uuid)
    return max(wanted.tolerated_gpu_mib, _IDLE_SHARE * gpu.memory_total_mib) + kept


def _ask_to_end(host: Host, found: Found, limits: Limits) -> None:
    if found.unit is not None:
        host.systemd.stop(found.unit.unit, wait=False)
        _signal_all(found.leftovers, signal.SIGTERM)
    elif found.container is not None:
        host.engines.stop(found.container, limits.term_s)
    elif found.main is not None:
        send_signal(found.main, signal.SIGTERM)
        _signal_all(found.leftovers, signal.SIGTERM)
    else:
        _signal_all(found.processes, signal.SIGTERM)


def _living(host: Host, found: Found, targets: dict[int, Process]) -> list[Process]:
    """Those still alive; only when all known ones are gone are new ones looked for (children, same unit)."""
    living = [process for process in targets.values() if alive(process)]
    if living:
        return living
    view = look_at_processes(host)
    heirs = [process for process in view.processes.values() if process.ppid in targets]
    heirs += view.in_unit(found.unit.unit) if found.unit is not None else []
    heirs += view.in_container(found.container.id) if found.container is not None else []
    for heir in heirs:
        targets.update({process.pid: process for process in view.tree(heir)})
    return [process for process in targets.values() if alive(process)]


def _busy(host: Host, found: Found) -> bool:
    """Whether systemd still works on the server's unit, as while it waits to restart it."""
    return found.unit is not None and host.systemd.show(found.unit.unit).running


def _kill(host: Host, found: Found, targets: dict[int, Process], limits: Limits) -> list[Process]:
    living = _living(host, found, targets)
    killed = {process.pid: process for process in living}
    deadline = time.monotonic() + limits.kill_s
    if found.unit is not None and _busy(host, found):
        host.systemd.kill(found.unit.unit, signal.SIGKILL)
    while living or _busy(host, found):
        for process in living:
            if send_signal(process, signal.SIGKILL):
                killed[process.pid] = process
        if time.monotonic() >= deadline:
            raise _unkillable(found, living, limits.kill_s)
        time.sleep(_POLL_S)
        living = _living(host, found, targets)
    return list(killed.values())


def _signal_all(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        send_signal(process, number)


def _unkillable(found: Found, living: Iterable[Process], waited_s: float) -> FirstlightError:
    told = "; ".join(f"pid {each.pid} ({user_name(each.uid)}): {each.command}" for each in living)
    return FirstlightError(
        f"the old server outlived SIGKILL by {waited_s:g} s: {told or 'systemd still stops its unit'}.",
        where=found.name or "the old server",
        why="A process that cannot be killed waits inside the kernel, most often in the GPU driver.",
        fix="Reboot the host; then run again.",
        kind="server-unkillable",
    )


def _came_back(view: View, resource: str, process: Process) -> FirstlightError:
    parent = describe(view, process.ppid)
    return FirstlightError(
        f"something started the old server anew: {describe(view, process.pid)} takes {resource} "
        f"(its parent is {parent}).",
        where="the old server",
        why="It would fight the new server over port and GPU memory.",
        fix="Stop what restarts it (a supervisor, a loop in a script), or name its unit in sglang_stop_units.",
        kind="server-came-back",
    )
