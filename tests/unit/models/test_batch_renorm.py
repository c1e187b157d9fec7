"""Batch renormalisation, against the formulas of its paper (arXiv:1702.03275)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlplace.models.batch_renorm import WARM_UP, BatchRenorm


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_before_the_warm_up_a_batch_is_normalised_by_its_own_statistics() -> None:
    layer = BatchRenorm(3).train()
    seen = 5 + 2 * inputs(64, 3)
    found = layer(seen)
    plain = torch.nn.BatchNorm1d(3, eps=1e-3).train()
    torch.testing.assert_close(found, plain(seen), atol=1e-5, rtol=1e-5)
    assert layer.passes.item() == 1
    torch.testing.assert_close(layer.mean[0], 0.01 * seen.mean(0))
    torch.testing.assert_close(
        layer.variance[0], 0.99 + 0.01 * seen.var(0, correction=0)
    )


def test_after_the_warm_up_the_result_is_that_of_the_running_statistics() -> None:
    """r and d undo the statistics of the batch, and the gradient still flows through them."""
    layer = BatchRenorm(3).train()
    layer.passes.fill_(WARM_UP)
    layer.mean.fill_(0.4)
    layer.variance.fill_(1.5)
    seen = inputs(64, 3).requires_grad_(True)
    running = layer.eval()(seen.detach())
    found = layer.train()(seen)
    # epsilon is added to another variance, as in the code of CrossQ's authors
    torch.testing.assert_close(found.detach(), running, atol=5e-3, rtol=5e-3)
    # Moving all samples together changes nothing of what the gradient sees
    (moved,) = torch.autograd.grad((found * inputs(64, 3).abs()).sum(), seen)
    assert moved.sum(0).abs().max() < 1e-4


def test_a_batch_far_from_the_running_statistics_is_corrected_within_bounds() -> None:
    layer = BatchRenorm(1).train()
    layer.passes.fill_(WARM_UP)
    seen = 1000 + 100 * inputs(256, 1)
    found = layer(seen)
    # r is at most 3 and d at most 5
    normal = (seen - seen.mean()) / seen.std(correction=0)
    torch.testing.assert_close(found, 3 * normal + 5, atol=1e-2, rtol=1e-2)


def test_critics_of_an_ensemble_have_statistics_of_their_own() -> None:
    layer = BatchRenorm(3, leading=(2,)).train()
    seen = inputs(2, 64, 3) * torch.tensor([1.0, 7.0])[:, None, None]
    found = layer(seen)
    for number in (0, 1):
        alone = BatchRenorm(3).train()
        torch.testing.assert_close(found[number], alone(seen[number]))
        torch.testing.assert_close(layer.variance[number], alone.variance)
    assert layer.variance[1].mean() == pytest.approx(
        float(0.99 + 0.01 * seen[1].var(0, correction=0).mean()), rel=1e-4
    )
