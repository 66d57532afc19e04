"""Made-up hosts, and a recorded systemd, for tests of what may be stopped and how."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.firstlight.vllm.plugins.module_utils.containers import Engines
from ansible_collections.firstlight.vllm.plugins.module_utils.gpus import Gpu, GpuHolder
from ansible_collections.firstlight.vllm.plugins.module_utils.host_command import CommandResult
from ansible_collections.firstlight.vllm.plugins.module_utils.host_view import Host
from ansible_collections.firstlight.vllm.plugins.module_utils.processes import Listener, Process
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import Systemd

DOCKER_ID = "d0" * 32


def free_port() -> int:
    """A TCP port that nobody holds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process(
    pid: int,
    *cmdline: str,
    ppid: int = 1,
    session: int = 0,
    uid: int = 1000,
    cgroup: str = "/user.slice/user-1000.slice/session-3.scope",
    name: str = "",
) -> Process:
    """A process; its session is its own unless told."""
    return Process(
        pid=pid,
        ppid=ppid,
        session=session or pid,
        start_time_s=1.0,
        cmdline=cmdline,
        uid=uid,
        cgroup=cgroup,
        name=(name or (Path(cmdline[0]).name if cmdline else ""))[:15],
        start_ticks=pid,
    )


INIT = process(1, "/sbin/init", ppid=0, uid=0, cgroup="/init.scope", name="systemd")


def launcher(pid: int = 100, port: int = 30000, **more: object) -> Process:
    """SGLang's first process."""
    return process(pid, "/opt/sglang/bin/python", "-m", "sglang.launch_server", "--port", str(port), **more)  # type: ignore[arg-type]


def gpu(index: int = 0, **changes: Any) -> Gpu:
    """One of the reference deployment's GPUs."""
    values: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H200",
        "memory_total_mib": 143771,
        "memory_used_mib": 0,
        "driver_version": "580.95.05",
        "compute_capability": "9.0",
    }
    return Gpu(**{**values, **changes})


@dataclass
class FakeRunner:
    """Answers commands from a table of functions, by the first words; remembers all that was run."""

    answers: dict[str, Callable[[list[str]], CommandResult | str]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], timeout_s: float) -> CommandResult:
        text = " ".join(argv)
        self.ran.append(text)
        for prefix in sorted(self.answers, key=len, reverse=True):
            if text.startswith(prefix):
                answer = self.answers[prefix](list(argv))
                return CommandResult(0, answer, "") if isinstance(answer, str) else answer
        return CommandResult(0, "", "")


@dataclass
class FakeUnits:
    """A service manager of a few units, spoken to through `systemctl`."""

    units: dict[str, dict[str, str]] = field(default_factory=dict)
    on_stop: Callable[[str], None] = lambda unit: None
    on_start: Callable[[str], None] = lambda unit: None
    runner: FakeRunner = field(default_factory=FakeRunner)

    def __post_init__(self) -> None:
        self.runner.answers.update(
            {
                "systemctl show": self._show,
                "systemctl start": self._start,
                "systemctl restart": self._start,
                "systemctl stop": self._stop,
                "systemctl enable": lambda argv: self._set(argv[-1], UnitFileState="enabled"),
                "systemctl disable": lambda argv: self._set(argv[-1], UnitFileState="disabled"),
            }
        )

    def add(self, unit: str, **properties: str) -> None:
        base = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled"}
        base["ControlGroup"] = f"/system.slice/{unit}"
        self.units[unit] = {"Id": unit, **base, **properties}

    @property
    def systemd(self) -> Systemd:
        return Systemd(self.runner)

    def did(self, verb: str) -> list[str]:
        """Units that a verb was used on, in order."""
        return [text.split()[-1] for text in self.runner.ran if text.startswith(f"systemctl {verb}")]

    def _show(self, argv: list[str]) -> str:
        names = argv[argv.index("--") + 1 :]
        blocks = []
        for name in names:
            chosen = self.units.values() if "*" in name else [self._unit(name)]
            blocks += ["\n".join(f"{key}={value}" for key, value in unit.items()) for unit in chosen]
        return "\n\n".join(blocks) + "\n"

    def _unit(self, name: str) -> dict[str, str]:
        missing = {"Id": name, "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead"}
        return self.units.get(name, missing)

    def _set(self, unit: str, **properties: str) -> str:
        self.units.setdefault(unit, {"Id": unit, "LoadState": "loaded", "ActiveState": "inactive"}).update(properties)
        return ""

    def _start(self, argv: list[str]) -> CommandResult | str:
        unit = argv[-1]
        if unit not in self.units:
            return CommandResult(5, "", f"Failed to start {unit}: Unit {unit} not found.")
        self._set(unit, ActiveState="active", SubState="running")
        self.on_start(unit)
        return ""

    def _stop(self, argv: list[str]) -> str:
        self._set(argv[-1], ActiveState="inactive", SubState="dead", MainPID="0")
        self.on_stop(argv[-1])
        return ""


class MadeUpHost(Host):
    """A host of made-up processes, sockets and GPUs."""

    def __init__(
        self,
        processes: Iterable[Process] = (),
        *,
        listeners: Iterable[Listener] = (),
        holders: Iterable[GpuHolder] = (),
        units: FakeUnits | None = None,
        containers: Sequence[dict[str, object]] = (),
    ) -> None:
        self.units = units or FakeUnits()
        self.engine = FakeRunner()
        self.engine.answers = {
            "docker ps": lambda argv: "\n".join(str(document["Id"]) for document in containers),
            "docker container inspect": lambda argv: json.dumps(
                [
                    document
                    for document in containers
                    if {document["Id"], str(document["Name"]).lstrip("/")} & set(argv[3:])
                ]
            ),
        }
        engines = Engines(self.engine, lambda name: "/usr/bin/docker" if name == "docker" and containers else None)
        super().__init__(self.units.systemd, engines)
        self.everyone = [INIT, *processes]
        self.sockets = list(listeners)
        self.holders = list(holders)

    def has_systemd(self) -> bool:
        return True

    def processes(self) -> list[Process]:
        return list(self.everyone)

    def listeners(self, port: int) -> list[Listener]:
        return [socket for socket in self.sockets if socket.port == port]

    def gpus(self) -> list[Gpu]:
        uuids = sorted({holder.gpu_uuid for holder in self.holders})
        return [gpu(at, uuid=uuid) for at, uuid in enumerate(uuids)]

    def gpu_holders(self) -> list[GpuHolder]:
        return list(self.holders)


def container(name: str = "sglang", *, ports: dict[str, object] | None = None, **host: object) -> dict[str, object]:
    """A container as `docker container inspect` describes it."""
    return {
        "Id": DOCKER_ID,
        "Name": f"/{name}",
        "Image": "sha256:1",
        "State": {"Running": True},
        "HostConfig": {
            "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
            "PortBindings": ports if ports is not None else {"30000/tcp": [{"HostIp": "", "HostPort": "30000"}]},
            **host,
        },
        "Config": {"Image": "lmsysorg/sglang:latest", "Labels": {}},
    }
