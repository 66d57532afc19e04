"""``site.yml --check --diff`` on a host that has nothing yet: it tells all that would be done, and does none of it.

The host is this machine, over Ansible's local connection, with a systemd that is played: it knows no unit and would
note it if it were asked to change one. `preflight`, which wants a real systemd, is left out here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support_hosts import free_port

ROOT = Path(__file__).resolve().parents[2]
FIRST = "firstlight.vllm.vllm_install : Install vLLM from its lock"
UNIT = "firstlight-blank"
SYSTEMCTL = """\
#!/bin/sh
# every unit is unknown; any verb that would change something is written down and refused
[ "$1" = show ] || { echo "$*" >> "$(dirname "$0")/asked"; exit 1; }
for unit; do
  case $unit in show | -* | \\**) continue ;; esac
  printf 'Id=%s\\nLoadState=not-found\\nActiveState=inactive\\nSubState=dead\\nResult=success\\nMainPID=0\\n' "$unit"
  printf 'InvocationID=\\nUnitFileState=\\nFragmentPath=\\nNeedDaemonReload=no\\n\\n'
done
"""


def made() -> dict[str, list[str]]:
    """What there is of the deployment on this machine."""
    parents = [Path("/etc/systemd/system"), Path("/etc/firstlight"), Path("/var/lib/firstlight"), Path("/var/cache")]
    found = {str(parent): sorted(str(path) for path in parent.glob(f"{UNIT}*")) for parent in parents}
    return found | {"/opt/firstlight": sorted(str(path) for path in Path("/opt/firstlight").glob("*/*"))}


@pytest.mark.slow
def test_everything_is_told_and_nothing_is_done(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("systemctl", SYSTEMCTL), *((name, "#!/bin/sh\n") for name in ("docker", "podman"))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    port = free_port()
    given = yaml.safe_load((ROOT / "inventory" / "demo" / "group_vars" / "all.yml").read_text()) | {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "ansible_become": False,
        "firstlight_checkout": str(ROOT),
        "vllm_install_extra_packages": [],
        "model_path": str(ROOT / "tests" / "data" / "tiny" / "tiny-qwen3"),
        "drafter_controller_path": "",
        "drafter_path": str(ROOT / "tests" / "data" / "tiny" / "drafter-qwen3" / "drafter-step-300.safetensors"),
        "vllm_server_unit": UNIT,
        "vllm_server_port": port,
        "vllm_server_readable_paths": [str(ROOT)],
        "preflight_result": {"converged": False, "inputs": "0" * 64, "host": {}},
    }
    (tmp_path / "inventory.json").write_text(json.dumps({"all": {"hosts": {"here": given}}}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {
        "PATH": f"{programs}:{environment['PATH']}",
        "HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
        "ANSIBLE_NOCOLOR": "1",
    }
    before = made()
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "-i", str(tmp_path / "inventory.json"), "site.yml",
         "--check", "--diff", "--start-at-task", FIRST],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed=0" in done.stdout
    assert "rescued=0" in done.stdout
    # each step is there and shows what it would write
    assert "+/opt/firstlight/venvs/0.20.1-" in done.stdout
    assert '"mask_token_id": 5' in done.stdout
    assert f"+port: {port}" in done.stdout
    assert "+ExecStart=/opt/firstlight/venvs/0.20.1-" in done.stdout
    for task in ("Record and stop the old server", "Prove that it answers right", "Enable the server and record"):
        assert task in done.stdout
    assert not (programs / "asked").exists(), (programs / "asked").read_text()
    assert made() == before
