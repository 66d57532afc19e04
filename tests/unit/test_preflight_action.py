"""The action `preflight`: all variables are judged on the controller, before anything runs on a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.action import ActionBase
from ansible.template import Templar, trust_as_template
from ansible_collections.firstlight.vllm.plugins.action import preflight
from ansible_collections.firstlight.vllm.plugins.action.preflight import COLLECTION, ActionModule, role_options

ROOT = Path(__file__).resolve().parents[2]
SITE = {"model_path": "/srv/models/target", "drafter_path": "/srv/drafters/drafter.safetensors"}
# the filter that computes them is found by a whole run of Ansible alone
URL = {"smoke_base_url": "http://127.0.0.1:30000", "proxy_upstream": "127.0.0.1:30000"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every run of the module on the host."""
    calls: list[dict[str, Any]] = []

    def execute(self: Any, module_args: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        calls.append(module_args)
        return {"converged": False}

    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(ActionModule, "_execute_module", execute)
    return calls


def act(**variables: Any) -> dict[str, Any]:
    action = ActionModule.__new__(ActionModule)
    known = {**SITE, **URL, **{k: trust_as_template(v) if isinstance(v, str) else v for k, v in variables.items()}}
    action._task = SimpleNamespace(args={"shortcut": True})
    action._templar = Templar(loader=DataLoader(), variables=known)
    return action.run(task_vars=known)


def test_good_variables_reach_the_module_typed_and_without_secrets(sent: list[dict[str, Any]]) -> None:
    result = act(vllm_server_port="31000", vllm_server_api_key="canary-canary-canary")
    assert result == {"converged": False}
    (arguments,) = sent
    assert arguments["settings"]["vllm_server_port"] == 31000
    assert arguments["secrets"]["vllm_server_api_key"] == "canary-canary-canary"
    assert "canary" not in str({key: value for key, value in arguments.items() if key != "secrets"})
    assert len(arguments["inputs"]) == 64
    assert arguments["shortcut"] is True


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"vllm_server_port": 70000}, "vllm_server_port"),
        ({"vllm_server_port": "{{ prot }}"}, "vllm_server_port"),
        ({"vllm_install_platform": "rocm"}, "vllm_install_platform"),
        ({"vllm_server_host": "0.0.0.0"}, "vllm_server_host"),
        ({"vllm_server_extra_args": {"port": 1}}, "vllm_server_extra_args"),
    ],
)
def test_a_bad_variable_fails_before_the_module_runs(
    sent: list[dict[str, Any]], variables: dict[str, Any], where: str
) -> None:
    result = act(**variables)
    assert result["failed"] is True
    assert result["failure"]["where"].startswith(where)
    assert "Fix: " in result["msg"]
    assert sent == []


def test_a_default_that_hangs_on_a_later_task_is_left_out(sent: list[dict[str, Any]]) -> None:
    act()
    assert "vllm_server_model" not in sent[0]["settings"]
    act(model_result={"path": "/srv/models/target"}, vllm_server_model="/srv/models/target")
    assert sent[1]["settings"]["vllm_server_model"] == "/srv/models/target"


def test_the_digest_of_the_inputs_moves_with_plain_variables_and_code_alone(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    act()
    act()
    act(vllm_server_api_key="0123456789abcdef")  # a secret is compared on the host, not by this digest
    act(preflight_shortcut=False)  # how closely to look is no part of what is to be there
    act(vllm_server_port=31000)
    monkeypatch.setattr(preflight, "tree_digest", lambda root: "another firstlight")
    act()
    first, again, secret, closer, port, code = (arguments["inputs"] for arguments in sent)
    assert first == again == secret == closer
    assert len({first, port, code}) == 3


def test_the_variables_are_those_of_all_roles() -> None:
    options = role_options(COLLECTION)
    for path in ROOT.glob("roles/*/defaults/main.yml"):
        assert set(yaml.safe_load(path.read_text()) or {}) <= set(options)


def test_a_real_run_stops_at_a_bad_variable(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    local = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": "/nowhere/python"}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"h": {**local, **SITE, "vllm_server_port": "70000"}}}}))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), "playbooks/preflight.yml"],
        cwd=ROOT, env={**environment, "ANSIBLE_NOCOLOR": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    # the interpreter is nowhere: had a module been run, that would be the complaint
    assert "vllm_server_port: 70000 is not a TCP port." in done.stdout
    assert "/nowhere/python" not in done.stdout
