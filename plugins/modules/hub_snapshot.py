#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hub_snapshot
short_description: Have a whole model on the host, from a folder or from a hub at a pinned commit
version_added: "0.1.0"
description:
  - With O(path), looks whether the folder holds a whole model and changes nothing.
  - With O(repo), fetches that repository at one commit into C(<root>/<owner>--<name>@<first 8 digits>), continues what
    was interrupted, and checks every file's size and digest against the hub's list. A finished folder is not fetched,
    nor is the hub asked, again.
  - Either way the configuration, the tokenizer and the header of every weight file are looked at.
  - The token goes to the fetching program through a pipe, never by its arguments or environment.
options:
  path:
    description: Folder of the host that holds the model. Give this or O(repo).
    type: str
    default: ""
  repo:
    description: Repository on the hub, C(owner/name).
    type: str
    default: ""
  revision:
    description: Commit of O(repo), 40 hexadecimal digits.
    type: str
    default: ""
  root:
    description: Folder of the host under which fetched models lie.
    type: path
    default: /opt/firstlight/models
  python:
    description: Interpreter of the host that has huggingface_hub, like the vLLM environment's.
    type: str
    default: ""
  token:
    description: Access token for the hub; empty for none.
    type: str
    default: ""
  endpoint:
    description: URL of a mirror of the hub; empty for huggingface.co.
    type: str
    default: ""
  allow:
    description: Patterns of files to fetch; empty for all.
    type: list
    elements: str
    default: []
  ignore:
    description: Patterns of files to leave out.
    type: list
    elements: str
    default: []
  workers:
    description: Number of files fetched at a time.
    type: int
    default: 8
  offline:
    description: Never ask the hub; fail when the folder is not whole.
    type: bool
    default: false
  environment:
    description: Environment variables for the fetch, like C(HTTPS_PROXY).
    type: dict
    default: {}
  weights_only:
    description:
      - The repository holds a drafter, which has no tokenizer and may lack a configuration; the fetched folder is
        then not judged as a model.
    type: bool
    default: false
  variable:
    description: Prefix of the variables that messages name.
    type: str
    default: model
attributes:
  check_mode:
    description: Tells what would be fetched, and changes nothing.
    support: full
  diff_mode:
    description: Shows the folder that is added.
    support: full
author:
  - The firstlight developers (@firstlight)
"""

EXAMPLES = r"""
- name: Fetch the target at one commit
  firstlight.vllm.hub_snapshot:
    repo: Qwen/Qwen3.6-27B
    revision: "{{ commit }}"
    python: /opt/firstlight/venvs/0.20.1-6c2a1f0d9b3e/bin/python
    token: "{{ hub_token }}"
  register: target

- name: Look at weights that lie on the host
  firstlight.vllm.hub_snapshot:
    path: /srv/models/Qwen3.6-27B
"""

RETURN = r"""
path:
  description: Folder of the model on the host.
  type: str
  returned: success
  sample: /opt/firstlight/models/Qwen--Qwen3.6-27B@0123abcd
architectures:
  description: What C(config.json) names; empty in check mode before the first fetch.
  type: list
  elements: str
  returned: success
  sample: [Qwen3_5ForConditionalGeneration]
weights:
  description: Names of the weight files.
  type: list
  elements: str
  returned: success
  sample: [model-00001-of-00012.safetensors]
weight_bytes:
  description: Size of the weight files together, in bytes.
  type: int
  returned: success
  sample: 54203345920
seconds:
  description: Duration of the fetch in seconds; 0 when nothing was fetched.
  type: float
  returned: success
  sample: 412.7
failure:
  description: What is wrong, where, why, and how to mend it.
  type: dict
  returned: failure
  sample:
    {kind: disk-full, what: only 3 GiB are free., where: /opt/firstlight, why: 12 GiB are needed., fix: free 9 GiB.}
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.hub_fetch import Snapshot, check, fetch, is_whole
from ansible_collections.firstlight.vllm.plugins.module_utils.hub_files import ModelFolder, inspect_model
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import appeared, finish

ARGUMENTS = {
    "path": {"type": "str", "default": ""},
    "repo": {"type": "str", "default": ""},
    "revision": {"type": "str", "default": ""},
    "root": {"type": "path", "default": "/opt/firstlight/models"},
    "python": {"type": "str", "default": ""},
    "token": {"type": "str", "default": "", "no_log": True},
    "endpoint": {"type": "str", "default": ""},
    "allow": {"type": "list", "elements": "str", "default": []},
    "ignore": {"type": "list", "elements": "str", "default": []},
    "workers": {"type": "int", "default": 8},
    "offline": {"type": "bool", "default": False},
    "environment": {"type": "dict", "default": {}},
    "weights_only": {"type": "bool", "default": False},
    "variable": {"type": "str", "default": "model"},
}


def snapshot_of(params: dict[str, Any]) -> Snapshot:
    """Turn the module's parameters into a snapshot."""
    given = {name: value for name, value in params.items() if name not in {"path", "weights_only"}}
    given["allow"], given["ignore"] = tuple(given["allow"]), tuple(given["ignore"])
    given["environment"] = {str(name): str(value) for name, value in given["environment"].items()}
    return Snapshot(**given)


def provide(params: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Have the model on the host; what there is to say of it."""
    variable = params["variable"]
    if bool(params["path"]) == bool(params["repo"]):
        raise FirstlightError(
            "both or neither of a path and a repository are given.",
            where=f"{variable}_path, {variable}_repo",
            fix=f"Set {variable}_path to a folder of the host, or {variable}_repo and {variable}_revision.",
            kind="model-source",
        )
    path, changed, seconds = params["path"], False, 0.0
    if not path:
        snapshot = snapshot_of(params)
        check(snapshot)
        path, changed = str(snapshot.folder), not is_whole(snapshot)
        if changed and check_mode:
            return told(path, changed=True)
        if changed:
            since = time.monotonic()
            fetch(snapshot)
            seconds = round(time.monotonic() - since, 3)
    if params.get("weights_only"):
        # the module drafter_config looks at these, and closer
        return told(path, changed=changed, seconds=seconds)
    return told(path, changed=changed, seconds=seconds, model=inspect_model(path, variable=f"{variable}_path"))


def told(path: str, *, changed: bool, seconds: float = 0.0, model: ModelFolder | None = None) -> dict[str, Any]:
    """The module's result; nothing is known of a model that is not there or was not looked at."""
    return {
        "changed": changed,
        "path": path,
        "architectures": list(model.architectures) if model else [],
        "weights": list(model.weights) if model else [],
        "weight_bytes": model.weight_bytes if model else 0,
        "seconds": seconds,
    }


def run(module: AnsibleModule) -> dict[str, Any]:
    """Have the model on the host; returns the module's result."""
    result = provide(module.params, module.check_mode)
    if module._diff:
        result["diff"] = appeared(f"{result['path']}\n", changed=result["changed"])
    return result


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: run(module))


if __name__ == "__main__":
    main()
