#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: status
short_description: Tell what firstlight has on a host and whether it serves
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Reads the record of the deployment, the unit, the releases on the host and the server's own answers.
extends_documentation_fragment:
  - firstlight.vllm.deployment
  - firstlight.vllm.deployment.unit
  - firstlight.vllm.deployment.api_key
attributes:
  check_mode:
    support: full
    description: Never changes anything.
  diff_mode:
    support: none
    description: Nothing is written.
"""

EXAMPLES = r"""
- name: Look at the deployment
  firstlight.vllm.status:
    unit: vllm
"""

RETURN = r"""
firstlight_status:
  description:
    - Keys are C(deployed), C(serving), C(problem), C(unit), C(release), C(previous_release), C(releases), C(cutover)
      and C(report).
  type: dict
  returned: always
  sample: {deployed: true, serving: true, release: 3f1c2ab9de04, previous_release: ""}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.deployment_status import status
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd

ARGUMENTS = {
    "unit": {"type": "str", "default": "vllm"},
    "config_dir": {"type": "path", "default": "/etc/firstlight"},
    "api_key": {"type": "str", "default": "", "no_log": True},
}


def run(params: dict[str, Any]) -> dict[str, Any]:
    """Look at the deployment; returns the module's result."""
    layout = Layout(params["unit"], config_dir=Path(params["config_dir"]))
    return {"changed": False, "firstlight_status": status(layout, Systemd(), params["api_key"])}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module.params))


if __name__ == "__main__":
    main()
