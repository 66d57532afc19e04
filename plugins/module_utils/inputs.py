"""Judgement of a deployment's variables before any host is touched.

Types and choices are the argument specs' business; here stand the rules about values (what systemd, a shell or a
file name would trip over) and those that span several variables. Runs on the controller, without Ansible.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FirstlightError
from .inputs_proxy import check_proxy
from .serve_config import serve_config

_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}")
_OLD_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,200}")  # the old server's may be an instance of a template
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_SERVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,200}")
_CHOICE = re.compile(r"[A-Za-z0-9_.-]{0,64}")  # parsers and backends; empty leaves the flag out
_REPO = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_REVISION = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._/-]{0,200})?")
# characters that a unit file, an environment file or a quoted command line would read as its own
_TROUBLE = re.compile(r"[\x00-\x1f\x7f%\"'\\$`;|&<>*?!{}\[\]()]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # all but tab and line feed
_MANY_LINES = ("_dropin", "_prompt", "_prompts", "_pem")  # variables whose text may have several lines
_PATHS = (
    "model_path", "drafter_path", "drafter_dest", "vllm_install_root", "vllm_install_python",
    "vllm_server_config_dir",
)  # fmt: skip
_NEEDED = ("vllm_install_root", "vllm_install_python", "vllm_install_version", "vllm_server_config_dir")
_MAX_PORT = 65535
_MAX_INT = 2**31 - 1  # what systemd, the kernel and vLLM can all take


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


def check_values(values: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Refuse values that no host could use.

    Args:
        values: variable name to its value, of all roles; types as the argument specs ask for.
        options: variable name to its argument spec; gives the rules that hang on a variable's type alone.

    Raises:
        FirstlightError: the first variable at fault, with the value that would be right where it is known.
    """
    for variable, value in values.items():
        _check_shape(variable, value, (options or {}).get(variable, {}))
    for variable in _NEEDED:
        if values.get(variable) == "":
            _fail(variable, "it is empty.", "give a value, or leave the variable out to have its default.")
    for variable in _PATHS:
        _check_path(variable, values.get(variable))
    for path in values.get("vllm_server_readable_paths") or []:
        _check_path("vllm_server_readable_paths", path or " ")
        if ":" in path:
            _fail(
                "vllm_server_readable_paths", f"{path!r} holds a colon, which parts two paths in a unit.", "rename it."
            )
    _check_names(values)
    _check_environment(values)
    _check_unit_texts(values)
    _check_disk(values)
    _check_numbers(values)
    _check_exposure(values)
    _check_code(values)
    check_proxy(values)
    serve_config({}, values.get("vllm_server_extra_args"))


def _check_shape(variable: str, value: Any, option: Mapping[str, Any], *, plain: bool = True) -> None:
    """Rules for a value that hang on its type alone; a secret is never shown.

    What lies within a mapping (``plain`` is false then) is handed on as YAML or JSON, so that only control
    characters do harm there.
    """
    shown = "the value" if option.get("no_log") else repr(value if not isinstance(value, str) else value[:80])
    within = {"no_log": option.get("no_log")}
    if isinstance(value, (int, float)) and plain and not isinstance(value, bool):
        if not math.isfinite(value) or not 0 <= value <= _MAX_INT:
            _fail(variable, f"{shown} is out of range.", f"set a number from 0 to {_MAX_INT}.")
        if variable.endswith("_port") and not 1 <= value <= _MAX_PORT:
            _fail(variable, f"{shown} is not a TCP port.", "set a port from 1 to 65535, for instance 30000.")
    elif isinstance(value, str):
        if option.get("type") == "path" and not variable.endswith("_controller_path"):
            _check_path(variable, value)
        if _CONTROL.search(value):
            _fail(variable, f"{shown} holds a control character.", "give plain text.")
        if "\n" in value and plain and not variable.endswith(_MANY_LINES):
            _fail(variable, f"{shown} has more than one line.", "give it on one line, with no line break at its end.")
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _check_shape(variable, entry, within, plain=plain)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                _fail(variable, f"the key {key!r} is not text.", f"put it in quotes: '{key}'.")
            _check_shape(variable, [key, entry], within, plain=False)


def _check_unit_texts(values: Mapping[str, Any]) -> None:
    """What is written into the unit file as it is."""
    for entry in values.get("vllm_server_ip_allow") or []:
        try:
            ipaddress.ip_network(str(entry).replace("%", " "), strict=False)  # a zone may hold any character
        except ValueError:
            _fail(
                "vllm_server_ip_allow",
                f"{entry!r} is neither an IP address nor a network.",
                "use entries such as 127.0.0.0/8, ::1 or 192.0.2.7.",
            )
    lines = [line.strip() for line in str(values.get("vllm_server_unit_dropin") or "").splitlines()]
    first = next((line for line in lines if line and line[0] not in "#;"), "[")
    if not first.startswith("["):
        _fail(
            "vllm_server_unit_dropin",
            f"it starts with {first!r}, which belongs to no section.",
            r'start it with a section, for instance "[Service]\nMemoryMax=200G\n".',
            why="systemd would ignore it.",
        )


def _check_disk(values: Mapping[str, Any]) -> None:
    for folder, need in (values.get("preflight_min_disk_gib") or {}).items():
        _check_path("preflight_min_disk_gib", folder or " ")
        if isinstance(need, bool) or not isinstance(need, (int, float)):
            _fail("preflight_min_disk_gib", f"{need!r} is not a number of GiB.", f"set for instance {folder}: 25.")


def _check_names(values: Mapping[str, Any]) -> None:
    for variable, pattern, example in (
        ("vllm_server_unit", _UNIT, "vllm"),
        ("vllm_server_user", _USER, "vllm"),
        ("vllm_server_group", _USER, "vllm"),
        ("vllm_server_served_model_name", _SERVED, "Qwen3.6-27B"),
        ("vllm_server_reasoning_parser", _CHOICE, "qwen3"),
        ("vllm_server_tool_call_parser", _CHOICE, "qwen3_coder"),
        ("vllm_server_attention_backend", _CHOICE, "FLASH_ATTN"),
        ("vllm_server_gdn_prefill_backend", _CHOICE, "triton"),
        ("model_repo", _REPO, "Qwen/Qwen3.6-27B"),
        ("model_revision", _REVISION, "main"),
        ("drafter_repo", _REPO, "z-lab/Qwen3.6-27B-DFlash"),
        ("drafter_revision", _REVISION, "main"),
    ):
        value = values.get(variable)
        if value is not None and not pattern.fullmatch(str(value)):
            _fail(variable, f"{value!r} is not a usable name.", f"use a name like {example!r}.")
    for variable in ("vllm_server_user", "vllm_server_group"):
        if values.get(variable) == "root":
            _fail(
                variable, "the server must not run as root.", "name a system account of its own, for instance 'vllm'."
            )
    stopped = values.get("sglang_stop_units") or []
    for name in stopped:
        if not _OLD_UNIT.fullmatch(str(name)):
            _fail("sglang_stop_units", f"{name!r} is not a unit's name.", "use names like 'sglang.service'.")
    unit = str(values.get("vllm_server_unit", ""))
    if unit.endswith(".service"):
        _fail("vllm_server_unit", "the name ends with .service.", f"set {unit.removesuffix('.service')!r}.")
    if unit in {"firstlight", *(str(name).removesuffix(".service") for name in stopped)}:
        _fail(
            "vllm_server_unit",
            f"{unit!r} is also the name of the unit to stop, or reserved.",
            "give the new server a name of its own, for instance 'vllm'.",
        )


_BY_HAND = {
    "VLLM_PORT": "set vllm_server_port; VLLM_PORT is a port between vLLM's own processes.",
    "VLLM_CACHE_ROOT": "drop it; firstlight keys the cache by what shapes the graph.",
    "VLLM_API_KEY": "set vllm_server_api_key, which is kept out of argv and logs.",
}


def _check_environment(values: Mapping[str, Any]) -> None:
    for name, value in (values.get("vllm_server_environment") or {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            _fail(
                "vllm_server_environment",
                f"{name!r} is not the name of an environment variable.",
                "use letters, digits and underscores, not starting with a digit.",
            )
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            _fail(
                "vllm_server_environment",
                f"the value of {name} is {value!r}, which is not text.",
                f"put it in quotes as the program expects it, for instance {name}: '1'.",
            )
        if name in _BY_HAND:
            _fail("vllm_server_environment", f"{name} must not be set by hand.", _BY_HAND[name])


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
            f"set at least {(k + 1) * int(seqs)} ((k + 1) x max_num_seqs), or lower vllm_server_max_num_seqs or"
            " vllm_server_num_speculative_tokens.",
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
            ipaddress.ip_address(host.strip("[]").replace("%", " "))
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
