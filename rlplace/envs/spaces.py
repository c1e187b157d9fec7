"""Shapes of a simulator's observations and actions; plain values, known before any worker starts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiscreteActions:
    """One of `n` choices, int64, 0-based."""

    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousActions:
    """A float32 vector; the simulator gets it clipped to [low, high], the learner sees it unclipped."""

    shape: tuple[int, ...]
    low: tuple[float, ...]  # flattened, one bound per element
    high: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """Observations and actions of every env of a job."""

    observation_shape: tuple[int, ...]  # float32
    actions: DiscreteActions | ContinuousActions
    max_episode_steps: int | None = None
