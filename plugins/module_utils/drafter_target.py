"""Reads what a drafter's configuration needs of its target: the target's config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .drafter_weights import read_json
from .errors import FirstlightError

MAX_CONFIG_BYTES = 1_000_000
# where models with several parts keep the language model's values
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Target:
    """The target model.

    Attributes:
        values: the language model's part of config.json, over the top-level values.
        hidden_size: width of the states that the taps deliver.
        num_hidden_layers: layers that can be tapped.
        vocab_size: tokens.
        names: words by which the target may be known: its path's last parts and ``_name_or_path``.
    """

    values: Mapping[str, Any]
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    names: tuple[str, ...] = ()

    @property
    def rope_theta(self) -> Any:
        """The base of the rotary embedding, wherever this generation of configurations keeps it."""
        return self._rope().get("rope_theta", self.values.get("rope_theta"))

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The scaling of positions, None when there is none."""
        scaling = self.values.get("rope_scaling") or self._rope()
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
        if not isinstance(scaling, dict) or not isinstance(kind, str) or kind in {"default", "mrope"}:
            return None
        return {name: value for name, value in scaling.items() if name != "rope_theta"}

    def _rope(self) -> Mapping[str, Any]:
        rope = self.values.get("rope_parameters")
        return rope if isinstance(rope, dict) else {}

    @property
    def hybrid(self) -> bool:
        """Whether only some layers have full attention, the others linear attention."""
        types = self.values.get("layer_types")
        mixed = isinstance(types, list) and "linear_attention" in types
        return mixed or "full_attention_interval" in self.values


def read_target(path: str) -> Target:
    """Read the target's configuration.

    Args:
        path: the target's folder, or its config.json.

    Raises:
        FirstlightError: missing, unreadable, or without the sizes that are needed.
    """
    where = os.path.abspath(path)  # noqa: PTH100 - Path.absolute keeps ".."
    file = str(Path(where, "config.json")) if Path(where).is_dir() else where
    try:
        document, _ = read_json(file, MAX_CONFIG_BYTES, "bad-target-config")
    except FirstlightError as error:
        if error.kind != "missing":
            raise
        fix = "give the folder that holds the target's config.json, or the file itself"
        raise FirstlightError("does not exist.", where=file, fix=fix, kind="target-missing") from error
    return parse_target(document, file)


def parse_target(document: Mapping[str, Any], where: str) -> Target:
    """Take the needed values out of the target's config.json, already read.

    Raises:
        FirstlightError: kind ``bad-target-config``.
    """
    values = dict(document)
    for name in _NESTED:
        if isinstance(nested := document.get(name), dict):
            values.update({key: value for key, value in nested.items() if value is not None or key not in values})
            break
    sizes = {name: values.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    bad = [name for name, value in sizes.items() if type(value) is not int or not 0 < value < 2**31]
    if bad:
        raise FirstlightError(
            f"has no usable {', '.join(bad)}, at the top level or under text_config.",
            where=where,
            fix="give the config.json of the target model, not of the drafter or of another part",
            kind="bad-target-config",
        )
    architectures = document.get("architectures")
    if isinstance(architectures, list) and any(str(name).startswith(("DFlash", "Eagle")) for name in architectures):
        raise FirstlightError(
            f"describes a drafter ({architectures[0]}), not a target.",
            where=where,
            fix="give the config.json of the target model",
            kind="bad-target-config",
        )
    named = document.get("_name_or_path")
    names = (*Path(where).parts[-5:-1], *([named] if isinstance(named, str) and named else []))
    return Target(
        values,
        hidden_size=int(sizes["hidden_size"] or 0),
        num_hidden_layers=int(sizes["num_hidden_layers"] or 0),
        vocab_size=int(sizes["vocab_size"] or 0),
        names=names,
    )
