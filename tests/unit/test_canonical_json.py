"""The digest that hosts have recorded: the same value for the same content, for good."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.canonical_json import digest

VALUE: dict[str, Any] = {"b": [1, 2.5, None, True], "a": {"é": "x", "z": "\u2028"}}


def test_the_value_of_a_known_document_never_changes() -> None:
    assert digest(VALUE) == "7dbdc42b2a188846f536b440fc18ad89479dc516958c24ed0fe6ac9202579653"


def test_it_is_the_sha256_of_sorted_keys_without_blanks() -> None:
    assert digest({"b": "é", "a": [1, 2]}) == hashlib.sha256(rb'{"a":[1,2],"b":"\u00e9"}').hexdigest()


@pytest.mark.parametrize(
    "other", [{**VALUE, "b": [2.5, 1, None, True]}, {**VALUE, "b": [1, 2.5, None, 1]}, {**VALUE, "c": None}]
)
def test_another_content_has_another_digest(other: dict[str, Any]) -> None:
    assert digest(other) != digest(VALUE)


def test_what_is_not_json_counts_as_its_text() -> None:
    assert digest([Path("/srv/models")]) == digest(["/srv/models"])
