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

from .gpus import Gpu
from .memory_fit import layer_counts, text_config
from .preflight_rules import Problem

# FlashAttention 3, whose schedule it is, serves these alone, and unless the site asks for 2
_MAJOR = "9."
_WITHOUT_SCHEDULE = 2


def attention_groups(target: Mapping[str, Any], drafter: Mapping[str, Any]) -> int:
    """In how many cache groups a hybrid target's full-attention layers lie; 1 for any other target.

    Args:
        target: parsed ``config.json``; values may sit under ``text_config``.
        drafter: parsed ``config.json``, all of whose layers have full attention on vLLM 0.20.1.

    Raises:
        KeyError, TypeError, ValueError: a configuration does not say how many layers it has.
    """
    config = text_config(target)
    full, recurrent = layer_counts(config)
    if not recurrent:
        return 1
    kinds = {"recurrent": recurrent, _shape(config): full}
    kinds[_shape(drafter)] = kinds.get(_shape(drafter), 0) + int(drafter["num_hidden_layers"])
    least, most = min(kinds.values()), max(kinds.values())
    size = most if most < least * 1.5 else least
    return -(-kinds[_shape(config)] // size)


def _shape(config: Mapping[str, Any]) -> str:
    """What makes the cache of two layers equal: heads of keys and values, and their size."""
    return f"{config.get('num_key_value_heads')} x {config.get('head_dim')}"


def cudagraph_mode(serve: Mapping[str, Any]) -> str:
    """The mode that a configuration of ``vllm serve`` asks for; empty when vLLM chooses."""
    if serve.get("enforce-eager"):
        return "NONE"
    whole = serve.get("compilation-config")
    mode = whole.get("cudagraph_mode") if isinstance(whole, Mapping) else serve.get("compilation-config.cudagraph_mode")
    return str(mode or "").upper()


def graph_rules(
    gpus: Sequence[Gpu], serve: Mapping[str, Any], target: Mapping[str, Any], drafter: Mapping[str, Any] | None
) -> list[Problem]:
    """A warning when full CUDA graphs meet the conditions above.

    Args:
        gpus: those that serve.
        serve: flags of ``vllm serve``.
        target: parsed ``config.json``.
        drafter: parsed ``config.json``; None without speculation.
    """
    attention = serve.get("attention-config")
    version = attention.get("flash_attn_version") if isinstance(attention, Mapping) else None
    concerned = [gpu for gpu in gpus if gpu.compute_capability.startswith(_MAJOR)]
    if (
        drafter is None
        or not concerned
        or version == _WITHOUT_SCHEDULE
        or cudagraph_mode(serve) in ("NONE", "PIECEWISE")
    ):
        return []
    try:
        groups = attention_groups(target, drafter)
    except (KeyError, TypeError, ValueError):
        return []
    if groups == 1:
        return []
    return [
        Problem(
            "full-graphs-lose-attention", "warning", "vllm_server_cudagraph_mode",
            f"the target's attention layers lie in {groups} cache groups beside this drafter's, and on"
            f" {concerned[0].name} full CUDA graphs refresh the schedule of the first alone: requests served at the"
            " same time get wrong answers or end the server.",
            "set vllm_server_cudagraph_mode to PIECEWISE.",
        )
    ]  # fmt: skip
