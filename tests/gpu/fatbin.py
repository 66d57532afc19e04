"""Takes the code for other GPUs out of CUDA libraries, so that they travel in a sixth of their size.

A CUDA library holds "fat binaries": a header, then one entry for each architecture (machine code, or PTX). The driver
picks an entry by its header, so an entry of another architecture may be filled with zeros in place: no offset moves,
and what is zero costs nothing when it is packed. A kernel that has no code for the GPU left fails when it is
launched, as it would if it had never been built for that GPU.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, header size, payload size, compressed, options, minor, major, sm


class Entry(NamedTuple):
    """One entry: what it is for, and where its payload lies in the file (bytes)."""

    kind: int  # `PTX`, or 2 for machine code
    architecture: int  # like 90
    start: int
    size: int


def entries(content: mmap.mmap | bytes) -> Iterator[Entry]:
    """Every entry of every fat binary in a file."""
    at = content.find(MAGIC)
    while at >= 0:
        _, version, header, size = _HEADER.unpack_from(content, at)
        end = at + header + size
        if version != 1 or header != _HEADER.size or end > len(content):
            at = content.find(MAGIC, at + 4)  # the four bytes stand there by chance
            continue
        entry = at + header
        while entry + _ENTRY.size <= end:
            kind, _, own, payload, _, _, _, _, architecture = _ENTRY.unpack_from(content, entry)
            if own < _ENTRY.size or entry + own + payload > end:
                raise ValueError(f"the entry at {entry:#x} reaches beyond its fat binary")
            yield Entry(kind, architecture, entry + own, payload)
            entry += own + payload
        at = content.find(MAGIC, end)


PTX = 1


def keep_only(path: Path, architecture: int, *, or_ptx: bool = False) -> int:
    """Zero all code for other architectures in a library; returns how many bytes were taken out.

    With ``or_ptx`` the PTX of older architectures stays, for a library that has no machine code for this one.
    """
    taken = 0
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as content:
        found = list(entries(content))
        for entry in found:
            older = or_ptx and entry.kind == PTX and entry.architecture < architecture
            if entry.architecture != architecture and not older:
                content[entry.start : entry.start + entry.size] = bytes(entry.size)
                taken += entry.size
    return taken
