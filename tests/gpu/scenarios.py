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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash
from deployments import (
    GPUS,
    TENSOR_PARALLEL,
    Record,
    after_full,
    await_health,
    await_record,
    full,
    judged,
    load,
    play,
    state_of,
    tiny,
)
from machine import HOME, MODELS, OUT, REPO, get, gpu_memory, inside, journal, messages, processes, run, show


def taps(record: Record) -> None:
    """The gate, the way back, many clients, a killed worker, and the pair of flash-attn, with one small server.

    (b) taps one layer off fail; (c) corrected over the bad start they pass, as deployed (a); the wrong ones once more
    fail, and the server before them is back; (f) a worker is killed; (g) the server starts with the pair installed.
    """
    unit, port = "fl-taps", 30002
    after_full("stopped")
    for name, layers in (("wrong", [0, 4]), ("right", None), ("wrong_again", [0, 4])):
        record[name] = play(f"taps-{name}", "site.yml", tiny(unit, port, layers))
        record[f"{name}_left"] = left(unit, port)
        journal(unit)
    load(record, "answers", port, "--answers", "16", "--seconds", "20", model="tiny")
    record["caches"] = sorted(str(path) for path in Path(f"/var/cache/{unit}").glob("*"))
    kill_worker(record, unit, port)
    record["ready_again_s"] = await_health(unit, port, 400)
    record["asked_again"] = smoke(unit, port, "killed")
    stop(record, unit)
    record["pair"] = flash.install() if await_record("flash", "build", float(os.environ.get("FLASH_S", "600"))) else {}
    if record.content["pair"]:
        started = time.time()
        run(inside(["systemctl", "start", unit]))
        record["pair_ready_s"] = await_health(unit, port, 400)
        record["pair_mapped"] = flash.mapped(unit)
        record["pair_asked"] = smoke(unit, port, "pair")
        record["pair_s"] = round(time.time() - started, 1)
    record["unit"] = show(unit)
    stop(record, unit, "stopped_with_pair")


def left(unit: str, port: int) -> dict[str, Any]:
    """What a play left behind: the unit, its record, whether it answers, and its counters in a file."""
    answers = get(port, "/health") is not None
    if answers:
        (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")
    return {"unit": show(unit), "state": state_of(unit), "answers": answers, "memory": gpu_memory()}


def smoke(unit: str, port: int, name: str) -> dict[str, Any]:
    """The role `smoke` on a running server."""
    values = tiny(unit, port) | {"proof_drafter": state_of(unit).get("meta", {}).get("drafter", "")}
    return play(f"smoke-{name}", "tests/gpu/smoke.yml", values)


def stop(record: Record, unit: str, key: str = "stopped") -> None:
    """Stop a unit; the seconds until systemd says so, and the memory in use then (MiB, GPU by GPU)."""
    since, before = time.time(), gpu_memory()
    run(inside(["systemctl", "stop", unit]))
    record[key] = {
        "seconds": round(time.time() - since, 1), "memory_before": before, "memory": gpu_memory(), "unit": show(unit),
    }  # fmt: skip
    journal(unit)


def kill_worker(record: Record, unit: str, port: int) -> None:
    """(f) kill the last worker; what becomes of the unit, and what the project makes of it."""
    invocation = show(unit)["InvocationID"]
    workers = [process for process, title in processes(unit).items() if title.startswith("VLLM::Worker")]
    record["workers"] = workers
    if not workers:
        return
    run(inside(["kill", "-9", workers[-1]]))
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


def refused(record: Record) -> None:
    """(d) too small a budget, or more GPUs than there are, is refused before the start."""
    record["budget"] = play("budget", "site.yml", tiny("fl-small", 30003) | {"vllm_server_max_num_batched_tokens": 200})
    record["gpus"] = play("gpus", "site.yml", tiny("fl-small", 30003) | {"vllm_server_tensor_parallel_size": GPUS * 2})
    venv = (HOME / "venv.txt").read_text()
    drafter = MODELS / "by-hand"
    drafter.mkdir(exist_ok=True)
    data = REPO / "tests/data/tiny/drafter-qwen35"
    shutil.copy(data / "published-config.json", drafter / "config.json")
    shutil.copy(data / "drafter-step-300.safetensors", drafter / "model.safetensors")
    run(["chmod", "-R", "a+rX", str(drafter)])
    argv = [
        f"{venv}/bin/vllm", "serve", str(MODELS / "tiny"), "--port", "30003",
        "--tensor-parallel-size", str(TENSOR_PARALLEL), "--max-num-batched-tokens", "200", "--max-num-seqs", "16",
        "--max-model-len", "2048", "--language-model-only", "--attention-backend", "FLASH_ATTN",
        "--gdn-prefill-backend", "triton", "--speculative-config",
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


def measured(record: Record, unit: str, port: int, burst_s: int) -> None:
    """Bursts first, since the first ones still compile kernels; then speed; then bursts for as long as asked."""
    load(record, "first_bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "96")
    for streams in (1, 8):
        load(record, f"streams_{streams}", port, "--streams", str(streams), "--tokens", "256", "--seconds", "12")
    load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "128", "--seconds", str(burst_s))
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")


def full_size(record: Record) -> None:
    """Full size with speculation, alone: cold and warm start, memory, speed, minutes of bursts; then other graphs.

    FLAGS (JSON) adds flags; VARIANTS says which settings are tried afterwards, see `VARIANTS`.
    """
    unit, port = "fl-full", 30011
    flags = json.loads(os.environ.get("FLAGS", "{}"))
    record["cold"] = play("full-cold", "tests/gpu/start.yml", full(unit, port, drafting=True, flags=flags))
    record["memory"] = gpu_memory()
    if get(port, "/health") is not None:
        measured(record, unit, port, int(os.environ.get("BURST_S", "120")))
    record["unit"] = show(unit)
    record["verdict"] = judged(messages(unit, record.content["unit"].get("InvocationID", "")))
    stop(record, unit)
    since = time.time()
    run(inside(["systemctl", "start", unit]))
    record["warm_ready_s"] = await_health(unit, port, 400)
    load(record, "warm_bursts", port, "--bursts", "1,16", "--tokens", "32")
    record["warm_s"] = round(time.time() - since, 1)
    stop(record, unit, "stopped_warm")
    for name in os.environ.get("VARIANTS", "graphs,fa2,eager").split(","):
        record[f"variant_{name}"] = variant(unit, port, name)
    record["done"] = True


# what each changes in the file of `vllm serve --config`; the first is vLLM's own choice
VARIANTS: dict[str, Callable[[str], str]] = {
    "graphs": lambda text: text.replace("PIECEWISE", "FULL_AND_PIECEWISE"),
    "async": lambda text: VARIANTS["graphs"](text) + "no-async-scheduling: true\n",
    "eager": lambda text: text + "enforce-eager: true\n",
    # the graphs of vLLM's choice, with attention that takes no schedule
    "fa2": lambda text: VARIANTS["graphs"](text) + "attention-config:\n    flash_attn_version: 2\n",
}


def variant(unit: str, port: int, name: str) -> dict[str, Any]:
    """The release in force with one setting changed by hand: one stream, then bursts, for as long as it lives."""
    text = Path(f"/etc/systemd/system/{unit}.service").read_text()
    path = Path(re.findall(r"--config (\S+/serve\.yaml)", text)[0])
    before = path.read_text()
    path.write_text(VARIANTS[name](before))
    seen = Record(f"full-{name}")
    try:
        run(inside(["systemctl", "reset-failed", unit]))
        run(inside(["systemctl", "start", unit]))
        invocation = show(unit)["InvocationID"]
        seen["ready_s"] = await_health(unit, port, 400)
        load(seen, "streams_1", port, "--streams", "1", "--tokens", "256", "--seconds", "8")
        load(seen, "bursts", port, "--bursts", "1,16,8,16,4,12,6,8", "--tokens", "64", "--seconds", "20", limit_s=240)
        if not seen.content["bursts"].get("died", True):
            load(seen, "streams_8", port, "--streams", "8", "--tokens", "256", "--seconds", "8")
        seen["verdict"] = judged(messages(unit, invocation))
        stop(seen, unit)
        (OUT / f"full-{name}.log").write_text("\n".join(messages(unit, invocation)))
    finally:
        path.write_text(before)
    seen["ended"] = True
    return seen.content


def plain(record: Record) -> None:
    """Full size without speculation. A fixed cache, so that servers beside it do not disturb its start."""
    unit, port = "fl-plain", 30012
    after_full("done")
    flags = {"kv-cache-memory-bytes": 40 << 30}
    record["cold"] = play("plain-cold", "tests/gpu/start.yml", full(unit, port, drafting=False, flags=flags))
    if get(port, "/health") is not None:
        measured(record, unit, port, 10)
    record["unit"] = show(unit)
    stop(record, unit)


SCENARIOS: dict[str, Callable[[Record], None]] = {
    "taps": taps, "refused": refused, "held": held, "flash": flash.build, "full": full_size, "plain": plain,
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
