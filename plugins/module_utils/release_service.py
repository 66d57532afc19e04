"""A release's way into and out of service: staged, started, committed, withdrawn.

*Staged*: its files lie beside those of the release in force; nothing that runs has noticed.
*Started*: its unit file is in force and its process runs; at boot, what was enabled before still comes up.
*Committed*: it passed its tests; it is enabled, and the record of the deployment says so.
*Withdrawn*: it is stopped and its unit file is gone, or is again the one of the release committed last.
"""

from __future__ import annotations

import grp
import pwd
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import release_shared
from .errors import FirstlightError
from .host_command import Runner, run_command
from .processes import read_process
from .release import (
    UNIT,
    Layout,
    Release,
    environment_file,
    file_facts,
    load,
    load_state,
    put,
    read_text,
    release_ids,
    save_state,
)
from .systemd import Systemd, UnitState

_RELEASE_OF = re.compile(r"/releases/([0-9a-f]{12})/")
_TIMEOUT_S = 30.0
_VENDOR = (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))


@dataclass(frozen=True)
class Account:
    """The service's system user and its groups; GPU groups are joined where the host has them."""

    user: str
    group: str
    gpu_groups: Sequence[str] = ("video", "render")


def ensure_account(account: Account, home: str, *, check: bool, run: Runner = run_command) -> bool:
    """Make the system user and group, and put the user into the host's GPU groups; tell whether that changed.

    Raises:
        FirstlightError: ``useradd`` and its kin failed.
    """
    commands: list[list[str]] = []
    known_groups = {entry.gr_name: entry for entry in grp.getgrall()}
    if account.group not in known_groups:
        commands.append(["groupadd", "--system", account.group])
    try:
        pwd.getpwnam(account.user)
    except KeyError:
        commands.append(
            ["useradd", "--system", "--gid", account.group, "--home-dir", home, "--no-create-home",
             "--shell", "/usr/sbin/nologin", account.user]
        )  # fmt: skip
    missing = [
        name for name in account.gpu_groups if name in known_groups and account.user not in known_groups[name].gr_mem
    ]
    if missing:
        commands.append(["usermod", "--append", "--groups", ",".join(missing), account.user])
    if not check:
        for argv in commands:
            answer = run(argv, _TIMEOUT_S)
            if answer.status != 0:
                raise FirstlightError(
                    f"`{' '.join(argv)}` failed: {answer.complaint}",
                    where="vllm_server_user",
                    fix="make the account by hand, or name another with vllm_server_user and vllm_server_group.",
                    kind="account-failed",
                )
    return bool(commands)


def secrets_text(secrets: Mapping[str, str]) -> str:
    """Text of the secrets file; secrets that are empty are left out."""
    return environment_file({name: value for name, value in secrets.items() if value})


def stage(layout: Layout, release: Release, *, secrets: Mapping[str, str], dropin: str, check: bool) -> list[str]:
    """Write a release's files, its secrets and the site's drop-in; returns the paths that changed."""
    changed = []
    if not check and (read_text(layout.secrets) != secrets_text(secrets) or (read_text(layout.dropin) or "") != dropin):
        release_shared.keep(layout)
    for name, text in release.files.items():
        path = layout.releases / release.id / name
        if put(path, text, 0o644, check=check):
            changed.append(str(path))
    if put(layout.secrets, secrets_text(secrets), 0o600, check=check):
        changed.append(str(layout.secrets))
    if dropin:
        if put(layout.dropin, dropin, 0o644, check=check):
            changed.append(str(layout.dropin))
    elif layout.dropin.exists():
        changed.append(str(layout.dropin))
        if not check:
            layout.dropin.unlink()
    return changed


def running_release(state: UnitState) -> str | None:
    """Id of the release that the unit's main process runs; None when it does not run or is not firstlight's."""
    process = read_process(state.main_pid) if state.main_pid else None
    found = _RELEASE_OF.search(" ".join(process.cmdline)) if process else None
    return found.group(1) if found else None


def release_in_force(layout: Layout) -> str | None:
    """Id of the release whose unit file systemd has; None where there is none."""
    found = _RELEASE_OF.search(read_text(layout.unit_file) or "")
    return found.group(1) if found else None


def foreign_unit_file(layout: Layout, vendor: Sequence[Path] = _VENDOR) -> Path | None:
    """The file of a unit of this name that firstlight did not write; None when the name is free or firstlight's."""
    own = read_text(layout.unit_file)
    if own is not None and not _RELEASE_OF.search(own):
        return layout.unit_file
    if own is not None:
        return None
    return next((path for path in (folder / layout.unit_file.name for folder in vendor) if path.exists()), None)


def stale(layout: Layout, state: UnitState) -> bool:
    """Whether the process started before the secrets or the drop-in that it should run with were written."""
    if state.exec_main_start is None:
        return True
    # the folder tells of a drop-in that was taken away
    for path in (layout.secrets, layout.dropin, layout.dropin.parent):
        try:
            if path.stat().st_mtime > state.exec_main_start:
                return True
        except FileNotFoundError:
            continue
    return False


def runs(layout: Layout, release_id: str, state: UnitState) -> bool:
    """Whether the unit runs this release, and would run it again after a restart."""
    return (
        state.active_state == "active"
        and running_release(state) == release_id
        and release_in_force(layout) == release_id
    )


def serves(layout: Layout, release_id: str, state: UnitState) -> bool:
    """Whether the unit runs exactly this release, with the secrets and drop-in now on disk."""
    return runs(layout, release_id, state) and not stale(layout, state)


def start(layout: Layout, release: Release, systemd: Systemd, *, check: bool) -> tuple[bool, UnitState]:
    """Put the release's unit in force and have its process running; returns (changed, state of the unit).

    A unit that already runs this release is left alone. The unit is not enabled here: until the commit, a
    reboot must bring back what was enabled before.

    Raises:
        FirstlightError: the unit is masked, or systemd refused it.
    """
    service = f"{layout.unit}.service"
    state = systemd.show(service)
    if state.masked:
        raise FirstlightError(
            "the unit is masked, so systemd will not start it.",
            where=service,
            fix=f"run `systemctl unmask {service}`, or give the server another name with vllm_server_unit.",
            kind="unit-masked",
        )
    if serves(layout, release.id, state):
        return False, state
    if check:
        return True, state
    put(layout.unit_file, release.files[UNIT], 0o644, check=False)
    systemd.daemon_reload()
    systemd.reset_failed(service)
    systemd.restart(service)
    return True, systemd.show(service)


def commit(
    layout: Layout,
    release: Release,
    systemd: Systemd,
    *,
    inputs: str,
    watched: Sequence[str],
    report: Mapping[str, Any],
    keep: int,
    check: bool,
) -> tuple[bool, list[str]]:
    """Enable the unit, record the deployment, forget releases beyond the last ``keep``.

    Args:
        layout: where the unit's files lie.
        release: the one that passed.
        systemd: the host's service manager.
        inputs: digest of the variables that led to it.
        watched: further files whose change means that a run has something to do (weights, configurations).
        report: what the smoke test found; comes back from every later run.
        keep: number of releases to keep, this one included.
        check: change nothing.

    Returns:
        Whether anything changed, and the ids of the releases removed.
    """
    service = f"{layout.unit}.service"
    old = load_state(layout)
    changed = False
    state = systemd.show(service)
    if not state.enabled:
        changed = True
        if not check:
            systemd.enable(service)
    files = [layout.unit_file, layout.secrets, layout.dropin]
    files += [layout.releases / release.id / name for name in release.files]
    files += [Path(path) for path in watched]
    committed = old.get("release")
    previous = committed if committed != release.id else old.get("previous_release")
    record: dict[str, Any] = {
        "inputs": inputs,
        "release": release.id,
        "previous_release": previous,
        "files": {str(path): file_facts(path) for path in files},
        "meta": dict(release.meta),
        "report": dict(report),
    }
    if {key: old.get(key) for key in record if key != "report"} != {k: v for k, v in record.items() if k != "report"}:
        changed = True
    if not check and (changed or old.get("report") != record["report"]):
        save_state(layout, {**record, "committed_at": time.time()})
    if not check:
        release_shared.forget(layout)
    return changed, prune(layout, keep=keep, protect={release.id, previous}, check=check)


def prune(layout: Layout, *, keep: int, protect: set[str | None], check: bool) -> list[str]:
    """Remove all releases but the newest ``keep`` and those to ``protect``; returns the ids removed."""
    ids = release_ids(layout)
    doomed = [release_id for release_id in ids[: max(len(ids) - keep, 0)] if release_id not in protect]
    if not check:
        for release_id in doomed:
            shutil.rmtree(layout.releases / release_id)
    return doomed


def unstage(layout: Layout, systemd: Systemd) -> bool:
    """Put back the secrets and the drop-in of the deployment in force; returns whether they differed."""
    changed = release_shared.put_back(layout)
    if layout.dropin in changed:
        systemd.daemon_reload()
    return bool(changed)


def withdraw(layout: Layout, systemd: Systemd) -> None:
    """Stop the unit and put the unit file of the release committed last back; it is not started here.

    A unit that firstlight did not write, and one that runs the release committed last, are left alone.
    """
    service = f"{layout.unit}.service"
    committed = load_state(layout).get("release")
    state = systemd.show(service)
    if release_in_force(layout) is None and layout.unit_file.exists():
        return
    if unstage(layout, systemd):
        state = systemd.show(service)
    wanted = load(layout, committed) if committed else None
    # secrets that were staged and never started with are no reason to stop it
    if wanted is not None and runs(layout, wanted.id, state):
        return
    if not state.running and release_in_force(layout) == committed:
        return
    if state.exists:
        systemd.stop(service, timeout_s=600)
    if wanted is not None:
        put(layout.unit_file, wanted.files[UNIT], 0o644, check=False)
    else:
        if state.enabled:
            systemd.disable(service)
        layout.unit_file.unlink(missing_ok=True)
    systemd.daemon_reload()
    systemd.reset_failed(service)


def remove(layout: Layout, systemd: Systemd, *, check: bool) -> list[str]:
    """Stop the server and take all of firstlight's files of this unit off the host, but for weights and venvs.

    The record of the cutover stays, since it tells how to bring the old server back.

    Returns:
        What was removed, or in check mode would be.
    """
    service = f"{layout.unit}.service"
    state = systemd.show(service)
    doomed = [layout.unit_file, layout.dropin, layout.config_dir / layout.unit, layout.state]
    doomed += [layout.cache_parent / layout.unit]
    present = [path for path in doomed if path.exists()]
    if check or not (present or state.running):
        return [str(path) for path in present]
    if state.running:
        systemd.stop(service, timeout_s=600)
    if state.enabled:
        systemd.disable(service)
    for path in present:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    systemd.daemon_reload()
    systemd.reset_failed(service)
    return [str(path) for path in present]
