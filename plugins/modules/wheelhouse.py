#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: wheelhouse
short_description: Collect every wheel of a lock in a folder, flash-attn built once
version_added: "0.1.0"
description:
  - Fills a folder from which hosts install vLLM with no index.
  - Every wheel of the lock and uv's own are fetched by hash. flash-attn 2, which is published as source only, is built
    for the GPUs of this host, or for O(cuda_archs).
  - Writes C(SHA256SUMS), by which an install trusts the wheel that was built here.
  - Makes an environment as M(firstlight.vllm.vllm_venv) does, without flash-attn, to build in.
extends_documentation_fragment:
  - firstlight.vllm.vllm_venv
options:
  path:
    description: The folder.
    type: path
    default: /srv/wheelhouse
attributes:
  check_mode:
    description: Tells whether anything would be collected, and changes nothing.
    support: full
  diff_mode:
    description: Shows the folder that is filled.
    support: full
author:
  - The firstlight developers (@firstlight)
"""

EXAMPLES = r"""
- name: Collect the wheels
  firstlight.vllm.wheelhouse:
    path: /srv/wheelhouse
    version: 0.20.1
    lock: "{{ lookup('ansible.builtin.file', 'locks/cuda-0.20.1.txt') }}"
    uv_lock: "{{ lookup('ansible.builtin.file', 'locks/uv.txt') }}"
"""

RETURN = r"""
path:
  description: The folder.
  type: str
  returned: success
  sample: /srv/wheelhouse
digest:
  description: SHA-256 of all that shapes the environment that installs from it.
  type: str
  returned: success
  sample: 6c2a1f0d9b3e4b7c5d1a2f3e4c5b6a79808f7e6d5c4b3a2918f7e6d5c4b3a291
wheels:
  description: Number of wheels in it.
  type: int
  returned: success
  sample: 193
bytes:
  description: Their size together, in bytes.
  type: int
  returned: success
  sample: 6012954214
built:
  description: Wheels that were built here.
  type: list
  elements: str
  returned: success
  sample: [flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl]
cuda_archs:
  description: What they were built for; empty for all that the source knows.
  type: list
  elements: str
  returned: success
  sample: ["90"]
seconds:
  description: Duration of each step in seconds; empty when nothing was done.
  type: dict
  returned: success
  sample: {"environment": 150.2, "uv": 1.1, "vLLM and 189 packages": 95.0, "flash-attn 2.8.3": 1490.7}
failure:
  description: What is wrong, where, why, and how to mend it.
  type: dict
  returned: failure
  sample:
    {kind: disk-full, what: only 3 GiB are free., where: /opt/firstlight, why: 12 GiB are needed., fix: free 9 GiB.}
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import appeared, finish
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_arguments import ARGUMENTS, request_of
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_wheelhouse import build


def run(module: AnsibleModule) -> dict[str, Any]:
    """Have the folder of wheels; returns the module's result."""
    params = dict(module.params)
    folder = params.pop("path")
    outcome = build(request_of(params), folder, check=module.check_mode)
    result = asdict(outcome)
    if module._diff:
        result["diff"] = appeared(f"{outcome.path}: digest {outcome.digest}\n", changed=outcome.changed)
    return result


def main() -> None:
    """Entry point."""
    arguments = {**ARGUMENTS, "path": {"type": "path", "default": "/srv/wheelhouse"}}
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)
    finish(module, lambda: run(module))


if __name__ == "__main__":
    main()
