"""HTTP to a server that speaks OpenAI's API: each way to fail has its own outcome.

Standard library only. Proxies of the environment are never used: the server is on this host or in this network,
and a proxy's answer must not pass for the server's.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .errors import FirstlightError
from .openai_reply import Outcome, ServerReply, excerpt, failure

#: A chat answer is a few kB, ``/metrics`` of a large server below 1 MB.
MAX_BODY_BYTES = 8 * 1024 * 1024
_EXCERPT = 300


@dataclass(frozen=True)
class ChatAnswer:
    """One answer of ``/v1/chat/completions``.

    Attributes:
        text: the message's content; empty when there is none.
        finish_reason: ``stop``, ``length`` (cut at max_tokens), ...; None when the server gave none.
        usage: token counts as the server gave them (``prompt_tokens``, ``completion_tokens``).
        seconds: wall clock of the request.
        reasoning: what a reasoning parser put apart; empty when nothing.
    """

    text: str
    finish_reason: str | None
    usage: Mapping[str, int]
    seconds: float
    reasoning: str = ""

    @property
    def only_reasoning(self) -> bool:
        """True when the model thought but never answered (content null, reasoning present)."""
        return not self.text.strip() and bool(self.reasoning.strip())


class Server:
    """One server's HTTP side.

    Args:
        base_url: ``http://127.0.0.1:30000``, with or without a trailing ``/v1``; IPv6 as ``http://[::1]:30000``.
        api_key: sent as a bearer token; never part of a message or a repr.
        timeout_s: wall-clock limit of one request in seconds, connecting included.
        max_body_bytes: where reading a body stops.
        ssl_context: for https; default is the system's trust store with host names checked.

    Raises:
        FirstlightError: the URL or the key cannot be used (kinds ``base-url-invalid``, ``api-key-invalid``).
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.scheme, self.host, self.port, self._prefix = _split(base_url)
        self.timeout_s = timeout_s
        self._max_body_bytes = max_body_bytes
        self._ssl_context = ssl_context
        self._headers = {"Connection": "close", "Accept": "*/*"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise FirstlightError(
                    "the key has a character that cannot stand in an HTTP header.",
                    where="api_key",
                    fix="give the key as printable ASCII on one line, without a line break at its end.",
                    kind="api-key-invalid",
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __repr__(self) -> str:
        return f"Server({self.base_url!r})"

    @property
    def base_url(self) -> str:
        """The URL without path of the API's version, as messages show it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self._prefix}"

    def get(self, path: str, timeout_s: float | None = None) -> ServerReply:
        """GET ``path``; failures of the connection are outcomes, not exceptions."""
        return self._request("GET", path, None, timeout_s)

    def post(self, path: str, payload: Mapping[str, Any], timeout_s: float | None = None) -> ServerReply:
        """POST ``payload`` as JSON."""
        return self._request("POST", path, json.dumps(payload).encode(), timeout_s)

    def health(self, timeout_s: float | None = None) -> ServerReply:
        """GET ``/health``: 200 alive, 503 engine dead. A hung engine still says 200."""
        return self.get("/health", timeout_s)

    def models(self) -> list[dict[str, Any]]:
        """What ``/v1/models`` lists (``id``, ``root``, ``max_model_len``).

        Raises:
            FirstlightError: no such answer.
        """
        document = self._json(self.get("/v1/models"), "/v1/models")
        data = document.get("data")
        if not isinstance(data, list):
            raise self._not_openai("/v1/models", "its JSON has no list 'data'")
        return [entry for entry in data if isinstance(entry, dict)]

    def model(self, name: str) -> dict[str, Any]:
        """The entry of ``/v1/models`` with this id.

        Raises:
            FirstlightError: the server serves other models (kind ``model-not-served``), or no answer.
        """
        entries = self.models()
        for entry in entries:
            if entry.get("id") == name:
                return entry
        served = ", ".join(repr(entry.get("id")) for entry in entries) or "none"
        raise FirstlightError(
            f"the server does not serve {name!r}; it serves {served}.",
            where=f"{self.base_url}/v1/models",
            why="Either another server holds this address, or the served model name differs.",
            fix="set the model to a name in that list, or find out which process listens there.",
            kind="model-not-served",
        )

    def version(self) -> str:
        """What ``/version`` says, such as ``0.20.1``.

        Raises:
            FirstlightError: no such answer.
        """
        version = self._json(self.get("/version"), "/version").get("version")
        if not isinstance(version, str):
            raise self._not_openai("/version", "its JSON has no text 'version'")
        return version

    def metrics(self) -> str:
        """The Prometheus text of ``/metrics``.

        Raises:
            FirstlightError: no such answer, or one longer than the limit.
        """
        reply = self.get("/metrics")
        if not reply.ok:
            raise self.failure(reply, "/metrics")
        if reply.truncated:
            raise self._not_openai("/metrics", f"it is longer than {self._max_body_bytes} bytes")
        return reply.text()

    def chat(
        self,
        model: str,
        prompt: str,
        max_tokens: int,
        temperature: float = 0.0,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> ChatAnswer:
        """One user message, one answer.

        Args:
            model: served model name.
            prompt: the user's message.
            max_tokens: where the answer is cut, in tokens.
            temperature: 0 is greedy.
            extra: further fields of the request, such as ``chat_template_kwargs``.
            timeout_s: overrides the server's limit for this request, in seconds.

        Raises:
            FirstlightError: no answer; ``kind`` names the way it failed.
        """
        payload: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": False,
            **(extra or {}),
        }
        reply = self.post("/v1/chat/completions", payload, timeout_s)
        document = self._json(reply, "/v1/chat/completions")
        return _chat_answer(document, reply.seconds) or self._raise_not_chat(reply)

    def failure(self, reply: ServerReply, path: str) -> FirstlightError:
        """The error that says how a request went wrong."""
        return failure(reply, f"{self.base_url}{path}")

    def _raise_not_chat(self, reply: ServerReply) -> ChatAnswer:
        raise self._not_openai("/v1/chat/completions", f"it holds no message: {excerpt(reply)}")

    def _not_openai(self, path: str, seen: str) -> FirstlightError:
        return FirstlightError(
            f"the server answered 200, but not as OpenAI's API does: {seen}.",
            where=f"{self.base_url}{path}",
            fix="find out which process listens there, and point base_url at the vLLM server.",
            kind="not-openai",
        )

    def _json(self, reply: ServerReply, path: str) -> dict[str, Any]:
        if not reply.ok:
            raise self.failure(reply, path)
        try:
            document = json.loads(reply.body)
        except (ValueError, RecursionError):
            raise self._not_openai(path, f"the body is not JSON: {excerpt(reply)}") from None
        if not isinstance(document, dict):
            raise self._not_openai(path, f"the body is no JSON object: {excerpt(reply)}")
        return document

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.scheme == "https":
            context = self._ssl_context or ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> ServerReply:
        limit = self.timeout_s if timeout_s is None else timeout_s
        started = time.monotonic()
        headers = dict(self._headers, **({"Content-Type": "application/json"} if body is not None else {}))
        connection = self._connection(limit)
        expired = threading.Event()
        watchdog: threading.Timer | None = None
        try:
            connection.connect()
            # the socket's own time-out starts anew with every byte: the watchdog bounds the whole request
            remaining = max(0.0, limit - (time.monotonic() - started))
            watchdog = threading.Timer(remaining, _hang_up, (connection.sock, expired))
            watchdog.daemon = True
            watchdog.start()
            connection.request(method, self._prefix + path, body=body, headers=headers)
            response = connection.getresponse()
            data = response.read(self._max_body_bytes + 1)
            if response.length and len(data) <= self._max_body_bytes:  # read(n) is silent about a body cut short
                raise http.client.IncompleteRead(data, response.length)
        except (OSError, http.client.HTTPException) as error:
            outcome = "timeout" if expired.is_set() else _outcome(error)
            detail = str(error) or type(error).__name__
            return ServerReply(None, b"", outcome, time.monotonic() - started, detail[:_EXCERPT])
        finally:
            if watchdog is not None:
                watchdog.cancel()
            connection.close()
        seconds = time.monotonic() - started
        if expired.is_set():  # the body was cut by the watchdog, not by the server
            return ServerReply(None, b"", "timeout", seconds, "the body did not end in time")
        limit_bytes = self._max_body_bytes
        return ServerReply(
            response.status, data[:limit_bytes], "http", seconds, response.reason, len(data) > limit_bytes
        )


def _hang_up(sock: socket.socket, expired: threading.Event) -> None:
    expired.set()
    with contextlib.suppress(OSError):  # already closed
        sock.shutdown(socket.SHUT_RDWR)


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    # RemoteDisconnected is both a ConnectionResetError and a BadStatusLine: the server closed without a word
    if isinstance(error, (ConnectionError, http.client.IncompleteRead)):
        return "reset"
    if isinstance(error, http.client.HTTPException):
        return "not-http"
    return "unreachable"


def _split(base_url: str) -> tuple[str, str, int, str]:
    problem = ""
    scheme, host, port, path = "", "", None, ""
    try:
        parts = urlsplit(base_url)
        scheme, host, port, path = parts.scheme, parts.hostname or "", parts.port, parts.path.rstrip("/")
        if parts.username or parts.query or parts.fragment:
            problem = "it has a user, a query or a fragment"
    except ValueError as error:
        problem = str(error)
    if not problem and (scheme not in ("http", "https") or not host):
        problem = "it is not of the form http://HOST:PORT"
    if not problem and not (base_url.isascii() and base_url.isprintable() and " " not in base_url):
        problem = "it has a blank or a character that cannot stand in a URL"
    if problem:
        raise FirstlightError(
            f"{base_url!r} is no base URL: {problem}.",
            where="base_url",
            fix="give it as http://127.0.0.1:30000.",
            kind="base-url-invalid",
        )
    path = path.removesuffix("/v1")
    return scheme, host, port or (443 if scheme == "https" else 80), path


def _chat_answer(document: Mapping[str, Any], seconds: float) -> ChatAnswer | None:
    choices = document.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        return None
    content = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    finish = first.get("finish_reason")
    usage = document.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return ChatAnswer(
        text=content if isinstance(content, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        usage={str(name): count for name, count in counts.items() if isinstance(count, int)},
        seconds=seconds,
        reasoning=reasoning if isinstance(reasoning, str) else "",
    )
