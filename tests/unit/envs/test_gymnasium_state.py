"""Simulators whose state was taken in the middle of episodes go on in others to the bit, or begin anew and say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.contract import Restorable, StepResult
from rlplace.envs.gymnasium_results import Results
from rlplace.envs.gymnasium_state import freeze_statistics, restore, state_of
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.registry import find_adapter, row_seeds
from rlplace.errors import ConfigError
from rlplace.workers.roles.episodes import Episodes, read

MUJOCO = (
    "HalfCheetah-v5",
    "Hopper-v5",
    "InvertedPendulum-v5",
    "Ant-v5",
    "Humanoid-v5",
    "Reacher-v5",
)
CLASSIC = (
    "CartPole-v1",
    "Pendulum-v1",
    "Acrobot-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
)
OWN = ("tests.gyms:Counter-v0", "tests.gyms:Wrapped-v0", "tests.gyms:hidden")
ROWS = 4


def vector(
    env: str, rows: int, first_row: int = 0
) -> tuple[GymnasiumVector, np.ndarray]:
    made = find_adapter("gymnasium").make(
        SimulatorEnvConfig(id=env, max_episode_steps=25), rows
    )
    assert isinstance(made, GymnasiumVector)
    return made, made.reset(row_seeds(5, first_row, rows))


def actions(env: GymnasiumVector, steps: int) -> list[Any]:
    rng, space = np.random.default_rng(2), env._envs[0].action_space
    if isinstance(space, gymnasium.spaces.Discrete):
        return [rng.integers(space.n, size=ROWS) for _ in range(steps)]
    return [
        rng.standard_normal((ROWS, *(space.shape or ()))).astype(np.float32)
        for _ in range(steps)
    ]


def joined(results: Sequence[StepResult]) -> tuple[Any, ...]:
    """One step of several vectors as one."""
    parts = [
        (r.observations, r.rewards, r.terminated, r.truncated, r.final_observations)
        for r in results
    ]
    arrays = [np.concatenate(part).tolist() for part in zip(*parts, strict=True)]
    return (
        *arrays,
        [
            r
            for result in results
            for r in zip(result.episode_returns, result.episode_lengths, strict=True)
        ],
    )


@pytest.mark.parametrize("env", [*MUJOCO, *CLASSIC, *OWN])
def test_others_go_on_to_the_bit_whatever_rows_they_have(
    env: str, tmp_path: Path
) -> None:
    whole, _ = vector(env, ROWS)
    todo = actions(whole, 47)
    for action in todo[:17]:  # with a limit of 25, nowhere near a reset for most
        observations = whole.step(action).observations
    assert isinstance(whole, Restorable)
    states = whole.row_states()
    for first in (0, 3):  # two ranks that saved, of 3 rows and 1
        part = states[first : first + 3] if first == 0 else states[3:]
        lengths = np.full(len(part), 17)
        Episodes(
            first_row=first,
            observations=observations[first : first + 3],
            lengths=lengths,
            states=part,
        ).write(tmp_path)
    others = []
    for first in (0, 2):  # two that go on, of 2 rows each, which have stepped before
        other, begin = vector(env, 2, first + 50)
        other.step(todo[0][:2])
        saved = read(tmp_path, range(first, first + 2), begin)
        assert saved.observations.tolist() == observations[first : first + 2].tolist()
        assert other.restore(saved.states) == {}
        others.append(other)
    for action in todo[17:]:
        found = joined(
            [
                other.step(part)
                for other, part in zip(others, (action[:2], action[2:]), strict=True)
            ]
        )
        assert found == joined([whole.step(action)])


def test_what_cannot_tell_its_state_begins_episodes_with_the_random_numbers_that_came_next() -> (
    None
):
    whole, _ = vector("tests.gyms:Script-v0", 1)
    whole.step(np.zeros(1, np.int64))
    (state,) = whole.row_states()
    assert set(state) == {"random", "return", "length"}
    other, _ = vector("tests.gyms:Script-v0", 1, 7)
    begun = other.restore([state])
    luck = whole._envs[0].reset()[0][2]
    assert (begun[0][1], begun[0][2]) == (0, luck)
    assert other.step(np.zeros(1, np.int64)).rewards.tolist() == [1.0]


def test_a_class_of_somebody_else_is_not_taken_for_one_that_is_known() -> None:
    from gymnasium.envs.classic_control import CartPoleEnv

    class Remembering(CartPoleEnv):
        """Has more than CartPole has."""

    envs = GymnasiumVector([Remembering()], max_episode_steps=9)
    envs.reset([0])
    assert list(envs.restore(envs.row_states())) == [0]


def test_rows_that_are_nowhere_and_files_that_are_damaged_are_named(
    tmp_path: Path,
) -> None:
    observations = np.zeros((2, 3), np.float32)
    episodes = Episodes(
        first_row=0,
        observations=observations,
        lengths=np.zeros(2, np.int64),
        states=[{}, {}],
    )
    name = episodes.write(tmp_path)
    with pytest.raises(ConfigError, match="no row 2") as caught:
        read(tmp_path, range(1, 3), observations)
    assert caught.value.codes == ("other-state",)
    with pytest.raises(ConfigError, match=r"observations of float32 \[3\]"):
        read(tmp_path, range(2), np.zeros((2, 5), np.float32))
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=name) as caught:
        read(tmp_path, range(2), observations)
    assert caught.value.codes == ("checkpoint-damaged",)


# ── statistics of wrappers ───────────────────────────────────────────────────────────────────────────────────────────

NORMALIZED = (
    WrapperConfig(name="gymnasium.wrappers:NormalizeObservation"),
    WrapperConfig(name="gymnasium.wrappers:NormalizeReward"),
)


def normalized(first_row: int = 0) -> tuple[GymnasiumVector, np.ndarray]:
    config = SimulatorEnvConfig(
        id="Pendulum-v1", max_episode_steps=25, wrappers=NORMALIZED
    )
    made = find_adapter("gymnasium").make(config, ROWS)
    assert isinstance(made, GymnasiumVector)
    return made, made.reset(row_seeds(5, first_row, ROWS))


def test_statistics_of_wrappers_go_on_to_the_bit() -> None:
    env, _ = normalized()
    taken = actions(env, 80)
    for action in taken[:40]:
        env.step(action)
    states = env.row_states()
    expected = [env.step(action) for action in taken[40:]]
    other, _ = normalized(first_row=100)
    assert other.restore(states) == {}
    for action, result in zip(taken[40:], expected, strict=True):
        again = other.step(action)
        assert np.array_equal(again.observations, result.observations)
        assert np.array_equal(again.rewards, result.rewards)
        assert again.episode_returns == result.episode_returns


def test_returns_are_of_the_environments_own_rewards() -> None:
    env, _ = normalized()
    plain, _ = vector("Pendulum-v1", ROWS)
    for action in actions(env, 30):
        result, own = env.step(action), plain.step(action)
        assert result.episode_returns == own.episode_returns
        assert not np.array_equal(result.rewards, own.rewards)


def test_a_policy_is_evaluated_with_the_statistics_of_its_rows() -> None:
    env, _ = normalized()
    for action in actions(env, 40):
        env.step(action)
    tested, _ = normalized(first_row=100)
    assert tested.statistics
    assert tested.take_statistics(env.row_states())
    for action in actions(tested, 5):
        tested.step(action)
    for own, there in zip(tested._envs, env._envs, strict=True):
        running, trained = (e.get_wrapper_attr("obs_rms") for e in (own, there))
        assert np.array_equal(running.mean, trained.mean)
        assert np.array_equal(running.var, trained.var)
    # Fewer rows were trained than are played.
    assert tested.take_statistics(env.row_states()[:1])
    last = tested._envs[-1].get_wrapper_attr("obs_rms")
    assert np.array_equal(last.mean, env._envs[0].get_wrapper_attr("obs_rms").mean)
    assert not tested.take_statistics([])


def test_statistics_of_rewards_never_become_those_of_observations() -> None:
    rewards = NormalizeReward(gymnasium.make("Pendulum-v1"))
    both = NormalizeReward(NormalizeObservation(gymnasium.make("Pendulum-v1")))
    for env in (rewards, both):
        env.reset(seed=0)
        for _ in range(20):
            env.step(env.action_space.sample())
    known = state_of(rewards)
    other = NormalizeObservation(gymnasium.make("Pendulum-v1"))
    other.reset(seed=0)
    before = other.obs_rms.mean.copy()
    assert not freeze_statistics(other, known)
    restore(other, known)
    assert np.array_equal(other.obs_rms.mean, before)
    # Of two wrappers, each takes its own
    restore(rewards, state_of(both))
    assert rewards.return_rms.mean == both.return_rms.mean
    assert not freeze_statistics(both, known)


class Unstable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Makes a velocity of the third step huge, at which MuJoCo resets its data."""

    def step(self, action: Any) -> Any:
        data = cast(Any, self.unwrapped).data
        if round(data.time, 2) == 0.08:
            data.qvel[0] = 1e12
        return self.env.step(action)


@pytest.mark.parametrize(("broken", "said"), [(True, 1), (False, 0)])
def test_a_simulation_that_mujoco_sets_back_is_said(
    broken: bool, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    # MuJoCo writes a log file
    monkeypatch.chdir(tmp_path)
    env = gymnasium.make("InvertedPendulum-v5", max_episode_steps=-1)
    envs = GymnasiumVector([Unstable(env) if broken else env], max_episode_steps=6)
    envs.reset([0])
    shown = [envs.step(np.zeros((1, 1), np.float32)).observations for _ in range(12)]
    assert np.isfinite(shown).all()
    told = [each for each in envs.remarks if "set the simulation back" in each]
    assert len(told) == said


def test_warnings_of_another_library_are_not_read() -> None:
    """As those of mujoco_py, whose module begins with the same letters."""
    data = type("Data", (), {"__module__": "mujoco_py.cymj", "warning": ()})()
    results = Results("Old")
    results.look_at_simulation(type("Env", (), {"data": data})())
    assert results.remarks == []
