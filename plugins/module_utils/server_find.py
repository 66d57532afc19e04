"""Finding the server that is to be replaced, and telling it from everything that must be left alone.

A process is tied to the server by its unit's control group, its container, its process tree, or, once it has been
orphaned, by the session it was born in or the GPU memory it holds together with its command line. Never by its
name alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from .containers import PORT_PROXIES, Container, ContainerRef
from .errors import FirstlightError
from .host_view import SERVER_COMMAND, Host, View, argument, is_sglang
from .processes import Process
from .server_kinds import Found, Wanted
from .server_orphans import with_orphans
from .systemd import UnitState

_T = TypeVar("_T")
_DEFAULT_PORT = "30000"  # SGLang's own
# programs that start one other program and stay above it
_WRAPPERS = {
    *("sh", "bash", "dash", "zsh", "ksh", "env", "nice", "ionice", "timeout", "stdbuf", "taskset", "numactl"),
    *("uv", "conda", "mamba", "micromamba", "tini", "dumb-init", "docker-init", "catatonit", "script"),
    *("runuser", "setpriv", "su", "sudo", "gosu"),
}


def find(host: Host, view: View, wanted: Wanted, *, own_counts: bool = True) -> Found:
    """Find the server: by unit, else by listening port, else by command line.

    Args:
        host: the host.
        view: a look at it.
        wanted: what the new server needs.
        own_counts: whether firstlight's own unit, when it runs, is the server that is to be replaced.

    Raises:
        FirstlightError: several servers fit (``server-ambiguous``), or it is run by something that firstlight
            cannot stop and start (``server-unmanageable``).
    """
    finders = [_by_port, _by_command]
    if host.has_systemd():
        finders = [*([_by_own_unit] if own_counts else []), _by_unit, *finders]
    for finder in finders:
        found = finder(host, view, wanted)
        if found is not None:
            return with_orphans(view, wanted, found)
    return with_orphans(view, wanted, Found("none"))


def _by_own_unit(host: Host, view: View, wanted: Wanted) -> Found | None:
    if not wanted.own_unit:
        return None
    state = host.systemd.show(wanted.own_unit)
    members = view.in_unit(state.unit)
    if not state.running and not members:
        return None
    return Found("release", "unit", state, None, view.processes.get(state.main_pid), tuple(members))


def _by_unit(host: Host, view: View, wanted: Wanted) -> Found | None:
    named = [state for state in host.systemd.show_many(wanted.units) if _lives(view, state)] if wanted.units else []
    chosen = _choose(named, lambda state: _on_port(view, view.in_unit(state.unit)), lambda state: state.unit)
    if chosen is None:
        loaded = host.systemd.show_many(["*.service"])
        known = {wanted.own_unit, *wanted.units}
        scanned = [
            state
            for state in loaded
            if state.unit not in known and SERVER_COMMAND.search(state.exec_start) and _lives(view, state)
        ]
        scanned = [state for state in scanned if _contends(view, wanted, view.in_unit(state.unit), state.exec_start)]
        chosen = _choose(scanned, lambda state: _on_port(view, view.in_unit(state.unit)), lambda state: state.unit)
    return unit_found(host, view, chosen, "unit") if chosen else None


def _by_port(host: Host, view: View, wanted: Wanted) -> Found | None:
    for listener in view.listeners:
        process = view.processes.get(listener.pid or 0)
        if process is None:
            continue
        if process.name in PORT_PROXIES:
            found = _published(host, view, wanted)
        else:
            found = _owner(host, view, wanted, process, "port")
        if found is not None:
            return found
    # without a proxy process the engine forwards the port in the kernel and nothing is seen to listen
    return _published(host, view, wanted) if not view.listeners else None


def _by_command(host: Host, view: View, wanted: Wanted) -> Found | None:
    roots = {}
    for process in view.processes.values():
        if wanted.serves(process):
            root = _root(view, wanted, process)
            roots[root.pid] = root
    fitting = [root for root in roots.values() if _contends(view, wanted, view.tree(root), " ".join(root.cmdline))]
    chosen = _choose(
        fitting, lambda root: _on_port(view, view.tree(root)), lambda root: f"pid {root.pid} ({root.command})"
    )
    return _owner(host, view, wanted, chosen, "command line") if chosen else None


def _owner(host: Host, view: View, wanted: Wanted, process: Process, how: str) -> Found | None:
    """What runs a process: its container, its service, or nothing but its own tree."""
    ref = view.container_of(process)
    if ref is not None:
        return _container_owner(host, view, wanted, ref, how)
    path = view.relative(process)
    user_unit = re.search(r"/user@(\d+)\.service/.*?([^/]+\.service)(?:/|$)", path)
    unit = view.unit_of(process)
    if unit and unit == wanted.own_unit:
        return None
    state = host.systemd.show(unit) if unit else None
    if state and _started_by(view, wanted, view.processes.get(state.main_pid), process):
        return unit_found(host, view, state, how)
    if not wanted.related(process):
        return None
    if user_unit:
        raise _unmanageable(process, f"the user service {user_unit[2]} of uid {user_unit[1]}", user_unit)
    root = _root(view, wanted, process)
    if is_sglang(root) and not wanted.serves(root):  # its launcher is gone: it serves nobody and cannot be started
        return Found("none", how, None, None, None, tuple(view.tree(root)))
    return Found("process", how, None, None, root, tuple(view.tree(root)))


def _container_owner(host: Host, view: View, wanted: Wanted, ref: ContainerRef, how: str) -> Found | None:
    members = view.in_container(ref.id)
    server = next((member for member in members if wanted.related(member)), None)
    if server is None:
        return None
    container = host.engines.inspect(ref.engine, ref.id) if ref.engine else None
    if container is None:
        what = f"a container ({ref.id[:12]}) that no engine of this host's root user knows"
        raise _unmanageable(server, what)
    pids = {member.pid for member in members}
    first = next((member for member in members if member.ppid not in pids), None)
    if not _started_by(view, wanted, first, server):
        raise _unmanageable(server, f"the container {container.name} beside other programs")
    return container_found(host, view, container, how)


def unit_found(host: Host, view: View, state: UnitState, how: str) -> Found:
    """What belongs to a service: its control group, and the container that it runs."""
    members = view.in_unit(state.unit)
    container = None
    if re.search(r"\b(?:docker|podman)\b", state.exec_start):
        container = next((each for each in host.engines.running() if _runs(state, each)), None)
        members += view.in_container(container.id) if container else []
    # a transient unit is gone once stopped: it is brought back as the process that it is
    transient = state.fragment_path.startswith("/run/systemd/transient/")
    main = view.processes.get(state.main_pid)
    return Found("process" if transient else "unit", how, state, container, main, tuple(members))


def container_found(host: Host, view: View, container: Container, how: str) -> Found:
    """What belongs to a container, and to the service that it is run by."""
    if container.unit and host.has_systemd():
        state = host.systemd.show(container.unit)
        if state.exists:
            members = {each.pid: each for each in [*view.in_unit(state.unit), *view.in_container(container.id)]}
            return Found("unit", how, state, container, None, tuple(members.values()))
    members = {each.pid: each for each in view.in_container(container.id)}
    main = next((each for each in members.values() if each.ppid not in members), None)
    return Found("container", how, None, container, main, tuple(members.values()))


def _published(host: Host, view: View, wanted: Wanted) -> Found | None:
    for container in host.engines.publishing(wanted.port):
        if any(wanted.related(process) for process in view.in_container(container.id)):
            return container_found(host, view, container, "port")
    return None


def _started_by(view: View, wanted: Wanted, first: Process | None, server: Process) -> bool:
    """Whether a unit's or container's first process is the server or merely wraps it.

    A process that was started from ssh or cron may live in their unit, which must never be stopped for it.
    """
    if first is None:
        return False
    at: Process | None = server
    while at is not None:
        if at.pid == first.pid:
            return True
        at = view.processes.get(at.ppid)
        if at is not None and not (wanted.related(at) or at.name in _WRAPPERS):
            return False
    return False


def _root(view: View, wanted: Wanted, process: Process) -> Process:
    """The topmost ancestor that is still part of the server; a shell that started it is not."""
    root, seen = process, {process.pid}
    while True:
        parent = view.processes.get(root.ppid)
        if parent is None or parent.pid in seen or not wanted.related(parent):
            return root
        root = parent
        seen.add(root.pid)


def _lives(view: View, state: UnitState) -> bool:
    return state.exists and (state.running or bool(view.in_unit(state.unit)))


def _on_port(view: View, members: Iterable[Process]) -> bool:
    pids = {process.pid for process in members}
    return any(listener.pid in pids for listener in view.listeners)


def _contends(view: View, wanted: Wanted, members: list[Process], command: str) -> bool:
    """Whether a server that nobody named holds, or is about to take, what the new one needs."""
    if view.listeners:
        return _on_port(view, members)
    pids = {process.pid for process in members}
    if pids & view.gpu_pids():
        return True
    # a container's port is its own; one that is published on the host's port is found by that
    inside = any(view.container_of(process) for process in members)
    return not inside and (argument(command.split(), "--port") or _DEFAULT_PORT) == str(wanted.port)


def _choose(candidates: list[_T], on_port: Callable[[_T], bool], name: Callable[[_T], str]) -> _T | None:
    if len(candidates) <= 1:
        return candidates[0] if candidates else None
    holding = [candidate for candidate in candidates if on_port(candidate)]
    if len(holding) == 1:
        return holding[0]
    raise FirstlightError(
        f"several servers could be the old one: {', '.join(name(candidate) for candidate in candidates)}.",
        where="sglang_stop_units",
        why="Stopping the wrong one would hurt somebody else.",
        fix="Name the one to replace in sglang_stop_units and stop the others, or set sglang_stop_port to its port.",
        kind="server-ambiguous",
    )


def _runs(state: UnitState, container: Container) -> bool:
    name = re.escape(container.name)
    return container.unit == state.unit or bool(re.search(rf"(?:^|[\s=])(?:{name})(?:[\s;]|$)", state.exec_start))


def _unmanageable(process: Process, what: str, user_unit: re.Match[str] | None = None) -> FirstlightError:
    stop = "stop it with the tool that started it (kubectl, the other user's podman)"
    if user_unit:
        stop = f"run `systemctl --user --machine={user_unit[1]}@ stop {user_unit[2]}`"
    return FirstlightError(
        f"the old server runs in {what}, which firstlight can neither stop cleanly nor bring back.",
        where=f"pid {process.pid} ({process.command})",
        fix=f"To have it replaced, {stop}, then run again.",
        kind="server-unmanageable",
    )
