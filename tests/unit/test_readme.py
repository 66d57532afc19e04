"""What the README and the other documents show is what there is: commands, variables, code, links."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.firstlight.vllm.plugins.action.preflight import role_options

import deploy
from deploy import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLAYBOOKS = {path.stem for path in (ROOT / "playbooks").glob("*.yml")}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def console() -> list[list[str]]:
    """The commands that the README's console blocks show, without their comments."""
    shown = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(part, comments=True) for line in shown for part in line.split(" && ")]


def inventory() -> dict[str, Any]:
    (text,) = blocks("yaml")
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def on_hosts() -> list[list[str]]:
    return [argv[1:] for argv in console() if argv[0] == "firstlight"]


def commands() -> set[str]:
    (action,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(action.choices)


def test_the_readme_shows_commands() -> None:
    assert {argv[0] for argv in console()} >= {"make", "firstlight", "cp"}
    assert len(on_hosts()) >= 3


def test_every_command_that_is_shown_is_understood() -> None:
    for argv in console():
        if argv[0] == "firstlight":
            cli.parser().parse_args(argv[1:])
        elif argv[0] == "make":
            assert set(argv[1:]) <= TARGETS, argv
        elif argv[0] == "cp":
            assert (ROOT / argv[2]).is_dir(), argv
        else:
            assert argv == [".", ".venv/bin/activate"]


def test_the_table_of_commands_is_complete() -> None:
    listed = set(re.findall(r"^\| `firstlight (\w+)", README, re.MULTILINE))
    assert listed == commands()


def test_every_playbook_has_a_command() -> None:
    from deploy.commands.run import VERBS  # noqa: PLC0415

    assert {playbook for playbook, _ in VERBS.values()} == PLAYBOOKS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert set(re.findall(r"`make ([a-z]+)`", text)) <= TARGETS
    assert set(re.findall(r"firstlight\.vllm\.(\w+)(?= |`|$)", text, re.MULTILINE)) <= PLAYBOOKS | {
        module.stem for module in (ROOT / "plugins" / "modules").glob("*.py")
    } | {"attributes"}
    assert set(re.findall(r"`firstlight (\w+)", text)) <= commands()


def test_the_inventory_that_is_shown_holds_known_variables_only() -> None:
    shown = inventory()["all"]["vars"]
    assert set(shown) <= set(role_options(ROOT))
    assert set(shown) >= {"model_path", "drafter_path"}


def test_the_secrets_that_are_named_are_variables() -> None:
    (sentence,) = re.findall(r"Secrets \(([^)]*)\)", README)
    known = {name for name, option in role_options(ROOT).items() if option.get("no_log")}
    assert set(re.findall(r"`(\w+)`", sentence)) - {"ansible_become_password"} <= known


@pytest.mark.parametrize("fine", [True, False])
def test_the_python_that_is_shown_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fine: bool
) -> None:
    signature = inspect.signature(deploy.run)

    def run(**arguments: Any) -> deploy.RunResult:
        signature.bind(**arguments)
        arguments["on_event"](deploy.Event(kind="output", seconds=0.0))
        acceptance = deploy.Acceptance(10, 150, 100, 0.667, 11.0)
        phases = (deploy.Phase("load weights", 1.5),)
        good = deploy.HostResult(ok=True, answer="def is_prime", verdict="right", acceptance=acceptance, phases=phases)
        failure = deploy.Failure("killed-by-oom", "The kernel ended it.", "Take less.", "m", outcome="SGLang is back")
        bad = deploy.HostResult(ok=False, failure=failure)
        status: Any = "successful" if fine else "failed"
        return deploy.RunResult(status, {"gpu01": good if fine else bad}, 2.0)

    monkeypatch.setattr(deploy, "run", run)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {"key": "canary"})
    assert ("11.0" in capsys.readouterr().out) is fine


@pytest.mark.slow
@pytest.mark.parametrize("argv", on_hosts(), ids=" ".join)
def test_the_commands_on_hosts_come_as_far_as_a_host_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """Each runs as it is shown, with the inventory that is shown; its variables are judged before the connection."""
    shown = inventory()
    shown["all"]["vars"] |= {"ansible_host": "127.0.0.1", "ansible_port": 1}
    mine = tmp_path / "mine"
    shutil.copytree(ROOT / "inventory" / "example", mine)
    (mine / "hosts.yml").write_text(yaml.safe_dump(shown), encoding="utf-8")
    given = [str(mine) if arg == "inventory/mine" else arg for arg in argv]
    assert str(mine) in given
    assert cli.main([*given, "--json", "--quiet"]) == 3
    result = json.loads(capsys.readouterr().out)
    assert result["hosts"]["gpu01.example.net"]["failure"]["id"] == "unreachable"
