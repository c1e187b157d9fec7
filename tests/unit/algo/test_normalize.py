"""Running moments equal those of everything seen, however it came; rewards are scaled, not shifted."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlplace.algo.normalize import (
    ReturnScale,
    merge,
    moments_of,
    no_moments,
    normalized,
    shifted_sums,
)


@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_batches_and_parts_do_not_matter(
    seed: int, cuts: list[int], offset: float
) -> None:
    samples = torch.tensor(
        np.random.default_rng(seed).standard_normal((30, 2, 3)) + offset
    )
    running = no_moments((2, 3))
    for start, stop in pairwise([0, *sorted(cuts), 30]):
        batch = samples[start:stop]
        parts = [
            shifted_sums(batch[:4], running.mean),
            shifted_sums(batch[4:], running.mean),
        ]
        running = merge(running, sum(parts))
    assert running.count.item() == 30
    assert torch.allclose(running.mean, samples.mean(dim=0), rtol=1e-12)
    assert torch.allclose(running.var, samples.var(dim=0, correction=0), rtol=1e-6)


def test_an_empty_batch_changes_nothing() -> None:
    running = merge(
        no_moments(), shifted_sums(torch.tensor([1.0, 3.0]), torch.zeros(()))
    )
    assert merge(running, shifted_sums(torch.zeros(0), running.mean)) is running


def alone(values: Tensor) -> Tensor:
    return values


def test_rewards_by_hand() -> None:
    scale = ReturnScale(rows=1, gamma=0.5)
    scaled = scale(
        torch.tensor([[2.0], [2.0], [4.0]]),
        torch.tensor([[False], [True], [False]]),
        alone,
    )
    # Returns gathered: 2, then 0.5 * 2 + 2 = 3, then anew 4: variance 2/3.
    assert scale.moments.var.item() == pytest.approx(2.0 / 3.0)
    assert scaled.flatten().tolist() == pytest.approx(
        [2.0 / np.sqrt(2 / 3)] * 2 + [4.0 / np.sqrt(2 / 3)]
    )
    scale(torch.tensor([[1.0]]), torch.tensor([[False]]), alone)
    assert scale.moments.mean.item() == pytest.approx(
        (2 + 3 + 4 + 3) / 4
    )  # 0.5 * 4 + 1 was carried over


def test_outliers_are_clipped() -> None:
    rewards = torch.zeros(200, 1)
    rewards[100] = 1e6
    assert (
        ReturnScale(1, 0.0)(rewards, torch.ones(200, 1, dtype=torch.bool), alone)
        .max()
        .item()
        == ReturnScale.CLIP
    )


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_normalized_values_have_zero_mean_and_unit_variance() -> None:
    # Mean 7/3, so -4/3, -4/3, 8/3 apart; variance (16 + 16 + 64) / 27 = 32/9.
    found = normalized(doubles(1, 1, 5), moments_of(doubles(1, 1, 5)))
    assert found.tolist() == pytest.approx(
        [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)], rel=1e-5
    )


def test_equal_values_normalize_to_zero() -> None:
    assert (
        normalized(torch.full((4,), 3.0), moments_of(torch.full((4,), 3.0))).tolist()
        == [0.0] * 4
    )
