"""The server's unit file: hardened, and still able to compile kernels and reach the GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support_unit import unit_text

ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSED = 1.8


def directives(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", ";", "[")):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def only(name: str, **overrides: Any) -> str:
    values = directives(unit_text(**overrides))[name]
    assert len(values) == 1
    return values[0]


def exposure(folder: Path, **overrides: Any) -> float:
    unit = folder / "vllm.service"
    unit.write_text(unit_text(**overrides))
    answer = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", answer.stdout)
    assert found, answer.stdout + answer.stderr
    return float(found.group(1))


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"vllm_install_platform": "cpu"},
        {"vllm_server_ip_allow": []},
        {"vllm_server_readable_paths": ["/home/models"]},
    ],
)
def test_the_units_exposure_is_low(tmp_path: Path, overrides: dict[str, Any]) -> None:
    assert exposure(tmp_path, **overrides) <= MOST_EXPOSED


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_the_score_can_fail(tmp_path: Path) -> None:
    unit = tmp_path / "open.service"
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    answer = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert float(re.findall(r"exposure level for \S+: ([\d.]+)", answer.stdout)[0]) > 9


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    unit = tmp_path / "vllm.service"
    # a program that is there; everything else as it is
    text = unit_text(vllm_server_ip_allow=["127.0.0.0/8"], vllm_server_readable_paths=["/home/models"])
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    answer = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    complaints = [line for line in (answer.stdout + answer.stderr).splitlines() if "vllm.service" in line]
    assert complaints == []


def test_kernels_can_be_compiled_at_run_time() -> None:
    assert "MemoryDenyWriteExecute" not in directives(unit_text())


def test_gpu_devices_and_nothing_else_are_open_on_cuda() -> None:
    values = directives(unit_text(vllm_install_platform="cuda"))
    assert values["DeviceAllow"] == [
        f"char-{family} rw" for family in ("nvidia", "nvidia-frontend", "nvidia-uvm", "nvidia-caps")
    ]
    assert values["DevicePolicy"] == ["closed"]
    assert values["PrivateDevices"] == ["no"]


def test_no_device_is_open_on_a_cpu() -> None:
    values = directives(unit_text(vllm_install_platform="cpu"))
    assert "DeviceAllow" not in values
    assert values["DevicePolicy"] == ["closed"]


def test_the_engines_death_with_status_0_is_restarted_and_a_crash_loop_ends() -> None:
    assert only("Restart") == "always"
    assert int(only("RestartSec")) >= 10
    assert only("RestartPreventExitStatus") == "2"
    assert int(only("StartLimitBurst")) >= 1
    # so many restarts must fit into the interval, else the limit never bites
    assert int(only("StartLimitIntervalSec")) > int(only("StartLimitBurst")) * (int(only("RestartSec")) + 600)


def test_a_stop_kills_the_whole_group_after_a_while() -> None:
    assert only("KillMode") in {"mixed", "control-group"}
    assert 60 <= int(only("TimeoutStopSec")) <= 120
    assert only("Type") == "exec"


def test_addresses_and_memory_that_nccl_needs_are_there() -> None:
    assert set(only("RestrictAddressFamilies").split()) == {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}
    assert only("LimitMEMLOCK") == "infinity"
    assert "PrivateIPC" not in directives(unit_text())


def test_it_runs_as_its_own_user_with_its_own_folders() -> None:
    values = directives(unit_text(vllm_server_user="llm", vllm_server_unit="llm"))
    assert values["User"] == ["llm"]
    assert "DynamicUser" not in values
    assert values["StateDirectory"] == values["CacheDirectory"] == ["llm"]


def test_no_secret_and_no_json_stands_in_the_command_line() -> None:
    command = only("ExecStart", vllm_server_api_key="canary")
    assert command.endswith("/bin/vllm serve --config /etc/firstlight/vllm/releases/@RELEASE@/serve.yaml")
    assert not set(command) & set("{}\"'%$")
    assert "canary" not in unit_text(vllm_server_api_key="canary")


def test_what_is_bound_below_home_stays_visible() -> None:
    # systemd drops what is bound below a folder that ProtectHome=yes makes inaccessible
    assert only("ProtectHome") == "yes"
    assert only("ProtectHome", vllm_server_readable_paths=["/home/models"]) == "tmpfs"
    assert only("BindReadOnlyPaths", vllm_server_readable_paths=["/home/models"]) == "/home/models"


def test_it_comes_up_at_boot_after_the_gpus_modules() -> None:
    assert only("WantedBy") == "multi-user.target"
    assert {"systemd-modules-load.service", "nvidia-persistenced.service"} <= set(only("After").split())


def test_a_server_on_loopback_is_shut_off_from_others_and_the_site_can_say_otherwise() -> None:
    # torch's store listens on all interfaces
    assert only("IPAddressDeny") == "any"
    assert only("IPAddressAllow") == "127.0.0.0/8 ::1"
    assert "IPAddressDeny" not in directives(unit_text(vllm_server_ip_allow=[]))
    assert only("IPAddressDeny", vllm_server_ip_allow=["127.0.0.0/8"]) == "any"
    assert only("IPAddressAllow", vllm_server_ip_allow=["127.0.0.0/8", "::1"]) == "127.0.0.0/8 ::1"
