"""Samples, scores and returns as they are taken, and the tensors of a rank's part."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlplace.algo.packing import SampleSizes
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import ChannelMisuse, ChannelTimeout, DivergedError, RewardError
from rlplace.models.packed import Packed
from rlplace.tokens import Sample, Scores
from rlplace.workers.training.samples import (
    Batch,
    Lengths,
    SampleShard,
    sizes_of,
    take_groups,
    take_returns,
    take_scores,
)
from tests.lm_ranks import everything, made_up_samples


def channel(timeout_s: float = 5.0) -> LocalChannel:
    return LocalChannel(
        ChannelSpec(name="samples", capacity_items=16, timeout_s=timeout_s)
    )


def test_groups_are_taken_in_any_order() -> None:
    samples, groups = channel(), made_up_samples()
    for group in reversed(groups):
        samples.put(group[::-1])
    taken = take_groups(samples, 3, "actor rank 0")
    assert [[(s.group, s.sample) for s in group] for group in taken] == [
        [(g, s) for s in range(4)] for g in range(3)
    ]


@pytest.mark.parametrize("numbers", [(0, 0), (0, 3)], ids=["twice", "beyond"])
def test_a_group_of_another_iteration_is_an_error(numbers: tuple[int, int]) -> None:
    samples, groups = channel(), made_up_samples(groups=4)
    for number in numbers:
        samples.put(groups[number])
    with pytest.raises(
        ChannelMisuse, match="samples are not of this iteration"
    ) as caught:
        take_groups(samples, 3, "actor rank 0")
    assert caught.value.code == "out-of-step"


def sample(group: int, tokens: list[int], scored_from: int) -> Sample:
    one, *_ = made_up_samples(groups=1)[0]
    mask = np.arange(len(tokens)) >= scored_from
    other = {
        "logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
    }
    return dataclasses.replace(
        one, group=group, tokens=np.array(tokens, np.int32), mask=mask, **other
    )


def test_a_pass_reads_each_conversation_of_an_episode_alone() -> None:
    both = sample(0, [5, 6, 7, 8, 5, 6, 9], 2)
    both = dataclasses.replace(
        both, mask=np.isin(both.tokens, [7, 8, 9]), parts=(4, 3), sample=0
    )
    other = dataclasses.replace(sample(0, [5, 6, 3], 2), sample=1)
    lengths = Lengths.of([[both, other]], shared_prefix_cost=0.0)
    shard = SampleShard(
        lengths=lengths, samples={0: both, 1: other}, targets={}, kl_coef=0.0
    )
    packed = Batch(shard, torch.device("cpu")).packed((0, 1))
    assert packed.tokens.tolist() == [5, 6, 7, 8, 5, 6, 9, 3]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 2]
    assert packed.after == (None, 0, None, 0)
    assert packed.targets.tolist() == [7, 8, 9, 3]
    # Nothing of a second conversation is shared, though all its tokens are equal
    unanswered = dataclasses.replace(both, mask=np.isin(both.tokens, [9]), parts=(2, 5))
    sizes = Lengths.of([[unanswered] * 2], shared_prefix_cost=0.0).sizes
    assert sizes.prompts == (2, 2)


def test_what_samples_have_in_common_is_compared_and_ends_before_what_is_scored_in_any() -> (
    None
):
    groups = {
        0: (
            [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3]],
            [3, 3, 3],
            3,
        ),  # the last one has no answer
        2: ([[1, 2, 3, 4], [1, 9, 3, 4]], [3, 3], 1),  # another prompt
        5: ([[1, 2, 3, 4], [1, 2, 3, 4]], [3, 2], 2),  # one answer begins before
        6: ([[7, 8, 9]], [1], 1),
        7: ([[1, 2], [1, 2]], [2, 2], 2),  # nothing is scored
    }
    samples = [
        sample(group, tokens, first)
        for group, (texts, firsts, _) in groups.items()
        for tokens, first in zip(texts, firsts, strict=True)
    ]
    sizes = sizes_of(samples, shared_prefix_cost=0.25)
    assert sizes.prompts == tuple(
        shared for texts, _, shared in groups.values() for _ in texts
    )
    assert sizes_of(samples, shared_prefix_cost=None) == SampleSizes(
        sizes.tokens, groups=sizes.groups
    )
    everything = range(len(samples))
    packed = Packed.of(
        [s.tokens for s in samples],
        [s.mask for s in samples],
        alike=sizes.alike(everything),
    )
    apart = Packed.of([s.tokens for s in samples], [s.mask for s in samples])
    assert packed.targets.tolist() == apart.targets.tolist()
    assert packed.tokens[packed.before].tolist() == apart.tokens[apart.before].tolist()
    assert (
        packed.positions[packed.before].tolist()
        == apart.positions[apart.before].tolist()
    )


def test_a_prompt_is_shared_as_far_as_its_experts_are_equal() -> None:
    one = sample(0, [1, 2, 3, 4, 5], 4)
    routes = np.zeros((5, 2, 2), np.int8)
    other = routes.copy()
    other[2, 1, 0] = 3
    groups = [
        [dataclasses.replace(one, routes=r) for r in (routes, routes.copy())],
        [dataclasses.replace(one, group=1, routes=r) for r in (routes, other)],
        [dataclasses.replace(one, group=2, routes=r) for r in (routes, None)],
        [dataclasses.replace(one, group=3, routes=None)] * 2,
    ]
    lengths = Lengths.of(groups, shared_prefix_cost=0.0)
    assert lengths.sizes.prompts == (4, 4, 2, 2, 0, 0, 4, 4)
    samples = dict(enumerate(s for group in groups for s in group))
    shard = SampleShard(lengths=lengths, samples=samples, targets={}, kl_coef=0.0)
    batch = Batch(shard, torch.device("cpu"))
    packed = batch.packed((2, 3))
    assert packed.lengths == (2, 3, 3)
    assert packed.routes is not None
    # The place of token 2 of the second sample
    assert packed.routes[:, 1, 0].tolist() == [0, 0, 0, 0, 0, 3, 0, 0]
    assert batch.packed((2, 3), replays=False).routes is None
    assert batch.packed((6, 7)).routes is None
    mixed = batch.packed((4, 5)).routes
    assert mixed is not None
    assert mixed[:, 0, 0].tolist() == [0] * 5 + [-1] * 5


@pytest.mark.parametrize(
    ("other", "image", "shared"),
    [([1, 2, 3, 4], b"a", 3), ([1, 2, 3, 4], b"b", 0), ([1, 9, 3, 4], b"a", 0)],
)
def test_images_are_shared_with_the_whole_prompt_or_not_at_all(
    other: list[int], image: bytes, shared: int
) -> None:
    samples = [
        dataclasses.replace(sample(0, tokens, 3), images=(file,))
        for tokens, file in (([1, 2, 3, 4], b"a"), (other, image))
    ]
    assert sizes_of(samples, shared_prefix_cost=0.25).prompts == (shared, shared)


# ── scores ────────────────────────────────────────────────────────────────────────────────────────────────────────────


SCORERS = ("reference", "reward.math")


def score_of(scorer: str, sample: Sample, **other: object) -> Scores:
    size = 1 if scorer.startswith("reward") else sample.response_tokens
    facts = {
        "group": sample.group,
        "sample": sample.sample,
        "values": np.full(size, sample.sample, np.float32),
    }
    return Scores(**{**facts, **other})


def channels() -> dict[str, LocalChannel]:
    return {
        f"scores.{scorer}": LocalChannel(
            ChannelSpec(name=f"scores.{scorer}", capacity_items=64)
        )
        for scorer in SCORERS
    }


def gathered(
    made: dict[str, LocalChannel], scorers: tuple[str, ...] = SCORERS
) -> dict[str, list[np.ndarray]]:
    return {
        s: take_scores(
            made[f"scores.{s}"], s, everything(), "actor rank 0", timeout_s=0.01
        )
        for s in scorers
    }


def test_scores_come_in_any_order_and_pieces() -> None:
    made, samples = channels(), everything()
    for scorer in SCORERS:
        for start in (6, 9, 0, 3):
            made[f"scores.{scorer}"].put(
                tuple(score_of(scorer, s) for s in reversed(samples[start : start + 3]))
            )
    found = gathered(made)
    assert list(found) == list(SCORERS)
    for scorer in SCORERS:
        for sample, values in zip(samples, found[scorer], strict=True):
            assert values.tolist() == score_of(scorer, sample).values.tolist()


def test_missing_scores_are_named() -> None:
    made, samples = channels(), everything()
    made["scores.reference"].put(tuple(score_of("reference", s) for s in samples[:-2]))
    with pytest.raises(
        ChannelTimeout, match="for reference to score 2 of 12 samples"
    ) as caught:
        gathered(made)
    assert caught.value.code == "scores-missing"
    assert "no scores of 2/2, 2/3 " in str(caught.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_score_that_is_not_finite_names_its_component(wrong: float) -> None:
    made, samples = channels(), everything()
    made["scores.reward.math"].put(
        (score_of("reward.math", samples[5], values=np.array([wrong], np.float32)),)
    )
    with pytest.raises(RewardError, match=r"reward\.math") as caught:
        gathered(made, ("reward.math",))
    assert caught.value.code == "score-not-finite"


@pytest.mark.parametrize(
    ("scores", "what"),
    [
        (
            lambda s: (score_of("reference", s), score_of("reference", s)),
            "reference scored what it was not asked for",
        ),
        (
            lambda s: (score_of("reference", s, group=9),),
            "reference scored what it was not asked for",
        ),
        (
            lambda s: (score_of("reference", s, values=np.zeros(99, np.float32)),),
            "another number of scores",
        ),
    ],
    ids=["twice", "unknown", "length"],
)
def test_scores_of_something_else_are_refused(scores: object, what: str) -> None:
    made, samples = channels(), everything()
    made["scores.reference"].put(scores(samples[0]))
    with pytest.raises(ChannelMisuse, match=what) as caught:
        gathered(made, ("reference",))
    assert caught.value.code == "out-of-step"


# ── returns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_late_returns_are_a_timeout_of_their_channel() -> None:
    returns, samples = channel(timeout_s=0.01), everything()
    returns.put(tuple(score_of("actor", s) for s in samples[:-2]))
    with pytest.raises(ChannelTimeout) as caught:
        take_returns(returns, samples, "critic rank 0")
    assert caught.value.code != "scores-missing"


def test_what_is_to_be_skipped_is_nan_in_its_whole_sample() -> None:
    made, samples = channels(), everything()
    for number, sample in enumerate(samples):
        values = np.array([np.inf if number == 5 else 1.0], np.float32)
        made["scores.reward.math"].put(
            (score_of("reward.math", sample, values=values),)
        )
    taken = take_scores(
        made["scores.reward.math"], "reward.math", samples, "actor rank 0", skip=True
    )
    assert [
        number for number, values in enumerate(taken) if np.isnan(values).all()
    ] == [5]
    returns = channel()
    for number, sample in enumerate(samples):
        values = np.zeros(sample.response_tokens, np.float32)
        values[-1:] = -np.inf if number == 3 else 0.0
        returns.put((score_of("actor", sample, values=values),))
    taken = take_returns(returns, samples, "critic rank 0", skip=True)
    assert [
        number
        for number, values in enumerate(taken)
        if len(values) and np.isnan(values).all()
    ] == [3]


def test_returns_that_are_not_finite_are_named_with_their_reader() -> None:
    returns, samples = channel(), everything()
    returns.put(
        (
            score_of(
                "actor",
                samples[0],
                values=np.full(samples[0].response_tokens, np.inf, np.float32),
            ),
        )
    )
    with pytest.raises(
        DivergedError,
        match=r"critic rank 0: the returns of sample .*(?s:.)*reward_clip",
    ) as caught:
        take_returns(returns, samples, "critic rank 0")
    assert caught.value.code == "returns-not-finite"
