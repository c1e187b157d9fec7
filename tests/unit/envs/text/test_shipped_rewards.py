"""Shipped reward functions, by tables of answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
    ("answer", "right", "value"),
    [
        # Several right answers
        ("Paris", ["e", "Paris"], 1),
        ("e", ("e", "Paris"), 1),
        ("['e', 'Paris']", ["e", "Paris"], 0),
        ("3", [[3], 4], 1),
        # Values that are no texts
        ("true", True, 1),
        ("True", True, 1),
        ("false", True, 0),
        ("false", False, 1),
        ("5", 5, 1),
        ("5", 5.0, 1),
        ("5.0", 5.0, 1),
        ("5", 5.5, 0),
        # Several ways to write one text
        ("e\u0301te\u0301", "\u00e9t\u00e9", 1),
        ("it\u2019s", "it's", 1),
        ("\u201cyes\u201d", '"yes"', 1),
        ("New\u00a0York", "New York", 1),
        ("\u22125", "-5", 1),
        ("x\u00b2", "x2", 0),
    ],
)
def test_right_answers_in_all_their_ways(answer: str, right: Any, value: float) -> None:
    assert v.exact_match(transcript(answer, answer=right)) == value
    if value:
        assert v.contains(transcript(f"so: {answer}!", answer=right)) == value


@pytest.mark.parametrize(
    ("opened", "answer", "value"),
    [
        ("", "<think>Rome?</think>\nParis", 1),
        ("<think>\n", "Rome?</think>\nParis", 1),
        ("", "Rome?</think>\nParis", 1),
        ("", "<think>Paris?</think>\nRome", 0),
        ("<think>\n", "Paris", 0),
        ("<answer>", "Paris", 1),
        ("[THINK]", "Rome?[/THINK]Paris", 1),
        ("", "<thinking>Paris</thinking>Rome", 0),
        ("", "<think>Paris", 0),
    ],
)
def test_thoughts_are_no_answer(opened: str, answer: str, value: float) -> None:
    told = dataclasses.replace(transcript(answer, answer="Paris"), opened=opened)
    assert v.exact_match(told) == v.contains(told) == value


@pytest.mark.parametrize("right", ["", " ", ["", "a"]])
def test_an_empty_right_answer_is_in_no_answer(right: Any) -> None:
    with pytest.raises(ValueError, match="the right answer is empty"):
        v.contains(transcript("anything", answer=right))


def test_a_right_answer_that_is_no_answer() -> None:
    with pytest.raises(ValueError, match="a mapping with numbers, target, and no text"):
        v.exact_match(transcript("1", answer={"numbers": [1], "target": 2}))
    with pytest.raises(ValueError, match="the list of right answers is empty"):
        v.exact_match(transcript("1", answer=[]))


@given(
    parts=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<answer>", "</answer>", "\n", " ", "a", "<"]
        ),
        max_size=9,
    )
)
@example(parts=["<think>", "</think>", "<answer>", "</answer>"])
@example(parts=["<think>", "</think>", "a", "</think>", "<answer>", "</answer>", "a"])
@example(parts=["<think>", "</think>", "<answer>", "a", "</answer>", "</answer>"])
def test_the_form_is_that_of_the_simple_pattern(parts: list[str]) -> None:
    told = transcript("".join(parts))
    simple = r"<think>.*?</think>\s*<answer>.*?</answer>"
    assert v.matches(told) == v.matches(told, pattern=simple)


@pytest.mark.parametrize("part", ["<think></think><answer>", "</think> <answer>"])
def test_the_form_of_a_long_answer_is_found_in_time(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert v.matches(transcript("<think>" + 20_000 * part)) == 0
    assert not caplog.text


def test_a_pattern_that_takes_too_long_does_not_match(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(v, "_PATTERN_S", 0.01)
    assert v.matches(transcript("a" * 50 + "b"), pattern="(a+)+") == 0
    assert "the pattern '(a+)+' takes too long with it" in caplog.text


def test_a_tag_that_the_template_has_opened_belongs_to_the_form() -> None:
    told = transcript("hm</think>\n<answer>4</answer>")
    assert v.matches(told) == 0
    assert v.matches(dataclasses.replace(told, opened="<think>\n")) == 1
    twice = dataclasses.replace(transcript("a</think>", "b"), opened="<think>")
    assert v.matches(twice, pattern="<think>.*</think>") == 0


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
