"""The files of one release of the server: its configuration, environment and unit.

A release is a folder ``<config_dir>/<unit>/releases/<id>/`` that never changes once written; ``id`` is a digest of
what is in it. The running unit file names the folder, so going forward or back is one file and one restart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from .errors import FirstlightError
from .files import write_atomically

PLACEHOLDER = "@RELEASE@"
CONFIG, ENVIRONMENT, UNIT, META = "serve.yaml", "env", "unit.service", "release.json"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNCARRIED = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
_RECORD = {"inputs": str, "release": str, "files": dict, "meta": dict}


@dataclass(frozen=True)
class Layout:
    """Where the files of one unit lie.

    Args:
        unit: the unit's name without ``.service``.
        config_dir: parent of the unit's configuration, ``/etc/firstlight``.
        state_dir: parent of the unit's state, ``/var/lib/firstlight``.
        unit_dir: where systemd looks for the administrator's units.
        cache_dir: the unit's cache folder, ``/var/cache/<unit>``.
    """

    unit: str
    config_dir: Path = Path("/etc/firstlight")
    state_dir: Path = Path("/var/lib/firstlight")
    unit_dir: Path = Path("/etc/systemd/system")
    cache_parent: Path = Path("/var/cache")

    @property
    def releases(self) -> Path:
        """Folder of all releases."""
        return self.config_dir / self.unit / "releases"

    @property
    def secrets(self) -> Path:
        """The 0600 environment file of secrets."""
        return self.config_dir / self.unit / "secrets.env"

    @property
    def before(self) -> Path:
        """Secrets and drop-in of the deployment in force while another is tried."""
        return self.config_dir / self.unit / "before.json"

    @property
    def unit_file(self) -> Path:
        """The unit file in force."""
        return self.unit_dir / f"{self.unit}.service"

    @property
    def dropin(self) -> Path:
        """The site's drop-in."""
        return self.unit_dir / f"{self.unit}.service.d" / "50-firstlight.conf"

    @property
    def state(self) -> Path:
        """The committed state."""
        return self.state_dir / self.unit / "state.json"


@dataclass(frozen=True)
class Release:
    """The texts of a release, with `PLACEHOLDER` resolved."""

    id: str
    files: Mapping[str, str]
    meta: Mapping[str, Any]


def environment_file(environment: Mapping[str, Any]) -> str:
    """Text of a systemd ``EnvironmentFile``, sorted, every value quoted.

    Raises:
        FirstlightError: a name is not a legal variable name, or a value holds a line break or another control
            character: systemd would drop the variable with no more than a line in its log.
    """
    lines = []
    for name, value in sorted(environment.items()):
        text = str(value)
        if not _NAME.fullmatch(name):
            raise FirstlightError(
                f"{name!r} is not a legal name of an environment variable.",
                where="vllm_server_environment",
                fix="use letters, digits and underscores, not starting with a digit.",
            )
        if _UNCARRIED.search(text):
            raise FirstlightError(
                f"the value of {name} holds a line break or another control character, which systemd cannot carry.",
                where="vllm_server_environment",
                fix="give the value on one line.",
            )
        quoted = re.sub(r'([\\"$`])', r"\\\1", text)
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines)


def compose(
    *,
    config: str,
    unit: str,
    environment: Mapping[str, Any],
    meta: Mapping[str, Any],
) -> Release:
    """Make a release of its texts; ``id`` is ``<first 12 hex digits of their SHA-256>``.

    Args:
        config: text for ``vllm serve --config``.
        unit: text of the unit file, with `PLACEHOLDER` where the release's id belongs.
        environment: environment of the service, no secrets.
        meta: facts about the release kept beside it (vLLM version, venv, model, base URL).
    """
    texts = {CONFIG: config, ENVIRONMENT: environment_file(environment), UNIT: unit}
    canonical = json.dumps([texts, meta], sort_keys=True).encode()
    release_id = hashlib.sha256(canonical).hexdigest()[:12]
    files = {name: text.replace(PLACEHOLDER, release_id) for name, text in texts.items()}
    files[META] = json.dumps(meta, sort_keys=True, indent=2) + "\n"
    return Release(release_id, files, dict(meta))


def load(layout: Layout, release_id: str) -> Release:
    """Read a release back from the host.

    Raises:
        FirstlightError: the release is not there or not whole.
    """
    folder = layout.releases / release_id
    try:
        files = {name: (folder / name).read_text() for name in (CONFIG, ENVIRONMENT, UNIT, META)}
        meta = json.loads(files[META])
    except (OSError, ValueError) as error:
        raise FirstlightError(
            f"release {release_id!r} is not whole on the host ({error}).",
            where=str(folder),
            fix="name one of the releases that `firstlight status` lists.",
            kind="release-missing",
        ) from error
    return Release(release_id, files, meta)


def read_text(path: Path) -> str | None:
    """The file's text, or None where there is no file."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def put(path: Path, text: str, mode: int, *, check: bool) -> bool:
    """Bring a file to ``text`` and ``mode``; tell whether anything was, or in check mode would be, changed."""
    old = read_text(path)
    same_mode = old is not None and (path.stat().st_mode & 0o777) == mode
    if old == text and same_mode:
        return False
    if not check:
        write_atomically(path, text, mode)
    return True


def release_ids(layout: Layout) -> list[str]:
    """Ids of the releases on the host, oldest first."""
    try:
        found = [entry for entry in layout.releases.iterdir() if (entry / META).is_file()]
    except FileNotFoundError:
        return []
    return [entry.name for entry in sorted(found, key=lambda entry: (entry.stat().st_mtime_ns, entry.name))]


def diff_of(layout: Layout, release: Release, current: str | None) -> list[dict[str, str]]:
    """Ansible's diff of a release against the one in force (``current``, an id or None); no secrets in it."""
    base = layout.releases / current if current else None
    diffs = []
    for name, text in sorted(release.files.items()):
        before = read_text(base / name) if base else None
        if before != text:
            diffs.append(
                {
                    "before_header": str(base / name) if base else "(none)",
                    "after_header": str(layout.releases / release.id / name),
                    "before": before or "",
                    "after": text,
                }
            )
    return diffs


def load_state(layout: Layout) -> dict[str, Any]:
    """The committed state; empty where nothing was ever committed.

    Raises:
        FirstlightError: the file is there and cannot be understood.
    """
    text = read_text(layout.state)
    if text is None:
        return {}
    try:
        return _record(json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise FirstlightError(
            f"the record of the deployment cannot be read ({error}).",
            where=str(layout.state),
            fix="move the file away and run site.yml again; it is written anew.",
            kind="state-broken",
        ) from error


def _record(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("it is not a JSON object")
    for name, kind in _RECORD.items():
        if not isinstance(value.get(name), kind):
            raise TypeError(f"its entry {name!r} is missing or of the wrong kind")
    return value


def save_state(layout: Layout, state: Mapping[str, Any]) -> None:
    """Write the committed state, readable by root alone."""
    write_atomically(layout.state, json.dumps(state, sort_keys=True, indent=2) + "\n", 0o600)


def file_facts(path: Path) -> dict[str, Any]:
    """What tells a managed file from a changed one: SHA-256 of a small file, size and time of a large one."""
    try:
        stat = path.stat()
    except OSError:
        return {"missing": True}
    if not S_ISREG(stat.st_mode):
        return {"not_a_file": True}
    if stat.st_size > 1 << 20:
        return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
