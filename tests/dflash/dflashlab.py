"""A host of the scenario: deployments to it, and what it serves, seen without firstlight's own code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deploy

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab" / "lab.sh"
INVENTORY = ROOT / "extensions" / "molecule" / "dflash" / "inventory"
OLD_MODEL = "/srv/models/tiny-qwen3"
URL = "http://127.0.0.1:30000"
QUESTION = "Write a Python function is_prime(n) that returns True if n is prime. Answer with one code block only."
_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total\{.*\} (\S+)$", re.MULTILINE)
# vLLM's own line, or that of the plugin with which 0.20.1 speculates on a CPU
_TAPS = r"(?:Using auxiliary layers from [\w ]+:|vllm_cpu_spec_test: aux hidden state layers) (\(.*?\))"
_RUN_LIMIT_S = 1200.0


@dataclass(frozen=True)
class Serving:
    """What a host serves.

    Attributes:
        model: the one that it names.
        answer: to the question.
        release: firstlight's release in the server's command line; empty for another server.
        length: mean acceptance length over this question alone; None without speculation.
        cache: the root of vLLM's caches in the server's environment.
        taps: the layers that the server's log says the drafter taps; empty when it says none.
    """

    model: str
    answer: str
    release: str = ""
    length: float | None = None
    cache: str = ""
    taps: str = ""


class Host:
    """One host.

    Args:
        name: in the inventory and in the lab.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.figures: list[str] = []
        self._variables: dict[str, Any] | None = None

    def variable(self, name: str) -> Any:
        """A variable of the inventory, before Ansible fills in templates."""
        if self._variables is None:
            program = Path(sys.executable).parent / "ansible-inventory"
            argv = [str(program), "-i", str(INVENTORY), "--host", self.name]
            self._variables = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        return self._variables[name]

    def deploy(self, **variables: Any) -> deploy.HostResult:
        """Run the job with the inventory's variables and these."""
        result = deploy.run(inventory=str(INVENTORY), limit=self.name, extravars=variables, timeout=_RUN_LIMIT_S)
        assert result.status in {"successful", "failed"}, result
        host = result.hosts[self.name]
        told = host.failure.id if host.failure else "converged" if host.converged else "deployed"
        length = f", acceptance length {host.acceptance.length}" if host.acceptance else ""
        ready = f", ready after {host.ready_s:.0f} s" if host.ready_s else ""
        self.figures.append(f"{self.name}: {told} in {result.seconds:.0f} s{ready}{length}")
        print(self.figures[-1])
        return host

    def exec(self, *argv: str, check: bool = True) -> str:
        """Run a program on the host, without the network."""
        done = subprocess.run([LAB, "exec", self.name, *argv], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def serving(self) -> Serving:
        """Ask whatever serves, on the host."""
        model = json.loads(self._get("/v1/models"))["data"][0]["id"]
        before = self._counters()
        answer = self._ask(model)
        if before is None:
            return Serving(model, answer)
        pid = self.unit("vllm", "MainPID")
        return Serving(
            model,
            answer,
            release=_one(r"/releases/([^/\0]+)/", self.exec("cat", f"/proc/{pid}/cmdline")),
            length=self._length_since(before),
            cache=_one(r"(?:^|\0)VLLM_CACHE_ROOT=([^\0]+)", self.exec("cat", f"/proc/{pid}/environ")),
            taps=_one(_TAPS, self._log()),
        )

    def unit(self, name: str, attribute: str) -> str:
        """What systemd says of a unit."""
        return self.exec("systemctl", "show", f"{name}.service", "--value", f"--property={attribute}").strip()

    def drafter_config(self) -> dict[str, Any]:
        """The config.json that the running server drafts by."""
        pid = self.unit("vllm", "MainPID")
        path = _one(r"--config\0([^\0]+)", self.exec("cat", f"/proc/{pid}/cmdline"))
        folder = _one(r"\"?model\"?: \"?([^\s\",]*/drafters/[^\s\",]+)", self.exec("cat", path))
        config: dict[str, Any] = json.loads(self.exec("cat", f"{folder}/config.json"))
        return config

    def _get(self, path: str) -> str:
        return self.exec("curl", "-sSf", "-m", "30", f"{URL}{path}")

    def _ask(self, model: str) -> str:
        body: Mapping[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 200,
        }
        header = "Content-Type: application/json"
        url = f"{URL}/v1/chat/completions"
        text = self.exec("curl", "-sSf", "-m", "120", "-H", header, "-d", json.dumps(body), url)
        answer: str = json.loads(text)["choices"][0]["message"]["content"]
        return answer

    def _counters(self) -> dict[str, float] | None:
        """Drafts and accepted tokens since the server's start; None where a server does not speculate."""
        text = self.exec("curl", "-sS", "-m", "30", f"{URL}/metrics")
        found = {name: float(value) for name, value in _COUNTER.findall(text)}
        return found or None

    def _length_since(self, before: Mapping[str, float]) -> float:
        """Mean acceptance length since then: the last step is counted a moment after its answer is there."""
        deadline = time.monotonic() + 5
        after = self._counters() or {}
        while time.monotonic() < deadline:
            time.sleep(0.3)
            earlier, after = after, self._counters() or {}
            if after == earlier and after["drafts"] > before["drafts"]:
                break
        drafts = after["drafts"] - before["drafts"]
        assert drafts > 0, f"nothing was drafted: {before} {after}"
        return 1 + (after["accepted_tokens"] - before["accepted_tokens"]) / drafts

    def _log(self) -> str:
        start = self.unit("vllm", "InvocationID")
        return self.exec("journalctl", "--no-pager", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={start}")


def _one(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""
