"""Looks at a host from outside and prints what it saw as JSON. Standard library only; runs in a second container.

usage: outsider.py HOST PORT < {"requests": [[method, target, body bytes], ...], "scan": bool, "stream": bool}
Targets go on the wire exactly as given: no library tidies them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def tls(host: str, port: int) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection((host, port), timeout=10), server_hostname="llm.example")


def ask(host: str, port: int, method: str, target: str, size: int) -> dict[str, Any]:
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    got = b""
    try:
        with tls(host, port) as connection:
            connection.sendall(head.encode("latin-1"))
            with contextlib.suppress(OSError):  # refused before the body was read
                connection.sendall(b"x" * size)
            while part := connection.recv(65536):
                got += part
    except OSError as error:
        if not got:
            return {"status": 0, "body": str(error)}
    status, _, body = got.decode("latin-1").partition("\r\n\r\n")
    return {"status": int(status.split()[1]) if status.startswith("HTTP/") else 0, "body": body, "head": status}


def stream(host: str, port: int) -> list[dict[str, float]]:
    """When each event was sent (by the server's clock) and seen here (both containers share one clock)."""
    body = json.dumps({"stream": True}).encode()
    seen = []
    with tls(host, port) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        text = b""
        while b"0\r\n\r\n" not in text[-8:]:
            part = connection.recv(65536)
            if not part:
                break
            now = time.time()
            text += part
            events = [line[6:] for line in part.decode().splitlines() if line.startswith("data: ")]
            seen += [{**json.loads(event), "seen": now} for event in events]
    return seen


def scan(host: str) -> list[int]:
    """Every TCP port that accepts a connection."""
    opened, lock = [], threading.Lock()

    def knock(port: int) -> None:
        with socket.socket() as knocking:
            knocking.settimeout(3)
            if knocking.connect_ex((host, port)) == 0:
                with lock:
                    opened.append(port)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(knock, range(1, 65536)))
    return sorted(opened)


def main() -> None:
    host, port, wanted = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
    found: dict[str, Any] = {"answers": [ask(host, port, *request) for request in wanted.get("requests", [])]}
    if wanted.get("stream"):
        found["stream"] = stream(host, port)
    if wanted.get("scan"):
        found["ports"] = scan(host)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
