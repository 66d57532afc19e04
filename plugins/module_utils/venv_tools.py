"""The host's side of an install: its Python, its uv, and running an installer with a lock that outlives us."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import FirstlightError
from .venv_failure import explain
from .venv_plan import parse_lock

MARKER = ".firstlight.json"  # written last: a folder without it is the rest of an interrupted install
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)

_ASK_PYTHON = """\
import importlib.util, json, platform, sys
print(json.dumps({"implementation": sys.implementation.name, "version": list(sys.version_info[:3]),
  "machine": platform.machine(), "venv": all(importlib.util.find_spec(m) for m in ("venv", "ensurepip"))}))
"""
_UNWANTED = (
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "CONDA_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_USER",
    "PIP_TARGET",
)


@dataclass(frozen=True)
class Interpreter:
    """The Python that an environment is made with."""

    path: str
    implementation: str
    version: tuple[int, int, int]
    machine: str
    has_venv: bool

    @property
    def tag(self) -> str:
        """What an environment depends on: a patch release may change under it, a minor one may not."""
        return f"{self.implementation}-{self.version[0]}.{self.version[1]}"


@dataclass(frozen=True)
class Sources:
    """Where packages come from.

    Attributes:
        index_url: the index in place of PyPI; empty for the host's own settings.
        extra_index_urls: further indexes.
        find_links: a folder of the host, or a page, with wheels; empty for none.
        offline: take everything from ``find_links`` and the cache, and ask no index.
        extra_options: further options of ``uv pip install``.
        environment: variables for the installer, like ``SSL_CERT_FILE``.
    """

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: str = ""
    offline: bool = False
    extra_options: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None

    def variables(self) -> dict[str, str]:
        """The same as environment variables of pip and uv: an URL may hold a password, and argv is public."""
        found: dict[str, str] = {}
        if self.index_url:
            found.update(UV_DEFAULT_INDEX=self.index_url, PIP_INDEX_URL=self.index_url)
        if self.extra_index_urls:
            joined = " ".join(self.extra_index_urls)
            found.update(UV_INDEX=joined, PIP_EXTRA_INDEX_URL=joined)
        if self.find_links:
            found.update(UV_FIND_LINKS=self.find_links, PIP_FIND_LINKS=self.find_links)
        if self.offline:
            found.update(UV_NO_INDEX="1", UV_OFFLINE="1", PIP_NO_INDEX="1")
        return {**found, **(self.environment or {})}


def read_interpreter(path: str) -> Interpreter:
    """Ask a Python what it is.

    Raises:
        FirstlightError: ``python-missing`` when it cannot be run, ``python-unsupported`` when vLLM has no build for it.
    """
    try:
        done = subprocess.run(  # noqa: S603 -- a fixed program
            [path, "-I", "-c", _ASK_PYTHON], capture_output=True, text=True, timeout=60, check=True
        )
        told = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise FirstlightError(
            f"{path} cannot be run ({error}).",
            where="vllm_install_python",
            fix="Install python3 on the host, or name an interpreter that is there.",
            kind="python-missing",
        ) from error
    major, minor, patch = told["version"]
    if not OLDEST_PYTHON <= (major, minor) <= NEWEST_PYTHON or told["implementation"] != "cpython":
        raise FirstlightError(
            f"{path} is {told['implementation']} {major}.{minor}; vLLM runs on CPython 3.10 to 3.14.",
            where="vllm_install_python",
            fix="Name a CPython between 3.10 and 3.14, like /usr/bin/python3.12.",
            kind="python-unsupported",
        )
    return Interpreter(path, told["implementation"], (major, minor, patch), told["machine"], bool(told["venv"]))


def check_libraries(platform: str) -> None:
    """Refuse a CPU build on a host without libnuma, before gigabytes are fetched for it.

    Raises:
        FirstlightError: ``library-missing``.
    """
    if platform != "cpu":
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise FirstlightError(
            "libnuma.so.1 is not installed.",
            where="host",
            why="The CPU build of vLLM does not load without it.",
            fix="Run `apt-get install libnuma1` on the host.",
            kind="library-missing",
        ) from error


def free_space(path: Path) -> str:
    """Space left on the file system of ``path`` or its nearest existing parent, in GiB."""
    while not path.exists():
        path = path.parent
    return f"{shutil.disk_usage(path).free / 2**30:.1f} GiB"


@contextlib.contextmanager
def exclusive(path: Path, wait_s: float) -> Iterator[int]:
    """Hold a file lock, given as its descriptor so that children can hold it too.

    An installer that survives the death of its parent keeps the lock until it is done; a second run waits
    instead of removing the folder under it.

    Raises:
        FirstlightError: ``install-busy`` after ``wait_s`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise FirstlightError(
                        f"another install on this host has held the lock for {wait_s:.0f} s.",
                        where=str(path),
                        fix=f"See who holds it with `fuser -v {path}`, and run again when it is done.",
                        kind="install-busy",
                    ) from error
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass
class Installer:
    """Runs pip and uv with one environment, one lock and one way of failing."""

    root: Path
    sources: Sources
    lock_descriptor: int

    def run(self, argv: Sequence[str], doing: str, extra: Mapping[str, str] | None = None) -> str:
        """Run a program to its end and return its output.

        Raises:
            FirstlightError: it failed; the kind says why, as far as its output tells.
        """
        try:
            done = subprocess.run(  # noqa: S603 -- no shell looks at it
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(extra),
                pass_fds=(self.lock_descriptor,),
                check=False,
            )
        except OSError as error:
            raise explain(str(error), 127, doing=doing, root=str(self.root), free=free_space(self.root)) from error
        output = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            raise explain(output, done.returncode, doing=doing, root=str(self.root), free=free_space(self.root))
        return output

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
        # A stalled read is given two minutes: the largest wheels are hundreds of megabytes.
        kept.setdefault("UV_HTTP_TIMEOUT", "120")
        kept.setdefault("HOME", "/root")
        kept.update(
            UV_CACHE_DIR=str(self.root / "cache" / "uv"),  # one file system with the environments: files are linked
            UV_PYTHON_DOWNLOADS="never",
            UV_NO_PROGRESS="1",
            NO_COLOR="1",
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PIP_NO_INPUT="1",
        )
        return {**kept, **self.sources.variables(), **(extra or {})}

    def write_file(self, path: Path, content: bytes) -> None:
        """Write a file of the install; a full disk is told like the installer's.

        Raises:
            FirstlightError: ``disk-full``, ``permission-denied`` or ``install-failed``.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as error:
            raise explain(str(error), 1, doing=path.name, root=str(self.root), free=free_space(self.root)) from error


def write_marker(folder: Path, content: Mapping[str, object]) -> None:
    """Put the marker into a folder, in one step and safe against power loss."""
    part = folder / f"{MARKER}.part"
    with part.open("w", encoding="utf-8") as handle:
        json.dump(content, handle, indent=1, sort_keys=True)
        handle.flush()
        os.fsync(handle.fileno())
    part.replace(folder / MARKER)


def read_marker(folder: Path) -> dict[str, object] | None:
    """What the marker of a finished folder says; None when there is none, or it cannot be read."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def uv_folder(root: Path, lock_text: str, python: Interpreter) -> Path:
    """Where the locked uv lives."""
    version = next((pin.version for pin in parse_lock(lock_text, "the lock of uv") if pin.name == "uv"), "none")
    digest = hashlib.sha256(f"{lock_text}\0{python.tag}\0{python.machine}".encode()).hexdigest()
    return root / "tools" / f"uv-{version}-{digest[:8]}"


def require_venv_module(python: Interpreter) -> None:
    """Refuse a Python that cannot make environments (Debian and Ubuntu ship that part apart).

    Raises:
        FirstlightError: ``python-venv-missing``.
    """
    if not python.has_venv:
        major, minor, _ = python.version
        raise FirstlightError(
            f"{python.path} has no module venv or ensurepip.",
            where="vllm_install_python",
            why="uv is put into an environment of its own.",
            fix=f"Run `apt-get install python{major}.{minor}-venv` on the host.",
            kind="python-venv-missing",
        )


def provide_uv(installer: Installer, lock_text: str, python: Interpreter) -> Path:
    """Return uv's path, installing it from its lock when it is not there."""
    folder = uv_folder(installer.root, lock_text, python)
    program = folder / "bin" / "uv"
    if read_marker(folder) is not None and program.exists():
        return program
    shutil.rmtree(folder, ignore_errors=True)
    installer.run([python.path, "-m", "venv", str(folder)], "an environment for uv")
    requirements = folder / "uv.txt"
    installer.write_file(requirements, lock_text.encode())
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    installer.run([*pip, "--require-hashes", "--requirement", str(requirements)], "uv")
    write_marker(folder, {"uv": folder.name})
    return program
