"""A chunk is its steps one after the other, their rewards together, and nothing of what comes after an end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import (
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Rendering,
    Restorable,
    Spaces,
)
from rlplace.envs.registry import make_simulator


def made(rows: int = 1, chunk: int = 4, name: str = "Script-v0", **kwargs: Any) -> Any:
    return make_simulator(
        SimulatorEnvConfig(id=f"tests.gyms:{name}", kwargs=kwargs), rows, chunk
    )


def still(rows: int = 1, chunk: int = 4) -> Any:
    return np.zeros((rows, chunk), np.int64)


def test_rewards_are_added_up_and_what_follows_is_shown() -> None:
    simulator = made(rows=2)
    assert simulator.reset([1, 2])[:, :2].tolist() == [[1, 0]] * 2
    first = simulator.step(np.array([[0, 1, 2, 1], [2, 2, 2, 2]]))
    assert first.rewards.tolist() == [1 + 2 + 3 + 4] * 2
    assert first.observations[:, [1, 3]].tolist() == [
        [4, 1],
        [4, 2],
    ]  # the step, and the action before
    assert simulator.step(still(2)).rewards.tolist() == [5 + 6 + 7 + 8] * 2
    assert not (first.terminated | first.truncated).any()
    assert first.final_observations.shape == (0, 4)


@pytest.mark.parametrize(("end", "reward"), [(2, 3.0), (4, 10.0)])
def test_an_episode_that_ends_within_a_chunk_counts_as_far_as_it_went(
    end: int, reward: float
) -> None:
    simulator = made(terminate_at=[end, 9])
    simulator.reset([1])
    result = simulator.step(still())
    assert (
        result.rewards.tolist(),
        result.terminated.tolist(),
        result.truncated.tolist(),
    ) == (
        [reward],
        [True],
        [False],
    )
    assert (result.episode_returns, result.episode_lengths) == ([reward], [end])
    assert result.observations[0, 1] == 0, "the first of another episode"
    following = simulator.step(still())
    assert following.rewards.tolist() == [10.0]
    assert following.observations[0, 1] == 4


def test_a_cut_within_a_chunk_shows_where_it_was_cut_and_no_end_of_what_is_thrown_away() -> (
    None
):
    """Episodes are cut after three steps: of six actions the first three count."""
    simulator = made(rows=2, chunk=6, truncate_at=3)
    simulator.reset([1, 2])
    result = simulator.step(still(2, 6))
    assert (result.truncated.tolist(), result.terminated.tolist()) == (
        [True] * 2,
        [False] * 2,
    )
    assert result.rewards.tolist() == [6.0] * 2
    assert result.final_observations[:, :2].tolist() == [[1, 3]] * 2
    assert (result.episode_returns, result.episode_lengths) == ([6.0] * 2, [3] * 2)
    assert result.observations[:, 1].tolist() == [0, 0]


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    """One whose episodes end within chunks, beside one whose episodes do not, and alone."""

    def luck(seeds: list[int]) -> list[float]:
        simulator = made(rows=len(seeds), terminate_at=3)
        simulator.reset(seeds)
        return [
            float(simulator.step(still(len(seeds))).observations[0, 2])
            for _ in range(5)
        ]

    assert luck([7]) == luck([7, 8, 9])


def test_it_can_be_restored_and_drawn_if_the_simulator_can() -> None:
    drawn = made(chunk=2, name="Drawn-v0", render_mode="rgb_array")
    assert isinstance(drawn, Rendering)
    assert drawn.frames_per_s == 25
    counter = made(chunk=2, name="Counter-v0")
    assert isinstance(counter, Restorable)
    counter.reset([3])
    counter.step(still(1, 2))
    (state,) = counter.row_states()
    other = made(chunk=2, name="Counter-v0")
    other.reset([4])
    assert not other.restore([state])
    assert (
        other.step(still(1, 2)).observations.tolist()
        == counter.step(still(1, 2)).observations.tolist()
    )

    class Bare:
        reset = restart = close = step = None

    from rlplace.envs.chunks import in_chunks

    bare = in_chunks(Bare(), 2)
    assert not isinstance(bare, Restorable | Rendering)


def test_actions_have_the_chunk_as_their_first_axis() -> None:
    def actions(of: Any) -> Any:
        return Spaces(observation_shape=(1,), actions=of).chunked(3).actions

    assert actions(DiscreteActions(n=4)) == MultiDiscreteActions(
        n=(4, 4, 4), shape=(3,)
    )
    assert actions(MultiDiscreteActions(n=(2, 5), shape=(2,))) == MultiDiscreteActions(
        n=(2, 5) * 3, shape=(3, 2)
    )
    arm = ContinuousActions(shape=(2,), low=(-1.0, 0.0), high=(1.0, 2.0))
    assert actions(arm) == ContinuousActions(
        shape=(3, 2), low=(-1.0, 0.0) * 3, high=(1.0, 2.0) * 3
    )
