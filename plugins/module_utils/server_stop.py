"""Stopping the old server: the first step of a cutover.

Order: find, refuse what is not the old server, ask the server who it is, write the record, arm the guard, stop,
wait until port and GPU memory are free. Nothing is stopped before it is on record how to bring it back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .containers import Container
from .cutover import ContainerRecipe, CutoverStore, OldServer, Record, Trigger, boot_id
from .cutover_guard import Guard
from .errors import FirstlightError
from .host_view import Host, View, argument, look, user_name
from .process_recipe import read_recipe
from .release import Layout
from .release_service import release_in_force, running_release, serves
from .server_conflicts import conflicts, refuse_conflicts
from .server_end import Limits, end, wait_free
from .server_find import find
from .server_kinds import Found, Wanted
from .server_probe import Answer, ask
from .server_proof import is_fronted
from .systemd import UnitState

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 -- addresses that are read, not bound


@dataclass(frozen=True)
class StopOptions:
    """How to stop.

    Attributes:
        wanted: what the new server needs.
        layout: where the files of firstlight's own unit lie.
        limits: seconds to wait.
        url: where the old server answers; empty: derived from its socket or its ``--port``.
        api_key: the key to ask it with; empty: taken from its command line. A secret.
        allow_unrestorable: stop even a server that nobody could start again.
        guard_s: seconds after which the host itself restores the old server unless the cutover is committed.
        own_release: id of the release that is to serve; when it serves already, nothing is stopped.
    """

    wanted: Wanted
    layout: Layout
    limits: Limits = field(default_factory=Limits)
    url: str = ""
    api_key: str = field(default="", repr=False)
    allow_unrestorable: bool = False
    guard_s: float = 3600.0
    own_release: str = ""


def stop_server(host: Host, store: CutoverStore, guard: Guard, options: StopOptions, *, check: bool) -> dict[str, Any]:
    """Stop the old server and record how to bring it back; returns the module's result.

    A run that finds an unfinished cutover continues it: what was recorded is kept unless a server is found that
    could replace it in the record.

    Raises:
        FirstlightError: strangers hold port or GPU, the server cannot be told or restored (in these cases
            nothing was stopped), or it could not be stopped.
    """
    with contextlib.nullcontext() if check else store.lock():
        previous = store.load()
        continued = previous is not None and previous.unfinished
        if _serves_already(host, options):
            return _left_alone(store, previous if continued else None)
        view = look(host, options.wanted.port, options.wanted.gpus)
        found = find(host, view, options.wanted, own_counts=not continued)
        own = _own_unit_of_a_cut_run(host, view, options.wanted) if continued else None
        refuse_conflicts(conflicts(view, options.wanted, found), "nothing was stopped")
        old, warnings = _old_server(host, view, found, options)
        record = _record(old, previous)
        result = _result(store, view, found, record, warnings)
        result["changed"] = found.kind != "none" or bool(found.processes) or own is not None
        if check:
            return result
        return {**result, **_carry_out(host, store, guard, options, record, found, own)}


def _serves_already(host: Host, options: StopOptions) -> bool:
    if not options.own_release or not host.has_systemd():
        return False
    return serves(options.layout, options.own_release, host.systemd.show(options.wanted.own_unit))


def _left_alone(store: CutoverStore, unfinished: Record | None) -> dict[str, Any]:
    """The result when the very release that is wanted serves: its cutover is over, or still to be committed."""
    old = unfinished.old if unfinished else OldServer("none")
    return {
        "changed": False,
        "found": {**old.public(), "name": old.name, "how": "own_release", "processes": []},
        "phase": unfinished.phase if unfinished else "committed",
        "record": str(store.path),
        "down_since_s": unfinished.down_since_s if unfinished else None,
        "seconds": 0.0,
        "seconds_to_free": 0.0,
        "killed": [],
        "guard": {},
        "warnings": [],
    }


def _own_unit_of_a_cut_run(host: Host, view: View, wanted: Wanted) -> Found | None:
    """The new server of a run that was cut off: it is not the old server, but it must end as well."""
    if not wanted.own_unit or not host.has_systemd():
        return None
    state = host.systemd.show(wanted.own_unit)
    members = tuple(view.in_unit(state.unit))
    if not state.running and not members:
        return None
    return Found("unit", "unit", state, None, view.processes.get(state.main_pid), members)


def _record(old: OldServer, previous: Record | None) -> Record:
    """What to write down, given what was written before."""
    now = time.time()
    fresh = Record(old, "recorded", boot_id(), now)
    if previous is None:
        return fresh
    if previous.unfinished:
        if old.kind == "none":  # it was stopped by the run that was cut off; what that run wrote is the truth
            return previous
        if _same(old, previous.old):
            told = previous.old
            fronted = old.fronted if old.url else told.fronted
            kept = dataclasses.replace(old, url=old.url or told.url, models=old.models or told.models, fronted=fronted)
            kept = dataclasses.replace(kept, enabled=old.enabled or told.enabled)
            return dataclasses.replace(fresh, old=kept, origin=previous.origin)
        return dataclasses.replace(fresh, origin=previous.old if _foreign(previous.old) else previous.origin)
    if _foreign(old):
        return fresh
    return dataclasses.replace(fresh, origin=previous.old if _foreign(previous.old) else previous.origin)


def _foreign(old: OldServer) -> bool:
    return old.kind in {"unit", "process", "container"}


def _same(one: OldServer, other: OldServer) -> bool:
    if one.kind != other.kind:
        return False
    if one.process is not None and other.process is not None:
        return one.process.argv == other.process.argv
    if one.container is not None and other.container is not None:
        return one.container.name == other.container.name
    return one.unit == other.unit


def _carry_out(
    host: Host,
    store: CutoverStore,
    guard: Guard,
    options: StopOptions,
    record: Record,
    found: Found,
    own: Found | None,
) -> dict[str, Any]:
    guarded = options.guard_s > 0 and record.old.kind != "none"
    if guarded:
        guard.arm(options.guard_s, options.wanted)
    began = time.time()
    record = dataclasses.replace(record, down_since_s=record.down_since_s or began)
    store.save(record)
    for trigger in record.old.triggers:
        if trigger.active:
            host.systemd.stop(trigger.unit)
    killed = []
    for each in (own, found):
        if each is not None and (each.processes or each.unit is not None or each.container is not None):
            killed += end(host, each, options.limits)
    ended = time.time()
    wait_free(host, options.wanted, options.limits)
    record = store.advance("stopped")
    return {
        "phase": record.phase,
        # a host that had no server was not without one
        "down_since_s": record.down_since_s if record.old.kind != "none" else None,
        "seconds": round(time.time() - began, 3),
        "seconds_to_free": round(time.time() - ended, 3),
        "killed": [process.pid for process in killed],
        "guard": {"unit": guard.timer, "seconds": options.guard_s} if guarded else {},
    }


def _result(store: CutoverStore, view: View, found: Found, record: Record, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "found": {
            **record.old.public(),
            "name": found.name,
            "how": found.how,
            "processes": [
                {
                    "pid": process.pid,
                    "user": user_name(process.uid),
                    "command": process.command,
                    "gpu_mib": view.gpu_mib([process.pid]),
                    "orphan": process in found.leftovers,
                }
                for process in found.processes
            ],
        },
        "phase": record.phase,
        "record": str(store.path),
        "down_since_s": record.down_since_s,
        "seconds": 0.0,
        "seconds_to_free": 0.0,
        "killed": [],
        "guard": {},
        "warnings": list(warnings),
    }


def _old_server(host: Host, view: View, found: Found, options: StopOptions) -> tuple[OldServer, list[str]]:
    """Turn what was found into what can be brought back, asking the server who it is."""
    if found.kind == "none":
        return OldServer("none"), []
    command = found.main.cmdline if found.main else ()
    url = options.url or _url(view, found, options.wanted.port)
    api_key = options.api_key or argument(command, "--api-key")
    answer = ask(url, api_key) if url else Answer(False)
    fronted = is_fronted(host, view, found, url)
    old = OldServer(found.kind, url=url, models=answer.models, api_key=api_key, fronted=fronted)
    warnings = []
    if not answer.healthy:
        warnings.append(f"the old server did not answer at {url or 'any port'} ({answer.seen or 'no address'}).")
    try:
        old = _with_recipe(host, found, old, options.layout)
    except FirstlightError as error:
        if not options.allow_unrestorable or error.kind != "not-restorable":
            raise
        warnings.append(f"the old server cannot be brought back: {error.what}")
        return dataclasses.replace(old, kind="none"), warnings
    return old, warnings


def _with_recipe(host: Host, found: Found, old: OldServer, layout: Layout) -> OldServer:
    if found.kind == "release":
        assert found.unit is not None  # noqa: S101 -- by construction
        release = running_release(found.unit) or release_in_force(layout)
        if release is None:
            raise _not_restorable(
                found.unit.unit, "it has the name of firstlight's unit (vllm_server_unit) and is not firstlight's"
            )
        return dataclasses.replace(old, unit=found.unit.unit, enabled=found.unit.enabled, release=release)
    if found.kind == "unit":
        assert found.unit is not None  # noqa: S101 -- by construction
        _require_unit_file(found.unit)
        triggers = tuple(_trigger(host, unit) for unit in found.unit.triggered_by)
        return dataclasses.replace(old, unit=found.unit.unit, enabled=found.unit.enabled, triggers=triggers)
    if found.container is not None:
        return dataclasses.replace(old, container=_container_recipe(found.container))
    if found.main is None:
        raise _not_restorable(found.name, "its first process is gone")
    return dataclasses.replace(old, process=read_recipe(found.main))


def _trigger(host: Host, unit: str) -> Trigger:
    state = host.systemd.show(unit)
    return Trigger(unit, active=state.running, enabled=state.enabled)


def _require_unit_file(state: UnitState) -> None:
    if state.masked:
        raise _not_restorable(state.unit, "its unit is masked, so systemd would not start it again")
    if not state.fragment_path or not Path(state.fragment_path).exists():
        raise _not_restorable(state.unit, f"its unit file {state.fragment_path or ''} is gone")


def _container_recipe(container: Container) -> ContainerRecipe:
    if container.auto_remove:
        raise _not_restorable(container.name, "its container was made with --rm, so stopping deletes it")
    return ContainerRecipe(container.engine, container.id, container.name, container.restart_policy)


def _not_restorable(where: str, reason: str) -> FirstlightError:
    return FirstlightError(
        f"the old server could not be started again: {reason}. Nothing was stopped.",
        where=where,
        why="If the new server failed, the host would be left without one.",
        fix="Mend that, or accept the loss with sglang_stop_allow_unrestorable: true.",
        kind="not-restorable",
    )


def _url(view: View, found: Found, port: int) -> str:
    """Where the old server answers on this host; empty when it cannot be told."""
    for listener in view.listeners:
        if listener.pid in found.pids:
            address = _EVERYWHERE.get(listener.address, listener.address)
            return f"http://[{address}]:{port}" if ":" in address.strip("[]") else f"http://{address}:{port}"
    if found.container is not None:
        return f"http://127.0.0.1:{port}" if port in found.container.ports else ""
    command = " ".join(found.main.cmdline) if found.main else ""
    command += f" {found.unit.exec_start}" if found.unit else ""
    own_port = re.search(r"--port[= ](\d+)", command)
    return f"http://127.0.0.1:{own_port[1]}" if own_port else ""
