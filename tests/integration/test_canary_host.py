"""A whole deployment without a network and with planted secrets, and every place of the host searched afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_hosts_lab import CACHE, ROOT, Host, passed, playbook, wait_for

import deploy

pytestmark = pytest.mark.slow
API_KEY = "canary-api-key-4f1d09b7"
HUB_TOKEN = "hf_canaryhubtoken83c2e5"
HOUSE = "/srv/wheelhouse"
# the stand-in for vLLM, from its own lock
SERVER: dict[str, Any] = {
    "vllm_install_version": "0.20.1",
    "vllm_install_platform": "cpu",
    "vllm_install_lock": str(CACHE / "standin" / "lock.txt"),
    "vllm_install_extra_options": ["--no-index"],  # an index knows other packages by these names
    "model_path": "/srv/models/tiny-qwen3",
    "drafter_name": "tiny-qwen3-dflash",
    "drafter_path": "/srv/models/drafter.safetensors",
    "drafter_set": {"mask_token_id": 5, "block_size": 16},
    "vllm_server_served_model_name": "tiny-qwen3",
    "vllm_server_tensor_parallel_size": 2,
    "vllm_server_max_model_len": 1024,
    "vllm_server_max_num_seqs": 4,
    "vllm_server_max_num_batched_tokens": 1024,
    "vllm_server_language_model_only": False,
    "vllm_server_reasoning_parser": "",
    "vllm_server_tool_call_parser": "",
    "vllm_server_attention_backend": "",
    "vllm_server_gdn_prefill_backend": "",
    "smoke_samples": 1,
    "smoke_prompts": ["is_prime"],
    "preflight_min_disk_gib": {"/opt/firstlight": 1, "/var": 1},
}
SECRETS = {"vllm_server_api_key": API_KEY, "model_token": HUB_TOKEN, "drafter_hub_token": HUB_TOKEN}
OFFLINE = {"vllm_install_root": "/srv/airgap", "vllm_install_find_links": HOUSE, "vllm_install_offline": True}
# a hub library that gives the token away in its own errors
LEAKY = f"""\
#!/usr/bin/python3 -IS
import sys, types
hub = types.ModuleType("huggingface_hub")
class HfApi:
    def __init__(self, endpoint=None, token=None): self.token = token
    def model_info(self, *_, **__):
        assert self.token == {HUB_TOKEN!r}
        raise RuntimeError(f"the hub said no to the token {{self.token!r}}")
hub.HfApi = HfApi
sys.modules["huggingface_hub"] = sys.modules["huggingface_hub.utils"] = hub
sys.argv = sys.argv[2:]
exec(compile(sys.argv[1], "hub_child", "exec"), {{"__name__": "__main__"}})
"""
# every command line that is ever seen, on the host
WATCH = """\
import glob, time
seen = set()
with open("/root/command-lines", "w", buffering=1) as out:
    while True:
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try: text = open(path).read()
            except OSError: continue
            if text not in seen:
                seen.add(text); out.write(text.replace("\\0", " ") + "\\n")
        time.sleep(0.02)
"""
# which files of the host hold one of the words that come by stdin; a secret in argv would find itself
SEARCH = """\
import os, sys
words = [word.encode() for word in sys.stdin.read().split()]
for top in ("/etc", "/var", "/srv", "/root", "/home", "/tmp", "/run", "/usr/local", "/dev/shm", "/opt/sglang"):
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            try:
                if os.path.isfile(path) and not os.path.islink(path):
                    text = open(path, "rb").read()
                    if any(word in text for word in words): print(path)
            except OSError: pass
"""


class Deployed:
    """The host after the runs, and all that the controller was told."""

    leaked: deploy.RunResult  # a run that the hub ended
    result: deploy.RunResult

    def __init__(self, host: Host, inventory: Path) -> None:
        self.host, self.inventory = host, inventory
        self.told: list[str] = []

    def run(self, **variables: Any) -> deploy.RunResult:
        result = deploy.run(
            inventory=self.inventory,
            extravars={**SERVER, **OFFLINE, **SECRETS, **variables},
            diff=True,
            verbosity=3,
            on_event=lambda event: self.told.append(repr(event)),
        )
        self.told.append(json.dumps(result.as_dict()))
        return result


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    host = Host("proxy")
    host.boot()
    subprocess.run([ROOT / "tests" / "lab" / "lab.sh", "furnish", "proxy"], check=True)
    standin = CACHE / "standin"
    subprocess.run([sys.executable, ROOT / "tests/standins/vllm/build.py", standin], check=True)
    host.put(standin / "wheels", "/srv/standin")
    host.put(ROOT / "tests/data/tiny/drafter-qwen3/drafter-step-300.safetensors", "/srv/models/drafter.safetensors")
    host.run("tee", "/srv/leaky-python", given=LEAKY)
    host.run("tee", "/root/watch.py", given=WATCH)
    host.shell("chmod 755 /srv/leaky-python; systemd-run --unit=watch python3 /root/watch.py")
    folder = tmp_path_factory.mktemp("canary")
    inventory = host.inventory(folder)

    # the wheel folder is made where there is a network, uv's own wheel included; an index knows other packages by the
    # stand-in's names, so that uv is fetched first
    host.put(ROOT / "roles/vllm_install/files/locks/uv.txt", "/srv/uv.txt")
    fetch = "download --quiet --no-deps --only-binary :all: --require-hashes --requirement /srv/uv.txt"
    host.shell(f"python3 -m venv /srv/pip && /srv/pip/bin/pip {fetch} --dest /srv/standin")
    builder = {"vllm_install_root": "/srv/builder", "vllm_install_wheelhouse": HOUSE}
    near = {"UV_FIND_LINKS": "/srv/standin", "PIP_FIND_LINKS": "/srv/standin", "PIP_NO_INDEX": "1"}
    filled = playbook("wheelhouse", inventory, **SERVER, **builder, vllm_install_environment=near)
    assert passed(filled) == 1
    # and used where there is none
    host.shell("rm -r /srv/builder /srv/standin")
    host.shell("iptables -A OUTPUT -o lo -j ACCEPT; iptables -A OUTPUT ! -d 10.89.90.0/24 -j REJECT")

    made = Deployed(host, inventory)
    repository = {"model_path": "", "model_repo": "Owner/Name", "model_revision": "0123456789" * 4}
    made.leaked = made.run(**repository, model_python="/srv/leaky-python")
    made.result = made.run()
    yield made
    host.down()


def test_an_install_from_the_wheel_folder_needs_no_network(deployed: Deployed) -> None:
    assert deployed.result.ok, deployed.result.as_dict()
    names = deployed.host.shell(f"ls {HOUSE}")
    assert "uv-" in names
    assert "SHA256SUMS" in names
    deployed.host.shell(f"cd {HOUSE} && sha256sum --check --quiet SHA256SUMS")
    assert deployed.host.shell("curl -s -m 3 -o /dev/null https://pypi.org; echo $?") != "0\n"


def test_a_tampered_wheel_is_refused(deployed: Deployed) -> None:
    wheel = "glob.glob('/srv/tampered/torch-*')[0]"
    add = f"import glob, zipfile; zipfile.ZipFile({wheel}, 'a').writestr('torch/evil.py', '')"
    deployed.host.shell(f"cp -r {HOUSE} /srv/tampered")
    deployed.host.run("python3", "-c", add)
    other = {"vllm_install_root": "/srv/other", "vllm_install_find_links": "/srv/tampered"}
    result = deployed.run(**other)
    assert not result.ok
    (failed,) = result.hosts.values()
    assert "hash" in failed.failure.message.lower(), failed.failure
    # and the server that was there serves on
    wait_for(deployed.host, f"curl -sf -H 'Authorization: Bearer {API_KEY}' http://127.0.0.1:30000/v1/models")


def test_the_server_asks_for_the_key(deployed: Deployed) -> None:
    asked = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/v1/models"
    assert deployed.host.shell(asked) == "401"
    assert deployed.host.run("stat", "-c", "%a %U %G", "/etc/firstlight/vllm/secrets.env") == "600 root root\n"
    assert deployed.host.shell("runuser -u vllm -- cat /etc/firstlight/vllm/secrets.env 2>&1 || true").endswith(
        "Permission denied\n"
    )


def found(text: str) -> list[str]:
    return [text[max(0, text.find(word) - 300) : text.find(word)] for word in (API_KEY, HUB_TOKEN) if word in text]


def test_the_controller_was_told_no_secret(deployed: Deployed) -> None:
    assert not deployed.leaked.ok
    told = "\n".join(deployed.told)
    assert "the hub said no to the token" in told, "the hub's own words arrived, less the token"
    assert found(told) == []


def test_no_command_line_of_the_host_held_a_secret(deployed: Deployed) -> None:
    seen = deployed.host.shell("cat /root/command-lines; ps -ef ww")
    assert "vllm serve --config" in seen, "the watcher has seen the runs"
    # a test's own question, which is not the product's
    own = [line for line in seen.splitlines() if "Authorization: Bearer" in line]
    assert found("\n".join(line for line in seen.splitlines() if line not in own)) == []


def test_the_journal_and_the_log_hold_no_secret(deployed: Deployed) -> None:
    journal = deployed.host.shell("journalctl --no-pager --all -o verbose")
    assert "Invoked with" in journal, "Ansible logs its modules' arguments there"
    assert "VLLM" in journal or "vllm" in journal
    lines = journal.splitlines()
    assert found("\n".join(line for line in lines if "Authorization: Bearer" not in line)) == []


def test_no_file_of_the_host_holds_a_secret_but_the_one_for_it(deployed: Deployed) -> None:
    deployed.host.run("tee", "/run/search.py", given=SEARCH)
    paths = deployed.host.run("python3", "/run/search.py", given=f"{API_KEY} {HUB_TOKEN}").splitlines()
    ours = {"/srv/leaky-python", "/root/command-lines"}  # the first is this test's own stand-in; the second is above
    assert [path for path in paths if path not in ours and not path.startswith("/var/log/journal/")] == [
        "/etc/firstlight/vllm/secrets.env"
    ]


def test_systemd_shows_no_secret(deployed: Deployed) -> None:
    shown = deployed.host.shell(
        "systemctl show vllm.service; systemctl cat vllm.service; systemctl status vllm.service"
    )
    assert "secrets.env" in shown
    assert found(shown) == []


def test_the_report_and_the_status_hold_no_secret(deployed: Deployed) -> None:
    done = playbook("status", deployed.inventory, "-vvv", **SERVER, **OFFLINE)
    assert passed(done) == 0
    texts = done.stdout + deployed.host.shell("cat /var/lib/firstlight/vllm/state.json")
    assert '"release"' in texts
    assert found(texts) == []


def test_the_units_exposure_on_the_host_is_low(deployed: Deployed) -> None:
    text = deployed.host.shell("systemd-analyze security --no-pager vllm.service | tail -n 1")
    assert float(text.split(":")[1].split()[0]) <= 1.8


def test_a_server_on_loopback_is_shut_off_by_its_unit_as_well(deployed: Deployed) -> None:
    shown = deployed.host.shell("systemctl show vllm.service -p IPAddressDeny -p IPAddressAllow").splitlines()
    lists = {name: set(value.split()) for name, _, value in (line.partition("=") for line in shown)}
    assert lists == {"IPAddressDeny": {"::/0", "0.0.0.0/0"}, "IPAddressAllow": {"127.0.0.0/8", "::1/128"}}


def test_it_serves_again_after_a_reboot(deployed: Deployed) -> None:
    assert deployed.host.shell("systemctl is-enabled vllm.service") == "enabled\n"
    deployed.host.restart()
    wait_for(deployed.host, "systemctl is-active vllm.service && curl -sf http://127.0.0.1:30000/health", 60)
    assert deployed.host.shell("systemctl is-active sglang.service || true") == "inactive\n"
