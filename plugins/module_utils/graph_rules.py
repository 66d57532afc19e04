"""Which CUDA graphs are safe for a server with a drafter.

On GPUs of compute capability 9.x vLLM's FlashAttention 3 takes a schedule that is computed before each step. A full
CUDA graph reads it from a buffer of its cache group that was recorded when the graph was captured, but of groups with
equal layers only the first has its buffer filled for each step (``FlashAttentionMetadataBuilder.update_block_table``
in ``vllm/v1/attention/backends/flash_attn.py`` copies the metadata and leaves the buffer alone). The layers of the
other groups then run with the schedule of the capture, which was made for one request. One request at a time is
right; several get no attention, or an illegal memory access. A hybrid target has several such groups as soon as its
drafter has fewer layers than it has full-attention layers, since the smallest kind of layer sets the size of all
groups (``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py``). Both read in vLLM 0.20.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cache_groups import cache_groups, layer_counts, text_config
from .gpus import Gpu
from .preflight_rules import Problem

# FlashAttention 3, whose schedule it is, serves these alone, and unless the site asks for 2
_MAJOR = "9."
_WITHOUT_SCHEDULE = 2
_LARGEST_GRAPH = 512
_GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16))


def cudagraph_mode(serve: Mapping[str, Any]) -> str:
    """The mode that a configuration of ``vllm serve`` asks for; empty when vLLM chooses."""
    if serve.get("enforce-eager"):
        return "NONE"
    return str(_of(serve, "compilation-config").get("cudagraph_mode") or "").upper()


def _of(serve: Mapping[str, Any], flag: str) -> Mapping[str, Any]:
    """The mapping of a flag; `serve_config` has put its dotted keys into it."""
    given = serve.get(flag)
    return given if isinstance(given, Mapping) else {}


def captured_graphs(*, max_num_seqs: int, k: int, mode: str, batched_tokens: int) -> tuple[int, int]:
    """How many CUDA graphs vLLM captures, and of how many tokens the largest is.

    Args:
        max_num_seqs: requests at once.
        k: ``num_speculative_tokens``; 0 without speculation.
        mode: ``cudagraph_mode``; empty for vLLM's own choice.
        batched_tokens: ``max_num_batched_tokens``.
    """
    if mode == "NONE":
        return 0, 0
    decode = max_num_seqs * (1 + k)
    largest = min(2 * decode, _LARGEST_GRAPH, batched_tokens)
    sizes = [size for size in _GRAPH_SIZES if size <= largest]
    if mode == "PIECEWISE":
        return len(sizes), largest
    # a full graph is of whole requests, each with its drafted tokens, and then the sizes of all are rounded up to that
    whole = {-(-size // (1 + k)) * (1 + k) for size in sizes}
    sizes = sorted(size for size in whole if size <= largest)
    full = [size for size in sizes if size <= decode]
    if mode == "FULL_DECODE_ONLY":
        return len(full), max(full, default=0)
    return len(sizes) + (0 if mode == "FULL" else len(full)), max(sizes, default=0)


def graph_rules(
    gpus: Sequence[Gpu], serve: Mapping[str, Any], target: Mapping[str, Any], drafter: Mapping[str, Any] | None
) -> list[Problem]:
    """What is wrong with a hybrid target and its drafter on these GPUs.

    Args:
        gpus: those that serve; none on a CPU.
        serve: flags of ``vllm serve``.
        target: parsed ``config.json``.
        drafter: parsed ``config.json``; None without speculation.
    """
    try:
        if drafter is None or not gpus or not layer_counts(text_config(target))[1]:
            return []
        groups = cache_groups(target, drafter)
    except (KeyError, TypeError, ValueError):
        return []  # memory_rules says that the configuration lacks it
    if groups.drafter == 0 and groups.attention > 1:
        return [
            Problem(
                "drafter-layers-split", "warning", "drafter",
                f"its layers have the shape of the target's attention layers, so that vLLM divides them into"
                f" {groups.attention} cache groups; 0.20.1 ends at start with `All drafting layers should belong to the"
                " same kv cache group`.",
                "use a drafter with other heads of keys and values, or a newer vLLM.",
            )
        ]  # fmt: skip
    version = _of(serve, "attention-config").get("flash_attn_version")
    concerned = [gpu for gpu in gpus if gpu.compute_capability.startswith(_MAJOR)]
    if (
        groups.attention == 1
        or serve.get("max-num-seqs") == 1
        or not concerned
        or version == _WITHOUT_SCHEDULE
        or cudagraph_mode(serve) in ("NONE", "PIECEWISE")
    ):
        return []
    return [
        Problem(
            "full-graphs-lose-attention", "warning", "vllm_server_cudagraph_mode",
            f"the target's attention layers lie in {groups.attention} cache groups beside this drafter's, and on"
            f" {concerned[0].name} full CUDA graphs refresh the schedule of the first alone: requests served at the"
            " same time were seen to end the server, and may be answered wrong.",
            "set vllm_server_cudagraph_mode to PIECEWISE.",
        )
    ]  # fmt: skip
