"""What is said about the samples that were trained on."""

from __future__ import annotations

import pytest

from rlplace.algo.sample_metrics import sample_metrics
from rlplace.metrics import reduce_metrics
from tests.unit.algo.samples import sample

GROUPS = [
    [
        sample(learned=2, reward=1.0, rewards={"right": 1.0}, versions=[4, 5]),
        sample(learned=1, reward=0.0, rewards={"right": 0.0, "min": 2.0}, versions=[5], truncated=True),
    ],
    [sample(prompt=4, learned=1, reward=0.5, rewards={"right": 1.0}, versions=[3], turns=3)],
    [sample(learned=0, reward=0.5, turns=0)],
]


def test_numbers_by_hand() -> None:
    assert reduce_metrics([sample_metrics(GROUPS, version=5)]) == {
        "actor/reward": 0.5,
        "actor/reward_min": 0.0,
        "actor/reward_max": 1.0,
        "actor/reward/right": pytest.approx(2 / 3),
        "actor/reward/min": 2.0,
        "actor/groups": 3.0,
        "actor/groups_with_signal": pytest.approx(1 / 3),
        "actor/samples": 4.0,
        "actor/tokens": 5 + 4 + 5 + 3,
        "actor/tokens_learned": 4.0,
        "actor/length": 17 / 4,
        "actor/length_max": 5.0,
        "actor/length_learned": 1.0,
        "actor/length_learned_max": 2.0,
        "actor/turns": 5 / 4,
        "actor/truncated_share": 0.25,
        "actor/age": (1 + 0 + 0 + 2) / 4,
        "actor/age_max": 2.0,
        "actor/age_mixed": 0.25,
    }


def test_ranks_reduce_to_the_same() -> None:
    whole = reduce_metrics([sample_metrics(GROUPS, version=5)])
    by_rank = [sample_metrics(GROUPS[:1], version=5), sample_metrics(GROUPS[1:], version=5), sample_metrics([], 5)]
    assert reduce_metrics(by_rank) == pytest.approx(whole)
