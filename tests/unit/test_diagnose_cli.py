"""The command `firstlight diagnose`: its two outputs and its exit status."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from support_failure_logs import FAILURES

from deploy.commands import diagnose

SPECULATION = str(FAILURES / "spec-batched-tokens-too-small--2.log")
WELL = str(FAILURES / "none--1.log")


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    diagnose.register(parser.add_subparsers(required=True))
    args = parser.parse_args(["diagnose", *argv])
    status: int = args.func(args)
    return status


def test_json_is_a_list_with_one_verdict_for_each_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(SPECULATION, WELL, "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert list(first) == ["file", "id", "line", "text", "cause", "remedy"]
    assert (first["file"], first["id"], first["line"]) == (SPECULATION, "spec-batched-tokens-too-small", 8)
    assert "at least 256" in first["remedy"]
    assert (second["file"], second["id"], second["line"], second["text"]) == (WELL, "none", None, "")


def test_people_get_the_line_the_cause_and_the_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(SPECULATION, WELL) == 0
    shown = capsys.readouterr().out
    assert "spec-batched-tokens-too-small\n  line 8: " in shown
    assert "\n  Fix: Set vllm_server_max_num_batched_tokens" in shown
    assert shown.endswith(f"{WELL}: none\n")


def test_a_log_that_cannot_be_read_is_status_2_and_the_others_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "missing.log")
    assert _run(missing, str(tmp_path), WELL, "--json") == 2
    shown = capsys.readouterr()
    assert [(entry["file"], entry["id"]) for entry in json.loads(shown.out)] == [
        (missing, "unknown"),
        (str(tmp_path), "unknown"),
        (WELL, "none"),
    ]
    assert missing in shown.err


def test_standard_input_is_a_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(SPECULATION).read_bytes() + b"\xff\n")))
    assert _run("-", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["file"], entry["id"]) == ("-", "spec-batched-tokens-too-small")


def test_a_remedy_takes_the_numbers_that_it_is_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("Value error, max_num_scheduled_tokens is set to -9 based on the speculative decoding settings\n")
    assert _run(str(log), "--set", "vllm_server_max_num_seqs=8", "--set", "num_speculative_tokens=15") == 0
    assert "at least 128 = 8 sequences" in capsys.readouterr().out


def test_a_setting_without_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _run(WELL, "--set", "max_num_seqs")
    assert stop.value.code == 2
    assert "NAME=VALUE" in capsys.readouterr().err
