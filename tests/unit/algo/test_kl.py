"""KL estimators against the true KL, the controller of its weight, and how engine and trainer are compared."""

from __future__ import annotations

import math

import pytest
import torch

from rlplace.algo.kl import (
    KL_ESTIMATORS,
    Correction,
    importance_weights,
    mismatch_metrics,
    next_kl_coef,
)
from rlplace.metrics import reduce_metrics


def test_estimates_of_a_known_pair() -> None:
    log_ratio = torch.tensor([0.25]).log() - torch.tensor([0.5]).log()
    found = {
        name: estimator(log_ratio).item() for name, estimator in KL_ESTIMATORS.items()
    }
    assert found == pytest.approx(
        {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    )


def test_unbiased_estimators_average_to_the_true_kl() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.3, 0.3, 0.4])
    expected = (p * (p / q).log()).sum().item()
    for name in ("k1", "k3"):
        assert (
            p * KL_ESTIMATORS[name](q.log() - p.log())
        ).sum().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_in_the_loss(name: str) -> None:
    """On average over tokens that the policy p draws: nothing, KL(p || q), KL(q || p)."""
    q = torch.tensor([0.3, 0.3, 0.4])
    scores = torch.tensor([0.1, -0.4, 0.7], requires_grad=True)
    logprobs = scores.log_softmax(0)
    p = logprobs.exp()
    loss = (p.detach() * KL_ESTIMATORS[name](q.log() - logprobs)).sum()
    kl = {
        "k1": 0.0 * p.sum(),
        "k2": (p * (p / q).log()).sum(),
        "k3": (q * (q / p).log()).sum(),
    }[name]
    (found,) = torch.autograd.grad(loss, scores, retain_graph=True)
    (expected,) = torch.autograd.grad(kl, scores)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),  # as wanted
        (6.6, 1.0 + 0.1 * 0.1),  # a tenth too much
        (60.0, 1.0 + 0.2 * 0.1),  # far too much counts as a fifth
        (5.4, 1.0 - 0.1 * 0.1),
        (-1.0, 1.0 - 0.2 * 0.1),  # k1 of few samples may be negative
    ],
)
def test_one_step_by_hand(kl: float, factor: float) -> None:
    assert next_kl_coef(
        0.2, kl, samples=1000, target=6.0, horizon=10_000
    ) == pytest.approx(0.2 * factor)


# ── an engine that is not quite the trainer ───────────────────────────────────────────────────────────────────────────


TRAINER = torch.tensor([0.4, 0.1, 0.9]).log()
ENGINE = torch.tensor([0.2, 0.2, 0.9]).log()  # ratios 2, 0.5, 1
ALL = torch.ones(3, dtype=torch.bool)
CUT = torch.tensor([True, False, False])


def test_importance_is_capped_from_above_only() -> None:
    weights, cut = importance_weights(
        TRAINER.clone().requires_grad_(), ENGINE, torch.tensor([3]), Correction(1.5)
    )
    assert weights.tolist() == pytest.approx([1.5, 0.5, 1.0])
    assert not weights.requires_grad
    assert cut.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("correction", "weights", "cut"),
    [  # of sequences of 1, 0 and 3 tokens; ratios of tokens 2, 0.5, 1, 4, of sequences 2 and 2
        (Correction(1.5), [1.5, 0.5, 1.0, 1.5], [1, 0, 0, 1]),
        (Correction(1.5, above="drop"), [0.0, 0.5, 1.0, 0.0], [1, 0, 0, 1]),
        (
            Correction(3.0, above="drop", floor=0.6),
            [2.0, 0.0, 1.0, 0.0],
            [0, 1, 0, 1],
        ),  # IcePop
        (Correction(3.0, floor=0.6), [2.0, 0.0, 1.0, 3.0], [0, 1, 0, 1]),
        (Correction(3.0, "sequence"), [2.0, 2.0, 2.0, 2.0], [0, 0, 0, 0]),
        (Correction(1.5, "sequence"), [1.5, 1.5, 1.5, 1.5], [1, 1, 1, 1]),
        (Correction(1.5, "sequence", "drop"), [0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1]),
    ],
)
def test_tokens_and_sequences_are_capped_or_left_out(
    correction: Correction, weights: list[float], cut: list[int]
) -> None:
    engine = torch.tensor([0.2, 0.2, 0.9, 0.1]).log()
    trainer = torch.tensor([0.4, 0.1, 0.9, 0.4]).log()
    found = importance_weights(trainer, engine, torch.tensor([1, 0, 3]), correction)
    assert found.weights.tolist() == pytest.approx(weights)
    assert found.cut.int().tolist() == cut


def test_a_long_answer_that_the_engine_hardly_finds_has_a_weight() -> None:
    apart = torch.full((4000,), 0.5)
    for correction, weight in (
        (Correction(2.0, "sequence"), 2.0),
        (Correction(2.0, "sequence", "drop"), 0.0),
    ):
        found = importance_weights(apart, apart * 0, torch.tensor([4000]), correction)
        assert found.weights.unique().tolist() == [weight]


def test_statistics_by_hand() -> None:
    assert reduce_metrics([mismatch_metrics(TRAINER, ENGINE, ALL, CUT)]) == {
        "actor/mismatch": pytest.approx(2 * math.log(2) / 3),
        "actor/mismatch_kl": pytest.approx((1 - math.log(2) - 0.5 + math.log(2)) / 3),
        "actor/mismatch_capped": pytest.approx(1 / 3),
        "actor/mismatch_max": pytest.approx(math.log(2)),
    }


def test_ranks_reduce_to_the_whole() -> None:
    assert (
        mismatch_metrics(TRAINER, ENGINE, ALL, ~ALL)["actor/mismatch_capped"].value
        == 0.0
    )
    whole = reduce_metrics([mismatch_metrics(TRAINER, ENGINE, ALL, CUT)])
    parts = (slice(0, 1), slice(1, 3), slice(3, 3))
    by_rank = [
        mismatch_metrics(TRAINER[part], ENGINE[part], ALL[part], CUT[part])
        for part in parts
    ]
    assert reduce_metrics(by_rank) == pytest.approx(whole)


def test_tokens_of_other_weights_say_nothing_about_the_engine() -> None:
    old = torch.tensor([False, True, True])
    assert reduce_metrics([mismatch_metrics(TRAINER, ENGINE, old, CUT)]) == {
        "actor/mismatch": pytest.approx(math.log(2) / 2),
        "actor/mismatch_kl": pytest.approx((math.log(2) - 0.5) / 2),
        "actor/mismatch_capped": pytest.approx(
            1 / 3
        ),  # what the cap cuts counts all the same
        "actor/mismatch_max": pytest.approx(math.log(2)),
    }
    none = reduce_metrics([mismatch_metrics(TRAINER, ENGINE, ~ALL, CUT)])
    assert none == {"actor/mismatch_capped": pytest.approx(1 / 3)}


def test_the_mismatch_of_ranks_with_other_numbers_of_tokens_is_that_of_all_tokens() -> (
    None
):
    """By hand: |log p_trainer - log p_engine| of four tokens is 0.3, 0.1, 0.2, 0.6; a fifth is of an older version."""
    by_rank = (  # log p_trainer, log p_engine, whether of the trainer's version, whether cut
        ([-1.0], [-1.3], [True], [True]),
        (
            [-2.0, -2.2, -3.0, -9.0],
            [-2.1, -2.0, -2.4, -1.0],
            [True, True, True, False],
            [False] * 4,
        ),
        ([], [], [], []),
        ([-1.0, -2.0], [-1.5, -2.0], [False, False], [True, False]),
    )
    ranks = [
        mismatch_metrics(
            *torch.tensor(logprobs), *torch.tensor(marks, dtype=torch.bool)
        )
        for *logprobs, own, cut in by_rank
        for marks in [[own, cut]]
    ]
    reduced = reduce_metrics(ranks)
    assert reduced["actor/mismatch"] == pytest.approx(
        (0.3 + 0.1 + 0.2 + 0.6) / 4, rel=1e-6
    )
    assert reduced["actor/mismatch_max"] == pytest.approx(0.6, rel=1e-6)
    by_hand = [
        math.expm1(ratio) - ratio for ratio in (0.3, 0.1, -0.2, -0.6)
    ]  # k3 of KL(engine || trainer)
    assert reduced["actor/mismatch_kl"] == pytest.approx(sum(by_hand) / 4, rel=1e-5)
    assert reduced["actor/mismatch_capped"] == pytest.approx(
        2 / 7
    )  # of the tokens of all ranks
