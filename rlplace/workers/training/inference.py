"""A pass over samples that learns nothing: what the weights, as they are, say of every learned token.

Letters: M learned tokens of an iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rlplace.algo.packing import MicroBatch, pack
from rlplace.config import Config
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.samples import Batch, Groups, Numbers, SampleShare, share_of
from rlplace.workers.training.sharded_lm import ShardedLm

Asked = Literal["old", "reference", "values"]


def asked_of_actor(config: Config) -> frozenset[Asked]:
    """What its own weights have to say of an iteration's samples before the first step."""
    algorithm = config.algorithm
    asked: set[Asked] = set()
    if algorithm.name == "ppo" or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward"):
        asked.add("old")
    if config.reference.share_actor:
        asked.add("reference")
    if config.critic.on_actor:
        asked.add("values")
    return frozenset(asked)


def inference_shares(groups: Groups, ranks: int, token_budget: int) -> list[SampleShare]:
    """What each rank needs of all groups to score them once."""
    numbers = Numbers.of(groups)
    packing = pack(numbers.lengths, ranks, token_budget)
    return [share_of(groups, numbers, {i for picks in own for i in picks}) for own in packing.ranks]


def micro_batches_of(share: SampleShare, ranks: Ranks, token_budget: int) -> Sequence[MicroBatch]:
    """This rank's of `inference_shares`: every rank comes to the same packing by itself."""
    return pack(share.numbers.lengths, ranks.world_size, token_budget).ranks[ranks.rank]


@torch.no_grad()
def scores_of_tokens(
    lm: ShardedLm,
    ranks: Ranks,
    batch: Batch,
    micro_batches: Iterable[MicroBatch],
    temperature: float,
    names: Sequence[str] = ("logprobs",),
) -> list[Tensor]:
    """[M] of each of these fields of what the model says, on every rank. A collective.

    The micro-batches of all ranks, equally many, have each sample once.
    """
    found = torch.zeros(len(names), batch.tokens, device=lm.device)
    for picks in micro_batches:
        scores = lm.module(batch.packed(picks), temperature)
        for row, name in zip(found, names, strict=True):
            batch.put(row, picks, getattr(scores, name))
    summed = ranks.sum(found.view(-1))  # each token is found by one rank, and zero on the others
    return list(summed.view(found.shape))
