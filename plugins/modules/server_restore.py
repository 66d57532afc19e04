#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_restore
short_description: Bring back the server that a cutover stopped, and prove that it answers
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Stops the new server, starts what the record of the cutover names (unit, process, container or an earlier release),
    and waits until it answers where it answered before, naming the models that it named before.
  - Only its own sockets count. It fails when a stranger listens beside the old server, and leaves both alone.
  - Waiting ends when nothing moves any more, and at once when the old server dies.
  - Does nothing when no cutover is unfinished, unless O(committed) asks for a way back after the commit.
  - A new server that a run recorded as the deployment before it was cut off is kept, and its cutover committed.
extends_documentation_fragment:
  - firstlight.vllm.deployment
  - firstlight.vllm.deployment.state_dir
  - firstlight.vllm.deployment.claim
options:
  state:
    description: Where the old server is to be.
    type: str
    choices: [restored]
    default: restored
  own_unit:
    description: The unit that firstlight manages, without C(.service); it is the new server.
    type: str
    required: true
  port:
    description: TCP port that must be free before the old server starts.
    type: int
    required: true
  gpus:
    description: Indices of the GPUs that the servers use; empty means all of the host.
    type: list
    elements: int
    default: []
  tolerated_gpu_mib:
    description: Memory in MiB that strangers may hold on each of these GPUs.
    type: int
    default: 512
  committed:
    description: Bring the old server back even though the new one was committed.
    type: bool
    default: false
  origin:
    description: Bring back the last server that was not firstlight's own, rather than an earlier release.
    type: bool
    default: false
  stall_timeout_s:
    description: Seconds in which nothing moves after which the restore has failed.
    type: float
    default: 300
  term_timeout_s:
    description: Seconds that the new server may take to end before it is killed.
    type: float
    default: 60
  free_timeout_s:
    description: Seconds that the port and the GPUs' memory may take to become free.
    type: float
    default: 60
attributes:
  check_mode:
    support: full
    description: Can run in check mode and tell whether anything would be brought back.
  diff_mode:
    support: none
    description: No file of the user's is written.
"""

EXAMPLES = r"""
- name: Bring the old server back
  firstlight.vllm.server_restore:
    own_unit: vllm
    port: 30000

- name: Go back to the server from before firstlight
  firstlight.vllm.server_restore:
    own_unit: vllm
    port: 30000
    committed: true
    origin: true
"""

RETURN = r"""
phase:
  description: How the cutover ended; empty when there never was one.
  type: str
  returned: always
  sample: restored
restored:
  description: What was brought back, without its secrets.
  type: dict
  returned: always
  sample: {kind: unit, unit: sglang.service, url: "http://127.0.0.1:30000", models: [Qwen3.6-27B]}
reason:
  description: What was done, or why nothing was.
  type: str
  returned: always
  sample: the old server serves again
answering:
  description: Whether the old server answered at the end.
  type: bool
  returned: always
  sample: true
models:
  description: The models that it named.
  type: list
  elements: str
  returned: always
  sample: [Qwen3.6-27B]
seconds:
  description: Seconds from stopping the new server until the old one answered.
  type: float
  returned: always
  sample: 74.2
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import claimed
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import wanted_from
from ansible_collections.firstlight.vllm.plugins.module_utils.server_restore import RestoreOptions, restore

ARGUMENTS = {
    "state": {"type": "str", "choices": ["restored"], "default": "restored"},
    "own_unit": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "gpus": {"type": "list", "elements": "int", "default": []},
    "tolerated_gpu_mib": {"type": "int", "default": 512},
    "committed": {"type": "bool", "default": False},
    "origin": {"type": "bool", "default": False},
    "stall_timeout_s": {"type": "float", "default": 300},
    "term_timeout_s": {"type": "float", "default": 60},
    "free_timeout_s": {"type": "float", "default": 60},
    "config_dir": {"type": "path", "default": "/etc/firstlight"},
    "state_dir": {"type": "path", "default": "/var/lib/firstlight"},
    "run": {"type": "dict", "default": {}},
    "gone": {"type": "list", "elements": "str", "default": []},
}


def run(module: AnsibleModule) -> dict[str, Any]:
    """Restore; returns the module's result."""
    params = module.params
    host = Host()
    store = CutoverStore(params["own_unit"], Path(params["state_dir"]))
    guard = Guard(store, host.systemd, config_dir=Path(params["config_dir"]))
    options = RestoreOptions(
        wanted=wanted_from(params),
        layout=Layout(store.unit, Path(params["config_dir"]), Path(params["state_dir"])),
        limits=Limits(term_s=params["term_timeout_s"], free_s=params["free_timeout_s"]),
        no_progress_s=params["stall_timeout_s"],
        committed=params["committed"],
        origin=params["origin"],
    )
    note = "on request" if params["committed"] else "the new server did not pass"
    with claimed(
        store.unit,
        store.folder.parent,
        check=module.check_mode,
        what="server_restore",
        run=params["run"],
        gone=params["gone"],
        last=True,
        or_without=True,
    ):
        return restore(host, store, guard.disarm, options, check=module.check_mode, note=note)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module), host_faults=(OSError,))


if __name__ == "__main__":
    main()
