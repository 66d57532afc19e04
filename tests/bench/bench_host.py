"""What a run on a converged host costs, as a ratio to a playbook of one task over the same connection.

Run it as ``python tests/bench/bench_host.py``: it boots a test host, takes it to vLLM once, and measures on it. It
prints one JSON object, and fails when the ratio is over the limit. Needs root and tests/lab/setup.sh.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab" / "lab.sh"
HOST = "bench"
LIMIT = 3.0
ROUNDS = 5

ONE_TASK = """\
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.ping:
"""


def play(inventory: Path, playbook: str | Path, changes: bool = False) -> float:
    """Run a playbook and return its wall clock in seconds.

    Raises:
        SystemExit: it failed, or changed something although ``changes`` says that it must not.
    """
    since = time.monotonic()
    done = subprocess.run(
        ["ansible-playbook", "-i", inventory, playbook],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections")},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - since
    if done.returncode:
        raise SystemExit(f"{playbook} failed:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    if not changes and "changed=0" not in done.stdout:
        raise SystemExit(f"a run on a converged host changed something:\n{done.stdout[-4000:]}")
    return seconds


def main() -> int:
    """Boot, converge, measure, judge."""
    address = subprocess.run([LAB, "address", HOST], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder, "inventory")
        inventory.mkdir()
        (inventory / "group_vars").symlink_to(ROOT / "inventory" / "demo" / "group_vars")
        hosts = {"all": {"hosts": {HOST: {"ansible_host": address}}, "vars": {"firstlight_checkout": str(ROOT)}}}
        (inventory / "hosts.json").write_text(json.dumps(hosts))
        one_task = Path(folder, "one-task.yml")
        one_task.write_text(ONE_TASK)
        subprocess.run([LAB, "up", HOST], check=True, stdout=sys.stderr)
        try:
            first = play(inventory, "site.yml", changes=True)
            # one after the other in turns: whatever else this machine does meets both
            pairs = [(play(inventory, one_task), play(inventory, "site.yml")) for _ in range(ROUNDS)]
        finally:
            subprocess.run([LAB, "down", HOST], check=False)
    single, converged = (statistics.median(column) for column in zip(*pairs, strict=True))
    figures = {
        "first_run_s": round(first, 1),
        "one_task_s": round(single, 3),
        "converged_run_s": round(converged, 3),
        "ratio": round(converged / single, 2),
        "limit": LIMIT,
    }
    print(json.dumps(figures, indent=1))
    return int(converged / single > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
