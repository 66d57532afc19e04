#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: preflight
short_description: Read a host once and judge whether the deployment can and need be made
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Reads operating system, glibc, Python, systemd, disk, port, GPUs and driver, and changes nothing but for O(claim).
  - Fails with every rule that does not hold, each with its remedy.
  - Tells whether the host already is what is asked for, from its files, its unit and the server's own answers.
  - The action of this name gathers the variables of all roles, judges them on the controller first, and fills
    O(settings), O(secrets) and O(inputs) in.
extends_documentation_fragment:
  - firstlight.vllm.deployment.state_dir
  - firstlight.vllm.deployment.claim
options:
  min_disk_gib:
    description: Folder to the free space in GiB that it needs when nothing is installed yet.
    type: dict
    default: {}
  shortcut:
    description: Whether a host that already is what is asked for ends the run early.
    type: bool
    default: true
  settings:
    description: All variables of all roles, without the secrets.
    type: dict
    default: {}
  secrets:
    description: The variables that hold secrets.
    type: dict
    default: {}
  inputs:
    description: Digest of the variables and of firstlight itself.
    type: str
    default: ''
  claim:
    description:
      - Keep other runs from changing the host until this one has ended, from now on. A host that already is what is
        asked for, or on which a rule does not hold, is not claimed.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Never changes anything, and claims nothing.
  diff_mode:
    support: none
    description: Nothing is written.
"""

EXAMPLES = r"""
- name: Read the host and judge it
  firstlight.vllm.preflight:
    min_disk_gib: {/opt/firstlight: 20}
  register: preflight_result
"""

RETURN = r"""
converged:
  description: Whether the host already is what is asked for.
  type: bool
  returned: always
  sample: false
reason:
  description: Why not; empty when it is.
  type: str
  returned: always
  sample: nothing was deployed here yet
inputs:
  description: Digest of the variables and of firstlight itself.
  type: str
  returned: always
  sample: 7d1f3b0c9a0f5c4e8a2b6d1e0f9c8b7a6d5e4f3c2b1a0f9e8d7c6b5a4f3e2d1c
claim:
  description: Id of the claim that keeps other runs away; empty without one.
  type: str
  returned: always
  sample: 5f0c9a1be2d34781
host:
  description: What was read.
  type: dict
  returned: always
  sample: {os_id: debian, os_version: "12", glibc: [2, 36], machine: x86_64, cpus: 64, memory_mib: 515000}
problems:
  description: Rules that do not hold (id, severity, where, message, fix).
  type: list
  elements: dict
  returned: always
  sample:
    - {id: driver-old, severity: warning, where: gpu 0, message: the driver is 575.51., fix: install driver 580.}
firstlight_report:
  description: The report of the deployment in force.
  type: dict
  returned: when converged
  sample: {verdict: right, release: 3f1c2ab9de04, ready_s: 91.4}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.convergence import judge
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import run_command
from ansible_collections.firstlight.vllm.plugins.module_utils.host_facts import read
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.preflight_rules import Wanted, host_rules
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout, load_state
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import Claims, begun, busy
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd

ARGUMENTS = {
    "min_disk_gib": {"type": "dict", "default": {}},
    "shortcut": {"type": "bool", "default": True},
    "settings": {"type": "dict", "default": {}},
    "secrets": {"type": "dict", "default": {}, "no_log": True},
    "inputs": {"type": "str", "default": ""},
    "claim": {"type": "bool", "default": False},
    "run": {"type": "dict", "default": {}},
    "gone": {"type": "list", "elements": "str", "default": []},
    "state_dir": {"type": "path", "default": "/var/lib/firstlight"},
}


def run(params: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Read and judge the host; returns the module's result.

    Raises:
        FirstlightError: the record of an earlier deployment cannot be read, nvidia-smi fails, or another run is at
            work on the host.
    """
    settings, key = params["settings"], params["secrets"].get("vllm_server_api_key", "")
    layout = Layout(settings["vllm_server_unit"], Path(settings["vllm_server_config_dir"]), Path(params["state_dir"]))
    deployed = bool(load_state(layout))
    found = (
        judge(
            layout,
            inputs=params["inputs"],
            environment_secrets={"VLLM_API_KEY": key},
            api_key=key,
            systemd=Systemd(),
        )
        if Path("/run/systemd/system").is_dir()
        else None
    )
    if found is not None and found.converged and params["shortcut"]:
        return {"changed": False, "converged": True, "reason": "", "inputs": params["inputs"], "claim": "", "host": {},
                "problems": [], "firstlight_report": {**found.report, "converged": True}}  # fmt: skip
    wanted = Wanted(
        platform=settings["vllm_install_platform"],
        tensor_parallel=settings["vllm_server_tensor_parallel_size"],
        gpu_memory_utilization=settings["vllm_server_gpu_memory_utilization"],
        max_model_len=settings["vllm_server_max_model_len"],
        k=settings["vllm_server_num_speculative_tokens"] if settings["drafter_enabled"] else 0,
        # what is installed already needs no room a second time
        min_disk_gib={} if deployed else {str(k): float(v) for k, v in params["min_disk_gib"].items()},
    )
    claims = params["claim"] and not check
    with begun(layout.unit, layout.state_dir, params["run"] if claims else {}, params["gone"]) as claim:
        host = read(
            python=settings["vllm_install_python"],
            folders=list(wanted.min_disk_gib),
            port=settings["vllm_server_port"],
            run=lambda argv: ((answer := run_command(argv, 30)).status, answer.stdout),
        )
        problems = list(host_rules(host, wanted))
        errors = [problem for problem in problems if problem.severity == "error"]
        if errors and claim:
            Claims(layout.unit, layout.state_dir).drop(claim)
        elif not claims:
            problems += busy(layout.unit, layout.state_dir)
    result = {
        "changed": False,
        "converged": False,
        "reason": found.reason if found else "systemd is not running",
        "inputs": params["inputs"],
        "claim": "" if errors else claim,
        "host": host.as_dict(),
        "problems": [problem.as_dict() for problem in problems],
    }
    if not errors:
        return {**result, "warnings": [problem.text for problem in problems]}
    message = "\n".join(problem.text for problem in errors)
    return {**result, "msg": message, "failure": errors[0].as_error().as_dict()}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module.params, check=module.check_mode), host_faults=(OSError,))


if __name__ == "__main__":
    main()
