"""HTTP to a server: every way to fail has its own outcome and its own words."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.openai_api import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support_fake_vllm import serve
from support_hosts import free_port


@contextmanager
def raw(reply: bytes | Callable[[socket.socket], None], host: str = "127.0.0.1") -> Iterator[str]:
    """A server that answers each connection with these bytes, whatever was asked."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        listener.settimeout(0.02)
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    if callable(reply):
                        reply(connection)
                        continue
                    connection.settimeout(1)
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            stop.set()
            thread.join()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def kind_of(action: Callable[[], object]) -> str:
    with pytest.raises(FirstlightError) as error:
        action()
    assert "Fix:" in error.value.message
    return error.value.kind


def test_a_healthy_server_is_read() -> None:
    with serve() as fake:
        server = Server(fake.url + "/v1/", timeout_s=5)
        assert server.health().ok
        assert server.version() == "0.20.1"
        assert server.model("m")["max_model_len"] == 4096
        assert "process_start_time_seconds" in server.metrics()
        answer = server.chat("m", "is_prime please", 64, extra={"seed": 1})
    assert answer.text.startswith("```python")
    assert (answer.finish_reason, answer.usage["completion_tokens"]) == ("stop", 50)
    assert fake.requests[0]["max_tokens"] == 64
    assert fake.requests[0]["seed"] == 1
    assert answer.seconds > 0


def test_nobody_listening_is_refused() -> None:
    server = Server(f"http://127.0.0.1:{free_port()}", timeout_s=2)
    assert server.health().outcome == "refused"
    assert server.health().status is None
    assert kind_of(server.models) == "server-refused"


def test_silence_is_a_timeout_of_the_whole_request() -> None:
    with raw(lambda connection: time.sleep(1)) as url:
        reply = Server(url, timeout_s=0.3).health()
    assert reply.outcome == "timeout"
    assert reply.seconds < 0.9


@pytest.mark.parametrize(
    ("begins", "drop"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"x"), (b"HTTP/1.1 200 OK\r\n", b"X-Name: x\r\n")],
    ids=["content", "headers"],
)
def test_a_server_that_drips_does_not_stretch_the_limit(begins: bytes, drop: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.recv(65536)
        try:
            connection.sendall(begins)
            for _ in range(40):
                connection.sendall(drop)
                time.sleep(0.05)
        except OSError:
            pass

    with raw(drip) as url:
        reply = Server(url, timeout_s=0.4).health()
    assert reply.outcome == "timeout"
    assert reply.seconds < 1.5


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf"])
def test_a_connection_that_ends_early_is_a_reset(sent: bytes) -> None:
    with raw(sent) as url:
        assert Server(url, timeout_s=2).health().outcome == "reset"


def test_another_protocol_is_said_to_be_no_http() -> None:
    with raw(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        server = Server(url, timeout_s=2)
        assert server.health().outcome == "not-http"
        assert kind_of(server.models) == "not-http"


def test_an_unknown_host_is_unreachable() -> None:
    assert Server("http://no-such-host.invalid:1", timeout_s=5).health().outcome == "unreachable"


def test_a_wrong_key_is_rejected_and_never_repeated() -> None:
    with serve(api_key="right") as fake:
        server = Server(fake.url, "canary-51c2")
        with pytest.raises(FirstlightError) as error:
            server.models()
        assert Server(fake.url, "right").model("m")
    assert error.value.kind == "api-key-rejected"
    assert "canary-51c2" not in error.value.message
    assert "canary-51c2" not in repr(server)


def test_a_key_with_a_line_break_is_refused_without_showing_it() -> None:
    with pytest.raises(FirstlightError) as error:
        Server("http://127.0.0.1:1", "canary-51c2\r\nX: y")
    assert error.value.kind == "api-key-invalid"
    assert "canary" not in error.value.message


def test_another_model_is_named_with_what_is_served() -> None:
    with serve(model="other") as fake, pytest.raises(FirstlightError, match="it serves 'other'") as error:
        Server(fake.url).model("m")
    assert error.value.kind == "model-not-served"


def test_a_dead_engine_is_503() -> None:
    with serve(dead=True) as fake:
        reply = Server(fake.url).health()
        assert reply.status == 503
        assert Server(fake.url).failure(reply, "/health").kind == "engine-dead"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("401 Unauthorized", "api-key-rejected"),
        ("403 Forbidden", "forbidden"),
        ("404 Not Found", "not-found"),
        ("400 Bad Request", "request-rejected"),
        ("302 Found", "request-rejected"),
        ("500 Internal Server Error", "server-error"),
        ("502 Bad Gateway", "server-error"),
        ("503 Service Unavailable", "engine-dead"),
    ],
)
def test_each_status_has_its_own_kind(status: str, kind: str) -> None:
    body = json.dumps({"error": {"message": "why {status} {body}"}}).encode()
    with raw(http(body, status)) as url:
        assert kind_of(lambda: Server(url, timeout_s=2).chat("m", "x", 5)) == kind


def test_the_servers_own_words_are_in_the_message() -> None:
    body = b'{"object":"error","message":"max_tokens is too large: 9000","code":400}'
    with raw(http(body, "400 Bad Request")) as url, pytest.raises(FirstlightError, match="max_tokens is too large"):
        Server(url, timeout_s=2).chat("m", "x", 9000)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>It works</html>",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": "text"}]}',
        b'{"data": {}}',
        b"[" * 100_000,
        b"1" * 10_000,
    ],
)
def test_a_200_that_is_no_answer_is_told_as_such(body: bytes) -> None:
    with raw(http(body)) as url:
        server = Server(url, timeout_s=2)
        assert kind_of(lambda: server.chat("m", "x", 5)) == "not-openai"
        assert kind_of(server.models) == "not-openai"
        assert kind_of(server.version) == "not-openai"


def test_a_body_beyond_the_limit_is_not_read_on() -> None:
    with raw(http(b"x" * 5000)) as url:
        server = Server(url, timeout_s=2, max_body_bytes=1000)
        reply = server.get("/")
        assert (len(reply.body), reply.truncated) == (1000, True)
        assert kind_of(server.metrics) == "not-openai"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_a_model_that_only_thought_is_recognised(key: str) -> None:
    message = {"role": "assistant", "content": None, key: "Hmm, primes."}
    with serve(message=lambda text: message, finish_reason="length") as fake:
        answer = Server(fake.url).chat("m", "is_prime", 5)
    assert answer.only_reasoning
    assert (answer.text, answer.reasoning) == ("", "Hmm, primes.")


def test_the_environments_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serve() as fake:
        assert Server(fake.url).health().ok


def test_ipv6_addresses_work() -> None:
    try:
        with raw(http(b'{"version": "1"}'), host="::1") as url:
            server = Server(url, timeout_s=2)
            assert server.version() == "1"
            assert server.base_url == url
    except OSError as error:
        pytest.skip(f"no IPv6 on this host: {error}")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:30000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:x",
        "http://u:p@h",
        "http://h/?q=1",
        "http://h /",
        "http://h\n",
    ],
)
def test_an_unusable_url_is_refused(url: str) -> None:
    assert kind_of(lambda: Server(url)) == "base-url-invalid"


@given(st.binary(max_size=200))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_bytes_of_a_server_raise_anything_but_the_documented_error(data: bytes) -> None:
    with raw(data) as url:
        server = Server(url, timeout_s=2)
        assert server.health().outcome in ("reset", "not-http", "http", "timeout")


_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "message", "content", "usage", "finish_reason", "data"]), inner)
    ),
    max_leaves=12,
)


@given(_JSON)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_an_answer_or_refused_by_name(document: Any) -> None:
    with raw(http(json.dumps(document).encode())) as url:
        try:
            assert isinstance(Server(url, timeout_s=2).chat("m", "x", 5).text, str)
        except FirstlightError as error:
            assert error.kind == "not-openai"  # noqa: PT017
