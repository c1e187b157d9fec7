"""Random numbers of environments that do not follow from the seeds of their episodes, and those that do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.registry import row_seeds

Seed = int | None


class Drawing(gymnasium.Env[Any, Any]):
    """Draws a number at each reset and in each step. Episodes end after 3 steps."""

    def __init__(self) -> None:
        self.observation_space = Box(0, 1, (1,), np.float64)
        self.action_space = Discrete(2)
        self._steps = 0

    def seed(self, seed: Seed) -> None:
        super().reset(seed=seed)

    def draw(self) -> float:
        return float(self.np_random.random())

    def reset(self, *, seed: Seed = None, options: Any = None) -> Any:
        self.seed(seed)
        self._steps = 0
        return np.array([self.draw()]), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return np.array([self.draw()]), 1.0, False, self._steps == 3, {}


class AlwaysSeeded(Drawing):
    def seed(self, seed: Seed) -> None:
        super().seed(42)


class SeededOnceMore(Drawing):
    """The usual slip: a default in place of None."""

    def seed(self, seed: Seed) -> None:
        super().seed(42 if seed is None else seed)


class SeedsProcess(Drawing):
    def seed(self, seed: Seed) -> None:
        np.random.seed(0)

    def draw(self) -> float:
        return float(np.random.rand())


class SeedsPython(SeedsProcess):
    def seed(self, seed: Seed) -> None:
        random.seed("always")

    def draw(self) -> float:
        return random.random()


class OfItsOwn(Drawing):
    """All environments have a generator with the same seed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = np.random.RandomState(0)

    def seed(self, seed: Seed) -> None:
        """The seed is ignored."""

    def draw(self) -> float:
        return float(self.generator.uniform())


class OfPython(OfItsOwn):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def draw(self) -> float:
        return float(self.generator.random())


class Unseeded(OfItsOwn):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng()


class Ignoring(Drawing):
    """Draws from np_random, which gets no seed."""

    def seed(self, seed: Seed) -> None:
        """The seed is ignored."""


class FixedMap(Drawing):
    """By design, all episodes begin alike, on a map that was drawn when the environment was made."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)
        self._map = self.generator.random()

    def draw(self) -> float:
        return self._map


class Plain(FixedMap):
    """Has no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        del self.generator


class SeededFromSeed(OfItsOwn):
    """A generator of its own follows from the seed."""

    def seed(self, seed: Seed) -> None:
        if seed is not None:
            self.generator = np.random.default_rng(seed)


class FromNumbers(SeededFromSeed):
    """Each episode has a generator of its own, whose seed is drawn."""

    def seed(self, seed: Seed) -> None:
        gymnasium.Env.reset(self, seed=seed)
        self.generator = np.random.default_rng(int(self.np_random.integers(1 << 30)))


SHARED = np.random.default_rng(5)


class Sharing(OfItsOwn):
    """All environments of a process draw from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = SHARED


class OfProcess(SeedsProcess):
    """Draws from the numbers of the process, which the run seeds."""

    def seed(self, seed: Seed) -> None:
        """Nothing is seeded."""


def remarks_of(make: Callable[[], gymnasium.Env[Any, Any]], rows: int) -> str:
    envs = GymnasiumVector([make() for _ in range(rows)], max_episode_steps=None)
    envs.reset(row_seeds(0, 0, rows))
    for _ in range(40):
        envs.step(np.zeros(rows, np.int64))
    return "\n".join(envs.remarks)


@pytest.mark.parametrize(
    ("make", "rows", "said"),
    [
        (AlwaysSeeded, 1, "AlwaysSeeded.np_random"),
        (AlwaysSeeded, 3, "AlwaysSeeded.np_random"),
        (SeededOnceMore, 1, "SeededOnceMore.np_random"),
        (SeededOnceMore, 2, "SeededOnceMore.np_random"),
        (SeedsProcess, 1, "numpy.random"),
        (SeedsProcess, 2, "numpy.random"),
        (SeedsPython, 2, "random"),
        (OfItsOwn, 2, "OfItsOwn.generator"),
        (OfPython, 2, "OfPython.generator"),
    ],
)
def test_numbers_that_are_the_same_for_other_seeds_are_said(
    make: type[Drawing], rows: int, said: str
) -> None:
    text = remarks_of(make, rows)
    assert f"draw the same random numbers: {said};" in text


@pytest.mark.parametrize(
    ("make", "name"), [(Unseeded, "generator"), (Ignoring, "np_random")]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_numbers_that_no_seed_repeats_are_said(
    make: type[Drawing], name: str, rows: int
) -> None:
    text = remarks_of(make, rows)
    assert "is not seeded by reset(seed=...)" in text
    assert f": {make.__name__}.{name};" in text


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "make",
    [Drawing, FixedMap, Plain, SeededFromSeed, FromNumbers, Sharing, OfProcess],
)
def test_others_are_not(make: type[Drawing], rows: int) -> None:
    assert remarks_of(make, rows) == ""


@pytest.mark.parametrize(
    "name", ["FrozenLake-v1", "Blackjack-v1", "CartPole-v1", "CliffWalking-v1"]
)
def test_environments_of_gymnasium_give_no_alarm(name: str) -> None:
    assert remarks_of(lambda: gymnasium.make(name, max_episode_steps=10), 2) == ""
