"""Minibatches of simulator samples: drawn over the whole job, then looked up by each rank for the rows it holds."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One rank's block of the job's rows; a sample is a (step, row) pair."""

    steps: int
    total: int  # rows of the job
    first: int
    count: int  # rows of this rank, possibly 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One rank's part of a minibatch."""

    indices: Tensor  # [n] int64 into this rank's samples, flattened [steps, rows]; n may be 0
    count: int  # samples of the minibatch over all ranks, at least 1


def iteration_generator(seed: int, iteration: int) -> torch.Generator:
    """Return the same stream on every rank; streams of different seeds or iterations are unrelated."""
    # torch's CPU generator uses 32 bits of its seed: seed + iteration would make neighbouring seeds share streams.
    return torch.Generator().manual_seed(random.Random(f"{seed}/{iteration}").getrandbits(32))


def minibatches(rows: Rows, number: int, generator: torch.Generator) -> Iterator[Minibatch]:
    """Yield one pass over all samples of the job in random order, in `number` parts whose sizes differ by at most one.

    All ranks draw the same order, so membership does not depend on how rows are spread. There must be at least `number`
    samples.
    """
    order = torch.randperm(rows.steps * rows.total, generator=generator)
    step, row = order // rows.total, order % rows.total - rows.first
    mine = (row >= 0) & (row < rows.count)
    counts = [len(part) for part in order.tensor_split(number)]
    own = [int(part.sum()) for part in mine.split(counts)]
    for indices, count in zip((step * rows.count + row)[mine].split(own), counts, strict=True):
        yield Minibatch(indices=indices, count=count)
