"""A server behind the proxy that hides nothing: every path is answered with 200 and the path as it arrived.

What reaches it from outside is therefore what the proxy lets through. ``POST /v1/chat/completions`` streams five
events, one every 0.2 s, each with the time at which it was sent.
usage: open_upstream.py ADDRESS PORT
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EVENTS, EVERY_S = 5, 0.2


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/v1/chat/completions" and self.command == "POST":
            self.stream()
            return
        seen = {"reached": self.path, "method": self.command, "bytes": len(body), "headers": dict(self.headers)}
        text = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(EVENTS):
            event = f"data: {json.dumps({'event': number, 'sent': time.time()})}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(EVERY_S)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
    setattr(Handler, f"do_{method}", Handler.answer)

if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
