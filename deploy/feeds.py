"""Hands values to ansible-playbook without leaving them on a disk.

A named pipe has a path, so ``-e @path`` and ``-i path`` can name it, and no content that outlives the reader.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


class Feed:
    """A named pipe that gives its content to the first reader, once.

    Args:
        path: where to make the pipe; its folder must be private.
        content: the bytes to give.

    Raises:
        OSError: the pipe cannot be made.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self._content = content
        self._thread: threading.Thread | None = None
        os.mkfifo(path, 0o600)

    def start(self) -> None:
        """Begin to wait for the reader; does nothing the second time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._give, name=f"feed {self.path.name}", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop waiting for a reader that never came, and remove the pipe."""
        if self._thread is not None:
            _release(self._thread, self.path, os.O_RDONLY)
        self.path.unlink(missing_ok=True)

    def _give(self) -> None:
        # an OSError: the reader left early, or close() let go; ansible-playbook says what is missing
        with contextlib.suppress(OSError), self.path.open("wb", buffering=0) as pipe:
            rest = memoryview(self._content)
            while rest:
                rest = rest[pipe.write(rest) :]


class Drain:
    """A named pipe that swallows what a writer would otherwise have put into a file.

    Args:
        path: where to make the pipe; its folder must be private.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        self._thread = threading.Thread(target=self._swallow, name=f"drain {path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the writer's end, or let go when none came, and remove the pipe."""
        _release(self._thread, self.path, os.O_WRONLY)
        self.path.unlink(missing_ok=True)

    def _swallow(self) -> None:
        with self.path.open("rb", buffering=0) as pipe:
            while pipe.read(65536):
                pass


def _release(thread: threading.Thread, path: Path, flags: int) -> None:
    """Open and close the other end of a pipe until the thread that waits for it has ended."""
    thread.join(timeout=0.05)  # mostly it has, or is about to
    while thread.is_alive():
        with contextlib.suppress(OSError):  # the thread has not opened its own end yet
            os.close(os.open(path, flags | os.O_NONBLOCK))
        thread.join(timeout=0.05)
