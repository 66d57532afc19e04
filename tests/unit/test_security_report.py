"""The table of `make security` fails when a line of it falls short."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("security_report", ROOT / "tests" / "security" / "report.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["security_report"] = module
    spec.loader.exec_module(module)
    return module


def test_it_fails_when_one_line_falls_short_and_says_which(
    report: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    good = report.Row("locks", "3", "all")
    assert report.show([good], 1.0) == 0
    assert report.show([good, report.Row("secrets", "1", "0", "a secret in /etc/x")], 1.0) == 1
    assert "secrets: a secret in /etc/x" in capsys.readouterr().out


def test_it_fails_when_nothing_was_measured(report: ModuleType) -> None:
    assert report.show([], 1.0) == 1


def test_a_value_that_does_harm_is_counted_against_it(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "check_values", lambda *_: None)  # as if nothing were judged
    rows = report.bad_inputs()
    assert rows[0].short


def test_a_lock_that_names_an_index_falls_short(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hashed = f"a==1 \\\n    --hash=sha256:{'0' * 64}\n"
    (tmp_path / "good.txt").write_text(hashed)
    (tmp_path / "index.txt").write_text(f"--extra-index-url https://x.example\n{hashed}")
    (tmp_path / "loose.txt").write_text("a==1\n")
    monkeypatch.setattr(report, "LOCKS", tmp_path)
    assert [bool(row.short) for row in report.locks()] == [False, True, True]


def test_an_exposed_unit_falls_short(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.test_unit_file, "exposure", lambda *_, **__: 9.2)
    assert all(row.short for row in report.exposure())


def test_hostile_answers_that_get_through_fall_short(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SimpleNamespace(name="right", detail="")
    monkeypatch.setattr(report.corpus, "judge", lambda name: right)
    assert all(row.short for row in report.answers())
