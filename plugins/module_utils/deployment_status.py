"""What firstlight has on a host and whether it serves: one look, no change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .cutover import CutoverStore
from .drafter_deploy import MARKER_NAME
from .errors import FirstlightError
from .openai_api import Server
from .release import Layout, load, load_state, release_ids
from .release_service import running_release
from .systemd import Systemd

_DRAFTER = re.compile(r"[0-9a-f]{12}")


def status(layout: Layout, systemd: Systemd, api_key: str) -> dict[str, Any]:
    """Read the deployment of one unit.

    Args:
        layout: where the unit's files lie.
        systemd: the host's service manager.
        api_key: key for ``/v1/models``; empty for none.

    Returns:
        ``deployed``, ``serving`` (the unit is active and its server answers with the model committed),
        ``unit`` (state, restarts, enabled), ``release``, ``previous_release``, ``releases`` (id and facts of
        each on the host), ``cutover`` (what the record says, without secrets), ``problem`` and ``report``.
    """
    state = load_state(layout)
    unit = systemd.show(f"{layout.unit}.service")
    record = CutoverStore(layout.unit, layout.state_dir).load()
    meta = state.get("meta") or {}
    problem = _problem(meta, api_key) if state else "nothing was deployed here yet"
    return {
        "deployed": bool(state),
        "serving": bool(state) and not problem and unit.active_state == "active",
        "problem": problem,
        "unit": {
            "name": f"{layout.unit}.service",
            "active": unit.active_state,
            "sub": unit.sub_state,
            "result": unit.result,
            "enabled": unit.enabled,
            "restarts": unit.n_restarts,
            "running_release": running_release(unit) or "",
        },
        "release": state.get("release", ""),
        "previous_release": state.get("previous_release") or "",
        "releases": [{"id": entry, **load(layout, entry).meta} for entry in release_ids(layout)],
        "committed_at": state.get("committed_at"),
        "cutover": record.public() if record else None,
        "meta": meta,
        "report": state.get("report", {}),
    }


def _problem(meta: dict[str, Any], api_key: str) -> str:
    server = Server(meta["base_url"], api_key or None, timeout_s=5.0)
    try:
        reply = server.health()
        if not reply.ok:
            return f"/health says {reply.status or reply.outcome}"
        server.model(meta["model"])
    except FirstlightError as error:
        return error.what
    return ""


def unused(layout: Layout) -> list[Path]:
    """Virtual environments, compile caches and drafters that lie beside those of the releases on the host, unused."""
    metas = [load(layout, entry).meta for entry in release_ids(layout)]
    used = {Path(meta[name]) for meta in metas for name in ("venv", "cache_root")}
    parents = sorted({path.parent for path in used})
    folders = [folder for parent in parents for folder in _children(parent) if folder not in used]
    return folders + _unused_drafters({Path(meta["drafter"]) for meta in metas if meta.get("drafter")})


def _unused_drafters(used: set[Path]) -> list[Path]:
    """Folders of drafters that firstlight made beside those in use; the marker tells them from anybody else's."""
    parents = sorted({path.parent for path in used if _DRAFTER.fullmatch(path.name)})
    found = [folder for parent in parents for folder in _children(parent) if _DRAFTER.fullmatch(folder.name)]
    return [folder for folder in found if (folder / MARKER_NAME).is_file() and folder not in used]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []
