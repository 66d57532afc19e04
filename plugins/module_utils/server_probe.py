"""Who answers at a URL: whether a server is there, and the models that it names."""

from __future__ import annotations

import json
from dataclasses import dataclass

from .openai_api import Server

_OK, _UNAUTHORISED = 200, {401, 403}


@dataclass(frozen=True)
class Answer:
    """What a server said.

    Attributes:
        healthy: ``/health`` was 200.
        models: ids of ``/v1/models``; empty when it told none.
        unauthorised: ``/v1/models`` wants another key.
        seen: the outcome for people: ``refused``, ``timeout``, ``HTTP 503``.
    """

    healthy: bool
    models: tuple[str, ...] = ()
    unauthorised: bool = False
    seen: str = ""


def ask(url: str, api_key: str = "", timeout_s: float = 5.0) -> Answer:
    """Ask a server who it is, in at most two requests of ``timeout_s`` seconds each."""
    server = Server(url, api_key or None, timeout_s)
    health = server.get("/health")
    if health.status != _OK:
        return Answer(False, seen=f"HTTP {health.status}" if health.status else health.outcome)
    listed = server.get("/v1/models")
    models: tuple[str, ...] = ()
    if listed.status == _OK:
        try:
            models = tuple(sorted(str(entry["id"]) for entry in json.loads(listed.body)["data"]))
        except (ValueError, KeyError, TypeError):
            models = ()
    return Answer(True, models, listed.status in _UNAUTHORISED, "HTTP 200")


def same_server(answer: Answer, models: tuple[str, ...]) -> bool:
    """Whether an answer proves the server that named ``models``; with none known, being healthy must do."""
    return answer.healthy and (not models or answer.unauthorised or set(models) <= set(answer.models))
