#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: drafter_config
short_description: Make a DFlash drafter ready to serve from its bare safetensors
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Reads the headers of a drafter's safetensors (a few kilobytes, whatever the size), tells its family, compares the
    complete tensor list with what vLLM expects, and derives C(config.json) from the shapes, the target's
    configuration, the table of published drafters and values given by the user. Each value says where it is from.
  - Puts the weights into O(dest) as C(model.safetensors), by a hard link where possible, else by a symbolic link,
    else by a copy, and writes C(config.json) beside them in one step. Nothing is written when anything is wrong.
  - A C(config.json) that firstlight did not write is checked field by field and kept, except for what vLLM needs
    otherwise (C(eagle_aux_hidden_state_layer_ids) added, C(auto_map) dropped). It is saved once as
    C(config.json.published) before it is changed.
options:
  path:
    description: The drafter on the host. A safetensors file of any name, an index of shards, or the folder of either.
    type: path
    required: true
  dest:
    description: Folder that vLLM will be given; by default the folder of O(path).
    type: path
  target:
    description: The target's folder on the host, or its C(config.json).
    type: path
    required: true
  vllm_version:
    description: The vLLM release that will serve.
    type: str
    default: 0.20.1
  max_model_len:
    description: The longest sequence served, in tokens; V(0) stands for the target's own maximum.
    type: int
    default: 0
  set:
    description:
      - Values that cannot be read off the weights, by field, such as C(mask_token_id), C(block_size) or
        C(target_layer_ids). They replace those of table, target and an existing C(config.json).
      - C(family) chooses a row of O(families) where several fit.
    type: dict
    default: {}
  families:
    description: The rows of the table of published drafters, as in the role's C(files/families.yml).
    type: list
    elements: dict
    default: []
  keep_existing:
    description: Whether to check and keep a C(config.json) that firstlight did not write; otherwise it is replaced.
    type: bool
    default: true
  expect_later:
    description:
      - In check mode, do not fail when O(path) or O(target) does not exist, because an earlier task of the same run
        would have put it there. The result then has RV(derived=false).
      - Has no effect outside check mode.
    type: bool
    default: false
  versioned:
    description:
      - Whether to write into a folder below O(dest) named by configuration and weights, so that what an earlier
        release of the server uses is left as it is.
    type: bool
    default: false
  state:
    description: The drafter is ready to serve.
    type: str
    choices: [present]
    default: present
attributes:
  check_mode:
    support: full
    description: Can run in check mode and return the changed status without changing anything.
  diff_mode:
    support: full
    description: Shows C(config.json) before and after.
"""

EXAMPLES = r"""
- name: Make a bare drafter ready
  firstlight.vllm.drafter_config:
    path: /srv/incoming/drafter.safetensors
    dest: /opt/firstlight/drafters/Qwen3.6-27B-DFlash
    target: /opt/firstlight/models/Qwen3.6-27B
    vllm_version: 0.20.1
    max_model_len: 32768
    families: "{{ lookup('ansible.builtin.file', 'families.yml') | from_yaml }}"

- name: Make a drafter ready that is in no table
  firstlight.vllm.drafter_config:
    path: /srv/incoming/mine.safetensors
    dest: /opt/firstlight/drafters/mine
    target: /opt/firstlight/models/mine
    set:
      mask_token_id: 151669
      block_size: 16
"""

RETURN = r"""
path:
  description: The folder to give to vLLM as the drafter.
  returned: always
  type: str
  sample: /opt/firstlight/drafters/Qwen3.6-27B-DFlash
derived:
  description: Whether a configuration was derived; false only in check mode, with O(expect_later).
  returned: success
  type: bool
  sample: true
note:
  description: Why nothing was derived.
  returned: when RV(derived=false)
  type: str
  sample: "/srv/incoming/drafter.safetensors: does not exist yet"
family:
  description: >-
    The family by tensor names, one of V(dflash), V(dflash2), V(dspark), V(speculators), V(laguna), V(quantised).
  returned: when the weights could be read
  type: str
  sample: dflash
row:
  description: The row of the table that the weights belong to; empty when in none.
  returned: when RV(derived=true)
  type: str
  sample: Qwen3.6-27B-DFlash
config:
  description: The content of C(config.json).
  returned: when RV(derived=true)
  type: dict
  sample: {"architectures": ["DFlashDraftModel"], "block_size": 16}
config_digest:
  description: The sha256 of RV(config) as canonical JSON, in hexadecimal. It belongs into the compile cache's key.
  returned: when RV(derived=true)
  type: str
  sample: 7d1f3b0c9a0f5c4e8a2b6d1e0f9c8b7a6d5e4f3c2b1a0f9e8d7c6b5a4f3e2d1c
fields:
  description: For each field its value, where it is from (header, target, formula, table, default, user), a note.
  returned: when the weights could be read
  type: dict
  sample: {"mask_token_id": {"value": 248070, "from": "table", "note": "Qwen3.6-27B-DFlash"}}
problems:
  description: What is wrong or to be known, errors first, with C(id), C(severity), C(field), C(message), C(fix).
  returned: always
  type: list
  elements: dict
  sample:
    - id: window-ignored
      severity: warning
      field: sliding_window
      message: vLLM 0.20.1 ignores the drafter's sliding window of 2048 tokens.
      fix: use vLLM 0.26.0 or newer
files:
  description: The files of the drafter in RV(path), and how each got there (hardlink, symlink, copy, in-place).
  returned: when RV(derived=true)
  type: list
  elements: dict
  sample:
    - path: /opt/firstlight/drafters/Qwen3.6-27B-DFlash/model.safetensors
      source: /srv/incoming/drafter.safetensors
      how: hardlink
facts:
  description: >-
    Numbers for other checks. Counts (C(num_hidden_layers), C(num_attention_heads), C(num_key_value_heads),
    C(head_dim), C(hidden_size), C(num_taps)), C(weight_bytes) in bytes, C(num_speculative_tokens), the most that
    the block allows, and the speculative C(method).
  returned: when RV(derived=true)
  type: dict
  sample: {"num_hidden_layers": 5, "num_attention_heads": 32, "weight_bytes": 3460426240}
bytes_read:
  description: How much of the weights was read, in bytes.
  returned: when RV(derived=true)
  type: int
  sample: 6512
failure:
  description: What is wrong, where, why and how to mend it, each by itself.
  returned: failure
  type: dict
  sample:
    kind: empty-file
    what: is empty.
    where: /srv/incoming/drafter.safetensors
    why: ""
    fix: copy or download the file again
"""

from collections.abc import Iterable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_deploy import (
    CONFIG_NAME,
    Job,
    Plan,
    apply,
    failure,
    inspect,
)
from ansible_collections.firstlight.vllm.plugins.module_utils.drafter_place import Placement
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish, rewritten

ARGUMENT_SPEC: dict[str, Any] = {
    "path": {"type": "path", "required": True},
    "dest": {"type": "path"},
    "target": {"type": "path", "required": True},
    "vllm_version": {"type": "str", "default": "0.20.1"},
    "max_model_len": {"type": "int", "default": 0},
    "set": {"type": "dict", "default": {}},
    "families": {"type": "list", "elements": "dict", "default": []},
    "keep_existing": {"type": "bool", "default": True},
    "expect_later": {"type": "bool", "default": False},
    "versioned": {"type": "bool", "default": False},
    "state": {"type": "str", "choices": ["present"], "default": "present"},
}


def job_of(params: dict[str, Any]) -> Job:
    """Turn the module's parameters into a job."""
    return Job(
        path=params["path"],
        target=params["target"],
        dest=params["dest"] or "",
        vllm_version=params["vllm_version"],
        max_model_len=params["max_model_len"] or None,
        user=params["set"],
        families=params["families"],
        keep_existing=params["keep_existing"],
        versioned=params["versioned"],
    )


def files_of(placements: Iterable[Placement]) -> list[dict[str, str]]:
    """What the result tells of each file."""
    return [{"path": item.dest, "source": item.source, "how": item.how} for item in placements]


def result_of(plan: Plan) -> dict[str, Any]:
    """Turn a plan into the module's result."""
    return {
        **plan.report.as_dict(),
        "derived": True,
        "path": plan.dest,
        "row": plan.report.facts.get("row", ""),
        "facts": plan.report.facts,
        "config_digest": plan.report.config_digest,
        "bytes_read": plan.bytes_read,
        "files": files_of(plan.placements),
        "diff": rewritten(f"{plan.dest}/{CONFIG_NAME}", plan.before or "", plan.after),
    }


def failed(plan: Plan, error: FirstlightError) -> dict[str, Any]:
    """The module's result when the drafter cannot be used or placed."""
    return {"msg": error.message, "failure": error.as_dict(), "path": plan.dest, **plan.report.as_dict()}


def run(module: AnsibleModule) -> dict[str, Any]:
    """Look at the drafter and make it ready; returns the module's result."""
    job = job_of(module.params)
    plan = inspect(job)
    report = plan.report
    if not report.usable:
        later = report.errors[0].id in {"missing", "no-weights", "target-missing"} and report.family is None
        if module.check_mode and module.params["expect_later"] and later:
            note = f"{report.errors[0].field}: does not exist yet"
            return {"changed": True, "derived": False, "note": note, "path": job.dest or plan.dest, "problems": []}
        return failed(plan, failure(report))
    warnings = [f"{problem.message} Fix: {problem.fix}." for problem in report.problems]
    result = {**result_of(plan), "changed": plan.changed, "warnings": warnings}
    if not module.check_mode:
        try:
            done = apply(plan)
        except FirstlightError as error:
            return {**failed(plan, error), "warnings": warnings}
        result["files"] = files_of(done)
    return result


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    finish(module, lambda: run(module))


if __name__ == "__main__":
    main()
