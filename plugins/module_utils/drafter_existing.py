"""A config.json that came with the weights: what it says, and what must be changed in it for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .drafter_fields import AUX
from .drafter_report import Problem
from .drafter_values import FROM_WEIGHTS, OPEN, check_values

_NOT_NEEDED = frozenset({"eos_token_id", "pad_token_id", "bos_token_id", "num_target_layers", "max_window_layers"})
_DRAFTERS = ("DFlash", "Qwen3DSpark", "DSpark", "Gemma4DSpark")


def describes_drafter(document: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of a DFlash-like drafter."""
    names = document.get("architectures")
    listed = isinstance(names, list) and any(str(name).startswith(_DRAFTERS) or "DFlash" in str(name) for name in names)
    return listed or "dflash_config" in document or "speculators_model_type" in document


def flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a drafter's config.json, from any of its layouts.

    Values stand at the top level, under ``dflash_config``, under ``rope_parameters`` (newer transformers), or, in
    speculators' format, under ``transformer_layer_config``, with ``aux_hidden_state_layer_ids`` counted from 1.
    """
    flat: dict[str, Any] = {}
    layer = document.get("transformer_layer_config")
    nested = document.get("dflash_config")
    for part in (layer, document, nested):
        if isinstance(part, dict):
            flat.update({name: value for name, value in part.items() if name in OPEN or name in FROM_WEIGHTS})
    rope = (layer if isinstance(layer, dict) else document).get("rope_parameters")
    if isinstance(rope, dict):
        flat.setdefault("rope_theta", rope.get("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
            flat["rope_scaling"] = flat.get("rope_scaling") or scaling
    aux = document.get("aux_hidden_state_layer_ids")
    if isinstance(aux, list) and all(type(layer_id) is int and layer_id > 0 for layer_id in aux):
        flat.setdefault("target_layer_ids", [layer_id - 1 for layer_id in aux])
    return flat


def compare_existing(document: Mapping[str, Any] | None, path: str) -> tuple[dict[str, Any], list[Problem]]:
    """The usable values of an existing config.json, and a problem for each other one.

    Returns:
        values by field, without those that are null and would only hide better ones; and the problems.
    """
    if document is None:
        return {}, []
    if not describes_drafter(document):
        message = f"{path} describes another model ({document.get('architectures')}), not a DFlash drafter."
        fix = "give the drafter's folder, or remove that file"
        return {}, [Problem("wrong-model", "error", "architectures", message, fix)]
    flat = flatten(document)
    keep_null = {"rope_scaling", "sliding_window", "pad_token_id", "bos_token_id"}
    given = {name: value for name, value in flat.items() if value is not None or name in keep_null}
    values, problems = check_values(given, path)
    return values, problems


def keep_existing(
    document: Mapping[str, Any], derived: Mapping[str, Any], user: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[Problem]]:
    """The existing config.json with only what vLLM needs changed.

    Args:
        document: the existing file.
        derived: the derived configuration, the existing values already in it.
        user: values the user gave; they replace existing ones.
        path: the file's path.

    Returns:
        the configuration to use, and a warning that names what was changed.
    """
    if "speculators_model_type" in document:
        # its own layout: rewritten in the plain one, which vLLM reads alike
        kept, changed = dict(derived), ["speculators_model_type"]
    else:
        kept = dict(document)
        changed = [name for name in ("auto_map",) if kept.pop(name, None) is not None]
        present = flatten(document)
        for name, value in derived.items():
            if name == "dflash_config":
                inner = {**_mapping(kept.get(name)), **value}
                if inner != kept.get(name):
                    changed.append(name)
                    kept[name] = inner
                continue
            # what is null, false or only for completeness need not be added to another's file
            lacking = name not in kept and present.get(name) is None and bool(value) and name not in _NOT_NEEDED
            wanted = name == AUX or name in user or lacking
            if wanted and kept.get(name, ...) != value:
                changed.append(name)
                kept[name] = value
    if not changed:
        return kept, []
    message = f"{path} is kept, but for {', '.join(changed)}, which vLLM needs otherwise."
    return kept, [Problem("config-amended", "warning", changed[0], message, "nothing is to be done")]


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
