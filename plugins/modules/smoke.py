#!/usr/bin/python
# Copyright: (c) 2026, The firstlight developers
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: smoke
short_description: Prove that a server answers right, speculates, and stands load
version_added: 0.1.0
author: The firstlight developers (@firstlight)
description:
  - Sends short coding tasks, takes the code out of each answer, and runs it on known cases in an isolated process.
  - Measures speculation by the difference of the server's own counters around these requests, and fails when the
    mean acceptance length is below a floor.
  - Sends bursts of requests at once, after each of which the engine must live, every answer must be right, and the
    counters must have moved.
  - Refuses to run code where the host cannot isolate it.
options:
  base_url:
    description: URL at which the server answers on the host.
    type: str
    required: true
  model:
    description: Name under which the server serves the model.
    type: str
    required: true
  api_key:
    description: Key of the server; empty for none.
    type: str
    default: ''
  unit:
    description:
      - Name of the systemd unit, without C(.service). When the server fails on a request, the journal of its present
        start is read for the cause.
      - Empty leaves the journal alone.
    type: str
    default: ''
  invocation_id:
    description: systemd's id of the start that is tested, for its journal; empty for the one that runs now.
    type: str
    default: ''
  prompts:
    description:
      - The tasks. Each is the name of a built-in one (V(is_prime), V(fibonacci), V(count_vowels)) or a definition
        with C(prompt), C(function), C(cases) (a list of C([[arguments], expected])) and perhaps C(name).
      - The answer to the first one is the report's.
    type: list
    elements: raw
    default: [is_prime, fibonacci, count_vowels]
  samples:
    description: Answers to each prompt, asked one after the other. More than half of them must be right.
    type: int
    default: 3
  max_num_seqs:
    description: Requests that the server runs at once; the size of the bursts when O(bursts) is not given.
    type: int
    default: 16
  bursts:
    description:
      - Numbers of requests sent at once, one burst after the other. An empty list leaves the load out.
      - The default is O(max_num_seqs) twice, then half as many.
    type: list
    elements: int
  max_tokens:
    description: Tokens at which an answer is cut; at most half of the server's longest sequence is asked for.
    type: int
    default: 1024
  temperature:
    description: Sampling temperature; 0 is greedy.
    type: float
    default: 0
  thinking:
    description: Whether the model is asked to think first. It lowers acceptance and needs far more O(max_tokens).
    type: bool
    default: false
  speculation:
    description: Whether the server is meant to speculate, so that the gate applies.
    type: bool
    default: true
  min_acceptance_length:
    description: Mean acceptance length in tokens below which the test fails.
    type: float
    default: 1.5
  warn_acceptance_length:
    description: Mean acceptance length in tokens below which the test warns.
    type: float
    default: 2.5
  drafter:
    description: The drafter's folder on the host, whose C(config.json) tells what the log should have said.
    type: path
  evidence:
    description:
      - What is known about the deployment, for the likely causes of a low acceptance. The keys are C(log_taps),
        C(expected_taps), C(formula_taps), C(compile_cache_reused), C(mask_token_id), C(mask_token_id_source),
        C(sliding_window), C(max_model_len). Others are passed over.
    type: dict
    default: {}
  start:
    description:
      - The result of M(firstlight.vllm.ready) for this start. Its phases and times are carried into RV(report), its
        evidence is what the log told; O(evidence) wins over it.
    type: dict
    default: {}
  request_timeout_s:
    description: Seconds for one request.
    type: float
    default: 120
  first_request_timeout_s:
    description: The same for the first request and in the first burst, where kernels may still be compiled.
    type: float
    default: 600
  code_cpu_s:
    description: CPU seconds for running the code of one answer.
    type: int
    default: 5
  code_wall_s:
    description: Seconds of wall clock for the same.
    type: float
    default: 10
  code_memory_mib:
    description: MiB of memory for the same.
    type: int
    default: 256
attributes:
  check_mode:
    support: full
    description: In check mode nothing is sent, and the result says so.
  diff_mode:
    support: none
    description: Nothing is written.
"""

EXAMPLES = r"""
- name: Prove that the server works
  firstlight.vllm.smoke:
    base_url: http://127.0.0.1:30000
    model: Qwen3.6-27B
    drafter: /opt/firstlight/drafters/qwen3.6-27b-dflash

- name: Ask a task of our own, without load
  firstlight.vllm.smoke:
    base_url: http://127.0.0.1:30000
    model: Qwen3.6-27B
    bursts: []
    prompts:
      - is_prime
      - prompt: Write a Python function double(n) that returns n times two. Answer with one code block only.
        function: double
        cases: [[[1], 2], [[21], 42]]
"""

RETURN = r"""
answer:
  description: The model's first answer, word for word.
  type: str
  returned: when requests were sent
  sample: "```python\ndef is_prime(n): ...\n```"
verdict:
  description:
    - What became of it. V(right), V(wrong), V(contained) (it tried what it must not, and nothing came of it) or
      V(no-code).
  type: str
  returned: when requests were sent
  sample: right
prompts:
  description: For each prompt the number of samples, how many were right, and the verdict on each.
  type: list
  elements: dict
  returned: when requests were sent
  sample:
    - name: is_prime
      samples: 3
      right: 3
      verdicts: [{verdict: right, detail: right for all 31 cases, tried: [], right_cases: 31, cases: 31}]
acceptance:
  description:
    - Speculation over all requests of this test. C(drafts), C(drafted) and C(accepted) count tokens, C(rate) is
      accepted / drafted (0 to 1), C(length) is the mean acceptance length in tokens, 1 + accepted / drafts, and
      C(per_position) counts the tokens accepted at each position of a draft.
    - None when the server is not meant to speculate.
  type: dict
  returned: when requests were sent
  sample: {drafts: 20, drafted: 300, accepted: 200, rate: 0.6667, length: 11.0, per_position: [20, 20, 16, 12]}
acceptance_alone:
  description: The same over the requests that were sent one by one.
  type: dict
  returned: when requests were sent
  sample: {drafts: 12, drafted: 180, accepted: 120, rate: 0.6667, length: 11.0, per_position: [12, 12, 10, 7]}
acceptance_under_load:
  description: The same over the bursts; none without any.
  type: dict
  returned: when requests were sent
  sample: {drafts: 8, drafted: 120, accepted: 80, rate: 0.6667, length: 11.0, per_position: [8, 8, 6, 5]}
load:
  description: For each burst how many requests were sent, answered, and answered right, and its seconds.
  type: list
  elements: dict
  returned: when requests were sent
  sample: [{requests: 16, answered: 16, right: 16, seconds: 4.2}]
isolation:
  description: The walls that were in force around the code (walls, uid, namespaces, root, seccomp, limits).
  type: dict
  returned: when code was run
  sample: {uid: 65534, walls: [limits, no-files, no-network, unprivileged]}
seconds:
  description: Wall clock of the test in seconds.
  type: float
  returned: when requests were sent
  sample: 38.6
report:
  description: All of it with its warnings, RV(verified_at), the server's address and model. Empty in check mode.
  type: dict
  returned: always
  sample: {verdict: right, model: Qwen3.6-27B, warnings: []}
verified_at:
  description: When the test passed, ISO 8601.
  type: str
  returned: success
  sample: '2026-11-29T20:14:03+00:00'
failure:
  description: Id, cause and remedy of what failed, and the facts it was concluded from (seen).
  type: dict
  returned: failure
  sample:
    id: drafter-low-acceptance
    cause: "speculation: the drafter does nothing: mean acceptance length 1.00 is below 1.5 ..."
    remedy: correct the first of these in the drafter's config.json ...
    seen: ["taps: the log says (1, 5) and it should say (2, 6)."]
"""

from datetime import datetime, timezone
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.firstlight.vllm.plugins.module_utils.acceptance import Evidence
from ansible_collections.firstlight.vllm.plugins.module_utils.module_end import finish
from ansible_collections.firstlight.vllm.plugins.module_utils.openai_api import Server
from ansible_collections.firstlight.vllm.plugins.module_utils.prompts import DEFAULT, resolve
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox_process import Limits
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_diagnosis import explain
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_evidence import from_drafter
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_plan import Plan, default_bursts, validate
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_run import SmokeFailure, run

ARGUMENTS: dict[str, dict[str, Any]] = {
    "base_url": {"type": "str", "required": True},
    "model": {"type": "str", "required": True},
    "api_key": {"type": "str", "default": "", "no_log": True},
    "unit": {"type": "str", "default": ""},
    "invocation_id": {"type": "str", "default": ""},
    "prompts": {"type": "list", "elements": "raw", "default": list(DEFAULT)},
    "samples": {"type": "int", "default": 3},
    "max_num_seqs": {"type": "int", "default": 16},
    "bursts": {"type": "list", "elements": "int"},
    "max_tokens": {"type": "int", "default": 1024, "no_log": False},
    "temperature": {"type": "float", "default": 0},
    "thinking": {"type": "bool", "default": False},
    "speculation": {"type": "bool", "default": True},
    "min_acceptance_length": {"type": "float", "default": 1.5},
    "warn_acceptance_length": {"type": "float", "default": 2.5},
    "drafter": {"type": "path"},
    "evidence": {"type": "dict", "default": {}},
    "start": {"type": "dict", "default": {}},
    "request_timeout_s": {"type": "float", "default": 120},
    "first_request_timeout_s": {"type": "float", "default": 600},
    "code_cpu_s": {"type": "int", "default": 5},
    "code_wall_s": {"type": "float", "default": 10},
    "code_memory_mib": {"type": "int", "default": 256},
}

#: what the result of the module `ready` adds to the report
START_KEYS = ("phases", "ready_s", "ready_at", "started_at")


def plan_of(params: dict[str, Any], *, read_drafter: bool = True) -> Plan:
    """Build the plan from the options.

    Raises:
        FirstlightError: an option cannot be used.
    """
    bursts = params["bursts"]
    known = from_drafter(params["drafter"] or "") if read_drafter else {}
    plan = Plan(
        model=params["model"],
        prompts=resolve(params["prompts"]),
        samples=params["samples"],
        bursts=default_bursts(params["max_num_seqs"]) if bursts is None else tuple(bursts),
        max_tokens=params["max_tokens"],
        temperature=params["temperature"],
        extra={"chat_template_kwargs": {"enable_thinking": params["thinking"]}},
        speculation=params["speculation"],
        min_length=params["min_acceptance_length"],
        warn_length=params["warn_acceptance_length"],
        evidence=Evidence.from_mapping(
            {**known, **(params["start"].get("evidence") or {}), **params["evidence"], "thinking": params["thinking"]}
        ),
        limits=Limits(params["code_cpu_s"], params["code_wall_s"], params["code_memory_mib"]),
        request_timeout_s=params["request_timeout_s"],
        first_burst_timeout_s=params["first_request_timeout_s"],
    )
    validate(plan)
    return plan


def message_of(error: SmokeFailure, failure: dict[str, Any]) -> str:
    """The text a user reads: the test's own words, or the journal's cause where it told one."""
    return error.message if failure["id"] == error.kind else f"{failure['cause']} Fix: {failure['remedy']}"


def prove(module: AnsibleModule) -> dict[str, Any]:
    """Run the test; returns the module's result.

    Raises:
        FirstlightError: an option cannot be used.
    """
    params = module.params
    started = {key: params["start"][key] for key in START_KEYS if key in params["start"]}
    report: dict[str, Any] = {**started, "base_url": params["base_url"], "model": params["model"]}
    server = Server(params["base_url"], params["api_key"] or None, params["request_timeout_s"])
    # in check mode the drafter may not be there yet
    plan = plan_of(params, read_drafter=not module.check_mode)
    if module.check_mode:
        return {"changed": False, "report": {}, "msg": "Check mode: no request was sent to the server."}
    try:
        found = run(server, plan).as_dict()
    except SmokeFailure as error:
        found = error.report.as_dict()
        report.update(found)
        found.pop("warnings")
        failure = explain(error, params["unit"], params["invocation_id"])
        message = message_of(error, failure)
        return {"msg": message, "failure": failure, "report": report, "firstlight_report": report, **found}
    verified_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    report.update(found, verified_at=verified_at)
    return {"changed": False, "report": report, "verified_at": verified_at, **found}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    finish(module, lambda: prove(module))


if __name__ == "__main__":
    main()
