"""(g) flash-attn 2 built on the machine for its own GPU alone, and put beside flash-attn 4."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments import Record
from machine import HOME, OUT, inside, processes, run

# as many as the memory holds beside two servers: a compilation takes about 4 GiB
JOBS = max(2, (os.cpu_count() or 2) - 2)
ARCHITECTURES = ("80", "90", "100", "120")  # what flash-attn 2.8.3 builds unless it is told otherwise


def source() -> Path:
    """The unpacked source."""
    return next((HOME / "fa").glob("flash_attn-*"))


def environment() -> dict[str, str]:
    """Of the build."""
    return {
        **os.environ, "FLASH_ATTENTION_FORCE_BUILD": "TRUE", "FLASH_ATTN_CUDA_ARCHS": "90", "MAX_JOBS": str(JOBS),
        "NVCC_THREADS": "1", "CUDA_HOME": "/usr/local/cuda",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/cuda/bin",
    }  # fmt: skip


def build(record: Record) -> None:
    """Build at the lowest priority, timed; one source file for one and for all architectures, under the same load."""
    since = time.time()
    log = OUT / "flash-attn.log"
    argv = ["nice", "-n", "19", sys.executable, "setup.py", "build_ext"]
    with (
        log.open("w") as handle,
        subprocess.Popen(argv, cwd=source(), env=environment(), stdout=handle, stderr=subprocess.STDOUT) as building,
    ):
        record["one_file"] = one_file(building)
        status = building.wait()
    objects = len(list(source().glob("build/temp*/**/*.o")))
    seconds = round(time.time() - since, 1)
    said = log.read_text()[-800:]
    record["build"] = {"status": status, "seconds": seconds, "jobs": JOBS, "objects": objects, "said": said}


def one_file(building: subprocess.Popen[bytes]) -> dict[str, float]:
    """Seconds of nvcc on one kernel file, for this GPU alone and for all architectures, side by side."""
    while building.poll() is None and not list(source().glob("build/temp*/build.ninja")):
        time.sleep(0.2)
    ninja = next(source().glob("build/temp*/build.ninja"), None)
    if ninja is None:
        return {}
    time.sleep(1)  # the file is written in one go, but not atomically
    text = ninja.read_text()
    kernel = source() / "csrc/flash_attn/src/flash_fwd_hdim64_bf16_sm80.cu"
    flags = " ".join(re.findall(r"^(?:cuda_cflags|cuda_post_cflags) = (.*)$", text, re.MULTILINE))
    flags = re.sub(r"-gencode\s+\S+", "", flags)
    running: dict[str, subprocess.Popen[bytes]] = {}
    since = time.time()
    for name, architectures in (("90", ("90",)), ("all", ARCHITECTURES)):
        gencode = " ".join(f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in architectures)
        line = f"exec nice -n 19 nvcc {flags} {gencode} -c {kernel} -o /tmp/{name}.o"
        running[name] = subprocess.Popen(["bash", "-c", line], env=environment(), stderr=subprocess.DEVNULL)
    times: dict[str, float] = {}
    while running:
        for name, child in list(running.items()):
            if child.poll() is not None:
                times[name] = round(time.time() - since, 1) if child.returncode == 0 else -1.0
                del running[name]
        time.sleep(0.2)
    return times


def install() -> dict[str, Any]:
    """Put the pair into the environment in the order that works, and import both as the role's probe does."""
    library = next(source().glob("build/lib*/flash_attn_2_cuda*.so"), None)
    if library is None:
        return {}
    venv = Path((HOME / "venv.txt").read_text())
    site = next((venv / "lib").glob("python3*/site-packages"))
    shutil.copytree(source() / "flash_attn", site / "flash_attn", dirs_exist_ok=True)
    shutil.copytree(HOME / "flash_attn_4", site / "flash_attn", dirs_exist_ok=True)
    shutil.copy(library, site)
    run(["chmod", "-R", "a+rX", str(site / "flash_attn"), str(site / library.name)])
    result: dict[str, Any] = {"bytes": library.stat().st_size}
    for module in ("flash_attn_2_cuda", "flash_attn.ops.triton.rotary", "flash_attn.cute"):
        code = f"import torch, importlib; importlib.import_module('{module}')"
        tried = run(inside([f"{venv}/bin/python", "-I", "-c", code]))
        result[module] = {"status": tried.returncode, "said": tried.stderr[-300:]}
    return result


def mapped(unit: str) -> Mapping[str, list[str]]:
    """Which processes of a unit have the library of flash-attn 2 loaded: title to files."""
    files = {}
    for process, title in processes(unit).items():
        maps = run(inside(["cat", f"/proc/{process}/maps"])).stdout
        files[f"{process} {title[:40]}"] = sorted(set(re.findall(r"\S*flash_attn_2_cuda\S*", maps)))
    return files
