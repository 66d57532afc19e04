"""Is the host already what is asked for? Every answer comes from the host as it is now, not from memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cutover import CutoverStore
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
    record = CutoverStore(layout.unit, layout.state_dir).load()
    return record is not None and record.unfinished


def _differences(
    layout: Layout,
    state: Mapping[str, Any],
    *,
    inputs: str,
    environment_secrets: Mapping[str, str],
    api_key: str,
    systemd: Systemd,
) -> Iterator[str]:
    """Every way in which the host is not what is asked for, the cheapest look first."""
    if not state:
        yield "nothing was deployed here yet"
        return
    if state.get("inputs") != inputs:
        yield "the variables or firstlight itself changed"
    if unfinished_cutover(layout):
        yield "an earlier run was cut off in the middle"
    for path, facts in state["files"].items():
        if file_facts(Path(path)) != facts:
            yield f"{path} changed on the host"
    if (read_text(layout.secrets) or "") != secrets_text(environment_secrets):
        yield "a secret changed"
    unit = systemd.show(f"{layout.unit}.service")
    if not unit.enabled:
        yield f"{layout.unit}.service is not enabled"
    if not serves(layout, state["release"], unit):
        yield f"{layout.unit}.service does not run release {state['release']}"
    try:
        server = Server(str(state["meta"].get("base_url")), api_key or None, timeout_s=5.0)
        if not server.health().ok:
            yield "the server's /health does not say 200"
        server.model(str(state["meta"].get("model")))
    except FirstlightError as error:
        yield error.what


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
    differences = _differences(
        layout, state, inputs=inputs, environment_secrets=environment_secrets, api_key=api_key, systemd=systemd
    )
    reason = next(differences, "")
    return Convergence(not reason, reason, state.get("report", {}) if not reason else {})
