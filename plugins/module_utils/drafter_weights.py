"""Finds a drafter's weights: one safetensors file of any name, or shards with their index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import FirstlightError
from .safetensors_header import (
    DEFAULT_LIMIT,
    Header,
    Tensor,
    open_nonblocking,
    quoted,
    read_header,
    require_regular,
    short_integer,
)

INDEX_NAME = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<total>\d{5})\.safetensors$")
_MAX_SHARDS = 1000


@dataclass(frozen=True)
class Weights:
    """All tensors of a drafter.

    Attributes:
        tensors: by name.
        files: the safetensors files, absolute paths, in order.
        index: the index file's absolute path, None for a single file.
        bytes_read: how much of all files was read.
        weight_bytes: the size of the tensors' data.
    """

    tensors: dict[str, Tensor]
    files: tuple[str, ...]
    index: str | None
    bytes_read: int
    weight_bytes: int


def _refuse(kind: str, what: str, where: str, fix: str) -> NoReturn:
    raise FirstlightError(what, where=where, fix=fix, kind=kind)


def read_weights(path: str, limit: int = DEFAULT_LIMIT) -> Weights:
    """Read the headers of the drafter at ``path``.

    Args:
        path: a safetensors file, an index file, or the folder of either.
        limit: the most to read in all, in bytes.

    Raises:
        FirstlightError: the weights cannot be read, or files of them are missing.
    """
    if not path:
        _refuse("missing", "no path is given.", "path", "give the path of the drafter's safetensors file or folder")
    where = os.path.abspath(path)  # noqa: PTH100 - Path.absolute keeps ".."
    if Path(where).is_dir():
        return _read_folder(where, limit)
    if where.endswith(_INDEX_SUFFIX):
        return _read_sharded(where, limit)
    if _is_part(Path(where).name) and Path(where).is_file():
        return _read_folder(str(Path(where).parent), limit)
    header = read_header(where, limit)
    return _joined({where: header}, None, header.bytes_read)


def _read_folder(folder: str, limit: int) -> Weights:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except PermissionError:
        _refuse("permission-denied", "may not be listed by the user this runs as.", folder, f"chmod a+rx {folder}")
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indexes) > 1:
        _refuse("several-weights", f"holds several indexes: {_listed(indexes)}.", folder, "name one of them")
    if indexes:
        return _read_sharded(str(Path(folder, indexes[0])), limit)
    files = _distinct(folder, [name for name in names if name.endswith(".safetensors")])
    if not files:
        others = [name for name in names if not name.startswith(".")]
        what = f"holds no *.safetensors file ({_listed(others) if others else 'it is empty'})."
        _refuse("no-weights", what, folder, "name the folder or the file with the drafter's weights")
    if len(files) > 1 or _is_part(files[0]):
        return _read_parts(folder, files, limit)
    return read_weights(str(Path(folder, files[0])), limit)


def _is_part(name: str) -> bool:
    """Whether the name says that there are further shards."""
    match = _SHARD.match(name)
    return match is not None and int(match["total"]) > 1


def _distinct(folder: str, names: list[str]) -> list[str]:
    """Drop further names (hard or symbolic links) of the same file; the plain ``model.safetensors`` stays."""
    kept: dict[object, str] = {}
    for name in sorted(names, key=lambda name: (name != "model.safetensors", name)):
        try:
            status = Path(folder, name).stat()
        except OSError:
            kept[name] = name  # read_header will say what is wrong with it
            continue
        kept.setdefault((status.st_dev, status.st_ino), name)
    return sorted(kept.values())


def _read_parts(folder: str, names: list[str], limit: int) -> Weights:
    """Shards without an index, complete by their names."""
    matches = [_SHARD.match(name) for name in names]
    stems = {(match["stem"], match["total"]) for match in matches if match}
    if not all(matches) or len(stems) != 1:
        what = f"holds several weights without an index: {_listed(names)}."
        _refuse("several-weights", what, folder, "name the drafter's file itself")
    stem, total = stems.pop()
    expected = [f"{stem}-{part:05d}-of-{total}.safetensors" for part in range(1, min(int(total), _MAX_SHARDS) + 1)]
    missing = [name for name in expected if name not in names]
    if missing:
        _refuse("missing-shard", f"lacks {_listed(missing)}.", folder, "copy the missing files too")
    return _read_files(folder, names, None, 0, limit)


def _read_sharded(index: str, limit: int) -> Weights:
    folder = os.path.dirname(index)  # noqa: PTH120
    document, size = read_json(index, limit, "bad-index")
    names = document.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        _refuse("bad-index", "has no weight_map from tensor names to files.", index, "copy the index again")
    files = sorted(set(names.values()))
    for name in files:
        # a shard lies beside its index; anything else would read, and later link, files from elsewhere
        if "/" in name or "\0" in name or name in {"", ".", ".."} or len(files) > _MAX_SHARDS:
            _refuse(
                "bad-index",
                f"names the file '{quoted(name)}', which is not beside it.",
                index,
                "mend the index",
            )
    missing = [name for name in files if not Path(folder, name).exists()]
    if missing:
        _refuse(
            "missing-shard",
            f"names {_listed(missing)}, not there.",
            index,
            f"copy the missing files to {folder}",
        )
    weights = _read_files(folder, files, index, size, limit)
    _compare_index(names, weights, folder, index)
    return weights


def _compare_index(names: Mapping[str, str], weights: Weights, folder: str, index: str) -> None:
    """The index must name exactly the tensors that are in the shards."""
    absent = [name for name in names if name not in weights.tensors]
    unnamed = [name for name in weights.tensors if name not in names]
    if absent:
        what = f"names tensors that no shard in {folder} holds: {_listed(absent)}."
        _refuse("index-mismatch", what, index, "copy index and shards again, from one revision")
    if unnamed:
        what = f"does not name these tensors of the shards: {_listed(unnamed)}."
        _refuse("index-mismatch", what, index, "copy index and shards again, from one revision")


def _read_files(folder: str, names: list[str], index: str | None, read: int, limit: int) -> Weights:
    headers: dict[str, Header] = {}
    for name in names:
        path = str(Path(folder, name))
        headers[path] = read_header(path, max(limit - read, 0))
        read += headers[path].bytes_read
    return _joined(headers, index, read)


def _joined(headers: dict[str, Header], index: str | None, read: int) -> Weights:
    tensors: dict[str, Tensor] = {}
    for path, header in headers.items():
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            _refuse(
                "duplicate-key",
                f"holds '{quoted(twice)}', as another shard does.",
                path,
                "copy the shards again",
            )
        tensors.update(header.tensors)
    size = sum(tensor.end - tensor.begin for tensor in tensors.values())
    return Weights(tensors, tuple(headers), index, read, size)


def _listed(names: list[str], most: int = 8) -> str:
    text = ", ".join(quoted(name) for name in names[:most])
    return text + (f" and {len(names) - most} more" if len(names) > most else "")


def read_json(path: str, limit: int, kind: str) -> tuple[dict[str, Any], int]:
    """Read a JSON object from an untrusted file.

    Returns:
        the object, and the bytes read.

    Raises:
        FirstlightError: not a readable JSON object of at most ``limit`` bytes; ``kind`` as given, or one of
            those for files (``missing``, ``not-a-file``, ``permission-denied``).
    """
    try:
        require_regular(path, Path(path).stat().st_mode)
        with os.fdopen(open_nonblocking(path), "rb") as stream:
            raw = stream.read(limit + 1)
    except FileNotFoundError:
        _refuse("missing", "does not exist.", path, "check the path")
    except PermissionError:
        _refuse("permission-denied", "may not be read by the user this runs as.", path, f"chmod a+r {path}")
    except (OSError, ValueError) as error:
        _refuse("unreadable", f"cannot be read: {error}.", quoted(path), "check the path")
    if len(raw) > limit:
        _refuse(kind, f"is larger than {limit} bytes.", path, "give the right file")
    if raw.startswith(b"version https://git-lfs"):
        _refuse("lfs-pointer", "is a Git LFS pointer, not the file.", path, "run `git lfs pull` where it is from")
    try:
        document = json.loads(raw.decode("utf-8"), parse_int=short_integer)
    except RecursionError:
        _refuse(kind, "is nested too deep.", path, "give the right file")
    except ValueError as error:
        _refuse(kind, f"is not JSON: {quoted(str(error), 120)}.", path, "copy the file again")
    if not isinstance(document, dict):
        _refuse(kind, "is not a JSON object.", path, "give the right file")
    return document, len(raw)
