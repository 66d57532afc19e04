"""A secret that is planted turns up nowhere but in its own file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_canary import API_KEY, leaks, played, rendered


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return played(tmp_path_factory.mktemp("canary"), "--check")


def test_no_file_of_a_release_holds_a_secret_but_its_own(tmp_path: Path) -> None:
    found = rendered(tmp_path)
    assert len(found) >= 6
    assert leaks(found) == []


def test_neither_output_nor_log_nor_diff_nor_command_line_holds_a_secret(texts: dict[str, str]) -> None:
    assert leaks(texts) == []


def test_the_run_used_both_secrets_in_every_role(texts: dict[str, str]) -> None:
    said = texts["Ansible's output"]
    for module in ("preflight", "hub_snapshot", "release", "status", "ready"):
        assert f"Using module file {Path(__file__).parents[2]}/plugins/modules/{module}.py" in said.replace(
            ".collections/ansible_collections/firstlight/vllm/", ""
        ), f"{module} did not run\n{said[-3000:]}"
    assert "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER" in said
    assert "the hub said no to the token" in said, "the hub's own error reached the output, less the token"
    assert "+served-model-name" in said or "+++ after" in said, "a diff was shown"
    assert "ansible" in texts["command lines"]


def test_a_leak_is_seen() -> None:
    assert leaks({"somewhere": f"key={API_KEY}"})
