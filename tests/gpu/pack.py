#!/usr/bin/env python3
"""Packs what a GPU machine without a network needs for the proof, in parts that a narrow door lets through.

    pack.py --uv UV [--provided FILE] [--part-mb 49] [--out .gpu]

Makes OUT/<n>/part-<n> and OUT/SHA256SUMS. FILE names the packages that the machine already has, one a line; PyTorch and
what belongs to it should be among them. Needs uv, apt-get (Debian 12), dpkg and xz, and registries in reach.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from fatbin import keep_only

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "roles/vllm_install/files/locks/cuda-0.20.1.txt"
# vLLM imports these on demand only, for other GPUs, quantised models or other backends than the ones proven here
ON_DEMAND = {
    "flashinfer-python", "flashinfer-cubin", "tilelang", "z3-solver", "cuda-python", "cuda-tile", "cuda-toolkit",
    "nvidia-cudnn-frontend",
}  # fmt: skip
# of NVIDIA's packages, the machine's PyTorch brings all but what flash-attn 4 is written in
CUTLASS = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")
SOURCE_ONLY = "flash-attn"
# the headers of deep_gemm, tokenizers of other vendors and translations serve no start
LEFT_OUT = ("vllm/third_party/deep_gemm/include", "mistral_common/data", "pycountry/locales", "bin")
# its only code is for compute capability 8.0, so that Hopper's driver compiles it when it is first used
FLASH_ATTENTION_2 = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
SYSTEMD = """
systemd libsystemd-shared libsystemd0 libcap2 libapparmor1 libaudit1 libcap-ng0 libblkid1 libuuid1 libcryptsetup12
libargon2-1 libdevmapper1.02.1 libjson-c5 libudev1 libfdisk1 libgcrypt20 libgpg-error0 libkmod2 liblz4-1 liblzma5
libmount1 libselinux1 libpcre2-8-0 libp11-kit0 libffi8 libpam0g libseccomp2 libssl3 libzstd1 libacl1 libip4tc2
libcrypt1 libbz2-1.0 libsmartcols1 libtinfo6 zlib1g mount dbus dbus-daemon dbus-bin dbus-system-bus-common
dbus-session-bus-common libdbus-1-3 libexpat1
"""


def pins(lock: str) -> Iterator[tuple[str, str]]:
    """Name and text of each requirement of the lock."""
    for block in re.split(r"\n(?=[a-z0-9])", lock):
        if match := re.match(r"[a-z0-9][a-z0-9._-]*", block):
            yield match.group(), block


def packages(into: Path, uv: str, lock: str, *options: str) -> None:
    """Install requirements into a folder, for the machine's Python and none of ours."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(lock)
        listed.flush()
        target = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35", "--only-binary", ":all:"]
        subprocess.run(
            [uv, "pip", "install", "--target", into, *target, *options, "--link-mode", "copy", "-r", listed.name],
            check=True,
        )


def site(into: Path, uv: str, provided: set[str]) -> None:
    """vLLM and what the machine lacks of its lock, with the code for one GPU only."""
    left = provided | ON_DEMAND | {SOURCE_ONLY}
    chosen = [
        text
        for name, text in pins(LOCK.read_text())
        if name not in left and (name in CUTLASS or not name.startswith("nvidia-"))
    ]
    packages(into, uv, "\n".join(chosen) + "\n", "--no-deps")  # the lock is whole; what is left out stays out
    for name in LEFT_OUT:
        path = into / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for static in into.rglob("*.a"):
        static.unlink()
    for library in sorted((into / "vllm").glob("*.so")):
        print(f"{library.name}: {keep_only(library, 90) / 1e6:.0f} MB of other GPUs' code taken out")
    keep_only(into / FLASH_ATTENTION_2, 90, or_ptx=True)
    for library in into.rglob("*.so"):
        if "vllm" not in library.parts and library.stat().st_size > 1 << 20:
            subprocess.run(["strip", "--strip-unneeded", library], check=False)
    for cache in list(into.rglob("__pycache__")):
        shutil.rmtree(cache)


def systemd(into: Path) -> None:
    """Debian's systemd and its libraries, unpacked; the machine's own files win over these."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", *SYSTEMD.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for package in sorted(Path(folder).glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, into], check=True)
    for name in ("bin", "sbin", "lib"):
        if (into / name).is_dir():
            shutil.copytree(into / name, into / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(into / name)
    for name in ("usr/share", "usr/lib/udev", "usr/lib/kernel", "etc/pam.d", "etc/init.d", "etc/default"):
        if name == "usr/share":
            for entry in (into / name).iterdir():
                if entry.name != "dbus-1":
                    shutil.rmtree(entry)
        else:
            shutil.rmtree(into / name, ignore_errors=True)


def flash_attn(into: Path) -> None:
    """The source of flash-attn 2, held against the lock's hash."""
    text = next(text for name, text in pins(LOCK.read_text()) if name == SOURCE_ONLY)
    version, wanted = re.search(r"==(\S+)", text)[1], re.search(r"sha256:([0-9a-f]{64})", text)[1]  # type: ignore[index]
    request = urllib.request.Request(
        "https://pypi.org/simple/flash-attn/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    file = next(entry for entry in files if entry["filename"] == f"flash_attn-{version}.tar.gz")
    with urllib.request.urlopen(file["url"], timeout=300) as answer, tempfile.NamedTemporaryFile() as archive:
        content = answer.read()
        if hashlib.sha256(content).hexdigest() != wanted:
            raise SystemExit("the source of flash-attn is not the one that the lock names")
        archive.write(content)
        archive.flush()
        with tarfile.open(archive.name) as opened:
            opened.extractall(into, filter="data")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--provided", type=Path)
    parser.add_argument("--part-mb", type=float, default=44)
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu")
    given = parser.parse_args()
    provided = set(given.provided.read_text().split()) if given.provided else set()
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder)
        site(pack / "site", given.uv, provided)
        packages(pack / "ctl", given.uv, "ansible-core==2.21.*\n")
        systemd(pack / "systemd")
        flash_attn(pack / "fa")
        shutil.rmtree(given.out, ignore_errors=True)
        given.out.mkdir(parents=True)
        archive = given.out / "all.tar.xz"
        order = ["tar", "-C", folder, "--sort=name", "--owner=0", "--group=0", "-I", "xz -4 -T2", "-cf", archive, "."]
        subprocess.run(order, check=True)
    size = int(given.part_mb * 1e6)
    with archive.open("rb") as whole:
        sums = []
        for number, content in enumerate(iter(lambda: whole.read(size), b""), start=1):
            part = given.out / str(number) / f"part-{number:02}"
            part.parent.mkdir()
            part.write_bytes(content)
            sums.append(f"{hashlib.sha256(content).hexdigest()}  {part.name}\n")
            print(f"{part}: {len(content)} bytes")
    archive.unlink()
    (given.out / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main()
