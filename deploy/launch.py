"""Becomes ansible-playbook, in a process that ends when the one that started it does.

Run as a script, with the command as its arguments. Without it a controller that is killed would leave an
ansible-playbook behind that goes on changing the host while the next run begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask Linux for SIGTERM at the parent's death, then execute the command; other systems only do the latter."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it died before it was asked for
            sys.exit(1)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - deploy.runner says what to run


if __name__ == "__main__":
    main()
