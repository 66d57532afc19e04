"""The Python code in a model's answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
#: up to three blanks, then at least three backticks or tildes; the info string of a backtick fence holds none
_FENCE = re.compile(r"^ {0,3}(?:(`{3,})([^`\n]*)|(~{3,})([^\n]*))$")
_PYTHON = frozenset({"python", "py", "python3", "py3"})


@dataclass(frozen=True)
class Fence:
    """One fenced block: its language in lower case (empty when none), its text, and whether it was closed."""

    language: str
    code: str
    closed: bool


def strip_thinking(text: str) -> str:
    """The answer without ``<think>`` parts.

    A lone ``</think>`` ends a part that the chat template opened; a lone ``<think>`` means that the answer was cut
    while thinking, so that nothing of it is an answer.
    """
    _, closed, rest = text.rpartition(_THINK_CLOSE)
    kept = rest if closed else text
    return kept.partition(_THINK_OPEN)[0] if _THINK_OPEN in kept else kept


def fences(text: str) -> list[Fence]:
    """All fenced blocks in order; an unterminated one ends with the text. Never raises, linear in the text."""
    found: list[Fence] = []
    marker, language, lines = "", "", [""][:0]
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        match = _FENCE.match(line)
        if not marker:
            if match is not None:
                marker = match.group(1) or match.group(3)
                info = (match.group(2) or match.group(4) or "").strip().lower()
                language, lines = (info.split() or [""])[0].strip("{}."), []
        elif match is not None and _closes(match, marker):
            found.append(Fence(language, "\n".join(lines), closed=True))
            marker = ""
        else:
            lines.append(line)
    if marker:
        found.append(Fence(language, "\n".join(lines), closed=False))
    return found


def _closes(match: re.Match[str], marker: str) -> bool:
    fence = match.group(1) or match.group(3)
    info = match.group(2) or match.group(4) or ""
    return fence[0] == marker[0] and len(fence) >= len(marker) and not info.strip()


def extract(answer: str, function: str) -> str | None:
    """The code that defines ``function``; None when the answer has none.

    The rule: of the fenced blocks that are Python (or name no language), the last complete one that defines the
    function, since a model that corrects itself does so below; then an unterminated one, as a cut answer leaves
    it; then, without any fence, the answer itself from its ``def`` (or the imports before it) on.

    Args:
        answer: the text of the message, thinking included.
        function: the name to look for.
    """
    text = strip_thinking(answer)
    defines = re.compile(rf"^[ \t]*def[ \t]+{re.escape(function)}[ \t]*\(", re.MULTILINE)
    blocks = fences(text)
    usable = [block for block in blocks if block.language in _PYTHON or not block.language]
    defining = [block for block in usable if defines.search(block.code)]
    for closed in (True, False):
        for block in reversed(defining):
            if block.closed is closed:
                return block.code
    if blocks:
        return None
    return _bare(text, function)


def _bare(text: str, function: str) -> str | None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    starts = [n for n, line in enumerate(lines) if re.match(rf"def[ \t]+{re.escape(function)}[ \t]*\(", line)]
    if not starts:
        return None
    first = last = starts[-1]
    while first > 0 and (not lines[first - 1].strip() or re.match(r"(import|from|@)\b|@", lines[first - 1])):
        first -= 1
    for number in range(starts[-1] + 1, len(lines)):  # prose begins at the first line that is not indented
        if lines[number].strip() and not lines[number][0].isspace():
            break
        last = number
    return "\n".join(lines[first : last + 1]).strip("\n")
