"""The GPU machine of the proof: its folders, commands inside the booted systemd, and what is laid down on it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models

HOME = Path(os.environ.get("PROOF_HOME", "/opt/proof"))
REPO = HOME / "repo"
OUT = HOME / "out"
PID = HOME / "systemd.pid"
MODELS = HOME / "models"
START = time.time()
# what keeps a shared host's NVLink switch out of harm, and where the driver's libraries lie: handed on to the service
KEPT = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "LD_LIBRARY_PATH")
# workers are spawned, and each imports this file again: without the guard every worker would start a server
COMMAND = """\
#!{folder}/bin/python
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command with its output as text; status 127 where there is no such program."""
    try:
        return subprocess.run(argv, text=True, capture_output=True, check=False, **options)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def inside(argv: list[str]) -> list[str]:
    """The command, in the namespaces of the booted systemd."""
    return ["nsenter", "-t", PID.read_text().strip(), "-m", "-p", "-u", "-i", "-C", "-r", "-w", *argv]


def say(*words: object) -> None:
    """One line of progress."""
    print(f"{time.time() - START:7.1f}", *words, flush=True)


def unpack(parts: list[Path]) -> None:
    """Join the parts in order, hold them against their digests, and unpack."""
    lines = (parts[0].parent / "SHA256SUMS").read_text().splitlines()
    wanted = {name: digest for digest, name in (line.split("  ") for line in lines)}
    for part in parts:
        if hashlib.sha256(part.read_bytes()).hexdigest() != wanted.pop(part.name):
            raise SystemExit(f"{part} is not what was packed")
    if wanted:
        raise SystemExit(f"parts are missing: {sorted(wanted)}")
    argv = ["bash", "-c", 'cat "$@" | xz -dc | tar -xi', "join", *sorted(str(part) for part in parts)]
    subprocess.run(argv, check=True, cwd=HOME)
    HOME.chmod(0o755)  # the service's user looks for models below it


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
    script.write_text(COMMAND.format(folder=folder))
    script.chmod(0o755)
    if (ninja := shutil.which("ninja")) and not (folder / "bin/ninja").exists():
        (folder / "bin/ninja").symlink_to(ninja)
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
    """The plays run from a copy; once made, only these scripts are renewed, so that all runs deploy the same."""
    here = Path(__file__).resolve().parents[2]
    if here == REPO:
        return
    if (REPO / "site.yml").exists():
        shutil.copytree(here / "tests/gpu", REPO / "tests/gpu", dirs_exist_ok=True)
        return
    REPO.mkdir(parents=True, exist_ok=True)
    left = [f"--exclude=./{name}" for name in (".gpu", ".git", ".venv", ".tools", ".cache")]
    subprocess.run(["bash", "-c", 'tar -C "$0" "${@:2}" -c . | tar -C "$1" -x', here, REPO, *left], check=True)


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
        ("models", lambda: models.make(REPO, MODELS)),
        ("machine", machine),
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


def show(unit: str) -> dict[str, str]:
    """The unit's state."""
    wanted = "ActiveState,SubState,Result,NRestarts,MainPID,ExecMainStatus,ExecMainCode,InvocationID,User,UnitFileState"
    said = run(inside(["systemctl", "show", unit, "-p", wanted])).stdout
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def processes(unit: str) -> dict[str, str]:
    """A unit's processes: id to command line, in order of id."""
    script = (
        f'for f in $(grep -l "/{unit}.service" /proc/[0-9]*/cgroup); do p=${{f%/cgroup}};'
        ' echo "${p#/proc/} $(tr "\\0" " " <$p/cmdline)"; done'
    )
    lines = run(inside(["bash", "-c", script])).stdout.splitlines()
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def journal(unit: str) -> Path:
    """The unit's journal so far, in a file."""
    path = OUT / f"{unit}.journal"
    with path.open("w") as handle:
        subprocess.run(inside(["journalctl", "-u", unit, "-o", "short-unix", "--no-pager"]), stdout=handle, check=False)
    return path


def messages(unit: str, invocation: str) -> list[str]:
    """What one start wrote."""
    argv = ["journalctl", f"_SYSTEMD_INVOCATION_ID={invocation}", "-o", "cat", "--no-pager"]
    return run(inside(argv)).stdout.splitlines()


def get(port: int, path: str, timeout_s: float = 5) -> str | None:
    """What the server answers; None when it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return None


def gpu_memory() -> list[str]:
    """MiB in use, GPU by GPU."""
    return run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).stdout.split()
