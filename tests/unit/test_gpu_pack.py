"""The scripts that take a deployment to a GPU machine: what can be held to account without one."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.safetensors_header import read_header
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import fatbin  # noqa: E402
import machine  # noqa: E402
import models  # noqa: E402


def fat_binary(entries: list[tuple[int, int, bytes]]) -> bytes:
    body = b""
    for kind, architecture, payload in entries:
        body += struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(payload), 0, 0, 0, 1, architecture)
        body += bytes(64 - 32) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


payloads = st.binary(min_size=1, max_size=40)
parts = st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([80, 86, 90, 100]), payloads), max_size=6)


@given(binaries=st.lists(parts, max_size=3), gap=st.binary(max_size=30), or_ptx=st.booleans())
def test_code_of_the_wanted_gpu_and_every_offset_stay(
    binaries: list[list[tuple[int, int, bytes]]], gap: bytes, *, or_ptx: bool
) -> None:
    content = b"\x7fELF" + b"".join(gap + fat_binary(entries) for entries in binaries)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "library.so")
        path.write_bytes(content)
        taken = fatbin.keep_only(path, 90, or_ptx=or_ptx)
        after = path.read_bytes()
    assert len(after) == len(content)
    found = list(fatbin.entries(after))
    wanted = [entry for entries in binaries for entry in entries]
    assert [(entry.kind, entry.architecture, entry.size) for entry in found] == [(k, a, len(p)) for k, a, p in wanted]
    stays = [architecture == 90 or (or_ptx and kind == 1 and architecture < 90) for kind, architecture, _ in wanted]
    for entry, (_, _, payload), kept in zip(found, wanted, stays, strict=True):
        assert after[entry.start : entry.start + entry.size] == (payload if kept else bytes(len(payload)))
    assert taken == sum(len(payload) for (_, _, payload), kept in zip(wanted, stays, strict=True) if not kept)


def test_four_bytes_that_look_like_a_fat_binary_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    content = b"abc" + fatbin.MAGIC + b"no header follows here at all" + fat_binary([(2, 80, b"other")])
    path.write_bytes(content)
    assert fatbin.keep_only(path, 90) == 5
    assert path.read_bytes().startswith(b"abc" + fatbin.MAGIC + b"no header follows")


def test_a_broken_fat_binary_is_told_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    whole = bytearray(fat_binary([(2, 80, b"other")]))
    struct.pack_into("<Q", whole, 16 + 8, 1 << 40)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="reaches beyond"):
        fatbin.keep_only(path, 90)
    assert path.read_bytes() == whole


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    models.make(ROOT, folder)
    return folder


def test_the_full_size_drafter_is_the_published_one_in_shape(full_size: Path) -> None:
    header = read_header(str(full_size / "full-drafter/drafter.safetensors"))
    assert len(header.tensors) == 58
    size = (full_size / "full-drafter/drafter.safetensors").stat()
    assert size.st_size // 2 == pytest.approx(1_730_213_120, rel=1e-5)
    assert size.st_blocks * 512 < 1 << 20, "the data are holes"


def test_the_full_size_target_has_a_token_for_every_id(full_size: Path) -> None:
    tokenizer = json.loads((full_size / "full/tokenizer.json").read_text())
    ids = set(tokenizer["model"]["vocab"].values()) | {entry["id"] for entry in tokenizer["added_tokens"]}
    config = json.loads((full_size / "full/config.json").read_text())
    assert ids == set(range(config["text_config"]["vocab_size"]))


def test_the_command_starts_one_server_although_workers_import_it_again(tmp_path: Path) -> None:
    package = tmp_path / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        "import multiprocessing\n\ndef worker():\n    pass\n\ndef main():\n"
        "    process = multiprocessing.get_context('spawn').Process(target=worker)\n"
        "    process.start(); process.join()\n    print('started', process.exitcode)\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    command = tmp_path / "bin/vllm"
    command.write_text(machine.COMMAND.format(folder=tmp_path))
    done = subprocess.run(
        [sys.executable, str(command)], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("started 0\n", 0), done.stderr


def test_systemd_is_not_booted_without_being_told_that_the_machine_is_kept_for_it(tmp_path: Path) -> None:
    script = str(ROOT / "tests/gpu/boot.sh")
    done = subprocess.run(
        ["bash", script, "/bin/false", str(tmp_path / "pid")],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "DEVICE=1" in done.stderr
    assert not (tmp_path / "pid").exists()
