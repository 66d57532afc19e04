"""Reading a host: parsers, and one real look at this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import host_facts
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import run_command
from ansible_collections.firstlight.vllm.plugins.module_utils.host_facts import (
    HostFacts,
    free_gib,
    memory_mib,
    os_release,
    read,
    version,
)
from hypothesis import given
from hypothesis import strategies as st


def run(argv: Sequence[str]) -> tuple[int, str]:
    answer = run_command(argv, 30)
    return answer.status, answer.stdout


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "query", list)


def look(python: str = sys.executable, folders: Sequence[str] = (), port: int = 1) -> HostFacts:
    return read(python=python, folders=folders, port=port, run=run)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('NAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n', ("debian", "12")),
        ("ID=ubuntu\nVERSION_ID='22.04'\n", ("ubuntu", "22.04")),
        ("# nothing\n", ("", "")),
    ],
)
def test_os_release_with_and_without_quotes(text: str, expected: tuple[str, str]) -> None:
    pairs = os_release(text)
    assert (pairs.get("ID", ""), pairs.get("VERSION_ID", "")) == expected


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("2.36", (2, 36)), ("Python 3.11.2\n", (3, 11, 2)), ("580.95.05", (580, 95, 5)), ("", ()), ("none", ())],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers


@given(st.text())
def test_a_version_of_any_text_is_numbers(text: str) -> None:
    assert all(isinstance(part, int) for part in version(text))


def test_memory_out_of_meminfo() -> None:
    assert memory_mib("MemTotal:       24689764 kB\nMemFree: 1 kB\n") == 24689764 // 1024
    assert memory_mib("MemFree: 1 kB\n") == 0


def test_free_space_of_a_folder_that_is_still_to_be_made(tmp_path: Path) -> None:
    assert free_gib(str(tmp_path / "a" / "b")) == pytest.approx(free_gib(str(tmp_path)), rel=0.05)


@pytest.mark.usefixtures("without_gpus")
def test_this_machine_can_be_read_and_told_as_json(tmp_path: Path) -> None:
    facts = look(folders=[str(tmp_path)])
    assert facts.python == tuple(sys.version_info[:3])
    assert facts.machine == os.uname().machine
    assert facts.cpus >= 1
    assert facts.memory_mib > 100
    assert facts.disk_free_gib[str(tmp_path)] > 0
    json.dumps(facts.as_dict())


@pytest.mark.usefixtures("without_gpus")
def test_another_interpreter_is_asked_for_its_version(tmp_path: Path) -> None:
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 3.11.2\n")
    fake.chmod(0o755)
    assert look(python=str(fake)).python == (3, 11, 2)


@pytest.mark.usefixtures("without_gpus")
def test_an_interpreter_that_is_missing_a_folder_or_failing_has_no_version(tmp_path: Path) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 3.11.2\nexit 1\n")
    failing.chmod(0o755)
    for path in (tmp_path / "missing", tmp_path, failing):
        assert look(python=str(path)).python == ()


@pytest.mark.usefixtures("without_gpus")
def test_the_holder_of_the_port_is_told_without_its_secrets() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        holder = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()", "--api-key", "sk-canary-canary"],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        try:
            seen = {entry.pid: entry for entry in look(port=port).listeners}
        finally:
            holder.communicate(b"")
    assert os.getpid() in seen
    assert seen[holder.pid].address == "127.0.0.1"
    assert "--api-key ***" in seen[holder.pid].command
    assert "canary" not in seen[holder.pid].command


def test_a_driver_that_fails_is_an_error_and_not_a_host_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise FirstlightError("it failed.", where="nvidia-smi", fix="mend it.", kind="nvidia-smi-failed")

    monkeypatch.setattr(host_facts, "query", broken)
    with pytest.raises(FirstlightError, match="nvidia-smi"):
        look()
