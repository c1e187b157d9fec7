"""Rewards that would be the same for every answer are refused before the start."""

from __future__ import annotations

import pytest

import rlplace
from rlplace.errors import ProblemsError

# At most 16 sampled tokens in each of the turns
JOB = ("hybrid_grpo_llm", ("algorithm.max_new_tokens=16",))


def penalty(free: int, longest: int) -> str:
    kwargs = f"{{free_tokens: {free}, longest_tokens: {longest}}}"
    return f"env.rewards=[{{name: math_answer}}, {{name: length_penalty, kwargs: {kwargs}}}]"


@pytest.mark.parametrize(
    ("words", "most"),
    [
        # An agent may have several conversations
        (
            (
                penalty(90, 99),
                "env.task=agent",
                "env.kwargs={agent: tests.tiny_agents:one}",
                "env.max_turns=9",
                "algorithm.sequence_length=90",
            ),
            None,
        ),
        ((penalty(16, 32),), 16),
        ((penalty(4096, 8192), "env.max_turns=2"), 32),
        ((penalty(15, 32),), None),
        ((penalty(16, 32), "env.max_turns=2"), None),
        # Of a longer conversation, fewer tokens have room
        ((penalty(90, 99), "env.max_turns=9", "algorithm.sequence_length=90"), 90),
    ],
)
def test_a_penalty_beyond_the_longest_answers_is_refused(
    words: tuple[str, ...], most: int | None
) -> None:
    job, least = JOB
    try:
        rlplace.plan(job, (*least, *words))
        found = []
    except ProblemsError as error:
        found = [p for p in error.problems if p.code == "learns-nothing"]
    if most is None:
        assert found == []
        return
    (told,) = found
    assert told.key == "env.rewards[1].kwargs.free_tokens"
    assert f"at most {most} sampled tokens" in told.render()
