"""From whole groups in a channel to what each actor rank needs of an iteration: all lengths, and its own tokens.

::

    samples ──▶ rank 0: all groups ──┬─▶ rank 0: lengths of all, tokens and marks of samples 0 3 5
                                     └─▶ rank 1: lengths of all, tokens and marks of samples 1 2 4

Letters: S samples of the iteration that are learned, M learned tokens of these, N of one sample or micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlplace.algo.packing import MicroBatch
from rlplace.comm.channel import Channel
from rlplace.models.packed_attention import Packed
from rlplace.tokens import Sample, by_group
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.worker import out_of_step

Groups = Sequence[Sequence[Sample]]
Share = TypeVar("Share")
TokenArray = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What every rank knows of all samples, [S] each."""

    lengths: tuple[int, ...]  # tokens
    learned: tuple[int, ...]  # of these, sampled by the policy

    @classmethod
    def of(cls, groups: Groups) -> Numbers:
        samples = [sample for group in groups for sample in group]
        return cls(lengths=tuple(s.weight for s in samples), learned=tuple(s.learned for s in samples))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is known of the learned tokens of one sample, [N] float32 each."""

    advantages: TokenArray
    old: TokenArray | None = None  # log-probabilities before the first step, by the trainer
    reference: TokenArray | None = None  # the reference's
    values: TokenArray | None = None  # of a head on the actor's trunk, before the first step
    returns: TokenArray | None = None  # what these are to become


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleShare:
    """What one rank has of an iteration."""

    numbers: Numbers
    own: Mapping[int, Sample]  # by number
    marks: Mapping[int, Marks] = dataclasses.field(default_factory=dict)  # of the same samples, once they are known
    kl_coef: float = 0.0  # of the divergence from the reference
    inferred: bool = False  # the marks have old log-probabilities


def take_groups(channel: Channel, groups: int, owner: str, *, part: int | None = None) -> list[list[Sample]]:
    """Blocks until all `groups` of an iteration are here whole, in any order, or a `part` of them; returns them
    ascending.

    Raises ChannelTimeout, naming who waits; ChannelMisuse where a group came twice, so that one of them is not of this
    iteration.
    """
    taken: dict[int, Sequence[Sample]] = {}
    for _ in range(groups if part is None else part):
        group: Sequence[Sample] = channel.get()
        number = group[0].group
        if number in taken or not 0 <= number < groups:
            expected = f"each of the groups 0-{groups - 1} once"
            raise out_of_step(owner, "samples are not of this iteration", got=f"group {number}", expected=expected)
        taken[number] = group
    return list(by_group([sample for group in taken.values() for sample in group]).values())


def share_out(shares: Sequence[Share] | None, ranks: Ranks) -> Share:
    """Rank 0 gives every rank its own of `shares`; the others pass None. A collective."""
    if ranks.world_size == 1:
        assert shares is not None, "the only rank is rank 0"
        return shares[0]
    mine: list[Share] = [None]  # type: ignore[list-item]  # filled in place
    dist.scatter_object_list(mine, None if shares is None else list(shares))
    return mine[0]


def share_of(
    groups: Groups,
    numbers: Numbers,
    needed: Collection[int],
    marks: Sequence[Marks] = (),
    kl_coef: float = 0.0,
) -> SampleShare:
    """`needed`: numbers of samples; `marks` of all samples, in their order."""
    samples = [sample for group in groups for sample in group]
    return SampleShare(
        numbers=numbers,
        own={i: samples[i] for i in needed},
        marks={i: marks[i] for i in needed} if marks else {},
        kl_coef=kl_coef,
        inferred=any(of.old is not None for of in marks),
    )


class Batch:
    """A rank's samples of an iteration as tensors, and where the learned tokens of each lie among all M."""

    def __init__(self, share: SampleShare, device: torch.device) -> None:
        self._own, self._marks, self._numbers, self._device = share.own, share.marks, share.numbers, device
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
        return self._tensor([self._own[i].logprobs[self._own[i].mask] for i in picks])

    def advantages(self, picks: MicroBatch) -> Tensor:
        """[N]"""
        return self._tensor([self._marks[i].advantages for i in picks])

    def reference(self, picks: MicroBatch) -> Tensor:
        """[N] its log-probabilities, which must be known."""
        return self._tensor([part for i in picks if (part := self._marks[i].reference) is not None])

    def values_and_returns(self, picks: MicroBatch) -> tuple[Tensor, Tensor]:
        """[N] each, which must be known: a head's values before the first step, and what came of the states."""
        values = [part for i in picks if (part := self._marks[i].values) is not None]
        returns = [part for i in picks if (part := self._marks[i].returns) is not None]
        return self._tensor(values), self._tensor(returns)

    def old(self, picks: MicroBatch) -> Tensor | None:
        """[N]; None where nobody asked for them before."""
        known = [part for i in picks if (part := self._marks[i].old) is not None]
        return self._tensor(known) if known or not picks else None

    def _tensor(self, parts: Sequence[TokenArray]) -> Tensor:
        return torch.tensor(np.concatenate([np.zeros(0, np.float32), *parts]), device=self._device)

    def part_of(self, values: Tensor, picks: MicroBatch) -> Tensor:
        """[N] of [M]."""
        return torch.cat([values[:0], *(values[self._first[i] : self._first[i + 1]] for i in picks)])

    def put(self, values: Tensor, picks: MicroBatch, part: Tensor) -> None:
        """[N] into [M]."""
        pieces = part.split([self._numbers.learned[i] for i in picks]) if picks else ()
        for i, piece in zip(picks, pieces, strict=True):
            values[self._first[i] : self._first[i + 1]] = piece
