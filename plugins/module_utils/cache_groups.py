"""How vLLM groups the layers of a hybrid target and its drafter in its cache.

All groups have the same number of layers: that of the smallest kind, or of the largest where no kind has half as many
layers more. Layers are of one kind when their cache is alike, so that a drafter whose layers have the shape of the
target's attention layers is divided with these.
Source: ``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py`` of vLLM 0.20.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Groups:
    """Groups of a hybrid model's cache.

    Attributes:
        layers: in each group, empty places counted.
        attention: groups in which the target's full-attention layers lie.
        drafter: groups that hold the drafter's layers alone; 0 when they lie among the target's, or there are none.
        recurrent: groups of recurrent layers.
    """

    layers: int
    attention: int
    drafter: int
    recurrent: int


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a ``config.json``."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def layer_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Number of full-attention and of recurrent (linear attention) layers."""
    types = config.get("layer_types")
    total = int(config["num_hidden_layers"])
    if isinstance(types, list):
        linear = sum(1 for kind in types if kind == "linear_attention")
        return total - linear, linear
    interval = config.get("full_attention_interval")
    if interval and config.get("linear_num_value_heads"):
        return total // int(interval), total - total // int(interval)
    return total, 0


def _shape(config: Mapping[str, Any]) -> tuple[object, object]:
    """What makes the cache of two attention layers alike: heads of keys and values, and their size."""
    return config.get("num_key_value_heads"), config.get("head_dim")


def cache_groups(target: Mapping[str, Any], drafter: Mapping[str, Any] | None) -> Groups:
    """The groups of a target with recurrent layers.

    Args:
        target: parsed ``config.json``; values may sit under ``text_config``.
        drafter: parsed ``config.json``, all of whose layers have full attention; None without speculation.

    Raises:
        KeyError, TypeError, ValueError: a configuration does not say how many layers it has.
    """
    config = text_config(target)
    attention, recurrent = layer_counts(config)
    own = int(drafter["num_hidden_layers"]) if drafter else 0
    if drafter and _shape(drafter) == _shape(config):
        attention, own = attention + own, 0
    kinds = [count for count in (attention, recurrent, own) if count]
    size = max(kinds) if max(kinds) < min(kinds) * 1.5 else min(kinds)
    return Groups(size, *(math.ceil(count / size) for count in (attention, own, recurrent)))
