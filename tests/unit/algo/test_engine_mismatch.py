"""Correction for, and statistics of, an engine that is not quite the trainer."""

from __future__ import annotations

import math

import pytest
import torch

from rlplace.algo.engine_mismatch import importance_weights, mismatch_metrics
from rlplace.metrics import reduce_metrics

TRAINER = torch.tensor([0.4, 0.1, 0.9]).log()
ENGINE = torch.tensor([0.2, 0.2, 0.9]).log()  # ratios 2, 0.5, 1


def test_importance_is_capped_from_above_only() -> None:
    trainer = TRAINER.clone().requires_grad_()
    weights = importance_weights(trainer, ENGINE, cap=1.5)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 1.0])
    assert not weights.requires_grad


def test_statistics_by_hand() -> None:
    assert reduce_metrics([mismatch_metrics(TRAINER, ENGINE, cap=1.5)]) == {
        "actor/mismatch": pytest.approx(2 * math.log(2) / 3),
        "actor/mismatch_kl": pytest.approx((1 - math.log(2) - 0.5 + math.log(2)) / 3),
        "actor/mismatch_capped": pytest.approx(1 / 3),
        "actor/mismatch_max": pytest.approx(math.log(2)),
    }


def test_ranks_reduce_to_the_whole() -> None:
    whole = reduce_metrics([mismatch_metrics(TRAINER, ENGINE, cap=1.5)])
    parts = (slice(0, 1), slice(1, 3), slice(3, 3))
    by_rank = [mismatch_metrics(TRAINER[part], ENGINE[part], cap=1.5) for part in parts]
    assert reduce_metrics(by_rank) == pytest.approx(whole)


def test_without_a_cap_nothing_is_above_it() -> None:
    assert mismatch_metrics(TRAINER, ENGINE, cap=None)["actor/mismatch_capped"].value == 0.0
