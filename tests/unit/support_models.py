"""Sizes of the reference deployment's models, as far as the rules about heads, positions and memory read them."""

from __future__ import annotations

from typing import Any

TARGET: dict[str, Any] = {
    "text_config": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
    },
}
DRAFTER: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 262144,
}
