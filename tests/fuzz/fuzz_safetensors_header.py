"""Feeds mutated safetensors files to the header parser for as long as it is told.

``python tests/fuzz/fuzz_safetensors_header.py [SECONDS] [SEED]`` needs nothing but Python. A coverage-guided fuzzer
can call :func:`one_input` instead.

Every input must come back parsed or as a FirstlightError, within a second and without more memory than a few times
the header's limit. Anything else ends the run with the input's bytes in hexadecimal and exit status 1.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".collections"), str(ROOT / "tests" / "unit")]

from ansible_collections.firstlight.vllm.plugins.module_utils import safetensors_header as subject  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError  # noqa: E402

SLOWEST_S = 1.0
MOST_MEMORY = 256 * 2**20  # the process with its interpreter; the limit of a header is 1 MB

TOKENS = [
    b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\u0000", b"\\ud800", b"null", b"true", b"-1", b"1e400", b"NaN",
    b"9" * 40, b"[" * 5000, b"__metadata__", b"dtype", b"shape", b"data_offsets", b"BF16", b"F4", b"\xff", b"\0",
    b"9223372036854775807", b"1" + b"0" * 5000, b'{"a":' * 3000,
]  # fmt: skip


def seeds() -> list[bytes]:
    """Whole files to start from."""
    real = (ROOT / "tests/data/tiny/drafter-qwen3/drafter-step-300.safetensors").read_bytes()
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    small = json.dumps({"__metadata__": {"format": "pt"}, "a": entry}).encode()
    return [
        real[:4000],
        len(small).to_bytes(8, "little") + small + bytes(12),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
        b"",
    ]


def mutate(source: random.Random, content: bytes) -> bytes:
    """A few random edits; the announced length is mended half of the time, so that the JSON is reached."""
    data = bytearray(content)
    for _ in range(source.randint(1, 6)):
        at = source.randrange(len(data) + 1)
        match source.randrange(5):
            case 0 if data:
                data[min(at, len(data) - 1)] = source.randrange(256)
            case 1:
                data[at:at] = source.choice(TOKENS)
            case 2:
                del data[at : at + source.randint(1, 40)]
            case 3:
                start = source.randrange(len(data) + 1)
                data[at:at] = data[start : start + source.randint(1, 200)]
            case _:
                data[at : at + 1] = source.choice(TOKENS)
    if len(data) > 8 and source.random() < 0.5:
        data[:8] = (len(data) - 8 - source.choice((0, 0, 12))).to_bytes(8, "little", signed=True)
    return bytes(data)


def one_input(content: bytes) -> bool:
    """Read one file; whether it was accepted."""
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, content)
        header = subject.read_header(f"/proc/self/fd/{descriptor}")
    except FirstlightError:
        return False
    finally:
        os.close(descriptor)
    assert header.bytes_read <= subject.DEFAULT_LIMIT + 8
    return True


def peak_bytes() -> int:
    """This program's own peak of resident memory; getrusage() would count that of the process that forked it, too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> int:
    """Fuzz for a while and report."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**32)
    source, corpus = random.Random(seed), seeds()
    count = accepted = 0
    slowest = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        content = mutate(source, source.choice(corpus))
        started = time.process_time()
        try:
            good = one_input(content)
            slowest = max(slowest, time.process_time() - started)
            if slowest > SLOWEST_S:
                raise TimeoutError(f"{slowest:.2f} s")  # noqa: TRY301
        except Exception as error:
            print(f"seed {seed}, input {count}: {type(error).__name__}: {error}\n{content[:2000].hex()}")
            return 1
        count += 1
        accepted += good
        if good and len(corpus) < 500:
            corpus.append(content)
    memory = peak_bytes()
    result = {"seed": seed, "inputs": count, "accepted": accepted, "slowest_ms": round(slowest * 1000, 2)}
    print(json.dumps(result | {"peak_mib": memory // 2**20}))
    return 0 if memory <= MOST_MEMORY else 1


if __name__ == "__main__":
    sys.exit(main())
