"""Whole episodes are played by a policy; what would never end, or says nothing, is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.play import _EVALUATION, Played, play
from rlplace.envs.registry import describe, make_simulator, row_seeds
from rlplace.errors import ConfigError, SimulatorError
from tests.gyms import Script


def played(
    name: str, *, episodes: int = 3, longest: int = 50, **kwargs: object
) -> list[Played]:
    env = SimulatorEnvConfig(id=f"tests.gyms:{name}-v0", kwargs=kwargs)

    def act(observations: NDArray[Any], _begins: NDArray[np.bool_]) -> NDArray[Any]:
        return np.zeros(len(observations), np.int64)

    return play(env, describe(env), act, episodes=episodes, seed=0, longest=longest)


def test_an_episode_that_does_not_end_is_an_error_and_no_wait_for_ever() -> None:
    assert [each.length for each in played("Script", terminate_at=50)] == [
        50,
        50,
        50,
    ], "the last step may end it"
    with pytest.raises(SimulatorError) as caught:
        played("Script", terminate_at=51)
    assert caught.value.code == "endless-episode"
    told = str(caught.value)
    assert "50 steps" in told
    assert "fix: longest=500 " in told
    with pytest.raises(SimulatorError, match="16 of 20 episodes"):
        played("Script", episodes=20, terminate_at=[50, 51])


class Uneven(Script):
    """Its episodes are short in half of the rows, and long in the others: the luck of the seed decides."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, reward, _, truncated, info = super().step(action)
        ends = self._step == (2 if self._luck % 2 else 20)
        return shown, reward, ends, truncated, info


def test_short_episodes_count_no_more_often_than_long_ones() -> None:
    """Each row plays its share, whichever rows are done first."""
    env = SimulatorEnvConfig(id=f"{__name__}:Uneven")

    def act(observations: NDArray[Any], _begins: NDArray[np.bool_]) -> NDArray[Any]:
        return np.zeros(len(observations), np.int64)

    first = [
        int(observation[2]) % 2
        for observation in make_simulator(env, 16, 1).reset(
            row_seeds(0, 0, 16, _EVALUATION)
        )
    ]
    assert 0 < sum(first) < 16
    lengths = [
        each.length
        for each in play(env, describe(env), act, episodes=16, seed=0, longest=50)
    ]
    assert lengths == [2 if short else 20 for short in first]
    # The first of 32 episodes are the same; no row plays more than two
    more = play(env, describe(env), act, episodes=32, seed=0, longest=50)
    assert [each.length for each in more[::2]] == lengths


def test_numbers_beside_an_image_have_to_be_finite() -> None:
    assert len(played("Corner", beside=True)) == 3
    with pytest.raises(SimulatorError) as caught:
        played("Corner", beside=True, poison_at=4)
    assert caught.value.code == "simulator-not-finite"


def test_a_policy_of_normalized_observations_needs_their_statistics() -> None:
    wrapper = WrapperConfig(name="gymnasium.wrappers:NormalizeObservation")
    env = SimulatorEnvConfig(id="CartPole-v1", wrappers=(wrapper,))

    def act(observations: NDArray[Any], _begins: NDArray[np.bool_]) -> NDArray[Any]:
        return np.zeros(len(observations), np.int64)

    with pytest.raises(ConfigError, match="NormalizeObservation") as caught:
        play(env, describe(env), act, episodes=1, seed=0, longest=500)
    assert caught.value.codes == ("no-statistics",)
    # A simulator that brings the wrapper itself is named instead
    env = SimulatorEnvConfig(id="tests.gyms:normalizing", max_episode_steps=50)
    with pytest.raises(ConfigError, match="gyms:normalizing") as caught:
        play(env, describe(env), act, episodes=1, seed=0, longest=500)
    assert caught.value.codes == ("no-statistics",)
