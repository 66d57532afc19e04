"""The load generator of the proof: what it counts, and that it tells a server that dies."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import load


@contextmanager
def server(
    fault: Callable[[int], bool] = lambda _: False, garble: Callable[[int], bool] = lambda _: False
) -> Iterator[tuple[str, list[int]]]:
    """Completions of exactly the length asked for; told how many run, `fault` fails and `garble` spoils the answer."""
    running, most, lock = [0], [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
                now = running[0]
            time.sleep(0.02)
            with lock:
                running[0] -= 1
            status = 500 if fault(now) else 200
            message = {"content": "other" if garble(now) else body.get("messages", [{"content": ""}])[0]["content"]}
            told = {"usage": {"completion_tokens": body["max_tokens"]}, "choices": [{"message": message}]}
            answer = told if status == 200 else {"error": "EngineDead"}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Quiet(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"127.0.0.1:{http.server_address[1]}", most
        http.shutdown()


def test_each_burst_is_sent_at_once_and_all_are_counted() -> None:
    with server() as (address, most):
        result = load.bursts(address, "m", [1, 16, 8], 32, 0)
    assert (result["bursts"], result["requests"], result["died"]) == (3, 25, False)
    # how many of a burst meet depends on how busy the machine is; that it is more than one at a time does not
    assert most[0] > 1


def test_a_server_that_dies_at_a_burst_is_told_with_the_burst_and_its_answer() -> None:
    with server(lambda running: running > 4) as (address, _):
        result = load.bursts(address, "m", [1, 2, 16, 1], 32, 60)
    assert result["died"] is True
    assert [size for size, _, _ in result["bursts"]] == [1, 2, 16]
    assert "EngineDead" in result["error"]


def test_a_server_that_is_gone_is_told_too() -> None:
    with server() as (address, _):
        pass
    result = load.bursts(address, "m", [2], 8, 0)
    assert result["died"] is True
    assert "refused" in result["error"].lower()


def test_streams_count_the_tokens_of_all_of_them() -> None:
    with server() as (address, most):
        one = load.streams(address, "m", 1, 10, 0.3)
        four = load.streams(address, "m", 4, 10, 0.3)
    assert one["failed"] == four["failed"] == []
    assert most[0] == 4
    assert four["tokens_per_s"] > one["tokens_per_s"]


def test_answers_that_differ_from_those_of_a_server_alone_are_counted() -> None:
    with server() as (address, _):
        right = load.answers(address, "m", 8, 0.3)
    assert right["answers"] > 8
    assert (right["wrong"], right["failed"]) == (0, [])
    with server(garble=lambda running: running > 1) as (address, most):
        wrong = load.answers(address, "m", 8, 0.3)
    assert most[0] > 1
    assert 0 < wrong["wrong"] <= wrong["answers"]
    assert wrong["examples"][0] == "other"


def test_answers_stop_with_a_server_that_dies() -> None:
    died = threading.Event()

    def dies(running: int) -> bool:
        if running > 1:
            died.set()
        return died.is_set()

    since = time.monotonic()
    with server(dies) as (address, _):
        result = load.answers(address, "m", 8, 30)
    assert "EngineDead" in result["failed"][0]
    assert time.monotonic() - since < 20
