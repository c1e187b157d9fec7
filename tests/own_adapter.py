"""An adapter of a user whose simulator changes its actions in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import DiscreteActions, Spaces, StepResult
from rlplace.errors import Problem


class Simulator:
    """Shows zeros."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def reset(self, seeds: Sequence[int]) -> Any:
        return self._shown(self._rows)

    def restart(self, rows: Sequence[int]) -> Any:
        return self._shown(len(rows))

    def step(self, actions: Any) -> StepResult:
        actions[...] = 0
        return StepResult(
            observations=self._shown(self._rows),
            rewards=np.ones(self._rows, np.float32),
            terminated=np.zeros(self._rows, np.bool_),
            truncated=np.zeros(self._rows, np.bool_),
            final_observations=self._shown(0),
            episode_returns=[],
            episode_lengths=[],
        )

    def close(self) -> None:
        pass

    def _shown(self, rows: int) -> Any:
        return np.zeros((rows, 4), np.float32)


class Adapter:
    def check(self, config: SimulatorEnvConfig) -> Sequence[Problem]:
        return []

    def describe(self, config: SimulatorEnvConfig) -> Spaces:
        return Spaces(observation_shape=(4,), actions=DiscreteActions(n=3))

    def make(self, config: SimulatorEnvConfig, rows: int) -> Simulator:
        return Simulator(rows)
