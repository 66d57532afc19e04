#!/usr/bin/env python3
"""A stand-in for SGLang that behaves on a host as SGLang does, for tests and the demo. No model, no GPU.

Started as ``python sglang.py serve --model-path M --port 30000`` it holds the port, answers
``/health``, ``/v1/models``, ``/get_model_info`` and a small ``/v1/chat/completions``, and has child processes that
call themselves ``sglang::scheduler_TP0`` and so on. Options make it as hard to stop as the real one can be.
Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType

_PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Change this process's command line and name, as setproctitle does: over the arguments' own memory."""
    libc = ctypes.CDLL(None)
    name = title.encode()
    libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]), 0, 0, 0)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    room = end - start
    ctypes.memmove(start, name[: room - 1].ljust(room, b"\0"), room)


def stay(ignore_sigterm: bool) -> None:
    """Live until killed; without ``ignore_sigterm`` a SIGTERM ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_sigterm else signal.SIG_DFL)
    while True:
        time.sleep(3600)


def hold_gpu(mib: int, ordinal: int) -> None:
    """Hold GPU memory through the CUDA driver, as a scheduler does; needs a GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    calls = (
        (cuda.cuInit, (0,)),
        (cuda.cuCtxCreate_v2, (ctypes.byref(context), 0, ordinal)),
        (cuda.cuMemAlloc_v2, (ctypes.byref(memory), ctypes.c_size_t(mib << 20))),
    )
    for call, arguments in calls:
        status = call(*arguments)
        if status:
            sys.exit(f"CUDA call failed with {status}")


def start_children(options: argparse.Namespace) -> list[int]:
    """Fork the schedulers and the detokenizer; with ``--orphan`` PID 1 becomes their parent at once."""
    titles = [f"sglang::scheduler_TP{rank}" for rank in range(options.tp_size)] + ["sglang::detokenizer"]
    pids = []
    for rank, title in enumerate(titles):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        if options.orphan and os.fork():
            os._exit(0)
        # the listening socket and the pipes of whoever started the server are not theirs
        os.closerange(3, 256)
        set_title(title)
        if options.gpu_mib and "scheduler" in title:
            hold_gpu(options.gpu_mib, rank if options.gpu_ranks else 0)
        stay(options.ignore_sigterm)
    if options.orphan:
        for pid in pids:
            os.waitpid(pid, 0)
        return []
    return pids


def make_handler(options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    """The HTTP side; ``/health`` is 503 until ``--load-s`` has passed, as while a model loads."""
    ready_at = time.monotonic() + options.load_s
    model = options.served_model_name or options.model_path

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            loading = time.monotonic() < ready_at
            if self.path in {"/health", "/health_generate"}:
                self._say(503 if loading else 200, None)
            elif not self._allowed():
                self._say(401, {"error": "Unauthorized"})
            elif self.path == "/v1/models":
                card = {"id": model, "object": "model", "owned_by": "sglang", "root": model}
                self._say(200, {"object": "list", "data": [card]})
            elif self.path in {"/get_model_info", "/model_info"}:
                self._say(200, {"model_path": options.model_path, "is_generation": True})
            else:
                self._say(404, {"error": "no such path"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self._allowed():
                self._say(401, {"error": "Unauthorized"})
                return
            if self.path != "/v1/chat/completions":
                self._say(404, {"error": "no such path"})
                return
            try:
                asked = json.loads(body)
            except ValueError:
                self._say(400, {"error": "not JSON"})
                return
            message = {"role": "assistant", "content": "This is the stand-in for SGLang."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 7, "total_tokens": 8}
            self._say(200, {"object": "chat.completion", "model": asked.get("model", model), "choices": [choice],
                            "usage": usage})  # fmt: skip

        def _allowed(self) -> bool:
            return not options.api_key or self.headers.get("Authorization") == f"Bearer {options.api_key}"

        def _say(self, status: int, document: object) -> None:
            text = b"" if document is None else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
            print(format % args, flush=True)

    return Handler


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of the real launcher that tests use, and those of the stand-in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", nargs="?", choices=["serve"])
    parser.add_argument("--model-path", default="stand-in/old-model")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp-size", "--tp", type=int, default=2)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--load-s", type=float, default=0.0, help="seconds until /health is 200")
    parser.add_argument("--ignore-sigterm", action="store_true", help="only SIGKILL ends it and its children")
    parser.add_argument("--orphan", action="store_true", help="schedulers and detokenizer belong to PID 1")
    parser.add_argument("--hold-on-exit", type=float, default=0.0, help="seconds from SIGTERM to the end")
    parser.add_argument("--gpu-mib", type=int, default=0, help="GPU memory that each scheduler holds")
    parser.add_argument("--gpu-ranks", action="store_true", help="scheduler N uses GPU N rather than GPU 0")
    return parser.parse_args(arguments)


def main() -> None:
    """Serve until SIGTERM."""
    options = parse(sys.argv[1:])
    children = start_children(options)
    server = ThreadingHTTPServer((options.host, options.port), make_handler(options))
    server.daemon_threads = True

    def leave(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=finish).start()

    def finish() -> None:
        time.sleep(options.hold_on_exit)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.ignore_sigterm else leave)
    print(f"The server is fired up and ready to roll! (stand-in, pid {os.getpid()})", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
