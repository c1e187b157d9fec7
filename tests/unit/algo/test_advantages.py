"""GAE against a case computed by hand and against the definition, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlplace.algo.advantages import gae

Floats = NDArray[np.float64]


def test_by_hand() -> None:
    # gamma = lambda = 0.5. Row 0 runs through, row 1 terminates at t=1, row 2 is cut at t=1 where the value is 8.
    values = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [4.0, 4.0, 4.0]])
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    terminated, truncated = nothing.clone(), nothing.clone()
    terminated[1, 1] = truncated[1, 2] = True
    advantages, returns = gae(
        rewards=torch.ones(3, 3),
        values=values,
        last_values=torch.tensor([6.0, 6.0, 6.0]),
        final_values=torch.tensor([8.0]),
        terminated=terminated,
        truncated=truncated,
        gamma=0.5,
        gae_lambda=0.5,
    )
    # deltas: t=2: 1 + 3 - 4 = 0; t=1: 1 + 2 - 2 = 1 | 1 - 2 = -1 | 1 + 4 - 2 = 3; t=0: 1 + 1 - 1 = 1
    assert advantages.tolist() == [[1.25, 0.75, 1.75], [1.0, -1.0, 3.0], [0.0, 0.0, 0.0]]
    assert returns.tolist() == (advantages + values).tolist()


def by_definition(
    rewards: Floats, values: Floats, next_values: Floats, ends: NDArray[np.bool_], gamma: float, lam: float
) -> Floats:
    """Sum over l of (gamma * lambda)^l * delta_{t+l}, up to and including the step that ends the episode."""
    advantages = np.zeros_like(rewards)
    for t, row in np.ndindex(*rewards.shape):
        for later in range(t, len(rewards)):
            delta = rewards[later, row] + gamma * next_values[later, row] - values[later, row]
            advantages[t, row] += (gamma * lam) ** (later - t) * delta
            if ends[later, row]:
                break
    return advantages


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 6), rows=st.integers(0, 4))
def test_the_recursion_is_the_definition(seed: int, steps: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.standard_normal((2, steps, rows))
    terminated = rng.random((steps, rows)) < 0.3
    truncated = (rng.random((steps, rows)) < 0.3) & ~terminated
    last_values, final_values = rng.standard_normal(rows), rng.standard_normal(int(truncated.sum()))
    next_values = np.concatenate([values[1:], last_values[None]])
    next_values[truncated] = final_values
    next_values[terminated] = 0.0
    advantages, _ = gae(
        rewards=torch.tensor(rewards),
        values=torch.tensor(values),
        last_values=torch.tensor(last_values),
        final_values=torch.tensor(final_values),
        terminated=torch.tensor(terminated),
        truncated=torch.tensor(truncated),
        gamma=0.9,
        gae_lambda=0.8,
    )
    expected = by_definition(rewards, values, next_values, terminated | truncated, 0.9, 0.8)
    assert advantages.numpy() == pytest.approx(expected, abs=1e-12)


def test_inputs_are_left_alone() -> None:
    values, last_values = torch.ones(2, 1), torch.ones(1)
    flags = torch.tensor([[False], [True]])
    gae(
        rewards=torch.ones(2, 1),
        values=values,
        last_values=last_values,
        final_values=torch.tensor([5.0]),
        terminated=torch.zeros_like(flags),
        truncated=flags,
        gamma=0.9,
        gae_lambda=0.9,
    )
    assert values.tolist() == [[1.0], [1.0]]
    assert last_values.tolist() == [1.0]
