"""Plants secrets in a run of the real roles on this machine and collects every text in which they could turn up.

Nothing of this machine is changed: what would be written is written below a temporary folder, or in check mode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml
from ansible_collections.firstlight.vllm.plugins.module_utils.release_service import stage
from support_release import layout_in, release_of
from support_unit import unit_text

ROOT = Path(__file__).resolve().parents[2]
API_KEY = "canary-api-key-4f1d09b7"
HUB_TOKEN = "hf_canaryhubtoken83c2e5"
SECRETS = (API_KEY, HUB_TOKEN)
COMMIT = "0123456789" * 4
# a hub library that gives the token away in its own error
LEAKY_HUB = """\
import sys
sys.modules["huggingface_hub.utils"] = sys.modules[__name__]
class HfApi:
    def __init__(self, endpoint=None, token=None): self.token = token
    def model_info(self, *_, **__): raise RuntimeError(f"the hub said no to the token {self.token!r}")
    def __getattr__(self, name): raise RuntimeError(f"{name}: the token {self.token!r} is not welcome")
def snapshot_download(*_, token=None, **__): raise RuntimeError(f"no to {token}")
"""
PLAY = f"""\
- name: Plant secrets
  hosts: all
  gather_facts: false
  tasks:
    - name: Preflight
      block:
        - ansible.builtin.import_role: {{name: firstlight.vllm.preflight}}
      rescue:
        - ansible.builtin.debug: {{var: ansible_failed_result}}
    - name: The target, from a hub that gives the token away
      check_mode: false
      vars: {{model_path: "", model_repo: Owner/Name, model_revision: "{COMMIT}"}}
      block:
        - ansible.builtin.import_role: {{name: firstlight.vllm.model}}
      rescue:
        - ansible.builtin.debug: {{var: ansible_failed_result}}
    - name: The release
      block:
        - ansible.builtin.import_role: {{name: firstlight.vllm.vllm_server, tasks_from: stage.yml}}
        - ansible.builtin.debug: {{var: vllm_server_staged}}
      rescue:
        - ansible.builtin.debug: {{var: ansible_failed_result}}
    - name: The status
      block:
        - ansible.builtin.import_role: {{name: firstlight.vllm.vllm_server, tasks_from: status.yml}}
      rescue:
        - ansible.builtin.debug: {{var: ansible_failed_result}}
    - name: The smoke test
      block:
        - ansible.builtin.import_role: {{name: firstlight.vllm.smoke}}
      rescue:
        - ansible.builtin.debug: {{var: ansible_failed_result}}
"""


class Watcher(threading.Thread):
    """Reads the command lines and, of our own processes, the titles of all processes until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(path.read_bytes().decode(errors="replace"))
                except OSError:
                    continue
            time.sleep(0.02)

    def stop(self) -> str:
        self._done.set()
        self.join()
        return "\n".join(sorted(self.seen))


def rendered(folder: Path) -> dict[str, str]:
    """The files of a release whose server has a key, written for real below ``folder``."""
    layout = layout_in(folder)
    stage(layout, release_of(layout), secrets={"VLLM_API_KEY": API_KEY}, dropin="[Service]\nNice=1\n", check=False)
    assert layout.secrets.stat().st_mode & 0o777 == 0o600
    assert API_KEY in layout.secrets.read_text(), "the canary is where it belongs"
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    found = {f"file {name}": path.read_text() for name, path in files.items() if path != layout.secrets}
    return {**found, "the rendered unit": unit_text(vllm_server_api_key=API_KEY)}


def played(folder: Path, *options: str) -> dict[str, str]:
    """Everything that a run of the roles says and leaves, with as much detail as Ansible can give."""
    hub = folder / "hub"
    hub.mkdir()
    (hub / "huggingface_hub.py").write_text(LEAKY_HUB)
    python = hub / "python"
    # a Python that has that library before the program starts
    python.write_text(
        f"#!{sys.executable} -IS\nimport sys; sys.path.insert(0, {str(hub)!r}); import huggingface_hub\n"
        "sys.argv = sys.argv[2:]; exec(compile(sys.argv[1], 'hub_child', 'exec'), {'__name__': '__main__'})\n"
    )
    python.chmod(0o755)
    (folder / "play.yml").write_text(PLAY)
    given = {
        "vllm_server_api_key": API_KEY,
        "model_token": HUB_TOKEN,
        "drafter_hub_token": HUB_TOKEN,
        "model_python": str(python),
        "model_root": str(folder / "models"),
        "model_path": str(ROOT / "tests" / "data" / "tiny" / "tiny-qwen3"),
        "model_result": {"path": str(ROOT / "tests" / "data" / "tiny" / "tiny-qwen3")},
        "vllm_server_model": str(ROOT / "tests" / "data" / "tiny" / "tiny-qwen3"),
        # a checkout may lie where the unit sees nothing
        "vllm_server_readable_paths": [str(ROOT)],
        "vllm_server_config_dir": str(folder / "etc"),
        "vllm_server_unit": "firstlight-canary",
        "vllm_install_platform": "cpu",
        "vllm_install_version": "0.20.1",
        "vllm_install_result": {"path": "/opt/firstlight/venvs/0.20.1-canary"},
        "vllm_server_max_model_len": 1024,
        "vllm_server_tensor_parallel_size": 1,
        "drafter_enabled": False,
        "drafter_result": {},
        "smoke_stall_timeout_s": 1,
        "vllm_server_started": {"invocation_id": "0" * 32, "started_at": 0.0},
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
    }
    (folder / "inventory.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": given}}}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_LOG_PATH": str(folder / "ansible.log"), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_INJECT_INVOCATION": "1",
        "ANSIBLE_LOCAL_TEMP": str(folder / "local"), "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "ANSIBLE_CACHE_PLUGIN": "ansible.builtin.jsonfile", "ANSIBLE_CACHE_PLUGIN_CONNECTION": str(folder / "facts"),
        "HOME": str(folder),
    }  # fmt: skip
    watcher = Watcher()
    watcher.start()
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", str(folder / "inventory.yml"), str(folder / "play.yml"),
         "--diff", "-vvv", *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, timeout=240,
    )  # fmt: skip
    commands = watcher.stop()
    texts = {"Ansible's output": done.stdout + done.stderr, "command lines": commands}
    own = {folder / "inventory.yml"}
    for path in folder.rglob("*"):
        if path.is_file() and path not in own:
            texts[f"file {path.relative_to(folder)}"] = path.read_text(errors="replace")
    return texts


def leaks(texts: dict[str, str]) -> list[str]:
    """Where a secret turned up, with what stands around it."""
    found = []
    for place, text in texts.items():
        for secret in SECRETS:
            at = text.find(secret)
            if at >= 0:
                found.append(f"{place}: ...{text[max(0, at - 200) : at]}<{json.dumps(secret[:6])}>...")
    return found
