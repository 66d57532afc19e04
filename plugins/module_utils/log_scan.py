"""One pass over a log: finds the starts of the server in it, and in each the lines that say something.

Built for big and hostile input: a line is looked at only when it holds one of the catalogue's words, patterns see
a bounded part of it, and what is kept does not grow with the log.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice
from typing import TypeVar

from .failure_catalogue import KINDS
from .failure_kinds import REACH, Kind, Matcher
from .log_lines import LOUD, QUIET, SOFT, WINDOW, clean, split_level

_BLOCK = 4000
_MOST_PER_WORD = 100
_KEPT = 400
_KEPT_OF_KIND = 40
_MOST_STARTS = 200
_KEPT_SIGNS = ("exception", "metrics", "taps", "unit", "banner")
_HEAD = 120

# What a line says about the course of a start, apart from any failure: name, words, pattern.
_SIGNS: tuple[tuple[str, str, str], ...] = (
    ("unit", "]: started ", r"systemd\[\d+\]: Started "),
    ("unit", "]: starting ", r"systemd\[\d+\]: Starting "),
    ("banner", "█  version ", ""),
    ("banner", "vllm api server version", ""),
    ("ready", "application startup complete", ""),
    ("ready", "uvicorn running on", ""),
    ("alive", 'http/1.1" 200', ""),
    ("alive", "avg prompt throughput", ""),
    ("shutdown", "shutdown initiated", ""),
    ("shutdown", "shutting down", r"INFO:\s+Shutting down"),
    ("shutdown", "sigterm", r"received (?:signal )?SIGTERM|SIGTERM received"),
    ("shutdown", "stopping ", r"systemd\[\d+\]: Stopping |^Stopping \S+\.service"),
    ("shutdown", "shutting down fastapi http server", ""),
    ("opened", "starting vllm ", r"Starting vLLM (?:API )?server"),
    ("dead", "enginedeaderror", ""),
    ("dead", "encountered a fatal error", ""),
    ("dead", "engine loop has died", ""),
    ("dead", "died unexpectedly", ""),
    ("dead", "already dead, terminating", ""),
    ("dead", "enginecore failed to start", ""),
    ("dead", "engine core initialization failed", ""),
    ("dead", "workerproc failed to start", ""),
    ("dead", "workerproc initialization failed", ""),
    ("dead", "main process exited", r"code=exited, status=(?!0)|code=killed, status=(?!15)|code=dumped"),
    ("dead", "failed with result", ""),
    ("dead", "deactivated successfully", ""),  # an ordered stop says so before; else it ended of itself
    ("dead", "terminate called", ""),
    ("dead", "segfault encountered", ""),
    ("dead", "segmentation fault", ""),
    ("dead", "fatal python error", ""),
    ("refuses", "500 internal server error", ""),
    ("trouble", "traceback (most recent call last)", ""),
    ("trouble", 'file "', r'^File "[^"]+", line \d+'),
    ("trouble", "error", r"^\S*ERROR|: error: "),
    ("trouble", "workerproc hit an exception", ""),
    ("exception", "error:", r"^[\w.]{1,160}Error: "),
    ("exception", "exception:", r"^[\w.]{0,160}Exception: "),
    ("exception", "assertionerror", r"^AssertionError\b"),
    ("metrics", "specdecoding metrics", ""),
    ("taps", "using auxiliary layers from", ""),
    ("variable", "getenv(", ""),
    ("variable", "environ[", ""),
    ("arguments", "non-default args:", ""),
    ("chunked", "enabled with max_num_batched_tokens=", ""),
)
_CASE = re.IGNORECASE


@dataclass(frozen=True)
class Seen:
    """A line of the log: its number, counted from 1, and what it says; of a very long one only parts."""

    number: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A line that points to a kind of failure.

    Attributes:
        number: the line's number, counted from 1.
        text: the line, cleaned; of a very long one only the parts that matter.
        kind: what it points to.
        hint: it decides only when nothing stronger was found.
        soft: it was logged as a warning.
        absent: words that must not occur in the same start.
        before: the line before it, which in a validation error names the field.
    """

    number: int
    text: str
    kind: Kind
    hint: bool
    soft: bool
    absent: tuple[str, ...] = ()
    before: str = ""


@dataclass
class Start:
    """What the log holds of one start of the server.

    Attributes:
        hits_of: for each kind, lines that point to it.
        first: for each sign, the first line that shows it.
        last: for each sign, the last line that shows it.
        kept: for some signs all lines, but of very many only the first and the last.
        words: words asked for by matchers' ``absent`` and ``after``, with the number of their first line.
        lines: how many lines belong to this start.
    """

    hits_of: dict[str, list[Hit]] = field(default_factory=dict)
    first: dict[str, Seen] = field(default_factory=dict)
    last: dict[str, Seen] = field(default_factory=dict)
    kept: dict[str, list[Seen]] = field(default_factory=dict)
    words: dict[str, int] = field(default_factory=dict)
    lines: int = 0

    @property
    def hits(self) -> list[Hit]:
        """Lines that point to kinds of failure, in order; of very many for one kind the first and the last."""
        return sorted((hit for hits in self.hits_of.values() for hit in hits), key=lambda hit: hit.number)

    def at(self, sign: str) -> int | None:
        """Number of the first line that shows a sign."""
        return self.first[sign].number if sign in self.first else None


def scan(lines: Iterable[str]) -> list[Start]:
    """Read a log once; the starts it tells of, in order, at least one."""
    starts = [Start()]
    number = 0
    for before, block, after in _blocks(lines):
        for index, words in _worth_reading(block):
            _read(starts, number + index + 1, block[index], words, _Window(before, block, after, index))
        number += len(block)
        starts[-1].lines = number
    return starts


def _blocks(lines: Iterable[str]) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Blocks of cleaned lines, each with some lines before and after it."""
    source = map(clean, lines)
    before: list[str] = []
    block = list(islice(source, _BLOCK))
    while block:
        following = list(islice(source, _BLOCK))
        yield before, block, following[:REACH]
        before, block = block[-REACH:], following


@dataclass(frozen=True)
class _Window:
    before: list[str]
    block: list[str]
    after: list[str]
    index: int

    def previous(self) -> str:
        """The line before."""
        if self.index:
            return self.block[self.index - 1][:WINDOW]
        return self.before[-1][:WINDOW] if self.before else ""

    def shows(self, pattern: str) -> bool:
        """Whether a line close by matches."""
        low, high = self.index - REACH, self.index + REACH + 1
        around = self.block[max(low, 0) : high]
        if low < 0:
            around = self.before[low:] + around
        if high > len(self.block):
            around = around + self.after[: high - len(self.block)]
        search = _pattern(pattern).search
        return any(search(line[:WINDOW]) for line in around)


def _worth_reading(block: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines that hold a word which can matter in them: their indices, in order, and the words of each."""
    quiet, loud = [], []
    for index, line in enumerate(block):
        head = line[:_HEAD]
        if " INFO " in head or "INFO:  " in head or "it/s]" in line:
            quiet.append(index)
        elif not line.endswith("^"):  # the marks below a traceback's source lines
            loud.append(index)
    yield from sorted([*_holding(block, quiet, _QUIET_WORDS), *_holding(block, loud, _WORDS)])


def _holding(block: list[str], indices: list[int], words: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Those of some lines that hold one of the words; not all where one word is in very many."""
    lowered = [block[index].lower() for index in indices]
    text = "\n".join(lowered)
    present = [word for word in words if word in text]
    if not present:
        return
    begins = [0, *accumulate(len(line) + 1 for line in lowered)]
    found: set[int] = set()
    for word in present:
        at = text.find(word)
        budget = _ENOUGH.get(word, _MOST_PER_WORD)
        while at >= 0 and budget:
            place = bisect_right(begins, at) - 1
            found.add(place)
            budget -= 1
            at = text.find(word, begins[place + 1])
        if at >= 0:  # the last one counts as well: it tells that a server still lives
            found.add(bisect_right(begins, text.rfind(word)) - 1)
    for place in found:
        yield indices[place], [word for word in present if word in lowered[place]]


def _read(starts: list[Start], number: int, line: str, words: list[str], window: _Window) -> None:
    near = _view(line, words)
    loudness, body = split_level(near)
    signs = {name for name, word, pattern in _SIGNS if word in words and _says(pattern, near, body)}
    if loudness != LOUD:
        signs -= {"exception", "trouble"}
    begun = signs & {"unit", "banner"}
    if any(name in starts[-1].first for name in begun):
        starts.append(Start())
        del starts[:-_MOST_STARTS]
    start = starts[-1]
    seen = Seen(number, near)
    for name in signs:
        start.first.setdefault(name, seen)
        start.last[name] = seen
        if name in _KEPT_SIGNS:
            _keep(start.kept.setdefault(name, []), seen, _KEPT)
    for word in words:
        if word in _REMEMBERED:
            start.words.setdefault(word, number)
        for kind, matcher in _MATCHERS.get(word, ()):
            if loudness == QUIET and not matcher.any_level:
                continue
            if matcher.after and not any(start.words.get(other, number) < number for other in matcher.after):
                continue
            if _matches(matcher, body, window):
                soft = loudness == SOFT and not matcher.any_level
                hit = Hit(number, near, kind, matcher.hint, soft, matcher.absent, window.previous())
                _keep(start.hits_of.setdefault(kind.id, []), hit, _KEPT_OF_KIND)


_T = TypeVar("_T")


def _keep(kept: list[_T], entry: _T, most: int) -> None:
    """Append; beyond a bound drop from the middle, since the first and the last tell most."""
    kept.append(entry)
    if len(kept) > most:
        del kept[most // 2]


def _view(line: str, words: list[str]) -> str:
    """A line short enough for patterns: its head, or for a very long one the head and what surrounds the words."""
    if len(line) <= WINDOW:
        return line
    lowered = line.lower()
    parts = [line[: WINDOW // 4]]
    for word in words[:8]:
        at = lowered.find(word)
        if at >= WINDOW // 4:
            parts.append(line[max(at - 200, 0) : at + 800])
    return " ".join(parts)


def _says(pattern: str, line: str, body: str) -> bool:
    if not pattern:
        return True
    return bool(_pattern(pattern).search(body if pattern.startswith("^") else line))


def _matches(matcher: Matcher, body: str, window: _Window) -> bool:
    if matcher.pattern and not _pattern(matcher.pattern).search(body):
        return False
    if matcher.never and _pattern(matcher.never).search(body):
        return False
    if matcher.apart and window.shows(matcher.apart):
        return False
    return not matcher.near or window.shows(matcher.near)


@cache
def _pattern(source: str) -> re.Pattern[str]:
    return re.compile(source, _CASE)


_MATCHERS: dict[str, list[tuple[Kind, Matcher]]] = {}
for _kind in KINDS:
    for _matcher in _kind.matchers:
        _MATCHERS.setdefault(_matcher.text, []).append((_kind, _matcher))
_REMEMBERED = frozenset(
    word for kind in KINDS for matcher in kind.matchers for word in (*matcher.absent, *matcher.after)
)
_SIGN_WORDS = frozenset(word for _, word, _ in _SIGNS)
_WORDS = tuple(sorted({*_MATCHERS, *_REMEMBERED, *_SIGN_WORDS}))
# in a line of information only these can matter
_TALKING = frozenset(word for word, found in _MATCHERS.items() if any(matcher.any_level for _, matcher in found))
_QUIET_WORDS = tuple(sorted({*_TALKING, *_REMEMBERED, *_SIGN_WORDS}))
# of signs that only tell that, not what, the first few lines and the last one will do
_ENOUGH = dict.fromkeys(_SIGN_WORDS - {*_MATCHERS, *(word for name, word, _ in _SIGNS if name in _KEPT_SIGNS)}, 3)
