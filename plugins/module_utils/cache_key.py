"""The key of the compile caches.

vLLM 0.20.0 to 0.25.1 leaves a drafter's taps out of its own cache key: after a start with wrong taps, a corrected
configuration still loads the old graph, and no drafted token is accepted. firstlight therefore gives each
combination of all that shapes a compiled graph a cache root of its own, so that nobody ever has to empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .canonical_json import digest

# Flags that decide where and under what name vLLM serves, how much memory it takes or what it logs:
# none of them reaches a graph, and a new port must not cost minutes of compilation.
NOT_IN_GRAPH = frozenset(
    {
        "host", "port", "served-model-name", "gpu-memory-utilization", "disable-custom-all-reduce",
        "load-format", "tokenizer", "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice",
        "chat-template", "api-key", "root-path", "uvicorn-log-level", "disable-log-requests",
        "enable-log-requests", "model", "speculative-config",
    }
)  # fmt: skip


def cache_key(
    *,
    vllm_version: str,
    venv: str,
    target_config: Mapping[str, Any],
    drafter_config: Mapping[str, Any] | None,
    serve_config: Mapping[str, Any],
    gpus: Sequence[str],
    driver: str,
) -> str:
    """The name of the cache root of one combination.

    Args:
        vllm_version: for instance ``0.20.1``.
        venv: name of the virtual environment's folder (version and digest of its lock): another torch or
            Triton under the same vLLM makes other graphs.
        target_config: the target's ``config.json``.
        drafter_config: the drafter's, or None without speculation.
        serve_config: flags of ``vllm serve``; those in `NOT_IN_GRAPH` are left out, but what
            ``speculative-config`` says beside the drafter's path (method, k) is in.
        gpus: names of the GPUs in order; empty on a CPU.
        driver: NVIDIA driver version; empty on a CPU.

    Returns:
        ``<version>-<16 hex digits>``, a legal folder name.
    """
    speculative = serve_config.get("speculative-config") or {}
    shape = {
        "vllm": vllm_version,
        "venv": venv,
        "target": target_config,
        "drafter": drafter_config,
        "flags": {k: v for k, v in serve_config.items() if k.removeprefix("no-") not in NOT_IN_GRAPH},
        "speculative": {k: v for k, v in speculative.items() if k != "model"},
        "gpus": list(gpus),
        "driver": driver,
    }
    return f"{vllm_version}-{digest(shape)[:16]}"
