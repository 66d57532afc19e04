"""Puts a drafter's weights where vLLM will look for them, with as little copying as possible."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .drafter_weights import INDEX_NAME, Weights
from .errors import FirstlightError

How = Literal["in-place", "hardlink", "symlink", "copy"]
WEIGHTS_NAME = "model.safetensors"
# a trained embedding of the mask token, which vLLM 0.25.0 and newer takes from the weights' folder
_COMPANIONS = ("mask_embedding.pt",)
# The unit hides these from the server (ProtectHome, PrivateTmp), so a link into them would lead nowhere.
_HIDDEN = ("/root", "/home", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - compared, never written to


@dataclass(frozen=True)
class Placement:
    """One file of a drafter.

    Attributes:
        source: where it is.
        dest: where vLLM will find it.
        how: a hard link, else a symbolic one, else a copy; ``in-place`` when source and dest are one.
        done: whether it is there already.
    """

    source: str
    dest: str
    how: How
    done: bool


def plan_placement(weights: Weights, dest: str) -> list[Placement]:
    """Decide how each file gets into the folder ``dest``; changes nothing.

    Raises:
        FirstlightError: ``stray-weights`` when ``dest`` holds other safetensors, ``disk-full`` when copies would
            not fit.
    """
    placements = [_plan_file(source, dest, _name_for(source, weights, dest)) for source in weights.files]
    home = Path(weights.files[0]).parent
    placements += [_plan_file(str(home / name), dest, name) for name in _COMPANIONS if (home / name).is_file()]
    if weights.index is not None:
        index = _plan_file(weights.index, dest, INDEX_NAME)
        placements.append(index if index.how == "in-place" else replace(index, how="copy"))
    _refuse_strays(placements, dest)
    _require_space(placements, dest)
    return placements


def _name_for(source: str, weights: Weights, dest: str) -> str:
    name = Path(source).name
    if len(weights.files) > 1 or weights.index is not None:
        return name  # the index names its shards
    in_place = _same(Path(source).parent, Path(dest))
    # vLLM loads every *.safetensors of a folder: a second name for a file there would be loaded twice
    return name if in_place and name.endswith(".safetensors") else WEIGHTS_NAME


def _plan_file(source: str, folder: str, name: str) -> Placement:
    dest = str(Path(folder, name))
    if os.path.abspath(source) == os.path.abspath(dest):  # noqa: PTH100 - links must stay as they are
        return Placement(source, dest, "in-place", done=True)
    status = Path(source).stat()
    how = _how(source, status, folder)
    return Placement(source, dest, how, _is_there(source, status, Path(dest), how))


def _how(source: str, status: os.stat_result, folder: str) -> How:
    if not status.st_mode & stat.S_IROTH:
        return "copy"  # the server's own user must be able to read it, and the source's mode is not ours to change
    parent = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    if status.st_dev == parent.stat().st_dev:
        return "hardlink"
    return "symlink" if _reachable(source) else "copy"


def _reachable(source: str) -> bool:
    """Whether the server's user can follow a symbolic link to ``source``."""
    real = Path(source).resolve()
    if any(real.is_relative_to(hidden) for hidden in _HIDDEN):
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in real.parents)


def _is_there(source: str, status: os.stat_result, dest: Path, how: How) -> bool:
    try:
        if _same(Path(source), dest):
            # a link to a file that has meanwhile become unreadable must give way to a copy
            return how != "copy"
        there = dest.stat()
    except OSError:
        return False
    # a copy keeps the time of its source; comparing gigabytes would cost seconds in every run
    same = (there.st_size, there.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    return same and stat.S_ISREG(there.st_mode)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _refuse_strays(placements: list[Placement], dest: str) -> None:
    ours = {Path(item.dest).name for item in placements}
    try:
        names = sorted(os.listdir(dest))  # noqa: PTH208
    except OSError:
        return
    strays = [name for name in names if name.endswith(".safetensors") and name not in ours]
    strays += [name for name in names if name == INDEX_NAME and name not in ours]
    strays = [name for name in strays if not any(_same(Path(dest, name), Path(item.source)) for item in placements)]
    if strays:
        raise FirstlightError(
            f"holds other weights too: {', '.join(strays[:8])}.",
            where=dest,
            why="vLLM loads every safetensors file of the folder.",
            fix="remove them, or choose an empty folder for the drafter",
            kind="stray-weights",
        )


def _require_space(placements: list[Placement], dest: str) -> None:
    needed = sum(Path(item.source).stat().st_size for item in placements if item.how == "copy" and not item.done)
    if not needed:
        return
    parent = next(path for path in (Path(dest), *Path(dest).parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise FirstlightError(
            f"the copy of the weights takes {needed} bytes and {free} are free.",
            where=str(parent),
            fix="free some space, or choose a drafter_dest on the file system of the weights",
            kind="disk-full",
        )


def make_folder(path: str) -> None:
    """Create ``path`` and its parents, readable for the server's user whatever the umask."""
    missing = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)


def place(placement: Placement) -> Placement:
    """Put one file in place, replacing what was there in one step.

    Returns:
        the placement as it was done: a link that the system refused gives way to the next way.
    """
    if placement.done:
        return placement
    ways: tuple[How, ...] = ("hardlink", "symlink", "copy")
    for how in ways[ways.index(placement.how) :]:
        if how == "symlink" and not _reachable(placement.source):
            continue
        try:
            _in_one_step(placement.source, placement.dest, _MAKERS[how])
        except OSError:
            if how == "copy":
                raise
            continue
        return replace(placement, how=how, done=True)
    raise AssertionError(placement.how)  # pragma: no cover - a copy returns or raises


def _in_one_step(source: str, dest: str, make: Callable[[str, str], object]) -> None:
    folder = tempfile.mkdtemp(prefix=".placing-", dir=Path(dest).parent)
    try:
        new = str(Path(folder, "new"))
        make(source, new)
        os.replace(new, dest)  # noqa: PTH105
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hardlink(source: str, new: str) -> None:
    os.link(Path(source).resolve(), new)


def _symlink(source: str, new: str) -> None:
    Path(new).symlink_to(Path(source).resolve())


def _copy(source: str, new: str) -> None:
    shutil.copyfile(source, new)
    status = Path(source).stat()
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    Path(new).chmod(0o644)
    with Path(new).open("rb") as stream:
        os.fsync(stream.fileno())


_MAKERS: dict[How, Callable[[str, str], None]] = {"hardlink": _hardlink, "symlink": _symlink, "copy": _copy}
