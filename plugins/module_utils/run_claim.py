"""The claim that a run has on a host, from its first change to its end: no other run changes anything meanwhile.

A run is many programs, one after the other, with nothing of it on the host in between. So the claim is a file, and
what makes it count is a sign of life of its run: a program of the run on the host (each bears the claim in its
environment), or the end of one within the last two minutes. A claim without either counts for nothing and the next run
takes its place, so there is none to clean away after a controller that was killed, a network that went, or a reboot. A
run whose place was taken learns it at its next step, before that changes anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cutover import STATE_DIR, CutoverStore, boot_id
from .errors import FirstlightError
from .files import write_atomically
from .preflight_rules import Problem
from .processes import PROC, alive, read_process
from .run_identity import Run

#: Tells each program of a run whose it is; the playbook sets it.
ENVIRONMENT = "FIRSTLIGHT_CLAIM"
#: After so many seconds without a sign of life a claim counts for nothing. A run bears a cut network as long.
SILENCE_S = 120.0
# between two programs of one run there is nothing of it on the host
_BETWEEN_S = 3.0
_POLL_S = 0.1
_FILE = "run.json"


@dataclass(frozen=True)
class Claim:
    """One run's claim.

    Attributes:
        run: whose it is.
        unit: the unit that it deploys.
        boot_id: the host's boot in which it was made.
        began_s: when, in seconds since the epoch.
        seen_s: its last step, in seconds since the host's boot, which no clock that is set can move.
        pid: of a run that is a single program on the host, that program; 0 of any other.
        ticks: that program's start, so that another with its number does not pass for it.
    """

    run: Run
    unit: str
    boot_id: str
    began_s: float
    seen_s: float
    pid: int = 0
    ticks: int = 0


class RunInProgressError(FirstlightError):
    """Another run has the host. It tells the controller enough to know whether that run still lives."""

    def __init__(self, claim: Claim, path: Path) -> None:
        self.holder = claim.run
        silent_s = _uptime() - claim.seen_s
        seen = f", its last step was {silent_s:.0f} s ago" if not claim.pid else ""
        super().__init__(
            f"another run is at work on this host: {claim.run.who} began it at {_clock(claim.began_s)} for "
            f"{claim.unit}.service{seen}. Nothing was changed.",
            where=str(path),
            why="Two runs would stop and start each other's servers.",
            fix="Wait until it has ended, then run again. If it was cut off, the host is free "
            f"{SILENCE_S:.0f} s after its last step; there is nothing to clean up.",
            kind="run-in-progress",
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as of any fault, and who holds the host."""
        return {**super().as_dict(), "holder": self.holder.as_dict()}


class Claims:
    """The claims on one host, as the run for one unit sees them.

    Args:
        unit: the unit's name, with or without ``.service``.
        state_dir: parent of all units' state, ``/var/lib/firstlight``.
        proc: the folder of all processes.
        between_s: seconds in which a run that was silent may show that it lives.
    """

    def __init__(
        self, unit: str, state_dir: Path = STATE_DIR, *, proc: Path = PROC, between_s: float = _BETWEEN_S
    ) -> None:
        self.unit = unit.removesuffix(".service")
        self._state_dir, self._proc, self._between_s = Path(state_dir), proc, between_s
        self.path = self._state_dir / self.unit / _FILE

    def take(self, run: Run, gone: Collection[str] = (), *, pid: int = 0) -> None:
        """Claim the host for a run; one that has it already keeps it.

        Args:
            run: the run.
            gone: ids of runs that its controller knows to have ended.
            pid: the program that is the whole run, if it is one.

        Raises:
            RunInProgressError: another run has it, for whichever unit.
        """
        program = read_process(pid, self._proc) if pid else None
        ticks = program.start_ticks if program else 0
        with self._locked():
            for path, claim in self._others(run.id):
                # a run that is a single program here lives as long as that does, whatever became of its controller
                if (claim.pid or claim.run.id not in gone) and self._lives(path, claim):
                    raise RunInProgressError(claim, path)
                path.unlink(missing_ok=True)
            self._save(Claim(run, self.unit, boot_id(), time.time(), _uptime(), pid, ticks))

    def other(self) -> RunInProgressError | None:
        """What would keep a run from this host now; changes nothing."""
        found = ((path, claim) for path, claim in self._others("") if self._lives(path, claim))
        return next((RunInProgressError(claim, path) for path, claim in found), None)

    def renew(self, run_id: str) -> None:
        """Have a run go on to its next step.

        Raises:
            FirstlightError: ``run-taken-over``: it was silent for so long that another run took its place.
        """
        # where nothing can be written, a full disk must not keep a host from its way back; the program that asks is a
        # sign of life itself
        with contextlib.suppress(OSError):
            if self._state_dir.exists():
                with self._locked():
                    self._save(dataclasses.replace(self._own(run_id), seen_s=_uptime()))
                    return
        self._own(run_id)

    def _own(self, run_id: str) -> Claim:
        claim = _load(self.path)
        if claim is None or claim.run.id != run_id:
            raise self._taken_over(run_id)
        return claim

    def drop(self, run_id: str) -> None:
        """Leave the host to others; a claim that is another run's stays."""
        if not self.path.exists():
            return
        with self._locked():
            claim = _load(self.path)
            if claim is not None and claim.run.id == run_id:
                self.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # made for the claim alone, where nothing else is in it
                    self.path.parent.rmdir()

    def _others(self, run_id: str) -> list[tuple[Path, Claim]]:
        """The claims of other runs, on all units: they share ports and GPUs."""
        found = [(path, _load(path)) for path in sorted(self._state_dir.glob(f"*/{_FILE}"))]
        return [(path, claim) for path, claim in found if claim is not None and claim.run.id != run_id]

    def _lives(self, path: Path, claim: Claim) -> bool:
        if claim.boot_id != boot_id():
            return False
        if claim.pid:
            program = read_process(claim.pid, self._proc)
            return program is not None and program.start_ticks == claim.ticks and alive(program, self._proc)
        deadline = time.monotonic() + self._between_s
        while not (0 <= _uptime() - claim.seen_s < SILENCE_S or self._has_program(claim.run.id)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
            latest = _load(path)
            if latest is None or latest.run != claim.run:
                return False
            claim = latest
        return True

    def _has_program(self, run_id: str) -> bool:
        mark = f"{ENVIRONMENT}={run_id}".encode()
        for folder in self._proc.glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    return True
        return False

    def _save(self, claim: Claim) -> None:
        write_atomically(self.path, json.dumps(dataclasses.asdict(claim), sort_keys=True) + "\n", 0o600)

    def _taken_over(self, run_id: str) -> FirstlightError:
        others = self._others(run_id)
        who = f": {others[0][1].run.who} began one at {_clock(others[0][1].began_s)}" if others else ""
        return FirstlightError(
            f"this run gave no sign of life for more than {SILENCE_S:.0f} s, and another one took its place{who}. "
            "This one changes nothing more.",
            where=str(self.path),
            why="Two runs would stop and start each other's servers.",
            fix="Look at what the other run did with `firstlight status`, then run again.",
            kind="run-taken-over",
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, for the moment of a look or a write; the kernel lets go of it with its holder's end."""
        self._state_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._state_dir / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def claimed(
    unit: str,
    state_dir: Path,
    *,
    check: bool,
    what: str = "",
    run: Mapping[str, Any] | None = None,
    gone: Collection[str] = (),
    last: bool = False,
    or_without: bool = False,
) -> Iterator[None]:
    """Change a host as the next step of the run that claimed it, or else as a run of its own.

    Args:
        unit: the unit that is changed.
        state_dir: parent of all units' state.
        check: change nothing, and need no claim.
        what: what a run of its own does, for people; used where the controller did not say who runs it.
        run: who runs it, of a run of its own.
        gone: ids of runs that the controller knows to have ended.
        last: the run that claimed it ends with this step, however it goes.
        or_without: a run of its own goes on where no claim can be written, as on a full disk.

    Raises:
        FirstlightError: ``run-in-progress`` or ``run-taken-over``; nothing was changed.
        OSError: no claim can be written.
    """
    if check:
        yield
        return
    claims = Claims(unit, state_dir)
    mine = os.environ.get(ENVIRONMENT, "")
    if mine:
        claims.renew(mine)
    else:
        mine, last = secrets.token_hex(8), True
        told = Run.of(run or {})
        try:
            claims.take(dataclasses.replace(told, id=mine, who=told.who or f"`{what}`"), gone, pid=os.getpid())
        except OSError:
            if not or_without:
                raise
    try:
        yield
    finally:
        if last:
            with contextlib.suppress(OSError):  # it lapses by itself
                claims.drop(mine)


def seen(state_dir: Path = STATE_DIR) -> None:
    """Note that the run of this program was at work until now; nothing where it has no claim, or lost it."""
    mine = os.environ.get(ENVIRONMENT, "")
    with contextlib.suppress(FirstlightError, OSError):  # a program without the rights is none of those that renew
        for path in state_dir.glob(f"*/{_FILE}") if mine else ():
            claim = _load(path)
            if claim is not None and claim.run.id == mine:
                Claims(claim.unit, state_dir).renew(mine)


@contextlib.contextmanager
def begun(unit: str, state_dir: Path, run: Mapping[str, Any], gone: Collection[str]) -> Iterator[str]:
    """Begin a run on a host with a claim that outlives this program, unless it fails; gives the claim's id.

    Args:
        unit: the unit that is deployed.
        state_dir: parent of all units' state.
        run: who runs it; without an id this is no beginning, and nothing is claimed.
        gone: ids of runs that the controller knows to have ended.

    Raises:
        FirstlightError: ``run-in-progress``.
    """
    told = Run.of(run)
    if not told.id:
        yield ""
        return
    claims = Claims(unit, state_dir)
    claims.take(told, gone)
    try:
        yield told.id
    except BaseException:
        claims.drop(told.id)
        raise


def busy(unit: str, state_dir: Path) -> list[Problem]:
    """The warning that another run is at work, for a look that itself changes nothing."""
    error = Claims(unit, state_dir).other()
    return [Problem(error.kind, "warning", error.where, error.what, error.fix)] if error else []


def end_claim(unit: str, state_dir: Path) -> None:
    """End the run's claim with its last change, unless the commit of its cutover is still to come."""
    record = CutoverStore(unit, state_dir).load()
    mine = os.environ.get(ENVIRONMENT, "")
    if mine and (record is None or not record.unfinished):
        Claims(unit, state_dir).drop(mine)


def _load(path: Path) -> Claim | None:
    """A claim; None where there is none, or one that nobody can read: that protects nothing."""
    try:
        told = json.loads(path.read_text("utf-8"))
        return Claim(
            Run.of(told["run"]), str(told["unit"]), str(told["boot_id"]), float(told["began_s"]), float(told["seen_s"]),
            int(told["pid"]), int(told["ticks"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _clock(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a time that nobody can read"
