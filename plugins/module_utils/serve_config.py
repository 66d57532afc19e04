"""The configuration file of ``vllm serve --config``.

vLLM turns each key of the file into a flag. Two of its habits are traps, and this module closes them:
a key whose value is ``false`` is dropped without a word (the flag's ``no-`` form must be written instead),
and a key may be spelled with underscores or hyphens, so that one flag could be given twice.
Source: ``vllm/utils/argparse_utils.py`` of vLLM 0.20.1.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from .errors import FirstlightError

# flags that firstlight sets itself, with the variable that holds each
OWNED = {
    "host": "vllm_server_host",
    "port": "vllm_server_port",
    "model": "model_path or model_repo",
    "served-model-name": "vllm_server_served_model_name",
    "tensor-parallel-size": "vllm_server_tensor_parallel_size",
    "max-model-len": "vllm_server_max_model_len",
    "max-num-batched-tokens": "vllm_server_max_num_batched_tokens",
    "max-num-seqs": "vllm_server_max_num_seqs",
    "gpu-memory-utilization": "vllm_server_gpu_memory_utilization",
    "speculative-config": "vllm_server_num_speculative_tokens and the drafter_* variables",
    "api-key": "vllm_server_api_key",
    "trust-remote-code": "vllm_server_trust_remote_code",
    "config": "none: firstlight writes this file",
    "uds": "none: firstlight serves on TCP",
    "headless": "none: firstlight serves on one host",
}


_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*(?:\.[A-Za-z0-9_.-]+)?")


def flag_name(key: str) -> str:
    """The flag's one spelling: hyphens, no leading dashes. What follows a dot is a key of the flag's own mapping."""
    flag, dot, rest = key.strip().lstrip("-").partition(".")
    return flag.replace("_", "-") + dot + rest


def _value(key: str, value: Any) -> tuple[str, Any]:
    """A flag and what it is given in the file, where a mapping may also be the text of one, as on a command line."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return key, json.loads(value)
    if value is False and "." not in key:
        positive = key[3:] if key.startswith("no-") else f"no-{key}"
        return positive, True
    return key, value


def serve_config(settings: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Merge firstlight's own flags with the user's into the mapping that ``--config`` reads.

    Args:
        settings: flag to value, firstlight's own; ``None``, an empty string and an empty mapping leave the
            flag out, ``False`` becomes the flag's ``no-`` form.
        extra: the user's flags; wins over ``settings``, except for the flags in `OWNED`. Where both give a mapping
            (``compilation-config``), the user's keys win, and ``compilation-config.<key>`` is one of its keys.

    Returns:
        Flag (hyphens, sorted) to value, with no ``False`` and no empty value in it.

    Raises:
        FirstlightError: ``extra`` names a flag of `OWNED`, or one flag in two spellings.
    """
    merged: dict[str, Any] = {}
    for key, value in settings.items():
        if value is None or value in ("", {}, []):
            continue
        name, given = _value(flag_name(key), value)
        merged[name] = given
    seen: dict[str, str] = {}
    for key, value in (extra or {}).items():
        name, given = _value(flag_name(str(key)), value)
        base = name.removeprefix("no-")
        if not _FLAG.fullmatch(base):
            raise FirstlightError(
                f"{key!r} is not the name of a flag.",
                where="vllm_server_extra_args",
                fix="use the flag's long name, for instance enable-prefix-caching.",
            )
        owner = base.partition(".")[0]
        if owner in OWNED:
            raise FirstlightError(
                f"the flag --{name} is set by firstlight itself.",
                where=f"vllm_server_extra_args[{key!r}]",
                fix=f"set {OWNED[owner]} instead and drop the entry.",
            )
        if base in seen:
            raise FirstlightError(
                f"the flag --{base} is given twice, as {seen[base]!r} and {key!r}.",
                where="vllm_server_extra_args",
                fix="keep one of the two.",
            )
        seen[base] = str(key)
        ours = merged.pop(base, None)
        merged.pop(f"no-{base}", None)
        if isinstance(ours, Mapping) and isinstance(given, Mapping):
            given = {**ours, **given}
        if value is not None:
            merged[name] = given
    return dict(sorted(_folded(merged).items()))


def _folded(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``flag.key`` into the mapping of ``flag``: of two vLLM would take one, and ``false`` it cannot read there."""
    whole = {name: value for name, value in flags.items() if "." not in name}
    for name, value in flags.items():
        base, dot, key = name.partition(".")
        if not dot:
            continue
        *parents, last = key.split(".")
        given = whole.get(base)
        whole[base] = inner = dict(given) if isinstance(given, Mapping) else {}
        for parent in parents:
            inner[parent] = dict(inner[parent]) if isinstance(inner.get(parent), Mapping) else {}
            inner = inner[parent]
        inner[last] = value
    return whole
