#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: release
short_description: Bring a release of the vLLM server into service and out of it
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - A release is the server's configuration, environment and systemd unit in one folder that never changes.
  - V(staged) writes it beside the one in force and judges target, drafter and GPU memory; nothing running notices.
  - V(started) puts its unit in force and starts it, without enabling it.
  - V(committed) enables it and records the deployment with its report.
  - V(removed) stops it and removes all of the unit's files, but for weights, virtual environments and the record
    of the old server.
extends_documentation_fragment:
  - firstlight.vllm.deployment
options:
  state:
    description: Where the release is to be.
    type: str
    choices: [staged, started, committed, removed]
    required: true
  unit:
    description: Name of the systemd unit, without C(.service).
    type: str
    required: true
  release:
    description: Id of the release, as V(staged) returned it. Needed by V(started) and V(committed).
    type: str
  settings:
    description:
      - What a release is made of; needed by V(staged).
    type: dict
    suboptions:
      config:
        description: Text for C(vllm serve --config).
        type: str
        required: true
      unit_text:
        description: Text of the unit file; C(@RELEASE@) stands for the release's id.
        type: str
        required: true
      dropin:
        description: Text of a drop-in for the site's needs; empty for none.
        type: str
        default: ''
      environment:
        description: Environment of the service, without secrets.
        type: dict
        default: {}
      user:
        description: System user of the service; made when missing.
        type: str
        required: true
      group:
        description: System group of the service; made when missing.
        type: str
        required: true
      serve:
        description: The same flags as O(settings.config), as a mapping.
        type: dict
        required: true
      target:
        description: Folder of the target model on the host.
        type: path
        required: true
      drafter:
        description: Folder of the drafter on the host; empty without speculation.
        type: str
        default: ''
      venv:
        description: Virtual environment that vLLM is installed in.
        type: path
        required: true
      vllm_version:
        description: Version of vLLM.
        type: str
        required: true
      platform:
        description: Kind of the vLLM build.
        type: str
        choices: [cuda, cpu]
        required: true
      base_url:
        description: URL at which the server will answer on the host.
        type: str
        required: true
  secrets:
    description: Environment variables that hold secrets; they go into a file that root alone can read.
    type: dict
    default: {}
  inputs:
    description: Digest of the variables that led to the release; recorded by V(committed).
    type: str
    default: ''
  watched:
    description: Further files whose change means that a later run has something to do.
    type: list
    elements: path
    default: []
  report:
    description: What the smoke test found; recorded by V(committed).
    type: dict
    default: {}
  keep:
    description: Number of releases to keep on the host.
    type: int
    default: 3
attributes:
  check_mode:
    support: full
    description: Can run in check mode and tell what would change.
  diff_mode:
    support: full
    description: Shows the files of the release against those of the one in force; never a secret.
"""

EXAMPLES = r"""
- name: Start what was staged
  firstlight.vllm.release:
    state: started
    unit: vllm
    release: "{{ staged.release }}"
"""

RETURN = r"""
release:
  description: Id of the release; empty with V(removed).
  type: str
  returned: always
  sample: 3f1c2ab9de04
files:
  description: Files that changed.
  type: list
  elements: str
  returned: state is staged
  sample: [/etc/firstlight/vllm/releases/3f1c2ab9de04/serve.yaml]
problems:
  description: Warnings about target, drafter and memory.
  type: list
  elements: dict
  returned: state is staged
  sample:
    - {id: driver-old, severity: warning, where: gpu 0, message: the driver is 575.51., fix: install driver 580.}
memory:
  description: Predicted memory of one GPU in GiB; none on a CPU.
  type: dict
  returned: state is staged
  sample: {budget: 125.8, weights: 27.0, overhead: 5.8, cache: 93.0, request_full: 2.88, at_once: 32.2}
cache_root:
  description: Folder of the compile caches of this combination.
  type: str
  returned: state is staged
  sample: /var/cache/vllm/0.20.1-1c2d3e4f5a6b7c8d
invocation_id:
  description: systemd's id of the start that is running.
  type: str
  returned: state is started
  sample: 9c1f0e7a5b3d4c2e8f6a1b0d9e8c7f6a
started_at:
  description: When the main process was started, in seconds since the epoch.
  type: float
  returned: state is started
  sample: 1795993313.4
removed:
  description: Releases (with V(committed)) or files (with V(removed)) that were removed.
  type: list
  elements: str
  returned: state is committed or removed
  sample: [/etc/firstlight/vllm/releases/0a1b2c3d4e5f]
firstlight_report:
  description: The deployment's report.
  type: dict
  returned: state is committed
  sample: {verdict: right, release: 3f1c2ab9de04, downtime_s: 98.2}
"""

import contextlib
import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.cutover import CutoverStore
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.release import Layout, load
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import commit, remove, start
from ansible_collections.firstlight.vllm.plugins.module_utils.release_stage import Settings, stage_release
from ansible_collections.firstlight.vllm.plugins.module_utils.run_claim import claimed, end_claim
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd

SETTINGS = {
    "config": {"type": "str", "required": True},
    "unit_text": {"type": "str", "required": True},
    "dropin": {"type": "str", "default": ""},
    "environment": {"type": "dict", "default": {}},
    "user": {"type": "str", "required": True},
    "group": {"type": "str", "required": True},
    "serve": {"type": "dict", "required": True},
    "target": {"type": "path", "required": True},
    "drafter": {"type": "str", "default": ""},
    "venv": {"type": "path", "required": True},
    "vllm_version": {"type": "str", "required": True},
    "platform": {"type": "str", "choices": ["cuda", "cpu"], "required": True},
    "base_url": {"type": "str", "required": True},
}

ARGUMENTS = {
    "state": {"type": "str", "choices": ["staged", "started", "committed", "removed"], "required": True},
    "unit": {"type": "str", "required": True},
    "config_dir": {"type": "path", "default": "/etc/firstlight"},
    "release": {"type": "str"},
    "settings": {"type": "dict", "options": SETTINGS},
    "secrets": {"type": "dict", "default": {}, "no_log": True},
    "inputs": {"type": "str", "default": ""},
    "watched": {"type": "list", "elements": "path", "default": []},
    "report": {"type": "dict", "default": {}},
    "keep": {"type": "int", "default": 3},
}


def run(module: AnsibleModule) -> dict[str, object]:
    """Do what the state asks for, with no other run at work; returns the module's result."""
    params, check = module.params, module.check_mode
    layout = Layout(params["unit"], config_dir=Path(params["config_dir"]))
    with claimed(layout.unit, layout.state_dir, check=check, what=f"release {params['state']}"):
        return _run(module, layout, Systemd())


def _run(module: AnsibleModule, layout: Layout, systemd: Systemd) -> dict[str, object]:
    params, check = module.params, module.check_mode
    if params["state"] == "staged":
        settings = Settings(**params["settings"])
        # a way back that a killed run left at work takes the files of its release away: let it end first
        with contextlib.nullcontext() if check else CutoverStore(layout.unit, layout.state_dir).lock():
            return stage_release(layout, settings, secrets=params["secrets"], check=check, diff=module._diff)
    if params["state"] == "removed":
        removed = remove(layout, systemd, check=check)
        return {"changed": bool(removed), "release": "", "removed": removed}
    if check and not (layout.releases / params["release"]).exists():
        # a blank host in check mode: V(staged) wrote nothing
        return {"changed": True, "release": params["release"], "invocation_id": "", "started_at": 0.0}
    release = load(layout, params["release"])
    if params["state"] == "started":
        changed, state = start(layout, release, systemd, check=check)
        return {
            "changed": changed,
            "release": release.id,
            "invocation_id": state.invocation_id,
            "started_at": state.exec_main_start or 0.0,
        }
    changed, removed = commit(
        layout,
        release,
        systemd,
        inputs=params["inputs"],
        watched=params["watched"],
        report=params["report"],
        keep=params["keep"],
        check=check,
    )
    if not check:
        end_claim(layout.unit, layout.state_dir)
    return {
        "changed": changed or bool(removed),
        "release": release.id,
        "removed": removed,
        "firstlight_report": {**params["report"], "release": release.id},
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS,
        supports_check_mode=True,
        required_if=[
            ("state", "staged", ["settings"]),
            ("state", "started", ["release"]),
            ("state", "committed", ["release"]),
        ],
    )
    finish(module, lambda: run(module), host_faults=(OSError, json.JSONDecodeError))


if __name__ == "__main__":
    main()
