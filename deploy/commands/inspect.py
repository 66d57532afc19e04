"""``firstlight inspect``: what a drafter is, the config.json it needs, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from ansible_collections.firstlight.vllm.plugins.module_utils import drafter_deploy, drafter_vllm_rules
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_report import (
    DrafterReport,
    problem_of,
    report_of,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError

USABLE, NOT_USABLE = 0, 2

_EPILOG = """exit status: 0 the drafter is usable, 2 it is not (the problems say why); nothing else.
Only the headers of the weights are read. docs/drafters.md explains families, sources and problems."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "inspect",
        help="derive and check a DFlash drafter's config.json from its bare safetensors",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the drafter's safetensors file (any name), index or folder")
    parser.add_argument("--target", metavar="PATH", default="", help="the target's folder or config.json")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a value that cannot be read off the weights, as JSON or text; may be repeated",
    )
    parser.add_argument(
        "--vllm",
        metavar="VERSION",
        default=drafter_vllm_rules.DEFAULT_VERSION,
        help="the vLLM that will serve (default %(default)s)",
    )
    parser.add_argument("--max-model-len", metavar="N", help="the longest sequence served, in tokens")
    parser.add_argument("--write", action="store_true", help="write config.json beside the weights, if usable")
    parser.add_argument(
        "--replace", action="store_true", help="ignore an existing config.json instead of checking and keeping it"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Inspect, print, and write if asked to."""
    note = ""
    try:
        plan = drafter_deploy.inspect(_job(args))
        report = plan.report
        if args.write and report.usable:
            drafter_deploy.apply(plan)
            note = f"{'wrote' if plan.changed else 'unchanged:'} {Path(plan.dest, drafter_deploy.CONFIG_NAME)}"
    except FirstlightError as error:
        report = report_of(error) if "report" not in locals() else _with_error(report, error)
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    else:
        _print_report(report, note)
    return USABLE if report.usable else NOT_USABLE


def _with_error(report: DrafterReport, error: FirstlightError) -> DrafterReport:
    return DrafterReport(report.family, report.config, report.fields, (problem_of(error), *report.problems))


def _job(args: argparse.Namespace) -> drafter_deploy.Job:
    return drafter_deploy.Job(
        path=args.path,
        target=args.target,
        vllm_version=args.vllm,
        max_model_len=_length(args.max_model_len),
        user=dict(_assignment(text) for text in args.set),
        families=load_families(),
        keep_existing=not args.replace,
        writing=args.write,
    )


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or not 0 < int(text) < 2**31:
        fix = "give a whole number of tokens, such as 32768"
        raise FirstlightError(f"'{text}' is no length.", where="--max-model-len", fix=fix, kind="bad-value")
    return int(text)


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        fix = "write it as --set mask_token_id=248070"
        raise FirstlightError(f"'{text}' is no KEY=VALUE.", where="--set", fix=fix, kind="bad-value")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def load_families() -> list[dict[str, Any]]:
    """Read the family table that the role ``drafter`` ships.

    Raises:
        FirstlightError: kind ``bad-family-table``.
    """
    import yaml  # noqa: PLC0415 - only this command reads YAML here

    path = Path(drafter_deploy.__file__).parents[2] / "roles" / "drafter" / "files" / "families.yml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        rows = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - a safe loader
    except (OSError, yaml.YAMLError) as error:
        fix = "install the collection firstlight.vllm again"
        raise FirstlightError(f"{error}", where=str(path), fix=fix, kind="bad-family-table") from error
    if not isinstance(rows, list):
        fix = "install the collection firstlight.vllm again"
        raise FirstlightError("is no list of rows.", where=str(path), fix=fix, kind="bad-family-table")
    return rows


def _plain(text: str) -> str:
    """Make names of files and tensors harmless to a terminal, and to rich."""
    from rich.markup import escape  # noqa: PLC0415

    return escape("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text))


def _print_report(report: DrafterReport, note: str) -> None:
    from rich.console import Console  # noqa: PLC0415 - not needed with --json
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    if report.fields:
        row = report.facts.get("row")
        known = f", {row}" if row else ", in no row of the family table"
        table = Table(title=f"{report.family}{known}", title_justify="left")
        for column in ("field", "value", "from", "note"):
            table.add_column(column, overflow="fold")
        for name, field in report.fields.items():
            table.add_row(name, escape(json.dumps(field.value)), field.source, _plain(field.note))
        console.print(table)
    for problem in report.problems:
        colour = "red" if problem.severity == "error" else "yellow"
        text = f"[{colour}]{problem.severity}[/{colour}] {problem.id}: {_plain(problem.message)}"
        console.print(f"{text} Fix: {_plain(problem.fix)}.", soft_wrap=True)
    if note:
        console.print(_plain(note), soft_wrap=True)
    console.print("usable" if report.usable else "not usable")
