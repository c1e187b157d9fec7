"""Episodes in tokens: what was sampled is what is learned, and only that."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.tokens import Completion, Episode, Finish, Sample, by_group


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def answer(
    *tokens: int, turn: int = 0, version: int = 3, finish: Finish = "stop"
) -> Completion:
    return Completion(
        group=5,
        sample=1,
        turn=turn,
        tokens=ids(*tokens),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish=finish,
        env_rank=0,
        iteration=0,
        held_out=False,
    )


def test_what_the_policy_sampled_is_masked_in_and_nothing_else() -> None:
    episode = Episode(group=5, sample=1, prompt=ids(10, 11))
    episode.answered(answer(20, 21))
    episode.asked(0, ids(30))
    assert episode.context.tolist() == [10, 11, 20, 21, 30]
    episode.answered(answer(40, turn=1, version=4))
    sample = episode.finish({"right": 1.0, "form": 0.5}, {"right": 1.0, "form": 0.2})
    assert (sample.tokens.dtype, sample.parts) == (np.int32, ())
    assert sample.tokens.tolist() == [10, 11, 20, 21, 30, 40]
    assert sample.mask.tolist() == [False, False, True, True, False, True]
    assert sample.logprobs.tolist() == [0, 0, -1, -2, 0, -1]
    assert sample.versions.tolist() == [-1, -1, 3, 3, -1, 4]
    assert sample.reward == pytest.approx(1.1)
    assert (sample.weight, sample.response_tokens, sample.turns, sample.truncated) == (
        6,
        3,
        2,
        False,
    )


def test_an_answer_cut_by_length_is_truncated_and_an_episode_without_one_has_nothing_to_learn() -> (
    None
):
    episode = Episode(group=5, sample=1, prompt=ids(10))
    episode.answered(answer(20, 21, finish="length"))
    assert episode.finish({}, {}).truncated
    sample = Episode(group=0, sample=0, prompt=ids(10, 11)).finish(
        {"right": 0.0}, {"right": 1.0}
    )
    assert (sample.response_tokens, sample.turns, sample.truncated) == (0, 0, False)


def test_a_reward_that_is_infinite_is_refused_and_one_that_is_nan_is_poison() -> None:
    episode = Episode(group=5, sample=1, prompt=ids(10))
    episode.answered(answer(20))
    with pytest.raises(ValueError, match="sample 5/1: reward is inf"):
        episode.finish({"right": float("inf")}, {"right": 1.0})
    assert [
        episode.finish({"right": r}, {"right": 1.0}).poisoned
        for r in (float("nan"), 1.0)
    ] == [True, False]
    episode.asked(0, ids(30))
    infinite = np.array([-np.inf], np.float32)
    episode.answered(dataclasses.replace(answer(21), logprobs=infinite))
    assert episode.finish({"right": 1.0}, {"right": 1.0}).poisoned, (
        "by a log-probability"
    )


def test_conversations_of_an_episode_follow_one_another_and_each_answer_is_learned_once() -> (
    None
):
    episode = Episode(group=5, sample=1, prompt=ids(10))
    episode.answered(answer(20, 21))
    episode.asked(0, ids(30))
    episode.answered(answer(22, turn=1))
    # Another continuation of the first answer: its tokens are there again, and are not learned again
    assert episode.after(0, ids(31, 32))[1] == 5 + 3 + 2
    episode.asked(0, ids(31, 32))
    assert episode.context.tolist() == [10, 20, 21, 31, 32]
    episode.answered(answer(23, turn=2))
    # A conversation of its own, and the first one again
    episode.asked(None, ids(11))
    assert episode.context.tolist() == [11]
    episode.answered(answer(24, turn=3))
    episode.asked(1, ids(33))
    assert episode.context.tolist() == [10, 20, 21, 30, 22, 33]
    episode.answered(answer(25, turn=4))
    sample = episode.finish({}, {})
    whole = [[10, 20, 21, 30, 22, 33, 25], [10, 20, 21, 31, 32, 23], [11, 24]]
    assert sample.tokens.tolist() == [token for part in whole for token in part]
    assert sample.parts == (7, 6, 2)
    assert sample.tokens[sample.mask].tolist() == [20, 21, 22, 25, 23, 24]
    assert (sample.turns, sample.prompt_tokens) == (5, 1)
    with pytest.raises(ValueError, match="conversations of"):
        dataclasses.replace(sample, parts=(7, 6))


def routed(completion: Completion, read: int, mark: int) -> Completion:
    """With routes of `read` tokens: one router, one expert of a token, `mark` plus the place of the token."""
    routes = (mark + np.arange(read, dtype=np.int8)).reshape(read, 1, 1)
    return dataclasses.replace(completion, routes=routes)


def test_the_experts_of_a_token_are_those_of_the_pass_that_sampled_it() -> None:
    episode = Episode(group=5, sample=1, prompt=ids(10, 11))
    episode.answered(routed(answer(20, 21), 3, 0))
    episode.asked(0, ids(30))
    # The second answer has read the first one again, in another batch
    episode.answered(routed(answer(40, 41, turn=1), 6, 100))
    # A conversation of its own, which has no record
    episode.asked(None, ids(12))
    episode.answered(answer(50, turn=2))
    sample = episode.finish({}, {})
    assert sample.routes is not None
    assert sample.routes.dtype == np.int8
    # Nothing read the last token of a conversation
    known = [0, 1, 2, 103, 104, 105, -1]
    assert sample.routes[:, 0, 0].tolist() == [*known, -1, -1]
    assert sample.without_routes().routes is None
    with pytest.raises(ValueError, match="routes of 8 tokens are not 9"):
        dataclasses.replace(sample, routes=sample.routes[1:])


def test_routes_of_another_number_of_tokens_are_refused() -> None:
    episode = Episode(group=5, sample=1, prompt=ids(10, 11))
    episode.answered(routed(answer(20, 21), 4, 0))
    with pytest.raises(ValueError, match="routes of 4 tokens"):
        episode.finish({}, {})


def test_lengths_must_agree() -> None:
    sample = Episode(group=0, sample=0, prompt=ids(10, 11)).finish({}, {})
    with pytest.raises(ValueError, match="lengths differ"):
        dataclasses.replace(sample, mask=np.array([True]))


def test_groups_are_put_together_in_order() -> None:
    def sample(group: int, number: int) -> Sample:
        return Episode(group=group, sample=number, prompt=ids(1)).finish({}, {})

    groups = by_group([sample(2, 1), sample(0, 0), sample(2, 0)])
    assert {
        group: [s.sample for s in samples] for group, samples in groups.items()
    } == {0: [0], 2: [0, 1]}
    assert list(groups) == [0, 2]
