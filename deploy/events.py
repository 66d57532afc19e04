"""What happens during a run, one typed event at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["play", "task", "start", "note", "ok", "skipped", "failed", "unreachable", "warning", "output"]

_HOST_KINDS: Mapping[str, Kind] = {
    "runner_on_start": "start",
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
}
_TEXT_KINDS: Mapping[str, Kind] = {
    "warning": "warning",
    "system_warning": "warning",
    "deprecated": "output",
    "error": "output",
    "verbose": "output",
    "debug": "output",
    "playbook_on_no_hosts_matched": "output",
    "playbook_on_no_hosts_remaining": "output",
}
# how an action that watches a host from here says what goes on there
_NOTE = re.compile(r"\[(?P<host>\S+)\] firstlight: (?P<text>.+)")


@dataclass(frozen=True)
class Event:
    """One step of a run.

    Attributes:
        kind: ``play`` and ``task`` begin one; ``start`` to ``unreachable`` concern one host and one task, where
            ``note`` says what the host is doing inside it; ``warning`` and ``output`` are text from Ansible itself.
        host: the inventory's name of the host; empty for ``play``, ``task`` and text.
        task: the task's, or for ``play`` the play's, name.
        role: short name of the task's role; empty outside roles.
        changed: the task changed the host, or in check mode would.
        ignored: the task failed and the playbook goes on all the same.
        seconds: how long the task took on this host.
        result: what the task returned, censored where the task says ``no_log``.
        text: the text of ``note``, ``warning`` and ``output``.
    """

    kind: Kind
    host: str = ""
    task: str = ""
    role: str = ""
    changed: bool = False
    ignored: bool = False
    seconds: float | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


def from_runner(raw: Mapping[str, Any]) -> Event | None:
    """Translate an event of ansible-runner; None for those that say nothing to a user."""
    name = str(raw.get("event", ""))
    data = raw.get("event_data")
    data = data if isinstance(data, Mapping) else {}
    if name in _HOST_KINDS:
        return _host_event(_HOST_KINDS[name], data)
    if name == "playbook_on_play_start":
        return Event("play", task=str(data.get("name") or data.get("play") or ""))
    if name in {"playbook_on_task_start", "playbook_on_handler_task_start"}:
        return Event("task", task=_task_name(data), role=_role(data))
    if name in _TEXT_KINDS:
        text = str(raw.get("stdout") or "").strip()
        if note := _NOTE.fullmatch(text):
            return Event("note", host=note["host"], text=note["text"])
        return Event(_TEXT_KINDS[name], text=text) if text else None
    return None


def _host_event(kind: Kind, data: Mapping[str, Any]) -> Event:
    result = data.get("res")
    result = result if isinstance(result, Mapping) else {}
    duration = data.get("duration")
    return Event(
        kind,
        host=str(data.get("host", "")),
        task=_task_name(data),
        role=_role(data),
        changed=result.get("changed") is True,
        ignored=data.get("ignore_errors") is True,
        seconds=float(duration) if isinstance(duration, int | float) else None,
        result=result,
    )


def _task_name(data: Mapping[str, Any]) -> str:
    name = str(data.get("name") or data.get("task") or "")
    role = str(data.get("resolved_role") or data.get("role") or "")
    # Ansible puts the role before the name in one event and not in the other
    return name.removeprefix(f"{role} : ").removeprefix(f"{_role(data)} : ")


def _role(data: Mapping[str, Any]) -> str:
    return str(data.get("role") or "").rpartition(".")[2]
