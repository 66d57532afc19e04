"""Each molecule scenario is one test: real systemd hosts, the real job, the whole sequence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab" / "lab.sh"
MOLECULE = ROOT / "extensions" / "molecule"
SCENARIOS = sorted(path.parent.name for path in MOLECULE.glob("*/molecule.yml"))
LIMIT_S = 1800.0


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_passes(scenario: str, tmp_path: Path) -> None:
    log = tmp_path / f"{scenario}.log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.update(NO_COLOR="1", ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"), ANSIBLE_FORCE_COLOR="0")
    # destroy=never: after a failure the hosts are still there to be asked what happened
    argv = ["molecule", "test", "--scenario-name", scenario, "--destroy", "never"]
    # what an earlier run left behind would have molecule take the hosts for made
    subprocess.run(["molecule", "reset", "--scenario-name", scenario], cwd=ROOT, env=environment, check=True)
    for host in hosts_of(scenario):
        subprocess.run([LAB, "down", host], check=True, capture_output=True)
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                argv,
                cwd=ROOT,  # only beside galaxy.yml does molecule find the scenarios' common config.yml
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=LIMIT_S,
                check=False,
            )
            failed = f"ended with status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = f"was not done after {LIMIT_S:.0f} s"
    hosts = hosts_of(scenario)
    journals = "".join(journal(host) for host in hosts) if failed else ""
    for host in hosts:
        subprocess.run([LAB, "down", host], check=False, capture_output=True)
    assert not failed, f"{scenario} {failed}\n{tail(log.read_text(errors='replace'), 80)}\n{journals}"


def hosts_of(scenario: str) -> list[str]:
    """Names of the test hosts that stand now; the scenarios run one after the other, so they are this one's."""
    listed = subprocess.run([LAB, "list"], check=False, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[0].removeprefix("firstlight-") for line in listed if line.strip()}
    inventory = (MOLECULE / scenario / "inventory" / "hosts.yml").read_text()
    return sorted(name for name in names if f" {name}:" in inventory)


def journal(host: str) -> str:
    done = subprocess.run([LAB, "journal", host], check=False, capture_output=True, text=True)
    return f"--- journal of {host}\n{tail(done.stdout, 150)}\n"


def tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])
