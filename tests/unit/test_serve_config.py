"""The mapping for ``vllm serve --config``: no false, no double, nothing that firstlight sets itself."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.firstlight.vllm.plugins.filter.local_url import FilterModule as UrlFilters
from ansible_collections.firstlight.vllm.plugins.filter.serve_config import FilterModule
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.serve_config import OWNED, flag_name, serve_config
from hypothesis import given
from hypothesis import strategies as st


def test_false_becomes_the_no_form_because_vllm_drops_false() -> None:
    assert serve_config({}, {"enable_prefix_caching": False}) == {"no-enable-prefix-caching": True}


def test_false_of_a_no_form_is_the_positive_flag() -> None:
    assert serve_config({}, {"no-enable-prefix-caching": False}) == {"enable-prefix-caching": True}


def test_empty_settings_are_left_out_and_zero_is_kept() -> None:
    settings = {"reasoning-parser": "", "speculative-config": {}, "tool-call-parser": None, "seed": 0}
    assert serve_config(settings) == {"seed": 0}


def test_a_users_flag_wins_over_a_setting_in_either_form() -> None:
    assert serve_config({"attention-backend": "FLASH_ATTN"}, {"attention_backend": "FLEX_ATTENTION"}) == {
        "attention-backend": "FLEX_ATTENTION"
    }
    assert serve_config({"language-model-only": True}, {"no-language-model-only": True}) == {
        "no-language-model-only": True
    }


def test_a_users_null_takes_a_setting_away() -> None:
    assert serve_config({"attention-backend": "FLASH_ATTN"}, {"attention-backend": None}) == {}


@pytest.mark.parametrize("flag", sorted(OWNED))
@pytest.mark.parametrize("spell", [str, lambda f: f.replace("-", "_"), lambda f: f"--{f}", lambda f: f"no-{f}"])
def test_flags_that_firstlight_sets_are_refused_in_every_spelling(flag: str, spell: Any) -> None:
    with pytest.raises(FirstlightError) as caught:
        serve_config({}, {spell(flag): True})
    assert caught.value.where.startswith("vllm_server_extra_args")
    assert OWNED[flag] in caught.value.fix


def test_a_dotted_key_cannot_reach_into_an_owned_flag() -> None:
    with pytest.raises(FirstlightError, match="speculative-config"):
        serve_config({}, {"speculative_config.num_speculative_tokens": 3})


def test_what_follows_a_dot_keeps_its_underscores() -> None:
    assert flag_name("compilation_config.cudagraph_mode") == "compilation-config.cudagraph_mode"


@pytest.mark.parametrize("pair", [("a-b", "a_b"), ("a-b", "no-a-b"), ("--a-b", "a-b")])
def test_one_flag_in_two_spellings_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(FirstlightError, match="given twice"):
        serve_config({}, dict.fromkeys(pair, 1))


@pytest.mark.parametrize("key", ["", " ", "--", "a b", "a\nb: c", "a;b", "a=b", "$(x)", "ä"])
def test_a_key_that_is_no_flag_is_refused(key: str) -> None:
    with pytest.raises(FirstlightError, match="not the name of a flag"):
        serve_config({}, {key: 1})


@given(st.dictionaries(st.text(), st.one_of(st.none(), st.booleans(), st.integers(), st.text())))
def test_any_mapping_is_merged_or_refused_and_never_holds_false(extra: dict[str, Any]) -> None:
    try:
        merged = serve_config({"port": 1}, extra)
    except FirstlightError:
        return
    assert False not in [value for value in merged.values() if isinstance(value, bool)]
    assert list(merged) == sorted(merged)
    assert merged["port"] == 1


def test_the_filter_merges_and_turns_a_fault_into_ansibles_error() -> None:
    merge = FilterModule().filters()["serve_config"]
    assert merge({"port": 30000}, {"seed": 1}) == {"port": 30000, "seed": 1}
    with pytest.raises(AnsibleFilterError, match="vllm_server_port"):
        merge({}, {"port": 1})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:30000"),
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("[::1]", "http://[::1]:30000"),
        ("2001:db8::7", "http://[2001:db8::7]:30000"),
        ("localhost", "http://localhost:30000"),
    ],
)
def test_the_local_url_of_an_address(host: str, url: str) -> None:
    assert UrlFilters().filters()["local_url"](host, 30000) == url


def test_a_mapping_of_the_users_adds_to_the_one_that_is_set_and_wins() -> None:
    ours = {"compilation-config": {"cudagraph_mode": "PIECEWISE", "level": 3}}
    given = {"compilation_config": {"level": 2, "sizes": [1]}}
    assert serve_config(ours, given) == {
        "compilation-config": {"cudagraph_mode": "PIECEWISE", "level": 2, "sizes": [1]}
    }


def test_a_dotted_key_goes_into_the_mapping_that_is_set() -> None:
    ours = {"compilation-config": {"cudagraph_mode": "PIECEWISE", "pass_config": {"a": 1}}}
    given = {"compilation-config.pass_config.b": 2, "compilation-config.cudagraph_mode": "NONE", "other.key": 1}
    assert serve_config(ours, given) == {
        "compilation-config": {"cudagraph_mode": "NONE", "pass_config": {"a": 1, "b": 2}},
        "other": {"key": 1},
    }
    assert ours["compilation-config"]["pass_config"] == {"a": 1}, "what is given stays as it was"


def test_a_flag_that_is_taken_out_takes_its_mapping_along() -> None:
    assert serve_config({"compilation-config": {"cudagraph_mode": "PIECEWISE"}}, {"compilation-config": None}) == {}


def test_false_under_a_dotted_key_is_a_value_and_no_flag() -> None:
    ours = {"compilation-config": {"cudagraph_mode": "PIECEWISE"}}
    assert serve_config(ours, {"compilation-config.use_inductor": False, "kernel-config.a.b": False}) == {
        "compilation-config": {"cudagraph_mode": "PIECEWISE", "use_inductor": False},
        "kernel-config": {"a": {"b": False}},
    }


def test_a_mapping_may_be_given_as_on_a_command_line() -> None:
    ours = {"compilation-config": {"cudagraph_mode": "PIECEWISE"}}
    given = {"compilation-config": '{"level": 3}', "chat-template": "{{ not json }}"}
    assert serve_config(ours, given) == {
        "chat-template": "{{ not json }}",
        "compilation-config": {"cudagraph_mode": "PIECEWISE", "level": 3},
    }
