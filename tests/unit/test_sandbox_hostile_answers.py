"""Every answer of the corpus is contained, or is judged for what it returns, and nothing comes of it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import code_block, sandbox
from ansible_collections.firstlight.vllm.plugins.module_utils.prompts import BUILT_IN
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox import Verdict
from ansible_collections.firstlight.vllm.plugins.module_utils.sandbox_process import REQUIRED, Limits

CORPUS = Path(__file__).parent.parent / "data" / "hostile_answers"
ROWS = [
    tuple(line.split("\t")) for line in (CORPUS / "expected.tsv").read_text().splitlines() if not line.startswith("#")
]
#: more CPU than any answer needs that does not loop, and little enough for dozens of those that do
LIMITS = Limits(cpu_s=1, wall_s=30.0, memory_mib=128)


def test_the_corpus_and_its_expectations_name_the_same_answers() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(path.stem for path in CORPUS.glob("*.md"))
    assert len(ROWS) >= 70


def judge(name: str) -> Verdict:
    prompt = BUILT_IN["is_prime"]
    code = code_block.extract((CORPUS / f"{name}.md").read_text(), prompt.function)
    assert code is not None
    return sandbox.run(code, prompt.function, prompt.cases(random.Random(7)), LIMITS)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """All of the corpus, a few at a time: each that loops takes its second of CPU."""
    names = [row[0] for row in ROWS]
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(judge, names), strict=True))


@pytest.mark.parametrize(("name", "verdict", "says"), ROWS, ids=[row[0] for row in ROWS])
def test_a_hostile_answer_is_contained_and_the_verdict_says_how(
    verdicts: dict[str, Verdict], name: str, verdict: str, says: str
) -> None:
    found = verdicts[name]
    assert found.name == verdict, found
    assert says in found.detail, found
    if verdict == "contained":
        assert any(says in tried for tried in found.tried), found
    if found.isolation:
        assert found.isolation["walls"] == list(REQUIRED)


def test_an_answer_without_malice_is_right_under_the_same_walls() -> None:
    for prompt, code in {
        "is_prime": "from math import isqrt\nimport typing\n\ndef is_prime(n: int) -> bool:\n"
        "    if type(n) is not int or n < 2:\n        return False\n"
        "    for i in range(2, isqrt(n) + 1):\n        if n % i == 0:\n            return False\n"
        "    return True\n\nif __name__ == '__main__':\n    print([n for n in range(50) if is_prime(n)])\n",
        "fibonacci": "from functools import lru_cache\n\n@lru_cache(maxsize=None)\ndef fibonacci(n):\n"
        "    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
        "count_vowels": "from collections import Counter\n\ndef count_vowels(text: str) -> int:\n"
        "    counts = Counter(text.lower())\n    return sum(counts[c] for c in 'aeiou')\n",
    }.items():
        cases = BUILT_IN[prompt].cases(random.Random(11))
        found = sandbox.run(code, BUILT_IN[prompt].function, cases, LIMITS)
        assert (found.name, found.right) == ("right", len(cases)), found
