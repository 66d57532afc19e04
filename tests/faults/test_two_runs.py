"""Two runs against one host: the second is refused while the first lives, and takes over at once when it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faultlab import NEW, Lab, Run, pounce

LOOK = "Read the host and judge it"
CLAIM = "/var/lib/firstlight/vllm/run.json"


def loading(lab: Lab, seconds: int) -> Run:
    """A run whose new server loads by now, for that many seconds."""
    milestone = pounce("loading", "none")
    run = lab.start("site", {"hold": f"loading:{seconds}"})
    milestone.line()
    return run


def claim(lab: Lab, **changes: object) -> dict[str, object]:
    """The claim on the host, after changes to it; empty where there is none."""
    text = lab.exec("cat", CLAIM, check=False)
    told: dict[str, object] = json.loads(text) if text else {}
    if changes:
        told.update(changes)
        lab.exec("sh", "-c", f"cat > {CLAIM} <<'END'\n{json.dumps(told)}\nEND")
    return told


def gives_way(lab: Lab, playbook: str = "site") -> dict[str, Any]:
    """A run that was cut off keeps the next one from nothing, and leaves nothing; returns what the host is then."""
    run = lab.play(playbook)
    assert run.ok, run.text
    seen = lab.check(NEW)
    assert claim(lab) == {}
    return seen


def test_a_second_run_and_a_way_back_are_refused_and_the_first_run_ends_well(lab: Lab) -> None:
    lab.require(NEW)
    first = loading(lab, 60)
    before = lab.look()
    for playbook, task in (("site", LOOK), ("rollback", "Bring the old server back on request"), ("prune", "Remove")):
        second = lab.play(playbook)
        failure = second.failures[0]
        assert not second.ok
        assert task in failure.task, second.text
        assert failure.id == "run-in-progress", second.text
        assert f"(pid {first.process.pid}) began it at" in failure.message
        assert "for vllm.service" in failure.message
        assert second.changed == 0
    look = lab.play("preflight")
    assert look.ok, look.text
    assert "another run is at work" in " ".join(look.text.split())  # Ansible breaks lines
    after = lab.look()
    assert (after["phase"], after["release"]) == (before["phase"], before["release"])
    first.wait()
    assert first.ok, first.text
    lab.check(NEW)
    assert claim(lab) == {}
    lab.serving = ""  # with another environment than the other tests begin with


def test_a_run_that_was_killed_gives_way_at_once(lab: Lab) -> None:
    lab.require(NEW)
    first = loading(lab, 30)
    first.kill()
    assert claim(lab)["run"]["pid"] == first.process.pid  # type: ignore[index]
    gives_way(lab)


def test_a_way_back_after_a_killed_run_does_not_wait(lab: Lab) -> None:
    lab.require(NEW)
    release = lab.look()["release"]
    first = loading(lab, 30)
    first.kill()
    assert gives_way(lab, "rollback")["release"] == release


@pytest.mark.parametrize("why", ["silent", "rebooted"])
def test_a_run_of_another_machine_gives_way_when_it_is_silent_or_the_host_was_booted(lab: Lab, why: str) -> None:
    lab.require(NEW)
    first = loading(lab, 1)
    first.kill()
    told = claim(lab)
    # as if it had been another machine's: nothing tells whether that run still lives
    claim(lab, run={**told["run"], "controller": "elsewhere"})  # type: ignore[dict-item]
    second = lab.play("site")
    assert second.failures[0].id == "run-in-progress", second.text
    claim(lab, **({"seen_s": 0} if why == "silent" else {"boot_id": "another"}))
    gives_way(lab)


def test_a_run_whose_place_was_taken_changes_nothing_more(lab: Lab) -> None:
    lab.require(NEW)
    first = loading(lab, 20)
    claim(lab, run={"id": "another", "who": "somebody", "controller": "", "pid": 0, "ticks": 0})
    first.wait()
    assert not first.ok
    assert {failure.id for failure in first.failures} == {"run-taken-over"}, first.text
    seen = lab.look()
    assert seen["phase"] == "stopped", seen  # neither committed nor restored by the run that lost its place
    claim(lab, seen_s=0)
    lab.serving = ""
    lab.converges()
