"""Waiting for one start of the server: on facts, never on time.

One call watches for a slice of time and ends early when the server is ready or dead; the caller asks again until
then, and can tell a person in between how far the start has come. What counts is this start alone: the journal is
read by the unit's invocation id, the port must be held by the unit's own processes, the answer must name the model
asked for, and the process that answers must be the one that systemd started.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .diagnose import Verdict, diagnose_unit
from .errors import FirstlightError
from .metrics import parse, start_time
from .openai_api import Server
from .processes import Process, alive, listeners, read_process, tree_below
from .startup_phases import (
    Phase,
    auxiliary_layers,
    available_kv_gib,
    compile_cache_reused,
    phases,
    progress,
)
from .systemd import JournalEntry, Systemd, UnitState

POLL_S = 0.1
_UNIT_POLL_S = 0.4
_TREE_POLL_S = 0.5
_JOURNAL_POLL_S = 1.0
_LAST_WORDS_S = 0.3  # time for the lines of a death to reach the journal; a death is told within a second
_START_SKEW_S = 2.5  # /proc and Prometheus round the boot time differently
_HEARTBEAT = re.compile(r"No available shared memory broadcast block found")
_UNAVAILABLE = 503
_PROGRESS_BYTES = 1 << 20  # reading weights; the polling of an idle or hung process is far below
_STARTED = "Application startup complete."
_TAIL = 40


@dataclass(frozen=True)
class Expected:
    """What a ready server is.

    Attributes:
        unit: name with ``.service``.
        base_url, port: where it answers on this host.
        model: the name that ``/v1/models`` must hold.
        invocation_id: the start to wait for; empty for the one that runs now.
        deployment: variables for a diagnosis, without the role's prefix.
    """

    unit: str
    port: int
    model: str
    invocation_id: str = ""
    deployment: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Watch:
    """What the slices of one wait hand on.

    Attributes:
        invocation_id: the start watched.
        state: ``refused``, ``loading`` or ``ready``; empty before the first look.
        note: the latest milestone, for people.
        last_progress_s: when the start last got on, seconds since the epoch.
        bytes_read: what the unit's processes had read by then.
    """

    invocation_id: str = ""
    state: str = ""
    note: str = ""
    last_progress_s: float = 0.0
    bytes_read: int = 0


@dataclass(frozen=True)
class Ready:
    """A server that is ready.

    Attributes:
        seconds: from the start of its main process to readiness, wall clock.
        phases: its parts, which sum to ``seconds``.
        started_s, ready_s: seconds since the epoch.
        main_pid: the process that systemd started.
        evidence: what the journal told for the acceptance gate.
    """

    seconds: float
    phases: Sequence[Phase]
    started_s: float
    ready_s: float
    main_pid: int
    evidence: Mapping[str, Any]


class ServerDiedError(FirstlightError):
    """The start failed; carries the diagnosis."""

    def __init__(self, expected: Expected, verdict: Verdict, how: str, tail: Sequence[str]) -> None:
        self.verdict, self.tail = verdict, list(tail)
        line = f" Decisive line: {verdict.text}" if verdict.text else ""
        super().__init__(
            f"the server did not become ready ({how}). {verdict.cause}{line}",
            where=expected.unit,
            fix=verdict.remedy or f"read `journalctl -u {expected.unit}` on the host.",
            kind=verdict.id,
        )


def bytes_read(tree: Sequence[Process]) -> int:
    """Bytes that the processes have read so far: weights coming off a slow disk are progress without a line.

    Both by system calls (``rchar``) and from the disk (``read_bytes``): weights are mapped into memory, and what a
    page fault reads is in the second alone.
    """
    total = 0
    for process in tree:
        try:
            with open(f"/proc/{process.pid}/io", encoding="ascii") as handle:  # noqa: PTH123 - hot path
                figures = dict(line.split(": ") for line in handle)
            total += int(figures["rchar"]) + int(figures["read_bytes"])
        except (OSError, ValueError, KeyError):
            continue
    return total


def is_engine(process: Process) -> bool:
    """Whether a process is vLLM's engine or one of its workers, by the title that vLLM gives them."""
    return bool(process.cmdline) and process.cmdline[0].startswith("VLLM::")


class Waiter:
    """Watches one start of one unit.

    Args:
        expected: what a ready server is.
        server: HTTP to it.
        systemd: the host's service manager.
        clock, sleep: replaced by tests.
    """

    def __init__(
        self,
        expected: Expected,
        server: Server,
        systemd: Systemd,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._expected, self._server, self._systemd = expected, server, systemd
        self._clock, self._sleep = clock, sleep
        self._engines: dict[int, Process] = {}
        self._tree: list[Process] = []
        self._entries: list[JournalEntry] = []
        self._cursor: str | None = None

    def watch(self, watch: Watch, *, slice_s: float, stall_s: float) -> Ready | None:
        """Watch for at most ``slice_s`` seconds; None when the start is still going on.

        Args:
            watch: handed on from slice to slice; updated in place.
            slice_s: seconds to watch.
            stall_s: seconds without any progress after which the start counts as hung.

        Raises:
            ServerDiedError: the unit, the engine or a worker ended, or the start hung.
            FirstlightError: another server answers, another model, or the key is refused.
        """
        state = self._systemd.show(self._expected.unit)
        watch.invocation_id = watch.invocation_id or self._expected.invocation_id or state.invocation_id
        self._require_alive(state, watch)
        main = read_process(state.main_pid)
        if main is None:
            self._died(watch, "its main process ended")
            raise AssertionError  # _died always raises
        watch.last_progress_s = max(watch.last_progress_s, main.start_time_s)
        end = self._clock() + slice_s
        due = dict.fromkeys(("unit", "tree", "journal"), 0.0)
        while True:
            now = self._clock()
            if not alive(main):
                self._died(watch, "its main process ended")
            self._require_engines(watch)
            if now >= due["tree"]:
                self._look_at_tree(main, watch)
                due["tree"] = now + _TREE_POLL_S
            if now >= due["unit"]:
                state = self._systemd.show(self._expected.unit)
                self._require_alive(state, watch)
                due["unit"] = now + _UNIT_POLL_S
            if now >= due["journal"]:
                self._read_journal(watch)
                due["journal"] = now + _JOURNAL_POLL_S
            first_look = not watch.state
            if self._answers(main, watch):
                return self._ready(state, main, watch, first_look=first_look)
            if now - watch.last_progress_s > stall_s:
                self._died(watch, f"no progress for {now - watch.last_progress_s:.0f} s")
            if now >= end:
                return None
            self._sleep(POLL_S)

    def _require_alive(self, state: UnitState, watch: Watch) -> None:
        if not state.exists or state.masked:
            raise FirstlightError(
                "there is no such unit, or it is masked.",
                where=self._expected.unit,
                fix=f"run `systemctl unmask {self._expected.unit}` and site.yml again.",
                kind="unit-masked" if state.masked else "unit-missing",
            )
        if state.invocation_id == watch.invocation_id and state.active_state == "active" and state.main_pid:
            return
        how = state.exit_text or f"{state.active_state}, {state.result}"
        if state.invocation_id != watch.invocation_id:
            how = "it ended and was started anew"
        self._died(watch, f"the unit is down: {how}")

    def _require_engines(self, watch: Watch) -> None:
        for process in self._engines.values():
            if not alive(process):
                self._died(watch, f"{process.cmdline[0]} (pid {process.pid}) ended")

    def _look_at_tree(self, main: Process, watch: Watch) -> None:
        self._tree = [main, *tree_below(main.pid)]
        for process in self._tree:
            if is_engine(process):
                self._engines.setdefault(process.pid, process)
        read = bytes_read(self._tree)
        if read < watch.bytes_read:  # a process that had read has ended
            watch.bytes_read = read
        elif read - watch.bytes_read >= _PROGRESS_BYTES:
            watch.bytes_read, watch.last_progress_s = read, self._clock()

    def _read_journal(self, watch: Watch) -> None:
        fresh, self._cursor = self._systemd.journal_lines(watch.invocation_id, self._cursor, unit=self._expected.unit)
        self._entries += fresh
        for entry in fresh:
            if not _HEARTBEAT.search(entry.text):
                watch.last_progress_s = max(watch.last_progress_s, entry.time_s)
            watch.note = progress(entry.text) or watch.note

    def _answers(self, main: Process, watch: Watch) -> bool:
        reply = self._server.health(timeout_s=2.0)
        if reply.status is None:
            watch.state = "refused" if reply.outcome == "refused" else "loading"
            return False
        self._require_own_port(main)
        if not reply.ok:
            watch.state = "loading"
            if reply.status == _UNAVAILABLE:
                self._died(watch, "/health says 503: its engine is dead")
            return False
        self._require_model()
        self._require_identity(main)
        watch.state = "ready"
        return True

    def _require_own_port(self, main: Process) -> None:
        """Refuse a port that others hold too: with SO_REUSEPORT two servers would share the requests."""
        tree = [process.pid for process in self._tree]
        if all(listener.pid for listener in listeners(self._expected.port, among=tree)):
            return  # the usual case; a look at all processes of a big host would take too long for it
        seen = listeners(self._expected.port)
        # read after the sockets, so that a child forked in between cannot pass for a stranger
        own = {main.pid, *(process.pid for process in tree_below(main.pid))}
        others = [(x, read_process(x.pid) if x.pid else None) for x in seen if x.pid not in own]
        foreign = [(x, holder) for x, holder in others if holder or x.pid is None]
        if foreign:
            listener, holder = foreign[0]
            who = f"pid {listener.pid} ({holder.command})" if holder else "a process that cannot be seen"
            raise FirstlightError(
                f"port {self._expected.port} is held by {who}, which is not the new server.",
                where="vllm_server_port",
                fix="stop that process, or set another vllm_server_port.",
                kind="port-in-use",
            )

    def _require_model(self) -> None:
        self._server.model(self._expected.model)

    def _require_identity(self, main: Process) -> None:
        reply = self._server.get("/metrics")
        told = start_time(parse(reply.text())) if reply.ok else None
        if told is not None and abs(told - main.start_time_s) > _START_SKEW_S:
            raise FirstlightError(
                f"the process that answers started at {told:.0f}, the unit's at {main.start_time_s:.0f}.",
                where=self._server.base_url,
                fix="stop the other server on this port.",
                kind="wrong-process",
            )

    def _ready(self, state: UnitState, main: Process, watch: Watch, *, first_look: bool) -> Ready:
        ready_s = self._clock()
        self._systemd.sync_journal()
        self._read_journal(watch)
        if first_look:
            # it was ready before anyone looked, perhaps days ago: its own journal tells when
            ready_s = next((e.time_s for e in self._entries if _STARTED in e.text), ready_s)
        started_s = state.exec_main_start or main.start_time_s
        own = [(entry.time_s, entry.text) for entry in self._entries if not entry.manager]
        lines = [text for _, text in own]
        return Ready(
            seconds=ready_s - started_s,
            phases=phases(own, started_s, ready_s),
            started_s=started_s,
            ready_s=ready_s,
            main_pid=main.pid,
            evidence={
                "log_taps": auxiliary_layers(lines),
                "compile_cache_reused": compile_cache_reused(lines),
                "available_kv_gib": available_kv_gib(lines),
            },
        )

    def _died(self, watch: Watch, how: str) -> None:
        """Gather this start's last words and raise `ServerDiedError` with their diagnosis."""
        state = self._last_state(watch)
        self._systemd.sync_journal()
        entries, _ = self._systemd.journal_lines(watch.invocation_id, None, unit=self._expected.unit)
        lines = [entry.text for entry in entries]
        with contextlib.suppress(FirstlightError):  # a kernel's log that cannot be read must not hide the rest
            lines += self._systemd.oom_kills(self._expected.unit, entries[0].time_s) if entries else []
        verdict = diagnose_unit(
            result=state.result if state else "",
            exec_main_code=state.exec_main_code if state else "",
            exec_main_status=state.exec_main_status if state else 0,
            lines=lines,
            deployment=self._expected.deployment,
        )
        if not verdict.failed:  # it ended all the same, and no word of its log says why
            verdict = replace(
                verdict,
                id="unknown",
                cause="Its log names no failure.",
                remedy=f"read `journalctl -u {self._expected.unit}` on the host.",
            )
        raise ServerDiedError(self._expected, verdict, how, lines[-_TAIL:])

    def _last_state(self, watch: Watch) -> UnitState | None:
        """How this start left the unit, once its last words have had time; a restart hides it, then None."""
        kept, end = None, self._clock() + _LAST_WORDS_S
        while True:
            state = self._systemd.show(self._expected.unit)
            restarted = state.invocation_id != watch.invocation_id
            kept = kept if restarted else state
            left = end - self._clock()
            if left <= 0:
                return kept
            self._sleep(left if restarted else min(POLL_S, left))
