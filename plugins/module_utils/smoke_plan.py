"""What a smoke test asks, and what it demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import acceptance
from .acceptance import Evidence
from .errors import FirstlightError
from .prompts import Prompt
from .sandbox_process import Limits


@dataclass(frozen=True)
class Plan:
    """What to ask and what to demand.

    Attributes:
        model: served model name.
        prompts: the tasks; the first one's answer is the report's.
        samples: requests for each prompt, one after the other.
        bursts: numbers of requests sent at once, one burst after the other; empty for no load.
        max_tokens: where an answer is cut, in tokens; at most half of what the server takes is asked for.
        temperature: 0 is greedy.
        extra: further fields of each request.
        speculation: whether the server is meant to speculate, so that the gate applies.
        min_length: mean acceptance length below which the test fails, in tokens.
        warn_length: below which it warns, in tokens.
        evidence: what is known about the deployment, for the causes of a low length.
        limits: of running the code.
        request_timeout_s: wall clock of one request.
        first_burst_timeout_s: the same in the first burst, where kernels may still be compiled.
    """

    model: str
    prompts: Sequence[Prompt]
    samples: int = 3
    bursts: Sequence[int] = ()
    max_tokens: int = 1024
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    speculation: bool = True
    min_length: float = acceptance.MIN_LENGTH
    warn_length: float = acceptance.WARN_LENGTH
    evidence: Evidence = field(default_factory=Evidence)
    limits: Limits = field(default_factory=Limits)
    request_timeout_s: float = 120.0
    first_burst_timeout_s: float = 600.0


def default_bursts(max_num_seqs: int) -> tuple[int, ...]:
    """As many requests at once as the server runs, twice, then half as many: the sizes at which engines broke."""
    return (max_num_seqs, max_num_seqs, max(1, max_num_seqs // 2))


def validate(plan: Plan) -> None:
    """Refuse numbers with which the test would prove nothing or never end.

    Raises:
        FirstlightError: one is out of range (kind ``smoke-option-invalid``).
    """
    limits = plan.limits
    for name, value, low, high in (
        ("samples", plan.samples, 1, 100),
        *(("bursts", size, 1, 1024) for size in plan.bursts),
        ("max_tokens", plan.max_tokens, 1, 1_000_000),
        ("temperature", plan.temperature, 0, 2),
        ("min_acceptance_length", plan.min_length, 1, 1000),
        ("warn_acceptance_length", plan.warn_length, plan.min_length, 1000),
        ("request_timeout_s", plan.request_timeout_s, 1, 86_400),
        ("first_request_timeout_s", plan.first_burst_timeout_s, 1, 86_400),
        ("code_cpu_s", limits.cpu_s, 1, 300),
        ("code_wall_s", limits.wall_s, 1, 600),
        ("code_memory_mib", limits.memory_mib, 16, 16_384),
    ):
        if not low <= value <= high:  # false for NaN as well
            raise FirstlightError(
                f"{value} is out of range.",
                where=name,
                fix=f"set a number from {low:g} to {high:g}.",
                kind="smoke-option-invalid",
            )
