"""Waits until the stand-in passes a milestone, then cuts the host off its network for some seconds.

usage: cut.py MILESTONE SECONDS     prints "waiting", "cut" and "back"
"""

from __future__ import annotations

import subprocess
import sys
import time

from pounce import LIMIT_S, passed

RULES = (["INPUT", "-i", "eth0"], ["OUTPUT", "-o", "eth0"])


def main() -> None:
    """Wait, cut, mend."""
    milestone, seconds = sys.argv[1], float(sys.argv[2])
    began = time.time()
    print("waiting", flush=True)
    while not passed(milestone, began):
        if time.time() > began + LIMIT_S:
            sys.exit(f"nothing passed {milestone} within {LIMIT_S:g} s")
        time.sleep(0.02)
    for rule in RULES:
        subprocess.run(["iptables", "-I", *rule, "-j", "DROP"], check=True)
    print("cut", flush=True)
    time.sleep(seconds)
    for rule in RULES:
        subprocess.run(["iptables", "-D", *rule, "-j", "DROP"], check=True)
    print("back", flush=True)


if __name__ == "__main__":
    main()
