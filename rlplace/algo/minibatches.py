"""Minibatches of simulator samples: parts of equal size, in an order that does not depend on how rows are spread."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of the job that one rank has. A row is an environment; a sample is one step of one row.

    `steps`: steps of each row. `total`: number of rows of the job. `first`: index of this rank's first row among all
    rows. `count`: how many rows this rank has, possibly 0.
    """

    steps: int
    total: int
    first: int
    count: int


def iteration_generator(seed: int, iteration: int) -> torch.Generator:
    """Return a random generator for one iteration. It draws the same numbers on every rank.

    With another seed or iteration, its numbers are unrelated. `seed`: seed of the run.
    """
    # torch's CPU generator uses 32 bits of its seed: seed + iteration would make neighbouring seeds share streams.
    mixed = random.Random(f"{seed}/{iteration}").getrandbits(32)
    return torch.Generator().manual_seed(mixed)


def minibatches(
    rows: Rows,
    number: int,
    generator: torch.Generator,
    sound: Tensor | None = None,
    length: int = 1,
) -> Iterator[tuple[Tensor, int]]:
    """Yield for each minibatch: indices [n] int64 of this rank's samples, and its number of samples on all ranks.

    Together the minibatches contain each sample of the job once, in random order. All ranks draw the same order, so the
    samples of a minibatch do not depend on how rows are spread over ranks. A rank may have no samples in a minibatch.
    An index counts this rank's samples, flattened from [steps, rows].

    `rows`: the rows of this rank. `number`: number of minibatches; their sizes differ by at most one. If there are
    fewer samples than that, each sample is a minibatch. `generator`: draws the order; it must draw the same numbers on
    all ranks, see `iteration_generator`. `sound`: [steps * total] bool, the samples that count; None: all count. The
    yielded number of samples includes only samples that count. `length`: draw sequences of this many steps instead of
    samples. Then an index counts this rank's sequences, flattened from [steps / length, rows], and a sequence is left
    out if none of its samples counts.
    """
    # The order of all samples, or sequences, of the job; those without a sound sample are left out.
    order = torch.randperm(rows.steps // length * rows.total, generator=generator)
    counted = None
    if sound is not None:
        counted = sound.view(-1, length, rows.total).sum(dim=1).flatten()
        order = order[counted[order] > 0]
    parts = order.tensor_split(min(number, len(order)))

    # Those of this rank.
    step = order // rows.total
    row = order % rows.total - rows.first
    mine = (row >= 0) & (row < rows.count)
    sizes = [len(part) for part in parts]
    own = [int(part.sum()) for part in mine.split(sizes)]
    indices = (step * rows.count + row)[mine].split(own)
    for part, picked in zip(parts, indices, strict=True):
        count = length * len(part)
        if counted is not None:
            count = int(counted[part].sum())
        yield picked, count
