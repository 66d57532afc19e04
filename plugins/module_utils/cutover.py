"""The record of a cutover on the host: what served before, and how to bring it back.

It is written before anything is stopped and outlives the program that wrote it: a run that is killed, a
controller that goes away or a power loss leaves enough to restore the old server. It holds the old server's
environment, which may hold secrets, so root alone can read the file and its content never leaves the host whole.

Phases: ``recorded`` (nothing stopped yet), ``stopped``, ``started`` (the new server's process runs), then
either ``committed`` (the new server passed) or ``restored`` (the old one answers again).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import FirstlightError
from .files import write_atomically

Kind = Literal["unit", "process", "container", "release", "none"]
Phase = Literal["recorded", "stopped", "started", "committed", "restored"]

STATE_DIR = Path("/var/lib/firstlight")
UNFINISHED: frozenset[str] = frozenset({"recorded", "stopped", "started"})
_FORMAT = 1
_POLL_S = 0.1


@dataclass(frozen=True)
class ProcessRecipe:
    """How to start a process again. The environment may hold secrets.

    ``program`` is the absolute path of ``argv[0]``; ``limits`` maps systemd's names (``NOFILE``) to
    ``soft:hard``.
    """

    program: str
    argv: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str] = field(repr=False)
    uid: int
    gid: int
    groups: tuple[int, ...]
    umask: int
    limits: Mapping[str, str]


@dataclass(frozen=True)
class ContainerRecipe:
    """How to start a container again. ``restart_policy`` is the engine's word, such as ``unless-stopped``."""

    engine: str
    id: str
    name: str
    restart_policy: str


@dataclass(frozen=True)
class Trigger:
    """A socket, timer or path unit that would start the old server again; stopped and restored with it."""

    unit: str
    active: bool
    enabled: bool


@dataclass(frozen=True)
class OldServer:
    """What served before.

    Attributes:
        kind: ``unit`` (a systemd service), ``process``, ``container``, ``release`` (an earlier release of the
            very unit that firstlight manages), or ``none``.
        unit: the service, of ``unit`` and ``release``.
        enabled: whether it was started at boot.
        triggers: units that would start it again.
        process: of ``process``.
        container: of ``container``.
        release: id of the release that ran, of ``release``.
        url: where it answered; empty when it did not.
        models: ids that ``/v1/models`` listed there.
        api_key: the key it was asked with. A secret.
        fronted: another program answered at ``url`` for it, such as a reverse proxy.
    """

    kind: Kind
    unit: str = ""
    enabled: bool = False
    triggers: tuple[Trigger, ...] = ()
    process: ProcessRecipe | None = None
    container: ContainerRecipe | None = None
    release: str = ""
    url: str = ""
    models: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)
    fronted: bool = False

    @property
    def name(self) -> str:
        """What people call it: the unit, the container, the program."""
        if self.process is not None:
            return " ".join(self.process.argv[:3])
        if self.container is not None:
            return f"{self.container.engine} container {self.container.name}"
        return f"{self.unit} (release {self.release})" if self.release else self.unit

    def public(self) -> dict[str, Any]:
        """What may be shown: no environment, no arguments, no key."""
        return {
            "kind": self.kind,
            "unit": self.unit,
            "enabled": self.enabled,
            "triggers": [trigger.unit for trigger in self.triggers],
            "container": self.container.name if self.container else "",
            "release": self.release,
            "url": self.url,
            "models": list(self.models),
        }


@dataclass(frozen=True)
class Record:
    """One cutover.

    Attributes:
        old: what served before it.
        phase: how far it came.
        boot_id: the host's boot in which it began.
        created_s: when it began, seconds since the epoch.
        down_since_s: when the old server was told to stop; None before that.
        origin: the last server that was not firstlight's own; it survives later upgrades, so that a host can
            still go back to it.
        note: why the phase is what it is, for people.
    """

    old: OldServer
    phase: Phase
    boot_id: str = ""
    created_s: float = 0.0
    down_since_s: float | None = None
    origin: OldServer | None = None
    note: str = ""

    @property
    def unfinished(self) -> bool:
        """Whether it was neither committed nor rolled back."""
        return self.phase in UNFINISHED

    def public(self) -> dict[str, Any]:
        """What may be shown of it."""
        return {
            "phase": self.phase,
            "created_s": self.created_s,
            "down_since_s": self.down_since_s,
            "old": self.old.public(),
            "origin": self.origin.public() if self.origin else None,
            "note": self.note,
        }


class CutoverStore:
    """Where the record of one managed unit lies.

    Args:
        unit: the managed unit's name, with or without ``.service``.
        state_dir: parent folder, ``/var/lib/firstlight``.
    """

    def __init__(self, unit: str, state_dir: Path = STATE_DIR) -> None:
        self.unit = unit.removesuffix(".service")
        self.folder = Path(state_dir) / self.unit
        self.path = self.folder / "cutover.json"

    def load(self) -> Record | None:
        """Read the record; None when there never was a cutover.

        Raises:
            FirstlightError: it is there and cannot be understood; it is never thrown away silently.
        """
        try:
            text = self.path.read_text("utf-8")
        except FileNotFoundError:
            return None
        try:
            return decode(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FirstlightError(
                f"the record of the last cutover cannot be read ({type(error).__name__}: {error}).",
                where=str(self.path),
                why="It tells how to bring the old server back.",
                fix=f"See that the old server runs, then move {self.path} away.",
                kind="cutover-record-broken",
            ) from error

    def save(self, record: Record) -> None:
        """Write the record so that a power loss leaves the old one or the new one, readable by root alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(encode(record), indent=1, sort_keys=True) + "\n", 0o600)

    def advance(self, phase: Phase, note: str = "") -> Record:
        """Move an existing record to another phase.

        Raises:
            FirstlightError: there is no record.
        """
        record = self.load()
        if record is None:
            raise FirstlightError(
                f"there is no cutover that could be {phase}.",
                where=str(self.path),
                fix="Stop the old server with firstlight first (role sglang_stop).",
                kind="cutover-missing",
            )
        if record.phase != phase:
            record = dataclasses.replace(record, phase=phase, note=note)
            self.save(record)
        return record

    @contextlib.contextmanager
    def lock(self, timeout_s: float = 30.0) -> Iterator[None]:
        """Keep other runs, and the guard on the host, away from this cutover.

        Raises:
            FirstlightError: another program held it for ``timeout_s`` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "cutover.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_s
        try:
            while not _try_lock(descriptor):
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
                    raise FirstlightError(
                        f"another run is stopping or restoring a server right now (pid {holder}).",
                        where=str(self.folder / "cutover.lock"),
                        fix="Wait until it has ended, then run again.",
                        kind="cutover-locked",
                    )
                time.sleep(_POLL_S)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def boot_id() -> str:
    """Identify this boot of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def encode(record: Record) -> dict[str, Any]:
    """Turn a record into what JSON can carry."""
    return {"format": _FORMAT, **dataclasses.asdict(record)}


def decode(document: Mapping[str, Any]) -> Record:
    """Read what :func:`encode` made.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
    """
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']!r} is not {_FORMAT}")
    if document["phase"] not in UNFINISHED | {"committed", "restored"}:
        raise ValueError(f"unknown phase {document['phase']!r}")
    origin = document.get("origin")
    return Record(
        old=_old_server(document["old"]),
        phase=document["phase"],
        boot_id=document.get("boot_id", ""),
        created_s=float(document.get("created_s", 0.0)),
        down_since_s=document.get("down_since_s"),
        origin=_old_server(origin) if origin else None,
        note=document.get("note", ""),
    )


def _old_server(document: Mapping[str, Any]) -> OldServer:
    process, container = document.get("process"), document.get("container")
    return OldServer(
        kind=document["kind"],
        unit=document.get("unit", ""),
        enabled=bool(document.get("enabled", False)),
        triggers=tuple(Trigger(**trigger) for trigger in document.get("triggers", ())),
        process=_recipe(process) if process else None,
        container=ContainerRecipe(**container) if container else None,
        release=document.get("release", ""),
        url=document.get("url", ""),
        models=tuple(document.get("models", ())),
        api_key=document.get("api_key", ""),
        fronted=bool(document.get("fronted", False)),
    )


def _recipe(document: Mapping[str, Any]) -> ProcessRecipe:
    return ProcessRecipe(
        program=document["program"],
        argv=tuple(document["argv"]),
        cwd=document["cwd"],
        environment=dict(document["environment"]),
        uid=int(document["uid"]),
        gid=int(document["gid"]),
        groups=tuple(document["groups"]),
        umask=int(document["umask"]),
        limits=dict(document["limits"]),
    )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
