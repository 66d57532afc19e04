# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Options of the modules that make environments or collect what goes into them."""

from __future__ import annotations


class ModuleDocFragment:
    """The options, once."""

    DOCUMENTATION = r"""
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
"""
