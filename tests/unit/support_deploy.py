"""A small collection with playbooks of its own, to try `deploy` against a real ansible-playbook."""

from __future__ import annotations

from pathlib import Path

LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}

REPORT = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Wait for the server
      ansible.builtin.debug:
        var: started
      vars:
        started: {phases: [{name: load weights, seconds: 1.5}]}
    - name: Report
      ansible.builtin.debug:
        var: firstlight_report
      vars:
        firstlight_report:
          answer: "def is_prime(n): ..."
          verdict: right
          acceptance: {drafts: 10, drafted: 150, accepted: 100, rate: 0.667, length: 11.0, per_position: [10, 9]}
          phases: [{name: imports, seconds: 2}, {name: load weights, seconds: 1.5}]
          ready_s: 3.5
          downtime_s: 4
          converged: false
          warnings: [the window is smaller than max_model_len]
          release: r1
          model: m
          base_url: http://127.0.0.1:30000
          verified_at: "2026-05-09T10:00:00Z"
"""

RESCUED = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Cut over
      block:
        - name: Look for an old unit
          ansible.builtin.assert: {that: false, fail_msg: not there}
          ignore_errors: true
        - name: Wait until ready
          firstlight.vllm.fake_fail:
      rescue:
        - name: Bring the old server back
          ansible.builtin.debug: {msg: back}
        - name: Say so
          ansible.builtin.fail: {msg: "The old server answers again."}
"""

MENDED = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Cut over
      block:
        - name: Wait until ready
          firstlight.vllm.fake_fail:
      rescue:
        - name: Mend it
          ansible.builtin.debug: {msg: mended}
"""

SLEEP = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Sleep
      ansible.builtin.command: sleep 60.125
"""

SECRET = """
- name: Serve
  hosts: all
  gather_facts: false
  tasks:
    - name: Use the secret
      ansible.builtin.command: wc -c
      args: {stdin: "{{ secret }}{{ inventory_secret }}"}
      no_log: true
      ignore_errors: true
    - name: Prove that it arrived
      ansible.builtin.debug: {msg: "{{ (secret + inventory_secret) | length }}"}
"""

FAKE_FAIL = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
AnsibleModule({}).fail_json(
    msg="the server died: token budget", warnings=["odd"],
    failure={"kind": "token-budget", "what": "the token budget is -24", "fix": "Set it to 256."})
"""

PLAYBOOKS = {"site": REPORT, "rescued": RESCUED, "mended": MENDED, "slow": SLEEP, "secret": SECRET}


def build_collection(root: Path) -> Path:
    """Write the collection under ``root`` and return ``root``."""
    collection = root / "ansible_collections" / "firstlight" / "vllm"
    (collection / "playbooks").mkdir(parents=True)
    (collection / "plugins" / "modules").mkdir(parents=True)
    (collection / "galaxy.yml").write_text("namespace: firstlight\nname: vllm\nversion: 0.0.0\n")
    (collection / "plugins" / "modules" / "fake_fail.py").write_text(FAKE_FAIL)
    for name, text in PLAYBOOKS.items():
        (collection / "playbooks" / f"{name}.yml").write_text("---" + text)
    return root


def hosts(*names: str, **extra: object) -> dict[str, object]:
    """An inventory of local hosts."""
    return {"all": {"hosts": {name: {**LOCAL, **extra} for name in names}}}


def running(text: str) -> list[str]:
    """Command lines of processes that hold a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if text in line:
            found.append(line)
    return found
