"""What is proven: each scenario deploys with the project's own plays and writes a record of what it saw."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from machine import HOME, KEPT, MODELS, OUT, REPO, START, get, gpu_memory, inside, journal, messages, run, show

PLENTY = 10**6  # MiB; several servers share the GPUs on purpose
ALL_UNITS = ("fl-right", "fl-taps", "fl-small", "fl-held", "fl-full", "fl-plain")
FULL = str(MODELS / "full")
# whoever wants 125 GiB of a card leaves this share to small servers beside it
SMALL_SHARE = 0.05


def variables(unit: str, port: int, **more: Any) -> dict[str, Any]:
    """Variables that every deployment here has."""
    environment = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    return {
        "ansible_become": False, "ansible_connection": "local", "ansible_python_interpreter": sys.executable,
        "vllm_install_python": (HOME / "python.txt").read_text(), "preflight_min_disk_gib": {},
        "vllm_server_unit": unit, "vllm_server_port": port, "vllm_server_environment": environment,
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
    flags = {"disable-custom-all-reduce": True, "kv-cache-memory-bytes": 512 << 20}
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
        vllm_server_extra_args={"load-format": "dummy", "disable-custom-all-reduce": True, **(flags or {})},
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
    given.write_text(json.dumps(values, indent=1))
    environment = {
        **os.environ, "PYTHONPATH": str(HOME / "ctl"), "ANSIBLE_HOME": str(HOME / "ansible" / name),
        "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0",
    }  # fmt: skip
    argv = [sys.executable, "-m", "ansible", "playbook", "-v", "-i", "gpu,", "-e", f"@{given}", playbook]
    since = time.time()
    log = OUT / "plays" / f"{name}.log"
    with log.open("w") as handle:
        wrapped = inside(["bash", "-c", f'cd {REPO} && exec "$@"', "play", *argv])
        done = subprocess.run(
            wrapped, stdout=handle, stderr=subprocess.STDOUT, env=environment, check=False, timeout=timeout_s
        )
    return {"status": done.returncode, "seconds": round(time.time() - since, 1), "said": log.read_text()[-2500:]}


def state_of(unit: str) -> dict[str, Any]:
    """The committed record of a deployment."""
    path = Path(f"/var/lib/firstlight/{unit}/state.json")
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


def load(record: Record, key: str, port: int, *arguments: str, limit_s: float = 400) -> dict[str, Any]:
    """Run the load generator against a server."""
    argv = [sys.executable, str(REPO / "tests/gpu/load.py"), f"127.0.0.1:{port}", "full", *arguments]
    done = run(argv, timeout=limit_s)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        result = {"error": done.stdout[-500:] + done.stderr[-1500:]}
    record[key] = result
    return result


def right(record: Record) -> None:
    """(a) as deployed: the gate passes; (f) a worker is killed; after a stop the memory is free."""
    unit, port = "fl-right", 30001
    record["deploy"] = play("right", "site.yml", tiny(unit, port))
    record["unit"], record["state"], record["memory"] = show(unit), state_of(unit), gpu_memory()
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")
    if get(port, "/health") is not None:
        kill_worker(record, unit, port)
        record["ready_again_s"] = await_health(unit, port, 400)
    since = time.time()
    run(inside(["systemctl", "stop", unit]))
    record["stopped"] = {"seconds": round(time.time() - since, 1), "unit": show(unit), "memory": gpu_memory()}


def kill_worker(record: Record, unit: str, port: int) -> None:
    """(f) kill one worker; what becomes of the unit, and what the project makes of it."""
    invocation = show(unit)["InvocationID"]
    procs = Path(f"/sys/fs/cgroup/system.slice/{unit}.service/cgroup.procs")
    told = run(
        inside(["bash", "-c", f"for p in $(cat {procs}); do grep -q Worker_TP1 /proc/$p/cmdline && echo $p; done"])
    )
    worker = told.stdout.split()
    record["worker"] = worker
    if not worker:
        return
    run(inside(["kill", "-9", worker[0]]))
    since = time.time()
    seen: list[Any] = []
    while time.time() - since < 30:
        now = show(unit)
        brief = [now.get("ActiveState"), now.get("SubState"), now.get("NRestarts"), now.get("ExecMainStatus")]
        brief.append("answers" if get(port, "/health", 1) is not None else "does not answer")
        if not seen or seen[-1][1] != brief:
            seen.append([round(time.time() - since, 1), brief])
            record["states"] = seen
        if now.get("NRestarts") not in ("0", None) and now.get("ActiveState") == "active":
            break
        time.sleep(0.3)
    lines = messages(unit, invocation)
    (OUT / f"{unit}.killed.log").write_text("\n".join(lines))
    record["killed_verdict"] = judged(lines)


def taps(record: Record) -> None:
    """(b) taps one layer off; (c) the same unit corrected."""
    unit, port = "fl-taps", 30002
    record["wrong"] = play("taps-wrong", "site.yml", tiny(unit, port, [0, 4]))
    record["unit_after_wrong"], record["state_after_wrong"] = show(unit), state_of(unit)
    journal(unit)
    record["right"] = play("taps-right", "site.yml", tiny(unit, port))
    record["unit"], record["state"] = show(unit), state_of(unit)
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")
    record["caches"] = [str(path) for path in Path(f"/var/cache/{unit}").glob("*")]
    journal(unit)
    since = time.time()
    run(inside(["systemctl", "stop", unit]))
    record["stopped"] = [round(time.time() - since, 1), show(unit), gpu_memory()]
    journal(unit)


def refused(record: Record) -> None:
    """(d) too small a budget is refused before the start, and the server's own words are understood."""
    record["budget"] = play("budget", "site.yml", tiny("fl-small", 30003) | {"vllm_server_max_num_batched_tokens": 200})
    venv = (HOME / "venv.txt").read_text()
    drafter = MODELS / "by-hand"
    drafter.mkdir(exist_ok=True)
    data = REPO / "tests/data/tiny/drafter-qwen35"
    shutil.copy(data / "published-config.json", drafter / "config.json")
    shutil.copy(data / "drafter-step-300.safetensors", drafter / "model.safetensors")
    run(["chmod", "-R", "a+rX", str(drafter)])
    argv = [
        f"{venv}/bin/vllm", "serve", str(MODELS / "tiny"), "--port", "30003", "--tensor-parallel-size", "2",
        "--max-num-batched-tokens", "200", "--max-num-seqs", "16", "--max-model-len", "2048", "--language-model-only",
        "--attention-backend", "FLASH_ATTN", "--gdn-prefill-backend", "triton", "--speculative-config",
        json.dumps({"method": "dflash", "model": str(drafter), "num_speculative_tokens": 15}),
    ]  # fmt: skip
    done = run(inside(argv), timeout=300, env={**os.environ, "VLLM_CACHE_ROOT": "/tmp/by-hand", "HF_HUB_OFFLINE": "1"})
    text = done.stdout + done.stderr
    (OUT / "budget-by-hand.log").write_text(text)
    record["by_hand"] = {"status": done.returncode, "verdict": judged(text.splitlines())}


def held(record: Record) -> None:
    """(e) GPU memory held by another process: refused, with who holds it."""
    code = (
        "import os, time, torch; x = torch.empty(20 << 30, dtype=torch.uint8, device='cuda:0'); x.fill_(1);"
        " print(os.getpid(), flush=True); time.sleep(300)"
    )
    with subprocess.Popen(inside([sys.executable, "-c", code]), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = holder.stdout.readline().strip()
        record["holder_pid"] = pid
        record["memory"] = gpu_memory()
        record["apps"] = run(inside(["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv"])).stdout
        values = tiny("fl-held", 30004) | {"sglang_stop_tolerated_gpu_mib": 512, "sglang_stop_free_timeout_s": 5}
        record["deploy"] = play("held", "site.yml", values)
        record["unit"] = show("fl-held")
        run(inside(["kill", "-9", pid]))
    time.sleep(2)
    record["memory_after"] = gpu_memory()


def flash(record: Record) -> None:
    """(g) flash-attn 2 built for this GPU alone, timed; one source file for all architectures beside it."""
    source = next((HOME / "fa").glob("flash_attn-*"))
    venv = (HOME / "venv.txt").read_text()
    environment = {
        **os.environ, "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": "90", "MAX_JOBS": "22",
        "NVCC_THREADS": "1", "CUDA_HOME": "/usr/local/cuda",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin",
    }  # fmt: skip
    since = time.time()
    log = OUT / "flash-attn.log"
    with log.open("w") as handle:
        argv = ["nice", "-n", "15", sys.executable, "setup.py", "build_ext"]
        done = subprocess.run(argv, cwd=source, env=environment, stdout=handle, stderr=subprocess.STDOUT, check=False)
    record["build"] = {
        "status": done.returncode,
        "seconds": round(time.time() - since, 1),
        "jobs": 22,
        "said": log.read_text()[-800:],
    }
    if done.returncode == 0:
        site = next((Path(venv) / "lib").glob("python3*/site-packages"))
        library = next(source.glob("build/lib*/flash_attn_2_cuda*.so"))
        shutil.copytree(source / "flash_attn", site / "flash_attn", dirs_exist_ok=True)
        shutil.copytree(HOME / "flash_attn_4", site / "flash_attn", dirs_exist_ok=True)
        shutil.copy(library, site)
        record["size"] = library.stat().st_size
    for module in ("flash_attn.ops.triton.rotary", "flash_attn.cute", "flash_attn_2_cuda"):
        tried = run([f"{venv}/bin/python", "-c", f"import torch, importlib; importlib.import_module('{module}')"])
        record[f"import {module}"] = {"status": tried.returncode, "said": tried.stderr[-300:]}
    record["one_file"] = one_file(source, environment)


def one_file(source: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds of nvcc on one kernel file: this GPU's architecture, then all that the default build makes."""
    ninja = next(source.glob("build/temp*/build.ninja"), None)
    if ninja is None:
        return {}
    text = ninja.read_text()
    kernel = source / "csrc/flash_attn/src/flash_fwd_hdim128_bf16_sm80.cu"
    flags = " ".join(re.findall(r"^(?:cuda_cflags|cuda_post_cflags) = (.*)$", text, re.MULTILINE))
    flags = re.sub(r"-gencode\s+\S+", "", flags)
    times = {}
    for name, archs in (("90", ("90",)), ("all", ("80", "90", "100", "120"))):
        gencode = " ".join(f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs)
        since = time.time()
        done = run(["bash", "-c", f"nvcc {flags} {gencode} -c {kernel} -o /tmp/{name}.o"], env=dict(environment))
        times[name] = round(time.time() - since, 1) if done.returncode == 0 else -1.0
    return times


def measured(record: Record, unit: str, port: int, burst_s: int) -> None:
    """Bursts first, since the first ones still compile kernels; then speed; then bursts for as long as asked."""
    load(record, "first_bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "96")
    for streams in (1, 8):
        load(record, f"streams_{streams}", port, "--streams", str(streams), "--tokens", "256", "--seconds", "12")
    load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "128", "--seconds", str(burst_s))
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")


def full_size(record: Record) -> None:
    """Full size with speculation, alone: cold and warm start, memory, speed, minutes of bursts. FLAGS adds flags."""
    unit, port = "fl-full", 30011
    flags = json.loads(os.environ.get("FLAGS", "{}"))
    record["cold"] = play("full-cold", "tests/gpu/start.yml", full(unit, port, drafting=True, flags=flags))
    record["memory"] = gpu_memory()
    if get(port, "/health") is not None:
        measured(record, unit, port, int(os.environ.get("BURST_S", "120")))
    record["unit"] = show(unit)
    record["verdict"] = judged(messages(unit, record.content["unit"].get("InvocationID", "")))
    since = time.time()
    run(inside(["systemctl", "restart", unit]))
    record["warm_ready_s"] = await_health(unit, port, 400)
    run(inside(["systemctl", "stop", unit]))
    record["stopped"] = {"seconds": round(time.time() - since, 1), "memory": gpu_memory()}


def plain(record: Record) -> None:
    """Full size without speculation, alone."""
    unit, port = "fl-plain", 30012
    record["cold"] = play("plain-cold", "tests/gpu/start.yml", full(unit, port, drafting=False))
    if get(port, "/health") is not None:
        measured(record, unit, port, 20)
    record["unit"] = show(unit)
    run(inside(["systemctl", "stop", unit]))


SCENARIOS: dict[str, Callable[[Record], None]] = {
    "right": right, "taps": taps, "refused": refused, "held": held, "flash": flash, "full": full_size, "plain": plain,
}  # fmt: skip


def scenario(name: str) -> None:
    """Run one scenario to its end; its record says how it ended."""
    record = Record(name)
    record["ended"] = False
    try:
        SCENARIOS[name](record)
        record["ended"] = True
    except BaseException:
        record["error"] = traceback.format_exc()[-2500:]
        record["ended"] = True
