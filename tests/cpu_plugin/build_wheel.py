"""Packs the test-only plugin as a wheel: a pure-Python wheel is a zip, so no build tool and no network are needed.

usage: build_wheel.py FOLDER     prints the wheel's path; the same source gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

NAME, VERSION = "vllm_cpu_spec_test", "0.20.1"
EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed times: the wheel's digest names the venv it goes into

METADATA = f"""\
Metadata-Version: 2.1
Name: vllm-cpu-spec-test
Version: {VERSION}
Summary: Test only: the pieces that vLLM {VERSION}'s CPU backend lacks for speculative decoding
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: build_wheel.py
Root-Is-Purelib: true
Tag: py3-none-any
"""
ENTRY_POINTS = """\
[vllm.general_plugins]
cpu_spec_test = vllm_cpu_spec_test:register
"""


def build(folder: Path) -> Path:
    """Write the wheel into ``folder`` and return its path."""
    info = f"{NAME}-{VERSION}.dist-info"
    source = Path(__file__).with_name(f"{NAME}.py").read_text(encoding="utf-8")
    files = {
        f"{NAME}.py": source,
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": ENTRY_POINTS,
    }
    rows = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, EPOCH), text)
    return path


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
