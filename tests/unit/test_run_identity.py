"""Who runs a playbook, and whether that run still lives: by real processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import run_identity
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import Run, claiming, is_gone, this_run


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield running
    running.kill()
    running.communicate()


def test_all_tasks_of_a_run_have_one_identity_and_another_run_has_another(other: subprocess.Popen[bytes]) -> None:
    first = this_run(os.getpid())
    assert first == this_run(os.getpid())
    assert first.id != this_run(other.pid).id
    assert f"(pid {os.getpid()})" in first.who
    assert Run.of(first.as_dict()) == first


def test_a_run_that_was_killed_is_known_to_be_gone(other: subprocess.Popen[bytes]) -> None:
    run = this_run(other.pid)
    assert not is_gone(run)
    other.kill()
    other.wait()
    assert is_gone(run)
    # its number may have been given to somebody else
    assert is_gone(replace(this_run(os.getpid()), ticks=1))


def test_of_a_run_of_another_machine_nothing_is_known(tmp_path: Path) -> None:
    assert not is_gone(replace(this_run(os.getpid()), controller="elsewhere", ticks=1))
    assert not is_gone(Run("a"))
    nowhere = this_run(os.getpid(), tmp_path)  # as where there is no /proc
    assert nowhere.id
    assert nowhere.controller == ""
    assert not is_gone(nowhere)


def test_another_users_run_that_proc_hides_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = this_run(os.getpid())

    def kill(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(run_identity.os, "kill", kill)
    monkeypatch.setattr(run_identity, "read_process", lambda pid: None)
    assert not is_gone(run)


def test_what_a_host_makes_up_does_no_harm() -> None:
    for holder in (
        "x",
        {"id": "x", "pid": "x"},
        {"id": "x", "controller": this_run(os.getpid()).controller, "pid": -1},
    ):
        answer = {"failed": True, "failure": {"holder": holder}}
        assert claiming(lambda more, answer=answer: answer, os.getpid()) == answer  # type: ignore[misc]


def host(*holders: Run) -> tuple[list[Mapping[str, Any]], Any]:
    """A module that refuses as long as one of these is not known to be gone."""
    calls: list[Mapping[str, Any]] = []

    def execute(more: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(more)
        left = [holder for holder in holders if holder.id not in more["gone"]]
        return {"failed": True, "failure": {"holder": left[0].as_dict()}} if left else {"changed": False}

    return calls, execute


def test_a_run_of_this_machine_that_was_cut_off_costs_one_more_task_and_no_more(
    other: subprocess.Popen[bytes],
) -> None:
    dead = replace(this_run(other.pid), ticks=1, id="dead")
    calls, execute = host(dead)
    assert claiming(execute, os.getpid()) == {"changed": False}
    assert [call["gone"] for call in calls] == [[], ["dead"]]
    assert calls[0]["run"] == this_run(os.getpid()).as_dict()


def test_a_run_that_lives_is_not_pushed_aside(other: subprocess.Popen[bytes]) -> None:
    calls, execute = host(replace(this_run(other.pid), ticks=1, id="dead"), this_run(other.pid))
    assert claiming(execute, os.getpid())["failed"]
    assert len(calls) == 2


def test_a_module_that_fails_of_something_else_runs_once() -> None:
    calls: list[Mapping[str, Any]] = []
    answer = {"failed": True, "failure": {"kind": "driver-old"}}
    assert claiming(lambda more: calls.append(more) or answer, os.getpid()) == answer  # type: ignore[func-returns-value]
    assert claiming(lambda more: calls.append(more) or {"failed": True}, os.getpid())["failed"]  # type: ignore[func-returns-value]
    assert len(calls) == 2
