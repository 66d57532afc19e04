"""A stand-in for ``vllm serve``: it replays a real start, answers a few requests, and fails on demand.

No model, no torch, no GPU, nothing of vLLM's code. What it copies is behaviour that a host sees: the log's lines
(replayed from a real start of 0.20.1 on two GPUs), the process tree and its titles, a port that is bound with
SO_REUSEPORT long before anything answers on it, SIGTERM that is ignored while the model loads, and the way in which
the death of an engine or a worker ends the API server.

``STANDIN_FAULT`` chooses what goes wrong:
  wrong-model      it names and serves another model
  no-generation    healthy, and no request is ever answered
  garbage          every answer is nonsense
  inert-drafter    drafts are made and none is accepted
  no-drafts        the counters of speculation are there and stand still
  no-counters      the counters of speculation are missing
  hungry           a worker takes 1 GiB of memory while it loads
``STANDIN_HOLD`` stops the start at a milestone for some seconds: ``loading:5``, ``capturing:5``; or the first
request: ``serving:5``. ``STANDIN_CACHE_MIB`` is the size of the compile cache that each start writes.
Milestones passed are listed in the file ``milestones`` of HOME, as ``NAME PID`` with the pid of the API server.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

VERSION = "0.20.1"
IS_PRIME = (
    "```python\ndef is_prime(n):\n    if n < 2:\n        return False\n    i = 2\n    while i * i <= n:\n"
    "        if n % i == 0:\n            return False\n        i += 1\n    return True\n```"
)
GARBAGE = "the the the of of \u25a1\u25a1 \u25a1 and and 7 7 7"
_MILESTONES = {
    "Starting to load model": "loading",
    "torch.compile took": "compiled",
    "Capturing CUDA graphs (mixed": "capturing",
}
_LOG = Path(__file__).with_name("vllm_standin.log")
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_LAST_S = 2.0  # from the death of the engine to the end of the API server; vLLM takes up to 5
_FALL_S = 0.5  # from the last words of an engine or API server whose start failed to its end
_POLL_S = 0.02
_GIB = 1 << 30
_DRAFTS, _K, _ACCEPTED = 5, 15, 10  # drafts a request, tokens a draft, accepted tokens a draft


def read_config(path: str) -> dict[str, Any]:
    """Read the part of YAML that the role writes: ``key: value`` and one level of mapping below a key."""
    config: dict[str, Any] = {}
    inner: dict[str, Any] | None = None
    for line in Path(path).read_text("utf-8").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, value = line.strip().partition(":")
        if line[0] == " " and inner is not None:
            inner[name] = _scalar(value.strip())
        elif value.strip():
            config[name] = _scalar(value.strip())
        else:
            inner = config.setdefault(name, {})
    return config


def _scalar(text: str) -> Any:
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text.strip("'\"")


def set_title(title: str) -> None:
    """Change this process's command line and name, as setproctitle does: over the arguments' own memory."""
    libc = ctypes.CDLL(None)
    name = title.encode()
    libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]), 0, 0, 0)
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    room = end - start
    ctypes.memmove(start, name[: room - 1].ljust(room, b"\0"), room)


def started_s() -> float:
    """When this process started, seconds since the epoch, as Prometheus' client computes it."""
    ticks = float(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text("ascii").splitlines() if line.startswith("btime"))
    return ticks / os.sysconf("SC_CLK_TCK") + float(boot.split()[1])


def say(text: str) -> None:
    """One line of the log."""
    print(text, flush=True)


def stamp() -> str:
    """The time as vLLM's log has it."""
    return time.strftime("%m-%d %H:%M:%S")


class Engine:
    """The process tree below the API server: ``VLLM::EngineCore`` with one ``VLLM::Worker_TPn`` a rank.

    The engine watches its workers and ends with status 1 when one is gone; the API server watches the engine. A
    parent's death takes the children along.
    """

    def __init__(self, ranks: int, fault: str) -> None:
        self.status: int | None = None
        self._api, self._fault = os.getpid(), fault
        self._ready_end, self._told_ready = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._run_engine(ranks)
        os.close(self._ready_end)

    def ready(self) -> None:
        """Tell the engine that its start is over: from now on a death is reported as in service."""
        os.write(self._told_ready, b"r")

    def alive(self) -> bool:
        """Whether the engine lives; its end is kept in ``status`` (negative: the signal)."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def end(self) -> None:
        """End the whole tree."""
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)

    def _run_engine(self, ranks: int) -> None:
        _child("VLLM::EngineCore", self._api, self._ready_end)
        os.set_blocking(self._ready_end, False)
        me = os.getpid()
        workers = {}
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                self._run_worker(rank, me)
            workers[pid] = rank
        serving = False
        while True:
            with contextlib.suppress(BlockingIOError):
                serving = bool(os.read(self._ready_end, 1)) or serving
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                self._worker_died(workers[pid], me, serving=serving)
            time.sleep(_POLL_S)

    def _worker_died(self, rank: int, me: int, *, serving: bool) -> None:
        if serving:
            told = [
                f"[multiproc_executor.py:283] Worker proc VllmWorker-{rank} died unexpectedly, shutting down executor.",
                "[core.py:1136] EngineCore encountered a fatal error.",
            ]
        else:
            told = [
                "[core.py:1136] EngineCore failed to start.",
                "[core.py:1136] Exception: WorkerProc initialization failed due to an exception in a background "
                "process. See stack trace for root cause.",
            ]
        for text in told:
            say(f"(EngineCore pid={me}) ERROR {stamp()} {text}")
        time.sleep(_FALL_S)
        os._exit(1)

    def _run_worker(self, rank: int, engine: int) -> None:
        _child(f"VLLM::Worker_TP{rank}", engine)
        if self._fault == "hungry" and rank == 0:
            _eat()
        while True:
            time.sleep(3600)


def _child(title: str, parent: int, kept: int = 0) -> None:
    """What every child does first: vLLM spawns its children, so that they inherit no socket of their parent."""
    for descriptor in range(3, 64):
        if descriptor != kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(1)
    set_title(title)


def _eat() -> None:
    held = []
    for _ in range(_GIB >> 22):
        held.append(b"x" * (1 << 22))
        time.sleep(0.002)


class Standin:
    """The API server."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.fault = environment.get("STANDIN_FAULT", "")
        hold, _, seconds = environment.get("STANDIN_HOLD", "").partition(":")
        self._hold, self._hold_s = hold, float(seconds or 0)
        self._home = Path(environment["HOME"])
        self._cache = Path(environment["VLLM_CACHE_ROOT"])
        self._cache_mib = int(environment.get("STANDIN_CACHE_MIB", "1"))
        self.api_key = environment.get("VLLM_API_KEY", "")
        self.config = config
        self.speculative = dict(config.get("speculative-config") or {})
        self.model = "stand-in/another-model" if self.fault == "wrong-model" else str(config["served-model-name"])
        self.dead = False
        self.finished = 0
        self.lock = threading.Lock()
        self._milestones: set[str] = set()
        self.started_s = started_s()

    def run(self) -> int:
        """Start, serve until SIGTERM or the engine's death; returns the exit status."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as while a model loads
        (self._home / "milestones").write_text("", "utf-8")
        # bound now and not listening: clients are refused, and a second server on the port gets no error
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((str(self.config.get("host", "127.0.0.1")), int(self.config["port"])))
        engine = Engine(int(self.config.get("tensor-parallel-size", 1)), self.fault)
        if not self._replay(engine):
            return 1
        server = ThreadingHTTPServer(held.getsockname(), make_handler(self), bind_and_activate=False)
        server.socket.close()
        server.socket, server.daemon_threads, server.request_queue_size = held, True, 128
        ended = threading.Event()

        def leave(_number: int, _frame: FrameType | None) -> None:
            ended.set()

        signal.signal(signal.SIGTERM, leave)
        engine.ready()
        server.server_activate()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        say(f"(APIServer pid={os.getpid()}) INFO:     Application startup complete.")
        self.reach("ready")
        while engine.alive() and not ended.wait(_POLL_S):
            pass
        if not ended.is_set():
            self._engine_died()
        engine.end()
        say(f"(APIServer pid={os.getpid()}) INFO:     Finished server process [{os.getpid()}]")
        return 0

    def reach(self, milestone: str) -> None:
        """Note a milestone, the first time that it is passed, and stay there if that is asked for."""
        with self.lock:
            if milestone in self._milestones:
                return
            self._milestones.add(milestone)
        with (self._home / "milestones").open("a", encoding="utf-8") as file:
            file.write(f"{milestone} {os.getpid()}\n")

    def hold(self, milestone: str, alive: Callable[[], bool]) -> None:
        """Stay at a milestone for as long as asked, or until the engine dies."""
        until = time.monotonic() + (self._hold_s if milestone == self._hold else 0.0)
        while time.monotonic() < until and alive():
            time.sleep(_POLL_S)

    def _replay(self, engine: Engine) -> bool:
        """Write the log of a start; False when the engine died meanwhile."""
        me = os.getpid()
        for line in _LOG.read_text("utf-8").splitlines():
            text = re.sub(r"\((APIServer) pid=\d+\)", rf"(\1 pid={me})", line)
            text = re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d", stamp(), text)
            text = re.sub(r"(auxiliary layers from speculative config: ).*", rf"\1{self._taps()}", text)
            say(text)
            found = next((name for mark, name in _MILESTONES.items() if mark in line), "")
            if found:
                self.reach(found)
                self.hold(found, engine.alive)
            if found == "compiled":
                self._write_cache(engine)
            if not engine.alive():
                return self._start_failed(engine)
            time.sleep(0.005)
        return True

    def _taps(self) -> str:
        config = json.loads((Path(str(self.speculative.get("model", "")), "config.json")).read_text("utf-8"))
        return str(tuple(config.get("eagle_aux_hidden_state_layer_ids", ())))

    def _write_cache(self, engine: Engine) -> None:
        folder = self._cache / "torch_compile_cache"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "graph").open("wb") as file:
                for _ in range(self._cache_mib):
                    file.write(b"\0" * (1 << 20))
        except OSError as error:
            head = f"(Worker_TP0 pid={engine.pid}) ERROR {stamp()} [multiproc_executor.py:852]"
            say(f"{head} WorkerProc failed to start.")
            say(f"{head} Traceback (most recent call last):")
            say(f'{head}   File "{__file__}", line 1, in _write_cache')
            say(f"{head} OSError: {error}")
            engine.end()
            while engine.alive():
                time.sleep(_POLL_S)

    def _start_failed(self, engine: Engine) -> bool:
        head = f"(APIServer pid={os.getpid()})"
        status = engine.status
        say(f"{head} Traceback (most recent call last):")
        say(f'{head}   File "{__file__}", line 1, in run')
        say(f"{head} RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
            f"{{'EngineCore': {status}}}")  # fmt: skip
        time.sleep(_FALL_S)
        return False

    def _engine_died(self) -> None:
        self.dead = True
        head = f"(APIServer pid={os.getpid()}) ERROR {stamp()}"
        say(f"{head} [core_client.py:600] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.")
        say(f"{head} [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
            "See stack trace (above) for the root cause.")  # fmt: skip
        time.sleep(_LAST_S)

    def answer(self) -> str:
        """Answer one request, and count it."""
        with self.lock:
            self.finished += 1
        return GARBAGE if self.fault == "garbage" else IS_PRIME

    def metrics(self) -> str:
        """The Prometheus page: what firstlight reads of it."""
        labels = f'engine="0",model_name="{self.model}"'
        drafts = 0 if self.fault == "no-drafts" else self.finished * _DRAFTS
        accepted = 0 if self.fault == "inert-drafter" else _ACCEPTED
        lines = [
            f"process_start_time_seconds {self.started_s!r}",
            f"vllm:num_requests_running{{{labels}}} 0.0",
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} {float(self.finished)}',
        ]
        if self.speculative and self.fault != "no-counters":
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(drafts * _K)}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(drafts * accepted)}",
            ]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{n}"}} '
                f"{float(drafts if n < accepted else 0)}"
                for n in range(_K)
            ]
        return "\n".join(lines) + "\n"


def make_handler(standin: Standin) -> type[BaseHTTPRequestHandler]:
    """The HTTP side."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._reply(503 if standin.dead else 200, b"")
            elif self.path == "/metrics":
                self._reply(200, standin.metrics().encode(), "text/plain")
            elif self.path == "/version":
                self._reply(200, json.dumps({"version": VERSION}).encode())
            elif self.path == "/v1/models" and self._allowed():
                entry = {"id": standin.model, "object": "model", "root": standin.config.get("model"),
                         "max_model_len": standin.config.get("max-model-len")}  # fmt: skip
                self._reply(200, json.dumps({"object": "list", "data": [entry]}).encode())
            elif self.path != "/v1/models":
                self._error(404, "Not Found")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            if not self._allowed():
                return
            if self.path != "/v1/chat/completions" or asked.get("model") != standin.model:
                self._error(404, f"The model `{asked.get('model')}` does not exist.")
                return
            standin.reach("serving")
            standin.hold("serving", lambda: not standin.dead)
            while standin.fault == "no-generation" and not standin.dead:
                time.sleep(0.1)
            if standin.dead:
                self._error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
                return
            message = {"role": "assistant", "content": standin.answer()}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 30, "completion_tokens": 60, "total_tokens": 90}
            self._reply(200, json.dumps({"object": "chat.completion", "model": standin.model, "choices": [choice],
                                         "usage": usage}).encode())  # fmt: skip

        def _allowed(self) -> bool:
            if standin.api_key and self.headers.get("Authorization") != f"Bearer {standin.api_key}":
                self._error(401, "Unauthorized")
                return False
            return True

        def _error(self, status: int, message: str) -> None:
            self._reply(status, json.dumps({"error": {"message": message, "code": status}}).encode())

        def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the library's name
            pass

    return Handler


def main() -> None:
    """``vllm serve --config FILE``."""
    if sys.argv[1:2] != ["serve"] or sys.argv[2:3] != ["--config"]:
        sys.exit(2)
    raise SystemExit(Standin(read_config(sys.argv[3]), os.environ).run())


if __name__ == "__main__":
    main()
