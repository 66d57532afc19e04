#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: vllm_venv
short_description: Make a vLLM environment from a hash lock
version_added: "0.1.0"
description:
  - Makes a Python environment with one vLLM release under C(<root>/venvs/<version>-<digest>), the digest covering the
    lock, the interpreter's version and all else that shapes it. Another lock gives another environment beside it.
  - Every package is installed with C(--require-hashes). uv, which does it, is itself installed from a lock.
  - flash-attn 2 is installed before flash-attn-4, since both write into one folder; then both are imported.
  - An interrupted install is recognised by its missing marker, removed and made anew. Of two runs at a time, one waits.
extends_documentation_fragment:
  - firstlight.vllm.vllm_venv
attributes:
  check_mode:
    description: Tells what would be installed and where, and changes nothing.
    support: full
  diff_mode:
    description: Shows the environment that is added.
    support: full
author:
  - The firstlight developers (@firstlight)
"""

EXAMPLES = r"""
- name: Install vLLM
  firstlight.vllm.vllm_venv:
    version: 0.20.1
    lock: "{{ lookup('ansible.builtin.file', 'locks/cuda-0.20.1.txt') }}"
    uv_lock: "{{ lookup('ansible.builtin.file', 'locks/uv.txt') }}"
  register: venv

- name: Install from a wheel folder, with no index
  firstlight.vllm.vllm_venv:
    version: 0.20.1
    lock: "{{ lookup('ansible.builtin.file', 'locks/cuda-0.20.1.txt') }}"
    uv_lock: "{{ lookup('ansible.builtin.file', 'locks/uv.txt') }}"
    find_links: /srv/wheelhouse
    offline: true
"""

RETURN = r"""
path:
  description: Folder of the environment.
  type: str
  returned: success
  sample: /opt/firstlight/venvs/0.20.1-6c2a1f0d9b3e
name:
  description: Name of that folder, release and digest.
  type: str
  returned: success
  sample: 0.20.1-6c2a1f0d9b3e
digest:
  description: SHA-256 of everything that shapes the environment.
  type: str
  returned: success
  sample: 6c2a1f0d9b3e4b7c5d1a2f3e4c5b6a79808f7e6d5c4b3a2918f7e6d5c4b3a291
reason:
  description: Why it was, or would be, made; empty when it was whole already.
  type: str
  returned: success
  sample: an earlier install was interrupted
packages:
  description: Number of packages in the lock that are installed.
  type: int
  returned: success
  sample: 192
uv:
  description: The uv that installed it; empty in check mode before the first install.
  type: str
  returned: success
  sample: /opt/firstlight/tools/uv-0.13.9-1a2b3c4d/bin/uv
cuda_archs:
  description: What flash-attn was built for; empty when it was not built, or for all.
  type: list
  elements: str
  returned: success
  sample: ["90"]
probes:
  description: Versions found and modules imported after the install.
  type: dict
  returned: success
  sample: {"vllm": "0.20.1", "torch": "2.11.0", "imported": ["torch", "vllm"]}
seconds:
  description: Duration of each step in seconds; empty when nothing was done.
  type: dict
  returned: success
  sample: {"environment": 8.1, "vLLM and 189 packages": 142.5, "probes": 6.0}
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
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_install import ensure


def run(module: AnsibleModule) -> dict[str, Any]:
    """Have the environment; returns the module's result."""
    outcome = ensure(request_of(module.params), check=module.check_mode)
    result = asdict(outcome)
    if module._diff:
        result["diff"] = appeared(f"{outcome.path}: {outcome.packages} packages\n", changed=outcome.changed)
    return result


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module))


if __name__ == "__main__":
    main()
