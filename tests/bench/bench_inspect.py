"""How long the inspection of a drafter takes and how much of it is read: 3.46 GB against 0.9 MB.

Run it as ``python tests/bench/bench_inspect.py``; it prints one JSON object, and fails when a limit is broken.
The big file is one with a real header and a hole for data; nothing of the data is ever read.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / ".collections"), str(TESTS / "unit")]

from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_deploy import Job, inspect  # noqa: E402
from support_drafters import (  # noqa: E402
    DATA,
    QWEN36_27B,
    families,
    plain_layout,
    published_row,
    write_target,
    write_weights,
)

MOST_MS = 50
MOST_BYTES = 1_000_000
ROUNDS = 30


def bytes_read_so_far() -> int:
    """What this process has read by system calls, in bytes, as the kernel counts it."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def measure(job: Job) -> dict[str, Any]:
    """Inspect the same drafter again and again."""
    first = bytes_read_so_far()
    before = bytes_read_so_far()
    overhead = before - first
    plan = inspect(job)
    read = bytes_read_so_far() - before - overhead
    if not plan.report.usable:
        raise SystemExit(f"not usable: {plan.report.problems}")
    walls, processors = [], []
    for _ in range(ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        inspect(job)
        walls.append((time.perf_counter() - wall) * 1000)
        processors.append((time.process_time() - processor) * 1000)
    return {
        "file_mb": round(Path(job.path).stat().st_size / 1e6, 1),
        "read_kb": round(read / 1000, 1),
        "median_ms": round(statistics.median(walls), 2),
        "slowest_ms": round(max(walls), 2),
        "cpu_ms": round(statistics.median(processors), 2),
    }


def main() -> int:
    """Measure, print, judge."""
    rows = families()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        big = write_weights(folder / "d" / "dflash.safetensors", plain_layout(published_row("Qwen3.6-27B-DFlash")))
        target = write_target(folder / "Qwen3.6-27B", QWEN36_27B)
        tiny = DATA / "tiny"
        result: dict[str, Any] = {
            "big": measure(Job(str(big), str(target), str(folder / "o"), families=rows)),
            "small": measure(
                Job(
                    str(tiny / "drafter-qwen3" / "drafter-step-300.safetensors"),
                    str(tiny / "tiny-qwen3"),
                    str(folder / "p"),
                    user={"mask_token_id": 5, "block_size": 16},
                    families=rows,
                )
            ),
        }
    result["ratio_big_to_small"] = round(result["big"]["median_ms"] / result["small"]["median_ms"], 2)
    kept = all(
        figures["median_ms"] <= MOST_MS and figures["read_kb"] * 1000 <= MOST_BYTES
        for figures in (result["big"], result["small"])
    )
    result["limits"] = {"median_ms": MOST_MS, "read_kb": MOST_BYTES / 1000, "kept": kept}
    print(json.dumps(result))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
