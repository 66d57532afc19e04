"""Proves a deployment on a GPU machine that has no network and no systemd of its own. Runs there, as root.

    host.py prepare PARTS...   join and unpack what pack.py made, make the environment, boot systemd
    host.py start NAMES...     start scenarios in the background (they outlive this command)
    host.py wait SECONDS       wait for them, then collect their records and journals into $OUT
    host.py collect            only collect

What the roles place is what the roles place: the play is the project's own `site.yml` over a local connection, in
the namespaces of the systemd that `boot.sh` booted. Only the packages are laid down by hand, since the machine's own
PyTorch serves and no index is in reach; the environment has the very name that the role `vllm_install` computes,
which then finds it whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import HOME, OUT, REPO, START, inside, journal, prepare, refresh_repo, run, say
from scenarios import scenario


def start(names: list[str]) -> None:
    """Start scenarios as processes of their own session."""
    refresh_repo()
    (HOME / "running").mkdir(exist_ok=True)
    for name in names:
        # one that an earlier command left would go on deploying the same unit
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int((HOME / "running" / name).read_text()), signal.SIGKILL)
        (OUT / f"{name}.json").unlink(missing_ok=True)
        log = (OUT / f"{name}.scenario.log").open("w")
        argv = [sys.executable, str(REPO / "tests/gpu/host.py"), "scenario", name]
        child = subprocess.Popen(
            argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        (HOME / "running" / name).write_text(str(child.pid))


def records() -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of what was started."""
    for path in sorted((HOME / "running").iterdir()):
        with contextlib.suppress(OSError, ValueError):
            yield path.name, json.loads((OUT / f"{path.name}.json").read_text())


def wait(limit_s: float, names: list[str]) -> None:
    """Wait until the scenarios named (or all) have ended, telling what is new."""
    told: dict[str, int] = {}
    while time.time() - START < limit_s:
        now = dict(records())
        for name, content in now.items():
            if len(content) != told.get(name):
                told[name] = len(content)
                last = list(content)[-1] if list(content)[-1] != "last_s" else list(content)[-2]
                say(name, ":", last, json.dumps(content[last], default=str)[:260])
        if all(now.get(name, {}).get("ended") for name in (names or list(now))):
            break
        time.sleep(1)
    collect()


def collect() -> None:
    """Journals, records and plays into $OUT, in few files."""
    listed = run(inside(["systemctl", "list-unit-files", "fl-*.service", "--no-legend"])).stdout
    for line in listed.splitlines():
        journal(line.split()[0].removesuffix(".service"))
    out = os.environ.get("OUT")
    if out:
        subprocess.run(
            ["tar", "-C", OUT, "-cJf", f"{out}/proof.tar.xz", "."], check=False, env={**os.environ, "XZ_OPT": "-1 -T8"}
        )
        for name, content in records():
            (Path(out) / "summary.txt").open("a").write(f"{name} {json.dumps(content, default=str)[:3000]}\n\n")
        print(Path(out, "proof.tar.xz").stat().st_size, "bytes")


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "prepare":
        prepare(rest)
    elif verb == "start":
        start(rest)
    elif verb == "scenario":
        scenario(rest[0])
    elif verb == "wait":
        wait(float(rest[0]), rest[1:])
    else:
        collect()
