"""Test hosts for pytest: booting them, running playbooks and commands on them, looking at them from outside."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab" / "lab.sh"
CACHE = Path(os.environ.get("FIRSTLIGHT_LAB", "/var/cache/firstlight-lab"))


class Host:
    """One test host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = subprocess.run([LAB, "address", name], check=True, capture_output=True, text=True).stdout.strip()

    def boot(self) -> None:
        """Boot it anew."""
        subprocess.run([LAB, "boot", self.name], check=True)

    def restart(self) -> None:
        """Shut it down in order and boot it again, as it is."""
        for verb in ("stop", "start"):
            subprocess.run(
                ["podman", verb, f"firstlight-{self.name}"], check=True, capture_output=True, timeout=120,
                env={**os.environ, "CONTAINERS_CONF": str(CACHE / "containers.conf")},
            )  # fmt: skip

    def down(self) -> None:
        """Remove it."""
        subprocess.run([LAB, "down", self.name], check=False)

    def run(self, *argv: str, given: str | None = None, check: bool = True) -> str:
        """Output of a command on it."""
        interactive = ["-i"] if given is not None else []
        done = subprocess.run(
            ["podman", "exec", *interactive, f"firstlight-{self.name}", *argv],
            input=given, capture_output=True, text=True, errors="replace", check=False,
            env={**os.environ, "CONTAINERS_CONF": str(CACHE / "containers.conf")},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout + (done.stderr if not check else "")

    def shell(self, script: str, *, check: bool = True) -> str:
        """Output of a shell script on it."""
        return self.run("bash", "-c", script, check=check)

    def put(self, source: Path, target: str) -> None:
        """Copy a file or folder to it."""
        subprocess.run(
            ["podman", "cp", str(source), f"firstlight-{self.name}:{target}"], check=True,
            env={**os.environ, "CONTAINERS_CONF": str(CACHE / "containers.conf")},
        )  # fmt: skip

    def inventory(self, folder: Path, **variables: Any) -> Path:
        """Write an inventory of this host alone."""
        values = {
            "ansible_host": self.address,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(CACHE / "id_lab"),
            "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
            " -o ControlPath=none",  # a host booted anew must not meet a connection to the one before
            **variables,
        }
        path = folder / f"{self.name}.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": {self.name: values}}}))
        return path


def playbook(name: str, inventory: Path, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run one of the playbooks; ``variables`` go with ``-e``."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    argv = ["ansible-playbook", "-i", str(inventory), str(ROOT / "playbooks" / f"{name}.yml"), *options]
    extra = ["-e", json.dumps(variables)] if variables else []
    return subprocess.run([*argv, *extra], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """That a run passed; returns the number of changed tasks of its one host."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    recap = done.stdout[done.stdout.rindex("changed=") :]
    return int(recap.partition("=")[2].split()[0])


def wait_for(host: Host, script: str, seconds: float = 30.0) -> None:
    """Until a shell script on the host succeeds."""
    deadline = time.monotonic() + seconds
    while True:
        if "yes" in host.shell(f"({script}) >/dev/null 2>&1 && echo yes || echo no"):
            return
        assert time.monotonic() < deadline, f"{script}: not within {seconds} s\n{host.shell('journalctl -n 50')}"
        time.sleep(0.3)


def outside(host: Host, target: str, port: int, requests: Sequence[Sequence[Any]] = (), **wanted: bool) -> Any:
    """What ``outsider.py`` sees of ``target`` from ``host``."""
    given = json.dumps({"requests": list(requests), **wanted})
    return json.loads(host.run("python3", "/opt/outsider.py", target, str(port), given=given))
