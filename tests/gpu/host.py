"""Proves a deployment on a GPU machine that has no network and no systemd of its own. Runs there, as root.

    host.py prepare PARTS...   join and unpack what pack.py made, make the environment, boot systemd
    host.py start NAMES...     start scenarios in the background (they outlive this command)
    host.py wait SECONDS       wait for them, then collect their records and journals into $OUT
    host.py collect            only collect

What the roles place is what the roles place: the play is the project's own `site.yml` over a local connection, in
the namespaces of the systemd that `boot.sh` booted. Only the packages are laid down by hand, since the machine's own
PyTorch serves and no index is in reach; the environment has the very name that the role `vllm_install` computes,
which then finds it whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("PROOF_HOME", "/opt/proof"))
REPO = HOME / "repo"
OUT = HOME / "out"
PID = HOME / "systemd.pid"
MODELS = HOME / "models"
FULL = str(MODELS / "full")
# what keeps a shared host's NVLink switch out of harm, and where the driver's libraries lie: handed on to the service
KEPT = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "LD_LIBRARY_PATH")
PLENTY = 10**6  # MiB; several servers share the GPUs on purpose


def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command with its output as text."""
    return subprocess.run(argv, text=True, capture_output=True, check=False, **options)


def inside(argv: list[str]) -> list[str]:
    """The command, in the namespaces of the booted systemd."""
    return ["nsenter", "-t", PID.read_text().strip(), "-m", "-p", "-u", "-i", "-C", "-r", "-w", *argv]


def say(*words: object) -> None:
    """One line of progress."""
    print(f"{time.time() - START:7.1f}", *words, flush=True)


START = time.time()


# --- preparing ---------------------------------------------------------------------------------------------------
def unpack(parts: list[Path]) -> None:
    """Join the parts in order, hold them against their digests, and unpack."""
    wanted = dict(reversed(line.split("  ")) for line in (parts[0].parent / "SHA256SUMS").read_text().splitlines())
    for part in parts:
        if hashlib.sha256(part.read_bytes()).hexdigest() != wanted.pop(part.name):
            raise SystemExit(f"{part} is not what was packed")
    if wanted:
        raise SystemExit(f"parts are missing: {sorted(wanted)}")
    argv = ["bash", "-c", 'cat "$@" | xz -dc | tar -xi', "join", *sorted(str(part) for part in parts)]
    subprocess.run(argv, check=True, cwd=HOME)


def base_python() -> str:
    """The interpreter under the machine's PyTorch, where the service's user can run it."""
    base = Path(sys.base_prefix)
    if not str(base.resolve()).startswith(("/root", "/home")):
        return str(Path(sys._base_executable).resolve()) if hasattr(sys, "_base_executable") else sys.executable
    copy = HOME / "python"
    if not copy.exists():
        shutil.copytree(base.resolve(), copy, symlinks=True)
        # where headers lie is written down in it, and Triton compiles against them
        run(["bash", "-c", f"sed -i 's#{base.resolve()}#{copy}#g' {copy}/lib/python3.*/_sysconfigdata*.py"])
    return str(copy / "bin" / f"python3.{sys.version_info[1]}")


def torch_site() -> Path:
    """The folder of the machine's own packages."""
    import torch  # noqa: PLC0415 -- only on the GPU machine

    return Path(torch.__file__).parents[1]


def open_up(folder: Path) -> None:
    """Let the service's user reach a folder."""
    for part in (folder, *folder.parents):
        mode = part.stat().st_mode
        if mode & 0o005 != 0o005:
            say("opened", part)
            part.chmod(mode | 0o055)


def make_environment() -> dict[str, Any]:
    """Lay the packages down under the name that the role computes for this host, and mark it whole."""
    sys.path.insert(0, str(REPO / ".collections"))
    from ansible_collections.firstlight.vllm.plugins.module_utils import venv_install, venv_tools  # noqa: PLC0415

    python = base_python()
    locks = REPO / "roles/vllm_install/files/locks"
    request = venv_install.Request(
        root="/opt/firstlight", version="0.20.1", platform="cuda", lock=(locks / "cuda-0.20.1.txt").read_text(),
        lock_name="cuda-0.20.1", uv_lock=(locks / "uv.txt").read_text(), python=python,
    )  # fmt: skip
    interpreter = venv_tools.read_interpreter(python)
    plan = venv_install.plan_for(request, interpreter)
    folder = Path("/opt/firstlight/venvs") / plan.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python3*/site-packages"))
    for entry in (HOME / "site").iterdir():
        shutil.move(entry, site / entry.name)
    # flash-attn-4 alone breaks every start; it is laid over flash-attn 2 once that is built
    shutil.move(site / "flash_attn", HOME / "flash_attn_4")
    # the machine's own PyTorch and what goes with it, after ours
    (site / "zz_machine.pth").write_text(f"{torch_site()}\n")
    open_up(torch_site())
    script = folder / "bin" / "vllm"
    script.write_text(
        f"#!{folder}/bin/python\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    for tool in ("ninja",):
        found = shutil.which(tool)
        if found and not (folder / "bin" / tool).exists():
            (folder / "bin" / tool).symlink_to(found)
    done = run([str(folder / "bin/python"), "-m", "compileall", "-q", "-j", "16", str(site)])
    run(["chmod", "-R", "a+rX", "/opt/firstlight"])
    marker = {
        "digest": plan.digest, "version": "0.20.1", "platform": "cuda", "python": interpreter.tag,
        "cuda_archs": list(plan.cuda_archs), "wheels": [], "packages": plan.packages, "probes": {}, "uv": "",
    }  # fmt: skip
    venv_tools.write_marker(folder, marker)
    (HOME / "python.txt").write_text(python)
    (HOME / "venv.txt").write_text(str(folder))
    return {"venv": str(folder), "python": python, "archs": plan.cuda_archs, "compileall": done.returncode}


def boot() -> dict[str, Any]:
    """Add what the machine lacks of systemd, replacing nothing, and boot it."""
    for tree in (HOME / "systemd", HOME / "extra"):
        if tree.exists():
            subprocess.run(f"tar -C {tree} -c . | tar -C / -x --skip-old-files", shell=True, check=True)
    subprocess.run(["ldconfig"], check=False)
    program = "/usr/lib/systemd/systemd"
    lacking = run(
        ["bash", "-c", f"ldd {program} /usr/bin/systemctl /usr/lib/systemd/systemd-journald | grep 'not found'"]
    )
    # the machine is kept for this, and boot.sh wants to hear that
    done = run(["bash", str(REPO / "tests/gpu/boot.sh"), program, str(PID)], env={**os.environ, "DEVICE": "1"})
    state = ""
    if done.returncode == 0:
        for _ in range(60):
            state = run(inside(["systemctl", "is-system-running"])).stdout.strip()
            if state in ("running", "degraded"):
                break
            time.sleep(0.5)
    return {"lacking": lacking.stdout, "boot": done.returncode, "stderr": done.stderr[-800:], "state": state,
            "version": run([program, "--version"]).stdout.split("\n", 1)[0]}  # fmt: skip


def sparse_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A file with a true header and data of holes (bfloat16): the shapes without the gigabytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + at)


def full_size_models() -> None:
    """Target and drafter in the shapes of Qwen3.6-27B, for `--load-format dummy`."""
    tiny = REPO / "tests/data/tiny/tiny-qwen35"
    target, drafter = Path(FULL), Path(FULL + "-drafter")
    shutil.copytree(tiny, target, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    drafter.mkdir(parents=True, exist_ok=True)
    config = json.loads((tiny / "config.json").read_text())
    d, f, layers, vocab = 5120, 17408, 64, 248320
    config["text_config"] |= {
        "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": vocab, "max_position_embeddings": 262144,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "full_attention_interval": 4,
        "layer_types": [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(layers)],
    }  # fmt: skip
    config["text_config"]["rope_parameters"] |= {"mrope_section": [11, 11, 10], "rope_theta": 10000000.0}
    config["vision_config"]["out_hidden_size"] = d
    (target / "config.json").write_text(json.dumps(config, indent=1))
    # every id that the model can emit has a token, so that answers can be turned into text
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    taken = set(words.values()) | {entry["id"] for entry in tokenizer["added_tokens"]}
    words |= {f"<{i}>": i for i in range(vocab) if i not in taken}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    body: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, d), "model.language_model.embed_tokens.weight": (vocab, d),
        "model.language_model.norm.weight": (d,),
    }  # fmt: skip
    for i in range(layers):
        at = f"model.language_model.layers.{i}."
        body |= {f"{at}mlp.gate_proj.weight": (f, d), f"{at}mlp.up_proj.weight": (f, d),
                 f"{at}mlp.down_proj.weight": (d, f)}  # fmt: skip
        if i % 4 == 3:
            body |= {f"{at}self_attn.q_proj.weight": (24 * 256 * 2, d), f"{at}self_attn.k_proj.weight": (1024, d),
                     f"{at}self_attn.v_proj.weight": (1024, d), f"{at}self_attn.o_proj.weight": (d, 6144)}  # fmt: skip
        else:
            body |= {f"{at}linear_attn.in_proj_qkv.weight": (10240, d), f"{at}linear_attn.in_proj_z.weight": (6144, d),
                     f"{at}linear_attn.out_proj.weight": (d, 6144)}  # fmt: skip
    sparse_safetensors(target / "model.safetensors", body)
    taps = {"fc.weight": (d, 5 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(5):
        at = f"layers.{i}."
        taps |= {
            f"{at}input_layernorm.weight": (d,), f"{at}post_attention_layernorm.weight": (d,),
            f"{at}self_attn.q_proj.weight": (4096, d), f"{at}self_attn.k_proj.weight": (1024, d),
            f"{at}self_attn.v_proj.weight": (1024, d), f"{at}self_attn.o_proj.weight": (d, 4096),
            f"{at}self_attn.q_norm.weight": (128,), f"{at}self_attn.k_norm.weight": (128,),
            f"{at}mlp.gate_proj.weight": (f, d), f"{at}mlp.up_proj.weight": (f, d), f"{at}mlp.down_proj.weight": (d, f),
        }  # fmt: skip
    sparse_safetensors(drafter / "drafter.safetensors", taps)


def tiny_models() -> None:
    """The tiny target and its drafter, as a user would have them: the drafter without a configuration."""
    data = REPO / "tests/data/tiny"
    shutil.copytree(data / "tiny-qwen35", MODELS / "tiny", dirs_exist_ok=True)
    (MODELS / "tiny-drafter").mkdir(parents=True, exist_ok=True)
    shutil.copy(data / "drafter-qwen35/drafter-step-300.safetensors", MODELS / "tiny-drafter")


def prepare(parts: list[str]) -> None:
    """All that comes before the first scenario; each step's outcome is printed, none is fatal to the next."""
    HOME.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    refresh_repo()
    facts: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("unpack", lambda: unpack([Path(part) for part in parts])),
        ("environment", make_environment),
        ("boot", boot),
        ("models", lambda: (tiny_models(), full_size_models(), run(["chmod", "-R", "a+rX", str(MODELS)]))[0]),
        ("machine", machine),
        ("import", lambda: run([(HOME / "venv.txt").read_text() + "/bin/python", "-c",
                                "import vllm, torch; print(vllm.__version__, torch.__version__)"]).stdout[-300:]),
    ]  # fmt: skip
    for name, step in steps:
        since = time.time()
        try:
            facts[name] = step()
        except BaseException:
            facts[name] = {"error": traceback.format_exc()[-1500:]}
        facts[f"{name}_s"] = round(time.time() - since, 1)
        say(name, json.dumps(facts[name], default=str)[:1500])
    (OUT / "prepare.json").write_text(json.dumps(facts, indent=1, default=str))


def machine() -> dict[str, Any]:
    """What the results hang on."""
    return {
        "gpus": run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]).stdout,
        "topology": run(["nvidia-smi", "topo", "-m"]).stdout[:600],
        "kernel": os.uname().release,
        "os": next((line for line in Path("/etc/os-release").read_text().splitlines() if "PRETTY" in line), ""),
        "glibc": os.confstr("CS_GNU_LIBC_VERSION"),
        "cores": os.cpu_count(),
        "devices": re.findall(r"\d+ nvidia\S*", Path("/proc/devices").read_text()),
        "nodes": sorted(str(path) for path in Path("/dev").glob("nvidia*")),
        "environment": {name: os.environ[name] for name in KEPT if name in os.environ},
        "nvcc": run(
            ["bash", "-c", "PATH=$PATH:/usr/local/cuda/bin nvcc --version | tail -2; which gcc g++ ninja"]
        ).stdout,
    }


def refresh_repo() -> None:
    """The plays run from a copy, since the checkout is replaced by each call."""
    here = Path(__file__).resolve().parents[2]
    if here != REPO:
        REPO.mkdir(parents=True, exist_ok=True)
        run(
            [
                "bash",
                "-c",
                f"tar -C {here} --exclude=./.gpu --exclude=./.git --exclude=./.venv --exclude=./.tools --exclude=./.cache -c . | tar -C {REPO} -x",
            ]
        )


# --- deploying ---------------------------------------------------------------------------------------------------
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
    flags = {"disable-custom-all-reduce": True, "kv-cache-memory-bytes": 2 << 30}
    return variables(
        unit, port, model_path=str(MODELS / "tiny"), drafter_name=unit,
        drafter_path=str(MODELS / "tiny-drafter/drafter-step-300.safetensors"), drafter_set=told,
        vllm_server_served_model_name="tiny", vllm_server_max_model_len=2048,
        vllm_server_max_num_batched_tokens=8192, vllm_server_extra_args=flags, smoke_prompts=["is_prime"],
        smoke_max_tokens=256, sglang_stop_tolerated_gpu_mib=PLENTY, **more,
    )  # fmt: skip


def full(
    unit: str, port: int, *, drafting: bool, utilization: float, flags: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Variables of a full-size deployment with weights made up by vLLM."""
    return variables(
        unit, port, model_path=FULL, drafter_enabled=drafting, drafter_name=unit,
        drafter_path=FULL + "-drafter/drafter.safetensors", drafter_set={"family": "Qwen3.6-27B-DFlash"},
        vllm_server_served_model_name="full", vllm_server_gpu_memory_utilization=utilization,
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
    given.write_text(json.dumps(values, indent=1))
    environment = {
        **os.environ, "PYTHONPATH": str(HOME / "ctl"), "ANSIBLE_HOME": str(HOME / "ansible" / name), "LC_ALL": "C.UTF-8",
        "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0",
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
    return json.loads(path.read_text()) if path.exists() else {}


def show(unit: str) -> dict[str, str]:
    """The unit's state."""
    wanted = "ActiveState,SubState,Result,NRestarts,MainPID,ExecMainStatus,ExecMainCode,InvocationID,User,UnitFileState"
    said = run(inside(["systemctl", "show", unit, "-p", wanted])).stdout
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def journal(unit: str) -> Path:
    """The unit's journal so far, in a file."""
    path = OUT / f"{unit}.journal"
    with path.open("w") as handle:
        subprocess.run(inside(["journalctl", "-u", unit, "-o", "short-unix", "--no-pager"]), stdout=handle, check=False)
    return path


def judged(lines: list[str]) -> dict[str, Any]:
    """The project's own verdict on a log."""
    sys.path.insert(0, str(REPO / ".collections"))
    from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose  # noqa: PLC0415

    return diagnose(lines).as_dict()


def messages(unit: str, invocation: str) -> list[str]:
    """What one start wrote."""
    argv = ["journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager"]
    return run(inside(argv)).stdout.splitlines()


def get(port: int, path: str, timeout_s: float = 5) -> str | None:
    """What the server answers; None when it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return answer.read().decode()
    except OSError:
        return None


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


def gpu_memory() -> list[str]:
    """MiB in use, GPU by GPU."""
    return run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).stdout.split()


# --- scenarios ---------------------------------------------------------------------------------------------------
class Record:
    """A scenario's record, written after each entry, so that a scenario cut off is told as far as it came."""

    def __init__(self, name: str) -> None:
        self.path, self.content = OUT / f"{name}.json", {"name": name, "since": time.time()}

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
    """(a) as deployed; a warm start; (f) a worker killed; memory free after a stop."""
    unit, port = "fl-right", 30001
    record["deploy"] = play("right", "site.yml", tiny(unit, port))
    record["unit"], record["state"] = show(unit), state_of(unit)
    record["memory_serving"] = gpu_memory()
    shutil.copytree(
        f"/etc/firstlight/{unit}", OUT / f"{unit}.etc", dirs_exist_ok=True, ignore=shutil.ignore_patterns("secrets.env")
    )
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")
    journal(unit)
    invocation = show(unit)["InvocationID"]
    worker = run(inside(["bash", "-c", "pgrep -f 'VLLM::Worker_TP1' -u vllm"])).stdout.split()
    cgroup = run(
        inside(["bash", "-c", f"cat /sys/fs/cgroup/*/system.slice/{unit}.service/cgroup.procs | sort -u"])
    ).stdout
    mine = [pid for pid in worker if pid in cgroup.split()]
    record["workers"] = {"found": worker, "mine": mine}
    if mine:
        run(inside(["kill", "-9", mine[0]]))
        since = time.time()
        seen: list[Any] = []
        while time.time() - since < 60:
            now = show(unit)
            brief = [now.get("ActiveState"), now.get("SubState"), now.get("NRestarts"), now.get("ExecMainStatus")]
            if not seen or seen[-1][1] != brief:
                seen.append([round(time.time() - since, 1), brief])
            if now.get("NRestarts") not in ("0", None) and now.get("ActiveState") == "active":
                break
            time.sleep(0.3)
        record["killed_worker"] = {"states": seen, "verdict": judged(messages(unit, invocation))}
        record["restart_ready_s"] = await_health(unit, port, 400)
    record["unit_after"] = show(unit)
    journal(unit)


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
    run(inside(["systemctl", "stop", unit]))
    record["stopped"] = show(unit)


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
    code = "import torch, time; x = torch.empty(20 << 30, dtype=torch.uint8, device='cuda:0'); x.fill_(1); import os; print(os.getpid(), flush=True); time.sleep(300)"
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
    environment = {**os.environ, "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": "90", "MAX_JOBS": "22",
                   "NVCC_THREADS": "1", "CUDA_HOME": "/usr/local/cuda", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin"}  # fmt: skip
    since = time.time()
    log = OUT / "flash-attn.log"
    with log.open("w") as handle:
        done = subprocess.run([sys.executable, "setup.py", "build_ext"], cwd=source, env=environment, stdout=handle,
                              stderr=subprocess.STDOUT, preexec_fn=lambda: os.nice(15), check=False)  # fmt: skip
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


def full_warm(record: Record) -> None:
    """Full size with speculation, started while others run: a cold start and a first load."""
    unit, port = "fl-full", 30011
    record["start"] = play("full-cold", "tests/gpu/start.yml", full(unit, port, drafting=True, utilization=0.4))
    record["unit"] = show(unit)
    journal(unit)
    if get(port, "/health"):
        load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "96")
        record["unit_after"] = show(unit)
        journal(unit)


def plain_warm(record: Record) -> None:
    """Full size without speculation: a cold start."""
    unit, port = "fl-plain", 30012
    record["start"] = play("plain-cold", "tests/gpu/start.yml", full(unit, port, drafting=False, utilization=0.4))
    record["unit"] = show(unit)
    journal(unit)


def measure(record: Record, unit: str, port: int) -> None:
    """Speed at one and at eight streams."""
    for streams in (1, 8):
        load(record, f"streams_{streams}", port, "--streams", str(streams), "--tokens", "256", "--seconds", "20")
        load(record, f"streams_{streams}_again", port, "--streams", str(streams), "--tokens", "256", "--seconds", "15")
    record["memory"] = gpu_memory()
    (OUT / f"{unit}.metrics").write_text(get(port, "/metrics") or "")


def stop_all(record: Record) -> None:
    """Stop every server and see that the GPUs' memory is free."""
    record["before"] = gpu_memory()
    units = ["fl-right", "fl-taps", "fl-full", "fl-plain", "fl-small", "fl-held"]
    since = time.time()
    run(inside(["systemctl", "stop", *units]))
    record["stop_s"] = round(time.time() - since, 1)
    for _ in range(60):
        if all(int(used) < 1500 for used in gpu_memory()):
            break
        time.sleep(0.5)
    record["free_s"], record["after"] = round(time.time() - since, 1), gpu_memory()


def full_alone(record: Record) -> None:
    """Full size with speculation, alone on the GPUs: memory against the prediction, speed, minutes of bursts."""
    stop_all(record)
    unit, port = "fl-full", 30011
    record["start"] = play("full-alone", "tests/gpu/start.yml", full(unit, port, drafting=True, utilization=0.9))
    record["unit"] = show(unit)
    journal(unit)
    if get(port, "/health"):
        measure(record, unit, port)
        load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "128", "--seconds", "150")
        record["unit_after"] = show(unit)
    lines = messages(unit, record.content["unit"].get("InvocationID", ""))
    record["verdict"] = judged(lines)
    journal(unit)


def plain_alone(record: Record) -> None:
    """Full size without speculation, alone."""
    stop_all(record)
    unit, port = "fl-plain", 30012
    record["start"] = play("plain-alone", "tests/gpu/start.yml", full(unit, port, drafting=False, utilization=0.9))
    record["unit"] = show(unit)
    journal(unit)
    if get(port, "/health"):
        measure(record, unit, port)
        load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "128", "--seconds", "20")
    journal(unit)


def variant(record: Record) -> None:
    """Full size with speculation and the flags in FLAGS (JSON): does it live under load, and what does it cost."""
    stop_all(record)
    unit, port = "fl-full", 30011
    flags = json.loads(os.environ.get("FLAGS", "{}"))
    record["flags"] = flags
    record["start"] = play(
        "variant", "tests/gpu/start.yml", full(unit, port, drafting=True, utilization=0.9, flags=flags)
    )
    record["unit"] = show(unit)
    if get(port, "/health"):
        load(record, "bursts", port, "--bursts", "1,16,8,16,4,8", "--tokens", "128", "--seconds", "90")
        record["unit_after"] = show(unit)
        load(record, "streams_1", port, "--streams", "1", "--tokens", "256", "--seconds", "15")
        load(record, "streams_8", port, "--streams", "8", "--tokens", "256", "--seconds", "15")
    record["verdict"] = judged(messages(unit, record.content["unit"].get("InvocationID", "")))
    journal(unit)


def alone(record: Record) -> None:
    """Both, one after the other."""
    full_alone(Record("full_alone"))
    plain_alone(Record("plain_alone"))
    record["done"] = True


SCENARIOS: dict[str, Callable[[Record], None]] = {
    "right": right, "taps": taps, "refused": refused, "held": held, "flash": flash, "full_warm": full_warm,
    "plain_warm": plain_warm, "full_alone": full_alone, "plain_alone": plain_alone, "alone": alone,
    "variant": variant, "stop_all": stop_all,
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


def start(names: list[str]) -> None:
    """Start scenarios as processes of their own session."""
    refresh_repo()
    (HOME / "running").mkdir(exist_ok=True)
    for name in names:
        (OUT / f"{name}.json").unlink(missing_ok=True)
        log = (OUT / f"{name}.scenario.log").open("w")
        child = subprocess.Popen([sys.executable, str(REPO / "tests/gpu/host.py"), "scenario", name], stdout=log,
                                 stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        (HOME / "running" / name).write_text(str(child.pid))


def records() -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of what was started."""
    for path in sorted((HOME / "running").iterdir()):
        with contextlib.suppress(OSError, ValueError):
            yield path.name, json.loads((OUT / f"{path.name}.json").read_text())


def wait(limit_s: float, names: list[str]) -> None:
    """Wait until the scenarios named (or all) have ended, telling what is new."""
    told: dict[str, int] = {}
    while time.time() - START < limit_s:
        now = dict(records())
        for name, content in now.items():
            if len(content) != told.get(name):
                told[name] = len(content)
                last = list(content)[-1] if list(content)[-1] != "last_s" else list(content)[-2]
                say(name, ":", last, json.dumps(content[last], default=str)[:260])
        if all(now.get(name, {}).get("ended") for name in (names or list(now))):
            break
        time.sleep(1)
    collect()


def collect() -> None:
    """Journals, records and plays into $OUT, in few files."""
    for unit in ("fl-right", "fl-taps", "fl-full", "fl-plain", "fl-small", "fl-held"):
        with contextlib.suppress(OSError):
            journal(unit)
    out = os.environ.get("OUT")
    if out:
        subprocess.run(
            ["tar", "-C", OUT, "-cJf", f"{out}/proof.tar.xz", "."], check=False, env={**os.environ, "XZ_OPT": "-1 -T8"}
        )
        for name, content in records():
            (Path(out) / "summary.txt").open("a").write(f"{name} {json.dumps(content, default=str)[:3000]}\n\n")
        print(Path(out, "proof.tar.xz").stat().st_size, "bytes")


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "prepare":
        prepare(rest)
    elif verb == "start":
        start(rest)
    elif verb == "scenario":
        scenario(rest[0])
    elif verb == "wait":
        wait(float(rest[0]), rest[1:])
    else:
        collect()
