"""Prints the result of a run for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deploy.progress import duration
from deploy.results import Acceptance, Failure, HostResult, Phase, RunResult

# what of a report has its own place above; the rest is listed by name
_SHOWN = frozenset({
    "answer", "verdict", "acceptance", "phases", "ready_s", "downtime_s", "converged", "warnings", "release", "model",
    "base_url", "verified_at", "ready_at", "started_at", "seconds", "downtime_ratio",
})  # fmt: skip


def print_result(result: RunResult, console: Console, *, check: bool = False) -> None:
    """Print one panel for each host, and one line for the run.

    Args:
        result: what `deploy.run` returned.
        console: where to print.
        check: whether the run was told to change nothing.
    """
    for name, host in result.hosts.items():
        console.print(Panel(_host(host), title=_title(name, host, check=check), title_align="left", expand=False))
    good = sum(host.ok for host in result.hosts.values())
    style = "green" if result.ok else "red"
    count = f"{good} of {len(result.hosts)} hosts fine"
    console.print(Text(f"{result.status}: {count}, {duration(result.seconds)}", style=style))


def _title(name: str, host: HostResult, *, check: bool) -> str:
    if host.unreachable:
        state = "[red]unreachable[/]"
    elif not host.ok:
        state = "[red]failed[/]"
    elif host.converged:
        state = "[green]already as asked for[/]"
    elif host.changed:
        state = "[yellow]would change[/]" if check else "[green]changed[/]"
    else:
        state = "[green]ok[/]"
    return f"[bold]{escape(name)}[/] {state}"


def _host(host: HostResult) -> RenderableType:
    from rich.syntax import Syntax  # noqa: PLC0415 - the lexers take a quarter of a second

    parts: list[RenderableType] = []
    if host.failure is not None:
        parts.append(_failure(host.failure))
    if host.answer:
        parts.append(Syntax(host.answer.strip(), "markdown", background_color="default", word_wrap=True))
    parts.append(_facts(host))
    if host.phases:
        parts.append(_phases(host.phases))
    parts += [Text(f"warning: {text}", style="yellow") for text in host.warnings]
    return Group(*parts)


def _facts(host: HostResult) -> Table:
    rows = {
        "verdict": host.verdict,
        "acceptance": acceptance_text(host.acceptance),
        "ready after": None if host.ready_s is None else duration(host.ready_s),
        "downtime": _downtime(host),
        "model": host.model,
        "served at": host.base_url,
        "release": host.release,
        "verified at": host.verified_at,
        "smoke test": duration(seconds) if isinstance(seconds := host.report.get("seconds"), float) else None,
    }
    for key, value in host.report.items():
        if key not in _SHOWN and isinstance(value, str | int | float | bool):
            rows[key.replace("_", " ")] = str(value)
    # why a run is needed says nothing once it has been made
    rows.update(_state({key: value for key, value in host.state.items() if key != "reason" or not host.report}))
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        if text:
            table.add_row(Text(name, style="dim"), Text(text))
    return table


def _downtime(host: HostResult) -> str | None:
    if host.downtime_s is None:
        return None
    ratio = "" if host.downtime_ratio is None else f", {host.downtime_ratio:.3f} times the start"
    return f"{duration(host.downtime_s)}{ratio}"


def _state(state: Mapping[str, object]) -> dict[str, str]:
    """What of a host's state says something in a line each."""
    rows = {}
    for key, value in state.items():
        name = key.replace("_", " ")
        if key == "unit" and isinstance(value, Mapping):
            enabled = "enabled" if value.get("enabled") else "not enabled"
            rows[name] = f"{value.get('name')}: {value.get('active')}, {enabled}, {value.get('restarts')} restarts"
        elif key == "releases" and isinstance(value, list):
            rows[name] = ", ".join(str(release.get("id")) for release in value if isinstance(release, Mapping))
        elif key == "restored" and isinstance(value, Mapping):
            rows[name] = str(value.get("unit") or value.get("name") or value.get("kind") or "")
        elif key == "freed_bytes" and isinstance(value, int):
            rows["freed"] = f"{value / 1e9:.2f} GB"
        elif isinstance(value, bool):
            rows[name] = "yes" if value else "no"
        elif isinstance(value, str):
            rows[name] = value
        elif isinstance(value, list):
            rows[name] = ", ".join(map(str, value))
    return rows


def acceptance_text(acceptance: Acceptance | None) -> str | None:
    """Speculation in one line; None when there was none."""
    if acceptance is None:
        return None
    if acceptance.length is None or acceptance.rate is None:
        return "nothing was drafted"
    counts = f"{acceptance.accepted} of {acceptance.drafted} drafted tokens accepted ({acceptance.rate:.1%})"
    return f"mean length {acceptance.length:.2f}: {counts}"


def _phases(phases: tuple[Phase, ...]) -> Table:
    longest = max(phase.seconds for phase in phases) or 1.0
    table = Table.grid(padding=(0, 2))
    for phase in phases:
        bar = "█" * max(1, round(20 * phase.seconds / longest))
        table.add_row(Text(phase.name, style="dim"), Text(f"{phase.seconds:.1f} s", justify="right"), Text(bar, "blue"))
    table.add_row(Text("start to ready"), Text(f"{sum(p.seconds for p in phases):.1f} s", justify="right"), "")
    return table


def _failure(failure: Failure) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("cause", style="red"), Text(f"{failure.cause} [{failure.id}]"))
    if failure.task:
        table.add_row(Text("task", style="dim"), Text(failure.task))
    if failure.where:
        table.add_row(Text("where", style="dim"), Text(failure.where))
    if failure.message and failure.cause not in failure.message:
        table.add_row(Text("message", style="dim"), Text(failure.message))
    if failure.remedy:
        table.add_row(Text("fix", style="green"), Text(failure.remedy))
    if failure.outcome:
        table.add_row(Text("then", style="dim"), Text(failure.outcome))
    return table
