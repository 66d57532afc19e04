"""Why a server failed, told from its log and from what systemd knows of it.

The verdict is one kind of the catalogue, ``none`` for a server that is well, or ``unknown``. It rests on three
rules. A server that became ready outlived all that was logged before. The general message of the API server comes
last and only counts when nothing else speaks. An error that the catalogue does not know makes the verdict
``unknown``, however well something else in the log would fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .failure_catalogue import BY_ID, NONE, UNKNOWN
from .failure_catalogue_engine import DIED_SILENTLY, LOW_ACCEPTANCE, START_LIMIT, WRAPPER
from .failure_kinds import ANY_OTHER, Effect, Kind, Stage
from .failure_remedies import Situation, remedy_for
from .log_lines import split_level
from .log_scan import Hit, Seen, Start, scan
from .speculation_log import first_low, taps

_GENERIC = (WRAPPER, DIED_SILENTLY, START_LIMIT)

_STRANGER = "The log holds an error that the catalogue of failures does not know."
_LONG_TRACEBACK = 300
"""Lines before a death in which an error of a server that was ready may be its cause; older ones it outlived."""

# Exceptions that follow a failure somewhere else: they never are the cause.
_CONSEQUENCE = re.compile(
    r"initialization failed|EngineDeadError|EngineCore encountered|Engine loop has died|failed to start"
    r"|Worker failed with error|RuntimeError: cancelled|CancelledError|EngineGenerateError|Background loop"
    r"|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|HTTPException"
    r"|CalledProcessError|EOFError$|Connection closed by peer|Broken pipe|DistStoreError|ZMQError: (?:Context|Socket)"
    r"|already dead|found no nvidia driver",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Verdict:
    """What a log tells.

    Attributes:
        id: a kind of the catalogue, ``none`` or ``unknown``.
        line: number of the deciding line, counted from 1; None when no line decided.
        text: that line, without colours and its line end; empty when no line decided.
        cause: one sentence.
        remedy: one sentence, with the values to set where they can be computed.
    """

    id: str
    line: int | None
    text: str
    cause: str
    remedy: str

    @property
    def failed(self) -> bool:
        """Whether something is wrong with the server, known or not."""
        return self.id != NONE

    def as_dict(self) -> dict[str, str | int | None]:
        """The same, for module results and JSON reports."""
        return {"id": self.id, "line": self.line, "text": self.text, "cause": self.cause, "remedy": self.remedy}


_WELL = Verdict(NONE, None, "", "The log shows no failure of the server.", "")
_SILENT = Verdict(
    UNKNOWN,
    None,
    "",
    "The log shows neither a failure nor a server that became ready.",
    "Look at the unit's state and at the rest of its journal: the log may be cut off, or the start still going on.",
)


def diagnose(lines: Iterable[str], deployment: Mapping[str, object] | None = None) -> Verdict:
    """The verdict on a server's log.

    Of several starts in the log the last one that tells something decides; a last start that is well is a healthy
    server, whatever happened before it.

    Args:
        lines: the log's lines, with or without their ends and the wrappers of journald, syslog or docker.
        deployment: what is known of this deployment, by the names of ``vllm_server``'s variables without that
            prefix (``port``, ``unit``, ``max_num_seqs``, ``num_speculative_tokens``, ``max_num_batched_tokens``,
            ``max_model_len``, ``gpu_memory_utilization``, ``tensor_parallel_size``, ``model``, ``drafter``), and
            ``auxiliary_layers``, the taps that the log must show. It makes the remedy concrete.

    Returns:
        The verdict; it is never an error that a log cannot be understood.
    """
    vague: Verdict | None = None
    for start in reversed(scan(lines)):
        verdict = _judge(start, deployment or {})
        if verdict is None:
            continue
        if verdict.id not in (UNKNOWN, *_GENERIC):
            if verdict.id == NONE and vague is not None:
                break  # an earlier start was well: what failed later is in the later starts only
            return verdict
        vague = verdict if vague is None or _says_more(verdict, vague) else vague
    return vague or _SILENT


def _says_more(older: Verdict, newer: Verdict) -> bool:
    """Whether an older start tells more than that systemd gave up, or that something failed."""
    told = older.id in (WRAPPER, DIED_SILENTLY) or older.cause == _STRANGER
    return newer.id == START_LIMIT and told


def _judge(start: Start, deployment: Mapping[str, object]) -> Verdict | None:
    """The verdict on one start; None when the log of it says nothing."""
    situation = Situation(deployment, start)
    ready = _ready(start)
    end = _end(start)
    dead = _within(start, "dead", ready, end) or _refusing(start, ready, end)
    hits = [hit for hit in start.hits if _before(end, hit) and _can_count(hit, start, ready, dead)]
    chosen = _choose(
        hits, starting=ready is None, failing=dead is not None or (ready is None and _in_trouble(start, end))
    )
    generic = _earliest([hit for hit in hits if hit.kind.id in _GENERIC and not hit.soft])
    if chosen is not None:
        return _verdict(chosen.kind, Seen(chosen.number, chosen.text), replace(situation, before=chosen.before))
    if dead or generic or ready is None:
        failure = _without_cause(start, generic, ready, end, situation) or _answering(start)
        return _WELL if failure is None and start.at("opened") is not None else failure
    return _speculation(start, deployment, situation) or _WELL


def _ready(start: Start) -> int | None:
    """Where the server became ready: said so, or answered before anything went wrong."""
    at = start.at("ready")
    if at is not None:
        return at
    alive = start.at("alive")
    first_trouble = min((hit.number for hit in start.hits), default=None)
    bad = [number for number in (first_trouble, start.at("dead"), start.at("trouble")) if number is not None]
    return alive if alive is not None and all(alive < number for number in bad) else None


def _end(start: Start) -> int:
    """Line before which the log counts: an ordered stop throws errors that mean nothing."""
    stop, dead = start.at("shutdown"), start.at("dead")
    if stop is None or (dead is not None and dead < stop):
        return start.lines + 1 if start.lines else 1 << 62
    return stop


def _before(end: int, hit: Hit) -> bool:
    """Whether a hit stands before the ordered stop; what the kernel and systemd did is true after it as well."""
    return hit.number < end or hit.kind.id in ("killed-by-oom", START_LIMIT)


def _within(start: Start, sign: str, low: int | None, high: int) -> Seen | None:
    last = start.last.get(sign)
    first = start.first.get(sign)
    for seen in (first, last):
        if seen is not None and (low or 0) < seen.number < high:
            return seen
    return None


def _can_count(hit: Hit, start: Start, ready: int | None, dead: Seen | None) -> bool:
    if any(word in start.words for word in hit.absent):
        return False
    if ready is None:
        return True
    if hit.number < ready or hit.kind.stage is Stage.START:
        return False
    if hit.kind.effect is Effect.SPARES or (dead is not None and hit.number > dead.number - _LONG_TRACEBACK):
        return True
    alive = start.last.get("alive")
    return hit.kind.effect is Effect.KILLS and (alive is None or alive.number < hit.number)


def _in_trouble(start: Start, end: int) -> bool:
    return any(start.at(sign) is not None and (start.at(sign) or 0) < end for sign in ("dead", "trouble", "exception"))


def _choose(hits: list[Hit], *, starting: bool, failing: bool) -> Hit | None:
    """The hit that explains the failure best: the root, not what came of it.

    What the server outlives counts only when nothing worse is known; hints, when nothing firm is; and warnings,
    when the log shows as well that something failed.
    """
    specific = [hit for hit in hits if hit.kind.id not in _GENERIC]
    firm = [hit for hit in specific if not hit.hint and not hit.soft]
    told = {hit.kind.id for hit in specific if not hit.soft}
    groups = [[hit for hit in firm if hit.kind.effect is not Effect.SPARES]]
    if not failing:
        groups.append(firm)
    if failing or starting:
        groups.append([hit for hit in specific if not hit.soft])
    if failing:
        groups.append(specific)
    candidates = (_earliest(_not_yielding(group, told)) for group in groups)
    return next((best for best in candidates if best is not None), None)


def _not_yielding(hits: list[Hit], told: set[str]) -> list[Hit]:
    """The hits of kinds that no other kind explains better.

    Args:
        hits: those among which one is to be chosen.
        told: all kinds that the log points to, be it by a hint.
    """
    ids = {hit.kind.id for hit in hits}
    return [
        hit
        for hit in hits
        if not ids.intersection(hit.kind.yields_to) and not (ANY_OTHER in hit.kind.yields_to and told - {hit.kind.id})
    ]


def _earliest(hits: list[Hit]) -> Hit | None:
    """The first hit, but of its kind one that is sure before one that is a hint."""
    if not hits:
        return None
    kind = min(hits, key=lambda hit: hit.number).kind
    return min((hit for hit in hits if hit.kind is kind), key=lambda hit: (hit.hint, hit.number))


def _without_cause(
    start: Start, generic: Hit | None, ready: int | None, end: int, situation: Situation
) -> Verdict | None:
    """The verdict when no specific kind fits: the wrapper, a silent death, or an error nobody knows."""
    died_at = start.at("dead")
    low = 0 if ready is None else max(ready, (died_at or 0) - _LONG_TRACEBACK)
    strangers = (seen for seen in start.kept.get("exception", []) if low < seen.number < end and _cause(seen))
    stranger = next(strangers, None)
    told_first = stranger is None or (generic is not None and generic.number < stranger.number)
    if generic is not None and (stranger is None or (told_first and generic.kind.id != WRAPPER)):
        died = [hit for hit in start.hits_of.get(DIED_SILENTLY, []) if hit.number < end and not hit.soft]
        best = died[0] if died and generic.kind.id == WRAPPER else generic
        return _verdict(best.kind, Seen(best.number, best.text), situation)
    if stranger is not None:
        return _unknown(stranger, _STRANGER)
    for sign in ("dead", "trouble"):
        seen = start.last.get(sign)
        if seen is not None and (ready or 0) < seen.number < end:
            return _unknown(seen, "The log shows that the server failed, but not why.")
    return None


def _cause(seen: Seen) -> bool:
    return not _CONSEQUENCE.search(split_level(seen.text)[1])


def _unknown(seen: Seen, cause: str) -> Verdict:
    return Verdict(
        UNKNOWN,
        seen.number,
        seen.text,
        cause,
        "Read the log from the line given upwards; the first error is the cause.",
    )


def _answering(start: Start) -> Verdict | None:
    """``unknown`` for a server whose last answers were failures of its own."""
    refuses = _refusing(start, None, 1 << 62)
    if refuses is None:
        return None
    return _unknown(refuses, "The server answers requests with its own errors, and the log does not say why.")


def _refusing(start: Start, ready: int | None, end: int) -> Seen | None:
    """The answer 500 after which no other answer came: as good as dead."""
    refuses, alive = start.last.get("refuses"), start.last.get("alive")
    if refuses is None or not (ready or 0) < refuses.number < end:
        return None
    return None if alive is not None and alive.number > refuses.number else refuses


def _speculation(start: Start, deployment: Mapping[str, object], situation: Situation) -> Verdict | None:
    """A drafter that does nothing, though the server is well."""
    low = first_low(start.kept.get("metrics", []))
    if low is not None:
        return _verdict(BY_ID[LOW_ACCEPTANCE], low, situation)
    wanted = deployment.get("auxiliary_layers")
    if not isinstance(wanted, (list, tuple)) or not wanted:
        return None
    for seen in start.kept.get("taps", []):
        shown = taps(seen.text)
        if shown is not None and shown != tuple(wanted):
            return _verdict(BY_ID[LOW_ACCEPTANCE], seen, situation)
    return None


def _verdict(kind: Kind, seen: Seen, situation: Situation) -> Verdict:
    return Verdict(kind.id, seen.number, seen.text, kind.cause, remedy_for(kind, seen.text, situation))


_SYSTEMD_STATUS = {
    200: "its working directory does not exist or cannot be entered",
    203: "its program cannot be executed (the venv is missing or not executable)",
    209: "its standard output cannot be set up",
    217: "its user does not exist",
    216: "its group does not exist",
    226: "its file system view cannot be set up (a path that the unit binds or protects is missing)",
    227: "a no-new-privileges or namespace step of the sandbox failed",
    228: "its system call filter cannot be loaded",
    233: "its runtime directory cannot be made",
    238: "its state directory cannot be made",
    239: "its cache directory cannot be made",
    243: "a credential of it cannot be loaded",
}
_BAD_ARGUMENTS = 2
_SIGKILL = 9


def diagnose_unit(
    result: str,
    exec_main_code: str,
    exec_main_status: int,
    lines: Iterable[str],
    deployment: Mapping[str, object] | None = None,
    load_state: str = "loaded",
) -> Verdict:
    """The verdict on a unit that is not running, from its log and from what systemd tells of its end.

    The log decides where it names a cause. Where it does not, systemd does.

    Args:
        result: the unit's ``Result``, such as ``success``, ``exit-code``, ``signal``, ``oom-kill``,
            ``start-limit-hit``, ``timeout``.
        exec_main_code: ``exited``, ``killed`` or ``dumped``; empty when not known.
        exec_main_status: exit status, or the signal's number.
        lines: the log of this start.
        deployment: as for `diagnose`.
        load_state: the unit's ``LoadState``; ``masked`` and ``not-found`` explain a start that never was.

    Returns:
        The verdict; ``none`` only for a unit that systemd knows no fault of either.
    """
    verdict = diagnose(lines, deployment)
    if verdict.id not in (NONE, UNKNOWN, *_GENERIC):
        return verdict
    unit = str((deployment or {}).get("unit") or "the unit")
    told = _by_systemd(result, exec_main_code, exec_main_status, load_state, unit)
    if told is None:
        return verdict
    if told.id in BY_ID:
        return Verdict(told.id, verdict.line, verdict.text, told.cause, told.remedy)
    known_line = verdict.id in _GENERIC or verdict.line is not None
    return verdict if known_line else told


def _by_systemd(result: str, code: str, status: int, load_state: str, unit: str) -> Verdict | None:
    kind = _kind_by_systemd(result, code, status)
    if load_state in ("masked", "not-found", "bad-setting", "error"):
        remedy = f"Run systemctl unmask {unit}." if load_state == "masked" else f"Run systemctl status {unit}."
        return _told(f"systemd does not start {unit}: it is {load_state}.", remedy)
    if kind is not None:
        return Verdict(kind, None, "", BY_ID[kind].cause, BY_ID[kind].remedy)
    look = f"Run systemctl status {unit}, and correct what its last lines name."
    if code == "exited" and status in _SYSTEMD_STATUS:
        return _told(f"systemd could not start {unit}: {_SYSTEMD_STATUS[status]} (status {status}).", look)
    if result == "timeout":
        return _told(f"systemd ended {unit} because it did not start or stop in time.", look)
    if result not in ("", "success"):
        how = f"{code} {status}" if code else "no exit status"
        return _told(f"{unit} ended with result {result} ({how}), and its log names no cause.", look)
    return None


def _kind_by_systemd(result: str, code: str, status: int) -> str | None:
    if result == "oom-kill":
        return "killed-by-oom"
    if result == "start-limit-hit":
        return START_LIMIT
    if code == "exited" and status == _BAD_ARGUMENTS:
        return "flag-rejected"
    if code == "dumped" or (code == "killed" and status == _SIGKILL and result == "signal"):
        return DIED_SILENTLY
    return None


def _told(cause: str, remedy: str) -> Verdict:
    return Verdict(UNKNOWN, None, "", cause, remedy)
