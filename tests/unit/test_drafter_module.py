"""The module drafter_config: its results, check and diff mode, and a blank host."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.firstlight.vllm.plugins.modules import drafter_config as subject
from support_drafters import DATA, families

TINY = DATA / "tiny"
PARAMS: dict[str, Any] = {
    "path": str(TINY / "drafter-qwen3" / "drafter-step-300.safetensors"),
    "target": str(TINY / "tiny-qwen3"),
    "vllm_version": "0.20.1",
    "max_model_len": 1024,
    "set": {"mask_token_id": 5, "block_size": 16},
}


def run(capsys: pytest.CaptureFixture[str], check: bool = False, **params: Any) -> dict[str, Any]:
    arguments = PARAMS | {"families": families()} | params
    arguments |= {"_ansible_check_mode": check, "_ansible_diff": True}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        subject.main()
    return json.loads(capsys.readouterr().out)


def test_it_places_the_drafter_and_says_all_that_others_need(tmp_path: Path, capsys: Any) -> None:
    result = run(capsys, dest=str(tmp_path / "d"))
    assert result["changed"] is True
    assert result["derived"] is True
    assert result["path"] == str(tmp_path / "d")
    assert result["family"] == "dflash"
    assert result["row"] == ""
    assert result["config"] == json.loads((tmp_path / "d" / "config.json").read_text())
    assert len(result["config_digest"]) == 64
    assert result["facts"]["num_hidden_layers"] == 2
    assert result["facts"]["num_attention_heads"] == 4
    assert result["facts"]["num_speculative_tokens"] == 15
    assert result["facts"]["weight_bytes"] == 854016
    assert result["bytes_read"] < 10_000
    assert result["files"][0]["path"] == str(tmp_path / "d" / "model.safetensors")
    assert result["diff"]["before"] == ""
    assert result["diff"]["after"] == (tmp_path / "d" / "config.json").read_text()
    assert run(capsys, dest=str(tmp_path / "d"))["changed"] is False


def test_check_mode_says_the_same_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    checked = run(capsys, check=True, dest=str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()
    done = run(capsys, dest=str(tmp_path / "d"))
    # Ansible adds owner and mode of a path that exists
    assert checked == {name: value for name, value in done.items() if name in checked}


def test_the_diff_shows_what_changes(tmp_path: Path, capsys: Any) -> None:
    run(capsys, dest=str(tmp_path / "d"))
    result = run(capsys, check=True, dest=str(tmp_path / "d"), set={"mask_token_id": 6, "block_size": 16})
    assert '"mask_token_id": 5' in result["diff"]["before"]
    assert '"mask_token_id": 6' in result["diff"]["after"]


@pytest.mark.parametrize("absent", ["path", "target"])
def test_on_a_blank_host_check_mode_expects_what_would_come(tmp_path: Path, capsys: Any, absent: str) -> None:
    params = {"dest": str(tmp_path / "d"), absent: str(tmp_path / "later")}
    result = run(capsys, check=True, expect_later=True, **params)
    assert (result["changed"], result["derived"], result["path"]) == (True, False, str(tmp_path / "d"))
    assert "later" in result["note"]
    failed = run(capsys, check=True, **params)
    assert failed["failed"] is True
    failed = run(capsys, expect_later=True, **params)
    assert failed["failed"] is True
    assert "Fix:" in failed["msg"]


def test_other_faults_fail_in_check_mode_too(tmp_path: Path, capsys: Any) -> None:
    result = run(capsys, check=True, expect_later=True, dest=str(tmp_path / "d"), set={})
    assert result["failed"] is True


def test_a_failure_lists_every_missing_field(tmp_path: Path, capsys: Any) -> None:
    result = run(capsys, dest=str(tmp_path / "d"), set={})
    assert result["failed"] is True
    assert result["failure"]["kind"] == "missing-field"
    assert [problem["field"] for problem in result["problems"] if problem["severity"] == "error"] == [
        "mask_token_id",
        "block_size",
    ]
    assert "mask_token_id" in result["msg"]
    assert "block_size" in result["msg"]
    assert not (tmp_path / "d").exists()


def test_values_from_an_inventory_may_be_texts_of_numbers_only_where_yaml_says_so(tmp_path: Path, capsys: Any) -> None:
    result = run(capsys, dest=str(tmp_path / "d"), set={"mask_token_id": "5", "block_size": 16})
    assert result["failure"]["kind"] == "bad-value"


def test_a_changed_configuration_leaves_the_folder_of_the_earlier_release_as_it_was(
    tmp_path: Path, capsys: Any
) -> None:
    first = run(capsys, dest=str(tmp_path), versioned=True)
    before = (Path(first["path"]) / "config.json").read_text()
    assert Path(first["path"]).parent == tmp_path
    second = run(capsys, dest=str(tmp_path), versioned=True, set={"mask_token_id": 6, "block_size": 16})
    assert second["path"] != first["path"]
    assert (Path(first["path"]) / "config.json").read_text() == before
    again = run(capsys, dest=str(tmp_path), versioned=True)
    assert (again["path"], again["changed"]) == (first["path"], False)


def test_other_weights_get_another_folder_even_with_the_same_configuration(tmp_path: Path, capsys: Any) -> None:
    weights = tmp_path / "in" / "d.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(Path(PARAMS["path"]).read_bytes())
    first = run(capsys, path=str(weights), dest=str(tmp_path / "d"), versioned=True)
    weights.unlink()
    weights.write_bytes(Path(PARAMS["path"]).read_bytes())
    os.utime(weights, ns=(1, 1))
    second = run(capsys, path=str(weights), dest=str(tmp_path / "d"), versioned=True)
    assert second["path"] != first["path"]
    assert second["config_digest"] == first["config_digest"]
