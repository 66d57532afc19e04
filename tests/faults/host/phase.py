"""Waits until a cutover that begins from now on has come to a phase, and says so.

usage: phase.py PHASE [any]     prints "waiting", then "PHASE TIME"; with ``any``, an earlier cutover will do
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

RECORD = Path("/var/lib/firstlight/vllm/cutover.json")
LIMIT_S = 150.0


def main() -> None:
    """Wait, tell."""
    began = time.time()
    since = 0.0 if "any" in sys.argv[2:] else began
    print("waiting", flush=True)
    while time.time() < began + LIMIT_S:
        with contextlib.suppress(FileNotFoundError):
            record = json.loads(RECORD.read_text("utf-8"))
            if record["phase"] == sys.argv[1] and record["created_s"] >= since:
                print(record["phase"], time.time(), flush=True)
                return
        time.sleep(0.01)
    sys.exit(f"no cutover was {sys.argv[1]} within {LIMIT_S:g} s")


if __name__ == "__main__":
    main()
