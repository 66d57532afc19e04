"""Is the host already what is asked for? Every answer comes from the host as it is now, not from memory alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import FirstlightError
from .openai_api import Server
from .release import Layout, file_facts, load_state, read_text
from .release_service import secrets_text, serves
from .systemd import Systemd


@dataclass(frozen=True)
class Convergence:
    """Whether nothing is to be done, and if not, the first reason found."""

    converged: bool
    reason: str
    report: Mapping[str, Any] = field(default_factory=dict)


def unfinished_cutover(layout: Layout) -> bool:
    """Whether an earlier run stopped a server and was cut off before it committed or restored."""
    return (layout.state_dir / layout.unit / "cutover.json").exists()


def judge(
    layout: Layout, *, inputs: str, environment_secrets: Mapping[str, str], api_key: str, systemd: Systemd
) -> Convergence:
    """Compare the host with the deployment that is asked for.

    Args:
        layout: where the unit's files lie.
        inputs: digest of all variables and of firstlight's own code.
        environment_secrets: the service's secret environment variables, as they should be.
        api_key: key for ``/v1/models``; empty for none.
        systemd: the host's service manager.
    """
    state = load_state(layout)
    if not state:
        return Convergence(False, "nothing was deployed here yet")
    if state.get("inputs") != inputs:
        return Convergence(False, "the variables or firstlight itself changed")
    if unfinished_cutover(layout):
        return Convergence(False, "an earlier run was cut off in the middle")
    for path, facts in state["files"].items():
        if file_facts(Path(path)) != facts:
            return Convergence(False, f"{path} changed on the host")
    if (read_text(layout.secrets) or "") != secrets_text(environment_secrets):
        return Convergence(False, "a secret changed")
    unit = systemd.show(f"{layout.unit}.service")
    if not unit.enabled:
        return Convergence(False, f"{layout.unit}.service is not enabled")
    if not serves(layout, state["release"], unit):
        return Convergence(False, f"{layout.unit}.service does not run release {state['release']}")
    meta = state["meta"]
    server = Server(meta["base_url"], api_key or None, timeout_s=5.0)
    try:
        if not server.health().ok:
            return Convergence(False, "the server's /health does not say 200")
        server.model(meta["model"])
    except FirstlightError as error:
        return Convergence(False, error.what)
    return Convergence(True, "", state.get("report", {}))
