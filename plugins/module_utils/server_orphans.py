"""Parts of a server that outlived their launcher: schedulers and detokenizers that PID 1 has adopted.

An orphan is tied to the server by the session that it was born in or by the GPU memory that it holds, together
with a command line that only such a part has, its user, and the lack of a living launcher of its own.
"""

from __future__ import annotations

import dataclasses

from .host_view import View, is_helper, is_sglang
from .processes import Process
from .server_kinds import Found, Wanted

_ADOPTERS = frozenset({"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit"})


def with_orphans(view: View, wanted: Wanted, found: Found) -> Found:
    """Add the orphans of a server to it; without a server, those that hold memory of the GPUs in view."""
    members = {process.pid: process for process in found.processes}
    sessions = {process.session for process in members.values() if process.session}
    pythons = {process.cmdline[0] for process in members.values() if process.cmdline}
    owner = found.main.uid if found.main else None
    on_gpu = view.gpu_pids()
    orphans = [
        process
        for process in view.processes.values()
        if process.pid not in members and _orphaned(view, wanted, process) and owner in {None, process.uid}
    ]
    titled = [process for process in orphans if is_sglang(process)]
    taken = [process for process in titled if process.session in sessions or process.pid in on_gpu]
    # a detokenizer holds no GPU memory: it is known by the session that it shares with a scheduler
    sessions |= {process.session for process in taken if process.session}
    for process in orphans:
        of_this_server = is_sglang(process) or process.cmdline[0] in pythons or process.pid in on_gpu
        if process not in taken and process.session in sessions and of_this_server:
            taken.append(process)
    grown = {child.pid: child for process in taken for child in view.tree(process)}
    leftovers = tuple(process for pid, process in grown.items() if pid not in members)
    return dataclasses.replace(
        found,
        how=found.how or ("GPU memory" if leftovers else ""),
        processes=(*found.processes, *leftovers),
        leftovers=leftovers,
    )


def _orphaned(view: View, wanted: Wanted, process: Process) -> bool:
    """Whether a process is a part of a server, by its command line, whose launcher is gone."""
    if wanted.serves(process) or not (is_sglang(process) or is_helper(process)):
        return False
    if view.container_of(process) or (wanted.own_unit and view.unit_of(process) == wanted.own_unit):
        return False
    parent = view.processes.get(process.ppid)
    return parent is None or parent.pid == 1 or parent.name in _ADOPTERS
