"""The command line `firstlight`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Sequence

from deploy import commands
from deploy.commands.run import EXIT_HELP, print_json
from deploy.errors import ArgumentError, DeployError


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; each module of `deploy.commands` adds its own."""
    top = argparse.ArgumentParser(
        prog="firstlight",
        description="Take GPU hosts from SGLang to vLLM with DFlash speculative decoding, proven or rolled back.",
        epilog=EXIT_HELP,
    )
    top.add_argument("--version", action="version", version=f"firstlight {importlib.metadata.version('firstlight')}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"{commands.__name__}.{module.name}").register(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parser().parse_args(argv)
    try:
        status: int = args.func(args)
    except DeployError as error:
        return _tell(error, as_json=getattr(args, "json", False))
    except KeyboardInterrupt:
        sys.stderr.write("firstlight: interrupted\n")
        return 130
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        sys.stderr.close()
        return 1
    return status


def _tell(error: DeployError, *, as_json: bool) -> int:
    if as_json:
        told = {"kind": type(error).__name__, "what": error.what, "fix": error.fix}
        print_json({"ok": False, "status": "error", "error": told, "hosts": {}})
    else:
        sys.stderr.write(f"firstlight: {error}\n")
    return 2 if isinstance(error, ArgumentError) else 1
