"""The claim in Ansible's own hands: the play's environment, the actions, and the module `preflight` that begins it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.preflight_rules import Problem
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import ENVIRONMENT, Claims
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import Run, this_run
from ansible_collections.firstlight.vllm.plugins.modules import preflight

ROOT = Path(__file__).resolve().parents[2]
SITE = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text())[0]
SETTINGS = {
    "vllm_server_unit": "vllm",
    "vllm_install_platform": "cpu",
    "vllm_server_tensor_parallel_size": 1,
    "vllm_server_gpu_memory_utilization": 0.9,
    "vllm_server_max_model_len": 1024,
    "drafter_enabled": False,
    "vllm_install_python": "/usr/bin/python3",
    "vllm_server_port": 30000,
}


def play(tmp_path: Path, claim: str | None) -> subprocess.CompletedProcess[str]:
    """One step of a run as `site` makes it: its last, on a host without a cutover."""
    restore = {
        "own_unit": "vllm",
        "port": 30000,
        "state_dir": str(tmp_path / "var"),
        "config_dir": str(tmp_path / "etc"),
    }
    written = {
        "hosts": "all",
        "gather_facts": False,
        "environment": SITE["environment"],
        "vars": {} if claim is None else {"preflight_result": {"claim": claim}},
        "tasks": [{"name": "Step", "firstlight.vllm.server_restore": restore}],
    }
    (tmp_path / "play.yml").write_text(json.dumps([written]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": {"here": local}}}))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"), "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.yml")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
def test_the_steps_of_a_run_bear_its_claim_and_the_last_one_ends_it(tmp_path: Path) -> None:
    claims = Claims("vllm", tmp_path / "var")
    claims.take(Run("a" * 16, "alice"))
    done = play(tmp_path, "a" * 16)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not claims.path.exists()
    late = play(tmp_path, "a" * 16)
    assert "another one took its place" in late.stdout


@pytest.mark.slow
def test_a_way_back_on_request_passes_a_killed_run_of_this_machine_and_no_living_one(tmp_path: Path) -> None:
    claims = Claims("vllm", tmp_path / "var")
    here = this_run(os.getpid())
    claims.take(here)
    refused = play(tmp_path, None)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"{here.who} began it at" in refused.stdout
    claims.take(replace(here, ticks=1))  # as if this process's number had been another's
    done = play(tmp_path, None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not claims.path.exists()


def test_the_playbook_claims_and_its_look_alone_does_not() -> None:
    first = SITE["tasks"][0]
    assert first["vars"] == {"preflight_claim": True}
    assert SITE["environment"] == {ENVIRONMENT: "{{ preflight_result.claim | default('') }}"}
    look = yaml.safe_load((ROOT / "playbooks" / "preflight.yml").read_text())[0]
    assert "vars" not in look["tasks"][0]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*problems: Problem, claim: bool = True, check: bool = False, who: str = "alice") -> dict[str, Any]:
        monkeypatch.setattr(preflight, "read", lambda **given: SimpleNamespace(as_dict=dict))
        monkeypatch.setattr(preflight, "host_rules", lambda host, wanted: iter(problems))
        params = {
            "settings": {**SETTINGS, "vllm_server_config_dir": str(tmp_path / "etc")},
            "secrets": {},
            "inputs": "",
            "shortcut": True,
            "min_disk_gib": {},
            "claim": claim,
            "run": Run(who * 2, who).as_dict(),
            "gone": [],
            "state_dir": str(tmp_path / "var"),
        }
        return preflight.run(params, check=check)

    return run


def of(problems: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    return [(problem["id"], problem["severity"]) for problem in problems]


def test_a_run_begins_when_the_host_is_good_for_it(look: Any) -> None:
    assert look()["claim"] == "alicealice"
    with pytest.raises(FirstlightError, match="alice began it"):
        look(who="ci")
    assert look()["claim"] == "alicealice"  # the same run again


def test_a_host_that_is_not_good_for_a_run_is_not_kept(look: Any) -> None:
    told = look(Problem("driver-old", "error", "gpu 0", "it is old.", "install another."))
    assert (told["claim"], of(told["problems"])) == ("", [("driver-old", "error")])
    assert look(Problem("x", "warning", "y", "z.", "do."), who="ci")["claim"] == "cici"


def test_a_look_changes_nothing_and_warns_of_a_run(look: Any, tmp_path: Path) -> None:
    assert look(check=True)["claim"] == ""
    assert look(claim=False)["problems"] == []
    assert not (tmp_path / "var").exists()
    look()
    for told in (look(check=True, who="ci"), look(claim=False, who="ci")):
        assert of(told["problems"]) == [("run-in-progress", "warning")]
        assert told["claim"] == ""


def test_a_host_that_is_what_is_asked_for_is_not_claimed(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Claims("vllm", tmp_path / "var").take(Run("c" * 16, "ci"))
    here = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/run/systemd/system" or here(path))
    monkeypatch.setattr(preflight, "judge", lambda layout, **given: SimpleNamespace(converged=True, report={}))
    before = sorted(path.name for path in (tmp_path / "var").rglob("*"))
    told = look()
    assert (told["converged"], told["claim"]) == (True, "")
    assert sorted(path.name for path in (tmp_path / "var").rglob("*")) == before
