"""The tasks and their known answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import prompts
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError


def test_the_prime_prompt_is_word_for_word_the_known_one() -> None:
    assert prompts.BUILT_IN["is_prime"].prompt == (
        "Write a Python function is_prime(n) that returns True if n is prime. Answer with one code block only."
    )


def test_the_known_answers_agree_with_a_sieve() -> None:
    sieve = [False, False, *[True] * 9_998]
    for i in range(2, 100):
        sieve[i * i :: i] = [False] * len(sieve[i * i :: i])
    assert [prompts.is_prime(n) for n in range(10_000)] == sieve


@pytest.mark.parametrize("name", prompts.DEFAULT)
def test_cases_differ_from_run_to_run_and_hold_both_kinds(name: str) -> None:
    prompt = prompts.BUILT_IN[name]
    first, second = prompt.cases(random.Random(1)), prompt.cases(random.Random(2))
    assert {case.arguments for case in first} != {case.arguments for case in second}
    assert len({repr(case.expected) for case in first}) > 1
    assert {case.arguments for case in prompt.fixed} <= {case.arguments for case in first}


def test_as_many_fresh_primes_as_non_primes_are_asked() -> None:
    drawn = prompts.BUILT_IN["is_prime"].cases(random.Random(3))
    assert sum(case.expected for case in drawn) == 5 + 8
    assert len(drawn) == 31


def test_a_definition_of_ones_own_is_taken() -> None:
    (prompt,) = prompts.resolve([{"prompt": "Double it", "function": "double", "cases": [[[1], 2], [[4], 8]]}])
    assert (prompt.name, prompt.function) == ("double", "double")
    assert [case.expected for case in prompt.fixed] == [2, 8]


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "empty"),
        (["is_prim"], "no built-in prompt 'is_prim'"),
        ([7], "neither a name nor a definition"),
        (["is_prime", "is_prime"], "twice"),
        ([{"prompt": "x", "function": "f"}], "no list of known answers"),
        ([{"prompt": " ", "function": "f", "cases": [[[1], 2]]}], "'prompt' is no text"),
        ([{"prompt": "x", "function": "f(", "cases": [[[1], 2]]}], "no name of a Python function"),
        ([{"prompt": "x", "function": "__f", "cases": [[[1], 2]]}], "no name of a Python function"),
        ([{"prompt": "x", "function": "f", "cases": [[1, 2]]}], "case 0"),
        ([{"prompt": "x", "function": "f", "cases": [[[1], 2]], "answer": 1}], "unknown keys answer"),
        ([{"prompt": "x", "function": "f", "cases": [[[1], 2], [[2], 2]]}], "always says so"),
        ([{"prompt": "x", "function": "f", "name": 3, "cases": [[[1], 2], [[2], 3]]}], "'name' is no text"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_its_place(entries: list[Any], says: str) -> None:
    with pytest.raises(FirstlightError, match="prompts") as error:
        prompts.resolve(entries)
    assert says in error.value.message
    assert "Fix:" in error.value.message
