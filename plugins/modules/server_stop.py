#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_stop
short_description: Stop the server that is to be replaced, or commit to the one that replaced it
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Finds the old server by unit, else by listening port, else by command line, and stops its control group, container
    or process tree, its orphaned schedulers included. Then waits until the port and the GPUs' memory are free.
  - Whatever else holds the port or a GPU is never touched; the module fails and names it before anything is stopped.
  - Records how to bring the old server back before it stops it, and has the host itself do that if nobody commits.
  - Run again after an interruption, it continues and keeps the record.
extends_documentation_fragment:
  - firstlight.vllm.deployment
  - firstlight.vllm.deployment.state_dir
options:
  state:
    description:
      - V(stopped) stops the old server.
      - V(committed) ends the cutover. The new server starts at boot from now on, the old one does not.
    type: str
    choices: [stopped, committed]
    default: stopped
  own_unit:
    description: The unit that firstlight manages, without C(.service). When it runs, it is what is replaced.
    type: str
    required: true
  port:
    description: TCP port that the new server needs.
    type: int
    required: true
  units:
    description: Names of units that may be the old server; one that runs is stopped wherever it listens.
    type: list
    elements: str
    default: [sglang.service]
  command_patterns:
    description: Regular expressions of further command lines that may be stopped when they hold the port.
    type: list
    elements: str
    default: []
  gpus:
    description: Indices of the GPUs that the new server needs; empty means all of the host.
    type: list
    elements: int
    default: []
  tolerated_gpu_mib:
    description: Memory in MiB that strangers may hold on each of these GPUs, as a desktop does.
    type: int
    default: 512
  url:
    description: URL at which the old server answers on the host; empty derives it from its socket.
    type: str
    default: ''
  api_key:
    description: Key for the old server's C(/v1/models); empty takes it from its command line.
    type: str
    default: ''
  allow_unrestorable:
    description: Stop even a server that nobody could start again, such as a container made with C(--rm).
    type: bool
    default: false
  term_timeout_s:
    description: Seconds from SIGTERM to SIGKILL.
    type: float
    default: 60
  kill_timeout_s:
    description: Seconds that killed processes may take to vanish.
    type: float
    default: 20
  free_timeout_s:
    description: Seconds that the port and the GPUs' memory may take to become free after the last process.
    type: float
    default: 60
  own_release:
    description:
      - Id of the release that is to serve. When O(own_unit) runs exactly it, nothing is stopped.
    type: str
    default: ''
  guard_s:
    description:
      - Seconds after which the host brings the old server back by itself unless the cutover is committed; longer than
        the longest start of the new server. 0 leaves the guard out.
    type: float
    default: 3600
attributes:
  check_mode:
    support: full
    description: Can run in check mode and tell what would be stopped.
  diff_mode:
    support: full
    description: Shows the record of the cutover without its secrets.
"""

EXAMPLES = r"""
- name: Stop the old server
  firstlight.vllm.server_stop:
    own_unit: vllm
    port: 30000

- name: Commit to the new server
  firstlight.vllm.server_stop:
    state: committed
    own_unit: vllm
    port: 30000
"""

RETURN = r"""
found:
  description: What was found to be the old server.
  type: dict
  returned: state is stopped
  contains:
    kind:
      description: C(unit), C(process), C(container), C(release) (firstlight's own unit) or C(none).
      type: str
      sample: unit
    name:
      description: The unit, container or process.
      type: str
      sample: sglang.service
    how:
      description: What it was found by.
      type: str
      sample: unit
    url:
      description: Where it answered.
      type: str
      sample: http://127.0.0.1:30000
    models:
      description: The models that it named there.
      type: list
      elements: str
      sample: [Qwen3.6-27B]
    processes:
      description: All that was, or would be, stopped, with user, redacted command line and GPU memory in MiB.
      type: list
      elements: dict
      sample: [{pid: 4711, user: sglang, command: "sglang::scheduler_TP0", gpu_mib: 124310, orphan: false}]
phase:
  description: How far the cutover came.
  type: str
  returned: always
  sample: stopped
record:
  description: File on the host that tells how to bring the old server back.
  type: str
  returned: always
  sample: /var/lib/firstlight/vllm/cutover.json
down_since_s:
  description: When the old server was told to stop, in seconds since the epoch; null when there was none to stop.
  type: float
  returned: state is stopped
  sample: 1795993313.4
seconds:
  description: Seconds from telling it to stop until port and GPU memory were free.
  type: float
  returned: state is stopped
  sample: 6.4
seconds_to_free:
  description: The part of RV(seconds) that passed after the last process had ended.
  type: float
  returned: state is stopped
  sample: 0.3
killed:
  description: Pids that did not end upon SIGTERM.
  type: list
  elements: int
  returned: state is stopped
  sample: [4711]
guard:
  description: The timer that brings the old server back, and its seconds; empty when there is nothing to bring back.
  type: dict
  returned: state is stopped
  sample: {unit: firstlight-guard-vllm.timer, seconds: 3600}
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover_guard import Guard
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish, rewritten
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import claimed, end_claim
from ansible_collections.firstlight.vllm.plugins.module_utils.server_end import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.server_kinds import wanted_from
from ansible_collections.firstlight.vllm.plugins.module_utils.server_settle import commit
from ansible_collections.firstlight.vllm.plugins.module_utils.server_stop import StopOptions, stop_server

ARGUMENTS = {
    "state": {"type": "str", "choices": ["stopped", "committed"], "default": "stopped"},
    "own_unit": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "units": {"type": "list", "elements": "str", "default": ["sglang.service"]},
    "command_patterns": {"type": "list", "elements": "str", "default": []},
    "gpus": {"type": "list", "elements": "int", "default": []},
    "tolerated_gpu_mib": {"type": "int", "default": 512},
    "url": {"type": "str", "default": ""},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "allow_unrestorable": {"type": "bool", "default": False},
    "term_timeout_s": {"type": "float", "default": 60},
    "kill_timeout_s": {"type": "float", "default": 20},
    "free_timeout_s": {"type": "float", "default": 60},
    "guard_s": {"type": "float", "default": 3600},
    "own_release": {"type": "str", "default": ""},
    "config_dir": {"type": "path", "default": "/etc/firstlight"},
    "state_dir": {"type": "path", "default": "/var/lib/firstlight"},
}


def run(module: AnsibleModule) -> dict[str, Any]:
    """Stop or commit, with no other run at work; returns the module's result."""
    params = module.params
    store = CutoverStore(params["own_unit"], Path(params["state_dir"]))
    with claimed(store.unit, store.folder.parent, check=module.check_mode, what=f"server_stop {params['state']}"):
        return _run(module, Host(), store)


def _run(module: AnsibleModule, host: Host, store: CutoverStore) -> dict[str, Any]:
    params = module.params
    layout = Layout(store.unit, Path(params["config_dir"]), Path(params["state_dir"]))
    guard = Guard(store, host.systemd, config_dir=layout.config_dir)
    before = store.load()
    if params["state"] == "committed":
        changed, record, warnings = commit(host, store, f"{store.unit}.service", guard.disarm, check=module.check_mode)
        if not module.check_mode:
            end_claim(store.unit, store.folder.parent)
        result: dict[str, Any] = {
            "changed": changed,
            "phase": record.phase,
            "record": str(store.path),
            "warnings": warnings,
        }
    else:
        options = StopOptions(
            wanted=wanted_from(params),
            layout=layout,
            limits=Limits(params["term_timeout_s"], params["kill_timeout_s"], params["free_timeout_s"]),
            url=params["url"],
            api_key=params["api_key"],
            allow_unrestorable=params["allow_unrestorable"],
            guard_s=params["guard_s"],
            own_release=params["own_release"],
        )
        result = stop_server(host, store, guard, options, check=module.check_mode)
    if module._diff:
        result["diff"] = _diff(before.public() if before else {}, store, result)
    return result


def _diff(before: dict[str, object], store: CutoverStore, result: dict[str, Any]) -> dict[str, str]:
    after = store.load()
    told = after.public() if after else {}
    if result["changed"] and told == before:  # check mode: the record is as it was
        told = {"phase": "stopped", "old": result.get("found", before.get("old"))}
    texts = (json.dumps(record, indent=1, sort_keys=True) + "\n" for record in (before, told))
    return rewritten(str(store.path), *texts)


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module), host_faults=(OSError,))


if __name__ == "__main__":
    main()
