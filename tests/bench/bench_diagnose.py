"""How long `firstlight diagnose` takes on a thousand logs, and on one big one.

Run it as ``python tests/bench/bench_diagnose.py``; it prints one JSON object, and fails when a limit is broken.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
REPOSITORY = DATA.parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / ".collections")]

from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.log_lines import read_lines  # noqa: E402

FILES = 1000
BIG_MIB = 64
MOST_CPU_S = 10.0


def seconds_for(paths: list[Path]) -> dict[str, float]:
    """Seconds to diagnose files one after the other, by the wall clock and of the processor."""
    wall, processor = time.perf_counter(), time.process_time()
    for path in paths:
        with path.open("rb") as stream:
            diagnose(read_lines(stream))
    return {"wall": round(time.perf_counter() - wall, 3), "cpu": round(time.process_time() - processor, 3)}


def main() -> int:
    """Measure, print, judge."""
    short = sorted((DATA / "failures").glob("*.log"))
    whole = sorted((DATA / "logs").glob("**/*.log"))
    thousand_short = (short * (FILES // len(short) + 1))[:FILES]
    thousand_whole = (whole * (FILES // len(whole) + 1))[:FILES]
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder, "big.log")
        text = (DATA / "logs" / "gpu-0.20.1-27b-dummy-dies-under-load.log").read_bytes()
        big.write_bytes(text * (BIG_MIB * 1024 * 1024 // len(text)))
        big_seconds = seconds_for([big])
    short_s, whole_s = seconds_for(thousand_short), seconds_for(thousand_whole)
    result = {
        "excerpts_1000_s": short_s,
        "whole_logs_1000_s": whole_s,
        "whole_logs_mib": round(sum(path.stat().st_size for path in thousand_whole) / 2**20, 1),
        "big_log_mib": BIG_MIB,
        "big_log_s": big_seconds,
    }
    print(json.dumps(result))
    return 0 if max(short_s["cpu"], whole_s["cpu"]) <= MOST_CPU_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
