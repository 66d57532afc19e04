"""Models of the proof: a tiny one that answers, and one in full-size shapes without the gigabytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sparse_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]]) -> None:
    """A file with a true header and data of holes (bfloat16): the shapes without the gigabytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(8 + len(text) + at)


def full_size(repo: Path, target: Path, drafter: Path) -> None:
    """Target and drafter in the shapes of Qwen3.6-27B, for `--load-format dummy`."""
    tiny = repo / "tests/data/tiny/tiny-qwen35"
    shutil.copytree(tiny, target, ignore=shutil.ignore_patterns("model.safetensors"), dirs_exist_ok=True)
    drafter.mkdir(parents=True, exist_ok=True)
    config = json.loads((tiny / "config.json").read_text())
    d, f, layers, vocab = 5120, 17408, 64, 248320
    config["text_config"] |= {
        "hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers, "num_attention_heads": 24,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": vocab, "max_position_embeddings": 262144,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "full_attention_interval": 4,
        "layer_types": [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(layers)],
    }  # fmt: skip
    config["text_config"]["rope_parameters"] |= {"mrope_section": [11, 11, 10], "rope_theta": 10000000.0}
    config["vision_config"]["out_hidden_size"] = d
    (target / "config.json").write_text(json.dumps(config, indent=1))
    # every id that the model can emit has a token, so that answers can be turned into text
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    taken = set(words.values()) | {entry["id"] for entry in tokenizer["added_tokens"]}
    words |= {f"<{i}>": i for i in range(vocab) if i not in taken}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    body: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocab, d), "model.language_model.embed_tokens.weight": (vocab, d),
        "model.language_model.norm.weight": (d,),
    }  # fmt: skip
    for i in range(layers):
        at = f"model.language_model.layers.{i}."
        body |= {f"{at}mlp.gate_proj.weight": (f, d), f"{at}mlp.up_proj.weight": (f, d),
                 f"{at}mlp.down_proj.weight": (d, f)}  # fmt: skip
        if i % 4 == 3:
            body |= {f"{at}self_attn.q_proj.weight": (24 * 256 * 2, d), f"{at}self_attn.k_proj.weight": (1024, d),
                     f"{at}self_attn.v_proj.weight": (1024, d), f"{at}self_attn.o_proj.weight": (d, 6144)}  # fmt: skip
        else:
            body |= {f"{at}linear_attn.in_proj_qkv.weight": (10240, d), f"{at}linear_attn.in_proj_z.weight": (6144, d),
                     f"{at}linear_attn.out_proj.weight": (d, 6144)}  # fmt: skip
    sparse_safetensors(target / "model.safetensors", body)
    taps = {"fc.weight": (d, 5 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(5):
        at = f"layers.{i}."
        taps |= {
            f"{at}input_layernorm.weight": (d,), f"{at}post_attention_layernorm.weight": (d,),
            f"{at}self_attn.q_proj.weight": (4096, d), f"{at}self_attn.k_proj.weight": (1024, d),
            f"{at}self_attn.v_proj.weight": (1024, d), f"{at}self_attn.o_proj.weight": (d, 4096),
            f"{at}self_attn.q_norm.weight": (128,), f"{at}self_attn.k_norm.weight": (128,),
            f"{at}mlp.gate_proj.weight": (f, d), f"{at}mlp.up_proj.weight": (f, d), f"{at}mlp.down_proj.weight": (d, f),
        }  # fmt: skip
    sparse_safetensors(drafter / "drafter.safetensors", taps)


def tiny(repo: Path, folder: Path) -> None:
    """The tiny target and its drafter, as a user would have them: the drafter without a configuration."""
    data = repo / "tests/data/tiny"
    shutil.copytree(data / "tiny-qwen35", folder / "tiny", dirs_exist_ok=True)
    (folder / "tiny-drafter").mkdir(parents=True, exist_ok=True)
    shutil.copy(data / "drafter-qwen35/drafter-step-300.safetensors", folder / "tiny-drafter")


def make(repo: Path, folder: Path) -> None:
    """All of them, readable by everybody."""
    tiny(repo, folder)
    full_size(repo, folder / "full", folder / "full-drafter")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
