"""Prometheus text and the counters of speculation in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import metrics
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from hypothesis import given
from hypothesis import strategies as st

RECORDED = Path(__file__).parent.parent / "data" / "metrics"


def recorded(name: str) -> metrics.Samples:
    return metrics.parse((RECORDED / f"gpu-0.20.1-dflash-tp2-{name}.metrics").read_text())


def test_a_recorded_exposition_of_a_good_run_is_read_whole() -> None:
    samples = recorded("ok")
    counters = metrics.speculation(samples)
    assert counters is not None
    assert (counters.drafts, counters.drafted, counters.accepted) == (20, 300, 200)
    assert counters.per_position == (20, 20, 16, *[12] * 12)
    assert metrics.start_time(samples) == pytest.approx(1795985802.13)
    assert metrics.requests_finished(samples) == 8


def test_counters_of_another_model_are_not_taken() -> None:
    assert metrics.speculation(recorded("ok"), "tiny") is not None
    assert metrics.speculation(recorded("ok"), "other") is None


def test_no_speculation_is_none_and_not_zero() -> None:
    assert metrics.speculation(metrics.parse("process_start_time_seconds 1.0\n")) is None


def test_counters_of_all_engines_are_summed() -> None:
    text = "".join(
        f'{name}{{engine="{engine}",model_name="m"}} {value}\n'
        for engine in (0, 1)
        for name, value in ((metrics.DRAFTS, 2.0), (metrics.DRAFTED, 30.0), (metrics.ACCEPTED, 7.0))
    )
    text += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 3\n'
    text += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 4\n'
    counters = metrics.speculation(metrics.parse(text))
    assert counters == metrics.SpeculationCounters(4, 60, 14, (0, 0, 7))


def test_labels_with_quotes_commas_and_braces_are_read() -> None:
    (sample,) = metrics.parse('m{a="x,\\"}{\\\\",b="",} 1.5 1700000000\n').get("m")
    assert sample == metrics.Sample({"a": 'x,"}{\\', "b": ""}, 1.5)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "0.5"])
def test_a_counter_that_is_no_count_is_refused(value: str) -> None:
    text = f"{metrics.DRAFTS} {value}\n{metrics.DRAFTED} 0\n{metrics.ACCEPTED} 0\n"
    with pytest.raises(FirstlightError, match="no count") as error:
        metrics.speculation(metrics.parse(text))
    assert error.value.kind == "metrics-malformed"


@pytest.mark.parametrize("line", ["<html>", "m{a=1} 2", 'm{a="1" 2', "m", "m one", "m 1 2 3", '{a="1"} 2', 'm{a="1"}'])
def test_a_line_that_is_no_sample_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(FirstlightError, match="line 2"):
        metrics.parse(f"# a comment\n{line}\n")


def test_an_absurd_position_makes_no_list_of_its_length() -> None:
    text = f"{metrics.DRAFTS} 0\n{metrics.DRAFTED} 0\n{metrics.ACCEPTED} 0\n"
    text += metrics.ACCEPTED_PER_POSITION + '{position="99999999999999999999"} 1\n'
    counters = metrics.speculation(metrics.parse(text))
    assert counters is not None
    assert counters.per_position == ()


@given(st.text(max_size=400))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    with contextlib.suppress(FirstlightError):  # and nothing else
        metrics.speculation(metrics.parse(text))


_LABELS = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), st.text(max_size=10), max_size=3)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z:_]{1,8}", fullmatch=True), _LABELS, st.floats(allow_nan=False)), max_size=6)
)
def test_what_is_written_is_read_back(rows: list[tuple[str, dict[str, str], float]]) -> None:
    text = "".join(
        name + "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + f"}} {number!r}\n"
        for name, labels, number in rows
    )
    samples = metrics.parse(text)
    for name in {row[0] for row in rows}:
        wanted = [metrics.Sample(labels, number) for other, labels, number in rows if other == name]
        assert list(samples.get(name)) == wanted
