"""What came back for one HTTP request, and the words for each way in which it can go wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from .errors import FirstlightError

Outcome = Literal["refused", "timeout", "reset", "unreachable", "not-http", "http"]

_EXCERPT = 300
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 200, 401, 403, 404, 503


@dataclass(frozen=True)
class ServerReply:
    """What came back for one request.

    Attributes:
        status: HTTP status; None when no HTTP answer came.
        body: at most the server's body limit of bytes.
        outcome: ``http`` for any HTTP answer; otherwise how the connection failed.
        seconds: wall clock from connecting to the last byte.
        detail: the system's own words about a failure.
        truncated: True when the body was longer than the limit and the rest was not read.
    """

    status: int | None
    body: bytes
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""
    truncated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the server said 200."""
        return self.status == _OK

    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 are replaced."""
        return self.body.decode("utf-8", "replace")


def excerpt(reply: ServerReply) -> str:
    """The start of a body on one line, quoted; of a JSON error its message."""
    text = " ".join(reply.text().split())
    try:
        document = json.loads(reply.body)
        error = document.get("error", document)
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        pass
    return repr(text[:_EXCERPT]) if text else "(empty)"


#: outcome -> (kind, what, fix)
_NO_HTTP: dict[str, tuple[str, str, str]] = {
    "refused": (
        "server-refused",
        "nothing listens there (connection refused).",
        "look at the unit's state and journal, and check address and port.",
    ),
    "timeout": (
        "server-timeout",
        "no answer within {seconds:.1f} s.",
        "look in the journal for what the engine was doing; raise the time limit only if it was still compiling.",
    ),
    "reset": (
        "server-reset",
        "the server closed the connection without an answer ({detail}).",
        "the process died or is stopping: read its journal.",
    ),
    "unreachable": (
        "server-unreachable",
        "no connection: {detail}.",
        "correct the host name or the address.",
    ),
    "not-http": (
        "not-http",
        "what listens there does not speak HTTP ({detail}).",
        "find out which process holds the port, or choose http or https as it does.",
    ),
}
#: HTTP status -> (kind, what, fix)
_BY_STATUS: dict[int, tuple[str, str, str]] = {
    _UNAUTHORIZED: (
        "api-key-rejected",
        "the server refused the API key (HTTP 401).",
        "give the key that the server was started with.",
    ),
    _FORBIDDEN: (
        "forbidden",
        "access denied (HTTP 403): {body}.",
        "ask the server itself, not the proxy before it.",
    ),
    _NOT_FOUND: (
        "not-found",
        "not found (HTTP 404): {body}.",
        "check the served model name against /v1/models, and that a vLLM server listens there.",
    ),
    _UNAVAILABLE: (
        "engine-dead",
        "the engine is dead (HTTP 503): {body}.",
        "read the journal above its last error; the API server ends by itself within seconds.",
    ),
}


def failure(reply: ServerReply, where: str) -> FirstlightError:
    """The error that says how a request went wrong; ``kind`` tells the ways apart."""
    if reply.status is None:
        kind, what, fix = _NO_HTTP[reply.outcome]
    elif reply.status in _BY_STATUS:
        kind, what, fix = _BY_STATUS[reply.status]
    elif reply.status >= 500:  # noqa: PLR2004
        kind, what, fix = (
            "server-error",
            "the server failed on the request (HTTP {status}): {body}.",
            "read the journal for the traceback of this request.",
        )
    else:
        kind, what, fix = (
            "request-rejected",
            "the server rejected the request (HTTP {status}): {body}.",
            "change what the message names.",
        )
    body = excerpt(reply) if reply.status is not None else ""
    detail = reply.detail or "no detail"
    # not str.format: the body may hold braces
    for name, value in (("{seconds:.1f}", f"{reply.seconds:.1f}"), ("{status}", str(reply.status)),
                        ("{detail}", detail), ("{body}", body)):  # fmt: skip
        what = what.replace(name, value, 1)
    return FirstlightError(what, where=where, fix=fix, kind=kind)
