"""Advantages against cases computed by hand, and what must hold for any rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.algo.group_advantages import (
    ESTIMATORS,
    Outcomes,
    carries_signal,
    dr_grpo,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from tests.unit.algo.samples import sample

ALL = pytest.mark.parametrize("name", ESTIMATORS)


def outcomes(rewards: list[float], groups: list[int], lengths: list[int] | None = None) -> Outcomes:
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=torch.tensor(groups, dtype=torch.int64),
        lengths=torch.tensor([1] * len(rewards) if lengths is None else lengths, dtype=torch.int64),
    )


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-9)


# Group 1: rewards 0, 0, 3 (mean 1, squared deviations 1, 1, 4; variance 6 / 2 = 3). Group 0: 1, 2 (mean 1.5, 0.5).
REWARDS, GROUPS = [0.0, 1.0, 0.0, 2.0, 3.0], [1, 0, 1, 0, 1]
ROOT = math.sqrt(3.0)


def test_grpo_divides_by_the_deviation_of_its_group() -> None:
    half = 0.5 / math.sqrt(0.5)
    close(grpo(outcomes(REWARDS, GROUPS)), [-1 / ROOT, -half, -1 / ROOT, half, 2 / ROOT])


def test_dr_grpo_only_centres() -> None:
    close(dr_grpo(outcomes(REWARDS, GROUPS)), [-1.0, -0.5, -1.0, 0.5, 2.0])


def test_rloo_compares_with_the_others() -> None:
    # Of group 1: 0 - (0 + 3) / 2, 0 - (0 + 3) / 2, 3 - (0 + 0) / 2; of group 0: 1 - 2, 2 - 1.
    close(rloo(outcomes(REWARDS, GROUPS)), [-1.5, -1.0, -1.5, 1.0, 3.0])


def test_reinforce_pp_normalises_over_tokens_of_all_groups() -> None:
    # Tokens: reward 0 three times, reward 4 once. Mean 1, variance (1 + 1 + 1 + 9) / 4 = 3.
    close(reinforce_pp(outcomes([0.0, 4.0], [0, 1], [3, 1])), [-1 / ROOT, 3 / ROOT])


def test_reinforce_pp_with_baseline_centres_groups_first() -> None:
    # Centred: -1, 1 and -2, 2. Over 7 tokens: mean (-3 + 1 - 2 + 4) / 7 = 0, variance (3 + 1 + 4 + 8) / 7.
    found = reinforce_pp_baseline(outcomes([0.0, 2.0, 6.0, 10.0], [0, 0, 1, 1], [3, 1, 1, 2]))
    close(found, [value / math.sqrt(16 / 7) for value in (-1.0, 1.0, -2.0, 2.0)])


@ALL
def test_equal_rewards_are_worth_nothing(name: str) -> None:
    found = ESTIMATORS[name](outcomes([0.1, 0.1, 0.1], [0, 0, 0], [1, 2, 3]))
    assert found.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_equal_rewards_are_worth_exactly_nothing_within_groups(estimator) -> None:  # type: ignore[no-untyped-def]
    assert estimator(outcomes([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1])).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_differences_by_rounding_are_no_differences() -> None:
    assert grpo(outcomes([0.3, 0.1 + 0.2], [0, 0])).abs().max().item() < 1e-9


@ALL
def test_no_samples_no_advantages(name: str) -> None:
    assert ESTIMATORS[name](outcomes([], [], [])).tolist() == []


@ALL
def test_nothing_learned_is_still_finite(name: str) -> None:
    assert ESTIMATORS[name](outcomes([0.0, 1.0], [0, 0], [0, 0])).isfinite().all()


@ALL
@settings(max_examples=30)
@given(data=st.data())
def test_order_and_numbers_of_groups_do_not_matter(name: str, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=12))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    straight = ESTIMATORS[name](outcomes(rewards, groups, lengths))
    turned = ESTIMATORS[name](
        outcomes([rewards[i] for i in order], [3 - groups[i] for i in order], [lengths[i] for i in order])
    )
    assert straight.isfinite().all()
    torch.testing.assert_close(turned, straight[list(order)])


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=6), min_size=1, max_size=5),
)
def test_groups_are_centred_and_rloo_is_dr_grpo_rescaled(groups: list[list[float]]) -> None:
    rewards = [reward for group in groups for reward in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    case = outcomes(rewards, numbers)
    sizes = torch.tensor([len(groups[number]) for number in numbers], dtype=torch.float64)
    for estimator in (grpo, dr_grpo, rloo):
        sums = torch.zeros(len(groups), dtype=torch.float64).index_add(0, case.groups, estimator(case))
        assert sums.abs().max().item() < 1e-9
    torch.testing.assert_close(rloo(case), dr_grpo(case) * sizes / (sizes - 1))


def test_groups_become_outcomes_whatever_their_numbers() -> None:
    groups = [[sample(group=4, learned=5)], [sample(group=4, reward=1.0), sample(group=4, number=1)]]
    found = Outcomes.of(groups)
    assert (found.rewards.tolist(), found.groups.tolist(), found.lengths.tolist()) == ([0, 1, 0], [0, 1, 1], [5, 2, 2])
    assert dr_grpo(found).tolist() == [0.0, 0.5, -0.5]


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [([0.0, 1.0], True), ([1.0, 1.0], False), ([0.0, 0.0, 0.0], False), ([1.0], False), ([], False)],
)
def test_only_mixed_groups_carry_signal(rewards: list[float], signal: bool) -> None:
    assert carries_signal(rewards) is signal
