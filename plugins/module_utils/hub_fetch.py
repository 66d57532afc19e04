"""Bringing one revision of a hub repository onto this host, whole, resumed, and with no secret in sight."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import hub_child
from .errors import FirstlightError
from .venv_tools import exclusive, read_marker, write_marker

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUSY_S = 6 * 3600.0
# of the host's environment: what would send the fetch elsewhere or hand out a token
_UNWANTED = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT", "PYTHONPATH", "PYTHONHOME", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Snapshot:
    """One revision of one repository, as asked for.

    Attributes:
        repo: ``owner/name``.
        revision: commit, 40 hexadecimal digits.
        root: folder under which models lie, like ``/opt/firstlight/models``.
        python: a Python that has huggingface_hub.
        token: access token; empty for none.
        endpoint: the hub's URL; empty for huggingface.co.
        allow: file patterns to fetch; empty for all.
        ignore: file patterns to leave out.
        workers: files fetched at a time.
        environment: variables for the fetch, like a proxy's.
        offline: never ask the hub.
        variable: prefix of the variables to name in errors.
    """

    repo: str
    revision: str
    root: str
    python: str
    token: str = field(default="", repr=False)
    endpoint: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    workers: int = 8
    environment: Mapping[str, str] = field(default_factory=dict)
    offline: bool = False
    variable: str = "model"

    @property
    def folder(self) -> Path:
        """Where it lies: a revision has a folder of its own, so the one in service is never written to."""
        return Path(self.root) / f"{self.repo.replace('/', '--')}@{self.revision[:8]}"


def check(snapshot: Snapshot) -> None:
    """Refuse a repository name or revision that cannot be.

    Raises:
        FirstlightError: ``repo-invalid`` or ``revision-not-pinned``.
    """
    if not _REPO.fullmatch(snapshot.repo) or ".." in snapshot.repo or "--" in snapshot.repo:
        raise FirstlightError(
            f"`{snapshot.repo}` is not owner/name.",
            where=f"{snapshot.variable}_repo",
            fix="Set it to a repository like Qwen/Qwen3.6-27B.",
            kind="repo-invalid",
        )
    if not _COMMIT.fullmatch(snapshot.revision):
        raise FirstlightError(
            f"`{snapshot.revision}` is not a commit.",
            where=f"{snapshot.variable}_revision",
            why="A branch or tag can be moved, so two hosts or two runs could get different weights.",
            fix=f"Set it to the commit, 40 hexadecimal digits: `git ls-remote https://huggingface.co/{snapshot.repo}`"
            " prints it.",
            kind="revision-not-pinned",
        )


def is_whole(snapshot: Snapshot) -> bool:
    """Whether the folder is finished and every file has its size."""
    marker = read_marker(snapshot.folder)
    if marker is None or marker.get("repo") != snapshot.repo or marker.get("revision") != snapshot.revision:
        return False
    if marker.get("allow") != list(snapshot.allow) or marker.get("ignore") != list(snapshot.ignore):
        return False
    files = marker.get("files")
    if not isinstance(files, dict) or not files:
        return False
    for name, size in files.items():
        path = snapshot.folder / name
        if not path.is_file() or path.stat().st_size != size:
            return False
    return True


def fetch(snapshot: Snapshot) -> dict[str, int]:
    """Fetch what is missing; return each file's size in bytes.

    Raises:
        FirstlightError: the hub refused, could not be reached or handed out something else; the disk is full.
    """
    check(snapshot)
    if snapshot.offline:
        raise FirstlightError(
            f"{snapshot.folder} is not complete, and the hub may not be asked.",
            where=f"{snapshot.variable}_offline",
            fix=f"Copy the revision's files to the host and set {snapshot.variable}_path, or allow the fetch.",
            kind="offline-incomplete",
        )
    try:
        snapshot.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FirstlightError(
            f"{snapshot.folder} cannot be made ({error.strerror}).",
            where=f"{snapshot.variable}_root",
            fix="Run with become: true, and name a folder on a writable file system.",
            kind="permission-denied",
        ) from error
    with exclusive(Path(snapshot.root) / f".{snapshot.folder.name}.lock", _BUSY_S) as descriptor:
        if is_whole(snapshot):  # another run fetched it while this one waited
            return _sizes(read_marker(snapshot.folder) or {})
        answer = _ask(snapshot, descriptor)
        _raise_for(snapshot, answer)
        files = {str(name): int(size) for name, size in answer["files"].items()}
        _finish(snapshot, files)
    return files


def _ask(snapshot: Snapshot, descriptor: int) -> dict[str, Any]:
    order = {
        "repo": snapshot.repo,
        "revision": snapshot.revision,
        "dest": str(snapshot.folder),
        "token": snapshot.token,
        "endpoint": snapshot.endpoint,
        "allow": list(snapshot.allow),
        "ignore": list(snapshot.ignore),
        "workers": snapshot.workers,
    }
    environment = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    environment.setdefault("HOME", "/root")
    environment.update(
        HF_HOME=str(Path(snapshot.root).parent / "cache" / "huggingface"),
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        **snapshot.environment,
    )
    try:
        done = subprocess.run(  # noqa: S603 -- a fixed program; the order goes through stdin
            [snapshot.python, "-I", "-c", inspect.getsource(hub_child)],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            env=environment,
            pass_fds=(descriptor,),
            check=False,
        )
    except OSError as error:
        raise FirstlightError(
            f"{snapshot.python} cannot be run ({error.strerror}).",
            where=f"{snapshot.variable}_python",
            fix="Run the role vllm_install first.",
            kind="python-missing",
        ) from error
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": f"exit status {done.returncode}", "message": done.stderr[-1000:], "status": None}
    return answer if isinstance(answer, dict) else {"error": "no answer", "message": done.stderr[-1000:]}


def _raise_for(snapshot: Snapshot, answer: Mapping[str, Any]) -> None:
    if "error" not in answer:
        return
    name, message, status = str(answer["error"]), str(answer.get("message", "")), answer.get("status")
    if snapshot.token:
        message = message.replace(snapshot.token, "***")
    kind, what, fix = "hub-failed", f"the hub client ended with {name}.", "Read its message above."
    if name == "DiskFull":
        need, free = answer["needed"] / 2**30, answer["free"] / 2**30
        kind, what = "disk-full", f"{need:.1f} GiB are needed and {free:.1f} GiB are free."
        fix = f"Free space on the file system of {snapshot.root}, or set {snapshot.variable}_root to a larger one."
    elif name == "Mismatch":
        kind, what = "hash-mismatch", f"{message} is not what the hub's own list says; it was removed."
        fix, message = "Run again; if it stays so, a mirror or proxy alters files.", ""
    elif name == "GatedRepoError":
        kind, what = "gated-repo", "its owner gives access on request only."
        fix = f"Ask for access on the repository's page, and set {snapshot.variable}_token to a token that has it."
    elif name in ("RepositoryNotFoundError", "RevisionNotFoundError") or status in (401, 403, 404):
        kind, what = "repo-not-found", f"the hub knows no such repository or revision for this token ({name})."
        fix = f"Check owner, name and commit; a private repository needs {snapshot.variable}_token."
    elif "No space left" in message:
        kind, what, fix = "disk-full", "the disk is full.", f"Free space on the file system of {snapshot.root}."
    elif re.search(r"Connect|Timeout|Resol|LocalEntryNotFound|Offline|SSL|ProxyError", f"{name} {message}"):
        kind, what = "hub-unreachable", "the hub could not be reached."
        fix = (
            f"Check network and proxy of the host, set {snapshot.variable}_endpoint to a mirror, or copy the files and"
            f" set {snapshot.variable}_path. What was fetched is kept; the next run goes on from there."
        )
    elif name == "ModuleNotFoundError":
        kind, what, fix = "hub-client-missing", f"{snapshot.python} lacks huggingface_hub.", "Run vllm_install first."
    raise FirstlightError(
        what,
        where=f"{snapshot.repo} at {snapshot.revision[:8]}",
        why=f"It said: {message.strip()}" if message.strip() else "",
        fix=fix,
        kind=kind,
    )


def _finish(snapshot: Snapshot, files: Mapping[str, int]) -> None:
    content: dict[str, object] = {
        "repo": snapshot.repo,
        "revision": snapshot.revision,
        "allow": list(snapshot.allow),
        "ignore": list(snapshot.ignore),
        "files": dict(files),
    }
    write_marker(snapshot.folder, content)


def _sizes(marker: Mapping[str, object]) -> dict[str, int]:
    files = marker.get("files")
    return {str(name): int(size) for name, size in files.items()} if isinstance(files, dict) else {}
