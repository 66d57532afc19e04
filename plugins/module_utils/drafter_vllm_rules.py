"""What each release of vLLM can do with a drafter.

Read in the released wheels of 0.20.1, 0.24.0, 0.25.0, 0.25.1, 0.26.0 and 0.28.0: ``models/registry.py`` for the
families, ``models/qwen3_dflash.py`` for attention patterns and sinks, ``spec_decode`` for the taps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .drafter_report import Problem
from .errors import FirstlightError

Version = tuple[int, int, int]

DEFAULT_VERSION = "0.20.1"
TAPS_FIXED: Version = (0, 22, 0)  # before it, dflash_config.target_layer_ids is read one layer too early
SINKS_READ: Version = (0, 25, 0)
PATTERN_READ: Version = (0, 25, 0)  # before it, layer_types and the window are ignored
MIXED_PATTERN_SERVED: Version = (0, 26, 0)

_FIRST: Mapping[str, tuple[Version, str]] = {
    "dflash": ((0, 20, 0), "a DFlash drafter"),
    "speculators": ((0, 20, 0), "a DFlash drafter in speculators' format"),
    "dspark": ((0, 25, 0), "a DSpark drafter (markov_head)"),
    "laguna": ((0, 25, 0), "a Laguna DFlash drafter (fused projections)"),
    "quantised": ((0, 25, 0), "a quantised DFlash drafter"),
    "dflash2": ((0, 28, 0), "a DFlash2 drafter (attention_conv, mlp_conv, candidate_selector)"),
}


def parse_version(text: str) -> Version:
    """Take the release out of a version such as ``0.20.1``, ``0.26.0+cpu`` or ``0.26.1rc1.dev913``.

    Raises:
        FirstlightError: not a version.
    """
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.+-]?[0-9A-Za-z][0-9A-Za-z.+-]*)?", text)
    if match is None:
        raise FirstlightError(
            f"'{text[:40]}' is no version of vLLM.",
            where="vllm_version",
            fix=f"give a version such as {DEFAULT_VERSION}",
            kind="bad-vllm-version",
        )
    return int(match[1]), int(match[2]), int(match[3] or 0)


def text_of(version: Version) -> str:
    """A version as people write it."""
    return ".".join(str(part) for part in version)


def family_problems(family: str, version: Version) -> list[Problem]:
    """Refuse a family that this vLLM cannot run, naming the first release that can."""
    first, name = _FIRST[family]
    if version >= first:
        return []
    message = f"this is {name}; vLLM {text_of(version)} cannot run one, {text_of(first)} and newer can."
    fix = f"use vLLM {text_of(first)} or newer"
    if family == "quantised":
        fix += ", or the drafter's unquantised weights"
    return [Problem("family-unsupported", "error", "family", message, fix)]


def sink_problems(version: Version) -> list[Problem]:
    """Refuse attention sinks before the release that reads them."""
    if version >= SINKS_READ:
        return []
    message = f"the layers have attention_sink_bias; vLLM {text_of(version)} stops at these tensors."
    fix = f"use vLLM {text_of(SINKS_READ)} or newer"
    return [Problem("family-unsupported", "error", "self_attn.attention_sink_bias", message, fix)]


def pattern_problems(
    layer_types: Sequence[str] | None, window: int | None, version: Version, served_tokens: int, served_is: str
) -> list[Problem]:
    """Say what becomes of the attention pattern.

    Args:
        layer_types: one of ``full_attention`` and ``sliding_attention`` a layer; None when the drafter has none.
        window: the sliding window, in tokens.
        version: vLLM's.
        served_tokens: the longest sequence served.
        served_is: what that number is, for the message.
    """
    sliding = [kind for kind in layer_types or () if kind == "sliding_attention"]
    mixed = bool(sliding) and len(sliding) < len(layer_types or ())
    if (version >= MIXED_PATTERN_SERVED) or (version >= PATTERN_READ and not mixed):
        return []
    if version >= PATTERN_READ:
        message = (
            f"{len(sliding)} of {len(layer_types or ())} layers have sliding attention; "
            f"vLLM {text_of(version)} refuses such a mixture at its start (NotImplementedError)."
        )
        fix = f"use vLLM {text_of(MIXED_PATTERN_SERVED)} or newer, or one before {text_of(PATTERN_READ)}"
        return [Problem("mixed-attention-refused", "error", "layer_types", message, fix)]
    if (sliding or not layer_types) and window and served_tokens > window:
        message = (
            f"vLLM {text_of(version)} ignores the drafter's sliding window of {window} tokens, and {served_is} is "
            f"{served_tokens}: in longer sequences fewer drafts are accepted. Answers stay right."
        )
        fix = f"use vLLM {text_of(MIXED_PATTERN_SERVED)} or newer; no setting of this version mends it"
        return [Problem("window-ignored", "warning", "sliding_window", message, fix)]
    return []


def position_problems(positions: Any, served_tokens: int, served_is: str) -> list[Problem]:
    """Warn when drafting stops before the longest sequence ends."""
    if not isinstance(positions, int) or positions >= served_tokens:
        return []
    message = (
        f"the drafter has {positions} positions and {served_is} is {served_tokens}: "
        "vLLM silently drafts nothing beyond the drafter's positions."
    )
    fix = f"set max_model_len to {positions} or less, or accept plain decoding beyond it"
    return [Problem("positions-too-few", "warning", "max_position_embeddings", message, fix)]
