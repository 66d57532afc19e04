# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filter over `module_utils.serve_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.serve_config import serve_config as merge

DOCUMENTATION = r"""
name: serve_config
short_description: Merge flags into the mapping that C(vllm serve --config) reads
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Leaves empty values out and turns V(false) into the flag's C(no-) form, since vLLM drops V(false) silently.
positional: extra
options:
  _input:
    description: firstlight's own flags.
    type: dict
    required: true
  extra:
    description: Further flags; they win. Flags that firstlight sets itself are refused.
    type: dict
"""

EXAMPLES = r"""
config: "{{ {'port': 30000} | firstlight.vllm.serve_config({'enable_prefix_caching': false}) }}"
"""

RETURN = r"""
_value:
  description: Flag with hyphens, to value.
  type: dict
"""


def serve_config(settings: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Merge two mappings of flags; an Ansible error names the entry at fault."""
    try:
        return merge(settings, extra)
    except FirstlightError as error:
        raise AnsibleFilterError(error.message) from error


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"serve_config": serve_config}
