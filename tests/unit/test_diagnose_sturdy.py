"""A verdict does not hang on the surroundings of the deciding line."""

from __future__ import annotations

import re

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose
from support_failure_logs import FAILURES, LOGS

FAILED = sorted(path.name for path in FAILURES.glob("*.log") if not path.name.startswith(("none--", "undecidable--")))
WELL = sorted(path.name for path in FAILURES.glob("none--*.log"))
WHOLE_AND_WELL = [*sorted(path for path in LOGS.glob("*-ok.log")), *sorted((LOGS / "cpu").glob("*.log"))]
_WRAPPED = re.compile(r"^Nov 29 [\d:]+ node1 (?:vllm\[\d+\]: )?")


def _bare(name: str) -> list[str]:
    text = (FAILURES / name).read_text(encoding="utf-8").rstrip("\n")
    return [_WRAPPED.sub("", line) for line in text.split("\n")]


@pytest.mark.parametrize("name", FAILED)
def test_a_verdict_survives_the_loss_of_any_other_line(name: str) -> None:
    lines = _bare(name)
    verdict = diagnose(lines)
    assert verdict.line is not None
    for index in range(len(lines)):
        if index != verdict.line - 1:
            assert diagnose(lines[:index] + lines[index + 1 :]).id == verdict.id, lines[index]


@pytest.mark.parametrize("name", [*FAILED, *WELL])
def test_a_verdict_is_the_same_in_every_wrapping_and_version(name: str) -> None:
    lines = _bare(name)
    kind = name.split("--", maxsplit=1)[0]
    stamped = [f"2026-02-03T04:05:06.123456+00:00 host vllm[1]: {line}" for line in lines]
    nested = [line.replace("(Worker", "(APIServer pid=1) (EngineCore_DP0 pid=2) (Worker") for line in lines]
    newer = [
        re.sub(r":\d{2,4}\]", ":4711]", line.replace("0.20.1", "0.27.0").replace("/opt/vllm", "/home/a/.venv"))
        for line in lines
    ]
    assert {diagnose(shape).id for shape in (lines, stamped, nested, newer)} == {kind}


@pytest.mark.parametrize("path", WHOLE_AND_WELL, ids=lambda path: path.name)
def test_a_healthy_start_is_never_called_a_failure_however_far_it_is(path: object) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")  # type: ignore[attr-defined]
    for end in range(0, len(lines), 7):
        assert diagnose(lines[:end]).id in ("none", "unknown"), end
    for begin in range(0, len(lines), 11):
        assert diagnose(lines[begin:]).id in ("none", "unknown"), begin
