"""What the drafter's configuration on the host says about the deployment, for the acceptance gate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .drafter_values import reference_taps
from .errors import FirstlightError

_MAX_BYTES = 1024 * 1024


def from_drafter(directory: str) -> dict[str, Any]:
    """Read ``config.json`` of a drafter as deployed.

    Args:
        directory: the drafter's folder on this host; empty when the server does not speculate.

    Returns:
        ``expected_taps`` (ids that the log must show: ``target_layer_ids`` + 1), ``formula_taps`` (the same for the
        layers of the reference formula), ``mask_token_id`` and ``sliding_window`` (tokens), each only when the file
        says it.

    Raises:
        FirstlightError: the file cannot be read (kind ``drafter-config-unreadable``).
    """
    if not directory:
        return {}
    path = Path(directory) / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(config, dict):
        raise _unreadable(path, "it is no JSON object")
    dflash = config.get("dflash_config")
    dflash = dflash if isinstance(dflash, Mapping) else {}
    evidence = {
        "expected_taps": _taps(config, dflash),
        "formula_taps": _formula(config, dflash),
        "mask_token_id": dflash.get("mask_token_id"),
        "sliding_window": config.get("sliding_window") if config.get("use_sliding_window", True) else None,
    }
    return {key: value for key, value in evidence.items() if value is not None}


def _taps(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> list[int] | None:
    ids = dflash.get("target_layer_ids")
    if isinstance(ids, list) and all(type(item) is int for item in ids):
        return [item + 1 for item in ids]
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return ids if isinstance(ids, list) else None


def _formula(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> list[int] | None:
    ids, layers = dflash.get("target_layer_ids"), config.get("num_target_layers")
    if not isinstance(ids, list) or not ids or type(layers) is not int:
        return None
    return [item + 1 for item in reference_taps(layers, len(ids))]


def _unreadable(path: Path, problem: str) -> FirstlightError:
    return FirstlightError(
        f"the drafter's configuration cannot be read: {problem}.",
        where=str(path),
        fix="name the folder that the server's speculative-config names as model.",
        kind="drafter-config-unreadable",
    )
