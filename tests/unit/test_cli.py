"""The command line `firstlight`."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_deploy import build_collection, hosts, running

import deploy
from deploy import cli, environment
from deploy.commands import run as run_command
from deploy.commands.run import extra_vars
from deploy.errors import AnsibleFailedError, ExtraVarsError, InventoryError
from deploy.results import Acceptance, HostResult, RunResult, Status

Recorder = list[dict[str, Any]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Calls of `deploy.run`, which does nothing here and succeeds."""
    made: Recorder = []

    def fake(**arguments: Any) -> RunResult:
        made.append(arguments)
        return RunResult("successful", {"gpu1": HostResult(ok=True, acceptance=Acceptance(1, 15, 9, 0.6, 10.0))}, 1.0)

    monkeypatch.setattr(deploy, "run", fake)
    return made


def ending(monkeypatch: pytest.MonkeyPatch, act: Callable[[], RunResult]) -> None:
    monkeypatch.setattr(deploy, "run", lambda **_: act())


def fail(error: BaseException) -> Callable[[], RunResult]:
    def act() -> RunResult:
        raise error

    return act


def test_run_hands_on_every_option(calls: Recorder, tmp_path: Path) -> None:
    argv = ["run", "-i", "a.yml", "-i", "b.yml", "-e", "port=30001", "-e", f"@{tmp_path}/v.yml", "-l", "gpu1"]
    assert cli.main([*argv, "--check", "--diff", "--timeout", "60", "--forks", "2", "-vv", "-q"]) == 0
    (call,) = calls
    expected = {
        "inventory": ["a.yml", "b.yml"], "limit": "gpu1", "check": True, "diff": True, "playbook": "site",
        "timeout": 60.0, "verbosity": 2, "forks": 2, "extravars": [{"port": 30001}, tmp_path / "v.yml"],
    }  # fmt: skip
    assert {key: call[key] for key in expected} == expected


@pytest.mark.parametrize("command", [name for name in run_command.VERBS if name != "run"])
def test_every_other_verb_runs_its_own_playbook(command: str, calls: Recorder) -> None:
    assert cli.main([command, "-q"]) == 0
    assert calls[0]["playbook"] == command
    assert calls[0]["inventory"] is None


def test_every_playbook_is_a_command() -> None:
    assert set(environment.verbs()) <= {playbook for playbook, _ in run_command.VERBS.values()}


def test_json_is_one_document_on_standard_output(calls: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["hosts"]["gpu1"]["acceptance"]["length"] == 10.0


@pytest.mark.parametrize(
    ("status", "expected"), [("successful", 0), ("failed", 1), ("unreachable", 3), ("timeout", 4), ("canceled", 130)]
)
def test_the_exit_status_tells_how_the_run_ended(
    status: Status, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending(monkeypatch, lambda: RunResult(status, {}, 1.0))
    assert cli.main(["run", "-q"]) == expected


@pytest.mark.parametrize(
    ("error", "expected"), [(InventoryError("no such file.", "Give one."), 2), (AnsibleFailedError("it died."), 1)]
)
def test_an_error_is_told_in_words_with_its_fix(
    error: deploy.DeployError, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending(monkeypatch, fail(error))
    assert cli.main(["run", "-q"]) == expected
    captured = capsys.readouterr()
    assert error.what in captured.err
    assert (f"Fix: {error.fix}" in captured.err) == bool(error.fix)
    assert captured.out == ""


def test_an_error_is_a_json_document_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ending(monkeypatch, fail(InventoryError("no such file.", "Give one.")))
    assert cli.main(["run", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == {"kind": "InventoryError", "what": "no such file.", "fix": "Give one."}


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    ending(monkeypatch, fail(KeyboardInterrupt()))
    assert cli.main(["run", "-q"]) == 130


def test_an_unknown_command_and_an_unknown_option_are_bad_arguments() -> None:
    for argv in (["fly"], ["run", "--fast"], []):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=true", True),
        ("a=false", False),
        ("a=30000", 30000),
        ("a=-1", -1),
        ("a=0", 0),
        ("a=0.20", "0.20"),  # a version must stay what it is
        ("a=007", "007"),
        ("a=", ""),
        ("a=x=y", "x=y"),
        ("a=yes", "yes"),
        ("a=[1, two]", [1, "two"]),
        ('a={"b": 1}', {"b": 1}),
        ("a={{ b }}", "{{ b }}"),
        ("a=٣", "٣"),
    ],
)
def test_values_on_the_command_line_stay_text_unless_they_can_be_nothing_else(text: str, value: object) -> None:
    assert extra_vars([text]) == [{"a": value}]


def test_files_and_objects_are_understood_in_order() -> None:
    assert extra_vars(['{"a": 1}', "@v.yml", "b=2"]) == [{"a": 1}, Path("v.yml"), {"b": 2}]


@pytest.mark.parametrize("text", ["hunter2", "=hunter2", "a-b=hunter2", "{hunter2", "a=[hunter2", "{hunter2: [}"])
def test_what_cannot_be_read_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ExtraVarsError) as caught:
        extra_vars([text])
    assert "hunter2" not in str(caught.value)


def test_demo_outside_a_checkout_says_that_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "checkout", lambda: None)
    assert cli.main(["demo"]) == 1
    assert "demo needs firstlight's checkout" in capsys.readouterr().err


def lab(root: Path, script: str) -> None:
    path = root / "tests" / "lab" / "lab.sh"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_demo_passes_on_why_this_machine_cannot_host_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    lab(tmp_path, 'echo "No test hosts here: install podman" >&2; exit 3')
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    assert cli.main(["demo"]) == 3
    assert "install podman" in capfd.readouterr().err
    assert calls == []


def test_demo_boots_the_host_and_runs_the_main_job_on_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: Recorder, capfd: pytest.CaptureFixture[str]
) -> None:
    lab(tmp_path, 'echo "booted $@"')
    monkeypatch.setattr(environment, "checkout", lambda: tmp_path)
    assert cli.main(["demo", "--json", "-e", "a=b"]) == 0
    captured = capfd.readouterr()
    assert "booted up demo" in captured.err
    assert json.loads(captured.out)["ok"] is True
    assert calls[0]["inventory"] == [str(tmp_path / "inventory" / "demo" / "hosts.yml")]
    assert calls[0]["extravars"] == [{"a": "b"}]


@pytest.mark.slow
def test_a_whole_run_prints_a_report_and_plain_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build_collection(tmp_path)
    monkeypatch.setattr(environment, "collections_root", lambda: root)
    (tmp_path / "hosts.yml").write_text(json.dumps(hosts("gpu1")))
    assert cli.main(["run", "-i", str(tmp_path / "hosts.yml")]) == 0
    captured = capsys.readouterr()
    assert "gpu1: Wait for the server" in captured.err
    assert "mean length 11.00" in captured.out


@pytest.mark.slow
def test_a_termination_ends_ansible_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = build_collection(tmp_path)
    monkeypatch.setattr(environment, "collections_root", lambda: root)
    monkeypatch.setitem(run_command.VERBS, "status", ("slow", "sleep"))
    (tmp_path / "hosts.yml").write_text(json.dumps(hosts("gpu1")))
    handler = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(4, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        assert cli.main(["status", "-q", "-i", str(tmp_path / "hosts.yml")]) == 130
    finally:
        timer.cancel()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert running(str(tmp_path)) == []
