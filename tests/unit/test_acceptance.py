"""The gate: what speculation did, measured by differences, and what may be behind a low figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import acceptance, metrics
from ansible_collections.firstlight.vllm.plugins.module_utils.acceptance import Evidence, Reading
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.metrics import SpeculationCounters
from hypothesis import given
from hypothesis import strategies as st

RECORDED = Path(__file__).parent.parent / "data" / "metrics"
NOTHING = SpeculationCounters(0, 0, 0, (0,) * 15)


def recorded(name: str) -> Reading:
    samples = metrics.parse((RECORDED / f"gpu-0.20.1-dflash-tp2-{name}.metrics").read_text())
    return Reading(metrics.speculation(samples), metrics.start_time(samples), metrics.requests_finished(samples))


def since_start(name: str) -> acceptance.Acceptance:
    """Of a recorded run: vLLM exposes the counters as 0 when it starts."""
    after = recorded(name)
    return acceptance.between(replace(after, counters=NOTHING), after)


def test_the_recorded_good_run_has_length_11_and_passes() -> None:
    measured = since_start("ok")
    assert measured.length == 11.0
    assert measured.rate == pytest.approx(2 / 3)
    assert measured.per_position[:4] == (20, 20, 16, 12)
    assert acceptance.judge(measured) == acceptance.Judgement(passed=True)


def test_the_recorded_run_with_shifted_taps_fails_at_length_1() -> None:
    measured = since_start("shifted-taps")
    assert (measured.drafted, measured.accepted, measured.length) == (3120, 0, 1.0)
    assert not acceptance.judge(measured).passed


def test_a_stale_compile_cache_fails_and_is_named_though_the_taps_are_right() -> None:
    # 0 of 3,120 as after a start that loaded the old graph; the log showed the right taps
    measured = acceptance.difference(NOTHING, SpeculationCounters(208, 3120, 0, (0,) * 15))
    evidence = Evidence(log_taps=(2, 6), expected_taps=(2, 6), compile_cache_reused=True)
    judgement = acceptance.judge(measured, evidence=evidence)
    assert not judgement.passed
    assert judgement.causes[0].startswith("taps: the log says (2, 6) as the config asks")
    assert "loaded a compiled graph from disk" in judgement.causes[1]


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ((1, 5), "the log says (1, 5) as the config asks"),
        (
            None,
            "the log's line 'Using auxiliary layers from speculative config' was not seen, which should show (1, 5)",
        ),
    ],
)
def test_configured_taps_are_held_against_the_reference_formula(seen: tuple[int, ...] | None, says: str) -> None:
    evidence = Evidence(log_taps=seen, expected_taps=(1, 5), formula_taps=(2, 6))
    formula = "The reference formula gives (2, 6): target_layer_ids [1, 5] in place of [0, 4]."
    assert acceptance.likely_causes(evidence)[0] == f"taps: {says}. {formula}"


def test_configured_taps_that_follow_the_reference_formula_are_not_held_against_it() -> None:
    evidence = Evidence(log_taps=(2, 6), expected_taps=(2, 6), formula_taps=(2, 6))
    assert "formula" not in acceptance.likely_causes(evidence)[0]


def test_one_percent_accepted_fails_though_it_is_not_zero() -> None:
    # 1.1 % of 15 drafted tokens is a length of 1.17: what went unnoticed for weeks
    measured = acceptance.difference(NOTHING, SpeculationCounters(1000, 15_000, 165, (165, *[0] * 14)))
    assert measured.length == pytest.approx(1.165)
    assert not acceptance.judge(measured).passed


@pytest.mark.parametrize(
    ("accepted", "passed", "warned"), [(49, False, False), (50, True, True), (149, True, True), (150, True, False)]
)
def test_the_floor_and_the_warning_are_where_they_are_said_to_be(accepted: int, passed: bool, warned: bool) -> None:
    measured = acceptance.difference(NOTHING, SpeculationCounters(100, 1500, accepted, ()))
    judgement = acceptance.judge(measured, min_length=1.5, warn_length=2.5)
    assert (judgement.passed, bool(judgement.warnings)) == (passed, warned)


def test_only_the_difference_counts_not_what_was_before() -> None:
    before = SpeculationCounters(1000, 15000, 15000, (1000,) * 15)
    after = SpeculationCounters(1010, 15150, 15000, (1000,) * 15)
    assert acceptance.difference(before, after).length == 1.0


def test_configured_speculation_without_counters_fails() -> None:
    with pytest.raises(FirstlightError) as error:
        acceptance.between(Reading(None, 1.0), Reading(None, 1.0))
    assert error.value.kind == "speculation-not-measured"


def test_counters_of_another_process_fail() -> None:
    with pytest.raises(FirstlightError) as error:
        acceptance.between(Reading(NOTHING, 1.0), Reading(SpeculationCounters(9, 9, 9, ()), 2.0))
    assert error.value.kind == "server-restarted"


@pytest.mark.parametrize("name", ["drafts", "drafted", "accepted"])
def test_a_counter_that_went_back_fails(name: str) -> None:
    before = SpeculationCounters(5, 5, 5, ())
    with pytest.raises(FirstlightError, match=name) as error:
        acceptance.between(Reading(before, 1.0), Reading(replace(before, **{name: 4}), 1.0))
    assert error.value.kind == "counters-went-back"


def test_speculation_that_drafts_nothing_fails() -> None:
    with pytest.raises(FirstlightError, match="max_position_embeddings") as error:
        acceptance.between(Reading(NOTHING, 1.0), Reading(NOTHING, 1.0))
    assert error.value.kind == "speculation-inert"


def test_the_failure_names_causes_in_order_with_what_was_seen() -> None:
    evidence = Evidence(
        log_taps=(1, 16, 31, 46, 61),
        expected_taps=(2, 17, 32, 47, 62),
        compile_cache_reused=False,
        mask_token_id=248070,
        mask_token_id_source="table",
        sliding_window=2048,
        max_model_len=32768,
        thinking=False,
    )
    measured = since_start("shifted-taps")
    fault = acceptance.low_acceptance(
        measured, acceptance.judge(measured, evidence=evidence), min_length=1.5, during="alone"
    )
    assert fault.kind == "drafter-low-acceptance"
    places = [
        fault.message.index(text)
        for text in (
            "(1) taps: the log says (1, 16, 31, 46, 61) and it should say (2, 17, 32, 47, 62)",
            "(2) compile cache: not reused",
            "(3) mask id: 248070 (from: table)",
            "(4) window: 2048 tokens, and up to 32768 are served",
            "(5) thinking mode: off",
        )
    ]
    assert places == sorted(places)


def test_what_is_not_known_is_said_to_be_not_known() -> None:
    causes = acceptance.likely_causes(Evidence())
    assert len(causes) == 5
    assert all("not known" in cause or "not seen" in cause for cause in causes)


def test_evidence_is_read_from_an_option_and_passes_over_what_is_not_judged() -> None:
    evidence = Evidence.from_mapping({"log_taps": [2, "6"], "available_kv_gib": 3.5, "thinking": True})
    assert evidence == Evidence(log_taps=(2, 6), thinking=True)


@pytest.mark.parametrize(
    "values", [{"log_taps": "2, 6"}, {"expected_taps": [1.5]}, {"mask_token_id": "x"}, {"thinking": 1}]
)
def test_evidence_of_a_wrong_kind_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(FirstlightError) as error:
        Evidence.from_mapping(values)
    assert error.value.kind == "evidence-invalid"


_COUNTS = st.integers(0, 10**9)


@given(_COUNTS, _COUNTS, _COUNTS, _COUNTS, st.integers(1, 20))
def test_length_and_rate_follow_from_the_counts(drafts: int, accepted: int, d0: int, a0: int, k: int) -> None:
    accepted = min(accepted, drafts * k)
    measured = acceptance.difference(
        SpeculationCounters(d0, d0 * k, a0, ()), SpeculationCounters(d0 + drafts, (d0 + drafts) * k, a0 + accepted, ())
    )
    if drafts:
        assert measured.length is not None
        assert 1 <= measured.length <= 1 + k
        assert measured.length == 1 + accepted / drafts
        assert measured.rate == accepted / (drafts * k)
    else:
        assert measured.length is None
