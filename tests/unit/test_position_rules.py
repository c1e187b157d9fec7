"""Models that know fewer positions than prompts with answers have are refused, also where they generate nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import rlplace
from rlplace.errors import ProblemsError

# The tiny models know 256 positions
REWARD = "reward.model.max_position_embeddings=60"


@pytest.mark.parametrize(
    ("job", "words", "key"),
    [
        ("sft_tiny", ("algorithm.sequence_length=257",), "actor.model.path"),
        ("sft_tiny", ("algorithm.sequence_length=256",), None),
        ("rlhf_tiny", (REWARD,), "reward.model.path"),
        ("rlhf_tiny", (REWARD, "algorithm.max_prompt_length=48"), None),
        # The rule of engines is about the actor
        ("rlhf_tiny", ("algorithm.max_new_tokens=193",), "rollout"),
    ],
)
def test_a_model_that_knows_fewer_positions_is_refused(
    job: str, words: Sequence[str], key: str | None
) -> None:
    found = []
    try:
        rlplace.plan(job, words)
    except ProblemsError as error:
        found = [p for p in error.problems if p.code == "context-too-long"]
    if key is None:
        assert found == []
        return
    assert key in [told.key for told in found]
    assert [told.key for told in found].count("actor.model.path") == (job == "sft_tiny")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("rlhf_tiny", (REWARD,)),
        ("sft_tiny", ("algorithm.max_new_tokens=300",)),
        # Prompts leave no room for an answer
        ("rlhf_tiny", (REWARD, "algorithm.max_prompt_length=100")),
        ("rlhf_tiny", ("algorithm.max_prompt_length=300",)),
        # The longest episode is stated, and the lengths of its parts are too large
        (
            "rlhf_tiny",
            ("algorithm.max_prompt_length=300", "algorithm.sequence_length=400"),
        ),
        (
            "rlhf_tiny",
            ("algorithm.max_new_tokens=300", "algorithm.sequence_length=400"),
        ),
    ],
)
def test_the_fix_of_a_model_with_fewer_positions_can_be_pasted(
    job: str, words: Sequence[str]
) -> None:
    with pytest.raises(ProblemsError) as raised:
        rlplace.plan(job, words)
    (fix,) = {
        told.fix for told in raised.value.problems if told.code == "context-too-long"
    }
    assert fix is not None
    proposed = fix.partition(" " * 8)[0].split()
    rlplace.plan(job, [*words, *proposed])
