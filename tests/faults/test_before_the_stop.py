"""What makes a run stop before anything was touched: the server in service does not notice."""

from __future__ import annotations

from faultlab import NEW, OLD, Lab, OnHost

STOP = "Record and stop the old server"
HOLD_PORT = (
    "import socket, time; s = socket.create_server(('127.0.0.1', {port})); print('held', flush=True); time.sleep(600)"
)


def test_the_unit_is_masked(lab: Lab) -> None:
    # the first test of all: there is no vllm.service yet, so that systemctl can mask it
    lab.require(OLD)
    before = lab.look()
    lab.exec("systemctl", "mask", "vllm.service")
    run = lab.play("site")
    failure = run.failures[0]
    assert not run.ok
    assert failure.id == "unit-masked", run.text
    assert "systemctl unmask vllm.service" in failure.message
    assert lab.check(OLD)["listeners"] == before["listeners"]
    lab.exec("systemctl", "unmask", "vllm.service")
    lab.converges()


def test_the_port_is_taken(lab: Lab) -> None:
    lab.require(NEW)
    before = lab.look()
    holder = OnHost("python3", "-c", HOLD_PORT.format(port=30001))
    try:
        assert holder.line() == "held"
        run = lab.play("site", {"vllm_server_port": 30001})
    finally:
        holder.close()
        lab.exec("pkill", "-f", "create_server", check=False)
    failure = run.failures[0]
    assert not run.ok
    assert STOP in failure.task, run.text
    assert failure.id == "foreign-holder", run.text
    assert "port 30001" in failure.message
    assert "create_server" in failure.message
    assert lab.check(NEW)["listeners"] == before["listeners"]
    assert lab.converges().changed <= 2


def test_a_stale_server_shares_the_port(lab: Lab) -> None:
    lab.require(NEW)
    before = lab.look()
    stale = lab.stale_server()
    try:
        run = lab.play("site", {"hold": "loading:1"})
    finally:
        lab.exec("kill", "-9", stale)
    failure = run.failures[0]
    assert not run.ok
    assert STOP in failure.task, run.text
    assert failure.id == "foreign-holder", run.text
    assert f"pid {stale}" in failure.message
    assert lab.check(NEW)["listeners"] == before["listeners"]
    assert lab.converges().changed == 0
