"""The catalogue is complete, consistent, and speaks of variables that exist."""

from __future__ import annotations

import csv
import re

import pytest
import yaml
from ansible_collections.firstlight.vllm.plugins.module_utils import failure_remedies
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_catalogue import BY_ID, KINDS, NONE, UNKNOWN
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_kinds import ANY_OTHER, AREAS, Kind
from support_failure_logs import FAILURES
from support_failures_doc import PAGE, ROOT, page

PREFIXES = ("vllm_server_", "vllm_install_", "model_", "drafter_", "smoke_", "sglang_stop_", "preflight_")
NO_VARIABLES = {"model_type", "drafter_target"}


def _table() -> list[dict[str, str]]:
    with (FAILURES / "kinds.tsv").open(encoding="utf-8") as table:
        return list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_every_known_kind_is_there_once_and_in_its_area() -> None:
    assert {row["id"]: row["area"] for row in _table()} == {kind.id: kind.area for kind in KINDS}
    assert len(BY_ID) == len(KINDS)
    assert not {NONE, UNKNOWN} & set(BY_ID)
    assert {kind.area for kind in KINDS} == set(AREAS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_a_kind_says_cause_and_remedy_in_whole_sentences(kind: Kind) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind.id)
    for text in (kind.cause, kind.remedy):
        assert text.endswith(".")
        assert text == " ".join(text.split())
    assert kind.matchers or kind.id == "drafter-low-acceptance"  # that one is computed from the metrics


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_matchers_are_lower_case_words_and_patterns_that_compile(kind: Kind) -> None:
    for matcher in kind.matchers:
        for word in (matcher.text, *matcher.absent, *matcher.after):
            assert word == word.lower()
            assert len(word) >= 3
        for pattern in (matcher.pattern, matcher.near, matcher.apart, matcher.never):
            re.compile(pattern)


def test_kinds_yield_to_kinds_that_exist_and_never_in_a_circle() -> None:
    def reaches(start: str, kind_id: str, seen: frozenset[str]) -> bool:
        yields = [other for other in BY_ID[kind_id].yields_to if other != ANY_OTHER and other not in seen]
        return start in yields or any(reaches(start, other, seen | {other}) for other in yields)

    for kind in KINDS:
        assert set(kind.yields_to) <= {*BY_ID, ANY_OTHER}
        assert not reaches(kind.id, kind.id, frozenset()), kind.id


def test_a_concrete_remedy_belongs_to_a_kind() -> None:
    assert set(failure_remedies._CONCRETE) <= set(BY_ID)


def _variables() -> set[str]:
    found: set[str] = set()
    for defaults in (ROOT / "roles").glob("*/defaults/main.yml"):
        found |= set(yaml.safe_load(defaults.read_text(encoding="utf-8")) or {})
    return found


def test_remedies_name_variables_that_exist() -> None:
    variables = _variables()
    source = (ROOT / "plugins" / "module_utils" / "failure_remedies.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[a-z_]+\b", " ".join([*(kind.remedy for kind in KINDS), source])))
    named = {name for name in named if name.startswith(PREFIXES) and not name.endswith("_")} - NO_VARIABLES
    assert len(named) > 20
    assert named <= variables, named - variables


def test_the_page_of_failures_is_the_catalogue() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run tests/unit/support_failures_doc.py"
