"""Prometheus text as vLLM exposes it at ``/metrics``, and the counters of speculation in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .errors import FirstlightError

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
REQUESTS = "vllm:request_success_total"
RUNNING = "vllm:num_requests_running"
START_TIME = "process_start_time_seconds"

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|\})')
_ESCAPE = re.compile(r"\\(.)")
#: a longer number of a draft position is nonsense, and would become a list of that length
_POSITION_DIGITS = 4
_UNESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


@dataclass(frozen=True)
class Sample:
    """One line: a value with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Samples:
    """All samples of one exposition, by metric name."""

    by_name: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def get(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """The samples of a metric that carry all these labels."""
        return tuple(
            sample
            for sample in self.by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum over all engines; None when the metric is not exposed."""
        found = self.get(name, **labels)
        return sum(sample.value for sample in found) if found else None


@dataclass(frozen=True)
class SpeculationCounters:
    """vLLM's counters since its process started, summed over the engines.

    Attributes:
        drafts: times that the drafter was asked.
        drafted: tokens that it proposed (k for each draft).
        accepted: proposed tokens that the target confirmed.
        per_position: accepted tokens by position in the draft, position 0 first.
    """

    drafts: int
    drafted: int
    accepted: int
    per_position: tuple[int, ...]


def parse(text: str) -> Samples:
    """Read Prometheus text.

    Args:
        text: the exposition format, version 0.0.4; comments and blank lines are skipped.

    Raises:
        FirstlightError: a line is no sample (kind ``metrics-malformed``).
    """
    by_name: dict[str, list[Sample]] = {}
    # not splitlines(): a label's value may hold any other line separator
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        parsed = _parse_line(stripped)
        if parsed is None:
            raise FirstlightError(
                f"line {number} is no Prometheus sample: {stripped[:120]!r}.",
                where="/metrics",
                fix="check that a vLLM server answers there and no other program.",
                kind="metrics-malformed",
            )
        by_name.setdefault(parsed[0], []).append(parsed[1])
    return Samples({name: tuple(samples) for name, samples in by_name.items()})


def _parse_line(line: str) -> tuple[str, Sample] | None:
    match = _NAME.match(line)
    if match is None:
        return None
    name, position = match.group(), match.end()
    labels: dict[str, str] = {}
    if line[position : position + 1] == "{":
        end = _read_labels(line, position + 1, labels)
        if end is None:
            return None
        position = end
    fields = line[position:].split()
    if len(fields) not in (1, 2):  # value, and perhaps a time stamp
        return None
    try:
        return name, Sample(labels, float(fields[0]))
    except ValueError:
        return None


def _read_labels(line: str, position: int, labels: dict[str, str]) -> int | None:
    """Fill ``labels`` from the text behind ``{``; returns where the value starts."""
    rest = line[position:].lstrip()
    if rest.startswith("}"):
        return len(line) - len(rest) + 1
    while True:
        match = _LABEL.match(line, position)
        if match is None:
            return None
        labels[match.group(1)] = _ESCAPE.sub(lambda found: _UNESCAPED.get(found[1], found[0]), match.group(2))
        position = match.end()
        if match.group(3) == "}":
            return position
        if line[position:].lstrip().startswith("}"):  # a trailing comma is legal
            return line.index("}", position) + 1


def speculation(samples: Samples, model_name: str | None = None) -> SpeculationCounters | None:
    """The counters of speculation; None when the server exposes none (speculation is not configured).

    Args:
        samples: a parsed exposition.
        model_name: the label to select, for a server with several names; None sums all.

    Raises:
        FirstlightError: a counter is no whole number of at least 0 (kind ``metrics-malformed``).
    """
    labels = {} if model_name is None else {"model_name": model_name}
    drafts, drafted, accepted = (samples.total(name, **labels) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafts is None or drafted is None or accepted is None:
        return None
    return SpeculationCounters(
        drafts=_count(DRAFTS, drafts),
        drafted=_count(DRAFTED, drafted),
        accepted=_count(ACCEPTED, accepted),
        per_position=tuple(_positions(samples, labels)),
    )


def _positions(samples: Samples, labels: dict[str, str]) -> Iterator[int]:
    counts: dict[int, float] = {}
    for sample in samples.get(ACCEPTED_PER_POSITION, **labels):
        label = sample.labels.get("position", "")
        if label.isascii() and label.isdigit() and len(label) <= _POSITION_DIGITS:
            counts[int(label)] = counts.get(int(label), 0.0) + sample.value
    for position in range(max(counts, default=-1) + 1):
        yield _count(ACCEPTED_PER_POSITION, counts.get(position, 0.0))


def _count(name: str, value: float) -> int:
    if math.isnan(value) or math.isinf(value) or value < 0 or value != int(value):
        raise FirstlightError(
            f"the counter {name} is {value}, which is no count.",
            where="/metrics",
            fix="check that a vLLM server answers there and no other program.",
            kind="metrics-malformed",
        )
    return int(value)


def requests_finished(samples: Samples) -> int | None:
    """Requests that ended well since the start, over all reasons to finish but abort and error."""
    found = samples.get(REQUESTS)
    if not found:
        return None
    good = (s.value for s in found if s.labels.get("finished_reason") not in ("abort", "error"))
    return _count(REQUESTS, sum(good))


def start_time(samples: Samples) -> float | None:
    """When the server's process started, in seconds since the epoch; None when it is not exposed."""
    return samples.total(START_TIME)
