"""Does the model fit: GPU memory left for the KV cache, and what one request takes of it.

Follows how vLLM 0.20.1 lays out the cache of a hybrid target (gated-delta layers beside full attention) with and
without a DFlash drafter: layers are put in groups as large as the smallest kind of layer, every group uses blocks
of one size, and a speculating request holds ``1 + k`` recurrent states a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cache_groups import cache_groups, layer_counts, text_config

GIB = 1 << 30
_BLOCK_STEP = 16  # attention blocks grow in steps of this many tokens
_HALF = 2  # bytes of bfloat16
# What vLLM 0.20.1 took beside weights and cache for the 27B at tensor parallel 2 on 141 GB cards, in GiB of one GPU:
# activations of the profile run, CUDA contexts and NCCL's buffers; with a drafter also the tapped states of a step of
# 32,768 tokens.
OVERHEAD_GIB = 3.2
DRAFTER_GIB, _DRAFTER_TOKENS = 2.2, 32768
# vLLM estimates what its CUDA graphs will take and keeps that back (they took a fifth of it): one graph of 64 layers,
# and what each of its tokens adds. That it grows with the layers is assumed.
GRAPH_GIB, GRAPH_TOKEN_GIB, _GRAPH_LAYERS = 0.11, 0.066 / 512, 64


@dataclass(frozen=True)
class Fit:
    """Memory of one GPU, in GiB.

    Attributes:
        budget: the share of the card that vLLM may take.
        weights: target and drafter.
        overhead: activations, contexts, CUDA graphs.
        cache: what is left for the KV cache (may be negative).
        request_short: cache that any running request takes at least.
        request_full: cache of one request of ``max_model_len`` tokens.
        at_once: how many full-length requests fit at once.
    """

    budget: float
    weights: float
    overhead: float
    cache: float
    request_short: float
    request_full: float
    at_once: float

    @property
    def fits(self) -> bool:
        """Whether one request of the full length can be served."""
        return self.cache > 0 and self.cache >= self.request_full


def _token_bytes(config: Mapping[str, Any], tensor_parallel: int) -> int:
    """Bytes of keys and values of one token in one attention layer on one GPU."""
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    return 2 * max(heads // tensor_parallel, 1) * head_dim * _HALF


def _state_bytes(config: Mapping[str, Any], tensor_parallel: int, k: int) -> int:
    """Bytes of one gated-delta layer's state (recurrent and convolution) of one request on one GPU."""
    value_heads, key_heads = int(config["linear_num_value_heads"]), int(config["linear_num_key_heads"])
    key_dim, value_dim = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    recurrent = value_heads // tensor_parallel * key_dim * value_dim * 4
    channels = (2 * key_heads * key_dim + value_heads * value_dim) // tensor_parallel
    window = int(config.get("linear_conv_kernel_dim", 4)) - 1 + k
    return recurrent + channels * window * _HALF


def request_gib(
    target: Mapping[str, Any],
    *,
    tensor_parallel: int,
    tokens: int,
    k: int = 0,
    drafter: Mapping[str, Any] | None = None,
) -> float:
    """Cache in GiB on one GPU that one request of ``tokens`` tokens takes.

    Args:
        target: the target's ``config.json`` (values may sit under ``text_config``).
        tensor_parallel: number of GPUs that share the model.
        tokens: length of prompt and answer.
        k: ``num_speculative_tokens``; 0 without speculation.
        drafter: the drafter's ``config.json``; None without speculation.
    """
    config = text_config(target)
    full, linear = layer_counts(config)
    drafting = int(drafter["num_hidden_layers"]) if drafter else 0
    per_token = _token_bytes(config, tensor_parallel)
    if not linear:
        per_draft = _token_bytes(drafter, tensor_parallel) if drafter else 0
        blocks = math.ceil(tokens / _BLOCK_STEP) * _BLOCK_STEP
        return blocks * (full * per_token + drafting * per_draft) / GIB
    block = _BLOCK_STEP * math.ceil(_state_bytes(config, tensor_parallel, k) / (_BLOCK_STEP * per_token))
    groups = cache_groups(target, drafter)
    blocks = (groups.attention + groups.drafter) * math.ceil(tokens / block) + groups.recurrent * (1 + k)
    return blocks * groups.layers * block * per_token / GIB


def fit(
    target: Mapping[str, Any],
    *,
    gpu_total_gib: float,
    utilization: float,
    weights_gib: float,
    tensor_parallel: int,
    max_model_len: int,
    k: int = 0,
    drafter: Mapping[str, Any] | None = None,
    graphs: tuple[int, int] = (0, 0),
    batched_tokens: int = _DRAFTER_TOKENS,
) -> Fit:
    """Predict the memory of one GPU.

    Args:
        target: the target's ``config.json``.
        gpu_total_gib: total memory of the smallest card.
        utilization: ``gpu_memory_utilization``.
        weights_gib: size of target's and drafter's weights on disk, all GPUs together.
        tensor_parallel: number of GPUs that share the model.
        max_model_len: longest request, in tokens.
        k: ``num_speculative_tokens``; 0 without speculation.
        drafter: the drafter's ``config.json``; None without speculation.
        graphs: number of CUDA graphs and tokens of the largest (`graph_rules.captured_graphs`).
        batched_tokens: ``max_num_batched_tokens``.
    """
    budget = gpu_total_gib * utilization
    weights = weights_gib / tensor_parallel
    count, largest = graphs
    depth = int(text_config(target)["num_hidden_layers"]) / _GRAPH_LAYERS
    overhead = OVERHEAD_GIB + count * (GRAPH_GIB + largest * GRAPH_TOKEN_GIB) * depth
    if drafter:
        overhead += DRAFTER_GIB * batched_tokens / _DRAFTER_TOKENS
    cache = budget - weights - overhead

    def request(tokens: int) -> float:
        return request_gib(target, tensor_parallel=tensor_parallel, tokens=tokens, k=k, drafter=drafter)

    full = request(max_model_len)
    return Fit(budget, weights, overhead, cache, request(1), full, max(cache, 0.0) / full)
