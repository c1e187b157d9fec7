"""Bounds of actions that do not suit an untrained policy are said, and the wrapper that is named scales the actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.config.blocks.simulator import WrapperConfig as Wrapper
from rlplace.envs.action_bounds import action_remark
from rlplace.envs.contract import ContinuousActions, DiscreteActions
from rlplace.envs.registry import describe, find_adapter
from tests.gyms import Script

INF = float("inf")


class Far(Script):
    """Takes actions between -2000 and 2000."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = Box(-2000.0, 2000.0, (2,))


def remark(low: float, high: float, log_std: float = 0.0) -> str | None:
    actions = ContinuousActions(shape=(2,), low=(-INF, low), high=(INF, high))
    return action_remark("odd:Far", actions, log_std)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-2000.0, 2000.0, "tries 0.05 % of that range"),
        (0.0, 255.0, "tries 0.78 % of that range"),
        (-0.01, 0.01, "nearly all that an untrained policy tries are clipped"),
        (100.0, 200.0, "most that an untrained policy tries are clipped"),
        (-5.0, -3.0, "most that an untrained policy tries are clipped"),
    ],
)
def test_bounds_that_do_not_suit_the_policy_are_said(
    low: float, high: float, words: str
) -> None:
    said = remark(low, high)
    assert said is not None
    assert words in said
    assert "odd:Far" in said
    assert "gymnasium.wrappers:RescaleAction" in said


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1.0, 1.0), (-0.4, 0.4), (-10.0, 10.0), (0.0, 1.0), (-INF, INF), (0.0, INF)],
)
def test_other_bounds_are_not(low: float, high: float) -> None:
    assert remark(low, high) is None


def test_the_deviation_of_the_policy_counts() -> None:
    assert remark(-2000.0, 2000.0, log_std=6.0) is None
    assert remark(-1.0, 1.0, log_std=6.0) is not None
    assert action_remark("odd:Far", DiscreteActions(n=3), 0.0) is None


def test_the_wrapper_that_is_named_scales_the_actions() -> None:
    wrapper = Wrapper(
        name="gymnasium.wrappers:RescaleAction",
        kwargs={"min_action": -1.0, "max_action": 1.0},
    )
    config = SimulatorEnvConfig(id=f"{__name__}:Far", wrappers=(wrapper,))
    spaces = describe(config)
    assert action_remark(config.id, spaces.actions, 0.0) is None
    envs: Any = find_adapter("gymnasium").make(config, 1)
    envs.reset([0])
    envs.step(np.array([[0.5, -3.0]], np.float32))
    (taken,) = envs._envs[0].unwrapped.taken
    assert taken == pytest.approx([1000.0, -2000.0])
