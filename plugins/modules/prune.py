#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: prune
short_description: Remove old releases, and the virtual environments and caches that no release uses
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Keeps the newest O(keep) releases, the one in force and the one before it, and all that they use.
extends_documentation_fragment:
  - firstlight.vllm.deployment
  - firstlight.vllm.deployment.unit
options:
  keep:
    description: Number of releases to keep.
    type: int
    default: 3
attributes:
  check_mode:
    support: full
    description: Can run in check mode and tell what would be removed.
  diff_mode:
    support: none
    description: Only whole folders are removed.
"""

EXAMPLES = r"""
- name: Keep two releases
  firstlight.vllm.prune:
    keep: 2
"""

RETURN = r"""
removed:
  description: Folders that were, or in check mode would be, removed.
  type: list
  elements: str
  returned: always
  sample: [/opt/firstlight/venvs/0.20.0-1c2d3e4f5a6b]
freed_bytes:
  description: Bytes that they took.
  type: int
  returned: always
  sample: 8123456789
"""

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.deployment_status import unused
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout, load_state
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import prune
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import claimed

ARGUMENTS = {
    "unit": {"type": "str", "default": "vllm"},
    "config_dir": {"type": "path", "default": "/etc/firstlight"},
    "keep": {"type": "int", "default": 3},
}


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def run(params: dict[str, object], *, check: bool) -> dict[str, object]:
    """Remove what no release to be kept needs, with no other run at work; returns the module's result.

    Raises:
        FirstlightError: nothing is deployed, so nothing tells what is still needed; or another run is at work.
    """
    layout = Layout(str(params["unit"]), config_dir=Path(str(params["config_dir"])))
    with claimed(layout.unit, layout.state_dir, check=check, what="prune"):
        return _run(layout, int(str(params["keep"])), check=check)


def _run(layout: Layout, keep: int, *, check: bool) -> dict[str, object]:
    state = load_state(layout)
    if not state:
        raise FirstlightError(
            "nothing is deployed here, so nothing tells what is still needed.",
            where=str(layout.state),
            fix="run site.yml first, or remove the folders by hand.",
            kind="not-deployed",
        )
    protect = {state["release"], state.get("previous_release")}
    ids = prune(layout, keep=keep, protect=protect, check=check)
    folders = unused(layout)
    freed = sum(size(folder) for folder in folders)
    if not check:
        for folder in folders:
            shutil.rmtree(folder)
    removed = [str(layout.releases / entry) for entry in ids] + [str(folder) for folder in folders]
    return {"changed": bool(removed), "removed": removed, "freed_bytes": freed}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module.params, check=module.check_mode), host_faults=(OSError,))


if __name__ == "__main__":
    main()
