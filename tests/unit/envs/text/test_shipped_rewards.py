"""Shipped reward functions, by tables of answers."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.envs.text import Transcript
from rlplace.envs.text import rewards as v


def transcript(*answers: str, tokens: int = 0, **facts: Any) -> Transcript:
    return Transcript(
        prompt="?",
        answers=answers,
        replies=(),
        facts=facts,
        tokens=tokens,
        truncated=False,
    )


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


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 0), (10, 0), (15, -0.5), (20, -1), (99, -1)]
)
def test_length_penalty(tokens: int, value: float) -> None:
    assert (
        v.length_penalty(
            transcript("x", tokens=tokens), free_tokens=10, longest_tokens=20
        )
        == value
    )


def test_limits_in_the_wrong_order_and_a_fact_that_is_missing() -> None:
    with pytest.raises(ValueError, match="longest_tokens must be above"):
        v.length_penalty(transcript("x"), free_tokens=20, longest_tokens=10)
    assert v.score(transcript("x", score=0.25)) == 0.25
    with pytest.raises(
        ValueError, match="the task gives no fact 'score'; its facts: answer"
    ):
        v.score(transcript("x", answer="4"))
