"""One run at a time on a host: who is refused, who takes over, and that nothing is left to clean away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import run_claim
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore, OldServer, Record
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import (
    ENVIRONMENT,
    SILENCE_S,
    Claims,
    begun,
    busy,
    claimed,
    end_claim,
    seen,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import Run

ROOT = Path(__file__).resolve().parents[2]
ALICE = Run("a" * 16, "alice@laptop (pid 11)")
CI = Run("c" * 16, "ci@runner-7 (pid 22)")
ONE_STEP = """\
import sys, time
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import claimed
from pathlib import Path
with claimed("vllm", Path(sys.argv[1]), check=False, what="a test"):
    print("claimed", flush=True)
    time.sleep(60)
"""
RACE = """\
import sys, time
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import Claims
from ansible_collections.firstlight.vllm.plugins.module_utils.run_identity import Run
from pathlib import Path
print("ready", flush=True)
sys.stdin.readline()
Claims("vllm", Path(sys.argv[1])).take(Run(sys.argv[2]))
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    return tmp_path / "var"


def claims(state: Path, unit: str = "vllm", between_s: float = 0.2) -> Claims:
    return Claims(unit, state, between_s=between_s)


def silent(state: Path, seconds: float, **more: Any) -> None:
    """Have the claim's run be silent for a while."""
    path = state / "vllm" / "run.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "seen_s": time.clock_gettime(time.CLOCK_BOOTTIME) - seconds, **more}))


def started(program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / ".collections")])
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def refused(state: Path, run: Run = CI, unit: str = "vllm") -> FirstlightError:
    with pytest.raises(FirstlightError) as caught:
        claims(state, unit).take(run)
    return caught.value


def test_a_second_run_is_refused_and_told_who_when_and_which_unit(state: Path) -> None:
    claims(state).take(ALICE)
    before = (state / "vllm" / "run.json").read_bytes()
    error = refused(state)
    assert error.kind == "run-in-progress"
    assert "alice@laptop (pid 11) began it at 20" in error.message
    assert "UTC for vllm.service, its last step was 0 s ago. Nothing was changed." in error.message
    assert "Fix: Wait until it has ended" in error.message
    assert (state / "vllm" / "run.json").read_bytes() == before
    assert (state / "vllm" / "run.json").stat().st_mode & 0o777 == 0o600


def test_a_run_for_another_unit_of_the_same_host_is_refused_too(state: Path) -> None:
    claims(state).take(ALICE)
    assert "for vllm.service" in refused(state, unit="other").message


def test_one_run_may_have_several_units_and_take_its_own_claim_again(state: Path) -> None:
    claims(state).take(ALICE)
    claims(state).take(ALICE)
    claims(state, "other").take(ALICE)
    claims(state).renew(ALICE.id)
    claims(state, "other").renew(ALICE.id)


def test_the_end_of_a_run_leaves_the_host_to_the_next(state: Path) -> None:
    claims(state).take(ALICE)
    claims(state).drop(CI.id)  # not its own
    refused(state)
    claims(state).drop(ALICE.id)
    claims(state).take(CI)
    assert not (state / "other").exists()


def test_a_run_that_is_silent_for_long_gives_way_and_learns_it_at_its_next_step(state: Path) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S - 5)
    refused(state)
    silent(state, SILENCE_S + 1)
    claims(state, "other").take(CI)
    with pytest.raises(FirstlightError, match=r"another one took its place: ci@runner-7 \(pid 22\) began") as caught:
        claims(state).renew(ALICE.id)
    assert caught.value.kind == "run-taken-over"
    claims(state, "other").renew(CI.id)


def test_a_silent_run_that_nobody_replaced_goes_on(state: Path) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S * 100)
    claims(state).renew(ALICE.id)
    refused(state)


def test_a_program_of_the_run_on_the_host_is_a_sign_of_life_however_long_it_takes(state: Path) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S * 100)
    program = started("import sys; print('up', flush=True); sys.stdin.readline()", **{ENVIRONMENT: ALICE.id})
    try:
        assert program.stdout is not None
        program.stdout.readline()
        assert refused(state).kind == "run-in-progress"
    finally:
        program.kill()
        program.communicate()
    claims(state).take(CI)


def test_a_silent_run_is_given_the_time_between_two_of_its_programs(state: Path) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S + 1)
    timer = threading.Timer(0.3, lambda: silent(state, 0))
    timer.start()
    with pytest.raises(FirstlightError, match="alice"):
        claims(state, between_s=5).take(CI)
    timer.join()


def test_a_reboot_ends_every_run(state: Path) -> None:
    claims(state).take(ALICE)
    silent(state, 0, boot_id="another boot")
    claims(state).take(CI)


def test_a_run_whose_controller_is_known_to_be_gone_gives_way_at_once(state: Path) -> None:
    claims(state).take(ALICE)
    claims(state).take(CI, [ALICE.id])
    claims(state).renew(CI.id)


def test_a_claim_that_nobody_can_read_keeps_nobody_away(state: Path) -> None:
    for text in ("", "{", "[]", '{"run": 1}', '{"run": {"id": "x"}}', '{"run": {"pid": "x"}}'):
        (state / "vllm").mkdir(parents=True, exist_ok=True)
        (state / "vllm" / "run.json").write_text(text)
        claims(state).take(CI)
        claims(state).drop(CI.id)


def test_a_step_without_a_run_is_one_and_leaves_nothing_even_when_killed(state: Path) -> None:
    step = started(ONE_STEP, str(state))
    assert step.stdout is not None
    assert step.stdout.readline() == "claimed\n"
    error = refused(state)
    assert "`a test` began it" in error.message
    assert "last step" not in error.what
    step.send_signal(signal.SIGKILL)
    step.communicate()
    claims(state).take(CI)


def test_of_many_runs_at_once_exactly_one_gets_the_host(state: Path) -> None:
    runs = [started(RACE, str(state), f"run-{number}") for number in range(4)]
    for each in runs:
        assert each.stdout is not None
        each.stdout.readline()
    for each in runs:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    ends = [each.communicate()[1] for each in runs]
    assert sorted("run-in-progress" in text or "another run is at work" in text for text in ends) == [
        False, True, True, True,
    ]  # fmt: skip
    assert [each.returncode for each in runs].count(0) == 1


def test_a_step_belongs_to_the_run_that_its_environment_names(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims(state).take(ALICE)
    with pytest.raises(FirstlightError, match="alice"), claimed("vllm", state, check=False, what="a test"):
        raise AssertionError
    monkeypatch.setenv(ENVIRONMENT, ALICE.id)
    with claimed("vllm", state, check=False):
        pass
    refused(state)
    with claimed("vllm", state, check=False, last=True):
        pass
    monkeypatch.delenv(ENVIRONMENT)
    with claimed("vllm", state, check=False, what="a test", run=asdict(CI)):
        assert "ci@runner-7" in refused(state, ALICE).message
    claims(state).take(ALICE)


def test_the_last_step_ends_the_run_though_it_fails(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims(state).take(ALICE)
    monkeypatch.setenv(ENVIRONMENT, ALICE.id)
    with pytest.raises(OSError, match="disk"), claimed("vllm", state, check=False, last=True):
        raise OSError("disk")
    claims(state).take(CI)


def test_check_mode_claims_nothing_and_writes_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "")
    with claimed("vllm", state, check=True):
        assert busy("vllm", state) == []
    assert not state.exists()
    claims(state).take(ALICE)
    before = sorted((path, path.stat().st_mtime_ns) for path in state.rglob("*"))
    (problem,) = busy("vllm", state)
    assert (problem.id, problem.severity) == ("run-in-progress", "warning")
    with claimed("vllm", state, check=True):
        pass
    assert sorted((path, path.stat().st_mtime_ns) for path in state.rglob("*")) == before


def test_a_beginning_that_fails_leaves_no_claim(state: Path) -> None:
    with pytest.raises(OSError, match="nvidia"), begun("vllm", state, asdict(ALICE), []):
        raise OSError("nvidia-smi")
    with begun("vllm", state, asdict(CI), []) as claim:
        assert claim == CI.id
    assert "ci@runner-7" in refused(state, ALICE).message
    with begun("vllm", state, {}, []) as claim:  # no beginning: a look that claims nothing
        assert claim == ""


@pytest.mark.parametrize("end", ["committed", "restored"])
def test_a_run_ends_with_its_last_change_and_not_before_its_cutover(
    state: Path, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    store = CutoverStore("vllm", state)
    monkeypatch.setenv(ENVIRONMENT, ALICE.id)
    claims(state).take(ALICE)
    store.save(Record(OldServer("none"), "stopped"))
    end_claim("vllm", state)
    refused(state)
    store.advance(end)
    end_claim("vllm", state)
    claims(state).take(CI)


def test_what_is_told_to_the_controller_is_enough_to_know_the_run(state: Path) -> None:
    run = replace(ALICE, controller="boot pid:[1]", pid=11, ticks=5)
    claims(state).take(run)
    assert refused(state).as_dict()["holder"] == asdict(run)  # type: ignore[comparison-overlap]


def test_the_clock_of_the_host_may_be_set_without_an_effect(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims(state).take(ALICE)
    monkeypatch.setattr(run_claim.time, "time", lambda: 0.0)
    refused(state)


def test_each_program_of_a_run_is_a_step_when_it_ends(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S - 1)
    monkeypatch.setenv(ENVIRONMENT, ALICE.id)
    seen(state)
    told = json.loads((state / "vllm" / "run.json").read_text())
    assert time.clock_gettime(time.CLOCK_BOOTTIME) - told["seen_s"] < 5
    monkeypatch.setenv(ENVIRONMENT, CI.id)
    silent(state, 60)
    seen(state)
    assert json.loads((state / "vllm" / "run.json").read_text())["seen_s"] < told["seen_s"], "it is not that run's"


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_claim, "write_atomically", full)


def test_a_full_disk_keeps_no_step_from_going_on(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims(state).take(ALICE)
    fill_the_disk(monkeypatch)
    monkeypatch.setenv(ENVIRONMENT, ALICE.id)
    with claimed("vllm", state, check=False):
        pass
    monkeypatch.setenv(ENVIRONMENT, CI.id)
    with pytest.raises(FirstlightError, match="another one took its place"), claimed("vllm", state, check=False):
        pass


def test_a_way_back_goes_on_where_no_claim_can_be_written_and_nothing_else_does(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_the_disk(monkeypatch)
    done = []
    with claimed("vllm", state, check=False, or_without=True):
        done.append(True)
    assert done
    with pytest.raises(OSError, match="No space"), claimed("vllm", state, check=False):
        pass


def test_a_run_that_is_one_program_lives_as_long_as_that_whatever_became_of_its_controller(state: Path) -> None:
    step = started(ONE_STEP, str(state))
    assert step.stdout is not None
    assert step.stdout.readline() == "claimed\n"
    run_id = json.loads((state / "vllm" / "run.json").read_text())["run"]["id"]
    try:
        with pytest.raises(FirstlightError, match="another run is at work"):
            claims(state).take(ALICE, gone=[run_id])
    finally:
        step.kill()
        step.wait()
    claims(state).take(ALICE, gone=[run_id])


@pytest.mark.parametrize("changes", [{"seen_s": None}, {"seen_s": "soon"}, {"pid": []}, {"run": 7}, {"unit": None}])
def test_a_claim_with_a_value_of_another_type_keeps_nobody_away(state: Path, changes: dict[str, Any]) -> None:
    claims(state).take(ALICE)
    silent(state, SILENCE_S + 1)
    path = state / "vllm" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    claims(state).take(CI)
    assert json.loads(path.read_text())["run"]["id"] == CI.id


def test_what_was_made_for_the_claim_alone_goes_with_it(state: Path) -> None:
    with claimed("mistyped", state, check=False):
        pass
    assert not (state / "mistyped").exists()
    (state / "vllm").mkdir()
    (state / "vllm" / "state.json").touch()
    with claimed("vllm", state, check=False):
        pass
    assert (state / "vllm" / "state.json").exists()
