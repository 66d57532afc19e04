"""Containers of docker and podman: telling that a process lives in one, and stopping it through its engine.

Killing a container's processes from outside would have the engine start them again, or call it failed; so a
container is only ever stopped and started by the engine that made it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FirstlightError
from .host_command import CommandResult, Runner, run_command

ENGINES = ("docker", "podman")
_QUERY_TIMEOUT_S = 30.0
_IN_CGROUP = re.compile(
    r"/(?P<engine>docker|libpod|crio|cri-containerd|containerd)(?:[-/])(?P<id>[0-9a-f]{64})(?:\.scope)?(?:/|$)"
)
_KUBERNETES = re.compile(r"/kubepods[^/]*/.*?(?P<id>[0-9a-f]{64})")
# programs that hold a container's published port on the host for it
PORT_PROXIES = frozenset({"docker-proxy", "conmon", "rootlessport", "rootlesskit", "slirp4netns", "pasta"})


@dataclass(frozen=True)
class ContainerRef:
    """The container that a control group belongs to. ``engine`` is empty for an orchestrator's."""

    engine: str
    id: str


@dataclass(frozen=True)
class Container:
    """One container as its engine describes it.

    ``auto_remove`` means that stopping deletes it (``--rm``). ``ports`` are the TCP ports of the host that it
    publishes. ``unit`` is the systemd unit that podman was told runs it.
    """

    engine: str
    id: str
    name: str
    image: str
    running: bool
    restart_policy: str
    auto_remove: bool
    ports: tuple[int, ...] = ()
    unit: str = ""


def container_of(cgroup: str) -> ContainerRef | None:
    """Tell which container a control group's path belongs to, if any."""
    kubernetes = _KUBERNETES.search(cgroup)
    if kubernetes:
        return ContainerRef("", kubernetes["id"])
    found = _IN_CGROUP.search(cgroup)
    if not found:
        return None
    engine = {"docker": "docker", "libpod": "podman"}.get(found["engine"], "")
    return ContainerRef(engine, found["id"])


class Engines:
    """The container engines of this host.

    Args:
        run: how to run a program; tests hand in a recorded one.
        which: how to find a program on PATH.
    """

    def __init__(self, run: Runner = run_command, which: Callable[[str], str | None] = shutil.which) -> None:
        self._run = run
        self._which = which

    def installed(self) -> list[str]:
        """Names of the engines whose program is on PATH."""
        return [engine for engine in ENGINES if self._which(engine)]

    def inspect(self, engine: str, container_id: str) -> Container | None:
        """Describe a container; None when the engine does not know it (another user's, for instance)."""
        if engine not in self.installed():
            return None
        described = self._describe(engine, [container_id])
        return described[0] if described else None

    def running(self) -> list[Container]:
        """All running containers of all engines."""
        found = []
        for engine in self.installed():
            answer = self._run([engine, "ps", "--quiet", "--no-trunc"], _QUERY_TIMEOUT_S)
            # a client whose daemon does not run: then nothing runs in its containers either
            ids = answer.stdout.split() if answer.status == 0 else []
            found += self._describe(engine, ids) if ids else []
        return found

    def publishing(self, port: int) -> list[Container]:
        """Tell the running containers that publish a TCP port of the host."""
        return [container for container in self.running() if port in container.ports]

    def stop(self, container: Container, timeout_s: float) -> None:
        """Stop a container: SIGTERM, and SIGKILL after ``timeout_s`` seconds, by its engine.

        Raises:
            FirstlightError: the engine failed.
        """
        argv = [container.engine, "stop", "-t", str(max(1, round(timeout_s))), container.id]
        self._require(argv, timeout_s + 60.0, container.name)

    def start(self, engine: str, name: str) -> None:
        """Start a stopped container; nothing happens when it runs.

        Raises:
            FirstlightError: the engine failed, or there is no such container any more.
        """
        self._require([engine, "start", name], 120.0, name)

    def set_restart_policy(self, engine: str, name: str, policy: str) -> None:
        """Have the engine start the container by itself (``always``), or not (``no``).

        Raises:
            FirstlightError: the engine failed; podman before 5 cannot.
        """
        self._require([engine, "update", f"--restart={policy}", name], _QUERY_TIMEOUT_S, name)

    def _describe(self, engine: str, ids: list[str]) -> list[Container]:
        answer = self._run([engine, "container", "inspect", *ids], _QUERY_TIMEOUT_S)
        # one of several that has just vanished makes the status 1; the others are still described
        return parse_inspect(engine, answer.stdout or "[]")

    def _require(self, argv: list[str], timeout_s: float, name: str) -> CommandResult:
        answer = self._run(argv, timeout_s)
        if answer.status != 0:
            raise FirstlightError(
                f"`{' '.join(argv)}` failed: {answer.complaint}",
                where=f"{argv[0]} container {name}",
                fix=f"Run `{' '.join(argv)}` on the host and mend what it complains about.",
                kind="container-engine-failed",
            )
        return answer


def parse_inspect(engine: str, text: str) -> list[Container]:
    """Read ``docker container inspect`` or ``podman container inspect``."""
    return [_container(engine, document) for document in json.loads(text)]


def _container(engine: str, document: Mapping[str, Any]) -> Container:
    state, host, config = (document.get(part) or {} for part in ("State", "HostConfig", "Config"))
    policy = host.get("RestartPolicy") or {}
    policy_name = str(policy.get("Name") or "no")
    if policy_name == "on-failure" and policy.get("MaximumRetryCount"):
        policy_name = f"on-failure:{policy['MaximumRetryCount']}"
    return Container(
        engine=engine,
        id=str(document["Id"]),
        name=str(document.get("Name", "")).lstrip("/"),
        image=str(document.get("ImageName") or config.get("Image") or document.get("Image", "")),
        running=bool(state.get("Running", False)),
        restart_policy=policy_name,
        auto_remove=bool(host.get("AutoRemove", False)),
        ports=_published(host.get("PortBindings") or {}),
        unit=str((config.get("Labels") or {}).get("PODMAN_SYSTEMD_UNIT", "")),
    )


def _published(bindings: Mapping[str, Any]) -> tuple[int, ...]:
    ports = [
        int(binding["HostPort"])
        for inside, bound in bindings.items()
        for binding in bound or ()
        if inside.endswith("/tcp") and str(binding.get("HostPort", "")).isdecimal()
    ]
    return tuple(sorted(set(ports)))
