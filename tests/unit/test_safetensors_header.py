"""The header parser, on good files and on everything that people and disks make of them."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import safetensors_header as subject
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from hypothesis import given, settings
from hypothesis import strategies as st
from support_drafters import DATA, header_bytes, plain_layout, published_row, write_raw, write_weights

SIZES = published_row("Qwen3-4B-DFlash-b16")
ONE = {"a": ("BF16", (2, 3))}


def kind_of(path: Path | str, **options: int) -> str:
    with pytest.raises(FirstlightError) as caught:
        subject.read_header(str(path), **options)
    assert caught.value.fix
    assert caught.value.where
    return caught.value.kind


def one(**change: object) -> bytes:
    return json.dumps({"a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]} | change}).encode()


def test_a_real_file_is_read_with_nothing_of_its_data() -> None:
    header = subject.read_header(str(DATA / "tiny" / "drafter-qwen3" / "drafter-step-300.safetensors"))
    assert len(header.tensors) == 25
    assert header.tensors["fc.weight"].shape == (128, 256)
    assert header.metadata == {"format": "pt"}
    assert header.bytes_read == 2448
    assert header.file_bytes == 856464


def test_a_file_of_any_name_and_behind_a_link_is_read(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "weird name\n.bin", plain_layout(SIZES))
    link = tmp_path / "link"
    link.symlink_to(file)
    assert len(subject.read_header(str(link)).tensors) == 58


def test_a_scalar_and_an_empty_tensor_are_legal(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "x", {"s": ("F32", ()), "e": ("BF16", (0, 7))})
    header = subject.read_header(str(file))
    assert header.tensors["s"].shape == ()
    assert header.tensors["e"].shape == (0, 7)


def test_a_padded_header_is_legal(tmp_path: Path) -> None:
    start, data = header_bytes(ONE)
    assert start.endswith(b" ")
    assert subject.read_header(str(write_raw(tmp_path / "x", start[8:] + b"   ", data)))


BAD_HEADERS = {
    "not-json": [b"{'a': 1}", b"[]", b"", b" {}", b'{"a": ', b"nul"],
    "not-utf8": [b'{"\xff": 1}'],
    "nested-too-deep": [b'{"a":' + b"[" * 200000],
    "no-tensors": [b"{}", b'{"__metadata__": {"format": "pt"}}'],
    "bad-header": [b'{"a": 1}', b'{"a": []}', b'{"__metadata__": {"x": 1}}', b'{"__metadata__": []}'],
    "duplicate-key": [
        b'{"a": {"dtype":"BF16","shape":[1],"data_offsets":[0,2]}, "a": 1}',
        b'{"a": {"dtype":"BF16","dtype":"F16","shape":[1],"data_offsets":[0,2]}}',
    ],
    "unknown-dtype": [one(dtype="BF17"), one(dtype=None), one(dtype=["BF16"])],
    "bad-shape": [
        one(shape=[-2, -3]), one(shape=None), one(shape=[2, "3"]), one(shape=[True, 6]), one(shape=[1] * 17),
        one(shape=[2**63, 1]), one(shape={"0": 1}),
    ],
    "bad-offsets": [
        one(data_offsets=[12, 0]), one(data_offsets=[0]), one(data_offsets=[-12, 0]), one(data_offsets=None),
        one(data_offsets=[0, 6, 12]), one(data_offsets=[False, 12]),
    ],
    "bad-number": [
        one(shape=[2.0, 3]), one(shape=[float("nan")]), one(shape=[float("inf")]), one(shape=[10**30]),
        b'{"a": 1' + b"0" * 500000 + b"}", b'{"a": 1e999}', b'{"a": -Infinity}',
    ],
    "size-mismatch": [one(shape=[2, 4]), one(data_offsets=[0, 13]), one(shape=[])],
    "bad-name": [b'{"\\ud800": {"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'],
    "offset-gap": [one(data_offsets=[4, 16])],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), [(kind, body) for kind, bodies in BAD_HEADERS.items() for body in bodies])
def test_each_kind_of_bad_header_has_its_own_name(tmp_path: Path, kind: str, body: bytes) -> None:
    started = time.monotonic()
    assert kind_of(write_raw(tmp_path / "x", body, 100)) == kind
    assert time.monotonic() - started < 1


def test_overlapping_tensors_are_refused_by_name(tmp_path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    body = json.dumps({"a": entry, "b": entry | {"data_offsets": [2, 6]}}).encode()
    path = write_raw(tmp_path / "x", body, 6)
    assert kind_of(path) == "overlapping-offsets"


def test_a_truncated_file_is_refused_with_the_number_of_missing_bytes(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "x", plain_layout(SIZES))
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(FirstlightError, match="1000 are missing") as caught:
        subject.read_header(str(path))
    assert caught.value.kind == "truncated"


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "x", ONE)
    os.truncate(path, path.stat().st_size + 1)
    assert kind_of(path) == "trailing-bytes"


@pytest.mark.parametrize("size", [1, 7, 8])
def test_a_file_shorter_than_its_length_field_or_header_is_refused(tmp_path: Path, size: int) -> None:
    path = write_weights(tmp_path / "x", ONE)
    os.truncate(path, size)
    assert kind_of(path) == ("truncated" if size < 8 else "header-beyond-file")


def test_a_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    assert kind_of(write_raw(tmp_path / "x", one(), 12, length=10_000)) == "header-beyond-file"
    assert kind_of(write_raw(tmp_path / "y", one(), 12, length=2**64 - 1)) == "header-beyond-file"


def test_a_header_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as stream:
        stream.write((90_000_000).to_bytes(8, "little") + b"{")
        stream.truncate(100_000_000)
    assert kind_of(path) == "header-too-large"
    assert kind_of(write_weights(tmp_path / "y", plain_layout(SIZES)), limit=100) == "header-too-large"


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3460426240\n"
OTHERS: dict[str, list[bytes]] = {
    "lfs-pointer": [POINTER, b"/annex/objects/SHA256E-s3460426240--4d7a.safetensors\n"],
    "html-page": [b"<!DOCTYPE html><html>Sign in", b"\n <html><body>404"],
    "pytorch-file": [b"PK\x03\x04archive/data.pkl" + b"\0" * 100, b"\x80\x02}q\0."],
    "gguf-file": [b"GGUF\x03\0\0\0" + b"\0" * 100],
    "compressed-file": [b"\x1f\x8b\x08" + b"\0" * 100],
    "empty-file": [b""],
}


@pytest.mark.parametrize(("kind", "content"), [(kind, content) for kind, all_ in OTHERS.items() for content in all_])
def test_what_is_no_safetensors_file_is_called_what_it_is(tmp_path: Path, kind: str, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert kind_of(path) == kind


def test_a_pointers_message_names_the_size_it_points_to(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(POINTER)
    with pytest.raises(FirstlightError, match=r"3460426240.*git lfs pull"):
        subject.read_header(str(path))


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    # bound by a relative name: the path of a test's folder may be too long for a socket
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("make", [make_fifo, make_socket, Path.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "x"
    make(path)
    started = time.monotonic()
    assert kind_of(path) == "not-a-file"
    assert time.monotonic() - started < 1


def test_a_device_is_refused() -> None:
    assert kind_of("/dev/zero") == "not-a-file"


def test_paths_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "absent") == "missing"
    dangling, loop = tmp_path / "dangling", tmp_path / "loop"
    dangling.symlink_to("nowhere")
    loop.symlink_to("loop")
    assert kind_of(dangling) == "missing"
    assert kind_of(loop) == "unreadable"
    assert kind_of("/tmp/\0") == "unreadable"
    assert kind_of("x" * 5000) == "unreadable"


def test_a_file_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_weights(tmp_path / "x", ONE)

    def refuse(name: str) -> int:
        raise PermissionError(13, "Permission denied", name)

    # root, who runs tests in containers, may read everything
    monkeypatch.setattr(subject, "open_nonblocking", refuse)
    assert kind_of(path) == "permission-denied"


def test_hostile_names_are_escaped_in_messages(tmp_path: Path) -> None:
    name = "\x1b[2J\n" + "x" * 1000
    body = json.dumps({name: {"dtype": "NOPE", "shape": [1], "data_offsets": [0, 2]}}).encode()
    with pytest.raises(FirstlightError) as caught:
        subject.read_header(str(write_raw(tmp_path / "x", body, 2)))
    assert "\x1b" not in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


# --- properties ------------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(NAMES, children, max_size=4),
    max_leaves=20,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*subject.DTYPE_BITS, "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 99), max_size=3) | JSON,
    },
)


def parses_or_refuses(body: bytes) -> None:
    try:
        tensors, metadata = subject.parse_header(body, "x")
    except FirstlightError as error:
        assert error.kind  # noqa: PT017 - either outcome is right
        return
    assert tensors
    assert all(isinstance(text, str) for text in metadata.values())
    spans = sorted((tensor.begin, tensor.end) for tensor in tensors.values())
    assert spans[0][0] == 0
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    parses_or_refuses(body)
    parses_or_refuses(b"{" + body)


@given(st.dictionaries(NAMES, ENTRIES | JSON, max_size=5))
def test_any_json_parses_or_is_refused(document: dict[str, object]) -> None:
    parses_or_refuses(json.dumps(document).encode())


@given(st.binary(max_size=600))
@settings(max_examples=200)
def test_any_file_is_read_or_refused(content: bytes) -> None:
    descriptor = os.memfd_create("header")
    try:
        os.write(descriptor, content)
        subject.read_header(f"/proc/self/fd/{descriptor}")
    except FirstlightError as error:
        assert error.kind  # noqa: PT017
    finally:
        os.close(descriptor)


@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["BF16", "F32", "I64", "BOOL"]), st.lists(st.integers(0, 5), max_size=4).map(tuple)),
        min_size=1,
        max_size=8,
    )
)
def test_every_well_formed_header_comes_back_as_written(layout: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    start, _ = header_bytes(layout)
    tensors, _ = subject.parse_header(start[8:], "x")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == layout


@given(st.data())
def test_one_changed_byte_never_escapes(data: st.DataObject) -> None:
    start, _ = header_bytes({"a": ("BF16", (2, 3)), "b": ("F32", (1,))})
    body = bytearray(start[8:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    parses_or_refuses(bytes(body))
