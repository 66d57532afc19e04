"""Chooses each value of a drafter's configuration from its possible sources and remembers which it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .drafter_family import ARCHITECTURES, Shape
from .drafter_report import Field
from .drafter_table import Row
from .drafter_target import Target
from .drafter_values import reference_taps

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ABSENT: Any = object()
# inside dflash_config; all others are at the top level
_NESTED = (
    "mask_token_id",
    "target_layer_ids",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
)
AUX = "eagle_aux_hidden_state_layer_ids"
# without these there is no drafting, and no place but the table or the user has them
NEEDED = ("mask_token_id", "block_size", "target_layer_ids", "rope_theta", "max_position_embeddings")


@dataclass(frozen=True)
class Sources:
    """Where values may come from, the earlier before the later.

    Attributes:
        user: given by the user.
        existing: from the config.json that came with the weights.
        row: of the table, when the weights belong to one.
        target: the target's configuration.
        shape: the weights.
        taps: how many layers are tapped; None when ``fc`` cannot tell.
    """

    family: str
    shape: Shape
    taps: int | None
    target: Target
    row: Row | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    existing: Mapping[str, Any] = field(default_factory=dict)

    def pick(
        self, name: str, *, target: Any = _ABSENT, default: Any = _ABSENT, note: str = "", target_note: str = ""
    ) -> Field | None:
        """The value of one field that the weights leave open; None when no source has it."""
        if name in self.user:
            return Field(self.user[name], "user", "given by the user")
        if name in self.existing:
            return Field(self.existing[name], "user", "kept from the existing config.json")
        if self.row is not None and name in self.row.config:
            doubt = self.row.uncertain.get(name, "")
            return Field(self.row.config[name], "table", f"{self.row.id}{'; ' + doubt if doubt else ''}")
        if target is not _ABSENT and target is not None:
            return Field(target, "target", target_note)
        return None if default is _ABSENT else Field(default, "default", note)


def build_fields(sources: Sources) -> dict[str, Field]:
    """All fields that can be had, in the order of the configuration."""
    shape, target = sources.shape, sources.target
    fields: dict[str, Field | None] = {
        "architectures": Field([ARCHITECTURES[sources.family]], "header", f"family {sources.family}, by tensor names"),
        "model_type": Field("qwen3", "default", "the drafter's layers are Qwen3's"),
        "dtype": Field(_DTYPES.get(shape.dtype, "bfloat16"), "header"),
        "hidden_size": Field(shape.hidden_size, "header", "norm.weight"),
        "intermediate_size": Field(shape.intermediate_size, "header", "mlp.gate_proj.weight"),
        "num_hidden_layers": Field(shape.num_hidden_layers, "header", "layers.N"),
        "num_attention_heads": Field(shape.num_attention_heads, "header", "q_proj rows / head_dim"),
        "num_key_value_heads": Field(shape.num_key_value_heads, "header", "k_proj rows / head_dim"),
        "head_dim": Field(shape.head_dim, "header", "q_norm.weight"),
        "hidden_act": sources.pick("hidden_act", default="silu"),
        "attention_bias": Field(shape.attention_bias, "header", "q_proj.bias"),
        "rms_norm_eps": sources.pick("rms_norm_eps", target=target.values.get("rms_norm_eps"), default=1e-06),
        "vocab_size": Field(target.vocab_size, "target"),
        "max_position_embeddings": sources.pick(
            "max_position_embeddings", target=_integer(target.values.get("max_position_embeddings"))
        ),
        **_rope(sources),
        **_attention_pattern(sources),
        "block_size": sources.pick("block_size"),
        "num_target_layers": Field(target.num_hidden_layers, "target"),
        "tie_word_embeddings": sources.pick("tie_word_embeddings", default=False),
        **_special_tokens(sources),
        **_family_fields(sources),
        "mask_token_id": sources.pick("mask_token_id"),
        "target_layer_ids": _taps(sources),
    }
    for name in ("is_causal", "partial_rotary_factor", "final_logit_softcapping", "quantization_config"):
        fields[name] = sources.pick(name)
    if (taps := fields["target_layer_ids"]) is not None:
        note = "target_layer_ids + 1: wins over dflash_config in every release and is used unshifted"
        fields[AUX] = Field([layer + 1 for layer in taps.value], "formula", note)
    return {name: value for name, value in fields.items() if value is not None}


def _rope(sources: Sources) -> dict[str, Field | None]:
    note = "the weights cannot tell; assumed to be the target's"
    theta = sources.target.rope_theta
    theta = theta if type(theta) in {int, float} and theta > 0 else None
    base = sources.pick("rope_theta", target=theta, target_note=note)
    if base is not None and isinstance(base.value, float) and base.value.is_integer():
        base = Field(int(base.value), base.source, base.note)
    scaling = sources.pick("rope_scaling", target=sources.target.rope_scaling, target_note=note, default=None)
    return {"rope_theta": base, "rope_scaling": scaling}


def _attention_pattern(sources: Sources) -> dict[str, Field | None]:
    layers = sources.shape.num_hidden_layers
    assumed = "the weights cannot tell; full attention in every layer is assumed"
    types = sources.pick("layer_types", default=["full_attention"] * layers, note=assumed)
    if types is None or types.value is None:
        # published without: vLLM then goes by use_swa alone
        swa, window = sources.pick("use_swa"), sources.pick("sliding_window")
        if window is not None and window.value is None:
            window = None
        return {
            "sliding_window": window,
            "use_sliding_window": Field(False, types.source if types else "table", "no layer_types"),
            "use_swa": swa,
            "swa_window_size": window if swa is not None and swa.value else None,
        }
    sliding = "sliding_attention" in types.value
    window = sources.pick("sliding_window", default=None) if sliding else Field(None, types.source)
    return {
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": Field(sliding, types.source, "from layer_types"),
        "max_window_layers": sources.pick("max_window_layers", default=layers, note="the number of layers"),
        "use_swa": sources.pick("use_swa"),
        "swa_window_size": sources.pick("swa_window_size"),
    }


def _special_tokens(sources: Sources) -> dict[str, Field | None]:
    """Vocabulary edges; vLLM takes its own from the target, but the file is complete with them."""
    values = sources.target.values
    end = values.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return {
        "eos_token_id": sources.pick("eos_token_id", target=_integer(end), default=None),
        "pad_token_id": sources.pick("pad_token_id", target=_integer(values.get("pad_token_id")), default=None),
        "bos_token_id": sources.pick("bos_token_id", target=_integer(values.get("bos_token_id")), default=None),
    }


def _family_fields(sources: Sources) -> dict[str, Field | None]:
    shape, target = sources.shape, sources.target
    fields: dict[str, Field | None] = {}
    if shape.hidden_size != target.hidden_size:
        fields["target_hidden_size"] = Field(target.hidden_size, "target", "fc takes taps times this")
    if shape.draft_vocab_size:
        fields["draft_vocab_size"] = Field(shape.draft_vocab_size, "header", "d2t")
    if shape.sink_bias:
        fields["attention_sink_bias"] = Field(True, "header", "attention_sink_bias")
    if sources.family == "dspark" and shape.markov_rank:
        fields["markov_rank"] = Field(shape.markov_rank, "header", "markov_head.markov_w1.weight")
    if sources.family == "dflash2":
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank"):
            value = getattr(shape, name)
            fields[name] = Field(value, "header") if value else None
        fields["selector_top_k"] = sources.pick("selector_top_k")
    return fields


def _taps(sources: Sources) -> Field | None:
    given = sources.user.get("target_layer_ids", sources.existing.get("target_layer_ids"))
    row = sources.row
    if given is not None:
        return sources.pick("target_layer_ids")
    if row is not None and not row.formula:
        return Field(list(row.taps), "table", f"{row.id}; does not follow the reference formula")
    # speculators' and DSpark's trainers choose their layers otherwise
    if sources.taps is None or sources.family not in {"dflash", "quantised"}:
        return None
    taps = reference_taps(sources.target.num_hidden_layers, sources.taps)
    if min(taps) < 0 or len(set(taps)) < len(taps):
        return None
    checked = f"as published for {row.id}" if row else "unconfirmed: this drafter is in no row of the table"
    return Field(taps, "formula", f"{sources.taps} taps of {sources.target.num_hidden_layers} layers; {checked}")


def assemble(fields: Mapping[str, Field], family: str) -> dict[str, Any]:
    """The config.json, from its fields."""
    config: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        (nested if name in _NESTED else config)[name] = value.value
    if family == "dspark":
        config.update({name: nested[name] for name in ("mask_token_id", "target_layer_ids") if name in nested})
    if nested:
        config["dflash_config"] = nested
    if AUX in config:
        config[AUX] = config.pop(AUX)  # last, after dflash_config
    return config


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
