"""Which samples of a language model form an optimizer step, which rank takes which of them, in which micro-batches.

::

    samples of an iteration ── optimizer_steps ──▶ samples of a step ── pack ──▶ rank 0: [ 3 7 1 ][ 4 9 ]
                               by number            balanced by tokens           rank 1: [ 0 5 ][ 2 8 6 ]
                                                                                         micro-batches, the same number
                                                                                         on all ranks, no padding

Everything depends on sizes and seeds alone, so every rank computes the same by itself. A loss divided by the totals of
its step is the same however the step is packed. Samples of one prompt are kept together: a micro-batch computes the
prompt once for all of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MicroBatch = tuple[
    int, ...
]  # numbers of samples, ascending; empty where a rank has nothing left but collectives


@dataclasses.dataclass(frozen=True, slots=True)
class SampleSizes:
    """Tokens of samples, and how many of them the samples of a group have in common."""

    tokens: tuple[int, ...]  # of each sample, its prompt included
    prompts: tuple[
        int, ...
    ] = ()  # of these, those that all samples of its group begin with; empty: not shared
    groups: tuple[
        int, ...
    ] = ()  # the number of its group; those of a group stand together; empty: each by itself
    # what a token of a prompt costs for each sample that reads it, if a token that is computed costs 1
    again: float = 1.0

    def size(self, picks: Iterable[int]) -> int:
        """Return the tokens of a micro-batch of samples in ascending order.

        A prompt that several of them share counts once, and `again` for each: attention keeps its keys and values for
        every answer, without a kernel for all segments its queries and what was attended too.
        """
        if not self.prompts:
            return sum(self.tokens[i] for i in picks)
        total = 0
        for _, members in itertools.groupby(picks, self.groups.__getitem__):
            first, *others = members
            total += self.tokens[first] + sum(
                self.tokens[i] - self.prompts[i] for i in others
            )
            total += (
                math.ceil(self.prompts[first] * (1 + len(others)) * self.again)
                if others
                else 0
            )
        return total

    def alike(self, picks: Iterable[int]) -> list[tuple[int, int]]:
        """Return of each the number of its group, and how many tokens it has in common with the others."""
        if self.prompts:
            return [(self.groups[i], self.prompts[i]) for i in picks]
        return []

    def units(self, picks: Sequence[int], most: int, budget: int) -> list[MicroBatch]:
        """Cut each group into parts of `most` samples, and of `budget` tokens unless they are one sample."""
        found: list[MicroBatch] = []
        for _, group in itertools.groupby(
            picks, self.groups.__getitem__ if self.prompts else None
        ):
            members = list(group)
            first = 0
            while first < len(members):
                stops = range(first + 1, min(first + most, len(members)) + 1)
                fitting = bisect.bisect_right(
                    stops, budget, key=lambda stop: self.size(members[first:stop])
                )
                stop = stops[max(0, fitting - 1)]
                found.append(tuple(members[first:stop]))
                first = stop
        return found


class Packing(NamedTuple):
    """One optimizer step over all ranks. Every sample is in exactly one micro-batch."""

    ranks: tuple[tuple[MicroBatch, ...], ...]  # equally many micro-batches on each rank
    imbalance: float  # time lost to waiting: 0.1 is a tenth longer than if all ranks had equal tokens at all times

    @property
    def samples(self) -> list[int]:
        return [i for share in self.ranks for micro_batch in share for i in micro_batch]


def optimizer_steps(
    sizes: SampleSizes, train_batch: int | None, seed: str
) -> list[list[int]]:
    """Cut one epoch of samples into steps of about `train_batch`; None: all in one.

    Groups stay whole where there is one for each step, and come in random order; steps differ by one of them at most.
    The order follows from `seed` alone: put run seed, iteration and epoch into it.
    """
    samples = range(len(sizes.tokens))
    if train_batch is None or train_batch >= len(samples):
        if samples:
            return [list(samples)]
        return []
    steps = -(-len(samples) // train_batch)
    order = [
        list(members)
        for _, members in itertools.groupby(
            samples, (sizes.groups or samples).__getitem__
        )
    ]
    if len(order) < steps:
        order = [[sample] for sample in samples]
    random.Random(seed).shuffle(order)
    cuts = [len(order) * step // steps for step in range(steps + 1)]
    return [
        sorted(itertools.chain(*order[start:stop]))
        for start, stop in itertools.pairwise(cuts)
    ]


def pack_steps(
    sizes: SampleSizes,
    *,
    epochs: int,
    train_batch: int | None,
    seed: str,
    ranks: int,
    token_budget: int,
) -> tuple[Packing, ...]:
    """Pack all optimizer steps of an iteration, equally many in each epoch; see `optimizer_steps` and `pack`."""
    return tuple(
        pack(sizes, ranks, token_budget, picks)
        for epoch in range(epochs)
        for picks in optimizer_steps(sizes, train_batch, f"{seed} {epoch}")
    )


def pack(
    sizes: SampleSizes,
    ranks: int,
    token_budget: int,
    picks: Sequence[int] | None = None,
) -> Packing:
    """Spread samples over ranks and micro-batches; all, or those of ascending `picks`.

    A micro-batch has the size of `token_budget` at most, or is one sample that alone has more. Groups stay whole, or
    are halved as often as makes ranks compute fewer tokens.
    """
    items = range(len(sizes.tokens)) if picks is None else picks
    units = sizes.units(items, max(1, len(items)), token_budget)
    least = sum(map(sizes.size, units))
    most = max(map(len, units), default=1)
    found = [_packed(sizes, units, ranks, token_budget)]
    while most > 1 and found[-1][0] * ranks > 1.02 * least:
        most = -(-most // 2)
        found.append(
            _packed(sizes, sizes.units(items, most, token_budget), ranks, token_budget)
        )
    return min(found, key=lambda one: one[0])[1]


def _packed(
    sizes: SampleSizes, units: Sequence[MicroBatch], ranks: int, budget: int
) -> tuple[int, Packing]:
    """Spread units that stay together; return as well the tokens that ranks compute one after the other."""
    loads = [sizes.size(unit) for unit in units]
    shares = spread(loads, ranks)
    packed = [fit(loads, budget, share) for share in shares]
    number = max(len(micro_batches) for micro_batches in packed)
    widened = tuple(
        tuple(
            tuple(sorted(i for unit in micro_batch for i in units[unit]))
            for micro_batch in _widen(micro_batches, share, loads, number, budget)
        )
        for micro_batches, share in zip(packed, shares, strict=True)
    )
    each = [[sizes.size(micro_batch) for micro_batch in share] for share in widened]
    total = sum(map(sum, each))
    slowest = sum(map(max, zip(*each, strict=True)))
    return slowest, Packing(
        ranks=widened, imbalance=slowest * ranks / total - 1.0 if total else 0.0
    )


def spread(
    lengths: Sequence[int], parts: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Return the numbers of all items, or of `items`, in `parts` of about equal total length; parts may stay empty.

    Longest processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the longest item goes to
    the part that has least. No part exceeds 4/3 - 1 / (3 * parts) of the best possible.
    """
    loads = [
        (0, part) for part in range(parts)
    ]  # a heap: equal loads go to the lower part
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in _longest_first(lengths, items):
        load, part = loads[0]
        members[part].append(item)
        heapq.heapreplace(loads, (load + lengths[item], part))
    return members


def fit(
    lengths: Sequence[int], capacity: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Return numbers as `spread` does, in few bins of `capacity` total length at most; a longer item has its own bin.

    Best fit, longest first: at most 11/9 of the fewest possible bins, and one (Johnson et al. 1974, "Worst-case
    performance bounds for simple one-dimensional packing algorithms").
    """
    bins: list[list[int]] = []
    rooms: list[
        tuple[int, int, int]
    ] = []  # sorted: what is left of a bin, its last turn with a minus, the bin
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
    return sorted(
        items, key=lengths.__getitem__, reverse=True
    )  # stable: equal ones in their order


def _widen(
    micro_batches: Sequence[Sequence[int]],
    share: Sequence[int],
    lengths: Sequence[int],
    number: int,
    budget: int,
) -> tuple[MicroBatch, ...]:
    """Return exactly `number` micro-batches, of even size where possible, fullest first: ranks wait in each one."""
    even = spread(lengths, number, share)
    fits = all(
        len(members) <= 1 or sum(lengths[i] for i in members) <= budget
        for members in even
    )
    chosen = (
        even
        if fits
        else [*micro_batches, *([] for _ in range(number - len(micro_batches)))]
    )
    chosen = sorted(chosen, key=lambda members: -sum(lengths[i] for i in members))
    return tuple(tuple(sorted(members)) for members in chosen)
