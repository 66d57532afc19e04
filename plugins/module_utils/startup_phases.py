"""How the start of a server went: its milestones, told from the lines of its log.

The log of vLLM names what it has done, seldom what it begins. So each phase ends at a milestone, and what has no
milestone of its own (a CPU build has no graphs, ``enforce-eager`` compiles nothing) goes to the next one that is
there. Several workers write at once and out of order: milestones that every worker writes are taken from one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .speculation_log import taps

_WORKER = re.compile(r"\(((?:Worker|VllmWorker|EngineCore)[^()]{0,60})\)")
_COMPILED = re.compile(r"torch\.compile (?:took|takes)\b")
_CACHED = re.compile(r"Directly load (?:AOT compilation from path|the compiled graph)")
_KV_MEMORY = (
    re.compile(r"Available KV cache memory: (-?[\d.]+) GiB"),
    re.compile(r"reserved ([\d.]+) GiB memory for KV Cache"),
    re.compile(r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache"),
)


@dataclass(frozen=True)
class Phase:
    """One part of a start.

    Attributes:
        name: what the server did, such as ``load weights``.
        seconds: how long it took by the wall clock.
    """

    name: str
    seconds: float

    def as_dict(self) -> dict[str, str | float]:
        """The same, for module results."""
        return {"name": self.name, "seconds": round(self.seconds, 3)}


@dataclass(frozen=True)
class _Milestone:
    """The end of a phase: the ``nth`` line of one worker that matches."""

    phase: str
    pattern: re.Pattern[str]
    nth: int = 0


_DRAFTER = r"Loading drafter model"
_LOADED = r"Model loading took|Warming up model for the compilation"
_MILESTONES = (
    _Milestone("imports", re.compile(r"█  version |vLLM API server version")),
    _Milestone("arguments", re.compile(r"Initializing an? (?:V1 )?LLM engine")),
    _Milestone("engine", re.compile(r"Starting to load model|Loading model from scratch")),
    _Milestone("load weights", re.compile(rf"{_DRAFTER}|{_LOADED}")),
    _Milestone("load drafter", re.compile(_LOADED)),
    _Milestone("compile target", _COMPILED),
    _Milestone("profile", re.compile(r"Initial profiling/warmup run took|Warming up done")),
    _Milestone("compile drafter", _COMPILED, nth=1),
    _Milestone("kv cache", re.compile(r"(?:GPU|CPU|TPU|XPU|HPU) KV cache size:")),
    _Milestone("graph capture", re.compile(r"Graph capturing finished")),
    _Milestone("warm up", re.compile(r"init engine \(")),
)
_LAST = "api server"
_DRAFTER_PHASES = ("load drafter", "compile drafter")


def phases(entries: Sequence[tuple[float, str]], started_s: float, ready_s: float) -> list[Phase]:
    """The phases of one start; their seconds add up to ``ready_s - started_s``.

    Args:
        entries: time (seconds since the epoch) and text of the log's lines, of this start only.
        started_s: when systemd started the process, in the same clock.
        ready_s: when the server was found to answer.

    Returns:
        At least one phase; none is negative. A milestone outside the span counts as its end.
    """
    drafting = any(_DRAFTER in text for _, text in entries)
    marks: list[tuple[str, float]] = []
    for milestone in _MILESTONES:
        at = _time_of(milestone, entries)
        if at is not None and (drafting or milestone.phase not in _DRAFTER_PHASES):
            marks.append((milestone.phase, at))
    ready_s = max(ready_s, started_s)
    ends = [started_s]
    for _, at in marks:
        ends.append(min(max(at, ends[-1]), ready_s))
    ends.append(ready_s)
    names = [name for name, _ in marks] + [_LAST]
    return [Phase(name, end - begin) for name, (begin, end) in zip(names, pairwise(ends), strict=True)]


def _time_of(milestone: _Milestone, entries: Sequence[tuple[float, str]]) -> float | None:
    """When a milestone was reached by the worker that wrote it first."""
    found = [(at, text) for at, text in entries if milestone.pattern.search(text)]
    if not found and milestone.pattern is _COMPILED:
        found = [(at, text) for at, text in entries if _CACHED.search(text)]
    if not found:
        return None
    worker = _worker(found[0][1])
    own = [at for at, text in found if _worker(text) == worker]
    return own[milestone.nth] if milestone.nth < len(own) else None


def _worker(text: str) -> str:
    found = _WORKER.search(text[:300])
    return found[1] if found else ""


_PERCENT = re.compile(r"(\d{1,3})%[^|]{0,40}\|[^|]{0,120}?\|? *(\d+)/(\d+)")
_BARS = (
    (re.compile(r"Loading (?:safetensors|pt|\w+) checkpoint shards"), "loading weights"),
    (re.compile(r"Capturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"DeepGEMM warmup"), "compiling DeepGEMM kernels"),
    (re.compile(r"(?:Fetching|Downloading) "), "downloading"),
)
_NEWS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"█  version (\S+)"), "vLLM {} reads its arguments"),
    (re.compile(r"Resolved architecture: (\w+)"), "resolved {}"),
    (re.compile(r"Initializing an? (?:V1 )?LLM engine"), "starting the engine"),
    (re.compile(r"world_size=(\d+) rank=\d+"), "connecting {} workers"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading drafter model"), "loading the drafter"),
    (re.compile(r"Model loading took ([\d.]+ Gi?B)"), "weights loaded, {} on each GPU"),
    (_CACHED, "reusing a compiled graph"),
    (re.compile(r"(?:Dynamo bytecode transform time|Cache the graph of compile range)"), "compiling"),
    (re.compile(r"torch\.compile (?:took|takes) ([\d.]+ s)"), "compiled in {}"),
    (re.compile(r"Initial profiling/warmup run took ([\d.]+ s)"), "first run took {}"),
    (re.compile(r"Warming up model for the compilation"), "warming up"),
    (re.compile(r"Available KV cache memory: ([\d.]+ GiB)"), "{} for the KV cache"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache for {} tokens"),
    (re.compile(r"Graph capturing finished"), "CUDA graphs captured"),
    (re.compile(r"init engine \(.{0,80}\) took ([\d.]+) s"), "engine ready after {} s"),
    (re.compile(r"Starting vLLM (?:API )?server"), "starting the API server"),
    (re.compile(r"Application startup complete"), "started"),
)


def progress(text: str) -> str | None:
    """What a line of the log says about how far the start has come, for people; None when it says nothing."""
    for pattern, words in _BARS:
        if pattern.search(text):
            steps = _PERCENT.findall(text[-2000:]) or _PERCENT.findall(text[:2000])
            return f"{words}: {steps[-1][0]}% ({steps[-1][1]}/{steps[-1][2]})" if steps else words
    for pattern, words in _NEWS:
        found = pattern.search(text)
        if found:
            return words.format(*found.groups())
    return None


def auxiliary_layers(lines: Iterable[str]) -> tuple[int, ...] | None:
    """The target's layers that the drafter taps, as this start logged them (in vLLM's count: 0-based id plus one)."""
    return next((layers for layers in map(taps, lines) if layers is not None), None)


def compile_cache_reused(lines: Iterable[str]) -> bool:
    """Whether this start loaded a compiled graph from disk instead of compiling it."""
    return any(_CACHED.search(line) for line in lines)


def available_kv_gib(lines: Iterable[str]) -> float | None:
    """GiB on each GPU for the KV cache, of the worker that has least; None when the log does not say."""
    found: list[float] = []
    for line in lines:
        for pattern in _KV_MEMORY:
            match = pattern.search(line)
            if match:
                found.append(float(match[1]))
    return min(found, default=None)
