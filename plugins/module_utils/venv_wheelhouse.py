"""A folder from which hosts install vLLM with no index: every wheel of the lock, and flash-attn built once.

Wheels of the lock are known by their published hashes. The one that is built here is not, so the folder carries
a manifest, ``SHA256SUMS``, that the install reads (see :func:`.venv_install.built_wheels`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import FirstlightError
from .venv_install import MANIFEST, Request, build_environment, check_compiler, ensure, plan_for
from .venv_plan import Step, VenvPlan, normalise, parse_lock
from .venv_tools import (
    Installer,
    exclusive,
    read_interpreter,
    read_marker,
    require_venv_module,
    uv_folder,
    write_marker,
)

_BUSY_S = 2700.0


@dataclass(frozen=True)
class Wheelhouse:
    """What became of it. ``seconds`` has one entry a step, in s; it is empty when nothing was to do."""

    path: str
    changed: bool
    digest: str
    wheels: int
    bytes: int
    built: tuple[str, ...]
    cuda_archs: tuple[str, ...]
    seconds: Mapping[str, float]


def build(request: Request, folder: str, check: bool = False) -> Wheelhouse:
    """Fill the folder unless it holds all that the request needs.

    Args:
        request: the environment that hosts shall have; its ``uv`` is not used, since uv's own wheel belongs in too.
        folder: where, absolute.
        check: only tell what would be done.

    Raises:
        FirstlightError: before anything changed when the request cannot be met; later with the installer's message.
    """
    target = Path(folder)
    if not target.is_absolute() or target.parent == target:
        raise FirstlightError(
            f"`{folder}` is not an absolute folder.",
            where="vllm_install_wheelhouse",
            fix="Set it to a folder like /srv/wheelhouse.",
            kind="root-invalid",
        )
    python = read_interpreter(request.python)
    plan = plan_for(request, python)
    if is_whole(target, plan):
        return _outcome(target, plan, False, {})
    require_venv_module(python)
    check_compiler(request, plan)
    if check:
        return _outcome(target, plan, True, {})
    clock, seconds = time.monotonic(), {}
    # Building flash-attn takes an environment with torch and the tools; fetching needs its interpreter's tags.
    venv = ensure(replace(request, flash_attn="none", uv=""))
    seconds["environment"] = round(time.monotonic() - clock, 3)
    with exclusive(target / ".lock", _BUSY_S) as descriptor:
        installer = Installer(Path(request.root), request.sources, descriptor)
        tool = uv_folder(Path(request.root), request.uv_lock, python)
        pip = [str(tool / "bin" / "python"), "-m", "pip", "--python", str(Path(venv.path, "bin", "python"))]
        for step in (Step("uv", tuple(parse_lock(request.uv_lock, "the lock of uv"))), *plan.steps):
            clock = time.monotonic()
            extra = build_environment(request, plan, Path(venv.path)) if step.build else None
            _fetch(installer, pip, step, target, extra)
            seconds[step.title] = round(time.monotonic() - clock, 3)
        write_manifest(target)
        write_marker(target, {"digest": plan.digest})
    return _outcome(target, plan, True, seconds)


def is_whole(folder: Path, plan: VenvPlan) -> bool:
    """Whether the folder was finished for this plan and holds every file of its manifest."""
    marker = read_marker(folder)
    if marker is None or marker.get("digest") != plan.digest:
        return False
    names = manifest(folder)
    return bool(names) and all((folder / name).is_file() for name in names)


def manifest(folder: Path) -> dict[str, str]:
    """File name to SHA-256, as the manifest says."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    rows = (line.partition("  ") for line in path.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, _, name in rows if name}


def write_manifest(folder: Path) -> None:
    """Digest every wheel of the folder, in the format of ``sha256sum``."""
    rows = []
    for path in sorted(folder.glob("*.whl")):
        with path.open("rb") as handle:
            digest = hashlib.sha256()
            while chunk := handle.read(1 << 24):
                digest.update(chunk)
        rows.append(f"{digest.hexdigest()}  {path.name}\n")
    part = folder / f"{MANIFEST}.part"
    part.write_text("".join(rows), encoding="utf-8")
    part.replace(folder / MANIFEST)


def _fetch(installer: Installer, pip: list[str], step: Step, folder: Path, extra: Mapping[str, str] | None) -> None:
    """Fetch a step's wheels, or build its one package from source; either way only what the lock's hashes allow."""
    requirements = folder / f".{normalise(step.title)[:40].replace(' ', '-')}.txt"
    installer.write_file(requirements, step.requirements.encode())
    how = (
        ["wheel", "--no-build-isolation", "--no-binary", ":all:", "--wheel-dir"]
        if step.build
        else ["download", "--only-binary", ":all:", "--dest"]
    )
    argv = [*pip, *how, str(folder), "--quiet", "--no-deps", "--require-hashes", "--requirement", str(requirements)]
    installer.run(argv, step.title, extra)
    requirements.unlink()


def _outcome(folder: Path, plan: VenvPlan, changed: bool, seconds: Mapping[str, float]) -> Wheelhouse:
    names = manifest(folder)
    present = [folder / name for name in names if (folder / name).is_file()]
    return Wheelhouse(
        path=str(folder),
        changed=changed,
        digest=plan.digest,
        wheels=len(present),
        bytes=sum(path.stat().st_size for path in present),
        built=tuple(name for name in names if plan.builds_flash_attn and name.startswith("flash_attn-")),
        cuda_archs=plan.cuda_archs,
        seconds=seconds,
    )
