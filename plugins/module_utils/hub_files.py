"""Whether a folder of the host holds a whole model: configuration, tokenizer, and every byte of its weights.

vLLM starts and answers ``/health`` without a tokenizer, and tells a missing shard only minutes into a start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .errors import FirstlightError
from .safetensors_header import read_header

INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")
_POINTER = b"version https://git-lfs.github.com/spec/"
_HEADER_LIMIT = 100_000_000  # as the format allows: a target's shard lists thousands of tensors


@dataclass(frozen=True)
class ModelFolder:
    """A whole model. ``weights`` are file names, ``weight_bytes`` their size together in bytes."""

    path: str
    architectures: tuple[str, ...]
    weights: tuple[str, ...]
    weight_bytes: int


def inspect_model(path: str, *, variable: str = "model_path") -> ModelFolder:
    """Read what is there and judge it; only headers of weights are read.

    Args:
        path: folder on this host.
        variable: the variable to name in errors.

    Raises:
        FirstlightError: the folder, its configuration, its tokenizer or a weight file is missing or broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FirstlightError(
            f"there is no folder {path} on the host.",
            where=variable,
            fix="Copy the model there, correct the path, or set model_repo and model_revision to fetch it.",
            kind="model-missing",
        )
    config = _read_json(folder / "config.json", variable)
    architectures = config.get("architectures")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise FirstlightError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZERS[:3])} or the like).",
            where=variable,
            why="The server would start, look healthy and refuse every chat.",
            fix="Copy the tokenizer's files there from where the weights came from.",
            kind="tokenizer-missing",
        )
    weights = weight_files(folder, variable)
    for name in weights:
        _check_weights(folder / name, variable)
    return ModelFolder(
        path=str(folder),
        architectures=tuple(str(name) for name in architectures) if isinstance(architectures, list) else (),
        weights=tuple(weights),
        weight_bytes=sum((folder / name).stat().st_size for name in weights),
    )


def weight_files(folder: Path, variable: str = "model_path") -> list[str]:
    """Names of the weight files that the index, or the lack of one, asks for.

    Raises:
        FirstlightError: ``weights-missing`` with the names, or a broken index.
    """
    if (folder / INDEX).is_file():
        mapping = _read_json(folder / INDEX, variable).get("weight_map")
        if not isinstance(mapping, dict) or not mapping or not all(isinstance(n, str) for n in mapping.values()):
            raise _broken(folder / INDEX, "it has no weight_map", variable)
        names = sorted(set(mapping.values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors")) or ["model.safetensors"]
    missing = [name for name in names if "/" in name or not (folder / name).is_file()]
    if missing:
        raise FirstlightError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:4])}.",
            where=variable,
            fix="Copy the missing files there, or fetch the model again.",
            kind="weights-missing",
        )
    return names


def _read_json(path: Path, variable: str) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FirstlightError(
            f"{path.parent} has no {path.name}.",
            where=variable,
            fix="Name the folder that holds config.json and the weights.",
            kind="model-config-missing",
        ) from error
    except (OSError, ValueError) as error:
        raise _broken(path, str(error), variable) from error
    if not isinstance(content, dict):
        raise _broken(path, "it is no JSON object", variable)
    return content


def _broken(path: Path, why: str, variable: str) -> FirstlightError:
    return FirstlightError(
        f"{path} cannot be used ({why}).",
        where=variable,
        fix="Copy the file again from its source.",
        kind="model-broken",
    )


def _check_weights(path: Path, variable: str) -> None:
    with path.open("rb") as handle:
        start = handle.read(len(_POINTER))
    if start == _POINTER:
        raise FirstlightError(
            f"{path} is a Git LFS pointer, not the weights.",
            where=variable,
            fix=f"Run `git lfs pull` in {path.parent}, or set model_repo and model_revision to fetch the model.",
            kind="lfs-pointer",
        )
    if path.suffix == ".safetensors":
        read_header(str(path), _HEADER_LIMIT)
