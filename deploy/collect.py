"""Turns the events of a run into its result.

The playbooks speak through three keys of a task's result: ``firstlight_report`` (what the host now serves and
how it did in the smoke test), ``firstlight_status`` (what is on it) and ``failure`` (kind, cause and remedy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.events import Event, from_runner
from deploy.results import Acceptance, Failure, HostResult, Phase

# what single modules return beside these: preflight why a run is needed, prune what it freed, rollback what came back
_STATE_KEYS = ("reason", "freed_bytes", "removed", "restored", "answering")


@dataclass
class _Host:
    report: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    running: Event | None = None
    failures: list[Event] = field(default_factory=list)
    unreachable: Event | None = None
    warnings: list[str] = field(default_factory=list)


class Collector:
    """Takes in ansible-runner's events one by one.

    Attributes:
        exit_lines: the text that Ansible wrote outside tasks, the last 20 lines: why it never reached a host.
        pid: of ansible-playbook, known from its first event on.
    """

    def __init__(self) -> None:
        self.exit_lines: list[str] = []
        self.pid: int | None = None
        self._hosts: dict[str, _Host] = {}
        self._stats: Mapping[str, Any] | None = None

    def take(self, raw: Mapping[str, Any]) -> Event | None:
        """Remember what matters of one event, and return it typed; None when it says nothing to a user."""
        if isinstance(pid := raw.get("pid"), int):
            self.pid = pid
        if raw.get("event") == "playbook_on_stats":
            self._stats = raw.get("event_data") or {}
        event = from_runner(raw)
        if event is None:
            return None
        if event.kind in {"warning", "output"}:
            self.exit_lines = [*self.exit_lines, *event.text.splitlines()][-20:]
        if event.host:
            self._take_host(self._hosts.setdefault(event.host, _Host()), event)
        return event

    @property
    def reached_any(self) -> bool:
        """Whether the playbook tried a task on any host."""
        return bool(self._hosts) or bool(self._count_all("processed"))

    def hosts(self, stopped: str | None = None) -> dict[str, HostResult]:
        """One result for each host, in the order in which they were reached.

        Args:
            stopped: why the run was cut short, ``timeout`` or ``canceled``; None when it ended by itself.
        """
        if stopped is not None:
            for host in self._hosts.values():
                if not host.failures and host.unreachable is None:
                    host.failures.append(_stopped(stopped, host.running))
        names = dict.fromkeys([*self._hosts, *self._count_all("processed")])
        return {name: self._result(name, self._hosts.get(name, _Host())) for name in names}

    def _take_host(self, host: _Host, event: Event) -> None:
        if event.kind == "note":
            return
        state = _mapping(event.result.get("firstlight_status"))
        host.state.update(state or {key: event.result[key] for key in _STATE_KEYS if key in event.result})
        report = _mapping(event.result.get("firstlight_report") or state.get("report"))
        if report:
            host.report = dict(report)
        host.running = event if event.kind == "start" else None
        if event.kind == "failed" and not event.ignored:
            host.failures.append(event)
        elif event.kind == "unreachable":
            host.unreachable = event
        for warning in _strings(event.result.get("warnings")):
            if warning not in host.warnings:
                host.warnings.append(warning)

    def _count_all(self, what: str) -> Mapping[str, Any]:
        return _mapping((self._stats or {}).get(what))

    def _result(self, name: str, host: _Host) -> HostResult:
        if self._stats is None:  # the run was cut short: what was not mended by then counts
            failed, unreachable = bool(host.failures), host.unreachable is not None
        else:
            failed = bool(self._count_all("failures").get(name))
            unreachable = bool(self._count_all("dark").get(name))
        failure = None
        if unreachable and host.unreachable is not None:
            failure = _unreachable(host.unreachable)
        elif failed and host.failures:
            failure = _failure(host.failures, host.state)
        report = host.report
        warnings = dict.fromkeys([*_strings(report.get("warnings")), *host.warnings])
        return HostResult(
            ok=not failed and not unreachable,
            changed=bool(self._count_all("changed").get(name)),
            unreachable=unreachable,
            answer=_text(report.get("answer")),
            verdict=_text(report.get("verdict")),
            acceptance=acceptance_of(report.get("acceptance")),
            phases=phases_of(report.get("phases")),
            ready_s=_number(report.get("ready_s")),
            downtime_s=_number(report.get("downtime_s")),
            converged=report["converged"] if isinstance(report.get("converged"), bool) else None,
            release=_text(report.get("release")),
            model=_text(report.get("model")),
            base_url=_text(report.get("base_url")),
            verified_at=_text(report.get("verified_at")),
            failure=failure,
            warnings=tuple(warnings),
            report=report,
            state=host.state,
        )


def phases_of(value: object) -> tuple[Phase, ...]:
    """The phases in a task's result; empty when it holds none."""
    rows = [_mapping(row) for row in _list(value)]
    return tuple(
        Phase(str(row["name"]), float(row["seconds"]))
        for row in rows
        if "name" in row and _number(row.get("seconds")) is not None
    )


def acceptance_of(value: object) -> Acceptance | None:
    """The acceptance in a report; None when it holds none."""
    raw = _mapping(value)
    drafts, drafted, accepted = (_number(raw.get(key)) for key in ("drafts", "drafted", "accepted"))
    if drafts is None or drafted is None or accepted is None:
        return None
    return Acceptance(
        drafts=int(drafts),
        drafted=int(drafted),
        accepted=int(accepted),
        rate=_number(raw.get("rate")),
        length=_number(raw.get("length")),
        per_position=tuple(int(n) for n in map(_number, _list(raw.get("per_position"))) if n is not None),
    )


def _failure(events: Sequence[Event], state: Mapping[str, object]) -> Failure:
    """The fault that began it: it comes before those of the way back and before the task that ends the run."""
    explained = [event for event in events if _mapping(event.result.get("failure"))]
    origin = (explained or list(events))[0]
    message = _message(origin)
    # the play's last word may be the same cause once more; then the way back tells how it ended
    last = _message(events[-1])
    restored = _first(state, "reason") if "restored" in state else ""
    outcome = restored if last == message else last
    raw = _mapping(origin.result.get("failure"))
    return Failure(
        id=_first(raw, "id", "kind") or "task-failed",
        cause=_first(raw, "cause", "what") or message,
        remedy=_first(raw, "remedy", "fix"),
        message=message,
        where=_first(raw, "where"),
        task=origin.task,
        outcome=outcome,
    )


def _stopped(reason: str, running: Event | None) -> Event:
    where = f"in the task {running.task!r}" if running is not None else "between two tasks"
    what = "The time limit ended the run" if reason == "timeout" else "The run was canceled"
    fault = {
        "kind": reason,
        "what": f"{what} {where}.",
        "fix": "Run again: a run takes up an unfinished cutover where it was left.",
    }
    return Event(
        "failed",
        host=running.host if running is not None else "",
        task=running.task if running is not None else "",
        result={"msg": fault["what"], "failure": fault},
    )


def _unreachable(event: Event) -> Failure:
    message = _message(event)
    return Failure(
        id="unreachable",
        cause=message,
        remedy=f"See that `ssh` reaches {event.host} with the user and key of the inventory, then run again.",
        message=message,
        task=event.task,
    )


def _message(event: Event) -> str:
    message = _text(event.result.get("msg")) or _text(event.result.get("censored"))
    return message or f"The task {event.task!r} failed without a message."


def _first(raw: Mapping[str, Any], *keys: str) -> str:
    return next((str(raw[key]) for key in keys if raw.get(key)), "")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def _strings(value: object) -> list[str]:
    return [str(item) for item in _list(value)]


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(value)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
