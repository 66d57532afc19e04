"""What speculation did between two readings of the counters, and whether that is enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import FirstlightError
from .metrics import SpeculationCounters

#: Below this mean acceptance length on code the drafter does nothing useful; 1.0 means that nothing was accepted.
MIN_LENGTH = 1.5
#: Below this it does something, but less than any sound drafter of this kind was seen to do.
WARN_LENGTH = 2.5


@dataclass(frozen=True)
class Acceptance:
    """The difference of two readings.

    Attributes:
        drafts: times that the drafter was asked.
        drafted: tokens proposed.
        accepted: proposed tokens that the target confirmed.
        rate: accepted / drafted, 0 to 1; None when nothing was drafted.
        length: mean acceptance length in tokens per step of the target, 1 + accepted / drafts; None without drafts.
        per_position: tokens accepted at this position of a draft, position 0 first.
    """

    drafts: int
    drafted: int
    accepted: int
    rate: float | None
    length: float | None
    per_position: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For module results; rounded to what the counts bear."""
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "rate": None if self.rate is None else round(self.rate, 4),
            "length": None if self.length is None else round(self.length, 3),
            "per_position": list(self.per_position),
        }


@dataclass(frozen=True)
class Reading:
    """One look at ``/metrics``.

    Attributes:
        counters: speculation's counters; None when the server exposes none.
        started: start of the server's process in seconds since the epoch; None when not exposed.
        finished: requests that ended well since then; None when not exposed.
    """

    counters: SpeculationCounters | None
    started: float | None = None
    finished: int | None = None


@dataclass(frozen=True)
class Judgement:
    """What the gate says.

    Attributes:
        passed: False fails the deployment.
        warnings: what a user should look into although it passed.
        causes: likely causes of a low length, most likely first, each with what was seen.
    """

    passed: bool
    warnings: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What the caller knows about the deployment; None where it does not know.

    Attributes:
        log_taps: ids in the log's line ``Using auxiliary layers from speculative config``.
        expected_taps: ids that line must show (target_layer_ids + 1).
        formula_taps: ids that it would show for the layers of the reference formula.
        compile_cache_reused: whether this start loaded a compiled graph from disk.
        mask_token_id: as in the drafter's config.
        mask_token_id_source: where that value came from (``table``, ``user``, ...).
        sliding_window: the drafter's window in tokens.
        max_model_len: longest sequence served, in tokens.
        thinking: whether the requests asked the model to think.
    """

    log_taps: tuple[int, ...] | None = None
    expected_taps: tuple[int, ...] | None = None
    formula_taps: tuple[int, ...] | None = None
    compile_cache_reused: bool | None = None
    mask_token_id: int | None = None
    mask_token_id_source: str | None = None
    sliding_window: int | None = None
    max_model_len: int | None = None
    thinking: bool | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Evidence:
        """Read a module's option; keys that are not judged are passed over.

        Raises:
            FirstlightError: a value that does not fit (kind ``evidence-invalid``).
        """
        try:
            return cls(
                log_taps=_ids(values.get("log_taps")),
                expected_taps=_ids(values.get("expected_taps")),
                formula_taps=_ids(values.get("formula_taps")),
                compile_cache_reused=_flag(values.get("compile_cache_reused")),
                mask_token_id=_number(values.get("mask_token_id")),
                mask_token_id_source=_text(values.get("mask_token_id_source")),
                sliding_window=_number(values.get("sliding_window")),
                max_model_len=_number(values.get("max_model_len")),
                thinking=_flag(values.get("thinking")),
            )
        except (TypeError, ValueError) as error:
            raise _invalid(str(error), cls.__dataclass_fields__) from None


@dataclass(frozen=True)
class _Cause:
    text: str
    proven: bool = field(default=False)


def difference(before: SpeculationCounters, after: SpeculationCounters) -> Acceptance:
    """What happened between two readings of one process.

    Raises:
        FirstlightError: a counter went back, so the readings are not of one process (kind ``counters-went-back``).
    """
    for name in ("drafts", "drafted", "accepted"):
        first, second = getattr(before, name), getattr(after, name)
        if second < first:
            raise FirstlightError(
                f"the counter of {name} went from {first} back to {second} during the smoke test.",
                where="/metrics",
                why="The two readings are of different server processes, so nothing can be concluded from them.",
                fix="check the journal for a restart, and that only one server listens on the port.",
                kind="counters-went-back",
            )
    drafts, drafted, accepted = (
        after.drafts - before.drafts, after.drafted - before.drafted, after.accepted - before.accepted
    )  # fmt: skip
    earlier = before.per_position + (0,) * (len(after.per_position) - len(before.per_position))
    return Acceptance(
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        rate=accepted / drafted if drafted else None,
        length=1 + accepted / drafts if drafts else None,
        per_position=tuple(now - then for now, then in zip(after.per_position, earlier, strict=False)),
    )  # fmt: skip


def between(before: Reading, after: Reading) -> Acceptance:
    """The difference of two readings, once it is certain that it measures anything.

    Raises:
        FirstlightError: the process changed (``server-restarted``), speculation has no counters
            (``speculation-not-measured``), a counter went back, or nothing was drafted (``speculation-inert``).
    """
    same_process(before, after)
    if before.counters is None or after.counters is None:
        raise FirstlightError(
            "speculation is configured, but the server exposes no counters of it (vllm:spec_decode_*).",
            where="/metrics",
            why="vLLM exposes them from its start when speculation is on: this server runs without it.",
            fix="check in the journal that 'non-default args' holds speculative_config, and restart the unit.",
            kind="speculation-not-measured",
        )
    acceptance = difference(before.counters, after.counters)
    if acceptance.drafts == 0:
        raise FirstlightError(
            "requests were answered and not one draft was made.",
            where="/metrics",
            why="Speculation is configured but idle; vLLM skips drafting silently when the drafter's "
            "max_position_embeddings is smaller than the served length.",
            fix="check max_position_embeddings in the drafter's config.json against max_model_len.",
            kind="speculation-inert",
        )
    return acceptance


def same_process(before: Reading, after: Reading) -> None:
    """Refuse readings of two processes.

    Raises:
        FirstlightError: the start time changed or vanished (kind ``server-restarted``).
    """
    if before.started != after.started:
        raise FirstlightError(
            f"the server's process_start_time_seconds was {before.started} before the requests and "
            f"{after.started} after them.",
            where="/metrics",
            why="The server restarted under the smoke test, or two servers share the port.",
            fix="read the journal of the unit for the restart's cause, and check that one process listens there.",
            kind="server-restarted",
        )


def judge(
    acceptance: Acceptance,
    *,
    min_length: float = MIN_LENGTH,
    warn_length: float = WARN_LENGTH,
    evidence: Evidence | None = None,
) -> Judgement:
    """Hold an acceptance against the floor.

    Args:
        acceptance: a difference with at least one draft.
        min_length: mean acceptance length below which the deployment fails, in tokens.
        warn_length: below which it passes with a warning, in tokens.
        evidence: what is known about the deployment, for the causes.
    """
    length = acceptance.length
    if length is not None and length >= warn_length:
        return Judgement(passed=True)
    causes = likely_causes(evidence or Evidence())
    if length is None or length < min_length:
        return Judgement(passed=False, causes=causes)
    warning = (
        f"mean acceptance length {length:.2f} is below {warn_length:g}: speculation helps less than it should. "
        f"First to look at: {causes[0]}"
    )
    return Judgement(passed=True, warnings=(warning,), causes=causes)


def low_acceptance(acceptance: Acceptance, judgement: Judgement, *, min_length: float, during: str) -> FirstlightError:
    """The error of a gate that failed, naming the likely causes in order."""
    length = "undefined" if acceptance.length is None else f"{acceptance.length:.2f}"
    causes = " ".join(f"({number}) {cause}" for number, cause in enumerate(judgement.causes, 1))
    return FirstlightError(
        f"the drafter does nothing: mean acceptance length {length} is below {min_length:g} {during} "
        f"({acceptance.accepted} of {acceptance.drafted} drafted tokens accepted in {acceptance.drafts} drafts).",
        where="speculation",
        why=f"The answers are right all the same, so only the counters show it. Likely causes, in order: {causes}",
        fix="correct the first of these in the drafter's config.json (keys target_layer_ids, "
        "eagle_aux_hidden_state_layer_ids = each of them + 1, mask_token_id) and deploy again.",
        kind="drafter-low-acceptance",
    )


def likely_causes(evidence: Evidence) -> tuple[str, ...]:
    """Causes of a low acceptance, each with what was seen; those that the evidence proves come first."""
    causes = (
        _taps(evidence.log_taps, evidence.expected_taps, evidence.formula_taps),
        _compile_cache(evidence.compile_cache_reused),
        _mask(evidence.mask_token_id, evidence.mask_token_id_source),
        _window(evidence.sliding_window, evidence.max_model_len),
        _thinking(evidence.thinking),
    )
    return tuple(cause.text for cause in sorted(causes, key=lambda cause: not cause.proven))


def _taps(seen: tuple[int, ...] | None, expected: tuple[int, ...] | None, formula: tuple[int, ...] | None) -> _Cause:
    line = "'Using auxiliary layers from speculative config'"
    if seen is None:
        want = f", which should show {_show(expected)}" if expected is not None else ""
        return _Cause(f"taps: the log's line {line} was not seen{want}.{_against(formula, expected)}")
    if expected is None:
        return _Cause(f"taps: the log says {_show(seen)}; what it should say is not known here.")
    if seen != expected:
        return _Cause(f"taps: the log says {_show(seen)} and it should say {_show(expected)}.", proven=True)
    says = f"taps: the log says {_show(seen)} as the config asks"
    other = _against(formula, expected)
    return _Cause(f"{says}.{other}" if other else f"{says}; the config itself may name wrong layers.")


def _against(formula: tuple[int, ...] | None, configured: tuple[int, ...] | None) -> str:
    """That the configured taps are not the reference formula's; empty when they are, or when one is not known."""
    if formula is None or configured is None or formula == configured:
        return ""
    layers, given = ([tap - 1 for tap in taps] for taps in (formula, configured))
    return f" The reference formula gives {_show(formula)}: target_layer_ids {layers} in place of {given}."


def _compile_cache(reused: bool | None) -> _Cause:
    if reused is None:
        return _Cause("compile cache: whether this start reused a compiled graph is not known.")
    if reused:
        return _Cause(
            "compile cache: this start loaded a compiled graph from disk, and vLLM before 0.26 does not notice "
            "when the drafter's taps changed since."
        )
    return _Cause("compile cache: not reused by this start, so an old graph is not the cause.")


def _mask(mask: int | None, source: str | None) -> _Cause:
    if mask is None:
        return _Cause("mask id: dflash_config.mask_token_id is not known here; hold it against the model card.")
    origin = f" (from: {source})" if source else ""
    return _Cause(f"mask id: {mask}{origin}; it cannot be read off the weights, so hold it against the model card.")


def _window(window: int | None, max_model_len: int | None) -> _Cause:
    if window is None:
        return _Cause("window: the drafter's sliding window is not known here.")
    if max_model_len is not None and max_model_len > window:
        return _Cause(
            f"window: {window} tokens, and up to {max_model_len} are served; vLLM before 0.26 ignores the window, "
            "which lowers acceptance beyond it, though hardly for prompts as short as these."
        )
    return _Cause(f"window: {window} tokens, not exceeded by the served length {max_model_len}.")


def _thinking(thinking: bool | None) -> _Cause:
    if thinking is None:
        return _Cause("thinking mode: not known; it lowers acceptance with nothing broken.")
    if thinking:
        return _Cause("thinking mode: on for these requests; it lowers acceptance with nothing broken.")
    return _Cause("thinking mode: off for these requests.")


def _show(ids: Sequence[int] | None) -> str:
    return "(" + ", ".join(map(str, ids or ())) + ")"


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"taps are a list of layer numbers, not {value!r}")
    return tuple(_whole(item) for item in value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{value!r} is no whole number")
    return int(value)


def _number(value: Any) -> int | None:
    return None if value is None else _whole(value)


def _flag(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"{value!r} is neither true nor false")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _invalid(problem: str, known: Any) -> FirstlightError:
    return FirstlightError(
        f"{problem}.",
        where="evidence",
        fix=f"use the keys {', '.join(known)}, each with a value of its kind or none.",
        kind="evidence-invalid",
    )
