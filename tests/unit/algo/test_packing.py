"""Every sample is in exactly one micro-batch or minibatch, budgets hold, and all ranks compute the same."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rlplace.algo.minibatches import Rows, iteration_generator, minibatches
from rlplace.algo.packing import (
    Packing,
    SampleSizes,
    StepSamples,
    fit,
    optimizer_steps,
    pack,
    pack_steps,
    spread,
)

LENGTHS = st.lists(st.integers(1, 40), max_size=40)


def apart(lengths: list[int]) -> SampleSizes:
    return SampleSizes(tuple(lengths))


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 60))
@example(lengths=[50, 1, 1], ranks=2, budget=10)
def test_packing(lengths: list[int], ranks: int, budget: int) -> None:
    packing = pack(apart(lengths), ranks, budget)
    everything = [
        item for rank in packing.ranks for micro_batch in rank for item in micro_batch
    ]
    assert sorted(everything) == list(range(len(lengths)))
    assert [len(rank) for rank in packing.ranks] == [len(packing.ranks[0])] * ranks
    for rank in packing.ranks:
        sizes = [sum(lengths[i] for i in micro_batch) for micro_batch in rank]
        assert sizes == sorted(sizes, reverse=True)
        assert all(
            size <= budget or len(m) == 1 for size, m in zip(sizes, rank, strict=True)
        )
        assert all(list(micro_batch) == sorted(micro_batch) for micro_batch in rank)
    assert (
        any(all(rank) for rank in packing.ranks) or not lengths
    )  # one rank needs that many: none is empty on all
    assert pack(apart(lengths), ranks, budget) == packing


@st.composite
def grouped(draw: st.DrawFn) -> SampleSizes:
    tokens, prompts, groups = list[int](), list[int](), list[int]()
    for group in range(draw(st.integers(0, 6))):
        prompt, answers = (
            draw(st.integers(0, 30)),
            draw(st.lists(st.integers(1, 20), min_size=1, max_size=6)),
        )
        tokens += [prompt + answer for answer in answers]
        prompts += [prompt] * len(answers)
        groups += [group] * len(answers)
    return SampleSizes(
        tuple(tokens), tuple(prompts), tuple(groups), draw(st.sampled_from([0.1, 0.25]))
    )


@given(sizes=grouped(), ranks=st.integers(1, 5), budget=st.integers(1, 90))
def test_samples_of_a_group_are_packed_together_where_that_is_less(
    sizes: SampleSizes, ranks: int, budget: int
) -> None:
    packing = pack(sizes, ranks, budget)
    everything = range(len(sizes.tokens))
    assert sorted(packing.samples) == list(everything)
    assert [len(rank) for rank in packing.ranks] == [len(packing.ranks[0])] * ranks
    micro_batches = [micro_batch for rank in packing.ranks for micro_batch in rank]
    assert all(sizes.size(m) <= budget or len(m) == 1 for m in micro_batches)
    assert all(list(m) == sorted(m) for m in micro_batches)
    # Sizes from those of units are the sizes of the samples
    assert packing.tokens == tuple(tuple(map(sizes.size, r)) for r in packing.ranks)
    together = sum(
        sizes.size([i for i in everything if sizes.groups[i] == g])
        for g in set(sizes.groups)
    )
    computed = sum(map(sizes.size, micro_batches))
    assert together <= computed <= sum(sizes.tokens)


@given(
    sizes=st.one_of(grouped(), LENGTHS.map(apart)),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 90),
)
def test_a_packing_is_that_of_plain_loops(
    sizes: SampleSizes, ranks: int, budget: int
) -> None:
    step = StepSamples(sizes, budget)
    for number in (ranks, ranks + 1):
        plain = PlainPacking(sizes, number, budget).best()
        assert step.divided(number).packing == plain
        assert step.divided(number).tokens == plain.tokens
        assert pack(sizes, number, budget) == plain


class PlainPacking:
    """The rules of `pack` as plain loops over all parts and bins, without heaps and sums."""

    def __init__(self, sizes: SampleSizes, ranks: int, budget: int) -> None:
        self.sizes = sizes
        self.ranks = ranks
        self.budget = budget
        self.picks = range(len(sizes.tokens))

    def best(self) -> Packing:
        units = self.sizes.units(self.picks, max(1, len(self.picks)), self.budget)
        least = sum(map(self.sizes.size, units))
        most = max(map(len, units), default=1)
        best = found = self.divided(units)
        while most > 1 and slowest(found) * self.ranks > 1.02 * least:
            most = -(-most // 2)
            units = self.sizes.units(self.picks, most, self.budget)
            found = self.divided(units)
            if slowest(found) < slowest(best):
                best = found
        tokens = sum(map(sum, best.tokens))
        if tokens:
            loss = slowest(best) * self.ranks / tokens - 1.0
            best = best._replace(imbalance=loss)
        return best

    def divided(self, units: Sequence[tuple[int, ...]]) -> Packing:
        loads = [self.sizes.size(unit) for unit in units]
        shares = plain_spread(loads, self.ranks, range(len(units)))
        bins = [plain_fit(loads, self.budget, share) for share in shares]
        number = max(map(len, bins))
        ranks = []
        for share, own in zip(shares, bins, strict=True):
            parts = plain_spread(loads, number, share)
            if any(len(p) > 1 and total(loads, p) > self.budget for p in parts):
                parts = own + [[] for _ in range(number - len(own))]
            parts.sort(key=lambda part: total(loads, part), reverse=True)
            samples = [[i for unit in part for i in units[unit]] for part in parts]
            ranks.append(tuple(tuple(sorted(each)) for each in samples))
        tokens = tuple(tuple(map(self.sizes.size, rank)) for rank in ranks)
        return Packing(tuple(ranks), tokens, 0.0)


def slowest(packing: Packing) -> int:
    return sum(map(max, zip(*packing.tokens, strict=True)))


def total(lengths: Sequence[int], items: Sequence[int]) -> int:
    return sum(lengths[i] for i in items)


def longest_first(lengths: Sequence[int], items: Sequence[int]) -> list[int]:
    return sorted(items, key=lambda i: lengths[i], reverse=True)


def plain_spread(
    lengths: Sequence[int], parts: int, items: Sequence[int]
) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(parts)]
    for item in longest_first(lengths, items):
        min(found, key=lambda part: total(lengths, part)).append(item)
    return found


def plain_fit(
    lengths: Sequence[int], capacity: int, items: Sequence[int]
) -> list[list[int]]:
    found: list[list[int]] = []
    ordered = longest_first(lengths, items)
    for item in ordered:
        # The least room that suffices; of equal rooms, the bin with the latest item
        fitting = []
        for members in found:
            room = capacity - total(lengths, members)
            if room >= lengths[item]:
                fitting.append((room, -ordered.index(members[-1]), members))
        if fitting:
            min(fitting)[2].append(item)
        else:
            found.append([item])
    return found


def test_a_prompt_counts_once_and_its_share_for_each_that_reads_it() -> None:
    sizes = SampleSizes((20, 24, 30, 7), (16, 16, 16, 5), (0, 0, 0, 1), again=0.25)
    assert sizes.size([0, 1, 2, 3]) == 16 + (4 + 8 + 14) + 16 * 3 // 4 + 7
    assert sizes.size([1, 3]) == 24 + 7  # nothing is shared
    assert (
        dataclasses.replace(sizes, again=0.26).size([0, 1, 2, 3])
        == 16 + (4 + 8 + 14) + 13 + 7
    )
    assert pack(sizes, 1, 64).ranks == (((0, 1, 2, 3),),)
    # As wholes one rank had 48 and the other 7; in halves 36 and 37.
    assert pack(sizes, 2, 64).ranks == (((0, 1),), ((2, 3),))


@given(lengths=LENGTHS, parts=st.integers(1, 6))
def test_spreading_is_near_the_best_possible(lengths: list[int], parts: int) -> None:
    loads = [sum(lengths[i] for i in part) for part in spread(lengths, parts)]
    longest = max(lengths, default=0)
    assert max(loads) <= sum(lengths) / parts + (1 - 1 / parts) * longest + 1e-9
    assert max(loads) - min(loads) <= longest


@given(lengths=LENGTHS, capacity=st.integers(1, 60))
def test_bins_are_few(lengths: list[int], capacity: int) -> None:
    bins = [sum(lengths[i] for i in members) for members in fit(lengths, capacity)]
    fitting = [size for size in bins if size <= capacity]
    # Any two bins together exceed the capacity, else the later one's first item had gone into the earlier.
    assert sum(sorted(fitting)[:2]) > capacity or len(fitting) < 2


def test_bins_of_a_known_case() -> None:
    # 7 takes 3 with it, 6 takes 4; 12 is above the capacity.
    assert fit([3, 6, 12, 4, 7], 10) == [[2], [4, 0], [1, 3]]


@pytest.mark.parametrize(
    ("lengths", "budget", "ranks", "imbalance"),
    [
        # Rank 0: 8 + 3, rank 1: 7 + 5; each needs two micro-batches of 10 tokens. Waiting: 8 + 5 of 23 / 2.
        ([8, 7, 5, 3], 10, (((0,), (3,)), ((1,), (2,))), 2 * (8 + 5) / 23 - 1),
        # Rank 1 has 5 + 4 and needs two; rank 2 could do 4 + 4 at once, rank 0 has nothing to spread.
        (
            [9, 5, 4, 4, 4],
            8,
            (((0,), ()), ((1,), (4,)), ((2,), (3,))),
            3 * (9 + 4) / 26 - 1,
        ),
        ([5], 8, (((0,),), ((),), ((),)), 2.0),
        ([], 8, ((), ()), 0.0),
    ],
    ids=["two ranks", "what a rank can spread", "more ranks than samples", "nothing"],
)
def test_packing_by_hand(
    lengths: list[int], budget: int, ranks: Any, imbalance: float
) -> None:
    packing = pack(apart(lengths), len(ranks), budget)
    assert packing.ranks == ranks
    assert packing.imbalance == pytest.approx(imbalance)


def test_many_samples_over_many_ranks_are_balanced() -> None:
    draw = random.Random(0)
    lengths = [min(4096, int(draw.lognormvariate(6, 1)) + 20) for _ in range(2000)]
    packing = pack(apart(lengths), ranks=16, token_budget=8192)
    assert packing.imbalance < 0.01
    assert (
        sum(lengths) / (len(packing.ranks[0]) * 16 * 8192) > 0.85
    )  # of the budget is used


@given(
    samples=st.integers(0, 50),
    train_batch=st.none() | st.integers(1, 20),
    seed=st.text(max_size=3),
)
def test_optimizer_steps(samples: int, train_batch: int | None, seed: str) -> None:
    sizes = apart([1] * samples)
    steps = optimizer_steps(sizes, train_batch, seed)
    assert sorted(item for step in steps for item in step) == list(range(samples))
    numbers = [len(step) for step in steps]
    assert not numbers or 1 <= max(numbers) <= min(
        min(numbers) + 1, train_batch or samples
    )
    assert len(steps) == (
        0 if not samples else 1 if train_batch is None else -(-samples // train_batch)
    )
    assert optimizer_steps(sizes, train_batch, seed) == steps


def test_groups_stay_whole_in_the_steps_where_there_are_enough() -> None:
    sizes = SampleSizes((1,) * 12, groups=(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2))
    steps = optimizer_steps(sizes, 5, "a")
    assert sorted(map(tuple, steps)) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert {
        tuple(map(tuple, optimizer_steps(sizes, 5, seed))) for seed in "abcdef"
    } != {tuple(map(tuple, steps))}
    assert [len(step) for step in optimizer_steps(sizes, 8, "a")] == [4, 8]
    assert [len(step) for step in optimizer_steps(sizes, 3, "a")] == [3, 3, 3, 3]


def test_steps_are_packed_by_the_numbers_of_the_iteration() -> None:
    lengths = [4, 9, 2, 7, 5]
    rules = {
        "epochs": 2,
        "train_batch": 3,
        "seed": "7 0",
        "ranks": 2,
        "token_budget": 8,
    }
    packed = pack_steps(apart(lengths), **rules)
    steps = [
        picks
        for epoch in range(2)
        for picks in optimizer_steps(apart(lengths), 3, f"7 0 {epoch}")
    ]
    assert [sorted(packing.samples) for packing in packed] == steps
    for packing, picks in zip(packed, steps, strict=True):
        alone = pack(apart([lengths[i] for i in picks]), 2, 8)
        assert packing.imbalance == alone.imbalance
        assert packing.ranks == tuple(
            tuple(tuple(picks[i] for i in m) for m in share) for share in alone.ranks
        )
    assert pack_steps(apart([]), **rules) == ()


# ── minibatches ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    steps=st.integers(1, 5),
    split=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    number=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_ranks_agree(steps: int, split: list[int], number: int, seed: int) -> None:
    total = sum(split)
    number = min(number, steps * total)
    firsts = [0, *accumulate(split)]
    blocks = [
        Rows(steps=steps, total=total, first=f, count=c)
        for f, c in zip(firsts, split, strict=False)
    ]
    by_rank = [
        list(minibatches(block, number, iteration_generator(seed, 0)))
        for block in blocks
    ]
    order = torch.randperm(steps * total, generator=iteration_generator(seed, 0))
    seen = 0
    for parts in zip(*by_rank, strict=True):
        found = []
        for (indices, _), first, count in zip(parts, firsts, split, strict=False):
            found += [int(i) // count * total + int(i) % count + first for i in indices]
        assert sorted(found) == sorted(order[seen : seen + len(found)].tolist())
        assert {of_all for _, of_all in parts} == {len(found)}
        seen += len(found)
    assert len(by_rank[0]) == number
    assert seen == steps * total


@given(
    bad=st.lists(st.integers(0, 9), max_size=9, unique=True), number=st.integers(1, 4)
)
def test_samples_that_do_not_count_are_in_no_part(bad: list[int], number: int) -> None:
    """Two ranks, with rows 0 and 1 of 2."""
    sound = torch.ones(10, dtype=torch.bool)
    sound[bad] = False
    found, sizes = list[int](), []
    for first in range(2):
        rows = Rows(steps=5, total=2, first=first, count=1)
        parts = list(minibatches(rows, number, iteration_generator(0, 0), sound))
        found += [2 * int(step) + first for indices, _ in parts for step in indices]
        sizes.append([count for _, count in parts])
    assert sorted(found) == sound.nonzero().flatten().tolist()
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) == len(found)
    assert min(sizes[0]) >= 1


@given(bad=st.sets(st.integers(0, 11), max_size=11), number=st.integers(1, 4))
def test_sequences_are_drawn_whole_and_counted_by_their_samples(
    bad: set[int], number: int
) -> None:
    """Six steps of two rows in sequences of three; each rank has one row."""
    sound = torch.tensor([sample not in bad for sample in range(12)])
    of_sequence = {
        (part, row): {6 * part + 2 * step + row for step in range(3)}
        for part in (0, 1)
        for row in (0, 1)
    }
    found, sizes = list[tuple[int, int]](), []
    for row in (0, 1):
        rows = Rows(steps=6, total=2, first=row, count=1)
        parts = list(minibatches(rows, number, iteration_generator(0, 0), sound, 3))
        found += [(int(part), row) for own, _ in parts for part in own]
        sizes.append([count for _, count in parts])
    assert sorted(found) == sorted(
        place for place, samples in of_sequence.items() if samples - bad
    )
    assert sizes[0] == sizes[1]
    assert sum(sizes[0]) == 12 - len(bad)
    assert min(sizes[0]) >= 1


def test_sizes_differ_by_at_most_one() -> None:
    rows = Rows(steps=5, total=2, first=0, count=2)
    assert [count for _, count in minibatches(rows, 4, iteration_generator(0, 0))] == [
        3,
        3,
        2,
        2,
    ]


def test_streams_of_neighbouring_seeds_and_iterations_are_unrelated() -> None:
    orders = {
        tuple(
            torch.randperm(16, generator=iteration_generator(seed, iteration)).tolist()
        )
        for seed in range(4)
        for iteration in range(4)
    }
    assert len(orders) == 16


def test_a_group_is_cut_into_as_many_samples_as_fit() -> None:
    sizes = SampleSizes((12,) * 5 + (90, 9), (8,) * 7, (0,) * 7, again=0.25)
    assert sizes.size([0, 1, 2]) == 12 + 4 + 4 + 6
    assert sizes.units(range(7), 7, 26) == [(0, 1, 2), (3, 4), (5,), (6,)]
    assert sizes.units(range(7), 7, 25) == [(0, 1), (2, 3), (4,), (5,), (6,)]
    assert sizes.units(range(5), 2, 100) == [(0, 1), (2, 3), (4,)]
