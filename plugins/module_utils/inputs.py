"""Judgement of a deployment's variables before any host is touched.

Types and choices are the argument specs' business; here stand the rules about values (what systemd, a shell or a
file name would trip over) and those that span several variables. Runs on the controller, without Ansible.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FirstlightError
from .serve_config import serve_config

_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,100}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_SERVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,200}")
# characters that a unit file, an environment file or a quoted command line would read as its own
_TROUBLE = re.compile(r"[\x00-\x1f\x7f%\"'\\$`;|&<>*?!{}\[\]()]")
_PATHS = (
    "model_path", "drafter_path", "drafter_dest", "vllm_install_root", "vllm_install_python",
    "vllm_server_config_dir",
)  # fmt: skip
_PORTS = ("vllm_server_port", "sglang_stop_port")
_MAX_PORT = 65535


def _fail(variable: str, what: str, fix: str, why: str = "") -> None:
    raise FirstlightError(what, where=variable, why=why, fix=fix, kind="bad-input")


def _check_path(variable: str, value: Any) -> None:
    if value in (None, ""):
        return
    text = str(value)
    if _TROUBLE.search(text) or text != text.strip() or "\n" in text or " " in text:
        _fail(
            variable,
            f"the path {text!r} holds a space or a character that systemd or a shell reads as its own.",
            "use a path of letters, digits and ./_-+@:,= only.",
        )
    if not text.startswith("/") or ".." in Path(text).parts:
        _fail(variable, f"the path {text!r} is not absolute and plain.", "give an absolute path without `..`.")


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse values that no host could use.

    Args:
        values: variable name to its value, of all roles.

    Raises:
        FirstlightError: the first variable at fault, with the value that would be right where it is known.
    """
    for variable in _PATHS:
        _check_path(variable, values.get(variable))
    for path in values.get("vllm_server_readable_paths") or []:
        _check_path("vllm_server_readable_paths", path)
    for variable in _PORTS:
        port = values.get(variable)
        if port is not None and not 1 <= int(port) <= _MAX_PORT:
            _fail(variable, f"{port} is not a TCP port.", "set a port from 1 to 65535, for instance 30000.")
    _check_names(values)
    _check_numbers(values)
    _check_exposure(values)
    _check_code(values)
    serve_config({}, values.get("vllm_server_extra_args"))


def _check_names(values: Mapping[str, Any]) -> None:
    for variable, pattern, example in (
        ("vllm_server_unit", _UNIT, "vllm"),
        ("vllm_server_user", _USER, "vllm"),
        ("vllm_server_group", _USER, "vllm"),
        ("vllm_server_served_model_name", _SERVED, "Qwen3.6-27B"),
    ):
        value = values.get(variable)
        if value is not None and not pattern.fullmatch(str(value)):
            _fail(variable, f"{value!r} is not a usable name.", f"use a name like {example!r}.")
    unit = str(values.get("vllm_server_unit", ""))
    if unit.endswith(".service"):
        _fail("vllm_server_unit", "the name ends with .service.", f"set {unit.removesuffix('.service')!r}.")
    if unit in {"firstlight", *(u.removesuffix(".service") for u in values.get("sglang_stop_units") or [])}:
        _fail(
            "vllm_server_unit",
            f"{unit!r} is also the name of the unit to stop, or reserved.",
            "give the new server a name of its own, for instance 'vllm'.",
        )
    for name, value in (values.get("vllm_server_environment") or {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)) or re.search(r"[\0\r\n]", str(value)):
            _fail(
                "vllm_server_environment",
                f"the entry {name!r} is not a variable that systemd can carry.",
                "use a name of letters, digits and underscores, and a value on one line.",
            )
        if name in {"VLLM_PORT", "VLLM_CACHE_ROOT", "VLLM_API_KEY"}:
            _fail(
                "vllm_server_environment",
                f"{name} must not be set by hand.",
                {
                    "VLLM_PORT": "set vllm_server_port; VLLM_PORT is a port between vLLM's own processes.",
                    "VLLM_CACHE_ROOT": "drop it; firstlight keys the cache by what shapes the graph.",
                    "VLLM_API_KEY": "set vllm_server_api_key, which is kept out of argv and logs.",
                }[name],
            )


def minimum_batched_tokens(k: int, max_num_seqs: int, prompt_tokens: int = 1) -> int:
    """Smallest legal ``max_num_batched_tokens``: drafting takes ``(k - 1)`` slots of every sequence.

    Args:
        k: ``num_speculative_tokens``.
        max_num_seqs: sequences at once.
        prompt_tokens: tokens that must remain for the prompts of one step.
    """
    return (k - 1) * max_num_seqs + max(prompt_tokens, 1)


def _check_numbers(values: Mapping[str, Any]) -> None:
    for variable in (
        "vllm_server_tensor_parallel_size", "vllm_server_max_model_len", "vllm_server_max_num_batched_tokens",
        "vllm_server_max_num_seqs", "vllm_server_num_speculative_tokens", "vllm_server_releases_keep",
    ):  # fmt: skip
        value = values.get(variable)
        if value is not None and int(value) < 1:
            _fail(variable, f"{value} is too small.", "set a number of 1 or more.")
    share = values.get("vllm_server_gpu_memory_utilization")
    if share is not None and not 0 < float(share) <= 1:
        _fail("vllm_server_gpu_memory_utilization", f"{share} is not a share.", "set a share such as 0.9.")
    seqs, tokens = values.get("vllm_server_max_num_seqs"), values.get("vllm_server_max_num_batched_tokens")
    if seqs is None or tokens is None:
        return
    k = int(values.get("vllm_server_num_speculative_tokens") or 0) if values.get("drafter_enabled") else 0
    least = minimum_batched_tokens(k, int(seqs)) if k else int(seqs)
    if int(tokens) < least:
        _fail(
            "vllm_server_max_num_batched_tokens",
            f"{tokens} leaves {int(tokens) - (k - 1) * int(seqs) if k else int(tokens)} tokens a step to schedule:"
            f" drafting {k} tokens for {seqs} sequences takes {(k - 1) * int(seqs) if k else 0} of them.",
            f"set at least {(k + 1) * int(seqs)} ((k + 1) x max_num_seqs); 32768 is ample.",
            why="vLLM would end at start with `max_num_scheduled_tokens is set to -…`.",
        )


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` answers on this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_exposure(values: Mapping[str, Any]) -> None:
    host = str(values.get("vllm_server_host") or "127.0.0.1")
    try:
        if host != "localhost":
            ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        _fail("vllm_server_host", f"{host!r} is not an IP address.", "set 127.0.0.1, ::1 or the host's address.")
    key = values.get("vllm_server_api_key") or ""
    if key and (re.search(r"\s|[^\x21-\x7e]", str(key)) or len(str(key)) < 16):  # noqa: PLR2004 - 128 bits of hex are 32
        _fail(
            "vllm_server_api_key",
            "the key is shorter than 16 characters, or holds a space or a character outside ASCII.",
            "make one with `openssl rand -hex 32`.",
        )
    if not is_loopback(host) and not key:
        _fail(
            "vllm_server_host",
            f"{host} is reachable from other machines and no API key is set.",
            "set vllm_server_api_key, or bind to 127.0.0.1 and put a proxy in front.",
            why="anyone who reaches the port could use the GPUs.",
        )


def _check_code(values: Mapping[str, Any]) -> None:
    if not values.get("vllm_server_trust_remote_code"):
        return
    if values.get("model_repo") and not re.fullmatch(r"[0-9a-f]{40}", str(values.get("model_revision") or "")):
        _fail(
            "model_revision",
            "vllm_server_trust_remote_code runs Python from the repository, and its revision is not pinned.",
            "set model_revision to the full commit hash (40 hex digits) that you have read.",
        )


def tree_digest(root: Path) -> str:
    """Hex SHA-256 over names and contents of all files below ``root``, so that an upgrade counts as a change."""
    total = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        total.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def local_url(host: str, port: int) -> str:
    """URL at which a server bound to ``host`` answers on its own machine.

    Args:
        host: address bound to; the unspecified ones (``0.0.0.0``, ``::``) answer on loopback.
        port: TCP port.
    """
    bare = host.strip("[]")
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bare, bare)  # noqa: S104 - read, not bound
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
