"""Which samples of a language model form an optimizer step, which rank takes which of them, in which micro-batches.

::

    samples of an iteration ── optimizer_steps ──▶ samples of a step ── pack ──▶ rank 0: [ 3 7 1 ][ 4 9 ]
                               by number            balanced by tokens           rank 1: [ 0 5 ][ 2 8 6 ]
                                                                                         micro-batches, the same number
                                                                                         on all ranks, no padding

Everything depends on lengths and seeds alone, so every rank computes the same by itself. A loss divided by the totals
of its step is the same however the step is packed.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MicroBatch = tuple[int, ...]  # numbers of samples, ascending; empty where a rank has nothing left but collectives


class Packing(NamedTuple):
    """One optimizer step over all ranks. Every sample is in exactly one micro-batch."""

    ranks: tuple[tuple[MicroBatch, ...], ...]  # equally many micro-batches on each rank
    imbalance: float  # time lost to waiting: 0.1 is a tenth longer than if all ranks had equal tokens at all times

    @property
    def samples(self) -> list[int]:
        return [i for share in self.ranks for micro_batch in share for i in micro_batch]


def optimizer_steps(samples: int, train_batch: int | None, seed: str) -> list[list[int]]:
    """Cut one epoch of samples 0, 1, ... in random order into steps of `train_batch` at most; None: all in one.

    Steps differ by one sample at most. The order follows from `seed` alone: put run seed, iteration and epoch into it.
    """
    if train_batch is None or train_batch >= samples:
        return [list(range(samples))] if samples else []
    order = list(range(samples))
    random.Random(seed).shuffle(order)
    steps = -(-samples // train_batch)
    cuts = [samples * step // steps for step in range(steps + 1)]
    return [sorted(order[start:stop]) for start, stop in itertools.pairwise(cuts)]


def pack_steps(
    lengths: Sequence[int], *, epochs: int, train_batch: int | None, seed: str, ranks: int, token_budget: int
) -> tuple[Packing, ...]:
    """Pack all optimizer steps of an iteration, equally many in each epoch; see `optimizer_steps` and `pack`."""
    return tuple(
        pack(lengths, ranks, token_budget, picks)
        for epoch in range(epochs)
        for picks in optimizer_steps(len(lengths), train_batch, f"{seed} {epoch}")
    )


def pack(lengths: Sequence[int], ranks: int, token_budget: int, picks: Sequence[int] | None = None) -> Packing:
    """Spread samples of `lengths` tokens (prompts included) over ranks and micro-batches; all, or those of `picks`.

    A micro-batch has `token_budget` tokens at most, or is one sample that alone has more.
    """
    items = range(len(lengths)) if picks is None else picks
    shares = spread(lengths, ranks, items)
    packed = [fit(lengths, token_budget, share) for share in shares]
    number = max(len(micro_batches) for micro_batches in packed)
    widened = tuple(
        _widen(micro_batches, share, lengths, number, token_budget)
        for micro_batches, share in zip(packed, shares, strict=True)
    )
    total = sum(lengths[i] for i in items)
    slowest = sum(max(sum(lengths[i] for i in m) for m in together) for together in zip(*widened, strict=True))
    return Packing(ranks=widened, imbalance=slowest * ranks / total - 1.0 if total else 0.0)


def spread(lengths: Sequence[int], parts: int, items: Iterable[int] | None = None) -> list[list[int]]:
    """Return the numbers of all items, or of `items`, in `parts` of about equal total length; parts may stay empty.

    Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the longest item goes to
    the part that has least. No part exceeds 4/3 - 1 / (3 * parts) of the best possible.
    """
    loads = [(0, part) for part in range(parts)]  # a heap: equal loads go to the lower part
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in _longest_first(lengths, items):
        load, part = loads[0]
        members[part].append(item)
        heapq.heapreplace(loads, (load + lengths[item], part))
    return members


def fit(lengths: Sequence[int], capacity: int, items: Iterable[int] | None = None) -> list[list[int]]:
    """Return numbers as `spread` does, in few bins of `capacity` total length at most; a longer item has its own bin.

    Best fit, longest first: at most 11/9 of the fewest possible bins, and one (Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms").
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int, int]] = []  # sorted: what is left of a bin, its last turn with a minus, the bin
    for turn, item in enumerate(_longest_first(lengths, items)):
        at = bisect.bisect_left(rooms, (lengths[item],))
        room, _, chosen = rooms.pop(at) if at < len(rooms) else (capacity, 0, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        if room > lengths[item]:
            bisect.insort(rooms, (room - lengths[item], -turn, chosen))
    return bins


def _longest_first(lengths: Sequence[int], items: Iterable[int] | None) -> list[int]:
    items = range(len(lengths)) if items is None else items
    return sorted(items, key=lengths.__getitem__, reverse=True)  # stable: equal ones in their order


def _widen(
    micro_batches: Sequence[Sequence[int]], share: Sequence[int], lengths: Sequence[int], number: int, budget: int
) -> tuple[MicroBatch, ...]:
    """Return exactly `number` micro-batches, of even size where possible, fullest first: ranks wait in each one."""
    even = spread(lengths, number, share)
    fits = all(len(members) <= 1 or sum(lengths[i] for i in members) <= budget for members in even)
    chosen = even if fits else [*micro_batches, *([] for _ in range(number - len(micro_batches)))]
    chosen = sorted(chosen, key=lambda members: -sum(lengths[i] for i in members))
    return tuple(tuple(sorted(members)) for members in chosen)
