"""``firstlight inspect``: exit status, JSON, values given, writing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from support_drafters import DATA, QWEN36_27B, plain_layout, published_row, write_target, write_weights

from deploy.commands import inspect as subject

TINY = DATA / "tiny"
DRAFTER = str(TINY / "drafter-qwen3" / "drafter-step-300.safetensors")
TARGET = str(TINY / "tiny-qwen3")
GIVEN = ("--set", "mask_token_id=5", "--set", "block_size=16")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    subject.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["inspect", *argv])
    status = args.func(args)
    return status, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    status, out = run(capsys, *argv, "--json")
    return status, json.loads(out)


def test_a_usable_drafter_gives_0_and_the_whole_report(capsys: Any) -> None:
    status, report = as_json(capsys, DRAFTER, "--target", TARGET, *GIVEN)
    assert status == 0
    assert list(report) == ["family", "config", "fields", "problems"]
    assert report["family"] == "dflash"
    assert report["config"]["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [1, 5]}
    assert report["fields"]["mask_token_id"] == {"value": 5, "from": "user", "note": "given by the user"}
    assert {field["from"] for field in report["fields"].values()} == {
        "header", "target", "formula", "default", "user",
    }  # fmt: skip
    assert all(set(problem) == {"id", "severity", "field", "message", "fix"} for problem in report["problems"])


def test_an_unusable_drafter_gives_2_and_names_each_missing_field(capsys: Any) -> None:
    status, report = as_json(capsys, DRAFTER, "--target", TARGET)
    assert status == 2
    missing = [problem["field"] for problem in report["problems"] if problem["severity"] == "error"]
    assert missing == ["mask_token_id", "block_size"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["/nowhere", "--target", TARGET], "missing"),
        ([DRAFTER, "--target", "/nowhere"], "target-missing"),
        ([DRAFTER], "target-missing"),
        ([DRAFTER, "--target", TARGET, "--set", "nonsense"], "bad-value"),
        ([DRAFTER, "--target", TARGET, "--set", "=5"], "bad-value"),
        ([DRAFTER, "--target", TARGET, "--set", "colour=5"], "unknown-field"),
        ([DRAFTER, "--target", TARGET, "--max-model-len", "many"], "bad-value"),
        ([DRAFTER, "--target", TARGET, "--max-model-len", "9" * 9999], "bad-value"),
        ([DRAFTER, "--target", TARGET, "--vllm", "latest"], "bad-vllm-version"),
        ([TARGET, "--target", TARGET], "target-weights"),
        (["", "--target", TARGET], "missing"),
        (["x" * 5000, "--target", TARGET], "unreadable"),
        (["\0", "--target", TARGET], "unreadable"),
    ],
)
def test_bad_input_gives_2_and_its_own_problem(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, report = as_json(capsys, *argv)
    assert status == 2
    assert problem in [item["id"] for item in report["problems"]]
    assert all(item["fix"] for item in report["problems"])


def test_values_are_json_or_text(capsys: Any) -> None:
    status, report = as_json(
        capsys, DRAFTER, "--target", TARGET, *GIVEN, "--set", "target_layer_ids=[0, 4]", "--set", "hidden_act=gelu"
    )
    assert status == 0
    assert report["config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5]
    assert report["config"]["hidden_act"] == "gelu"


def test_nothing_is_written_unless_asked_for(capsys: Any, tmp_path: Path) -> None:
    drafter = tmp_path / "d.safetensors"
    drafter.write_bytes(Path(DRAFTER).read_bytes())
    as_json(capsys, str(drafter), "--target", TARGET, *GIVEN)
    as_json(capsys, str(drafter), "--target", TARGET, "--write")
    assert [file.name for file in tmp_path.iterdir()] == ["d.safetensors"]
    status, report = as_json(capsys, str(drafter), "--target", TARGET, *GIVEN, "--write")
    assert status == 0
    assert json.loads((tmp_path / "config.json").read_text()) == report["config"]


def test_an_existing_configuration_is_kept_unless_told_otherwise(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").write_bytes(Path(DRAFTER).read_bytes())
    published = json.loads((TINY / "drafter-qwen3" / "published-config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published))
    status, report = as_json(capsys, str(tmp_path), "--target", TARGET)
    assert status == 0
    assert report["config"]["initializer_range"] == published["initializer_range"]
    status, report = as_json(capsys, str(tmp_path), "--target", TARGET, "--replace", *GIVEN)
    assert status == 0
    assert "initializer_range" not in report["config"]


def test_the_version_and_the_served_length_matter(capsys: Any, tmp_path: Path) -> None:
    drafter = write_weights(tmp_path / "x.safetensors", plain_layout(published_row("Qwen3.6-27B-DFlash")))
    target = write_target(tmp_path / "Qwen3.6-27B", QWEN36_27B)
    for argv, expected in (
        (("--max-model-len", "32768"), ["window-ignored"]),
        (("--max-model-len", "1024"), []),
        (("--vllm", "0.26.0"), []),
    ):
        status, report = as_json(capsys, str(drafter), "--target", str(target), *argv)
        assert status == 0
        assert [problem["id"] for problem in report["problems"]] == expected


def test_people_get_a_table_the_problems_and_the_verdict(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out = run(capsys, DRAFTER, "--target", TARGET)
    assert status == 2
    assert "num_attention_heads" in out
    assert "missing-field: mask_token_id" in out
    assert "Fix: give block_size" in out
    assert out.rstrip().endswith("not usable")
    status, out = run(capsys, DRAFTER, "--target", TARGET, *GIVEN)
    assert status == 0
    assert out.rstrip().splitlines()[-1] == "usable"
