# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filter over `module_utils.inputs.local_url`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import local_url

DOCUMENTATION = r"""
name: local_url
short_description: URL at which a server bound to an address answers on its own machine
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - The unspecified addresses answer on loopback; an IPv6 address is put in brackets.
positional: port
options:
  _input:
    description: Address that the server is bound to.
    type: str
    required: true
  port:
    description: TCP port.
    type: int
    required: true
"""

EXAMPLES = r"""
url: "{{ '0.0.0.0' | firstlight.vllm.local_url(30000) }}"
"""

RETURN = r"""
_value:
  description: The URL, for instance C(http://127.0.0.1:30000).
  type: str
"""


class FilterModule:
    """The collection's URL filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"local_url": local_url}
