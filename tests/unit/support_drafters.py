"""Builds drafters and targets for tests: files with a real header and data of holes, so that gigabytes cost nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "I32": 4, "U8": 1}
Sizes = Mapping[str, Any]
Layout = dict[str, tuple[str, tuple[int, ...]]]


@functools.cache
def families() -> list[dict[str, Any]]:
    return yaml.safe_load((ROOT / "roles/drafter/files/families.yml").read_text())


def published() -> list[dict[str, Any]]:
    return json.loads((DATA / "drafters" / "published.json").read_text())


def published_row(repo: str, rev: str | None = None) -> dict[str, Any]:
    return next(row for row in published() if row["repo"].endswith(repo) and (rev is None or row["rev"] == rev))


def plain_layout(sizes: Sizes, target_hidden: int | None = None) -> Layout:
    """The tensors of a plain drafter, written down independently of the code under test."""
    d, f, hd = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * hd, sizes["num_key_value_heads"] * hd
    layout: Layout = {
        "fc.weight": ("BF16", (d, sizes["num_taps"] * (target_hidden or d))),
        "hidden_norm.weight": ("BF16", (d,)),
        "norm.weight": ("BF16", (d,)),
    }
    for i in range(sizes["num_hidden_layers"]):
        p = f"layers.{i}."
        layout |= {
            f"{p}input_layernorm.weight": ("BF16", (d,)),
            f"{p}post_attention_layernorm.weight": ("BF16", (d,)),
            f"{p}self_attn.q_proj.weight": ("BF16", (q, d)),
            f"{p}self_attn.k_proj.weight": ("BF16", (kv, d)),
            f"{p}self_attn.v_proj.weight": ("BF16", (kv, d)),
            f"{p}self_attn.o_proj.weight": ("BF16", (d, q)),
            f"{p}self_attn.q_norm.weight": ("BF16", (hd,)),
            f"{p}self_attn.k_norm.weight": ("BF16", (hd,)),
            f"{p}mlp.gate_proj.weight": ("BF16", (f, d)),
            f"{p}mlp.up_proj.weight": ("BF16", (f, d)),
            f"{p}mlp.down_proj.weight": ("BF16", (d, f)),
        }
    return layout


def dflash2_layout(sizes: Sizes, kernel: int = 2, group: int = 16, rank: int = 256) -> Layout:
    d = sizes["hidden_size"]
    layout = plain_layout(sizes)
    for i in range(sizes["num_hidden_layers"]):
        for conv in ("attention_conv", "mlp_conv"):
            layout[f"layers.{i}.{conv}.base_kernel"] = ("BF16", (2, kernel, d))
            layout[f"layers.{i}.{conv}.kernel_projection.weight"] = ("BF16", (2 * kernel * d // group, d))
    layout["candidate_selector.predecessor_codebook"] = ("BF16", (sizes["vocab_size"], rank))
    layout["candidate_selector.successor_codebook"] = ("BF16", (sizes["vocab_size"], rank))
    layout["candidate_selector.hidden_projection.weight"] = ("BF16", (rank, d))
    return layout


def layout_of(row: Sizes) -> Layout:
    return dflash2_layout(row) if "DFlash2" in row["architectures"][0] else plain_layout(row)


def header_bytes(layout: Layout, metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    """The file's beginning, and the size of its data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, (dtype, shape) in layout.items():
        size = BYTES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body, position


def write_weights(path: Path, layout: Layout, metadata: dict[str, str] | None = None) -> Path:
    """A safetensors file with a hole for data."""
    start, size = header_bytes(layout, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(len(start) + size)
    return path


def write_raw(path: Path, body: bytes, data: int = 0, length: int | None = None) -> Path:
    """A file with any header at all."""
    with path.open("wb") as stream:
        stream.write((len(body) if length is None else length).to_bytes(8, "little") + body)
        stream.truncate(stream.tell() + data)
    return path


def target_of(row: Sizes, nested: bool = True) -> dict[str, Any]:
    """A config.json of the row's target, with as much as the row knows."""
    text: dict[str, Any] = {
        "hidden_size": row["hidden_size"],
        "num_hidden_layers": row["num_target_layers"],
        "vocab_size": row["vocab_size"],
        "max_position_embeddings": row["max_position_embeddings"] or 262144,
        "rope_parameters": {"rope_theta": row["rope_theta"] or 5000000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-06,
        "eos_token_id": 7,
    }
    if "Next" in row["target"]:
        text["full_attention_interval"] = 4
    return {"architectures": ["Target"], "text_config": text} if nested else text


def write_target(folder: Path, config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# The target of the reference deployment, as published (the parts that matter here).
QWEN36_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "eos_token_id": 248044,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
}


def ids(problems: Iterable[Any]) -> list[str]:
    return [problem.id for problem in problems]
