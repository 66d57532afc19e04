"""What a host serves, and what is left on it, as one JSON object. Independent of firstlight's own code."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PORT = 30000
QUESTION = "Write a Python function is_prime(n) that returns True if n is prime. Answer with one code block only."
PROPERTIES = "ActiveState,SubState,UnitFileState,MainPID,InvocationID,NRestarts,LoadState"


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer as parsed JSON; None when there is none."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=5) as reply:
        return json.loads(reply.read() or b"true")
    return None


def unit(name: str) -> dict[str, str]:
    """What systemd says of a unit."""
    argv = ["systemctl", "show", name, f"--property={PROPERTIES}"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def processes() -> list[dict[str, Any]]:
    """Every process that is, or was forked by, a model server."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            group = (folder / "cgroup").read_text()
            if not re.search(r"VLLM::|vllm serve|sglang", command):
                continue
            inside = re.search(r"/([\w@.-]+\.service)", group)
            found.append({"pid": int(folder.name), "command": command, "unit": inside[1] if inside else ""})
    return found


def listeners() -> list[int]:
    """Pids that listen on the port, on any address."""
    argv = ["ss", "-H", "-l", "-t", "-n", "-p", f"sport = :{PORT}"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return sorted({int(pid) for pid in re.findall(r"pid=(\d+)", shown)})


def load(path: str) -> Any:
    """A JSON file's content; None where there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(path).read_text("utf-8"))
    return None


def look() -> dict[str, Any]:
    """All of it."""
    listed = ask("/v1/models")
    models = [entry["id"] for entry in listed["data"]] if listed else []
    body = {"model": models[0] if models else "", "messages": [{"role": "user", "content": QUESTION}]}
    answer = ask("/v1/chat/completions", body) if models else None
    cutover, state = load("/var/lib/firstlight/vllm/cutover.json"), load("/var/lib/firstlight/vllm/state.json")
    return {
        "models": models,
        "answer": answer["choices"][0]["message"]["content"] if answer else "",
        "units": {name: unit(f"{name}.service") for name in ("vllm", "sglang")},
        "processes": processes(),
        "listeners": listeners(),
        "phase": cutover["phase"] if cutover else "",
        "release": state["release"] if state else "",
        "guard": sorted(str(path) for path in Path("/etc/systemd/system").glob("**/firstlight-guard-*")),
        "time": ask("/health") is True,
    }


if __name__ == "__main__":
    print(json.dumps(look()))
