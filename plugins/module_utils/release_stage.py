"""Staging: judges a release against target, drafter and GPUs, then writes its files."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cache_key import cache_key
from .errors import FirstlightError
from .gpus import query
from .graph_rules import captured_graphs, cudagraph_mode, graph_rules
from .memory_fit import GIB
from .preflight_rules import Problem, Wanted, memory_rules, model_rules
from .release import Layout, compose, diff_of
from .release_service import Account, ensure_account, foreign_unit_file, release_in_force, stage

# each of these names a cache that vLLM's parts would otherwise put into HOME or into a shared /tmp
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "NUMBA_CACHE_DIR": "numba",
    "XDG_CACHE_HOME": "xdg",
}
# ProtectHome and PrivateTmp put empty folders in the place of these
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"), Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - compared only


@dataclass(frozen=True)
class Settings:
    """What a release is made of; the module `release` documents each field."""

    config: str
    unit_text: str
    dropin: str
    environment: Mapping[str, Any]
    user: str
    group: str
    serve: Mapping[str, Any]
    target: str
    drafter: str
    venv: str
    vllm_version: str
    platform: str
    base_url: str


def read_config(folder: str, who: str, *, check: bool) -> dict[str, Any] | None:
    """A model's ``config.json``; None in check mode when an earlier, skipped step would have put it there.

    Raises:
        FirstlightError: it is missing or not a JSON mapping.
    """
    path = Path(folder, "config.json")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        if check:
            return None
        raise FirstlightError(
            f"the {who} has no config.json.",
            where=folder,
            fix="give the folder that holds the model's config.json and safetensors files.",
            kind="model-dir-invalid",
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise FirstlightError(
            f"the {who}'s config.json cannot be read ({error}).",
            where=str(path),
            fix="fetch the file again.",
            kind="model-json-broken",
        ) from error


def weights_gib(folder: str) -> float:
    """Size in GiB of a model's weight files, links followed."""
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / GIB


def service_environment(settings: Settings, cache_root: str, home: str) -> dict[str, Any]:
    """Environment of the service: the site's own wins, except for the caches."""
    path = f"{settings.venv}/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    base = {
        "HOME": home,
        # ninja lies in the venv, nvcc in the toolkit's folder; both are looked up by name
        "PATH": path,
        # the models are on disk; a start must not depend on a hub
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        # the ranks are on this host: else they talk, and listen, on the address that others reach
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    caches = {name: f"{cache_root}/{folder}" for name, folder in _CACHES.items()}
    return {**base, **settings.environment, **caches}


def identity(user: str) -> tuple[int, set[int]]:
    """User and group ids of an account; of one that is still to be made, none that owns anything."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return -1, set()
    return entry.pw_uid, set(os.getgrouplist(user, entry.pw_gid))


def _name_free(layout: Layout) -> list[Problem]:
    """The unit's name must not be another service's, whose file would be overwritten."""
    path = foreign_unit_file(layout)
    if path is None:
        return []
    if path.resolve() == Path("/dev/null"):
        return [
            Problem(
                "unit-masked", "error", path.name, "the unit is masked, so systemd will not start it.",
                f"run `systemctl unmask {path.name}`, or give the server another name with vllm_server_unit.",
            )
        ]  # fmt: skip
    return [
        Problem(
            "unit-name-taken", "error", "vllm_server_unit", f"{path} is a unit that firstlight did not write.",
            "set vllm_server_unit to a name of its own; if that unit is the server to replace, name it in"
            " sglang_stop_units.",
        )
    ]  # fmt: skip


def _visible(settings: Settings) -> list[Problem]:
    """What the unit reads must not lie in a folder that its sandbox empties."""
    shown = [Path(path) for path in re.findall(r"^BindReadOnlyPaths=(\S+)$", settings.unit_text, re.MULTILINE)]
    problems = []
    for name in (settings.target, settings.drafter, settings.venv):
        path = Path(name)
        hidden = next((parent for parent in _HIDDEN if name and path.is_relative_to(parent)), None)
        if hidden and not any(path.is_relative_to(parent) for parent in shown):
            problems.append(
                Problem(
                    "path-hidden", "error", "vllm_server_readable_paths",
                    f"{path} lies under {hidden}, which the unit does not see.",
                    f"add {path} to vllm_server_readable_paths, or put it elsewhere.",
                )
            )  # fmt: skip
    return problems


def _readable(settings: Settings) -> list[Problem]:
    """The service's user must be able to read what it serves; root's own view would hide that."""
    uid, groups = identity(settings.user)

    def closed(path: Path, bit: int) -> bool:
        stat = path.stat()
        if stat.st_uid == uid:
            return not stat.st_mode & bit << 6
        return not stat.st_mode & (bit << 3 if stat.st_gid in groups else bit)

    problems = []
    for folder in (Path(name) for name in (settings.target, settings.drafter) if name):
        blocked = [(part, "x") for part in (folder, *folder.parents) if part.exists() and closed(part, 1)]
        blocked += [(part, "r") for part in folder.glob("*") if part.is_file() and closed(part, 4)]
        problems += [
            Problem(
                "model-not-readable",
                "error",
                str(part),
                f"{settings.user} may not read what lies here, and it serves from {folder}.",
                f"run `chmod o+{right} {part}`, or put the model elsewhere.",
            )
            for part, right in blocked
        ]
    return problems


def stage_release(
    layout: Layout, settings: Settings, *, secrets: Mapping[str, str], check: bool, diff: bool
) -> dict[str, Any]:
    """Judge and write a release; returns the module's result.

    Raises:
        FirstlightError: a rule does not hold, with every one that does not; nothing is then written.
    """
    speculative = settings.serve.get("speculative-config") or {}
    wanted = Wanted(
        platform=settings.platform,
        tensor_parallel=int(settings.serve["tensor-parallel-size"]),
        gpu_memory_utilization=float(settings.serve["gpu-memory-utilization"]),
        max_model_len=int(settings.serve["max-model-len"]),
        k=int(speculative.get("num_speculative_tokens") or 0),
        min_disk_gib={},
    )
    target = read_config(settings.target, "target", check=check)
    drafter = read_config(settings.drafter, "drafter", check=check) if settings.drafter else None
    gpus = query() if settings.platform == "cuda" else []
    batched_tokens = int(settings.serve["max-num-batched-tokens"])
    memory: dict[str, float] | None = None
    problems: list[Problem] = []
    if target is not None:
        memory, memory_problems = memory_rules(
            gpus,
            wanted,
            target=target,
            drafter=drafter,
            weights_gib=weights_gib(settings.target) + (weights_gib(settings.drafter) if settings.drafter else 0),
            graphs=captured_graphs(
                max_num_seqs=int(settings.serve["max-num-seqs"]),
                k=wanted.k,
                mode=cudagraph_mode(settings.serve),
                batched_tokens=batched_tokens,
            ),
            batched_tokens=batched_tokens,
        )
        problems = [*model_rules(target, drafter, wanted), *memory_problems, *_readable(settings)]
        problems += graph_rules(gpus[: wanted.tensor_parallel], settings.serve, target, drafter)
    problems += [*_name_free(layout), *_visible(settings)]
    refuse(problems)
    key = cache_key(
        vllm_version=settings.vllm_version,
        venv=Path(settings.venv).name,
        target_config=target or {},
        drafter_config=drafter,
        serve_config=settings.serve,
        gpus=[gpu.name for gpu in gpus[: wanted.tensor_parallel]],
        driver=gpus[0].driver_version if gpus else "",
    )
    cache_root = str(layout.cache_parent / layout.unit / key)
    home = f"/var/lib/{layout.unit}"
    release = compose(
        config=settings.config,
        unit=settings.unit_text,
        environment=service_environment(settings, cache_root, home),
        meta={
            "vllm_version": settings.vllm_version,
            "venv": settings.venv,
            "target": settings.target,
            "drafter": settings.drafter,
            "model": settings.serve["served-model-name"],
            "base_url": settings.base_url,
            "cache_root": cache_root,
        },
    )
    account = ensure_account(Account(settings.user, settings.group), home, check=check)
    files = stage(layout, release, secrets=secrets, dropin=settings.dropin, check=check)
    result: dict[str, Any] = {
        "changed": account or bool(files),
        "release": release.id,
        "files": files,
        "problems": [problem.as_dict() for problem in problems],
        "warnings": [problem.text for problem in problems],
        "memory": memory,
        "cache_root": cache_root,
    }
    if diff:
        result["diff"] = diff_of(layout, release, release_in_force(layout))
    return result


def refuse(problems: list[Problem]) -> None:
    """Raise when a problem is an error, naming all that are."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise errors[0].as_error("".join(f"\n{problem.text}" for problem in errors[1:]))
