"""Reads the header of a safetensors file, and nothing of its data.

The format (https://huggingface.co/docs/safetensors): eight bytes, a little-endian length N; N bytes of JSON
that maps each tensor's name to its dtype, shape and byte range; then the data. Everything firstlight wants to
know of a drafter stands in those N bytes, so a file of 3 MB and one of 3 GB cost the same.

The input is untrusted. Whatever it holds, the only exception is :class:`~.errors.FirstlightError`, whose
``kind`` is one of those in docs/drafters.md; no more than the limit is read, and a FIFO or device is refused
unread.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from .errors import FirstlightError

# The format allows 100 MB. A drafter's header is about 7 kB and that of a 27B model 150 kB, so a megabyte is
# already far more than any drafter has, and keeps the reading and the parsing of hostile files short.
DEFAULT_LIMIT = 1_000_000
MAX_RANK = 16
_MAX_DIGITS = 19  # a file offset has 63 bits
_PREFIX = 8

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

# What people really have under the name of a safetensors file, by its first bytes.
_OTHER_FORMATS = (
    (b"PK\x03\x04", "pytorch-file", "is a zip archive, as torch.save writes them, not safetensors"),
    (b"\x80\x02", "pytorch-file", "is a Python pickle, as old torch.save wrote them, not safetensors"),
    (b"GGUF", "gguf-file", "is a GGUF file, which vLLM cannot use as a DFlash drafter"),
    (b"\x1f\x8b", "compressed-file", "is gzip-compressed"),
    (b"\x28\xb5\x2f\xfd", "compressed-file", "is zstd-compressed"),
)


@dataclass(frozen=True)
class Tensor:
    """One entry of a header.

    Attributes:
        name: as stored.
        dtype: the format's name, for instance ``BF16``.
        shape: sizes by dimension; empty for a scalar.
        begin: first byte, counted from the end of the header.
        end: the byte after the last one.

    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of one file.

    Attributes:
        tensors: by name, in the order of the file's JSON.
        metadata: the free texts under ``__metadata__``.
        bytes_read: how much of the file was read, in bytes.
        file_bytes: the file's size.

    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    bytes_read: int
    file_bytes: int


class _RefusedError(ValueError):
    """Raised inside the JSON decoder's hooks; never leaves this module."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


_COPY_AGAIN = "copy or download the file again and compare its sha256 with the publisher's"


def _refuse(kind: str, what: str, where: str, fix: str = _COPY_AGAIN) -> NoReturn:
    raise FirstlightError(what, where=where, fix=fix, kind=kind)


def quoted(text: str, limit: int = 80) -> str:
    """Make a name from an untrusted file safe to print: escaped and shortened."""
    shown = ascii(text if len(text) <= limit else text[:limit] + "...")
    return shown[1:-1] if "'" not in text else shown


def read_header(path: str, limit: int = DEFAULT_LIMIT) -> Header:
    """Read and check the header of the safetensors file at ``path``.

    Args:
        path: a regular file, or a link to one. Its name does not matter.
        limit: the longest header accepted, in bytes.

    Raises:
        FirstlightError: the file cannot be used; ``kind`` says how.

    """
    descriptor, size = _open_regular(path)
    try:
        start = _read_exactly(descriptor, min(size, 512))
        length = _header_length(start, size, limit, path)
        body = start[_PREFIX : _PREFIX + length]
        body += _read_exactly(descriptor, length - len(body))
    except OSError as error:
        _refuse("unreadable", f"cannot be read: {error.strerror or error}.", path, "check the disk and the file")
    finally:
        os.close(descriptor)
    if len(body) < length:
        _refuse("truncated", "became shorter while it was read.", path, "wait until its copy has finished")
    tensors, metadata = parse_header(body, path)
    _check_size(tensors.values(), size - _PREFIX - length, path)
    return Header(tensors, metadata, max(len(start), _PREFIX + length), size)


def open_nonblocking(path: str) -> int:
    """Open for reading without ever waiting for a writer (a FIFO) or a device."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def require_regular(path: str, mode: int) -> None:
    """Refuse everything but a regular file, naming what it is.

    Raises:
        FirstlightError: kind ``not-a-file``.

    """
    if stat.S_ISREG(mode):
        return
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    name = next((name for test, name in kinds if test(mode)), "a device")
    _refuse("not-a-file", f"is {name}, not a file.", path, "name the safetensors file itself")


def _open_regular(path: str) -> tuple[int, int]:
    try:
        # asked before opening, because opening a device can already have an effect ...
        require_regular(path, Path(path).stat().st_mode)
        descriptor = open_nonblocking(path)
    except FileNotFoundError:
        link = Path(path)
        what = f"is a link to {link.readlink()}, which does not exist." if link.is_symlink() else "does not exist."
        _refuse("missing", what, path, "give the path of the drafter's safetensors file or of its folder")
    except PermissionError:
        fix = f"make it readable, for instance chmod a+r {path}"
        _refuse("permission-denied", "may not be read by the user this runs as.", path, fix)
    except (OSError, ValueError) as error:
        _refuse("unreadable", f"cannot be opened: {error}.", quoted(path), "check the path")
    try:
        # ... and after it, because the path may have changed in between
        status = os.fstat(descriptor)
        require_regular(path, status.st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def _read_exactly(descriptor: int, count: int) -> bytes:
    """As many bytes as asked for, or fewer at the end of the file."""
    parts = []
    while count > 0:
        part = os.read(descriptor, count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _header_length(start: bytes, size: int, limit: int, path: str) -> int:
    if size == 0:
        _refuse("empty-file", "is empty.", path)
    _refuse_other_formats(start, path)
    if len(start) < _PREFIX:
        _refuse("truncated", f"has only {size} bytes; a safetensors file has at least 10.", path)
    length = int.from_bytes(start[:_PREFIX], "little")
    if length > size - _PREFIX:
        _refuse(
            "header-beyond-file",
            f"announces a header of {length} bytes, but holds only {size - _PREFIX} after the length: "
            "it is cut off inside its header, or is no safetensors file.",
            path,
        )
    if length > limit:
        _refuse(
            "header-too-large",
            f"has a header of {length} bytes; a drafter's has a few thousand, and {limit} is the limit.",
            path,
            "give the drafter's weights; this looks like those of a large model",
        )
    return length


def _refuse_other_formats(start: bytes, path: str) -> None:
    text = start.lstrip()[:200]
    if text.startswith(b"version https://git-lfs"):
        fields = dict(line.split(b" ", 1) for line in start.splitlines() if b" " in line)
        size = fields.get(b"size", b"?").decode("ascii", "replace")
        _refuse(
            "lfs-pointer",
            f"is a Git LFS pointer, not the weights ({quoted(size)} bytes) it points to.",
            path,
            "run `git lfs pull` in the clone it came from, or download the file itself",
        )
    if text.startswith((b"/annex/", b"../.git/annex", b".git/annex")):
        _refuse(
            "lfs-pointer",
            "is a git-annex pointer, not the weights.",
            path,
            "run `git annex get` where it is from",
        )
    if text[:15].lower().startswith((b"<!doctype html", b"<html", b"<?xml")):
        _refuse("html-page", "is a web page: the download saved an error or a log-in page.", path)
    for magic, kind, what in _OTHER_FORMATS:
        if start.startswith(magic):
            _refuse(kind, f"{what}.", path, "give the drafter as safetensors")


def parse_header(body: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse the JSON part of a safetensors file and check all that it says about itself.

    Args:
        body: the JSON's bytes.
        where: what to name in an error, usually the path.

    Returns:
        tensors by name, and the metadata.

    Raises:
        FirstlightError: not valid; nothing else is ever raised.

    """
    document = _decode(body, where)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _refuse("bad-header", "its __metadata__ is not a map of texts.", where)
    tensors = {name: _tensor(name, entry, where) for name, entry in document.items()}
    if not tensors:
        _refuse("no-tensors", "holds no tensor.", where)
    _check_offsets(tensors.values(), where)
    return tensors, metadata


def _decode(body: bytes, where: str) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("not-utf8", f"its header is not UTF-8 (at byte {error.start}).", where)
    if not text.startswith("{"):
        _refuse("not-json", "its header is not JSON: it does not begin with '{'.", where)
    try:
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=short_integer,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
        )
    except _RefusedError as refused:
        _refuse(refused.kind, refused.what, where)
    except RecursionError:
        _refuse("nested-too-deep", "its header is nested too deep to be one.", where)
    except ValueError as error:
        _refuse("not-json", f"its header is not JSON: {quoted(str(error), 200)}.", where)
    if not isinstance(document, dict):  # unreachable after the test for '{', kept for the type
        _refuse("not-json", "its header is not a JSON object.", where)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        name = ""
        for name, _ in pairs:
            if name in seen:
                break
            seen.add(name)
        raise _RefusedError("duplicate-key", f"its header names '{quoted(name)}' twice.")
    return result


def short_integer(digits: str) -> int:
    """Parse a JSON integer of at most 19 digits; more would cost quadratic time and fits no file."""
    if len(digits) > _MAX_DIGITS:
        raise _RefusedError("bad-number", f"its header holds a number of {len(digits)} digits.")
    return int(digits)


def _no_fraction(text: str) -> NoReturn:
    raise _RefusedError("bad-number", f"its header holds the number {quoted(text, 30)}; sizes and offsets are whole.")


def _tensor(name: str, entry: object, where: str) -> Tensor:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        _refuse("bad-name", f"its header has a tensor name that is no text: '{quoted(name)}'.", where)
    if not isinstance(entry, dict):
        _refuse("bad-header", f"its entry '{quoted(name)}' is not an object.", where)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        shown = quoted(dtype) if isinstance(dtype, str) else type(dtype).__name__
        _refuse(
            "unknown-dtype",
            f"tensor '{quoted(name)}' has the unknown dtype {shown}.",
            where,
            "use a file in a dtype of the safetensors format, such as BF16",
        )
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        _refuse("bad-shape", f"tensor '{quoted(name)}' has no legal shape: {quoted(repr(shape))}.", where)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:  # noqa: PLR2004
        _refuse("bad-offsets", f"tensor '{quoted(name)}' has no legal byte range: {quoted(repr(offsets))}.", where)
    needed = _bytes_of(dtype, shape)
    if offsets[1] - offsets[0] != needed:
        _refuse(
            "size-mismatch",
            f"tensor '{quoted(name)}' of shape {list(shape)} in {dtype} takes {needed} bytes, "
            f"but its byte range has {offsets[1] - offsets[0]}.",
            where,
        )
    return Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _bytes_of(dtype: str, shape: Iterable[int]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return -(-elements * DTYPE_BITS[dtype] // 8)


def _check_offsets(tensors: Iterable[Tensor], where: str) -> None:
    """Demand that the data lie back to back from byte 0 on, as the format's own reader does."""
    position, previous = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < position:
            names = f"'{quoted(previous)}' and '{quoted(tensor.name)}'"
            what = f"tensors {names} overlap at byte {tensor.begin} of the data."
            _refuse("overlapping-offsets", what, where)
        if tensor.begin > position:
            gap = f"bytes {position} to {tensor.begin} of the data, before '{quoted(tensor.name)}',"
            what = f"{gap} belong to no tensor."
            _refuse("offset-gap", what, where)
        position, previous = tensor.end, tensor.name


def _check_size(tensors: Iterable[Tensor], data_bytes: int, path: str) -> None:
    needed = max(tensor.end for tensor in tensors)
    if data_bytes < needed:
        _refuse(
            "truncated",
            f"is cut off: its tensors take {needed} bytes, of which {needed - data_bytes} are missing.",
            path,
        )
    if data_bytes > needed:
        _refuse("trailing-bytes", f"has {data_bytes - needed} bytes after its last tensor.", path)
