"""Who else holds the port or the GPUs that the new server needs: they are named, and never touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .containers import PORT_PROXIES
from .errors import FirstlightError
from .host_view import View, describe
from .server_kinds import Found, Wanted


@dataclass(frozen=True)
class Conflict:
    """Something that is not the old server and holds what the new one needs."""

    resource: str
    holder: str
    pid: int | None
    gpu_mib: int | None = None


def conflicts(view: View, wanted: Wanted, found: Found) -> list[Conflict]:
    """Tell who else holds the port or the GPUs; firstlight's own unit is no stranger."""
    mine = set(found.pids)
    if wanted.own_unit:
        mine |= {process.pid for process in view.in_unit(wanted.own_unit)}
    strangers = strangers_on_port(view, found, mine)
    for gpu in view.gpus:
        holders = [each for each in view.holders if each.gpu_uuid == gpu.uuid and each.pid not in mine]
        known = sum(each.used_mib or 0 for each in holders)
        unknown = any(each.used_mib is None and not each.graphics for each in holders)
        if known > wanted.tolerated_gpu_mib or unknown:
            strangers += [
                Conflict(f"GPU {gpu.index}", describe(view, each.pid, each.name), each.pid, each.used_mib)
                for each in holders
            ]
    return strangers


def strangers_on_port(view: View, found: Found, excused: Iterable[int] = ()) -> list[Conflict]:
    """Tell who listens in a view beside a server and those excused."""
    mine = found.pids | set(excused)
    if found.unit is not None and any(unit.endswith(".socket") for unit in found.unit.triggered_by):
        mine.add(1)  # systemd listens for a server that it starts on the first connection
    strangers = []
    for listener in view.listeners:
        if listener.pid in mine or (listener.pid and _is_proxy_of(view, listener.pid, found)):
            continue
        holder = describe(view, listener.pid) if listener.pid else "a process that cannot be seen from here"
        strangers.append(Conflict(f"port {listener.port} ({listener.address})", holder, listener.pid))
    return strangers


def refuse_conflicts(strangers: Iterable[Conflict], when: str) -> None:
    """Stop the run when strangers hold what the new server needs; they are never touched.

    Raises:
        FirstlightError: ``foreign-holder``, naming each.
    """
    found = list(strangers)
    if not found:
        return
    told = name_all(found)
    on_port = any(each.resource.startswith("port") for each in found)
    other = "sglang_stop_port" if on_port else "sglang_stop_gpus"
    raise FirstlightError(
        f"{told}. None of it belongs to the server that is to be replaced, so it was left alone ({when}).",
        where="port" if on_port else "GPU",
        why="The new server could not start, or would share the traffic.",
        fix=f"{ask_to_end(found)}, or choose another with {other}; when it is the old "
        f"server, name its unit in sglang_stop_units or its command line in sglang_stop_command_patterns.",
        kind="foreign-holder",
    )


def name_all(strangers: Iterable[Conflict]) -> str:
    """Who holds what, for people."""
    return "; ".join(
        f"{each.resource} is held by {each.holder}" + (f", {each.gpu_mib} MiB" if each.gpu_mib else "")
        for each in strangers
    )


def ask_to_end(strangers: Iterable[Conflict]) -> str:
    """The beginning of a remedy: have strangers leave."""
    pids = " ".join(str(pid) for pid in sorted({each.pid for each in strangers if each.pid}))
    return "Ask its owner to stop it" + (f" (`kill {pids}`)" if pids else "")


def _is_proxy_of(view: View, pid: int, found: Found) -> bool:
    process = view.processes.get(pid)
    return bool(process and found.container and process.name in PORT_PROXIES)
