"""The typed result of a run, as a program reads it and as `firstlight --json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

Status = Literal["successful", "failed", "unreachable", "timeout", "canceled"]


@dataclass(frozen=True)
class Acceptance:
    """How speculation did during the smoke test: differences of the server's own counters.

    Attributes:
        drafts: how many times the drafter was asked.
        drafted: draft tokens proposed.
        accepted: draft tokens that the target agreed with.
        rate: accepted / drafted; None when nothing was drafted.
        length: mean tokens per step of the target, ``1 + accepted / drafts``; None without drafts.
        per_position: accepted tokens at draft position 0, 1, …
    """

    drafts: int
    drafted: int
    accepted: int
    rate: float | None
    length: float | None
    per_position: tuple[int, ...] = ()


@dataclass(frozen=True)
class Phase:
    """A part of the server's start; the phases of one start sum to its wall clock.

    Attributes:
        name: what the server was doing, in words.
        seconds: for how long.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Failure:
    """Why a host failed.

    Attributes:
        id: short identifier for programs; ``unreachable`` and ``task-failed`` beside those of the catalogue.
        cause: what is wrong, in one sentence.
        remedy: what to do; empty when nobody knows.
        message: the failed task's whole message.
        where: the variable, file, unit or host part concerned; empty when the failure names none.
        task: the task's name.
        outcome: what the run did about it, such as bringing the former server back; or empty.
    """

    id: str
    cause: str
    remedy: str
    message: str
    where: str = ""
    task: str = ""
    outcome: str = ""


@dataclass(frozen=True)
class HostResult:
    """What became of one host.

    Attributes:
        ok: reached, and nothing failed that was not mended.
        changed: something on the host is, or in check mode would be, different.
        unreachable: the host could not be reached, at the start or in the middle.
        answer: what the model answered to the smoke test's first prompt.
        verdict: the smoke test's judgement of that answer.
        acceptance: None when the server does not speculate, or was not tested in this run.
        phases: of the server's start; empty when it was not started in this run.
        ready_s: seconds from start to ready.
        downtime_s: seconds in which neither the old nor the new server answered.
        converged: the host already was as asked for, and was left alone.
        release: identifier of the release in force.
        model: the name under which the server offers the model.
        base_url: where the server listens, as seen from the host.
        verified_at: when the smoke test last passed, ISO 8601.
        failure: None when ok.
        warnings: what the operator should know although the run went on.
        report: everything that the playbook reported, for what has no attribute here.
        state: what ``status`` found on the host, why ``preflight`` would have a run change it, what ``rollback``
            brought back, what ``prune`` removed.
    """

    ok: bool
    changed: bool = False
    unreachable: bool = False
    answer: str | None = None
    verdict: str | None = None
    acceptance: Acceptance | None = None
    phases: tuple[Phase, ...] = ()
    ready_s: float | None = None
    downtime_s: float | None = None
    converged: bool | None = None
    release: str | None = None
    model: str | None = None
    base_url: str | None = None
    verified_at: str | None = None
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    report: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, object] = field(default_factory=dict)

    @property
    def downtime_ratio(self) -> float | None:
        """Downtime over the new server's own start: 1 when nothing else cost the users time."""
        return self.downtime_s / self.ready_s if self.downtime_s is not None and self.ready_s else None

    def as_dict(self) -> dict[str, object]:
        """The same, of JSON's types only, and the ratio of the downtime."""
        return {**asdict(self), "downtime_ratio": self.downtime_ratio}


@dataclass(frozen=True)
class RunResult:
    """What became of a run.

    Attributes:
        status: how it ended; ``unreachable`` when that is all that went wrong.
        hosts: one result for each host that the playbook touched.
        seconds: wall clock.
    """

    status: Status
    hosts: Mapping[str, HostResult]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the run ended by itself and every host is ok."""
        return self.status == "successful" and all(host.ok for host in self.hosts.values())

    def as_dict(self) -> dict[str, object]:
        """The same, of JSON's types only."""
        return {
            "ok": self.ok,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "hosts": {name: host.as_dict() for name, host in self.hosts.items()},
        }
