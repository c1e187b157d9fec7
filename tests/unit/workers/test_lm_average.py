"""The average of weights: what it becomes, and that looking at it leaves the weights as they were."""

from __future__ import annotations

import torch

from rlplace.workers.training.average import MovingAverage


def test_it_follows_the_weights_and_gives_them_back() -> None:
    weights = torch.zeros(3, dtype=torch.bfloat16)
    average = MovingAverage([weights], decay=0.75)
    weights.fill_(1.0)
    average.update()
    average.update()
    with average.in_place():
        assert weights.tolist() == [0.4375] * 3  # 1 - 0.75 ** 2
    assert weights.tolist() == [1.0] * 3
    assert average.host_bytes == 12
