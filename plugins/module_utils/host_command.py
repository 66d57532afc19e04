"""Running one program on the host, with a time limit and without a shell.

Everything that talks to ``systemctl``, ``journalctl``, ``nvidia-smi`` or a container engine does so through a
``Runner``, so that a test can hand in a recorded one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import FirstlightError


@dataclass(frozen=True)
class CommandResult:
    """What a finished program left: its exit status (negative: killed by that signal) and its output."""

    status: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The last line it wrote to stderr, or to stdout when stderr is empty."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1].strip() if lines else f"no output, exit status {self.status}"


Runner = Callable[[Sequence[str], float], CommandResult]


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a program to its end.

    Args:
        argv: the program and its arguments; no shell looks at them.
        timeout_s: seconds after which the program is killed.

    Raises:
        FirstlightError: ``command-missing`` when it is not installed, ``command-timed-out`` when it overran.
    """
    # fixed language, so that output can be parsed; no pager, no colours
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "", "PAGER": ""}
    try:
        done = subprocess.run(  # noqa: S603 -- argv comes from this package, never from a shell
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
    except FileNotFoundError as error:
        raise FirstlightError(
            f"the program {argv[0]} is not installed.",
            where=argv[0],
            fix=f"Install {argv[0]} on the host, or put its folder on PATH.",
            kind="command-missing",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise FirstlightError(
            f"`{' '.join(argv)}` gave no answer within {timeout_s:g} s.",
            where=argv[0],
            fix=f"Run `{' '.join(argv)}` on the host and see what it waits for.",
            kind="command-timed-out",
        ) from error
    return CommandResult(
        done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )
