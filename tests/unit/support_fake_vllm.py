"""A stand-in for a vLLM server: HTTP and counters as vLLM has them, answers from a table, faults on demand.

It generates nothing and proves nothing about vLLM; it lets the smoke test's own decisions be tested in milliseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RIGHT = {
    "is_prime": (
        "```python\ndef is_prime(n):\n    if n < 2:\n        return False\n    i = 2\n    while i * i <= n:\n"
        "        if n % i == 0:\n            return False\n        i += 1\n    return True\n```"
    ),
    "fibonacci": (
        "```python\ndef fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
        "    return a\n```"
    ),
    "count_vowels": "```python\ndef count_vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())\n```",
}
WRONG = "```python\ndef is_prime(n):\n    return True\n```"


@dataclass
class FakeVllm:
    """State of the stand-in; tests change it while it serves."""

    model: str = "m"
    api_key: str | None = None
    max_model_len: int = 4096
    answers: dict[str, Callable[[int], str]] = field(default_factory=dict)
    speculating: bool = True
    #: tokens accepted of each draft of 15
    accepted_per_draft: int = 10
    drafts_per_request: int = 5
    started: float = 1.79e9
    dead: bool = False
    #: called with (requests running now); may change the state or return a status to answer with
    on_chat: Callable[[int], int | None] | None = None
    message: Callable[[str], dict[str, Any]] | None = None
    counting: bool = True
    finish_reason: str = "stop"
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    drafts: int = 0
    accepted: int = 0
    finished: int = 0
    running: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, prompt: str, number: int) -> str:
        for function, text in RIGHT.items():
            if function in prompt:
                return self.answers[function](number) if function in self.answers else text
        return "I know only three tasks."

    def metrics(self) -> str:
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            f"process_start_time_seconds {self.started!r}",
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}",
            f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{self.model}"}} '
            f"{float(self.finished)}",
        ]
        if self.speculating:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(self.drafts)}",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(self.drafts * 15)}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(self.accepted)}",
            ]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{n}"}} '
                f"{float(self.drafts if n < self.accepted_per_draft else 0)}"
                for n in range(15)
            ]
        return "\n".join(lines) + "\n"


def _handler(state: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def error(self, status: int, message: str) -> None:
            self.reply(status, json.dumps({"error": {"message": message, "code": status}}).encode())

        def authorized(self) -> bool:
            if state.api_key and self.headers.get("Authorization") != f"Bearer {state.api_key}":
                self.error(401, "Unauthorized")
                return False
            return True

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(503 if state.dead else 200, b"")
            elif self.path == "/metrics":
                self.reply(200, state.metrics().encode(), "text/plain")
            elif self.path == "/version":
                self.reply(200, b'{"version": "0.20.1"}')
            elif self.path == "/v1/models":
                if self.authorized():
                    entry = {"id": state.model, "root": "/m", "max_model_len": state.max_model_len}
                    self.reply(200, json.dumps({"object": "list", "data": [entry]}).encode())
            else:
                self.error(404, "Not Found")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions" or not self.authorized():
                return
            with state.lock:
                state.requests.append(body)
                number = len(state.requests)
                state.running += 1
                state.most_at_once = max(state.most_at_once, state.running)
            try:
                self.chat(body, number)
            finally:
                with state.lock:
                    state.running -= 1

        def chat(self, body: dict[str, Any], number: int) -> None:
            status = state.on_chat(state.running) if state.on_chat else None
            if status:
                self.error(status, "EngineCore encountered an issue.")
                return
            if body["model"] != state.model:
                self.error(404, f"The model `{body['model']}` does not exist.")
                return
            with state.lock:
                if state.counting:
                    state.finished += 1
                    state.drafts += state.drafts_per_request
                    state.accepted += state.drafts_per_request * state.accepted_per_draft
            text = state.answer(body["messages"][0]["content"], number)
            message = state.message(text) if state.message else {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": state.finish_reason}
            usage = {"prompt_tokens": 20, "completion_tokens": 50, "total_tokens": 70}
            self.reply(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    return Handler


@contextmanager
def serve(**changes: Any) -> Iterator[FakeVllm]:
    """Serve the stand-in on a free port of loopback."""
    state = FakeVllm(**changes)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *args: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), _handler(state)) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def hold_until(state: FakeVllm, count: int, seconds: float = 5.0) -> None:
    """Wait until that many requests run at once, so that a burst is seen to be one."""
    deadline = time.monotonic() + seconds
    while state.most_at_once < count and time.monotonic() < deadline:
        time.sleep(0.005)
