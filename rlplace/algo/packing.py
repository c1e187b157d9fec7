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


def _units(
    sizes: SampleSizes, groups: Sequence[_Sums], most: int, budget: int
) -> Iterator[tuple[MicroBatch, int]]:
    """Yield the units of `SampleSizes.units`, each with its size. `groups`: from `SampleSizes.sums`."""
    for members, own in groups:
        first = 0
        while first < len(members):
            # The largest part from `first` on within the budget; at least one sample.
            stop = first + 1
            most_stop = min(first + most, len(members))
            size = own[stop] - own[first] + sizes.shared(members[first], 1)
            while stop < most_stop:
                shared = sizes.shared(members[first], stop + 1 - first)
                larger = own[stop + 1] - own[first] + shared
                if larger > budget:
                    break
                size = larger
                stop += 1
            yield tuple(members[first:stop]), size
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
    steps: list[Packing] = []
    for epoch in range(epochs):
        for picks in optimizer_steps(sizes, train_batch, f"{seed} {epoch}"):
            steps.append(pack(sizes, ranks, token_budget, picks))
    return tuple(steps)


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
    return StepSamples(sizes, token_budget, picks).divided(ranks).packing


class StepSamples:
    """The samples of one optimizer step. It can be divided over several numbers of ranks.

    What does not depend on the number of ranks is computed once.
    """

    def __init__(
        self,
        sizes: SampleSizes,
        token_budget: int,
        picks: Sequence[int] | None = None,
    ) -> None:
        """Prepare a step. `sizes`, `token_budget`, `picks`: as for `pack`."""
        items: Sequence[int] = range(len(sizes.tokens))
        if picks is not None:
            items = picks
        self._sizes = sizes
        self._budget = token_budget
        self._count = len(items)
        self._groups = sizes.sums(items)
        # Most samples of a unit -> the units
        self._units: dict[int, _Units] = {}

    def divided(self, ranks: int) -> Division:
        """Return the division of the samples over `ranks` ranks and into micro-batches."""
        units = self._of(max(1, self._count))
        least = sum(units.loads)
        most = max(map(len, units.samples), default=1)
        best = _divided(self._sizes, units, ranks, self._budget)

        # Smaller units divide better and compute shared prompts more often: the fastest is taken.
        latest = best
        while most > 1 and latest.slowest * ranks > _NEAR * least:
            most = -(-most // 2)  # half, rounded up
            latest = _divided(self._sizes, self._of(most), ranks, self._budget)
            if latest.slowest < best.slowest:
                best = latest
        return best

    def _of(self, most: int) -> _Units:
        """Return the units of at most `most` samples."""
        if most not in self._units:
            found = [*_units(self._sizes, self._groups, most, self._budget)]
            loads = [size for _, size in found]
            groups: Sequence[int] = ()
            if self._sizes.prompts:
                groups = [self._sizes.groups[unit[0]] for unit, _ in found]
            self._units[most] = _Units(
                samples=[unit for unit, _ in found],
                loads=loads,
                groups=groups,
                order=_longest_first(loads, None),
            )
        return self._units[most]


class _Units(NamedTuple):
    """Sets of samples that stay together in a micro-batch.

    `samples`: the samples of each unit. `loads`: tokens of each unit. `groups`: group of each unit; empty: prompts are
    not shared. `order`: the indices of the units, the largest unit first.
    """

    samples: Sequence[MicroBatch]
    loads: Sequence[int]
    groups: Sequence[int]
    order: Sequence[int]


class Division:
    """Units divided over ranks and into micro-batches; all ranks have equally many micro-batches.

    `tokens`: for each rank, the size of each micro-batch. `slowest`: the duration of the step in tokens: the sum over
    micro-batches of the tokens of the slowest rank. `packing`: the same with the samples of each micro-batch.
    """

    def __init__(
        self,
        samples: Sequence[MicroBatch],
        ranks: Sequence[Sequence[Sequence[int]]],
        tokens: tuple[tuple[int, ...], ...],
    ) -> None:
        """Keep a division. `samples`: of each unit. `ranks`: for each rank, the units of each micro-batch."""
        self.tokens = tokens
        self.slowest = sum(map(max, zip(*tokens, strict=True)))
        self._samples = samples
        self._ranks = ranks

    def counts(self, rank: int) -> list[int]:
        """Return the number of samples in each micro-batch of a rank."""
        found = []
        for chosen in self._ranks[rank]:
            found.append(sum(len(self._samples[unit]) for unit in chosen))
        return found

    @functools.cached_property
    def packing(self) -> Packing:
        found: list[tuple[MicroBatch, ...]] = []
        for micro_batches in self._ranks:
            of_rank = []
            for chosen in micro_batches:
                units = (self._samples[unit] for unit in chosen)
                of_rank.append(tuple(sorted(itertools.chain.from_iterable(units))))
            found.append(tuple(of_rank))
        total = sum(map(sum, self.tokens))
        imbalance = 0.0
        if total:
            imbalance = self.slowest * len(self._ranks) / total - 1.0
        return Packing(tuple(found), self.tokens, imbalance)


def _divided(sizes: SampleSizes, units: _Units, ranks: int, budget: int) -> Division:
    """Return the division of units over ranks and into micro-batches.

    `sizes`: of all samples. `ranks`: number of ranks. `budget`: the most tokens of a micro-batch.
    """
    shares, _ = _shares(units.loads, ranks, units.order)
    packed = [_bins(units.loads, budget, share) for share in shares]
    number = max(map(len, packed))  # of micro-batches

    divided: list[Sequence[Sequence[int]]] = []
    tokens: list[tuple[int, ...]] = []
    for micro_batches, share in zip(packed, shares, strict=True):
        of_rank = []
        sizes_of_rank = []
        for size, chosen in _widened(micro_batches, share, units.loads, number, budget):
            if units.groups and len(chosen) > 1:
                size -= _shared_twice(sizes, units, chosen)
            of_rank.append(chosen)
            sizes_of_rank.append(size)
        divided.append(of_rank)
        tokens.append(tuple(sizes_of_rank))
    return Division(units.samples, divided, tuple(tokens))


def _shared_twice(sizes: SampleSizes, units: _Units, chosen: Sequence[int]) -> int:
    """Return the tokens by which the units `chosen` are smaller in one micro-batch than each alone.

    Units of one group share their prompt in the micro-batch. `sizes`: of all samples.
    """
    groups = units.groups
    if len({groups[unit] for unit in chosen}) == len(chosen):
        return 0
    of_group: dict[int, list[MicroBatch]] = {}
    for unit in chosen:
        of_group.setdefault(groups[unit], []).append(units.samples[unit])
    saved = 0
    for several in of_group.values():
        if len(several) > 1:
            saved += sum(sizes.shared(unit[0], len(unit)) for unit in several)
            readers = sum(map(len, several))
            saved -= sizes.shared(min(unit[0] for unit in several), readers)
    return saved


def spread(
    lengths: Sequence[int], parts: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Divide items into `parts` parts of about equal total length. Return the indices of the items in each part.

    A part may be empty. `lengths`: length of each item. `items`: the indices of the items to divide; None: all. Longest
    processing time first (Graham 1969, "Bounds on multiprocessing timing anomalies"): the longest item goes to the part
    with the least load. The longest part is at most 4/3 - 1 / (3 * parts) times as long as in the best division.
    """
    members, _ = _shares(lengths, parts, _longest_first(lengths, items))
    return members


def _shares(
    lengths: Sequence[int], parts: int, items: Iterable[int]
) -> tuple[list[list[int]], list[int]]:
    """Divide items as `spread` does. Return the indices of the items in each part, and the total length of each part.

    `items`: the indices of the items, the longest item first.
    """
    members: list[list[int]] = [[] for _ in range(parts)]
    # A heap of load * parts + part: of equal loads, the lower part comes first.
    heap = list(range(parts))
    for item in items:
        least = heap[0]
        members[least % parts].append(item)
        heapq.heapreplace(heap, least + lengths[item] * parts)
    totals = [0] * parts
    for each in heap:
        totals[each % parts] = each // parts
    return members, totals


def fit(
    lengths: Sequence[int], capacity: int, items: Iterable[int] | None = None
) -> list[list[int]]:
    """Put items into few bins, each with a total length of at most `capacity`. Return the indices of the items in each
    bin.

    An item that is longer than `capacity` gets a bin of its own. `lengths`: length of each item. `items`: the indices
    of the items to put; None: all. Best fit, longest first: at most 11/9 of the fewest possible bins, plus one (Johnson
    et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms").
    """
    return _bins(lengths, capacity, _longest_first(lengths, items))


def _bins(
    lengths: Sequence[int], capacity: int, items: Sequence[int]
) -> list[list[int]]:
    """Put items into bins as `fit` does. `items`: the indices of the items, the longest item first."""
    bins: list[list[int]] = []
    count = len(items)
    # The bin of each turn's item
    bin_of: list[list[int]] = []
    # Bins with room left, sorted by this room; of equal rooms, the bin with the latest item first.
    # A bin is here as: room * count + (count - 1 - turn of its last item).
    rooms: list[int] = []
    for turn, item in enumerate(items):
        length = lengths[item]
        # The bin with the least room that suffices; else a new one.
        at = bisect.bisect_left(rooms, length * count)
        if at < len(rooms):
            room, before = divmod(rooms.pop(at), count)
            chosen = bin_of[count - 1 - before]
        else:
            room = capacity
            chosen = []
            bins.append(chosen)
        chosen.append(item)
        bin_of.append(chosen)
        if room > length:
            bisect.insort(rooms, (room - length) * count + count - 1 - turn)
    return bins


def _longest_first(lengths: Sequence[int], items: Iterable[int] | None) -> list[int]:
    """Return the indices of the items, the longest item first. Items of equal length keep their order.

    `lengths`: length of each item. `items`: the indices of the items; None: all.
    """
    if items is None:
        items = range(len(lengths))
    return sorted(items, key=lengths.__getitem__, reverse=True)


def _widened(
    micro_batches: Sequence[Sequence[int]],
    share: Sequence[int],
    lengths: Sequence[int],
    number: int,
    budget: int,
) -> list[tuple[int, Sequence[int]]]:
    """Return exactly `number` micro-batches of one rank, the largest first: each as (total length, items).

    All ranks have them in this order, so that ranks wait little for each other. `micro_batches`: at most `number`
    micro-batches within `budget`. `share`: the indices of the rank's items, the longest item first. `lengths`: length
    of each item. The items are divided anew into equal parts if each part is within the budget or has one item.
    Otherwise, empty micro-batches are added to `micro_batches`.
    """
    parts, totals = _shares(lengths, number, share)
    chosen: list[tuple[int, Sequence[int]]] = [*zip(totals, parts, strict=True)]
    if any(total > budget and len(items) > 1 for total, items in chosen):
        chosen = [(sum(lengths[i] for i in items), items) for items in micro_batches]
        missing = number - len(micro_batches)
        chosen += [(0, ())] * missing
    chosen.sort(key=lambda sized: -sized[0])
    return chosen
