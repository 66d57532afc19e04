"""Containers of docker and podman: telling that a process lives in one, and stopping it through its engine.

Killing a container's processes from outside would have the engine start them again, or call the container failed;
so a container is only ever stopped and started by the engine that made it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
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

    ``auto_remove`` means that stopping deletes it (``--rm``). ``unit`` is the systemd unit that podman was told
    runs it. ``pid`` is that of its first process on the host, 0 when it is stopped.
    """

    engine: str
    id: str
    name: str
    image: str
    running: bool
    pid: int
    restart_policy: str
    auto_remove: bool
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
        answer = self._run([engine, "container", "inspect", container_id], _QUERY_TIMEOUT_S)
        if answer.status != 0:
            return None
        return parse_inspect(engine, answer.stdout)

    def publishing(self, port: int) -> list[Container]:
        """Tell the running containers that publish a TCP port of the host."""
        found = []
        for engine in self.installed():
            argv = [engine, "ps", "--quiet", "--no-trunc", "--filter", f"publish={port}"]
            answer = self._run(argv, _QUERY_TIMEOUT_S)
            if (
                answer.status != 0
            ):  # the client is installed, its daemon does not run: then it runs no containers
                continue
            described = (
                self.inspect(engine, line.strip()) for line in answer.stdout.splitlines() if line.strip()
            )
            found += [container for container in described if container is not None]
        return found

    def stop(self, container: Container, timeout_s: float) -> None:
        """Stop a container: SIGTERM, and SIGKILL after ``timeout_s`` seconds, by its engine.

        Raises:
            FirstlightError: the engine failed.
        """
        argv = [container.engine, "stop", "--time", str(max(1, round(timeout_s))), container.id]
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


def parse_inspect(engine: str, text: str) -> Container | None:
    """Read ``docker container inspect`` or ``podman container inspect``."""
    documents = json.loads(text)
    if not documents:
        return None
    found: dict[str, Any] = documents[0]
    state, host = found.get("State") or {}, found.get("HostConfig") or {}
    labels = (found.get("Config") or {}).get("Labels") or {}
    policy = host.get("RestartPolicy") or {}
    name = str(policy.get("Name") or "no")
    if name == "on-failure" and policy.get("MaximumRetryCount"):
        name = f"on-failure:{policy['MaximumRetryCount']}"
    return Container(
        engine=engine,
        id=str(found["Id"]),
        name=str(found.get("Name", "")).lstrip("/"),
        image=str(
            found.get("ImageName") or (found.get("Config") or {}).get("Image") or found.get("Image", "")
        ),
        running=bool(state.get("Running", False)),
        pid=int(state.get("Pid") or 0),
        restart_policy=name,
        auto_remove=bool(host.get("AutoRemove", False)),
        unit=str(labels.get("PODMAN_SYSTEMD_UNIT", "")),
    )
