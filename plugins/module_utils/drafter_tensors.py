"""Compares a drafter's complete tensor list with what its configuration makes vLLM expect.

vLLM 0.20.1 loads a drafter with tensors missing, even ``fc.weight``, without a word, and then drafts nonsense; an
unknown tensor stops it with a KeyError. So the list is checked before anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .drafter_family import LAYER, Shape
from .drafter_report import Problem
from .safetensors_header import Tensor, quoted

Shapes = dict[str, tuple[int, ...]]
# more than this of one kind are counted, not listed: a wrong model has thousands
MOST_LISTED = 40
# training leaves these behind; vLLM has no place for them and stops
_TRAINING_PREFIXES = ("verifier_lm_head.", "verifier_norm.")


def plain_layer(shape: Shape) -> Shapes:
    """The eleven tensors of one layer of a plain drafter, by suffix."""
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    query, key = shape.num_attention_heads * head, shape.num_key_value_heads * head
    layer: Shapes = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if shape.attention_bias:
        for name, rows in (("q", query), ("k", key), ("v", key), ("o", hidden)):
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    if shape.sink_bias:
        layer["self_attn.attention_sink_bias"] = (shape.num_attention_heads,)
    return layer


def _dflash2_layer(shape: Shape) -> Shapes:
    kernel, group = shape.conv_kernel_size or 0, shape.conv_group_size or 1
    layer = plain_layer(shape)
    for conv in ("attention_conv", "mlp_conv"):
        layer[f"{conv}.base_kernel"] = (2, kernel, shape.hidden_size)
        layer[f"{conv}.kernel_projection.weight"] = (
            2 * kernel * (shape.hidden_size // group),
            shape.hidden_size,
        )
    return layer


def expected_tensors(family: str, shape: Shape, fc_width: int, vocab_size: int) -> Shapes:
    """The names and shapes of all tensors that vLLM needs for this drafter.

    Args:
        family: ``dflash``, ``dflash2``, ``dspark`` or ``speculators``.
        shape: the drafter's sizes.
        fc_width: taps times the target's hidden size.
        vocab_size: the target's.
    """
    hidden = shape.hidden_size
    layer = _dflash2_layer(shape) if family == "dflash2" else plain_layer(shape)
    tensors: Shapes = {
        "fc.weight": (hidden, fc_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(shape.num_hidden_layers):
        tensors.update({f"layers.{index}.{suffix}": size for suffix, size in layer.items()})
    if family == "dflash2":
        rank = shape.selector_rank or 0
        tensors["candidate_selector.predecessor_codebook"] = (vocab_size, rank)
        tensors["candidate_selector.successor_codebook"] = (vocab_size, rank)
        tensors["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if family == "dspark":
        rank, drafted = shape.markov_rank or 0, shape.draft_vocab_size or vocab_size
        tensors["markov_head.markov_w1.weight"] = (vocab_size, rank)
        tensors["markov_head.markov_w2.weight"] = (drafted, rank)
    if shape.draft_vocab_size and shape.draft_vocab_size != vocab_size:
        tensors["d2t"] = (shape.draft_vocab_size,)
        tensors["lm_head.weight"] = (shape.draft_vocab_size, hidden)
    return tensors


def optional_tensors(family: str, shape: Shape, vocab_size: int) -> Shapes:
    """Tensors that vLLM takes when they are there, and does without when they are not."""
    hidden, drafted = shape.hidden_size, shape.draft_vocab_size or vocab_size
    tensors: Shapes = {}
    if family in {"speculators", "dspark"}:
        tensors = {
            "embed_tokens.weight": (vocab_size, hidden),
            "lm_head.weight": (drafted, hidden),
            "t2d": (vocab_size,),
            "d2t": (drafted,),
        }
    if family == "dspark":
        tensors["confidence_head.proj.bias"] = (1,)
    return tensors


def check_tensors(tensors: Mapping[str, Tensor], needed: Shapes, optional: Shapes, dtype: str) -> list[Problem]:
    """Name every missing, extra, wrongly shaped and wrongly typed tensor."""
    known = {**optional, **needed}
    problems = _list(
        "missing-tensor",
        [name for name in needed if name not in tensors],
        lambda name: f"'{name}'{_sized(needed[name])} is missing; vLLM would start all the same and draft nonsense.",
        "copy the drafter's weights again, all of them",
    )
    extra = [name for name in tensors if name not in known and not _ignored(name)]
    problems += _list(
        "extra-tensor",
        [name for name in extra if not name.startswith(_TRAINING_PREFIXES)],
        lambda name: f"'{quoted(name)}' belongs to no drafter of this family and shape; vLLM would stop at it.",
        "give the drafter's own weights, unchanged",
    )
    problems += _list(
        "training-tensor",
        [name for name in extra if name.startswith(_TRAINING_PREFIXES)],
        lambda name: f"'{name}' is only for training; vLLM has no place for it and would stop.",
        "export the drafter as its publisher does, without the verifier's tensors",
    )
    both = [name for name in known if name in tensors]
    problems += _list(
        "wrong-shape",
        [name for name in both if tensors[name].shape != known[name]],
        lambda name: f"'{name}' has the shape {list(tensors[name].shape)}, not {list(known[name])}.",
        "copy the drafter's weights again, all from one revision",
    )
    return problems + _list(
        "wrong-dtype",
        [name for name in both if tensors[name].dtype not in _dtypes(name, dtype)],
        lambda name: f"'{name}' is {tensors[name].dtype}, the drafter {dtype}.",
        f"convert all tensors to {dtype}",
    )


def _sized(shape: tuple[int, ...]) -> str:
    return "" if 0 in shape else f" of shape {list(shape)}"


def _ignored(name: str) -> bool:
    # vLLM skips confidence heads and recomputed rotary tables by name
    return name.startswith("confidence_head.") or name.endswith("rotary_emb.inv_freq")


def _dtypes(name: str, dtype: str) -> tuple[str, ...]:
    return {"d2t": ("I64", "I32"), "t2d": ("BOOL", "I64", "I32")}.get(name, (dtype,))


def _list(kind: str, names: list[str], say: Callable[[str], str], fix: str) -> list[Problem]:
    problems = [Problem(kind, "error", quoted(name), say(name), fix) for name in names[:MOST_LISTED]]
    if len(names) > MOST_LISTED:
        rest = f"{len(names) - MOST_LISTED} more, from '{quoted(names[MOST_LISTED])}' to '{quoted(names[-1])}'."
        problems.append(Problem(kind, "error", "", rest, fix))
    return problems


def check_quantised(tensors: Mapping[str, Tensor], shape: Shape) -> list[Problem]:
    """Packed weights have other names and shapes, so only the presence of each module can be checked."""
    modules = {suffix.rpartition(".")[0] for suffix in plain_layer(shape)}
    present = {(int(match[1]), match[2].rpartition(".")[0]) for name in tensors if (match := LAYER.match(name))}
    wanted = [(index, module) for index in range(shape.num_hidden_layers) for module in sorted(modules)]
    return _list(
        "missing-tensor",
        [f"layers.{index}.{module}" for index, module in wanted if (index, module) not in present],
        lambda name: f"the module '{name}' has no tensor at all.",
        "copy the drafter's weights again, all of them",
    )
