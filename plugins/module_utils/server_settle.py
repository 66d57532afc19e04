"""Ending a cutover in favour of the new server: it starts at boot from now on, and the old one does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .cutover import CutoverStore, OldServer, Record
from .errors import FirstlightError
from .host_view import Host


def commit(
    host: Host, store: CutoverStore, own_unit: str, disarm: Callable[[], bool], *, check: bool
) -> tuple[bool, Record, list[str]]:
    """Commit the cutover; nothing happens when it is committed.

    Args:
        host: the host.
        store: the cutover.
        own_unit: the new server's unit.
        disarm: takes the guard away.
        check: change nothing.

    Returns:
        Whether anything changed, the record, and warnings about what could not be switched off.

    Raises:
        FirstlightError: there is no cutover, or the old server has been brought back in the meantime.
    """
    with contextlib.nullcontext() if check else store.lock():
        record = store.load()
        if check:
            # the stop before it wrote no record either
            return record is None or record.phase != "committed", record or Record(OldServer("none"), "stopped"), []
        if record is None or record.phase == "restored":
            told = "there is no cutover to commit" if record is None else f"the old server was restored: {record.note}"
            raise FirstlightError(
                f"{told}.",
                where=str(store.path),
                why="Committing would leave two servers enabled.",
                fix="Run site.yml again.",
                kind="cutover-missing" if record is None else "cutover-restored",
            )
        if record.phase == "committed":
            return False, record, []
        return (True, *settle(host, store, own_unit, disarm))


def settle(host: Host, store: CutoverStore, own_unit: str, disarm: Callable[[], bool]) -> tuple[Record, list[str]]:
    """Do what a commit does, the lock being held; returns the record and warnings."""
    record = store.advance("started")
    # first the new one on, then the old one off: a power loss in between boots both rather than none
    if own_unit and host.systemd.show(own_unit).exists:
        host.systemd.enable(own_unit)
    warnings: list[str] = []
    for old in (record.old, record.origin):
        warnings += _switch_off(host, old, own_unit) if old is not None else []
    record = store.advance("committed")
    disarm()
    return record, warnings


def _switch_off(host: Host, old: OldServer, own_unit: str) -> list[str]:
    """Keep a foreign server from starting at boot; what cannot be switched off is told."""
    warnings = []
    units = [old.unit] if old.kind == "unit" and old.unit != own_unit else []
    for unit in [*units, *(trigger.unit for trigger in old.triggers)]:
        state = host.systemd.show(unit)
        if state.enabled:
            host.systemd.disable(unit)
        elif state.unit_file_state in {"static", "indirect", "generated"} and unit in units and not old.triggers:
            warnings.append(f"{unit} is {state.unit_file_state}: another unit may still start it at boot.")
    if old.container is not None and old.container.restart_policy not in {"", "no"}:
        try:
            host.engines.set_restart_policy(old.container.engine, old.container.name, "no")
        except FirstlightError as error:
            warnings.append(f"the old container may start again at boot: {error.what}")
    return warnings
