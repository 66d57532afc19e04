"""Bringing the old server back, and proving that it answers.

It stops the new server first, starts what the record of the cutover names, and then waits for facts: the URL that
answered before, naming the models that it named before. The waiting ends when nothing moves any more, not after
a fixed time, and at once when the server dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .cutover import CutoverStore, OldServer, ProcessRecipe, Record
from .errors import FirstlightError
from .files import write_atomically
from .host_view import Host, look_at_processes
from .process_recipe import environment_file
from .release import UNIT, Layout, load, load_state, put
from .release_service import running_release, unstage, withdraw
from .server_end import Limits, end, wait_free
from .server_kinds import Found, Wanted
from .server_probe import Answer
from .server_proof import Proof, examine, is_recipes, prove, shared
from .server_settle import settle

_UNPROVEN_TERM_S = 10.0


@dataclass(frozen=True)
class RestoreOptions:
    """How to restore.

    Attributes:
        wanted: port and GPUs that must be free before the old server starts; its own unit is the new server.
        layout: where the files of firstlight's own unit lie.
        limits: seconds to wait for the new server to end and for port and memory to become free.
        no_progress_s: seconds in which nothing moves before the restore is called failed.
        committed: restore even after the commit, as on request; else only an unfinished cutover is undone.
        origin: restore the last server that was not firstlight's own rather than the last one.
    """

    wanted: Wanted
    layout: Layout
    limits: Limits = field(default_factory=Limits)
    no_progress_s: float = 300.0
    committed: bool = False
    origin: bool = False


def restore(
    host: Host,
    store: CutoverStore,
    disarm: Callable[[], bool],
    options: RestoreOptions,
    *,
    check: bool = False,
    note: str = "",
) -> dict[str, Any]:
    """Bring the old server back unless that is done or not wanted; returns the module's result.

    Args:
        host: the host.
        store: the cutover.
        disarm: takes the guard away once the old server answers.
        options: how to restore.
        check: change nothing.
        note: why it is restored, kept in the record.

    Raises:
        FirstlightError: ``restore-failed``, with what the old server last said; the record stays unfinished.
            ``restore-unproven``: it is back, and a stranger shares its port; the cutover is over.
    """
    with contextlib.nullcontext() if check else store.lock():
        record = store.load()
        old = _which(record, options)
        layout = options.layout
        if record is None or old is None:
            # a run that ended before the stop has still staged its own secrets and drop-in
            unstaged = not check and not options.committed and host.has_systemd() and unstage(layout, host.systemd)
            return _result(record, changed=unstaged, reason="there is no unfinished cutover")
        if not options.committed and _decided_for_the_new(host, layout, record, options.wanted.own_unit):
            reason = "the new server was committed in the meantime and serves"
            if not check:
                record, _ = settle(host, store, options.wanted.own_unit, disarm)
            return _result(record, changed=not check, reason=reason)
        if old.kind == "none":
            changed = _running(host, options.wanted.own_unit)
            if not check:
                _end_new(host, layout, record, old, options)
                record = store.advance("restored", note or "nothing served before the cutover")
                disarm()
            return _result(record, changed=changed, reason="nothing served before the cutover")
        proof = examine(host, old, _transient_unit(store))
        if proof.old and _is_up(host, old, options.wanted):
            if not check:
                if host.has_systemd():
                    unstage(layout, host.systemd)
                record = _ended(store, proof, disarm, note or "it served already")
            return _result(record, changed=False, reason="the old server serves", proof=proof)
        if check:
            return _result(record, changed=True, reason="the old server would be started")
        began = time.monotonic()
        warnings = _end_new(host, layout, record, old, options)
        try:
            wait_free(host, _nobody(options.wanted), options.limits)
        except FirstlightError as error:  # the old server is started all the same: it may still fit
            warnings.append(error.what)
        unit = _start(host, store, layout, old)
        proof = prove(host, old, unit, _transient_unit(store), options.no_progress_s)
        record = _ended(store, proof, disarm, note)
        seconds = time.monotonic() - began
        done = _result(record, changed=True, reason="the old server serves again", proof=proof, seconds=seconds)
        return {**done, "warnings": [*warnings, *done["warnings"]]}


def _ended(store: CutoverStore, proof: Proof, disarm: Callable[[], bool], note: str) -> Record:
    """End the cutover: the old server is back, and nothing may undo that, though it be not proven.

    Raises:
        FirstlightError: ``restore-unproven``: a stranger shares its port.
    """
    error = shared(proof) if proof.strangers else None
    record = store.advance("restored", f"{note}; {error.what}" if error else note)
    disarm()
    if error:
        raise error
    return record


def _decided_for_the_new(host: Host, layout: Layout, record: Record, unit: str) -> bool:
    """Whether the new server was recorded as the host's deployment by a run that was then cut off."""
    if not record.unfinished or not _running(host, unit):
        return False
    try:
        state = load_state(layout)
    except FirstlightError:  # unreadable: then it decides nothing, and must not keep the old server from coming back
        return False
    decided = float(state.get("committed_at") or 0.0) >= record.created_s > 0
    return decided and running_release(host.systemd.show(unit)) == state.get("release")


def _which(record: Record | None, options: RestoreOptions) -> OldServer | None:
    if record is None or not (record.unfinished or options.committed):
        return None
    own = record.old.kind not in {"unit", "process", "container"}
    # a release whose files were removed cannot be brought back; what was there before it can
    removed = record.old.kind == "release" and not (options.layout.releases / record.old.release).is_dir()
    if own and (options.origin or (removed and options.committed)):
        return record.origin
    return record.old


def _result(
    record: Record | None, *, changed: bool, reason: str, proof: Proof | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    answer = proof.answer if proof else Answer(False)
    warnings = []
    if proof and proof.strangers:
        warnings.append(shared(proof).message)
    if proof and proof.server.fronted and answer.healthy:
        warnings.append(f"another program answers at {proof.server.url}; what is behind it cannot be seen from here.")
    return {
        "changed": changed,
        "phase": record.phase if record else "",
        "restored": record.old.public() if record else {},
        "reason": reason,
        "answering": answer.healthy and not (proof and proof.strangers),
        "models": list(answer.models),
        "seconds": round(seconds, 3),
        "warnings": warnings,
    }


def _running(host: Host, unit: str) -> bool:
    return bool(unit) and host.has_systemd() and host.systemd.show(unit).running


def _is_up(host: Host, old: OldServer, wanted: Wanted) -> bool:
    """Whether it is the old server that answers, and not the new one under the same model's name."""
    if old.kind == "release":
        return running_release(host.systemd.show(old.unit)) == (old.release or None) is not None
    if _running(host, wanted.own_unit):
        return False
    return old.kind != "unit" or _running(host, old.unit)


def _nobody(wanted: Wanted) -> Wanted:
    """The same needs with nobody excused: before the old server starts, the new one must be gone too."""
    return dataclasses.replace(wanted, own_unit="")


def _end_new(host: Host, layout: Layout, record: Record, old: OldServer, options: RestoreOptions) -> list[str]:
    """Stop the new server, put back the unit file of the release committed last, keep it from starting."""
    unit = options.wanted.own_unit
    if not unit or not host.has_systemd():
        return []
    state = host.systemd.show(unit)
    if state.running:
        view = look_at_processes(host)
        members = tuple(view.in_unit(state.unit))
        limits = options.limits
        if record.unfinished:  # nobody uses it yet, and vLLM ignores SIGTERM while it loads: each second is downtime
            limits = dataclasses.replace(limits, term_s=min(limits.term_s, _UNPROVEN_TERM_S))
        end(host, Found("unit", "unit", state, None, view.processes.get(state.main_pid), members), limits)
    if old.kind != "release" and state.exists and state.enabled:
        host.systemd.disable(unit)
    if record.unfinished:
        try:
            withdraw(layout, host.systemd)
        except FirstlightError as error:  # its files matter less than a server on the host
            return [error.message]
    return []


def _start(host: Host, store: CutoverStore, layout: Layout, old: OldServer) -> str:
    """Start the old server; returns the unit to watch, empty for a container."""
    if old.container is not None:
        recipe = old.container
        if recipe.restart_policy not in {"", "no"}:
            with contextlib.suppress(FirstlightError):  # an engine that cannot change it has not changed it either
                host.engines.set_restart_policy(recipe.engine, recipe.name, recipe.restart_policy)
        host.engines.start(recipe.engine, recipe.name)
        return ""
    if old.process is not None:
        return _start_process(host, store, old.process)
    if old.release:
        put(layout.unit_file, load(layout, old.release).files[UNIT], 0o644, check=False)
        host.systemd.daemon_reload()
    host.systemd.reset_failed(old.unit)
    if old.enabled and not host.systemd.show(old.unit).enabled:
        host.systemd.enable(old.unit)
    for trigger in old.triggers:
        if trigger.enabled:
            host.systemd.enable(trigger.unit)
        if trigger.active:
            host.systemd.start(trigger.unit)
    # not waited for: at boot its start may be ordered after this, and its readiness is proven below anyway
    host.systemd.start(old.unit, wait=False)
    return old.unit


def _transient_unit(store: CutoverStore) -> str:
    return f"firstlight-old-{store.unit}.service"


def _start_process(host: Host, store: CutoverStore, recipe: ProcessRecipe) -> str:
    """Start a process that was nobody's unit as a transient one, with its environment from a 0600 file."""
    unit = _transient_unit(store)
    for process in host.processes():
        if is_recipes(process, recipe):
            return look_at_processes(host).unit_of(process)  # it was never stopped, or is already back
    environment = store.folder / "old-server.env"
    write_atomically(environment, environment_file(recipe.environment), 0o600)
    options = [
        "--collect",
        "--service-type=exec",
        f"--uid={recipe.uid}",
        f"--gid={recipe.gid}",
        f"--property=SupplementaryGroups={' '.join(str(group) for group in recipe.groups)}",
        f"--property=UMask={recipe.umask:04o}",
        f"--property=EnvironmentFile={environment}",
        f"--working-directory={recipe.cwd}",
        *(f"--property=Limit{name}={value}" for name, value in sorted(recipe.limits.items())),
    ]
    host.systemd.reset_failed(unit)
    # systemd-run replaces $NAME in arguments; a doubled dollar stands for itself
    argv = [word.replace("$", "$$") for word in (recipe.program, *recipe.argv[1:])]
    host.systemd.run_transient(unit, options, argv)
    return unit
