"""What a server's log tells about speculation: acceptance over time, and the layers that the drafter taps."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .log_scan import Seen

_LENGTH = re.compile(r"Mean acceptance length: ([\d.]+)")
_ACCEPTED = re.compile(r"Accepted: (\d+) tokens")
_DRAFTED = re.compile(r"Drafted: (\d+) tokens")
_RATES = re.compile(r"Per-position acceptance rate: ((?:[\d.]+, )*[\d.]+)")
_TAPS = re.compile(r"Using auxiliary layers from [\w ]{1,40}: [\[(]([\d, ]{1,400})[\])]")

LOW_LENGTH = 1.5
"""Mean acceptance length below which a drafter of several tokens does nothing worth having."""
_ENOUGH_DRAFTS = 10
_FEW_LATER = 0.1
_NONE_LATER = 0.02
_FEWEST_TOKENS = 3


def first_low(lines: Iterable[Seen]) -> Seen | None:
    """The first line of vLLM's speculation metrics from which on a drafter is seen to do nothing.

    All lines count together, each by its number of drafts. A drafter is found inert when no token after the first is
    accepted, or when the mean acceptance length is below ``LOW_LENGTH`` and next to none after the first is. With
    fewer than three drafted tokens this cannot be told. Trailing zeros alone say nothing: a drafter that is right for
    six of fifteen tokens has nine.
    """
    drafts = accepted = later = 0.0
    first: Seen | None = None
    for seen in lines:
        count = _counts(seen.text)
        if count is None:
            continue
        drafts, accepted, later = drafts + count[0], accepted + count[1], later + count[2]
        if first is None and _inert(*count):
            first = seen
    return first if drafts >= _ENOUGH_DRAFTS and _inert(drafts, accepted, later) else None


def _inert(drafts: float, accepted: float, later: float) -> bool:
    return later < drafts * _NONE_LATER or (accepted < drafts * (LOW_LENGTH - 1) and later < drafts * _FEW_LATER)


def _counts(text: str) -> tuple[float, float, float] | None:
    """Drafts, accepted tokens, and accepted tokens after each draft's first one; None for another line."""
    rates_found, drafted_found, accepted_found = _RATES.search(text), _DRAFTED.search(text), _ACCEPTED.search(text)
    if not (rates_found and drafted_found and accepted_found):
        return None
    rates = [float(rate) for rate in rates_found[1].split(", ") if rate.count(".") <= 1 and rate != "."]
    if len(rates) < _FEWEST_TOKENS or not int(drafted_found[1]):
        return None
    drafts = int(drafted_found[1]) / len(rates)
    return drafts, float(accepted_found[1]), sum(rates[1:]) * drafts


def taps(text: str) -> tuple[int, ...] | None:
    """The target's layers that a log line says the drafter taps, in vLLM's count; None for another line."""
    found = _TAPS.search(text)
    if not found:
        return None
    return tuple(int(part) for part in found[1].replace(",", " ").split())
