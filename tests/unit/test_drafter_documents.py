"""What the documents promise of drafters: every problem is listed, little is read, and fuzzing finds nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import safetensors_header
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_weights import read_weights
from support_drafters import ROOT, plain_layout, published_row, write_weights

UTILS = ROOT / "plugins" / "module_utils"
RAISED = re.compile(
    r'(?:_refuse\(|Problem\(|kind=|_list\(|_RefusedError\(|read_json\([^"]*|b"[^"]*",)\s*"([a-z0-9-]{4,})"'
)


def test_every_kind_of_problem_is_documented() -> None:
    files = [*UTILS.glob("drafter_*.py"), UTILS / "safetensors_header.py"]
    raised = {kind for file in files for kind in RAISED.findall(file.read_text())} - {"bad-marker"}
    documented = set(re.findall(r"`([a-z0-9-]+)`", (ROOT / "docs" / "drafters.md").read_text()))
    assert len(raised) > 60
    assert raised <= documented


def test_of_a_drafter_of_gigabytes_less_than_a_megabyte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_weights(tmp_path / "x.safetensors", plain_layout(published_row("Qwen3.6-27B-DFlash")))
    assert path.stat().st_size > 3.4e9
    read = []
    original = os.read

    def counting(descriptor: int, count: int) -> bytes:
        part = original(descriptor, count)
        read.append(len(part))
        return part

    monkeypatch.setattr(safetensors_header.os, "read", counting)
    weights = read_weights(str(path))
    assert sum(read) == weights.bytes_read < 10_000


def test_a_second_of_fuzzing_finds_nothing() -> None:
    script = ROOT / "tests" / "fuzz" / "fuzz_safetensors_header.py"
    done = subprocess.run([sys.executable, str(script), "1", "20260509"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["inputs"] > 20


@pytest.mark.slow
def test_the_benchmark_keeps_its_limits() -> None:
    script = ROOT / "tests" / "bench" / "bench_inspect.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
