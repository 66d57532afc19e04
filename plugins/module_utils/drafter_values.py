"""The values that a user, or a drafter's existing config.json, may give; each checked by kind before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .drafter_family import SIZES
from .drafter_report import Problem
from .safetensors_header import quoted

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Kind:
    """A test for values, and how to say what passes it."""

    test: Callable[[Any], bool]
    text: str


def _integer(low: int, high: int = 2**31 - 1) -> Kind:
    return Kind(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int and item >= 0 for item in value)


def _layer_types(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(item in LAYER_TYPES for item in value)


def _number(value: Any) -> bool:
    return type(value) in {int, float} and 0 < value < float("inf")


def _or_none(kind: Kind) -> Kind:
    return Kind(lambda value: value is None or kind.test(value), f"{kind.text}, or null")


_BOOLEAN = Kind(lambda value: isinstance(value, bool), "true or false")
_TEXT = Kind(lambda value: isinstance(value, str) and 0 < len(value) <= 200, "a text")  # noqa: PLR2004
_MAPPING = Kind(lambda value: isinstance(value, dict) and bool(value), "a mapping")
_NUMBER = Kind(_number, "a positive number")
_TOKEN = _or_none(_integer(0))
_TOKENS = Kind(lambda value: _TOKEN.test(value) or _integers(value), "a token id, a list of them, or null")

# Sizes that the weights decide. They may be given, but only as they are.
FROM_WEIGHTS: Mapping[str, Kind] = {
    name: _integer(1) for name in (*SIZES, "num_target_layers", "vocab_size", "draft_vocab_size")
}
# What the weights leave open.
OPEN: Mapping[str, Kind] = {
    "mask_token_id": _integer(0),
    "block_size": _integer(2, 1024),
    "target_layer_ids": Kind(_integers, "a list of layer numbers, counted from 0"),
    "layer_types": _or_none(Kind(_layer_types, f"a list of {' and '.join(LAYER_TYPES)}, one a layer")),
    "sliding_window": _or_none(_integer(1)),
    "rope_theta": _NUMBER,
    "rope_scaling": _or_none(_MAPPING),
    "max_position_embeddings": _integer(1),
    "rms_norm_eps": _NUMBER,
    "hidden_act": _TEXT,
    "tie_word_embeddings": _BOOLEAN,
    "eos_token_id": _TOKENS,
    "pad_token_id": _TOKEN,
    "bos_token_id": _TOKEN,
    "max_window_layers": _integer(0),
    "partial_rotary_factor": _NUMBER,
    "final_logit_softcapping": _or_none(_NUMBER),
    "is_causal": _BOOLEAN,
    "use_swa": _BOOLEAN,
    "swa_window_size": _integer(1),
    "selector_top_k": _integer(1),
    "quantization_config": _MAPPING,
}
# chooses a row of the table; no field of the configuration
ROW_CHOICE = "family"
KNOWN: Mapping[str, Kind] = {**FROM_WEIGHTS, **OPEN, ROW_CHOICE: _TEXT}


def check_values(given: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], list[Problem]]:
    """Separate usable values from others.

    Args:
        given: by field; a leading ``dflash_config.`` is dropped.
        origin: what to call them in messages: ``set``, or the file's path.

    Returns:
        the usable values, and a problem for each other one.
    """
    good: dict[str, Any] = {}
    problems = []
    for raw, value in given.items():
        name = str(raw).removeprefix("dflash_config.")
        kind = KNOWN.get(name)
        if kind is None:
            message = f"{origin} gives '{quoted(name)}', which is no field of a drafter's configuration."
            if name == "eagle_aux_hidden_state_layer_ids":
                message = f"{origin} gives '{name}', which always is target_layer_ids + 1."
            known = ", ".join(sorted(OPEN))
            problems.append(Problem("unknown-field", "error", quoted(name), message, f"give one of: {known}"))
        elif not kind.test(value):
            message = f"{origin} gives {name} as {quoted(repr(value))}; it must be {kind.text}."
            problems.append(Problem("bad-value", "error", name, message, f"give {name} as {kind.text}"))
        else:
            good[name] = value
    return good, problems


def check_taps(taps: list[int], count: int | None, layers: int) -> list[Problem]:
    """Check target_layer_ids against ``fc`` (``count`` of them) and the target (``layers``)."""
    message = ""
    if count is not None and len(taps) != count:
        message = f"{len(taps)} layers are given, but the drafter's fc takes {count}."
    elif len(set(taps)) < len(taps):
        message = f"{taps} names a layer twice."
    elif max(taps) >= layers:
        message = f"{taps} names layer {max(taps)}, but the target's {layers} layers are numbered 0 to {layers - 1}."
    if not message:
        return []
    number = count if count is not None else "distinct"
    fix = f"give target_layer_ids as {number} layers from 0 to {layers - 1}"
    return [Problem("bad-taps", "error", "target_layer_ids", message, fix)]


def reference_taps(layers: int, count: int) -> list[int]:
    """The target_layer_ids of the reference implementation (z-lab dflash 0.1.0, ``build_target_layer_ids``).

    Args:
        layers: the target's layers.
        count: how many of them are tapped.

    Returns:
        layer numbers from 0; the *output* of each is meant.
    """
    if count == 1:
        return [layers // 2]
    first, last = 1, layers - 3
    return [round(first + index * (last - first) / (count - 1)) for index in range(count)]
