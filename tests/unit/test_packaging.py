"""The wheel and the checkout each run with no settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import tomllib
import yaml

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "ansible_collections/firstlight/vllm"


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    assert galaxy["version"] == project["version"]
    assert galaxy["license"] == [project["license"]]


def test_the_collection_leaves_out_what_is_not_of_it() -> None:
    ignored = yaml.safe_load((ROOT / "galaxy.yml").read_text())["build_ignore"]
    # the folders of a checkout that no `ansible-galaxy collection build` may pick up
    assert {".git", ".venv", ".tools", ".collections", ".cache", "deploy", "tests", "extensions"} <= set(ignored)


def test_every_locked_package_has_hashes() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    for package in lock["package"]:
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]:
            assert file["hash"].startswith("sha256:"), package["name"]


def clean_environment(home: Path) -> dict[str, str]:
    """No settings of this machine's user, and none of the test run."""
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "UV_CACHE_DIR", "UV_INDEX_URL", "UV_DEFAULT_INDEX")
    return {"HOME": str(home), **{key: os.environ[key] for key in kept if key in os.environ}}


def output(argv: Sequence[str | Path], cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run([str(arg) for arg in argv], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    for candidate in (ROOT / ".tools" / "uv" / "bin" / "uv", shutil.which("uv")):
        if candidate and Path(candidate).is_file():
            return str(candidate)
    pytest.fail("uv is missing: run `make venv`")


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    output([uv, "build", "--quiet", "--wheel", "--out-dir", out, ROOT], ROOT, dict(os.environ))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts folder of a new environment with the wheel and its locked dependencies, and nothing else."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    env = {**os.environ, "VIRTUAL_ENV": str(venv)}
    output([uv, "venv", "--quiet", "--python", sys.executable, venv], ROOT, env)
    locked = venv.parent / "requirements.txt"
    export = [uv, "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project"]
    locked.write_text(output(export, ROOT, env))
    output([uv, "pip", "install", "--quiet", "--require-hashes", "-r", locked], ROOT, env)
    output([uv, "pip", "install", "--quiet", "--no-deps", wheel], ROOT, env)
    return venv / "bin"


@pytest.mark.slow
def test_the_wheel_holds_the_collection_the_wrapper_and_the_licence_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in ("playbooks", "roles", "plugins/modules", "plugins/module_utils"):
        present = {
            f"{INSIDE}/{path.relative_to(ROOT)}"
            for path in (ROOT / part).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert present, part
        assert present <= names
    assert {f"{INSIDE}/LICENSE", f"{INSIDE}/galaxy.yml", f"{INSIDE}/meta/runtime.yml"} <= names
    assert {"deploy/py.typed", "deploy/__init__.py", "deploy/cli.py"} <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    # a namespace folder with an __init__.py would hide all other collections
    assert not {"ansible_collections/__init__.py", "ansible_collections/firstlight/__init__.py"} & names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"ansible_collections", "deploy"}
    inside = {name.removeprefix(f"{INSIDE}/").split("/")[0] for name in names if name.startswith(INSIDE)}
    assert not inside & {"tests", "extensions", "deploy", "docs", ".git"}
    assert not [name for name in names if name.endswith(".pyc")]


@pytest.mark.slow
def test_an_installed_wheel_runs_its_playbooks_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    env = clean_environment(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    site = [installed / "ansible-playbook", "firstlight.vllm.site", "-i", "localhost,"]
    assert "playbook: " in output([*site, "--syntax-check"], empty, env)
    listed = output([*site, "--list-tasks"], empty, env)
    assert "preflight" in listed
    doc = output([installed / "ansible-doc", "--json", "firstlight.vllm.ready"], empty, env)
    assert json.loads(doc)["firstlight.vllm.ready"]["doc"]["collection"] == "firstlight.vllm"


SCRIPT = """
import json, deploy
host = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
result = deploy.run(inventory={"all": {"hosts": {"here": host}}}, playbook="status", check=True)
print(json.dumps({"file": deploy.__file__, "result": result.as_dict()}))
"""


@pytest.mark.slow
def test_an_installed_wheel_is_imported_and_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    env = clean_environment(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = json.loads(output([installed / "python", "-c", SCRIPT], empty, env))
    assert Path(answer["file"]).is_relative_to(installed.parent)
    assert "here" in answer["result"]["hosts"]
    assert list(empty.iterdir()) == []
    assert "firstlight 0" in output([installed / "firstlight", "--version"], empty, env)


@pytest.mark.slow
def test_a_demo_from_an_installed_wheel_says_that_it_needs_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "firstlight", "demo"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "demo needs firstlight's checkout" in done.stderr


@pytest.mark.slow
def test_a_checkout_runs_its_playbook_with_no_settings(installed: Path, tmp_path: Path) -> None:
    """In a copy of what git tracks, with an Ansible that has another firstlight installed: the copy's own is used."""
    copy = tmp_path / "checkout"
    tracked = output(["git", "ls-files", "-z"], ROOT, dict(os.environ)).split("\0")
    for name in filter(None, tracked):
        source, target = ROOT / name, copy / name
        if source.exists() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    env = clean_environment(tmp_path)
    site = [installed / "ansible-playbook", "site.yml", "-i", "localhost,"]
    assert "playbook: site.yml" in output([*site, "--syntax-check"], copy, env)
    loaded = output([*site, "--list-tasks", "-vvvv"], copy, env)
    assert f"Loading collection firstlight.vllm from {copy}" in loaded
