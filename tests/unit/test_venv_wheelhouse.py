"""Collecting the wheels of a lock. A scripted pip stands in; it notes how it was called."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import venv_install, venv_wheelhouse
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_install import MANIFEST, Request, built_wheels
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_tools import read_interpreter, uv_folder
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_wheelhouse import build, manifest

HASH = "a" * 64
LOCK = "".join(
    f"{pin} \\\n    --hash=sha256:{HASH}\n"
    for pin in ("torch==2.11.0", "vllm==0.20.1", "flash-attn==2.8.3", "flash-attn-4==4.0.0b12")
)
UV_LOCK = f"uv==0.13.9 \\\n    --hash=sha256:{HASH}\n"

FAKE_PIP = """\
#!{python} -IS
import json, pathlib, sys
argv = sys.argv[1:]
text = pathlib.Path(argv[-1]).read_text()
with pathlib.Path(r"{log}").open("a") as log:
    log.write(json.dumps({{"argv": argv, "requirements": text}}) + "\\n")
if pathlib.Path(r"{log}.fault").exists() and "wheel" in argv:
    sys.exit("error: Failed to build flash-attn")
folder = pathlib.Path(argv[argv.index("--wheel-dir" if "wheel" in argv else "--dest") + 1])
for line in text.splitlines():
    if "==" in line:
        name, version = line.split()[0].split("==")
        (folder / f"{{name.replace('-', '_')}}-{{version}}-py3-none-any.whl").write_text(line)
"""


class Bench:
    """A request, a folder, and a pip that fills it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "log"
        self.house = folder / "house"
        self.request = Request(
            root=str(folder / "root"),
            version="0.20.1",
            platform="cuda",
            lock=LOCK,
            lock_name="lock",
            uv_lock=UV_LOCK,
            python=sys.executable,
            cuda_archs=("90",),
        )
        tool = uv_folder(folder / "root", UV_LOCK, read_interpreter(sys.executable))
        (tool / "bin").mkdir(parents=True)
        (tool / "bin" / "python").write_text(FAKE_PIP.format(python=sys.executable, log=self.log))
        (tool / "bin" / "python").chmod(0o755)
        self.asked: list[Request] = []
        (folder / "cuda" / "bin").mkdir(parents=True)
        (folder / "cuda" / "bin" / "nvcc").touch()
        monkeypatch.setattr(venv_install, "CUDA_HOME", str(folder / "cuda"))
        monkeypatch.setattr(venv_wheelhouse, "ensure", self.ensure)

    def ensure(self, request: Request) -> venv_install.Outcome:
        self.asked.append(request)
        return venv_install.Outcome("/venv", "n", "d", False, "", 1, "", (), {}, {})

    @property
    def calls(self) -> list[dict[str, list[str]]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_every_wheel_is_there_and_in_the_manifest(bench: Bench) -> None:
    found = build(bench.request, str(bench.house))
    assert found.changed
    assert found.wheels == 5
    assert found.built == ("flash_attn-2.8.3-py3-none-any.whl",)
    for name, digest in manifest(bench.house).items():
        assert hashlib.sha256((bench.house / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in bench.house.glob("*.whl")} == set(manifest(bench.house))


def test_everything_is_fetched_by_hash_as_wheels_but_the_one_that_is_built(bench: Bench) -> None:
    build(bench.request, str(bench.house))
    assert all("--require-hashes" in call["argv"] and "--no-deps" in call["argv"] for call in bench.calls)
    source = [call["requirements"].splitlines()[0].split("==")[0] for call in bench.calls if "wheel" in call["argv"]]  # type: ignore[attr-defined]
    assert source == ["flash-attn"]
    assert bench.asked[0].flash_attn == "none", "the environment that it is built in cannot have it yet"


def test_an_install_trusts_what_was_built_by_the_manifest(bench: Bench) -> None:
    build(bench.request, str(bench.house))
    name = "flash_attn-2.8.3-py3-none-any.whl"
    assert built_wheels(str(bench.house)) == {name: manifest(bench.house)[name]}


def test_a_second_run_does_nothing(bench: Bench) -> None:
    build(bench.request, str(bench.house))
    calls = len(bench.calls)
    assert not build(bench.request, str(bench.house)).changed
    assert len(bench.calls) == calls


@pytest.mark.parametrize("lost", [MANIFEST, ".firstlight.json", "torch-2.11.0-py3-none-any.whl"])
def test_a_folder_that_lost_something_is_filled_again(bench: Bench, lost: str) -> None:
    build(bench.request, str(bench.house))
    (bench.house / lost).unlink()
    assert build(bench.request, str(bench.house)).changed
    assert (bench.house / lost).exists()


def test_other_gpus_need_another_build(bench: Bench) -> None:
    build(bench.request, str(bench.house))
    assert build(replace(bench.request, cuda_archs=("120",)), str(bench.house)).changed


def test_a_build_that_fails_leaves_no_folder_that_looks_whole(bench: Bench) -> None:
    Path(f"{bench.log}.fault").touch()
    with pytest.raises(FirstlightError) as caught:
        build(bench.request, str(bench.house))
    assert caught.value.kind == "build-failed"
    assert not (bench.house / MANIFEST).exists()
    Path(f"{bench.log}.fault").unlink()
    assert build(bench.request, str(bench.house)).changed


def test_check_mode_collects_nothing(bench: Bench) -> None:
    assert build(bench.request, str(bench.house), check=True).changed
    assert not bench.house.exists()


def test_no_compiler_is_told_before_anything_is_fetched(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv_install, "CUDA_HOME", "/nowhere/cuda")
    monkeypatch.setattr(venv_install.shutil, "which", lambda _name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(FirstlightError) as caught:
        build(bench.request, str(bench.house))
    assert caught.value.kind == "nvcc-missing"
    assert not bench.calls


@pytest.mark.parametrize("folder", ["", "wheels", "/"])
def test_a_folder_that_cannot_be_is_refused(bench: Bench, folder: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        build(bench.request, folder)
    assert caught.value.where == "vllm_install_wheelhouse"
