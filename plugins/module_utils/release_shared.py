"""The secrets and the drop-in of the deployment in force, kept while another one is tried.

All releases of a unit share these two files, since a change of a key is no new release. A release that is tried brings
its own; when it does not pass, the server before it must run again with what it ran with, to the key that its clients
send and the memory limit that it had. File times are put back too: they tell whether a server runs with these files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .files import write_atomically
from .release import Layout, read_text


def _files(layout: Layout) -> dict[str, tuple[Path, int]]:
    return {"secrets": (layout.secrets, 0o600), "dropin": (layout.dropin, 0o644)}


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _deployment(layout: Layout) -> str:
    """Digest of the record of the deployment in force: what was kept under another one is of no use."""
    return hashlib.sha256((read_text(layout.state) or "").encode("utf-8", "surrogateescape")).hexdigest()


def _kept(layout: Layout) -> dict[str, Any]:
    """What was kept for the deployment in force; empty when there is nothing, or nothing that can be understood."""
    try:
        kept = json.loads(read_text(layout.before) or "{}")
    except ValueError:
        return {}
    return kept if isinstance(kept, dict) and kept.get("deployment") == _deployment(layout) else {}


def keep(layout: Layout) -> None:
    """Remember both files as the last commit left them; an earlier try that never passed has done so already."""
    if _kept(layout) or not layout.state.exists():
        return
    kept: dict[str, Any] = {
        name: {"text": read_text(path), "mtime_ns": _mtime(path)} for name, (path, _) in _files(layout).items()
    }
    kept["deployment"] = _deployment(layout)
    kept["folder_mtime_ns"] = _mtime(layout.dropin.parent)
    write_atomically(layout.before, json.dumps(kept) + "\n", 0o600)


def put_back(layout: Layout) -> list[Path]:
    """Bring both files back to what they were before a try; returns those that differed."""
    kept = _kept(layout)
    changed = [
        path
        for name, (path, mode) in (_files(layout).items() if kept else ())
        if _put_back(path, mode, kept[name]["text"], kept[name]["mtime_ns"])
    ]
    if kept and kept["folder_mtime_ns"] is None:
        with contextlib.suppress(OSError):  # not there, or the site has put a file of its own into it
            layout.dropin.parent.rmdir()
    elif kept and layout.dropin.parent.exists():
        os.utime(layout.dropin.parent, ns=(kept["folder_mtime_ns"],) * 2)
    forget(layout)
    return changed


def _put_back(path: Path, mode: int, text: str | None, mtime_ns: int | None) -> bool:
    if read_text(path) == text:
        return False
    if text is None or mtime_ns is None:
        path.unlink()
    else:
        write_atomically(path, text, mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return True


def forget(layout: Layout) -> None:
    """The files as they are now are those of the deployment in force."""
    layout.before.unlink(missing_ok=True)
