"""The parts of the learner that need no model: whose samples are whose, and how fast to go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.errors import ChannelMisuse, ChannelTimeout
from rlplace.workers.training.samples import Batch, Lengths, Targets, shard_of, take_groups
from tests.lm_ranks import made_up_samples


def channel(timeout_s: float = 5.0) -> LocalChannel:
    return LocalChannel(ChannelSpec(name="samples", capacity_items=16, timeout_s=timeout_s))


def test_groups_are_taken_in_any_order() -> None:
    samples, groups = channel(), made_up_samples()
    for group in reversed(groups):
        samples.put(group[::-1])
    taken = take_groups(samples, 3, "actor rank 0")
    assert [[(s.group, s.sample) for s in group] for group in taken] == [[(g, s) for s in range(4)] for g in range(3)]


@pytest.mark.parametrize("numbers", [(0, 0), (0, 3)], ids=["twice", "beyond"])
def test_a_group_of_another_iteration_is_an_error(numbers: tuple[int, int]) -> None:
    samples, groups = channel(), made_up_samples(groups=4)
    for number in numbers:
        samples.put(groups[number])
    with pytest.raises(ChannelMisuse, match="samples are not of this iteration") as caught:
        take_groups(samples, 3, "actor rank 0")
    assert caught.value.code == "out-of-step"


def test_waiting_for_groups_has_a_deadline() -> None:
    samples = channel(timeout_s=0.01)
    samples.put(made_up_samples()[0])
    with pytest.raises(ChannelTimeout):
        take_groups(samples, 2, "actor rank 0")


def test_a_batch_gives_each_sample_its_own() -> None:
    groups = made_up_samples()
    everything = [sample for group in groups for sample in group]
    targets = [Targets(advantages=np.full(s.response_tokens, i, np.float32)) for i, s in enumerate(everything)]
    shard = shard_of(groups, Lengths.of(groups), {1, 4, 7}, targets)
    batch = Batch(shard, torch.device("cpu"))
    picks = (1, 7)
    chosen = [everything[i] for i in picks]
    packed = batch.packed(picks)
    assert packed.tokens.tolist() == np.concatenate([s.tokens for s in chosen]).tolist()
    assert packed.targets.tolist() == np.concatenate([s.tokens[s.mask] for s in chosen]).tolist()
    assert batch.lengths(picks).tolist() == [s.response_tokens for s in chosen]
    expected = torch.tensor(np.concatenate([s.logprobs[s.mask] for s in chosen]))
    assert torch.equal(batch.engine_logprobs(picks), expected)
    assert batch.target("advantages", picks).tolist() == [
        float(i) for i in picks for _ in range(everything[i].response_tokens)
    ]
    assert batch.old(picks) is None
    everywhere = torch.zeros(batch.tokens)
    batch.put(everywhere, picks, expected)
    assert torch.equal(batch.part_of(everywhere, picks), expected)
    assert torch.count_nonzero(everywhere) == len(expected)


def test_a_batch_of_nothing() -> None:
    groups = made_up_samples()
    batch = Batch(shard_of(groups, Lengths.of(groups), set()), torch.device("cpu"))
    assert batch.packed(()).lengths == (1,)
    for empty in (
        batch.lengths(()),
        batch.engine_logprobs(()),
        batch.target("advantages", ()),
        batch.part_of(torch.ones(5), ()),
    ):
        assert empty.shape == (0,)
