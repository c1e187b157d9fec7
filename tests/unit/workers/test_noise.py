"""Noise by row, step and iteration: the same whoever asks, in whatever order."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.workers.roles.rollout import Draw, RowNoise, normal, uniform


def noise(seed: int = 0, rows: int = 6, draw: Draw = normal) -> RowNoise:
    return RowNoise(seed=seed, rows=rows, shape=(2,), draw=draw)


def test_a_part_of_the_rows_is_a_part_of_the_noise() -> None:
    whole = noise().rows(3, 5, 0, 6)
    assert (whole.shape, whole.dtype) == ((6, 2), np.float32)
    assert np.array_equal(noise().rows(3, 5, 2, 4), whole[2:4])


def test_the_order_of_asking_does_not_matter() -> None:
    forwards, backwards = noise(), noise()
    steps = range(40)  # more than are kept
    a = {t: forwards.rows(0, t, 0, 6).copy() for t in steps}
    b = {t: backwards.rows(0, t, 0, 6).copy() for t in reversed(steps)}
    assert all(np.array_equal(a[t], b[t]) for t in steps)
    assert np.array_equal(forwards.rows(0, 0, 0, 6), a[0])


def test_no_noise_comes_twice() -> None:
    drawn = [noise(seed).rows(i, t, 0, 6) for seed in (0, 1) for i in (0, 1, 2) for t in (0, 1, 2)]
    values = np.concatenate(drawn).ravel()
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize(("draw", "mean", "std"), [(normal, 0.0, 1.0), (uniform, 0.5, 12**-0.5)])
def test_the_distribution(draw: Draw, mean: float, std: float) -> None:
    drawn = noise(rows=20_000, draw=draw).rows(1, 1, 0, 20_000)
    assert drawn.mean() == pytest.approx(mean, abs=0.02)
    assert drawn.std() == pytest.approx(std, abs=0.02)


def test_uniform_noise_stays_below_one() -> None:
    drawn = noise(rows=20_000, draw=uniform).rows(0, 0, 0, 20_000)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0


def test_what_is_handed_out_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        noise().rows(0, 0, 0, 1)[0] = 0.0
