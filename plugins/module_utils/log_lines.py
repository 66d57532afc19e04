r"""Lines of a server's log, freed from what journald, syslog, docker and terminals wrap around them.

A line of vLLM reaches us as ``Nov 29 21:04:06 host vllm[7]: (Worker_TP0 pid=9) ERROR 11-29 21:04:06 [x.py:1] text``
or with any part of that missing. ``text`` is what matters; the level decides how much weight it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

LINE_LIMIT = 1 << 20
"""Bytes of one line that are looked at; a longer line is cut, so that a broken log cannot eat the memory."""
WINDOW = 4096
"""Characters of a line that patterns are tried on."""

_BYTES = 256
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_WRAPPER = re.compile(
    r"[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)? \S{1,80} [^\s:]{1,80}: ?"  # syslog, journalctl -o short
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?\s+"  # ISO time
    r"|(?:stdout|stderr) [FP] "  # the kubelet
    r"|\S{1,80} [\w.@-]{1,80}\[\d+\]: ?"  # host and unit after an ISO time
    r"|\((?:APIServer|ApiServer|EngineCore|Worker|VllmWorker|Ray|DPCoordinator)[^()]{0,80}\) ?"
    r"|\[?rank\d+\]: ?"
    r"|[\w.-]{1,60} +\| "  # docker compose
    r"|- [\w.]{1,120} - (?=[A-Z]+ - )"  # Python's logging with the logger's name
    r"|> "
)
_LEVEL = re.compile(
    r"(?P<word>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b(?::| -|(?= ))\s*"
    r"(?:\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? ?(?:\[[^\]]{1,100}\]|[\w./-]{1,100}:\d+\])? ?)?"
)
_GLOG = re.compile(r"\[?([IWEF])\d{4} \d\d:\d\d:\d\d")
_PYTHON_WARNING = re.compile(r"(?:\S{1,300}:\d+: )?\w{0,40}Warning: ")

QUIET, SOFT, LOUD = "quiet", "soft", "loud"
"""How much a line claims: information, a warning, or an error and all that has no level."""


def read_lines(stream: BinaryIO) -> Iterator[str]:
    """The lines of a log file, numbered as an editor numbers them, whatever bytes it holds."""
    while raw := stream.readline(LINE_LIMIT):
        if not raw.endswith(b"\n"):
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(LINE_LIMIT)
        yield raw.decode("utf-8", errors="replace")


def clean(raw: str) -> str:
    """One line without its end, terminal colours and JSON envelope (``docker logs``' file, ``journalctl -o json``)."""
    text = raw.rstrip("\r\n")
    if text.startswith("{"):
        text = _unwrap(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.replace("\n", " ").replace("\x00", "") if "\n" in text or "\x00" in text else text


def _unwrap(text: str) -> str:
    if '"log"' not in text and '"MESSAGE"' not in text:
        return text
    try:
        envelope = json.loads(text)
    except ValueError:
        return text
    message = envelope.get("log", envelope.get("MESSAGE")) if isinstance(envelope, dict) else None
    if isinstance(message, list):  # journald writes bytes that are no UTF-8 as a list of numbers
        message = bytes(byte for byte in message if byte in range(_BYTES)).decode(errors="replace")
    return message.rstrip("\r\n") if isinstance(message, str) else text


def split_level(line: str) -> tuple[str, str]:
    """How loud a cleaned line is, and its text without wrappers and level.

    Returns:
        One of ``QUIET``, ``SOFT``, ``LOUD``; and the text.
    """
    at = 0
    for _ in range(8):
        found = _WRAPPER.match(line, at)
        if not found or found.end() == at:
            break
        at = found.end()
    rest = line[at : at + WINDOW].lstrip()
    if found := _LEVEL.match(rest):
        word = found["word"]
        loudness = QUIET if word in ("DEBUG", "INFO") else SOFT if word.startswith("WARN") else LOUD
        return loudness, rest[found.end() :].lstrip()
    if found := _GLOG.match(rest):
        return {"I": QUIET, "W": SOFT}.get(found[1], LOUD), rest
    if _PYTHON_WARNING.match(rest):
        return SOFT, rest
    return LOUD, rest
