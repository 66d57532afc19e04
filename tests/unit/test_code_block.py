"""The Python code in a model's answer."""

from __future__ import annotations

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils import code_block
from ansible_collections.firstlight.vllm.plugins.module_utils.code_block import extract, strip_thinking
from hypothesis import given
from hypothesis import strategies as st

CODE = "def is_prime(n):\n    if n < 2:\n        return False\n\n    return all(n % i for i in range(2, n))"


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{CODE}\n```",
        f"```py\n{CODE}\n```",
        f"```Python3 title=x\n{CODE}\n```",
        f"```\n{CODE}\n```",
        f"~~~python\n{CODE}\n~~~",
        f"````python\n{CODE}\n````",
        f"Sure!\n\n```python\n{CODE}\n```\n\nIt tries all divisors.",
        f"```bash\npip install x\n```\n```python\n{CODE}\n```",
        f"```python\n{CODE}\n```\n```python\nprint(is_prime(7))\n```",
        f"<think>\nMaybe ```python\ndef is_prime(n): return 1\n```\n</think>\n\n```python\n{CODE}\n```",
        f"I think so.\n</think>\n```python\n{CODE}\n```",
        f"```python\n{CODE}\n```\r\n".replace("\n", "\r\n"),
        f"```python\n{CODE}\n",
        f"```python\n{CODE}",
        CODE,
        f"Here it is:\n\n{CODE}\n\nThat is all.",
    ],
)
def test_the_code_is_found_however_it_is_dressed(answer: str) -> None:
    found = extract(answer, "is_prime")
    assert found is not None
    assert found.rstrip("\n") == CODE


def test_the_last_complete_block_wins_since_a_model_corrects_itself_below() -> None:
    answer = f"```python\ndef is_prime(n): return 1\n```\nWait, that is wrong:\n```python\n{CODE}\n```"
    assert extract(answer, "is_prime") == CODE


def test_a_complete_block_wins_over_a_cut_one_below() -> None:
    answer = f"```python\n{CODE}\n```\nOr shorter:\n```python\ndef is_prime(n): return n"
    assert extract(answer, "is_prime") == CODE


def test_bare_code_keeps_its_imports_and_decorators() -> None:
    code = f"import math\nfrom functools import cache\n\n@cache\n{CODE}"
    assert extract(f"Here:\n{code}\nDone.", "is_prime") == code


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "7 is prime.",
        "```python\n```",
        "```python\ndef is_prime_number(n): pass\n```",
        "```javascript\ndef is_prime(n) {}\n```",
        "<think>\n```python\ndef is_prime(n): return True\n```\nhmm, wait",
        "the def is_prime(n) thing",
    ],
)
def test_an_answer_without_the_function_has_no_code(answer: str) -> None:
    assert extract(answer, "is_prime") is None


def test_a_tilde_does_not_close_a_backtick_fence() -> None:
    assert code_block.fences("```\na\n~~~\nb\n```") == [code_block.Fence("", "a\n~~~\nb", closed=True)]


def test_thinking_that_never_ended_is_no_answer() -> None:
    assert strip_thinking("before<think>cut") == "before"


@given(st.text(max_size=500), st.sampled_from(["f", "is_prime"]))
def test_any_text_gives_code_out_of_it_or_none(text: str, name: str) -> None:
    found = extract(text, name)
    if found is not None:
        assert f"def {name}" in found.replace("\t", " ") or name in found
        for line in found.splitlines():
            assert line in text.replace("\r", "\n")


_LINES = st.lists(
    st.text(st.characters(blacklist_characters="`~\n\r", blacklist_categories=("Cs",)), max_size=20), max_size=8
)


@given(_LINES, st.sampled_from(["```", "````", "~~~"]), st.sampled_from(["", "python", "py"]), st.text(max_size=40))
def test_a_block_is_given_back_to_the_letter(lines: list[str], fence: str, language: str, prose: str) -> None:
    body = "\n".join(["def f(x):", *lines])
    prose = "".join(letter for letter in prose if letter not in "`~<>\r")
    assert extract(f"{prose}\n{fence}{language}\n{body}\n{fence}\n{prose}", "f") == body


def test_a_long_answer_takes_no_long_time() -> None:
    assert extract("`" * 200_000 + "\n" + "``` \n" * 50_000, "f") is None
