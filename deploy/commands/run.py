"""The commands that run a playbook: `firstlight run` and one for each other verb."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import deploy
from deploy.errors import ExtraVarsError
from deploy.results import RunResult

# command -> (playbook, what it does)
VERBS = {
    "run": ("site", "take hosts to vLLM with speculative decoding, proven or rolled back"),
    "preflight": ("preflight", "judge hosts and variables; change nothing"),
    "status": ("status", "say what serves on each host; change nothing"),
    "rollback": ("rollback", "bring the former server, or the former release, back"),
    "remove": ("remove", "take firstlight's server and files off the hosts"),
    "proxy": ("proxy", "put a TLS proxy with an allow-list of paths in front of the server"),
    "wheelhouse": ("wheelhouse", "collect all packages on a host, for installing without an index"),
    "prune": ("prune", "remove releases, venvs and caches that nothing uses any more"),
}
EXIT_STATUS = {"successful": 0, "failed": 1, "unreachable": 3, "timeout": 4, "canceled": 130}
EXIT_HELP = (
    "exit status: 0 every host is fine; 1 a host failed; 2 bad arguments or inventory; "
    "3 a host could not be reached, and nothing else failed; 4 the time limit ended the run; 130 interrupted"
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add one parser for each verb."""
    for command, (_, description) in VERBS.items():
        parser = subparsers.add_parser(
            command, help=description, description=f"{description[0].upper()}{description[1:]}.", epilog=EXIT_HELP
        )
        add_arguments(parser)
        parser.set_defaults(func=run, command=command)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every verb understands."""
    parser.add_argument(
        "-i",
        "--inventory",
        action="append",
        metavar="PATH",
        help="inventory file or folder, or host1,host2; may be repeated; default: what ansible.cfg names",
    )
    parser.add_argument(
        "-e",
        "--extra-vars",
        action="append",
        default=[],
        metavar="KEY=VALUE|@FILE",
        help="a variable, a YAML file, or a JSON object; may be repeated, the last wins; true, false, whole "
        "numbers, [lists] and {mappings} are read as such, all else as text; put secrets into a file",
    )
    parser.add_argument("-l", "--limit", metavar="PATTERN", help="keep to these hosts")
    parser.add_argument("-C", "--check", action="store_true", help="say what would change, and change nothing")
    parser.add_argument("-D", "--diff", action="store_true", help="show differences of files")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the run after so long")
    parser.add_argument("--forks", type=int, metavar="N", help="hosts at a time")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="more of Ansible's own output")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return the exit status."""
    from rich.console import Console  # noqa: PLC0415 - most commands, and --json, print without it

    from deploy.report import print_result  # noqa: PLC0415

    playbook, _ = VERBS[args.command]
    result = execute(args, playbook=playbook, inventory=args.inventory, extravars=extra_vars(args.extra_vars))
    if args.json:
        print_json(result.as_dict())
    else:
        print_result(result, Console(), check=args.check)
    return EXIT_STATUS[result.status]


def execute(
    args: argparse.Namespace, *, playbook: str, inventory: list[str] | None, extravars: list[dict[str, Any] | Path]
) -> RunResult:
    """Run a playbook with progress on standard error.

    Raises:
        DeployError: see `deploy.run`.
        KeyboardInterrupt: the user interrupted.
    """
    from rich.console import Console  # noqa: PLC0415

    from deploy.progress import NoProgress, progress_for  # noqa: PLC0415

    console = Console(stderr=True)
    progress = NoProgress() if args.quiet else progress_for(console)
    verbose = args.verbose and not args.quiet
    diff = args.diff and not args.quiet

    def on_event(event: deploy.Event) -> None:
        progress.event(event)
        if verbose and event.kind == "output":
            console.print(event.text, markup=False, highlight=False)
        if diff and (text := diff_text(event)):
            console.print(text, markup=False, highlight=False)

    with contextlib.closing(progress), _terminated() as cancel:
        return deploy.run(
            inventory=inventory,
            extravars=extravars,
            limit=args.limit,
            check=args.check,
            diff=args.diff,
            playbook=playbook,
            on_event=on_event,
            on_tick=progress.tick,
            timeout=args.timeout,
            verbosity=args.verbose,
            forks=args.forks,
            cancel=cancel,
        )


def extra_vars(items: list[str]) -> list[dict[str, Any] | Path]:
    """The values of ``-e`` in order.

    Raises:
        ExtraVarsError: one is neither ``key=value``, ``@file`` nor a JSON object.
    """
    return [_extra_var(item) for item in items]


def print_json(document: dict[str, object]) -> None:
    """Print one JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()


def diff_text(event: deploy.Event) -> str:
    """The difference in an event's result as text; empty when there is none."""
    diffs = event.result.get("diff") or []
    lines: list[str] = []
    for diff in diffs if isinstance(diffs, list) else [diffs]:
        if isinstance(diff, dict):
            lines += _diff_lines(diff)
    return "\n".join(lines)


def _diff_lines(diff: dict[str, Any]) -> list[str]:
    if diff.get("prepared"):
        return [str(diff["prepared"]).rstrip("\n")]
    before, after = (_diff_side(diff.get(side)) for side in ("before", "after"))
    if before == after:
        return []
    old, new = (str(diff.get(f"{side}_header") or side) for side in ("before", "after"))
    return list(difflib.unified_diff(before, after, old, new, lineterm=""))


def _diff_side(value: object) -> list[str]:
    text = value if isinstance(value, str) else yaml.safe_dump(value) if value else ""
    return text.splitlines()


def _extra_var(item: str) -> dict[str, Any] | Path:
    if item.startswith("@"):
        return Path(item[1:])
    if item.lstrip().startswith("{"):
        value = _structure("-e", item)
        if not isinstance(value, dict):
            raise ExtraVarsError("-e: the text in braces is no mapping.", 'Write {"key": "value"}.')
        return value
    key, equals, text = item.partition("=")
    if not equals or not key.strip().isidentifier():
        # the text may be a secret with its name left out, so it is not repeated
        raise ExtraVarsError("-e: expected KEY=VALUE, @FILE or a JSON object.", "Write -e key=value.")
    return {key.strip(): _value(key.strip(), text)}


def _value(key: str, text: str) -> object:
    """Text, except where it can be nothing else: a version like 0.20 must not become a number."""
    if text in {"true", "false"}:
        return text == "true"
    if text.removeprefix("-").isdecimal() and text.isascii() and (text == "0" or not text.startswith("0")):
        return int(text)
    if text[:1] in {"[", "{"} and not text.startswith("{{"):
        return _structure(f"-e {key}", text)
    return text


def _structure(where: str, text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        column = f" at character {mark.column + 1}" if mark is not None else ""
        raise ExtraVarsError(f"{where}: the list or mapping does not parse{column}.", "Write it as JSON.") from error


@contextlib.contextmanager
def _terminated() -> Iterator[threading.Event]:
    """An event that SIGTERM sets while inside: ansible-playbook must not outlive this process."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, before)
