"""``firstlight diagnose``: why a server failed, from its logs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import Verdict, diagnose
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_catalogue import NONE, UNKNOWN
from ansible_collections.firstlight.vllm.plugins.module_utils.log_lines import read_lines

READ, UNREADABLE = 0, 2
_SHOWN = 300
_PREFIX = "vllm_server_"

_EPILOG = """Each log gets one verdict: a kind of failure (docs/failures.md lists them), `none` for a server that is
well, or `unknown` where the log does not tell. The logs may come from journalctl, docker or a file; of several starts
in one log the last decides.

exit status: 0 every log was read, whatever its verdict; 2 a log could not be read, or bad arguments."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "diagnose",
        help="say why a vLLM server failed, from its logs",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("logs", metavar="LOGFILE", nargs="+", help="a log; - reads standard input")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON, a list with one for each log")
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_setting,
        help="a variable of the deployment, such as max_num_seqs=16, for a remedy in its numbers; may be repeated",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Diagnose every log and print the verdicts; return the exit status."""
    deployment = dict(args.set)
    status = READ
    verdicts: list[tuple[str, Verdict]] = []
    for name in args.logs:
        try:
            verdict = _read(name, deployment)
        except OSError as error:
            status = UNREADABLE
            why = error.strerror or str(error)
            print(f"firstlight diagnose: {name}: {why}", file=sys.stderr)
            verdict = Verdict(UNKNOWN, None, "", f"The log cannot be read: {why}.", "Give the path of a readable file.")
        verdicts.append((name, verdict))
        if not args.json:
            print(_for_people(name, verdict))
    if args.json:
        print(json.dumps([{"file": name, **verdict.as_dict()} for name, verdict in verdicts], indent=2))
    return status


def _read(name: str, deployment: Mapping[str, object]) -> Verdict:
    if name == "-":
        return diagnose(read_lines(sys.stdin.buffer), deployment)
    with Path(name).open("rb") as stream:
        return diagnose(read_lines(stream), deployment)


def _for_people(name: str, verdict: Verdict) -> str:
    lines = [f"{name}: {verdict.id}"]
    if verdict.line is not None:
        text = verdict.text if len(verdict.text) <= _SHOWN else f"{verdict.text[:_SHOWN]}..."
        lines.append(f"  line {verdict.line}: {text}")
    if verdict.id != NONE:
        lines += [f"  Cause: {verdict.cause}", f"  Fix: {verdict.remedy}"]
    return "\n".join(lines)


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name.removeprefix(_PREFIX), json.loads(value)
    except ValueError:
        return name.removeprefix(_PREFIX), value
