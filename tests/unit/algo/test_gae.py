"""GAE over simulator steps and response tokens: cases by hand, the definition, and laws that hold for any rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rlplace.algo.gae import explained_variance, gae, token_gae, token_rewards

Floats = NDArray[np.float64]
LENGTHS = st.lists(st.integers(0, 20), max_size=6)


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


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, and rewards and values of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn((2, sum(lengths)), generator=generator, dtype=torch.float64)
    return torch.tensor(lengths, dtype=torch.int64), rewards, values


def close(found: Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_score_stands_at_the_last_token_and_kl_at_each() -> None:
    lengths, scores = torch.tensor([2, 0, 3]), doubles(1.0, 9.0, -2.0)  # the second sample has no response
    close(token_rewards(scores, lengths), [0.0, 1.0, 0.0, 0.0, -2.0])
    kl = torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0])  # k1 may be negative
    close(token_rewards(scores, lengths, kl, 0.5), [-0.5, 0.0, -1.5, 2.0, -4.5])


def test_no_samples_have_no_rewards() -> None:
    assert token_rewards(doubles(), torch.tensor([], dtype=torch.int64)).tolist() == []


def test_token_gae_by_hand() -> None:
    # Sample 0, gamma 1/2, lambda 1/2: delta 1 = 4 - 2 = 2; delta 0 = 1 + 1/2 * 2 - 3 = -1, and -1 + 1/4 * 2 = -1/2.
    # Sample 1 is one token: 5 - 1. The value of sample 1 does not follow sample 0.
    advantages, returns = token_gae(
        rewards=doubles(1, 4, 5),
        values=doubles(3, 2, 1),
        lengths=torch.tensor([2, 1]),
        gamma=0.5,
        gae_lambda=0.5,
    )
    close(advantages, [-0.5, 2.0, 4.0])
    close(returns, [2.5, 4.0, 5.0])


@given(lengths=LENGTHS, seed=st.integers(0, 99), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.floats(0, 1))
def test_each_sample_is_an_episode_of_plain_gae(lengths: list[int], seed: int, gamma: float, lam: float) -> None:
    whole, rewards, values = drawn(lengths, seed)
    advantages, returns = token_gae(rewards=rewards, values=values, lengths=whole, gamma=gamma, gae_lambda=lam)
    pieces = zip(*(tensor.split(lengths) for tensor in (rewards, values, advantages)), strict=True) if lengths else ()
    for r, v, found in (piece for piece in pieces if len(piece[0])):
        terminated = torch.zeros(len(r), 1, dtype=torch.bool)
        terminated[-1:] = True
        expected, _ = gae(
            rewards=r[:, None],
            values=v[:, None],
            last_values=r.new_zeros(1),
            final_values=r.new_zeros(0),
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            gamma=gamma,
            gae_lambda=lam,
        )
        torch.testing.assert_close(found, expected[:, 0])
    torch.testing.assert_close(returns, advantages + values)


@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_undiscounted_with_lambda_one_it_is_the_score_less_the_value(lengths: list[int], seed: int) -> None:
    whole, _, values = drawn(lengths, seed)
    scores = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages, returns = token_gae(
        rewards=token_rewards(scores, whole), values=values, lengths=whole, gamma=1.0, gae_lambda=1.0
    )
    each = scores.repeat_interleave(whole)
    torch.testing.assert_close(advantages, each - values)
    torch.testing.assert_close(returns, each)


@given(lengths=LENGTHS, seed=st.integers(0, 99), gamma=st.floats(0, 1))
def test_with_lambda_one_values_cancel_from_the_returns(lengths: list[int], seed: int, gamma: float) -> None:
    whole, rewards, values = drawn(lengths, seed)
    _, returns = token_gae(rewards=rewards, values=values, lengths=whole, gamma=gamma, gae_lambda=1.0)
    _, others = token_gae(rewards=rewards, values=7.0 - values, lengths=whole, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(returns, others)


def test_a_long_sample_keeps_its_precision() -> None:
    lengths = torch.tensor([3000])
    advantages, _ = token_gae(
        rewards=token_rewards(torch.ones(1), lengths),
        values=torch.zeros(3000),
        lengths=lengths,
        gamma=1.0,
        gae_lambda=0.999,
    )
    expected = 0.999 ** torch.arange(2999, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("values", "explained"),
    [((1.0, 2.0, 6.0), 1.0), ((0.0, 0.0, 0.0), 0.0), ((3.0, 3.0, 3.0), 0.0), ((-1.0, -2.0, -6.0), -3.0)],
    ids=["perfect", "nothing", "the mean", "the opposite"],
)
def test_explained_variance(values: tuple[float, ...], explained: float) -> None:
    assert explained_variance(doubles(*values), doubles(1.0, 2.0, 6.0)) == pytest.approx(explained)


def test_where_nothing_varies_nothing_is_explained() -> None:
    assert explained_variance(doubles(1.0, 2.0), doubles(4.0, 4.0)) == 0.0
    assert explained_variance(doubles(), doubles()) == 0.0
