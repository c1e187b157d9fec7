"""From whole groups in a channel to what each actor rank needs of an iteration: all numbers, and its own tokens.

::

    samples ──▶ rank 0: all groups ──┬─▶ rank 0: numbers of all, tokens of samples 0 3 5
                                     └─▶ rank 1: numbers of all, tokens of samples 1 2 4

Letters: S samples of the iteration that are learned, M learned tokens of these, N of one micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlplace.algo.group_advantages import Estimator, advantages
from rlplace.algo.packing import MicroBatch
from rlplace.comm.channel import Channel
from rlplace.models.packed_attention import Packed
from rlplace.tokens import Sample, by_group
from rlplace.workers.ranks import Ranks
from rlplace.workers.refusals import out_of_step

Groups = Sequence[Sequence[Sample]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What every rank knows of all samples, [S] each."""

    lengths: tuple[int, ...]  # tokens
    learned: tuple[int, ...]  # of these, sampled by the policy
    advantages: tuple[float, ...]

    @classmethod
    def of(cls, groups: Groups, estimator: Estimator) -> Numbers:
        samples = [sample for group in groups for sample in group]
        return cls(
            lengths=tuple(s.weight for s in samples),
            learned=tuple(s.learned for s in samples),
            advantages=tuple(advantages(groups, estimator).tolist()),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """What one rank has of an iteration."""

    numbers: Numbers
    own: Mapping[int, Sample]  # by number


def take_groups(channel: Channel, groups: int, owner: str) -> list[list[Sample]]:
    """Blocks until `groups` whole groups are here, in any order; returns them ascending.

    Raises ChannelTimeout, naming who waits; ChannelMisuse where a group came twice, so that one of them is not of this
    iteration.
    """
    taken: dict[int, Sequence[Sample]] = {}
    for _ in range(groups):
        group: Sequence[Sample] = channel.get()
        number = group[0].group
        if number in taken or not 0 <= number < groups:
            expected = f"each of the groups 0-{groups - 1} once"
            raise out_of_step(owner, "samples are not of this iteration", got=f"group {number}", expected=expected)
        taken[number] = group
    return list(by_group([sample for group in taken.values() for sample in group]).values())


def share_out(shares: Sequence[SampleShare] | None, ranks: Ranks) -> SampleShare:
    """Rank 0 gives every rank its own of `shares`; the others pass None. A collective."""
    if ranks.world_size == 1:
        assert shares is not None, "the only rank is rank 0"
        return shares[0]
    mine: list[SampleShare] = [None]  # type: ignore[list-item]  # filled in place
    dist.scatter_object_list(mine, None if shares is None else list(shares))
    return mine[0]


def share_of(groups: Groups, numbers: Numbers, needed: Collection[int]) -> SampleShare:
    samples = [sample for group in groups for sample in group]
    return SampleShare(numbers=numbers, own={i: samples[i] for i in needed})


class Batch:
    """A rank's samples of an iteration as tensors, and where the learned tokens of each lie among all M."""

    def __init__(self, share: SampleShare, device: torch.device) -> None:
        self._own, self._numbers, self._device = share.own, share.numbers, device
        self._first = np.cumsum([0, *share.numbers.learned]).tolist()

    @property
    def tokens(self) -> int:
        """M."""
        return int(self._first[-1])

    def packed(self, picks: MicroBatch) -> Packed:
        chosen = [self._own[i] for i in picks]
        return Packed.of([s.tokens for s in chosen], [s.mask for s in chosen], self._device)

    def lengths(self, picks: MicroBatch) -> Tensor:
        """Learned tokens of each."""
        return torch.tensor([self._numbers.learned[i] for i in picks], dtype=torch.int64, device=self._device)

    def engine_logprobs(self, picks: MicroBatch) -> Tensor:
        """[N]"""
        parts = [self._own[i].logprobs[self._own[i].mask] for i in picks]
        return torch.tensor(np.concatenate([np.zeros(0, np.float32), *parts]), device=self._device)

    def advantages(self, picks: MicroBatch) -> Tensor:
        """[N]"""
        each = torch.tensor([self._numbers.advantages[i] for i in picks], dtype=torch.float32, device=self._device)
        return each.repeat_interleave(self.lengths(picks))

    def part_of(self, values: Tensor, picks: MicroBatch) -> Tensor:
        """[N] of [M]."""
        return torch.cat([values[:0], *(values[self._first[i] : self._first[i + 1]] for i in picks)])

    def put(self, values: Tensor, picks: MicroBatch, part: Tensor) -> None:
        """[N] into [M]."""
        pieces = part.split([self._numbers.learned[i] for i in picks]) if picks else ()
        for i, piece in zip(picks, pieces, strict=True):
            values[self._first[i] : self._first[i + 1]] = piece
