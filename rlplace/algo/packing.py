"""Samples of a language model -> optimizer steps, each divided over ranks and into micro-batches.

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
import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# Numbers of samples, ascending; empty where a rank only joins the collectives of the others.
MicroBatch = tuple[int, ...]
# Ranks may compute this much more than without cutting groups, one after the other.
_NEAR = 1.02


@dataclasses.dataclass(frozen=True, slots=True)
class SampleSizes:
    """The number of tokens of each sample, and of the prompts that the samples of a group share.

    `tokens`: of each sample, with its prompt. `prompts`: for each sample, the number of tokens with which all samples
    of its group begin; empty: prompts are not shared. `groups`: for each sample, the index of its group, with a group's
    samples next to each other; empty: each sample is a group. `again`: cost of a token of a shared prompt for each
    sample that reads it, relative to the cost of computing a token.
    """

    tokens: tuple[int, ...]
    prompts: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    again: float = 1.0

    def size(self, picks: Iterable[int]) -> int:
        """Return the size of a micro-batch in tokens. `picks`: the indices of its samples, in ascending order.

        If several samples share a prompt, the prompt is computed once and counts once. It also counts `again` times for
        each of these samples, because attention keeps the keys and values of the prompt for every answer. Without an
        attention kernel for all segments, attention keeps the queries and the attended values for every answer as well.
        """
        if not self.prompts:
            return sum(self.tokens[i] for i in picks)
        total = 0
        for _, members in itertools.groupby(picks, self.groups.__getitem__):
            first, *others = members
            total += self.tokens[first]
            for i in others:
                total += self.tokens[i] - self.prompts[i]
            if others:
                readers = 1 + len(others)
                total += math.ceil(self.prompts[first] * readers * self.again)
        return total

    def alike(self, picks: Iterable[int]) -> list[tuple[int, int]]:
        """Return for each sample in `picks` (index of its group, number of tokens of the group's shared prompt).

        If prompts are not shared, return an empty list.
        """
        if self.prompts:
            return [(self.groups[i], self.prompts[i]) for i in picks]
        return []

    def units(self, picks: Sequence[int], most: int, budget: int) -> list[MicroBatch]:
        """Divide samples into units: samples of one group that stay together in a micro-batch. Return the units.

        `picks`: indices of the samples, in ascending order. `most`: the most samples of a unit. `budget`: the most
        tokens of a unit; a single sample may have more.
        """
        return [unit for unit, _ in _units(self, self.sums(picks), most, budget)]

    def sums(self, picks: Sequence[int]) -> list[_Sums]:
        """Return the sums from which `pack` gets the sizes of units, for each group of `picks`.

        `picks`: indices of samples, in ascending order.
        """
        if not self.prompts:
            return [_Sums([i], [0, self.tokens[i]]) for i in picks]
        found = []
        for _, group in itertools.groupby(picks, self.groups.__getitem__):
            members = list(group)
            own = (self.tokens[i] - self.prompts[i] for i in members)
            found.append(_Sums(members, list(itertools.accumulate(own, initial=0))))
        return found

    def shared(self, first: int, readers: int) -> int:
        """Return the tokens that the shared prompt of a group adds to a micro-batch; 0 if prompts are not shared.

        `first`: the first sample of the group in the micro-batch. `readers`: number of the group's samples there.
        """
        if not self.prompts:
            return 0
        prompt = self.prompts[first]
        if readers > 1:
            return prompt + math.ceil(prompt * readers * self.again)
        return prompt


class _Sums(NamedTuple):
    """Samples of one group. `own`: for each number of first members, the sum of their tokens without the prompt."""

    members: list[int]
    own: list[int]

    def size(self, sizes: SampleSizes, first: int, stop: int) -> int:
        """Return `sizes.size(members[first:stop])`."""
        shared = sizes.shared(self.members[first], stop - first)
        return self.own[stop] - self.own[first] + shared


def _units(
    sizes: SampleSizes, groups: Sequence[_Sums], most: int, budget: int
) -> Iterator[tuple[MicroBatch, int]]:
    """Yield the units of `SampleSizes.units`, each with its size. `groups`: from `SampleSizes.sums`."""
    for group in groups:
        members = group.members
        first = 0
        while first < len(members):
            # The largest part from `first` on within the budget; at least one sample.
            stop = min(first + most, len(members))
            whole = group.size(sizes, first, stop)
            if whole > budget and stop > first + 1:
                size = functools.partial(group.size, sizes, first)
                fitting = bisect.bisect_right(range(first + 1, stop), budget, key=size)
                stop = first + max(1, fitting)
                whole = group.size(sizes, first, stop)
            yield tuple(members[first:stop]), whole
            first = stop


class Packing(NamedTuple):
    """The micro-batches of one optimizer step on all ranks. Every sample is in exactly one micro-batch.

    `ranks`: the micro-batches of each rank; all ranks have equally many. `tokens`: the size of each of them in tokens.
    `imbalance`: time lost because ranks wait for each other: 0.1 means that the step takes a tenth longer than if all
    ranks had equally many tokens in each micro-batch.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    imbalance: float

    @property
    def samples(self) -> list[int]:
        """Return the indices of all samples, in the order of ranks and micro-batches."""
        micro_batches = itertools.chain(*self.ranks)
        return list(itertools.chain(*micro_batches))


def optimizer_steps(
    sizes: SampleSizes, train_batch: int | None, seed: str
) -> list[list[int]]:
    """Return for each optimizer step of one epoch the indices of its samples, in ascending order.

    `sizes`: sizes of all samples. `train_batch`: about how many samples a step has; None: one step has all samples.
    `seed`: decides the random order of groups; it should contain the run's seed, the iteration and the epoch. All
    samples of a group are in the same step, and the steps have equally many groups, or differ by one. If there are
    fewer groups than steps, samples are divided singly.
    """
    samples = range(len(sizes.tokens))
    if train_batch is None or train_batch >= len(samples):
        if samples:
            return [list(samples)]
        return []
    steps = -(-len(samples) // train_batch)  # rounded up
    group_of = (sizes.groups or samples).__getitem__
    order = [list(members) for _, members in itertools.groupby(samples, group_of)]
    if len(order) < steps:
        order = [[sample] for sample in samples]
    random.Random(seed).shuffle(order)

    # Equally many groups for each step, but for one.
    cuts = [len(order) * step // steps for step in range(steps + 1)]
    found = []
    for start, stop in itertools.pairwise(cuts):
        found.append(sorted(itertools.chain(*order[start:stop])))
    return found


def pack_steps(
    sizes: SampleSizes,
    *,
    epochs: int,
    train_batch: int | None,
    seed: str,
    ranks: int,
    token_budget: int,
) -> tuple[Packing, ...]:
    """Return the packing of each optimizer step of an iteration, in order. Each epoch has equally many steps.

    `sizes`: of all samples. `epochs`: how often each sample is used. `train_batch`: about how many samples a step has;
    None: one step for each epoch. `seed`: decides the random order of groups. `ranks`: number of ranks. `token_budget`:
    the most tokens of a micro-batch.
    """
    packings: list[Packing] = []
    for epoch in range(epochs):
        for picks in optimizer_steps(sizes, train_batch, f"{seed} {epoch}"):
            packings.append(pack(sizes, ranks, token_budget, picks))
    return tuple(packings)


def pack(
    sizes: SampleSizes,
    ranks: int,
    token_budget: int,
    picks: Sequence[int] | None = None,
) -> Packing:
    """Return a packing of one optimizer step: its samples, divided over ranks and into micro-batches.

    `sizes`: of all samples. `ranks`: number of ranks. `token_budget`: the most tokens of a micro-batch; a single sample
    may have more. `picks`: indices of the step's samples, in ascending order; None: all samples. The samples of a group
    stay together, unless smaller parts of groups make the step faster.
    """
    items: Sequence[int] = range(len(sizes.tokens))
    if picks is not None:
        items = picks
    groups = sizes.sums(items)
    units = list(_units(sizes, groups, max(1, len(items)), token_budget))
    least = sum(size for _, size in units)
    most = max((len(unit) for unit, _ in units), default=1)
    slowest, best = _packed(sizes, units, ranks, token_budget)

    # Smaller units divide better and compute shared prompts more often: the fastest is taken.
    latest = slowest
    while most > 1 and latest * ranks > _NEAR * least:
        most = -(-most // 2)  # half, rounded up
        units = list(_units(sizes, groups, most, token_budget))
        latest, packing = _packed(sizes, units, ranks, token_budget)
        if latest < slowest:
            slowest = latest
            best = packing
    return best


def _packed(
    sizes: SampleSizes,
    sized_units: Sequence[tuple[MicroBatch, int]],
    ranks: int,
    budget: int,
) -> tuple[int, Packing]:
    """Return the duration of the step in tokens, and the packing of units.

    The duration is the sum over micro-batches of the tokens of the slowest rank. `sizes`: of all samples.
    `sized_units`: sets of samples that stay together, each with its size. `ranks`: number of ranks. `budget`: the most
    tokens of a micro-batch.
    """
    units = [unit for unit, _ in sized_units]
    loads = [size for _, size in sized_units]
    shares = spread(loads, ranks)
    packed = [fit(loads, budget, share) for share in shares]
    number = max(map(len, packed))  # of micro-batches

    # Units of each micro-batch -> samples of each micro-batch, and their tokens.
    widened: list[tuple[MicroBatch, ...]] = []
    tokens: list[tuple[int, ...]] = []
    for micro_batches, share in zip(packed, shares, strict=True):
        of_rank = []
        sizes_of_rank = []
        for micro_batch in _widen(micro_batches, share, loads, number, budget):
            samples = itertools.chain(*(units[unit] for unit in micro_batch))
            of_rank.append(tuple(sorted(samples)))
            sizes_of_rank.append(_size_of_units(sizes, units, loads, micro_batch))
        widened.append(tuple(of_rank))
        tokens.append(tuple(sizes_of_rank))

    # In each micro-batch, all ranks wait for the slowest.
    total = sum(map(sum, tokens))
    slowest = sum(map(max, zip(*tokens, strict=True)))
    imbalance = 0.0
    if total:
        imbalance = slowest * ranks / total - 1.0
    return slowest, Packing(tuple(widened), tuple(tokens), imbalance)


def _size_of_units(
    sizes: SampleSizes,
    units: Sequence[MicroBatch],
    loads: Sequence[int],
    chosen: Sequence[int],
) -> int:
    """Return the tokens of a micro-batch of the units `chosen`: `sizes.size` of their samples, from sizes of units.

    Units of one group share their prompt in the micro-batch. `units`: samples of each unit. `loads`: size of each unit.
    """
    total = sum(loads[unit] for unit in chosen)
    if not sizes.prompts or len(chosen) < 2:
        return total
    # Units of a group have the prompt once each: replace it by the prompt that all of them share
    of_group: dict[int, list[MicroBatch]] = {}
    for unit in chosen:
        samples = units[unit]
        of_group.setdefault(sizes.groups[samples[0]], []).append(samples)
    for several in of_group.values():
        if len(several) > 1:
            total -= sum(sizes.shared(unit[0], len(unit)) for unit in several)
            readers = sum(map(len, several))
            total += sizes.shared(min(unit[0] for unit in several), readers)
    return total


def spread(
    lengths: Sequence[int], parts: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Divide items into `parts` parts of about equal total length. Return the indices of the items in each part.

    A part may be empty. `lengths`: length of each item. `items`: the indices of the items to divide; None: all. Longest
    processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the longest item goes to the part
    with the least load. The longest part is at most 4/3 - 1 / (3 * parts) times as long as in the best division.
    """
    # A heap of (load, part): equal loads go to the lower part.
    loads = [(0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for item in _longest_first(lengths, items):
        load, part = loads[0]
        members[part].append(item)
        heapq.heapreplace(loads, (load + lengths[item], part))
    return members


def fit(
    lengths: Sequence[int], capacity: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Put items into few bins, each with a total length of at most `capacity`. Return the indices of the items in each
    bin.

    An item that is longer than `capacity` gets a bin of its own. `lengths`: length of each item. `items`: the indices
    of the items to put; None: all. Best fit, longest first: at most 11/9 of the fewest possible bins, plus one (Johnson
    et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms").
    """
    bins: list[list[int]] = []
    # Sorted: room left in a bin, the turn of its last item with a minus, the bin.
    rooms: list[tuple[int, int, int]] = []
    for turn, item in enumerate(_longest_first(lengths, items)):
        # The bin with the least room that suffices; else a new one.
        at = bisect.bisect_left(rooms, (lengths[item],))
        if at < len(rooms):
            room, _, chosen = rooms.pop(at)
        else:
            room = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(item)
        if room > lengths[item]:
            bisect.insort(rooms, (room - lengths[item], -turn, chosen))
    return bins


def _longest_first(lengths: Sequence[int], items: Iterable[int] | None) -> list[int]:
    """Return the indices of the items, the longest item first. Items of equal length keep their order.

    `lengths`: length of each item. `items`: the indices of the items; None: all.
    """
    if items is None:
        items = range(len(lengths))
    return sorted(items, key=lengths.__getitem__, reverse=True)


def _widen(
    micro_batches: Sequence[Sequence[int]],
    share: Sequence[int],
    lengths: Sequence[int],
    number: int,
    budget: int,
) -> tuple[MicroBatch, ...]:
    """Return exactly `number` micro-batches of one rank, the largest first.

    All ranks have them in this order, so that ranks wait little for each other. `micro_batches`: at most `number`
    micro-batches within `budget`. `share`: the indices of the rank's items. `lengths`: length of each item. The items
    are divided anew into equal parts if each part is within the budget or has one item. Otherwise, empty micro-batches
    are added to `micro_batches`.
    """

    def size(members: Sequence[int]) -> int:
        return sum(lengths[i] for i in members)

    chosen: list[Sequence[int]] = [*spread(lengths, number, share)]
    if any(len(members) > 1 and size(members) > budget for members in chosen):
        missing = number - len(micro_batches)
        chosen = [*micro_batches]
        chosen += [()] * missing
    chosen.sort(key=lambda members: -size(members))
    return tuple(tuple(sorted(members)) for members in chosen)
