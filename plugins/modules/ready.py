#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ready
short_description: Wait until one start of the vLLM server is ready, or tell why it never will be
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Waits on facts of one start only. These are the unit's state and the life of its processes, its journal by
    invocation id, the holder of the port, C(/health), the model in C(/v1/models), and the process that answers.
  - A dead unit, engine or worker is told within a second with the cause and the remedy.
  - The time limit is one without progress (journal lines, bytes read), not one of the whole start.
  - The action of this name watches in slices, shows progress in between, and survives a network that is cut for
    less than O(unreachable_grace_s).
extends_documentation_fragment:
  - firstlight.vllm.deployment.api_key
options:
  unit:
    description: Name of the systemd unit, without C(.service).
    type: str
    required: true
  base_url:
    description: URL at which the server answers on the host.
    type: str
    required: true
  port:
    description: TCP port that the unit's own processes must hold.
    type: int
    required: true
  model:
    description: Name that C(/v1/models) must hold.
    type: str
    required: true
  invocation_id:
    description: The start to wait for; empty for the one that runs now.
    type: str
    default: ''
  stall_timeout_s:
    description: Seconds without any progress after which the start counts as hung.
    type: float
    default: 600
  slice_s:
    description: Seconds to watch at once before progress is shown.
    type: float
    default: 20
  unreachable_grace_s:
    description: Seconds for which the host may be unreachable while the server loads.
    type: float
    default: 120
  deployment:
    description: Variables of the deployment for the remedy's figures, without their role's prefix.
    type: dict
    default: {}
  watch:
    description: What the slice before handed on; used by the action.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Can run in check mode; then it waits for nothing, since nothing was started.
  diff_mode:
    support: none
    description: Nothing is written.
"""

EXAMPLES = r"""
- name: Wait until the server is ready
  firstlight.vllm.ready:
    unit: vllm
    base_url: http://127.0.0.1:30000
    port: 30000
    model: Qwen3.6-27B
"""

RETURN = r"""
ready:
  description: Whether the server is ready; false only between slices and in check mode.
  type: bool
  returned: always
  sample: true
ready_s:
  description: Seconds from the start of the main process to readiness, wall clock.
  type: float
  returned: when ready
  sample: 91.4
ready_at:
  description: When it was found ready, in seconds since the epoch.
  type: float
  returned: when ready
  sample: 1795993404.8
started_at:
  description: When its main process started, in seconds since the epoch.
  type: float
  returned: when ready
  sample: 1795993313.4
phases:
  description: Parts of the start in order; their seconds sum to RV(ready_s).
  type: list
  elements: dict
  returned: when ready
  sample: [{name: imports, seconds: 57.0}, {name: load weights, seconds: 12.5}]
evidence:
  description: What the journal told about the taps, the compile cache and the KV cache (GiB).
  type: dict
  returned: when ready
  sample: {log_taps: [2, 17, 32, 47, 62], compile_cache_reused: false, available_kv_gib: 93.0}
watch:
  description: What the next slice needs.
  type: dict
  returned: when not ready
  sample:
    {invocation_id: 9c1f0e7a5b3d4c2e8f6a1b0d9e8c7f6a, state: loading, note: loading weights,
     last_progress_s: 1795993350.2, bytes_read: 27101171712}
failure:
  description: Id, cause and remedy of a failed start, and the last lines of its journal.
  type: dict
  returned: on failure
  sample: {id: killed-by-oom, cause: The kernel ended it for want of memory., remedy: raise MemoryMax.}
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.openai_api import Server
from ansible_collections.firstlight.vllm.plugins.module_utils.readiness import (
    Expected,
    ServerDiedError,
    Waiter,
    Watch,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd

ARGUMENTS = {
    "unit": {"type": "str", "required": True},
    "base_url": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "model": {"type": "str", "required": True},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "invocation_id": {"type": "str", "default": ""},
    "stall_timeout_s": {"type": "float", "default": 600},
    "slice_s": {"type": "float", "default": 20},
    "unreachable_grace_s": {"type": "float", "default": 120},
    "deployment": {"type": "dict", "default": {}},
    "watch": {"type": "dict", "default": {}},
}


def run(module: AnsibleModule) -> dict[str, object]:
    """Watch one slice; returns the module's result."""
    params = module.params
    if module.check_mode:
        return {"changed": False, "ready": False, "watch": {}, "skipped": True}
    expected = Expected(
        unit=f"{params['unit']}.service",
        port=params["port"],
        model=params["model"],
        invocation_id=params["invocation_id"],
        deployment={**params["deployment"], "unit": params["unit"]},
    )
    watch = Watch(**params["watch"])
    waiter = Waiter(expected, Server(params["base_url"], params["api_key"] or None), Systemd())
    try:
        ready = waiter.watch(watch, slice_s=params["slice_s"], stall_s=params["stall_timeout_s"])
    except ServerDiedError as error:
        failure = {**error.as_dict(), **error.verdict.as_dict()}
        return {"msg": error.message, "failure": failure, "journal": error.tail}
    if ready is None:
        return {"changed": False, "ready": False, "watch": asdict(watch)}
    return {
        "changed": False,
        "ready": True,
        "ready_s": ready.seconds,
        "ready_at": ready.ready_s,
        "started_at": ready.started_s,
        "main_pid": ready.main_pid,
        "phases": [asdict(phase) for phase in ready.phases],
        "evidence": dict(ready.evidence),
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module))


if __name__ == "__main__":
    main()
