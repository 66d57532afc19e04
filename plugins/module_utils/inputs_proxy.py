"""Judgement of the reverse proxy's variables: what nginx would read as its own syntax, or could not use."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FirstlightError

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"_|{_LABEL}(?:\.{_LABEL})*")
_SIZE = re.compile(r"[1-9][0-9]{0,8}[kKmMgG]?")
_PATH = re.compile(r"/[A-Za-z0-9._/@+=,-]+")
_UPSTREAM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535


def _fail(variable: str, what: str, fix: str, why: str = "") -> None:
    raise FirstlightError(what, where=variable, why=why, fix=fix, kind="bad-input")


def _plain(text: str) -> str:
    """The text, unless it has a zone (``fe80::1%eth0``), in which Python's parser lets every character pass."""
    if "%" in text:
        raise ValueError(text)
    return text


def upstream_parts(upstream: str) -> tuple[str, int] | None:
    """Host (an IPv6 address without its brackets) and port of ``proxy_upstream``; None when it is not of that form."""
    found = _UPSTREAM.fullmatch(upstream)
    if not found or not 1 <= int(found["port"]) <= _MAX_PORT:
        return None
    host = found["host"].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            return None
    return host, int(found["port"])


def check_proxy(values: Mapping[str, Any]) -> None:
    """Refuse values of the role `proxy` that nginx could not use, or would take for syntax.

    Args:
        values: variable name to value; variables that are absent are not judged.

    Raises:
        FirstlightError: the first variable at fault.
    """
    address = values.get("proxy_address")
    if address is not None:
        try:
            ipaddress.ip_address(_plain(str(address)))
        except ValueError:
            _fail("proxy_address", f"{address!r} is not an IP address.", "set 0.0.0.0, :: or an address of the host.")
    name = values.get("proxy_server_name")
    if name is not None and not _NAME.fullmatch(str(name)):
        _fail("proxy_server_name", f"{name!r} is not a host's name.", "set a name like llm.example.org, or _ for any.")
    size = values.get("proxy_max_body")
    if size is not None and not _SIZE.fullmatch(str(size)):
        _fail("proxy_max_body", f"{size!r} is not a size.", "set a number with k, m or g, for instance 32m.")
    seconds = values.get("proxy_read_timeout_s")
    if seconds is not None and int(seconds) < 1:
        _fail("proxy_read_timeout_s", f"{seconds} is too short.", "set a number of seconds, for instance 600.")
    for variable in ("proxy_api_allow", "proxy_metrics_allow"):
        for entry in values.get(variable) or []:
            try:
                ipaddress.ip_network(_plain(str(entry)))
            except ValueError:
                _fail(
                    variable,
                    f"{entry!r} is neither an IP address nor a network.",
                    "use entries such as 192.0.2.7, 192.0.2.0/24 or 2001:db8::/32.",
                )
    _check_certificate(values)
    _check_upstream(values)


def _check_certificate(values: Mapping[str, Any]) -> None:
    given = {name: str(values.get(name) or "") for name in ("proxy_certificate", "proxy_certificate_key")}
    for name, path in given.items():
        if path and (not _PATH.fullmatch(path) or ".." in Path(path).parts):
            _fail(name, f"{path!r} is not a plain absolute path.", "give a path such as /etc/ssl/private/llm.pem.")
    missing = [name for name, path in given.items() if not path]
    if len(missing) == 1:
        _fail(
            missing[0],
            "proxy_certificate and proxy_certificate_key belong together, and only one is set.",
            "set both, or neither to have a self-signed pair made.",
        )


def _check_upstream(values: Mapping[str, Any]) -> None:
    upstream = values.get("proxy_upstream")
    if upstream is None:
        return
    parts = upstream_parts(str(upstream))
    if parts is None:
        _fail("proxy_upstream", f"{upstream!r} is not an address and a port.", "set for instance 127.0.0.1:30000.")
    elif parts[1] == values.get("proxy_port"):
        _fail(
            "proxy_port",
            f"{parts[1]} is vLLM's own port.",
            "give the proxy another port, for instance 443.",
            why="two servers cannot both have it.",
        )


def check_openness(*, address: str, api_key: bool, api_allow: list[str]) -> None:
    """Refuse a proxy that would let anybody use the GPUs.

    Args:
        address: the address that the proxy binds to.
        api_key: whether the server asks for a key.
        api_allow: addresses that alone may use the API.

    Raises:
        FirstlightError: ``open-to-all``.
    """
    if ipaddress.ip_address(address).is_loopback or api_key or api_allow:
        return
    raise FirstlightError(
        f"{address} is reachable from other machines, and neither an API key nor a list of clients is set.",
        where="proxy_address",
        why="Anyone who reaches the port could use the GPUs.",
        fix="Set vllm_server_api_key (and run site.yml), or name the clients in proxy_api_allow.",
        kind="open-to-all",
    )
