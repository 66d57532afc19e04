# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filter that reads wheels on the controller."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: wheel_files
short_description: Read wheels on the controller to hand them to a module
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Reads small wheel files, 8 MiB in all at most. Larger ones belong in a wheel folder of the host or in an index.
options:
  _input:
    description: Paths on the controller.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
wheels: "{{ ['files/site_plugin-1.0-py3-none-any.whl'] | firstlight.vllm.wheel_files }}"
"""

RETURN = r"""
_value:
  description: For each file a dictionary of its C(name), its C(sha256) and its C(content) in base64.
  type: list
  elements: dict
"""

LIMIT_BYTES = 8 * 2**20


def wheel_files(paths: Sequence[str]) -> list[dict[str, str]]:
    """Read the wheels; an Ansible error names the one that cannot be."""
    found, total = [], 0
    for path in paths:
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise AnsibleFilterError(
                f"vllm_install_extra_packages: {path} cannot be read on the controller ({error.strerror})."
                " Fix: Name a wheel file that exists."
            ) from error
        total += len(content)
        if total > LIMIT_BYTES:
            raise AnsibleFilterError(
                f"vllm_install_extra_packages: {path} takes them past {LIMIT_BYTES // 2**20} MiB in all."
                " Fix: Put large wheels into an index or into vllm_install_find_links, and their pins into the lock."
            )
        found.append(
            {
                "name": Path(path).name,
                "sha256": hashlib.sha256(content).hexdigest(),
                "content": base64.b64encode(content).decode(),
            }
        )
    return found


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"wheel_files": wheel_files}
