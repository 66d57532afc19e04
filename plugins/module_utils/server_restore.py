"""Bringing the old server back, and proving that it answers.

It stops the new server first, starts what the record of the cutover names, and then waits for facts: the URL that
answered before, naming the models that it named before. The waiting ends when nothing moves any more, not after
a fixed time, and at once when the server dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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
from .server_probe import Answer, ask, same_server
from .server_settle import settle
from .systemd import UnitState

_POLL_S = 0.2
_GIVE_UP_RESTARTS = 3
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
        answer = _answers(old)
        if same_server(answer, old.models) and _is_up(host, old, options.wanted):
            if not check:
                if host.has_systemd():
                    unstage(layout, host.systemd)
                record = store.advance("restored", note or "it served already")
                disarm()
            return _result(record, changed=False, reason="the old server serves", answer=answer)
        if check:
            return _result(record, changed=True, reason="the old server would be started")
        began = time.monotonic()
        warnings = _end_new(host, layout, record, old, options)
        try:
            wait_free(host, _nobody(options.wanted), options.limits)
        except FirstlightError as error:  # the old server is started all the same: it may still fit
            warnings.append(error.what)
        unit = _start(host, store, layout, old)
        answer = _prove(host, old, unit, options.no_progress_s)
        record = store.advance("restored", note)
        disarm()
        seconds = time.monotonic() - began
        done = _result(record, changed=True, reason="the old server serves again", answer=answer, seconds=seconds)
        return {**done, "warnings": warnings}


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
    record: Record | None, *, changed: bool, reason: str, answer: Answer | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    return {
        "changed": changed,
        "phase": record.phase if record else "",
        "restored": record.old.public() if record else {},
        "reason": reason,
        "answering": bool(answer and answer.healthy),
        "models": list(answer.models) if answer else [],
        "seconds": round(seconds, 3),
        "warnings": [],
    }


def _answers(old: OldServer) -> Answer:
    return ask(old.url, old.api_key) if old.url else Answer(False, seen="its address is unknown")


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


def _start_process(host: Host, store: CutoverStore, recipe: ProcessRecipe) -> str:
    """Start a process that was nobody's unit as a transient one, with its environment from a 0600 file."""
    unit = f"firstlight-old-{store.unit}.service"
    for process in host.processes():
        if process.cmdline == recipe.argv and process.uid == recipe.uid and process.state not in {"Z", "X"}:
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


def _prove(host: Host, old: OldServer, unit: str, no_progress_s: float) -> Answer:
    """Wait until the old server answers as itself.

    Raises:
        FirstlightError: it died, or nothing moved for ``no_progress_s`` seconds.
    """
    if not old.url:
        return _prove_alive(host, old, unit)
    moved_at, seen = time.monotonic(), ""
    while True:
        answer = _answers(old)
        if same_server(answer, old.models):
            return answer
        state = host.systemd.show(unit) if unit else None
        _require_alive(host, old, state)
        progress = f"{answer} {_progress(host, old, state)}"
        if progress != seen:
            moved_at, seen = time.monotonic(), progress
        if time.monotonic() - moved_at >= no_progress_s:
            told = f"it names {', '.join(answer.models)}" if answer.models else f"it says {answer.seen}"
            raise _failed(host, old, state, f"nothing moved for {no_progress_s:g} s and {old.url}: {told}")
        time.sleep(_POLL_S)


def _prove_alive(host: Host, old: OldServer, unit: str) -> Answer:
    """Without an address to ask at, the most that can be shown is that it runs and stays."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        state = host.systemd.show(unit) if unit else None
        _require_alive(host, old, state)
        time.sleep(_POLL_S)
    return Answer(False, seen="its address is unknown")


def _require_alive(host: Host, old: OldServer, state: UnitState | None) -> None:
    if state is None:
        return
    gone = state.active_state in {"failed", "inactive"} and not state.job
    if gone or state.n_restarts >= _GIVE_UP_RESTARTS:
        how = state.exit_text or state.result or state.load_state
        raise _failed(host, old, state, f"its unit is {state.active_state} ({how})")


def _progress(host: Host, old: OldServer, state: UnitState | None) -> str:
    """Something that changes as long as the server works on its start: CPU time, states, log."""
    view = look_at_processes(host)
    members = view.in_unit(state.unit) if state is not None else []
    if old.container is not None:
        found = host.engines.inspect(old.container.engine, old.container.name)
        members = view.in_container(found.id) if found else []
        if found is not None and not found.running:
            raise _failed(host, old, state, "its container ended")
    ticks = 0
    for member in members:
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{member.pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    busy = ticks // os.sysconf("SC_CLK_TCK") // 2  # a server that merely idles uses less than 2 s in 5 minutes
    return f"{state.sub_state if state else ''} {len(members)} {busy}"


def _failed(host: Host, old: OldServer, state: UnitState | None, what: str) -> FirstlightError:
    last = ""
    if state is not None and state.invocation_id:
        with contextlib.suppress(FirstlightError):
            entries, _ = host.systemd.journal_lines(state.invocation_id)
            last = next((entry.text for entry in reversed(entries) if entry.text.strip()), "")
    log = f"journalctl -u {state.unit}" if state is not None else "the log of its container"
    return FirstlightError(
        f"the old server does not answer: {what}." + (f" Its last line: {last[:300]}" if last else ""),
        where=old.name,
        why="The host is without a server now.",
        fix=f"Read `{log}` on the host, start the old server by hand, and run `firstlight status`.",
        kind="restore-failed",
    )
