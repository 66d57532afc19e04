"""Shows a run while it happens: a live table on a terminal, plain lines elsewhere.

Nothing streams out of an Ansible task while it runs on the host, so a long task shows its name, its time and,
when something else watches the host, the note that it hands in with `Progress.note`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.collect import phases_of
from deploy.events import Event
from deploy.results import Phase

_HEARTBEAT_S = 30.0  # how often plain output says that a long task still runs
_ARGUMENT_CHECK = "Validating arguments against arg spec"  # Ansible's own task before a role


class Progress(Protocol):
    """What a display of a run can do."""

    def event(self, event: Event) -> None:
        """Take a step of the run."""

    def note(self, host: str, text: str) -> None:
        """Say what a host is doing inside its task; an empty text takes the note back."""

    def tick(self) -> None:
        """Bring times and spinners up to date; called several times a second."""

    def close(self) -> None:
        """Leave the display; what was printed above it stays."""


@dataclass
class _Doing:
    """What one host is doing."""

    task: str = ""
    since: float = 0.0
    note: str = ""
    told_at: float = 0.0
    phases: list[Phase] = field(default_factory=list)


class Hosts:
    """What each host is doing, kept up to date by events: what both displays share."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.doing: dict[str, _Doing] = {}

    def event(self, event: Event) -> list[str]:
        """Take an event; the lines worth keeping that it gives."""
        if event.kind == "warning":
            return [f"warning: {' '.join(event.text.split())}"]
        if not event.host:
            return []
        if event.kind == "note":
            return [f"{event.host}: {event.text}"] if self.note(event.host, event.text) else []
        doing = self.doing.setdefault(event.host, _Doing())
        if event.kind == "start":
            doing.task, doing.since, doing.told_at = title(event), time.monotonic(), time.monotonic()
            return []
        doing.task, doing.note = "", ""
        return [*self._outcome(event), *self._phases(doing, event)]

    def note(self, host: str, text: str) -> bool:
        """Set a host's note; whether it is a new one."""
        doing = self.doing.setdefault(host, _Doing())
        new, doing.note = text != doing.note and bool(text), text
        return new

    def _outcome(self, event: Event) -> list[str]:
        if event.kind == "unreachable":
            return [f"{event.host}: unreachable: {_message(event)}"]
        if event.kind == "failed" and not event.ignored:
            return [f"{event.host}: failed: {title(event)}: {_message(event)}"]
        if event.kind == "ok" and event.changed:
            return [f"{event.host}: changed: {title(event)} ({duration(event.seconds or 0)})"]
        return []

    def _phases(self, doing: _Doing, event: Event) -> list[str]:
        report = event.result.get("firstlight_report")
        found = phases_of(event.result.get("phases"))
        if not found and isinstance(report, dict):
            found = phases_of(report.get("phases"))
        new = [phase for phase in found if phase not in doing.phases]
        doing.phases.extend(new)
        return [f"{event.host}: {phase.name} took {duration(phase.seconds)}" for phase in new]


class LineProgress:
    """One line for each thing that happens; for logs and pipes.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._hosts = Hosts()

    def event(self, event: Event) -> None:
        """Print the event when it says something new."""
        lines = self._hosts.event(event)
        if event.kind == "start":
            lines = [f"{event.host}: {title(event)}"]
        for line in lines:
            self._print(line)

    def note(self, host: str, text: str) -> None:
        """Print the note when it is a new one."""
        if self._hosts.note(host, text):
            self._print(f"{host}: {text}")

    def tick(self) -> None:
        """Now and then say that a long task still runs."""
        now = time.monotonic()
        for host, doing in self._hosts.doing.items():
            if doing.task and now - doing.told_at >= _HEARTBEAT_S:
                doing.told_at = now
                self._print(f"{host}: {doing.task}, for {duration(now - doing.since)}{_tail(doing.note)}")

    def close(self) -> None:
        """Nothing is left to do: every line is out."""

    def _print(self, line: str) -> None:
        # no console.print: it would wrap, and a log's reader greps whole lines
        self._console.file.write(f"{time.monotonic() - self._hosts.began:7.1f} s  {line}\n")
        self._console.file.flush()


class LiveProgress:
    """A table of the hosts that keeps itself up to date; for terminals.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._hosts = Hosts()
        self._spinner = Spinner("dots")
        # refreshed by tick: a refreshing thread would be in the way of starting processes
        self._live = Live(self, console=console, auto_refresh=False, transient=True)
        self._live.start()

    def event(self, event: Event) -> None:
        """Print what stays above the table, and bring the table up to date."""
        lines = self._hosts.event(event)
        if event.kind == "note":  # it has its place in the table
            return
        for line in lines:
            self._console.print(Text(line, style=_style(event)))

    def note(self, host: str, text: str) -> None:
        """Show the note beside the host's task."""
        self._hosts.note(host, text)

    def tick(self) -> None:
        """Draw the table anew."""
        self._live.refresh()

    def close(self) -> None:
        """Take the table off the terminal."""
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table; called by rich."""
        now = time.monotonic()
        table = Table.grid(padding=(0, 1))
        for host, doing in self._hosts.doing.items():
            if doing.task:
                elapsed = duration(now - doing.since)
                table.add_row(
                    self._spinner, f"[bold]{escape(host)}[/]", escape(doing.task + _tail(doing.note)), elapsed
                )
            else:
                table.add_row("", f"[bold]{escape(host)}[/]", "[dim]waits for the others[/]", "")
        yield table
        yield Text(f"{duration(now - self._hosts.began)} since the start", style="dim")


class NoProgress:
    """Shows nothing."""

    def event(self, event: Event) -> None:
        """Ignore it."""

    def note(self, host: str, text: str) -> None:
        """Ignore it."""

    def tick(self) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Ignore it."""


def progress_for(console: Console) -> Progress:
    """The display that fits where the output goes."""
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


def title(event: Event) -> str:
    """The task as a user reads it, with its role."""
    task = "check the variables" if event.task.startswith(_ARGUMENT_CHECK) else event.task
    return f"{event.role}: {task}" if event.role else task


def duration(seconds: float) -> str:
    """Seconds as ``0.4 s``, ``12 s``, ``3 min 05 s`` or ``1 h 02 min``."""
    if seconds < 10:  # noqa: PLR2004 - below ten, a decimal says something
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:  # noqa: PLR2004
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _tail(note: str) -> str:
    return f": {note}" if note else ""


def _message(event: Event) -> str:
    text = str(event.result.get("msg") or event.result.get("censored") or "no message")
    return " ".join(text.split())


def _style(event: Event) -> str:
    return {"failed": "red", "unreachable": "red", "warning": "yellow"}.get(event.kind, "")
