"""What every scenario does: deploy with the project's own plays, put load on a server, write down what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machine import HOME, KEPT, MODELS, OUT, REPO, START, get, inside, run, show

GPUS = len(run(["nvidia-smi", "-L"]).stdout.splitlines())
TENSOR_PARALLEL = min(GPUS, 2)
# a file of variables (JSON) that win over all others, to rehearse the order of things where there is no GPU
REHEARSAL = os.environ.get("PROOF_VARS")
PLENTY = 10**6  # MiB; several servers share the GPUs on purpose
FULL = str(MODELS / "full")
STATE = Path("/var/lib/firstlight")
# whoever wants 125 GiB of a card leaves this share to small servers beside it
SMALL_SHARE = 0.05


def variables(unit: str, port: int, **more: Any) -> dict[str, Any]:
    """Variables that every deployment here has."""
    environment = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    return {
        "ansible_become": False, "ansible_connection": "local", "ansible_python_interpreter": sys.executable,
        "vllm_install_python": (HOME / "python.txt").read_text(), "preflight_min_disk_gib": {},
        "vllm_server_unit": unit, "vllm_server_port": port, "vllm_server_environment": environment,
        "vllm_server_tensor_parallel_size": TENSOR_PARALLEL,
        "vllm_server_reasoning_parser": "", "vllm_server_tool_call_parser": "", **more,
    }  # fmt: skip


def tiny(unit: str, port: int, taps: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Variables of a tiny deployment."""
    told: dict[str, Any] = {
        "mask_token_id": 5, "block_size": 16, "rope_theta": 1000000.0, "max_position_embeddings": 2048,
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    if taps:
        told["target_layer_ids"] = taps
    # a worker of its own also where one GPU serves, so that it can be killed
    flags = {"kv-cache-memory-bytes": 512 << 20, "distributed-executor-backend": "mp"}
    return variables(
        unit, port, model_path=str(MODELS / "tiny"), drafter_name=unit,
        drafter_path=str(MODELS / "tiny-drafter/drafter-step-300.safetensors"), drafter_set=told,
        vllm_server_served_model_name="tiny", vllm_server_max_model_len=2048,
        vllm_server_max_num_batched_tokens=8192, vllm_server_extra_args=flags,
        smoke_prompts=["is_prime"], smoke_max_tokens=256, sglang_stop_tolerated_gpu_mib=PLENTY,
        vllm_server_gpu_memory_utilization=SMALL_SHARE, **more,
    )  # fmt: skip


def full(unit: str, port: int, *, drafting: bool, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Variables of a full-size deployment with weights made up by vLLM."""
    return variables(
        unit, port, model_path=FULL, drafter_enabled=drafting, drafter_name=unit,
        drafter_path=FULL + "-drafter/drafter.safetensors", drafter_set={"family": "Qwen3.6-27B-DFlash"},
        vllm_server_served_model_name="full",
        vllm_server_extra_args={"load-format": "dummy", **(flags or {})},
        # acceptance drawn at the published length, since made-up weights agree on nothing
        __vllm_server_speculative={
            "method": "dflash", "model": "{{ drafter_result.path }}", "num_speculative_tokens": 15,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5.9,
        },
        sglang_stop_tolerated_gpu_mib=PLENTY,
    )  # fmt: skip


def play(name: str, playbook: str, values: Mapping[str, Any], timeout_s: float = 900) -> dict[str, Any]:
    """Run a play; returns how it ended, how long it took and the end of what it said."""
    (OUT / "plays").mkdir(exist_ok=True)
    given = OUT / "plays" / f"{name}.vars.json"
    more = json.loads(Path(REHEARSAL).read_text()) if REHEARSAL else {}
    given.write_text(json.dumps({**values, **more}, indent=1))
    environment = {
        **os.environ, "PYTHONPATH": str(HOME / "ctl"), "ANSIBLE_HOME": str(HOME / "ansible" / name),
        "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0",
    }  # fmt: skip
    argv = [sys.executable, "-m", "ansible", "playbook", "-v", "-i", "gpu,", "-e", f"@{given}", playbook]
    since = time.time()
    log = OUT / "plays" / f"{name}.log"
    with log.open("w") as handle:
        # a host takes one run at a time; several small deployments share this one on purpose, each with its own state
        own = state_dir(str(values["vllm_server_unit"]))
        script = f'mkdir -p {own} {STATE} && mount --bind {own} {STATE} && cd {REPO} && exec "$@"'
        wrapped = inside(["unshare", "--mount", "bash", "-c", script, "play", *argv])
        done = subprocess.run(
            wrapped, stdout=handle, stderr=subprocess.STDOUT, env=environment, check=False, timeout=timeout_s
        )
    return {"status": done.returncode, "seconds": round(time.time() - since, 1), "said": log.read_text()[-2500:]}


def state_dir(unit: str) -> Path:
    """Where a deployment's plays find ``/var/lib/firstlight``."""
    return STATE.with_name(f"{STATE.name}-{unit}")


def state_of(unit: str) -> dict[str, Any]:
    """The committed record of a deployment."""
    path = state_dir(unit) / unit / "state.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def judged(lines: list[str]) -> dict[str, Any]:
    """The project's own verdict on a log."""
    sys.path.insert(0, str(REPO / ".collections"))
    from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose  # noqa: PLC0415

    return diagnose(lines).as_dict()


def await_health(unit: str, port: int, limit_s: float) -> float | None:
    """Seconds until the server answers; None when the unit fails or the time is over."""
    since = time.time()
    while time.time() - since < limit_s:
        if get(port, "/health", 2) is not None:
            return round(time.time() - since, 1)
        if show(unit).get("ActiveState") in ("failed", "inactive"):
            return None
        time.sleep(0.5)
    return None


def await_record(name: str, key: str, limit_s: float) -> bool:
    """Wait until another scenario has written an entry, or has ended; whether the entry is there."""
    since = time.time()
    while time.time() - since < limit_s:
        try:
            content = json.loads((OUT / f"{name}.json").read_text())
        except (OSError, ValueError):
            content = {}
        if key in content or content.get("ended"):
            return key in content
        time.sleep(0.5)
    return False


def after_full(key: str) -> None:
    """Where `AFTER=full` asks for it, wait until the full-size scenario needs the GPUs alone no more."""
    if os.environ.get("AFTER") == "full":
        await_record("full", key, 1500)


class Record:
    """A scenario's record, written after each entry, so that a scenario cut off is told as far as it came."""

    def __init__(self, name: str) -> None:
        self.path = OUT / f"{name}.json"
        self.content: dict[str, Any] = {"name": name, "since": time.time()}

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value
        self.content["last_s"] = round(time.time() - START, 1)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=1, default=str))
        part.replace(self.path)


def load(
    record: Record, key: str, port: int, *arguments: str, model: str = "full", limit_s: float = 400
) -> dict[str, Any]:
    """Run the load generator against a server."""
    argv = [sys.executable, str(REPO / "tests/gpu/load.py"), f"127.0.0.1:{port}", model, *arguments]
    done = run(argv, timeout=limit_s)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = {"error": done.stdout[-500:] + done.stderr[-1500:]}
    record[key] = result
    return result
