"""`firstlight demo`: the whole job on this machine, on a systemd host in a container."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from deploy import environment
from deploy.commands.run import EXIT_HELP, EXIT_STATUS, add_arguments, execute, extra_vars, print_json
from deploy.errors import InstallationError

LAB = Path("tests", "lab", "lab.sh")
INVENTORY = Path("inventory", "demo", "hosts.yml")
NOTE = (
    "This was a CPU: vLLM 0.20.1's CPU build speculates only with a plugin made for tests (tests/cpu_plugin), and the "
    "tiny models know one answer. A GPU host needs neither."
)
_CANNOT = 3  # the lab's exit status where systemd containers cannot run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser."""
    parser = subparsers.add_parser(
        "demo",
        help="boot a host in a container here and take it from a stand-in SGLang to a real vLLM",
        description="Boot a systemd host in a container on this machine, with a stand-in for SGLang on it, and take "
        "it to a real vLLM with tensor parallelism and speculative decoding, on the CPU. Needs the checkout.",
        epilog=f"{EXIT_HELP}; 3 also where systemd containers cannot run on this machine",
    )
    add_arguments(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Boot the host, deploy, print what it answers; return the exit status."""
    from rich.console import Console  # noqa: PLC0415 - as in the other commands

    from deploy.report import print_result  # noqa: PLC0415

    root = checkout()
    boot = subprocess.run([str(root / LAB), "up", "demo"], cwd=root, stdout=sys.stderr.fileno(), check=False)  # noqa: S603
    if boot.returncode != 0:  # the lab has said why on standard error
        return _CANNOT if boot.returncode == _CANNOT else 1
    result = execute(
        args,
        playbook="site",
        inventory=[str(root / INVENTORY), *(args.inventory or [])],
        extravars=extra_vars(args.extra_vars),
    )
    if args.json:
        print_json({**result.as_dict(), "note": NOTE})
    else:
        console = Console()
        print_result(result, console, check=args.check)
        console.print(NOTE, style="dim")
        console.print(f"Look around: {LAB} shell demo. Remove it: {LAB} down demo.", style="dim", highlight=False)
    return EXIT_STATUS[result.status]


def checkout() -> Path:
    """The checkout's root.

    Raises:
        InstallationError: this is an installed wheel, which has no test bed.
    """
    root = environment.checkout()
    if root is None or not (root / LAB).is_file():
        raise InstallationError(
            "demo needs firstlight's checkout, which holds the test bed and the tiny models.",
            "Clone the repository and run `make demo` there.",
        )
    return root
