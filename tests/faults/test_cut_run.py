"""The run itself is cut off, or the host goes away: what is left must serve, and a re-run must converge."""

from __future__ import annotations

from faultlab import NEW, OLD, Lab, OnHost


def watch_phase(phase: str) -> OnHost:
    watcher = OnHost("python3", "/srv/faults/phase.py", phase)
    assert watcher.line() == "waiting"
    return watcher


def test_the_network_is_cut_for_30_s_while_the_model_loads(lab: Lab) -> None:
    lab.require(NEW)
    variables = {"hold": "loading:32"}
    cut = OnHost("python3", "/srv/faults/cut.py", "loading", "30")
    assert cut.line() == "waiting"
    run = lab.start("site", variables)
    assert cut.line() == "cut"
    assert cut.line() == "back"
    run.wait()
    assert run.ok, run.text
    assert "the start goes on there" in run.text
    lab.check(NEW)
    assert lab.converges(variables=variables).changed == 0
    lab.serving = ""  # with another environment than the other tests begin with


def test_the_network_is_cut_for_30_s_in_the_smoke_test(lab: Lab) -> None:
    lab.require(OLD)
    cut = OnHost("python3", "/srv/faults/cut.py", "serving", "30")
    assert cut.line() == "waiting"
    run = lab.start("site")
    assert cut.line() == "cut"
    run.wait()
    assert not run.ok
    assert run.failures[-1].unreachable, run.text
    assert cut.line() == "back"
    seen = lab.look()
    assert seen["answer"], seen
    lab.converges()


def test_the_controller_is_killed_after_the_stop(lab: Lab) -> None:
    lab.require(OLD)
    watcher = watch_phase("stopped")
    run = lab.start("site")
    watcher.line()
    run.kill()
    seen = lab.look()
    assert seen["phase"] == "stopped", seen
    assert seen["units"][OLD]["ActiveState"] == "inactive", seen
    assert seen["units"][OLD]["UnitFileState"] == "enabled", seen
    assert seen["units"][NEW]["InvocationID"] == "", seen  # it was never started
    lab.converges()


def test_the_controller_is_killed_and_nobody_runs_it_again(lab: Lab) -> None:
    lab.require(NEW)
    release = lab.look()["release"]
    watcher = watch_phase("stopped")
    run = lab.start("site", {"hold": "loading:1", "sglang_stop_guard_s": 6})
    stopped_s = float(watcher.line().split()[1])
    run.kill()
    back = OnHost("python3", "/srv/faults/phase.py", "restored", "any")
    assert back.line() == "waiting"
    lab.figure(f"guard of 6 s: served again {float(back.line().split()[1]) - stopped_s:.1f} s after the stop")
    assert lab.check(NEW)["release"] == release
    assert lab.converges().changed == 0


def test_power_is_lost_after_the_stop(lab: Lab) -> None:
    lab.require(OLD)
    watcher = watch_phase("stopped")
    run = lab.start("site")
    watcher.line()
    lab.power_loss()
    run.wait()
    assert not run.ok, run.text
    lab.until(lambda seen: seen["answer"] and not seen["guard"])
    lab.check(OLD)
    lab.converges()


def test_power_is_lost_while_the_new_server_loads(lab: Lab) -> None:
    lab.require(NEW)
    release = lab.look()["release"]
    watcher = watch_phase("stopped")
    milestone = OnHost("python3", "/srv/faults/pounce.py", "loading", "none")
    assert milestone.line() == "waiting"
    run = lab.start("site", {"hold": "loading:60"})
    watcher.line()
    milestone.line()
    lab.power_loss()
    run.wait()
    assert not run.ok, run.text
    lab.until(lambda seen: seen["answer"] and not seen["guard"])
    assert lab.check(NEW)["release"] == release
    assert lab.converges().changed == 0
