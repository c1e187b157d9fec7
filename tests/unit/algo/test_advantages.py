"""Advantages by hand, by definition, and laws that hold for any rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rlplace.algo.advantages import (
    ESTIMATORS,
    Outcomes,
    carries_signal,
    distillation,
    dr_grpo,
    explained_variance,
    gae,
    token_gae,
    token_rewards,
)
from tests.unit.algo.samples import sample

Floats = NDArray[np.float64]
LENGTHS = st.lists(st.integers(0, 20), max_size=6)


def by_definition(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    ends: NDArray[np.bool_],
    gamma: float,
    lam: float,
) -> Floats:
    """Sum over l of (gamma * lambda)^l * delta_{t+l}, up to and including the step that ends the episode."""
    advantages = np.zeros_like(rewards)
    for t, row in np.ndindex(*rewards.shape):
        for later in range(t, len(rewards)):
            delta = (
                rewards[later, row]
                + gamma * next_values[later, row]
                - values[later, row]
            )
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
    last_values, final_values = (
        rng.standard_normal(rows),
        rng.standard_normal(int(truncated.sum())),
    )
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
    expected = by_definition(
        rewards, values, next_values, terminated | truncated, 0.9, 0.8
    )
    assert advantages.numpy() == pytest.approx(expected, abs=1e-12)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, and rewards and values of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(
        (2, sum(lengths)), generator=generator, dtype=torch.float64
    )
    return torch.tensor(lengths, dtype=torch.int64), rewards, values


def close(found: Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_the_score_stands_at_the_last_token_and_kl_at_each() -> None:
    lengths, scores = (
        torch.tensor([2, 0, 3]),
        doubles(1.0, 9.0, -2.0),
    )  # the second sample has no response
    close(token_rewards(scores, lengths), [0.0, 1.0, 0.0, 0.0, -2.0])
    kl = torch.tensor([1.0, 2.0, 3.0, -4.0, 5.0])  # k1 may be negative
    close(token_rewards(scores, lengths, kl, 0.5), [-0.5, 0.0, -1.5, 2.0, -4.5])


@given(
    lengths=LENGTHS,
    seed=st.integers(0, 99),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.floats(0, 1),
)
def test_each_sample_is_an_episode_of_plain_gae(
    lengths: list[int], seed: int, gamma: float, lam: float
) -> None:
    whole, rewards, values = drawn(lengths, seed)
    advantages, returns = token_gae(
        rewards=rewards, values=values, lengths=whole, gamma=gamma, gae_lambda=lam
    )
    pieces = (
        zip(
            *(tensor.split(lengths) for tensor in (rewards, values, advantages)),
            strict=True,
        )
        if lengths
        else ()
    )
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
    ("values", "returns", "explained"),
    [
        ((1.0, 2.0, 6.0), (1.0, 2.0, 6.0), 1.0),
        ((0.0, 0.0, 0.0), (1.0, 2.0, 6.0), 0.0),
        ((3.0, 3.0, 3.0), (1.0, 2.0, 6.0), 0.0),
        ((-1.0, -2.0, -6.0), (1.0, 2.0, 6.0), -3.0),
        ((1.0, 2.0), (4.0, 4.0), 0.0),
        ((), (), 0.0),
    ],
    ids=[
        "perfect",
        "nothing",
        "the mean",
        "the opposite",
        "nothing varies",
        "no tokens",
    ],
)
def test_explained_variance(
    values: tuple[float, ...], returns: tuple[float, ...], explained: float
) -> None:
    assert explained_variance(doubles(*values), doubles(*returns)) == pytest.approx(
        explained
    )


# ── relative to other samples ─────────────────────────────────────────────────────────────────────────────────────────


ALL = pytest.mark.parametrize("name", ESTIMATORS)


def outcomes(
    rewards: list[float], groups: list[int], lengths: list[int] | None = None
) -> Outcomes:
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups, dtype=torch.int64),
        lengths=torch.tensor(
            [1] * len(rewards) if lengths is None else lengths, dtype=torch.int64
        ),
    )


# Group 1: rewards 0, 0, 3 (mean 1, squared deviations 1, 1, 4; variance 6 / 2 = 3). Group 0: 1, 2 (mean 1.5, 0.5).
TWO_GROUPS = outcomes([0.0, 1.0, 0.0, 2.0, 3.0], [1, 0, 1, 0, 1])
ROOT, HALF = math.sqrt(3.0), 0.5 / math.sqrt(0.5)


@pytest.mark.parametrize(
    ("name", "given_", "expected"),
    [
        ("grpo", TWO_GROUPS, [-1 / ROOT, -HALF, -1 / ROOT, HALF, 2 / ROOT]),
        ("dr_grpo", TWO_GROUPS, [-1.0, -0.5, -1.0, 0.5, 2.0]),
        # Of group 1: 0 - (0 + 3) / 2, 0 - (0 + 3) / 2, 3 - (0 + 0) / 2; of group 0: 1 - 2, 2 - 1.
        ("rloo", TWO_GROUPS, [-1.5, -1.0, -1.5, 1.0, 3.0]),
        # Tokens: reward 0 three times, reward 4 once. Mean 1, variance (1 + 1 + 1 + 9) / 4 = 3.
        ("reinforce_pp", outcomes([0.0, 4.0], [0, 1], [3, 1]), [-1 / ROOT, 3 / ROOT]),
        # Centred: -1, 1 and -2, 2. Over 7 tokens: mean (-3 + 1 - 2 + 4) / 7 = 0, variance (3 + 1 + 4 + 8) / 7.
        (
            "reinforce_pp_baseline",
            outcomes([0.0, 2.0, 6.0, 10.0], [0, 0, 1, 1], [3, 1, 1, 2]),
            [value / math.sqrt(16 / 7) for value in (-1.0, 1.0, -2.0, 2.0)],
        ),
        (
            "grpo",
            outcomes([0.3, 0.1 + 0.2], [0, 0]),
            [0.0, 0.0],
        ),  # they differ by rounding
    ],
)
def test_estimators_by_hand(name: str, given_: Outcomes, expected: list[float]) -> None:
    close(ESTIMATORS[name](given_), expected)


@ALL
def test_what_is_worth_nothing(name: str) -> None:
    estimator = ESTIMATORS[name]
    assert estimator(outcomes([], [], [])).tolist() == []
    assert (
        estimator(outcomes([0.0, 1.0], [0, 0], [0, 0])).isfinite().all()
    )  # without response tokens
    close(estimator(outcomes([0.1, 0.1, 0.1], [0, 0, 0], [1, 2, 3])), [0.0, 0.0, 0.0])
    if "reinforce" not in name:  # exactly: the mean of equals may be rounded
        assert estimator(outcomes([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1])).tolist() == [
            0.0,
            0.0,
            0.0,
            0.0,
        ]


@ALL
@settings(max_examples=30)
@given(data=st.data())
def test_order_and_numbers_of_groups_do_not_matter(
    name: str, data: st.DataObject
) -> None:
    rewards = data.draw(st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=12))
    groups = data.draw(
        st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards))
    )
    lengths = data.draw(
        st.lists(st.integers(0, 5), min_size=len(rewards), max_size=len(rewards))
    )
    order = data.draw(st.permutations(range(len(rewards))))
    straight = ESTIMATORS[name](outcomes(rewards, groups, lengths))
    turned = ESTIMATORS[name](
        outcomes(
            [rewards[i] for i in order],
            [3 - groups[i] for i in order],
            [lengths[i] for i in order],
        )
    )
    assert straight.isfinite().all()
    torch.testing.assert_close(turned, straight[list(order)])


def test_groups_become_outcomes_whatever_their_numbers() -> None:
    found = Outcomes.of(
        [
            [sample(group=4, response=5)],
            [sample(group=4, reward=1.0), sample(group=4, number=1)],
        ]
    )
    assert (found.rewards.tolist(), found.groups.tolist(), found.lengths.tolist()) == (
        [0, 1, 0],
        [0, 1, 1],
        [5, 2, 2],
    )
    assert dr_grpo(found).tolist() == [0.0, 0.5, -0.5]


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0], False),
        ([0.0, 0.0, 0.0], False),
        ([1.0], False),
        ([], False),
        ([0.1 + 0.2, 0.3, 0.3], False),  # two sums of rewards, of which one is rounded
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([1e6 + 1e-5, 1e6], True),
        ([1e-6, 0.0], True),
    ],
)
def test_only_mixed_groups_carry_signal(rewards: list[float], signal: bool) -> None:
    assert carries_signal(rewards) is signal
    outcomes = Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.zeros(len(rewards), dtype=torch.int64),
        lengths=torch.ones(len(rewards), dtype=torch.int64),
    )
    assert bool(dr_grpo(outcomes).any()) is signal


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_teacher_adds_the_discounted_log_ratios_of_a_sample(discount: float) -> None:
    """Compared with plain sums, sample by sample; a sample without tokens is in between."""
    log_ratio = torch.tensor([0.5, -1.0, 2.0, -0.25, 3.0])
    lengths = torch.tensor([3, 0, 2])
    expected = []
    for part in log_ratio.split(lengths.tolist()):
        for token in range(len(part)):
            later = part[token:]
            powers = discount ** torch.arange(len(later))
            expected.append(2.0 * float((powers * later).sum()))
    found = distillation(log_ratio, lengths, coef=2.0, discount=discount)
    assert found.tolist() == pytest.approx(expected)
