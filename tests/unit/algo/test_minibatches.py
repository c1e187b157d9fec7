"""Minibatches are the same global samples however rows are spread, and every sample is in exactly one."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplace.algo.minibatches import Rows, iteration_generator, minibatches


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
    blocks = [Rows(steps=steps, total=total, first=f, count=c) for f, c in zip(firsts, split, strict=False)]
    by_rank = [list(minibatches(block, number, iteration_generator(seed, 0))) for block in blocks]
    order = torch.randperm(steps * total, generator=iteration_generator(seed, 0))
    seen = 0
    for parts in zip(*by_rank, strict=True):
        found = []
        for part, first, count in zip(parts, firsts, split, strict=False):
            found += [int(i) // count * total + int(i) % count + first for i in part.indices]
        assert sorted(found) == sorted(order[seen : seen + parts[0].count].tolist())
        assert {part.count for part in parts} == {len(found)}
        seen += len(found)
    assert len(by_rank[0]) == number
    assert seen == steps * total


def test_sizes_differ_by_at_most_one() -> None:
    rows = Rows(steps=5, total=2, first=0, count=2)
    assert [part.count for part in minibatches(rows, 4, iteration_generator(0, 0))] == [3, 3, 2, 2]


def test_streams_of_neighbouring_seeds_and_iterations_are_unrelated() -> None:
    orders = {
        tuple(torch.randperm(16, generator=iteration_generator(seed, iteration)).tolist())
        for seed in range(4)
        for iteration in range(4)
    }
    assert len(orders) == 16
