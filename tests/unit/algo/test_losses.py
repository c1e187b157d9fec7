"""Loss terms at the points where their gradient changes, cases by hand, and the same sum however a step is split."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlplace.algo.kl import kl_k3
from rlplace.algo.losses import (
    PPO_MEANS,
    Clip,
    LmTerms,
    StepSamples,
    Totals,
    clipped_surrogate,
    is_value_clipped,
    lm_terms,
    ppo_slopes,
    sequence_ratio,
    shares_of,
    token_weights,
    value_loss,
)

CLIP = Clip(low=0.2, high=0.3)
RATIOS = ("token", "sequence", "sequence_token")
MEANS = ("token", "sequence", "constant")


def shares(terms: LmTerms, count: int) -> Tensor:
    return torch.stack(tuple(shares_of(terms, count).values()))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # beyond 1.2, but the upper bound is 1.3
        (1.5, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.75, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipped_surrogate(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
    value = clipped_surrogate(log_ratio, torch.tensor([advantage]), CLIP)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (2.9, -2.0, 5.8, 5.8, 0),
        (3.1, -2.0, 6.0, 0.0, 1),
        (0.75, -2.0, 1.6, 0.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_a_bad_token(
    ratio: float, advantage: float, loss: float, slope: float, clipped: float
) -> None:
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    found = lm_terms(
        logprobs=logprobs,
        entropies=torch.zeros(1),
        old_logprobs=torch.zeros(1),
        advantages=torch.tensor([advantage]),
        lengths=torch.tensor([1]),
        clip=Clip(low=0.2, high=0.3, dual=3.0),
    )
    found.policy_loss.sum().backward()
    assert logprobs.grad is not None
    assert (found.policy_loss.item(), logprobs.grad.item()) == (
        pytest.approx(loss),
        pytest.approx(slope),
    )
    assert found.clipped_high.item() == clipped


@pytest.mark.parametrize(
    ("value", "clip", "loss", "slope"),
    [
        (3.0, None, 0.5, -1.0),
        (3.0, 5.0, 0.5, -1.0),  # inside the clip: as without
        (
            3.0,
            0.5,
            3.125,
            0.0,
        ),  # old value 1 may move to 1.5 only, 2.5 short of the return
        (5.0, 0.5, 3.125, 0.0),
        (9.0, 0.5, 12.5, 5.0),  # worse than the clipped estimate: pulled back
    ],
)
def test_value_loss(
    value: float, clip: float | None, loss: float, slope: float
) -> None:
    values = torch.tensor([value], requires_grad=True)
    result = value_loss(
        values,
        old_values=torch.tensor([1.0]),
        returns=torch.tensor([4.0]),
        value_clip=clip,
    )
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("value", [0.0, 1.2, 3.0, 9.0])
def test_a_clipped_value_pushes_no_more(value: float, clip: float | None) -> None:
    values = torch.tensor([value], requires_grad=True)
    old, returns = torch.tensor([1.0]), torch.tensor([4.0])
    (slope,) = torch.autograd.grad(value_loss(values, old, returns, clip).sum(), values)
    assert is_value_clipped(values.detach(), old, returns, clip).tolist() == [
        float(slope.item() == 0.0)
    ]
    assert (slope.item() == 0.0) == (clip is not None and value == 3.0)


def test_samples_beyond_either_bound_count_as_clipped() -> None:
    ratios = torch.tensor([0.7, 0.85, 1.0, 1.25, 1.35])
    nothing = ratios * 0
    old = StepSamples(*[nothing] * 6)
    found = ppo_slopes(
        ratios.log(),
        nothing,
        nothing,
        old,
        CLIP,
        value_clip=None,
        value_coef=1.0,
        count=10,
    )
    assert dict(zip(PPO_MEANS, found.shares.tolist(), strict=True))[
        "clip_fraction"
    ] == pytest.approx(2 / 10)


@pytest.mark.parametrize("value_clip", [None, 0.3])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1 << 20), samples=st.integers(0, 40))
def test_slopes_are_those_of_autograd(
    value_clip: float | None, seed: int, samples: int
) -> None:
    normal = functools.partial(
        torch.randn,
        samples,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    old = StepSamples(*(normal() for _ in range(6)))
    logprobs, values = (
        (old.logprobs + 0.4 * normal()).requires_grad_(),
        (old.values + 0.4 * normal()).requires_grad_(),
    )
    policy = clipped_surrogate(logprobs - old.logprobs, old.advantages, CLIP)
    value = value_loss(values, old.values, old.returns, value_clip)
    (policy.sum() + 0.7 * value.sum()).div(50).backward()
    with torch.no_grad():
        found = ppo_slopes(
            logprobs,
            values,
            normal(),
            old,
            CLIP,
            value_clip=value_clip,
            value_coef=0.7,
            count=50,
        )
    torch.testing.assert_close(found.logprobs, logprobs.grad)
    torch.testing.assert_close(found.values, values.grad)
    shares = (
        torch.stack(
            [policy.sum(), value.sum(), kl_k3(logprobs - old.logprobs).sum()]
        ).detach()
        / 50
    )
    torch.testing.assert_close(found.shares[[0, 1, 3]], shares)


def test_sequence_ratio_is_the_geometric_mean() -> None:
    log_ratio = torch.tensor([0.1, 0.3, -0.4], requires_grad=True)
    found = sequence_ratio(log_ratio, torch.tensor([2, 0, 1]))
    assert found.tolist() == pytest.approx([0.2, 0.2, -0.4])
    found[0].backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize(
    ("mean", "weights"),
    [
        ("token", [1 / 5, 1 / 5, 1 / 5]),
        ("sequence", [1 / 6, 1 / 6, 1 / 3]),  # 3 samples in the step
        ("constant", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_token_weights(mean: str, weights: list[float]) -> None:
    totals = Totals(samples=3, tokens=5, longest=10)
    assert token_weights(
        mean, torch.tensor([2, 0, 1]), totals
    ).tolist() == pytest.approx(weights)


def terms_of(
    logprobs: Tensor, advantages: Sequence[float], lengths: Sequence[int], **others: Any
) -> LmTerms:
    """Of tokens that were drawn with probability one."""
    nothing = torch.zeros(len(logprobs))
    columns = {
        "old_logprobs": nothing,
        "entropies": nothing,
        "advantages": torch.tensor(advantages),
    } | others
    return lm_terms(
        logprobs=logprobs,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        clip=CLIP,
        **columns,
    )


def test_with_cispo_every_token_pushes_with_a_clipped_weight() -> None:
    logprobs = (
        torch.tensor([1.5, 0.5, 1.1, 0.4]).log().requires_grad_()
    )  # ratios; CLIP has 0.8 and 1.3
    terms = terms_of(logprobs, [1.0, -1.0, 2.0, 1.0], [1, 3], surrogate="cispo")
    terms.policy_loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.3, 0.8, -2.2, -0.8])
    assert terms.policy_loss.tolist() == pytest.approx(
        [
            -1.3 * math.log(1.5),
            0.8 * math.log(0.5),
            -2.2 * math.log(1.1),
            -0.8 * math.log(0.4),
        ]
    )
    assert (terms.clipped_low.tolist(), terms.clipped_high.tolist()) == (
        [0.0, 1.0, 0.0, 1.0],
        [1.0, 0.0, 0.0, 0.0],
    )
    shorter = terms_of(
        torch.tensor([1.5, 0.5]).log(),
        [1.0, 1.0],
        [2],
        surrogate="cispo",
        ratio="sequence",
    )
    ratio = math.sqrt(0.75)  # of the sequence: inside the clip
    assert shorter.policy_loss.tolist() == pytest.approx(
        [-ratio * math.log(1.5), -ratio * math.log(0.5)]
    )


def test_terms_by_hand() -> None:
    # Ratios 1.5 (good: clipped at 1.3), 0.5 (bad: clipped at 0.8), 1 (with half the importance).
    columns = {
        "entropies": torch.tensor([0.1, 0.2, 0.3]),
        "importance": torch.tensor([1.0, 1.0, 0.5]),
    }
    terms = terms_of(
        torch.tensor([1.5, 0.5, 1.0]).log(), [1.0, -1.0, 2.0], [1, 2], **columns
    )
    assert terms.policy_loss.tolist() == pytest.approx([-1.3, 0.8, -1.0])
    assert terms.clipped_low.tolist() == [0.0, 1.0, 0.0]
    assert terms.clipped_high.tolist() == [1.0, 0.0, 0.0]
    weights = torch.tensor([0.5, 0.25, 0.25])
    assert terms.loss(weights).item() == pytest.approx(-0.65 + 0.2 - 0.25)
    assert terms.loss(weights, entropy_coef=0.1).item() == pytest.approx(
        -0.7 - 0.1 * 0.175
    )
    kl = (0.5 - math.log(1.5) + -0.5 - math.log(0.5)) / 3
    assert shares(terms, 3).tolist() == pytest.approx([-0.5, 0.2, kl, 1 / 3, 1 / 3])


def test_one_term_per_sequence_with_sequence_ratios_and_means() -> None:
    """Zheng et al. 2025, equation 5: the mean over sequences of min(s * A, clip(s) * A)."""
    logprobs = torch.tensor([0.2, 0.0, 0.5], dtype=torch.float64, requires_grad=True)
    lengths, totals = torch.tensor([2, 1]), Totals(samples=2, tokens=3, longest=9)
    terms = terms_of(logprobs, [1.0, 1.0, -2.0], lengths.tolist(), ratio="sequence")
    loss = terms.loss(token_weights("sequence", lengths, totals))
    loss.backward()
    first, second = math.exp(0.1), math.exp(0.5)
    assert loss.item() == pytest.approx((-first + 2 * second) / 2)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-first / 4, -first / 4, second])


def test_weights_of_tokens_act_on_their_own_tokens_in_gspo_token() -> None:
    """Zheng et al. 2025, equation 14, beside the same terms with numbers for what has no gradient."""
    importance = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
    first, second = math.exp(0.1), math.exp(0.5)
    slopes: dict[str, list[float]] = {}
    for ratio in ("sequence", "sequence_token"):
        logprobs = torch.tensor(
            [0.2, 0.0, 0.5], dtype=torch.float64, requires_grad=True
        )
        terms = terms_of(
            logprobs, [1.0, 1.0, -2.0], [2, 1], ratio=ratio, importance=importance
        )
        assert terms.policy_loss.tolist() == pytest.approx(
            [-0.5 * first, -2.0 * first, 2.0 * second]
        )
        terms.policy_loss.sum().backward()
        assert logprobs.grad is not None
        slopes[ratio] = logprobs.grad.tolist()
    assert slopes["sequence_token"] == pytest.approx(
        [-0.5 * first, -2.0 * first, 2.0 * second]
    )
    # The ratio of a sequence shares the weights of its tokens among them.
    assert slopes["sequence"] == pytest.approx(
        [-1.25 * first, -1.25 * first, 2.0 * second]
    )


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_that_is_too_large_for_a_float_makes_no_gradient_nan(
    ratio: str, surrogate: str, advantage: float
) -> None:
    """The first token has become e^99.9 times as likely; the second one is as likely as before."""
    logprobs = torch.tensor([-0.1, -1.0], requires_grad=True)
    terms = lm_terms(
        logprobs=logprobs,
        entropies=torch.zeros(2),
        old_logprobs=torch.tensor([-100.0, -1.0]),
        advantages=torch.full((2,), advantage),
        lengths=torch.tensor([1, 1]),
        clip=Clip(low=0.2, high=0.2),
        ratio=ratio,
        surrogate=surrogate,
    )
    terms.loss(torch.ones(2)).backward()  # type: ignore[no-untyped-call]
    assert all(bool(torch.isfinite(each).all()) for each in terms)
    assert logprobs.grad is not None
    first, second = logprobs.grad.tolist()
    assert second == pytest.approx(-advantage)
    # cispo keeps a gradient for each token, with a clipped weight
    kept = -1.2 * advantage if surrogate == "cispo" else 0.0
    assert first == pytest.approx(kept)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_such_a_ratio_makes_no_slope_nan(advantage: float) -> None:
    old = StepSamples(
        observations=torch.zeros(2, 1),
        actions=torch.zeros(2),
        logprobs=torch.tensor([-100.0, -1.0]),
        values=torch.zeros(2),
        advantages=torch.full((2,), advantage),
        returns=torch.zeros(2),
    )
    slopes = ppo_slopes(
        torch.tensor([-0.1, -1.0]),
        torch.zeros(2),
        torch.zeros(2),
        old,
        Clip(low=0.2, high=0.2),
        value_clip=None,
        value_coef=0.5,
        count=2,
    )
    assert slopes.logprobs.tolist() == pytest.approx([0.0, -0.5 * advantage])
    assert bool(torch.isfinite(slopes.shares).all())


def test_no_token_has_no_loss_but_a_gradient() -> None:
    for ratio in RATIOS:
        terms = terms_of(torch.zeros(0, requires_grad=True), [], [], ratio=ratio)
        loss = terms.loss(torch.zeros(0), entropy_coef=0.1)
        loss.backward()
        assert loss.item() == 0.0
        assert shares(terms, 1).tolist() == [0.0] * 5


def step_loss(
    columns: dict[str, Tensor],
    lengths: Sequence[int],
    parts: Sequence[Sequence[int]],
    ratio: str,
    mean: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient and shares of a step whose sequences are computed in `parts`."""
    totals = Totals(samples=len(lengths), tokens=sum(lengths), longest=9)
    logprobs = columns["logprobs"].clone().requires_grad_()
    by_sequence = torch.arange(sum(lengths)).split(list(lengths))
    losses, summed = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros(len(LmTerms._fields), dtype=torch.float64),
    )
    for part in parts:
        own = torch.cat([by_sequence[i] for i in part] or [torch.arange(0)])
        own_lengths = torch.tensor([lengths[i] for i in part], dtype=torch.int64)
        chosen = {name: column[own] for name, column in columns.items()} | {
            "logprobs": logprobs[own]
        }
        terms = lm_terms(**chosen, lengths=own_lengths, clip=CLIP, ratio=ratio)
        losses = losses + terms.loss(
            token_weights(mean, own_lengths, totals).double(), entropy_coef=0.1
        )
        summed += shares(terms, totals.tokens or 1)
    losses.backward()
    assert logprobs.grad is not None
    return losses.detach(), logprobs.grad, summed


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("mean", MEANS)
@settings(max_examples=30)
@given(data=st.data())
def test_neither_packing_nor_ranks_change_the_loss(
    ratio: str, mean: str, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    where = data.draw(
        st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    names = ("logprobs", "entropies", "old_logprobs", "advantages", "importance")
    columns = {
        name: torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
        for name in names
    }
    order = data.draw(st.permutations(range(len(lengths))))
    whole = step_loss(columns, lengths, [range(len(lengths))], ratio, mean)
    split = step_loss(
        columns,
        lengths,
        [[i for i in order if where[i] == part] for part in range(4)],
        ratio,
        mean,
    )
    for expected, found in zip(whole, split, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
