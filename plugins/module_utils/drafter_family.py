"""Tells a drafter's family and shape from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from .errors import FirstlightError
from .safetensors_header import Tensor, quoted

# family -> the architecture under which vLLM registers it
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "speculators": "DFlashDraftModel",
    "laguna": "DFlashLagunaForCausalLM",
    "quantised": "DFlashDraftModel",
}
# the sizes that tell one published drafter from another
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
LAYER = re.compile(r"^layers\.(\d{1,6})\.(.+)$")
_QUANTISED = re.compile(
    r"(_scale(_inv|_2)?|_scale_shift|\.scales|\.qweight|\.qzeros|\.g_idx|_zero_point|\.weight_packed|\.absmax|"
    r"\.quant_state.*|\.SCB)$"
)
_PACKED_DTYPES = ("F8_", "F6_", "F4")
_MAX_LAYERS = 512


@dataclass(frozen=True)
class Shape:
    """What the tensors' shapes decide.

    Attributes:
        fc_width: columns of ``fc.weight``: taps times the target's hidden size; None without a readable one.
        draft_vocab_size: entries of ``d2t``, for a drafter with a vocabulary of its own.
        markov_rank: of DSpark's head.
        conv_kernel_size: of DFlash2, as are ``conv_group_size`` and ``selector_rank``.
        attention_bias: whether the projections of the attention have biases.
        sink_bias: whether the layers have attention sinks.
        dtype: the one that most weights have, in the safetensors format's words.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    dtype: str
    fc_width: int | None
    attention_bias: bool = False
    sink_bias: bool = False
    draft_vocab_size: int | None = None
    markov_rank: int | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None


def detect_family(tensors: Mapping[str, Tensor], where: str) -> str:
    """Name the family of a drafter by its tensors.

    Raises:
        FirstlightError: not a drafter of a known family; ``kind`` is ``target-weights`` for an ordinary
            model, ``other-drafter`` for an EAGLE-3 head, ``prefixed-names`` or ``unknown-family`` otherwise.
    """
    tops = {name.split(".", 1)[0] for name in tensors}
    layered = any(LAYER.match(name) for name in tensors)
    if "midlayer" in tops or ("fc" in tops and not {"hidden_norm", "norm"} & tops and "d2t" in tops):
        _refuse("other-drafter", "holds an EAGLE-3 head, not a DFlash drafter.", where)
    if not layered or not {"fc", "hidden_norm", "encoder"} & tops:
        _refuse_model(tensors, tops, where)
    if any(_is_quantised(tensor) for tensor in tensors.values()):
        return "quantised"
    if any(
        ".qkv_proj." in name or ".gate_up_proj." in name or name.startswith("aux_hidden_norms.") for name in tensors
    ):
        return "laguna"
    if "candidate_selector" in tops or any(".attention_conv." in name or ".mlp_conv." in name for name in tensors):
        return "dflash2"
    if "markov_head" in tops:
        return "dspark"
    if {"d2t", "t2d"} & tops or any(top.startswith("verifier_") for top in tops) or "embed_tokens" in tops:
        return "speculators"
    return "dflash"


def _is_quantised(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(_PACKED_DTYPES) or _QUANTISED.search(tensor.name) is not None


def _refuse(kind: str, what: str, where: str, fix: str = "give a DFlash drafter") -> NoReturn:
    raise FirstlightError(what, where=where, fix=fix, kind=kind)


def _refuse_model(tensors: Mapping[str, Tensor], tops: set[str], where: str) -> NoReturn:
    """Say what weights without a drafter's own tensors are."""
    inner = {name.split(".", 2)[1] for name in tensors if name.startswith("model.") and name.count(".") > 1}
    if {"fc", "hidden_norm"} & inner:
        _refuse(
            "prefixed-names",
            "holds a drafter whose names begin with 'model.', a prefix that vLLM adds itself.",
            where,
            "rename the tensors: drop the leading 'model.'",
        )
    if {"embed_tokens", "language_model", "visual"} & (tops | inner) or "lm_head" in tops:
        _refuse(
            "target-weights",
            f"holds the weights of an ordinary language model ({len(tensors)} tensors, with embeddings or an "
            "output head and without 'fc'), perhaps those of the target.",
            where,
            "give the path of the drafter's weights",
        )
    _refuse(
        "unknown-family",
        f"holds no drafter of a known family: there is no 'fc.weight' and no 'hidden_norm.weight' beside "
        f"'layers.N.*' (it has {', '.join(sorted(quoted(top, 30) for top in tops)[:8])}).",
        where,
    )


def count_layers(tensors: Mapping[str, Tensor], where: str) -> int:
    """The number of layers, holes in the numbering included.

    Raises:
        FirstlightError: the numbers cannot be those of a drafter.
    """
    numbers = {int(match[1]) for name in tensors if (match := LAYER.match(name))}
    layers = max(numbers) + 1
    if layers > _MAX_LAYERS or layers > 4 * len(numbers):
        what = f"its layers are numbered up to {layers - 1}, but there are only {len(numbers)} of them."
        _refuse("bad-layer-numbers", what, where, "copy the drafter's weights again, all of them")
    return layers


def measure(tensors: Mapping[str, Tensor], family: str, where: str) -> Shape:
    """Read a drafter's sizes off its tensors. Where layers disagree, the majority decides.

    Raises:
        FirstlightError: too little is there to tell the sizes (kind ``shape-unknown``).
    """
    layers = count_layers(tensors, where)
    hidden = _most(_sizes(tensors, ("norm.weight", "hidden_norm.weight"), 0))
    hidden = hidden or _most(_layer_sizes(tensors, "input_layernorm.weight", 0))
    head_dim = _most(_layer_sizes(tensors, "self_attn.q_norm.weight", 0))
    head_dim = head_dim or _most(_layer_sizes(tensors, "self_attn.k_norm.weight", 0))
    if not hidden or not head_dim:
        lacking = "norm.weight" if not hidden else "self_attn.q_norm.weight"
        what = f"its sizes cannot be told: no usable '{lacking}' of one dimension."
        _refuse("shape-unknown", what, where, "give the drafter's complete weights")
    query, key = _projections(tensors, family)
    inner = _most(_layer_sizes(tensors, "mlp.gate_proj.weight", 0))
    inner = inner or _most(_layer_sizes(tensors, "mlp.down_proj.weight", 1))
    if family == "laguna" and not inner:
        inner = (_most(_layer_sizes(tensors, "mlp.gate_up_proj.weight", 0)) or 0) // 2
    for name, value in (("q_proj", query), ("k_proj", key), ("mlp.gate_proj", inner)):
        if not value or (name != "mlp.gate_proj" and value % head_dim):
            what = f"its sizes cannot be told: no usable '{name}' ({value or 'no'} rows, head_dim {head_dim})."
            _refuse("shape-unknown", what, where, "give the drafter's complete weights")
    return Shape(
        hidden_size=hidden,
        intermediate_size=inner or 0,
        num_hidden_layers=layers,
        num_attention_heads=(query or 0) // head_dim,
        num_key_value_heads=(key or 0) // head_dim,
        head_dim=head_dim,
        dtype=_main_dtype(tensors.values()),
        fc_width=_dimension(tensors, "fc.weight", 1),
        attention_bias=any(re.search(r"self_attn\.[qkvo]_proj\.bias$", name) for name in tensors),
        sink_bias=any(name.endswith("self_attn.attention_sink_bias") for name in tensors),
        draft_vocab_size=_dimension(tensors, "d2t", 0),
        markov_rank=_dimension(tensors, "markov_head.markov_w1.weight", 1),
        **_dflash2_sizes(tensors, hidden),
    )


def _projections(tensors: Mapping[str, Tensor], family: str) -> tuple[int | None, int | None]:
    """Rows of the query and of the key projection."""
    query = _most(_layer_sizes(tensors, "self_attn.q_proj.weight", 0))
    query = query or _most(_layer_sizes(tensors, "self_attn.o_proj.weight", 1))
    key = _most(_layer_sizes(tensors, "self_attn.k_proj.weight", 0))
    key = key or _most(_layer_sizes(tensors, "self_attn.v_proj.weight", 0))
    if family == "laguna" and query and not key:
        fused = _most(_layer_sizes(tensors, "self_attn.qkv_proj.weight", 0)) or 0
        key = max(fused - query, 0) // 2
    return query, key


def _dflash2_sizes(tensors: Mapping[str, Tensor], hidden: int) -> dict[str, int | None]:
    kernel = _most(_layer_sizes(tensors, "attention_conv.base_kernel", 1))
    rows = _most(_layer_sizes(tensors, "attention_conv.kernel_projection.weight", 0))
    groups = rows // (2 * kernel) if rows and kernel else 0  # one coefficient a group, tap and side (before, after)
    return {
        "conv_kernel_size": kernel,
        "conv_group_size": hidden // groups if groups else None,
        "selector_rank": _dimension(tensors, "candidate_selector.hidden_projection.weight", 0),
    }


def _dimension(tensors: Mapping[str, Tensor], name: str, axis: int) -> int | None:
    sizes = _sizes(tensors, (name,), axis)
    return sizes[0] if sizes else None


def _sizes(tensors: Mapping[str, Tensor], names: Iterable[str], axis: int) -> list[int]:
    shapes = [tensors[name].shape for name in names if name in tensors]
    return [shape[axis] for shape in shapes if len(shape) > axis]


def _layer_sizes(tensors: Mapping[str, Tensor], suffix: str, axis: int) -> list[int]:
    return _sizes(tensors, [name for name in tensors if (match := LAYER.match(name)) and match[2] == suffix], axis)


def _most(values: list[int]) -> int | None:
    counted = Counter(value for value in values if value > 0).most_common(1)
    return counted[0][0] if counted else None


def _main_dtype(tensors: Iterable[Tensor]) -> str:
    counted = Counter(tensor.dtype for tensor in tensors if tensor.name.endswith(".weight"))
    return counted.most_common(1)[0][0] if counted else "BF16"
