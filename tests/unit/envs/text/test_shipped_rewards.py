"""Shipped reward functions, by tables of answers."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlplace.envs.text import Transcript
from rlplace.envs.text import rewards as v


def transcript(*answers: str, tokens: int = 0, **facts: Any) -> Transcript:
    return Transcript(prompt="?", answers=answers, replies=(), facts=facts, tokens=tokens, truncated=False)


@pytest.mark.parametrize(
    ("answer", "right", "value"),
    [
        ("4", "4", 1),
        ("2 + 2 = 4", "4", 1),
        ("no idea", "4", 0),
        ("the answer is -4", "-4", 1),
        ("1,234.50", "1234.5", 1),
        (".5", "0.5", 1),
        ("3/4", "0.75", 1),
        ("4/0", "4", 0),
        (r"\boxed{7} or \boxed{8}", "8", 1),
        (r"\boxed{\frac{3}{4}}", "3/4", 1),
        (r"\boxed{x^{2} + 1}", "x^{2}+1", 1),
        (r"\boxed{x}", "y", 0),
        (r"4 \boxed{5", "5", 1),
        ("42", r"\boxed{42}", 1),
    ],
)
def test_math_answer(answer: str, right: str, value: float) -> None:
    assert v.math_answer(transcript(answer, answer=right)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", "1"), ("$1,000$", "1000"), ("1/8", "0.125"), ("1/0", None), ("nan", None), ("inf", None), ("two", None)],
)
def test_number(text: str, value: str | None) -> None:
    assert v.number(text) == (None if value is None else Decimal(value))


@given(
    answer=st.text() | st.text("0123456789.,/eE+-\\{}boxedfrac $", max_size=60),
    right=st.sampled_from(["4", "x", "1/3"]),
)
@example(answer=r"\boxed{1e999999/1}, \boxed{1e999999/0.1}", right="4")
@example(answer="1e999999999999999999999", right="4")
@example(answer="9" * 10_000, right="4")
def test_whatever_a_policy_says_it_gets_a_number(answer: str, right: str) -> None:
    told = transcript(answer, answer=right)
    for function in (v.math_answer, v.exact_match, v.contains, v.matches):
        assert function(told) in (0, 1)


def test_exact_match_and_contains() -> None:
    assert v.exact_match(transcript(" Yes\n", answer="Yes")) == 1
    assert v.exact_match(transcript("yes", answer="Yes")) == 0
    assert v.exact_match(transcript("yes", answer="Yes"), ignore_case=True) == 1
    assert v.exact_match(transcript("Yes", "No", answer="Yes")) == 0
    assert v.contains(transcript("I say Yes!", answer="Yes")) == 1
    assert v.contains(transcript("I say no!", answer="Yes")) == 0


def test_a_form_is_asked_of_every_answer() -> None:
    good = "<think>hm\nhm</think>\n<answer>4</answer>"
    assert v.matches(transcript(good)) == 1
    assert v.matches(transcript(good, "4")) == 0
    assert v.matches(transcript(f"{good} and more")) == 0
    assert v.matches(transcript("12", "7"), pattern=r"\d+") == 1


@pytest.mark.parametrize(("tokens", "value"), [(0, 0), (10, 0), (15, -0.5), (20, -1), (99, -1)])
def test_length_penalty(tokens: int, value: float) -> None:
    assert v.length_penalty(transcript("x", tokens=tokens), free_tokens=10, longest_tokens=20) == value


def test_limits_in_the_wrong_order_and_a_fact_that_is_missing() -> None:
    with pytest.raises(ValueError, match="longest_tokens must be above"):
        v.length_penalty(transcript("x"), free_tokens=20, longest_tokens=10)
    assert v.score(transcript("x", score=0.25)) == 0.25
    with pytest.raises(ValueError, match="the task gives no fact 'score'; its facts: answer"):
        v.score(transcript("x", answer="4"))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```\nbetter\n```\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_last_code_block_counts(answer: str, code: str) -> None:
    assert v.code_block(answer) == code
