"""Units and their journal, through ``systemctl``, ``systemd-run`` and ``journalctl`` (systemd 249 and newer).

Field names: systemd.journal-fields(7), journalctl(1) "json", org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import FirstlightError
from .host_command import CommandResult, Runner, run_command

_QUERY_TIMEOUT_S = 30.0
_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,MainPID,InvocationID,ExecMainStatus,ExecMainCode,ControlGroup,"
    "NRestarts,UnitFileState,FragmentPath,NeedDaemonReload,ExecMainStartTimestampMonotonic,"
    "ExecMainExitTimestampMonotonic,ActiveEnterTimestampMonotonic,TriggeredBy,ExecStart,Restart,Job"
)
_EXIT_CODES = {
    1: "exited",
    2: "killed",
    3: "dumped",
}  # si_code of SIGCHLD: CLD_EXITED, CLD_KILLED, CLD_DUMPED


@dataclass(frozen=True)
class UnitState:
    """What systemd knows of a unit; the words are systemd's own.

    Times are seconds since the epoch, None when the event has not happened in this boot. ``exec_main_code``
    is ``exited``, ``killed``, ``dumped``, or empty while the main process runs; ``exec_main_status`` is then
    the exit status or the signal's number. ``n_restarts`` counts automatic restarts.
    """

    unit: str
    load_state: str
    active_state: str
    sub_state: str
    result: str
    main_pid: int
    invocation_id: str
    exec_main_status: int
    exec_main_code: str
    control_group: str
    n_restarts: int
    unit_file_state: str
    fragment_path: str
    need_daemon_reload: bool
    exec_main_start: float | None
    exec_main_exit: float | None
    active_enter: float | None
    triggered_by: tuple[str, ...]
    exec_start: str
    restart: str
    job: int

    @property
    def exists(self) -> bool:
        """Whether there is such a unit; a masked one exists."""
        return self.load_state not in {"not-found", ""}

    @property
    def masked(self) -> bool:
        """Whether the unit is masked, so that it cannot be started."""
        return self.load_state == "masked"

    @property
    def running(self) -> bool:
        """Whether it is active or on its way up or down: it may have processes."""
        return self.active_state in {"active", "activating", "deactivating", "reloading", "refreshing"}

    @property
    def enabled(self) -> bool:
        """Whether it is started at boot of its own accord."""
        return self.unit_file_state in {"enabled", "enabled-runtime"}

    @property
    def exit_text(self) -> str:
        """How the main process ended, for people: ``exit status 1``, ``signal 9 (SIGKILL)``; else empty."""
        if self.exec_main_code in {"killed", "dumped"}:
            try:
                name = f" ({signal.Signals(self.exec_main_status).name})"
            except ValueError:
                name = ""
            return f"signal {self.exec_main_status}{name}"
        return f"exit status {self.exec_main_status}" if self.exec_main_code == "exited" else ""


@dataclass(frozen=True)
class JournalEntry:
    """One journal entry. ``time_s`` is seconds since the epoch; ``pid`` is None when no process wrote it.

    ``manager`` is true for systemd's own words about the unit: start, death, out-of-memory kill, start limit.
    """

    time_s: float
    pid: int | None
    text: str
    cursor: str
    manager: bool = False


class Systemd:
    """The host's service manager.

    Args:
        run: how to run a program; tests hand in a recorded one.
    """

    def __init__(self, run: Runner = run_command) -> None:
        self._run = run

    def show(self, unit: str) -> UnitState:
        """State of one unit; of an unknown unit too (``exists`` is then false).

        Raises:
            FirstlightError: systemd does not answer.
        """
        states = self.show_many([unit])
        if not states:  # systemd answers for unknown units too, so this means a name that it cannot take
            raise FirstlightError(
                f"systemd knows no unit by the name {unit!r}.",
                where=unit,
                fix="Name one unit with its type, such as `sglang.service`.",
                kind="no-such-unit",
            )
        return states[0]

    def show_many(self, units: Sequence[str]) -> list[UnitState]:
        """State of several units in one call; a pattern such as ``*.service`` means the loaded ones."""
        answer = self._require(["systemctl", "show", f"--property={_PROPERTIES}", "--", *units], _QUERY_TIMEOUT_S)
        return parse_show(answer.stdout, time.time() - time.clock_gettime(time.CLOCK_MONOTONIC))

    def start(self, unit: str, *, timeout_s: float = 120.0, wait: bool = True) -> None:
        """Start a unit; with ``wait`` until its start job is done (for ``Type=exec``: until exec)."""
        self._job("start", unit, timeout_s, wait=wait)

    def stop(self, unit: str, *, timeout_s: float = 120.0, wait: bool = True) -> None:
        """Stop a unit; with ``wait`` until all of its processes are gone."""
        self._job("stop", unit, timeout_s, wait=wait)

    def restart(self, unit: str, *, timeout_s: float = 240.0, wait: bool = True) -> None:
        """Stop a unit if it runs, then start it."""
        self._job("restart", unit, timeout_s, wait=wait)

    def kill(self, unit: str, number: signal.Signals) -> None:
        """Signal every process in the unit's control group."""
        self._require(["systemctl", "kill", f"--signal={number.name}", "--", unit], _QUERY_TIMEOUT_S)

    def enable(self, unit: str) -> None:
        """Have the unit started at boot."""
        self._require(["systemctl", "enable", "--quiet", "--", unit], _QUERY_TIMEOUT_S)

    def disable(self, unit: str) -> None:
        """Do not have the unit started at boot. It goes on running."""
        self._require(["systemctl", "disable", "--quiet", "--", unit], _QUERY_TIMEOUT_S)

    def daemon_reload(self) -> None:
        """Read all unit files anew."""
        self._require(["systemctl", "daemon-reload"], 120.0)

    def reset_failed(self, unit: str) -> None:
        """Forget failures and the start limit of a unit; nothing happens when the unit is not loaded."""
        answer = self._run(["systemctl", "reset-failed", "--", unit], _QUERY_TIMEOUT_S)
        if answer.status != 0 and "not loaded" not in answer.stderr:
            raise _failed(["systemctl", "reset-failed", unit], answer)

    def run_transient(self, unit: str, options: Sequence[str], argv: Sequence[str]) -> None:
        """Start a program as a unit that exists only until it ends or the host reboots (``systemd-run``)."""
        command = ["systemd-run", "--quiet", f"--unit={unit}", *options, "--", *argv]
        self._require(command, _QUERY_TIMEOUT_S)

    def journal_lines(
        self, invocation_id: str, after_cursor: str | None = None, *, unit: str | None = None
    ) -> tuple[list[JournalEntry], str | None]:
        """Tell what one start of a unit wrote, and nothing that an earlier start wrote.

        Args:
            invocation_id: that start's ``InvocationID``.
            after_cursor: only what came after; pass the cursor that the last call returned.
            unit: also tell systemd's own messages about this start of the unit, in the same order of time.

        Returns:
            The entries, oldest first, and the cursor to pass next time.

        Raises:
            FirstlightError: ``journalctl`` failed.
        """
        matches = [f"_SYSTEMD_INVOCATION_ID={invocation_id}"]
        if unit is not None:
            matches += ["+", *_manager_matches(unit, invocation_id)]
        return self._journal(matches, after_cursor)

    def unit_messages(
        self, unit: str, invocation_id: str, after_cursor: str | None = None
    ) -> tuple[list[JournalEntry], str | None]:
        """Systemd's own messages about one start of a unit: deaths, out-of-memory kills, start limits."""
        return self._journal(_manager_matches(unit, invocation_id), after_cursor)

    def oom_kills(self, unit: str, since_s: float) -> list[str]:
        """What the kernel said since then of killing processes of a unit for their memory.

        On a host with control groups of version 1 nobody else tells: systemd does not, and the unit ends like any.

        Args:
            unit: name with ``.service``; the kernel's line names it by the path of its control group.
            since_s: seconds since the epoch.

        Raises:
            FirstlightError: ``journalctl`` failed.
        """
        argv = ["journalctl", "--output=cat", "--no-pager", "--quiet", f"--since=@{int(since_s)}", "_TRANSPORT=kernel"]
        lines = self._require(argv, _QUERY_TIMEOUT_S).stdout.splitlines()
        return [line for line in lines if line.startswith("oom-kill:") and f"/{unit}," in line]

    def sync_journal(self) -> None:
        """Have the journal write down all that it was handed so far, a dead unit's last lines too."""
        self._require(["journalctl", "--sync"], _QUERY_TIMEOUT_S)

    def _journal(self, matches: Sequence[str], after_cursor: str | None) -> tuple[list[JournalEntry], str | None]:
        # --all: without it a message above 4096 bytes is told as null
        argv = ["journalctl", "--output=json", "--no-pager", "--quiet", "--all"]
        argv.append("--output-fields=MESSAGE,_PID,INVOCATION_ID")
        if after_cursor:
            argv.append(f"--after-cursor={after_cursor}")
        entries = parse_journal(self._require([*argv, *matches], _QUERY_TIMEOUT_S).stdout)
        return entries, entries[-1].cursor if entries else after_cursor

    def _job(self, verb: str, unit: str, timeout_s: float, *, wait: bool) -> None:
        argv = ["systemctl", verb, *([] if wait else ["--no-block"]), "--", unit]
        answer = self._run(argv, timeout_s)
        if answer.status != 0:
            raise _failed(argv, answer)

    def _require(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        answer = self._run(argv, timeout_s)
        if answer.status != 0:
            raise _failed(argv, answer)
        return answer


def parse_show(text: str, boot_epoch_s: float) -> list[UnitState]:
    """Read ``systemctl show``: blocks of ``Name=value``, an empty line between units.

    Args:
        text: its output.
        boot_epoch_s: seconds since the epoch at which the monotonic clock was zero.
    """
    blocks: list[dict[str, str]] = [{}]
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if not line.strip():
            blocks.append({})
        elif equals and (name != "ExecStart" or name not in blocks[-1]):  # a oneshot may have several
            blocks[-1][name] = value
    return [_unit_state(block, boot_epoch_s) for block in blocks if block]


def parse_journal(text: str) -> list[JournalEntry]:
    """Read ``journalctl -o json``: an object a line. A message may be text, numbers (bytes), a list or null."""
    entries = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        record = json.loads(line)
        pid = _single(record.get("_PID"))
        entries.append(
            JournalEntry(
                time_s=int(record["__REALTIME_TIMESTAMP"]) / 1e6,
                pid=int(pid) if pid.isdecimal() else None,
                text=_field_text(record.get("MESSAGE")),
                cursor=str(record["__CURSOR"]),
                manager="INVOCATION_ID" in record,
            )
        )
    return entries


def _manager_matches(unit: str, invocation_id: str) -> list[str]:
    # _PID=1 is set by the journal itself, so that no program can pass for systemd
    return [f"UNIT={unit}", f"INVOCATION_ID={invocation_id}", "_PID=1"]


def _field_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if value and all(isinstance(byte, int) for byte in value):
            return bytes(value).decode("utf-8", "replace")
        return "\n".join(_field_text(part) for part in value)
    return ""


def _single(value: object) -> str:
    return _field_text(value).partition("\n")[0]


def _unit_state(block: Mapping[str, str], boot_epoch_s: float) -> UnitState:
    def whole(name: str) -> int:
        digits = block.get(name, "")
        return int(digits) if digits.isdecimal() else 0

    def moment(name: str) -> float | None:
        microseconds = whole(f"{name}TimestampMonotonic")
        return boot_epoch_s + microseconds / 1e6 if microseconds else None

    return UnitState(
        unit=block.get("Id", ""),
        load_state=block.get("LoadState", ""),
        active_state=block.get("ActiveState", ""),
        sub_state=block.get("SubState", ""),
        result=block.get("Result", ""),
        main_pid=whole("MainPID"),
        invocation_id=block.get("InvocationID", ""),
        exec_main_status=whole("ExecMainStatus"),
        exec_main_code=_EXIT_CODES.get(whole("ExecMainCode"), ""),
        control_group=block.get("ControlGroup", ""),
        n_restarts=whole("NRestarts"),
        unit_file_state=block.get("UnitFileState", ""),
        fragment_path=block.get("FragmentPath", ""),
        need_daemon_reload=block.get("NeedDaemonReload", "") == "yes",
        exec_main_start=moment("ExecMainStart"),
        exec_main_exit=moment("ExecMainExit"),
        active_enter=moment("ActiveEnter"),
        triggered_by=tuple(block.get("TriggeredBy", "").split()),
        exec_start=block.get("ExecStart", ""),
        restart=block.get("Restart", ""),
        job=whole("Job"),
    )


def _failed(argv: Sequence[str], answer: CommandResult) -> FirstlightError:
    if "not been booted with systemd" in answer.stderr or "connect to bus" in answer.stderr:
        return FirstlightError(
            f"systemd does not answer: {answer.complaint}",
            where=argv[0],
            fix="Use a host that boots with systemd, and connect as root.",
            kind="no-systemd",
        )
    unit = argv[-1]
    return FirstlightError(
        f"`{' '.join(argv)}` failed: {answer.complaint}",
        where=unit if argv[0] == "systemctl" else argv[0],
        fix=f"Read `systemctl status {unit}` and `journalctl -u {unit}` on the host."
        if argv[0] == "systemctl"
        else f"Run `{' '.join(argv)}` on the host.",
        kind="systemctl-failed" if argv[0] == "systemctl" else "command-failed",
    )
