"""Short coding tasks whose answers can be checked by running them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import FirstlightError
from .sandbox import Case

IS_PRIME = "Write a Python function is_prime(n) that returns True if n is prime. Answer with one code block only."
FIBONACCI = (
    "Write a Python function fibonacci(n) that returns the n-th Fibonacci number, with fibonacci(0) == 0 and "
    "fibonacci(1) == 1. Answer with one code block only."
)
COUNT_VOWELS = (
    "Write a Python function count_vowels(text) that returns how many of the letters a, e, i, o and u the string "
    "text holds, in upper or lower case. Answer with one code block only."
)

#: Known primes and non-primes that catch the usual slips: bounds, squares, Carmichael numbers.
_PRIMES = (2, 3, 5, 97, 7919)
_NON_PRIMES = (-7, 0, 1, 4, 9, 25, 91, 561, 1105, 7917)
#: Small enough that even counting up to n takes milliseconds.
_LARGEST = 20_000


@dataclass(frozen=True)
class Prompt:
    """One task.

    Attributes:
        name: how reports call it.
        prompt: the user's message, word for word.
        function: the function that the answer must define.
        fixed: known answers that are always asked.
        fresh: makes further ones from a random source, so that no answer can know them beforehand.
    """

    name: str
    prompt: str
    function: str
    fixed: tuple[Case, ...]
    fresh: Callable[[random.Random], Sequence[Case]] | None = None

    def cases(self, source: random.Random) -> list[Case]:
        """Draw the cases for one run, in random order."""
        drawn = [*self.fixed, *(self.fresh(source) if self.fresh else ())]
        source.shuffle(drawn)
        return drawn


def is_prime(number: int) -> bool:
    """Say whether a number is prime; the known answers come from here."""
    if number < 2:  # noqa: PLR2004
        return False
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _prime_cases(source: random.Random) -> list[Case]:
    wanted = {True: 8, False: 8}
    cases: list[Case] = []
    while any(wanted.values()):
        number = source.randrange(2, _LARGEST)
        prime = is_prime(number)
        if wanted[prime]:
            wanted[prime] -= 1
            cases.append(Case((number,), prime))
    return cases


def _fibonacci(index: int) -> int:
    first, second = 0, 1
    for _ in range(index):
        first, second = second, first + second
    return first


def _fibonacci_cases(source: random.Random) -> list[Case]:
    # below 24, so that the plain recursion ends in time
    return [Case((index,), _fibonacci(index)) for index in source.sample(range(2, 24), 6)]


def _vowel_cases(source: random.Random) -> list[Case]:
    texts = ["".join(source.choices("aeiouAEIOUbcdxyzXYZ .,-7", k=source.randrange(1, 40))) for _ in range(8)]
    return [Case((text,), sum(letter in "aeiou" for letter in text.lower())) for text in texts]


BUILT_IN: dict[str, Prompt] = {
    prompt.name: prompt
    for prompt in (
        Prompt(
            "is_prime",
            IS_PRIME,
            "is_prime",
            tuple(Case((number,), True) for number in _PRIMES)
            + tuple(Case((number,), False) for number in _NON_PRIMES),
            _prime_cases,
        ),
        Prompt(
            "fibonacci",
            FIBONACCI,
            "fibonacci",
            tuple(Case((index,), _fibonacci(index)) for index in (0, 1, 2, 10)),
            _fibonacci_cases,
        ),
        Prompt(
            "count_vowels",
            COUNT_VOWELS,
            "count_vowels",
            (Case(("",), 0), Case(("AEIOU aeiou",), 10), Case(("rhythm",), 0)),
            _vowel_cases,
        ),
    )
}
DEFAULT = tuple(BUILT_IN)


def resolve(entries: Sequence[Any]) -> list[Prompt]:
    """Turn a variable into prompts.

    Args:
        entries: names of built-in prompts, or mappings with ``prompt``, ``function``, ``cases`` (a list of
            ``[[arguments...], expected]``) and, if wished, ``name``.

    Raises:
        FirstlightError: an entry cannot be used (kind ``prompts-invalid``).
    """
    if not entries:
        raise _invalid("the list is empty", "prompts")
    prompts = [_resolve_one(entry, f"prompts[{number}]") for number, entry in enumerate(entries)]
    names = [prompt.name for prompt in prompts]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise _invalid(f"the name {double[0]!r} stands there twice", "prompts")
    return prompts


def _resolve_one(entry: Any, where: str) -> Prompt:
    if isinstance(entry, str):
        if entry not in BUILT_IN:
            raise _invalid(f"there is no built-in prompt {entry!r}", where)
        return BUILT_IN[entry]
    if not isinstance(entry, Mapping):
        raise _invalid(f"{entry!r} is neither a name nor a definition", where)
    unknown = sorted(str(key) for key in set(entry) - {"name", "prompt", "function", "cases"})
    if unknown:
        raise _invalid(f"unknown keys {', '.join(unknown)}", where)
    text, function = entry.get("prompt"), entry.get("function")
    if not isinstance(text, str) or not text.strip():
        raise _invalid("'prompt' is no text", where)
    if not isinstance(function, str) or not function.isidentifier() or function.startswith("_"):
        raise _invalid(f"'function' is {function!r}, no name of a Python function", where)
    name = entry.get("name", function)
    if not isinstance(name, str) or not name:
        raise _invalid("'name' is no text", where)
    return Prompt(name, text, function, _cases(entry.get("cases"), where))


def _cases(cases: Any, where: str) -> tuple[Case, ...]:
    if not isinstance(cases, list) or not cases:
        raise _invalid("'cases' is no list of known answers", where)
    for number, case in enumerate(cases):
        if not isinstance(case, list) or len(case) != 2 or not isinstance(case[0], list):  # noqa: PLR2004
            raise _invalid(f"case {number} is {case!r}, not [[arguments], expected]", where)
    found = tuple(Case(tuple(case[0]), case[1]) for case in cases)
    if all(repr(case.expected) == repr(found[0].expected) for case in found):
        raise _invalid("all cases expect the same, so an answer that always says so would pass", where)
    return found


def _invalid(problem: str, where: str) -> FirstlightError:
    return FirstlightError(
        f"{problem}.",
        where=where,
        fix=f"give names out of {', '.join(DEFAULT)}, or definitions such as "
        "{prompt: 'Write a Python function double(n) ...', function: double, cases: [[[1], 2], [[5], 10]]}.",
        kind="prompts-invalid",
    )
