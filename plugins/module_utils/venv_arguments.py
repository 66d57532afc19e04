"""The options that describe an environment, for the modules that take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .venv_install import Request
from .venv_tools import Sources

ARGUMENTS = {
    "root": {"type": "path", "default": "/opt/firstlight"},
    "version": {"type": "str", "required": True},
    "platform": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
    # no secrets, but Ansible writes every argument into the host's log, and these are hundreds of kilobytes
    "lock": {"type": "str", "required": True, "no_log": True},
    "lock_name": {"type": "str", "default": "lock"},
    "uv_lock": {"type": "str", "required": True, "no_log": True},
    "uv": {"type": "str", "default": ""},
    "python": {"type": "path", "default": "/usr/bin/python3"},
    "index_url": {"type": "str", "default": ""},
    "extra_index_urls": {"type": "list", "elements": "str", "default": []},
    "find_links": {"type": "str", "default": ""},
    "offline": {"type": "bool", "default": False},
    "extra_options": {"type": "list", "elements": "str", "default": []},
    "flash_attn": {"type": "str", "choices": ["pair", "none"], "default": "pair"},
    "max_jobs": {"type": "int", "default": 0},
    "cuda_archs": {"type": "list", "elements": "str", "default": []},
    "wheels": {"type": "list", "elements": "dict", "default": []},
    "environment": {"type": "dict", "default": {}},
}


def request_of(params: Mapping[str, Any]) -> Request:
    """Turn the module's parameters into a request."""
    given = dict(params)
    environment = {str(name): str(value) for name, value in given.pop("environment").items()}
    sources = Sources(
        index_url=given.pop("index_url"),
        extra_index_urls=tuple(given.pop("extra_index_urls")),
        find_links=given.pop("find_links"),
        offline=given.pop("offline"),
        extra_options=tuple(given.pop("extra_options")),
        environment=environment,
    )
    wheels, archs = tuple(given.pop("wheels")), tuple(given.pop("cuda_archs"))
    return Request(sources=sources, wheels=wheels, cuda_archs=archs, **given)
