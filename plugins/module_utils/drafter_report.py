"""What the inspection of a drafter returns: family, configuration, where each value is from, faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .canonical_json import digest
from .errors import FirstlightError

Severity = Literal["error", "warning"]
Source = Literal["header", "target", "formula", "table", "default", "user"]


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        id: its kind, one of those in docs/drafters.md.
        severity: an ``error`` makes the drafter unusable; a ``warning`` does not.
        field: the configuration field, tensor or file concerned; may be empty.
        message: what is wrong and what comes of it.
        fix: what to do, in the imperative.
    """

    id: str
    severity: Severity
    field: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        """The same, for JSON."""
        return {
            "id": self.id,
            "severity": self.severity,
            "field": self.field,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Field:
    """One value of the configuration, where it is from, and what is to be known about it."""

    value: Any
    source: Source
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same, for JSON."""
        return {"value": self.value, "from": self.source, "note": self.note}


@dataclass(frozen=True)
class DrafterReport:
    """The result of an inspection.

    Attributes:
        family: by tensor names: ``dflash``, ``dflash2``, ``dspark``, ``speculators``, ``laguna`` or
            ``quantised``; None when the weights are none of these or could not be read.
        config: the config.json for vLLM; incomplete when there are errors.
        fields: where each value of ``config`` is from.
        problems: errors first.
        facts: numbers for other checks: ``num_hidden_layers``, ``num_attention_heads``,
            ``num_key_value_heads``, ``head_dim``, ``hidden_size``, ``num_taps``, ``weight_bytes``,
            ``row`` (the matched row of the family table), ``method`` (for vLLM's speculative config) and
            ``num_speculative_tokens`` (the most that the block size allows).
    """

    family: str | None
    config: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Field] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[Problem]:
        """The problems that make the drafter unusable."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def usable(self) -> bool:
        """Whether vLLM can serve with this drafter and this configuration."""
        return not self.errors

    @property
    def config_digest(self) -> str:
        """The sha256 of the configuration's canonical JSON, in hexadecimal; part of the cache's key."""
        return digest(self.config)

    def as_dict(self) -> dict[str, Any]:
        """The report as ``firstlight inspect --json`` prints it."""
        return {
            "family": self.family,
            "config": self.config,
            "fields": {name: value.as_dict() for name, value in self.fields.items()},
            "problems": [problem.as_dict() for problem in self.problems],
        }


def problem_of(error: FirstlightError) -> Problem:
    """A fault that stopped the inspection, as a problem."""
    message = " ".join(part for part in (f"{error.where}: {error.what}", error.why) if part)
    return Problem(error.kind, "error", error.where, message, error.fix)


def report_of(error: FirstlightError) -> DrafterReport:
    """The report of an inspection that could not go on."""
    return DrafterReport(None, problems=(problem_of(error),))


def sorted_problems(problems: list[Problem]) -> tuple[Problem, ...]:
    """Errors before warnings, each in the order found."""
    return tuple(sorted(problems, key=lambda problem: problem.severity != "error"))
