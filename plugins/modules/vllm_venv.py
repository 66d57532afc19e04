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
options:
  root:
    description: Folder of the host under which environments, tools and the cache lie.
    type: path
    default: /opt/firstlight
  version:
    description: The vLLM release, exactly as the lock pins it.
    type: str
    required: true
  platform:
    description: Which build the lock holds. V(cpu) is for tests.
    type: str
    choices: [cuda, cpu]
    default: cuda
  lock:
    description: Text of the hash lock, as C(uv pip compile --generate-hashes) writes it.
    type: str
    required: true
  lock_name:
    description: What to call the lock in messages.
    type: str
    default: lock
  uv_lock:
    description: Text of the hash lock of uv itself.
    type: str
    required: true
  uv:
    description: Path of an installed uv to use in place of the locked one; empty for none.
    type: str
    default: ""
  python:
    description: Interpreter to make the environment with, CPython 3.10 to 3.14.
    type: path
    default: /usr/bin/python3
  index_url:
    description: Package index in place of PyPI; empty leaves the host's own settings in force.
    type: str
    default: ""
  extra_index_urls:
    description: Further package indexes.
    type: list
    elements: str
    default: []
  find_links:
    description: >-
      Folder of the host, or page, with wheels. A flash-attn wheel in it counts when the folder's C(SHA256SUMS) names
      it. Empty for none.
    type: str
    default: ""
  offline:
    description: Take every package from O(find_links) and the cache; ask no index.
    type: bool
    default: false
  extra_options:
    description: Further options of C(uv pip install).
    type: list
    elements: str
    default: []
  flash_attn:
    description: V(pair) installs flash-attn 2 and flash-attn-4; V(none) leaves vLLM with its bundled kernels.
    type: str
    choices: [pair, none]
    default: pair
  max_jobs:
    description: >-
      Compilations at a time when flash-attn is built. 0 takes half the cores, and no more than one for each 8 GiB of
      free memory.
    type: int
    default: 0
  cuda_archs:
    description: Build targets of flash-attn, like V(90). Empty takes those of the host's GPUs.
    type: list
    elements: str
    default: []
  wheels:
    description: >-
      Wheels that the site adds, each a dictionary of C(name), C(sha256) and base64 C(content), as the filter
      P(firstlight.vllm.wheel_files#filter) makes them.
    type: list
    elements: dict
    default: []
  environment:
    description: Environment variables for the installer, like C(SSL_CERT_FILE).
    type: dict
    default: {}
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
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_install import Request, ensure
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_tools import Sources

ARGUMENTS = {
    "root": {"type": "path", "default": "/opt/firstlight"},
    "version": {"type": "str", "required": True},
    "platform": {"type": "str", "choices": ["cuda", "cpu"], "default": "cuda"},
    "lock": {"type": "str", "required": True},
    "lock_name": {"type": "str", "default": "lock"},
    "uv_lock": {"type": "str", "required": True},
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


def request_of(params: dict[str, Any]) -> Request:
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


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    try:
        outcome = ensure(request_of(module.params), check=module.check_mode)
    except FirstlightError as error:
        module.fail_json(msg=error.message, failure=error.as_dict())
    result = asdict(outcome)
    if module._diff:
        after = f"{outcome.path}: {outcome.packages} packages\n"
        result["diff"] = {"before": "" if outcome.changed else after, "after": after}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
