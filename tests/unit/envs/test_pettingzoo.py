"""Parallel environments of PettingZoo: agents as rows, agents that end early, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.contract import DiscreteActions
from rlplace.envs.pettingzoo_vector import PettingZooVector
from rlplace.envs.play import play
from rlplace.envs.registry import check, describe, find_adapter
from rlplace.errors import ConfigError, Problem, SimulatorError
from rlplace.workers.roles.env import Recording
from tests.parallel_envs import Race

RACE = SimulatorEnvConfig(kind="pettingzoo", id="tests.parallel_envs")


def made(rows: int = 6, **fields: Any) -> PettingZooVector:
    config = dataclasses.replace(RACE, **fields)
    envs = find_adapter("pettingzoo").make(config, rows)
    assert isinstance(envs, PettingZooVector)
    return envs


def refusal(**fields: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        describe(dataclasses.replace(RACE, **fields))
    (found,) = caught.value.problems
    return found


def test_each_agent_is_a_row() -> None:
    spaces = describe(RACE)
    assert spaces.together == 3
    assert spaces.observation_shape == (3,)
    assert spaces.actions == DiscreteActions(n=3, first=1)
    envs = made()
    shown = envs.reset([7, 8, 9, 10, 11, 12])
    assert shown[:, 0].tolist() == [0, 1, 2, 0, 1, 2]
    # An environment has the seed of its first agent
    assert len(set(shown[:3, 2].tolist())) == 1
    assert shown[0, 2] != shown[3, 2]
    again = made(3)
    assert np.array_equal(again.reset([10, 0, 0]), shown[3:])
    result = envs.step(np.array([0, 1, 2, 2, 1, 0]))
    # Choices begin at 1
    assert result.rewards.tolist() == pytest.approx([1.1, 2.1, 3.1, 3.1, 2.1, 1.1])
    assert result.observations[:, 1].tolist() == [1] * 6
    envs.close()
    assert all(env.closed for env in envs._envs)


def test_the_row_of_an_agent_that_has_ended_waits_for_the_others() -> None:
    envs = made(3)
    first = envs.reset([5, 5, 5])
    results = [envs.step(np.zeros(3, np.int64)) for _ in range(5)]
    # Agents end after 2, 4 and 3 steps; the last one by truncation
    alive = [[1, 1, 1], [0, 1, 1], [0, 1, 0]]
    for step, lives in enumerate(alive):
        shown = results[step].observations
        assert (shown[:, 1] > 0).tolist() == [bool(each) for each in lives]
        assert not (results[step].terminated | results[step].truncated).any()
    rewards = np.array([result.rewards for result in results[:4]])
    assert np.allclose(
        rewards,
        [[1.1, 1.1, 1.1], [1.2, 1.2, 1.2], [0.0, 1.3, 1.3], [0.0, 1.4, 0.0]],
    )
    # No agent is left: the episodes of all rows end, and all agents begin anew
    end = results[3]
    assert end.terminated.tolist() == [True, True, False]
    assert end.truncated.tolist() == [False, False, True]
    assert end.final_observations.tolist() == [[2.0, 3.0, first[0, 2]]]
    assert list(end.episode_returns) == pytest.approx([2.3, 5.0, 3.6])
    assert list(end.episode_lengths) == [2, 4, 3]
    assert end.observations[:, 1].tolist() == [0, 0, 0]
    assert results[4].observations[:, 1].tolist() == [1, 1, 1]
    # Agents that have ended are not asked for actions
    assert [len(taken) for taken in envs._envs[0].taken] == [3, 3, 2, 1, 3]


class Late(Race):
    """Gives agents that have ended a reward of their team."""

    def __init__(self, late: Any) -> None:
        super().__init__()
        self._late = late

    def step(self, actions: Any) -> Any:
        shown, rewards, *others = super().step(actions)
        ended = [each for each in self.possible_agents if each not in rewards]
        return (shown, rewards | dict.fromkeys(ended, self._late), *others)


def test_a_reward_for_an_agent_that_has_ended_is_said_to_be_lost() -> None:
    for late, said in ((7.0, 1), (np.array([7.0]), 1), (0.0, 0), (None, 0)):
        envs = PettingZooVector([Late(late)], max_episode_steps=None, name="late")
        envs.reset([5, 5, 5])
        rewards = [envs.step(np.zeros(3, np.int64)).rewards for _ in range(4)]
        # The first agent has ended after two steps
        assert [float(each[0]) for each in rewards[2:]] == [0.0, 0.0]
        assert len([r for r in envs.remarks if "counts nowhere" in r]) == said


def test_a_time_limit_ends_all_agents() -> None:
    envs = made(3, max_episode_steps=3)
    envs.reset([5, 5, 5])
    results = [envs.step(np.zeros(3, np.int64)) for _ in range(3)]
    assert results[2].terminated.tolist() == [True, False, False]
    assert results[2].truncated.tolist() == [False, True, True]
    assert results[2].final_observations[:, 0].tolist() == [1, 2]
    assert list(results[2].episode_lengths) == [2, 3, 3]


def test_rows_that_begin_anew_leave_the_other_agents_in_their_episode() -> None:
    envs = made(6)
    envs.reset([5] * 6)
    envs.step(np.zeros(6, np.int64))
    # All agents of the first environment, and one of the second
    shown = envs.restart([0, 1, 2, 4])
    assert shown[:3, 1].tolist() == [0, 0, 0]
    assert shown[3].tolist() == [0, 0, 0]
    resets = [env.resets for env in envs._envs]
    assert resets == [2, 1]
    result = envs.step(np.zeros(6, np.int64))
    assert result.observations[:, 1].tolist() == [1, 1, 1, 0, 0, 2]
    assert result.rewards[4] == 0.0


def test_an_agent_that_never_takes_part_has_no_return() -> None:
    """Three agents of which one is absent: a mean over three rows would be too small."""
    absent = dataclasses.replace(RACE, id="tests.parallel_envs:Absent")
    envs = made(3, id=absent.id)
    recording = Recording(steps=4, rows=3, spaces=describe(absent))
    envs.reset([5, 5, 5])
    for step in range(4):
        recording.result(step, slice(0, 3), envs.step(np.zeros(3, np.int64)))
    assert recording.episode_returns == pytest.approx([2.3, 5.0])
    assert recording.episode_lengths == [2, 4]
    played = play(
        absent,
        describe(absent),
        lambda observations, begins: np.zeros(len(observations), np.int64),
        episodes=6,
        seed=0,
        longest=100,
    )
    assert [episode.length for episode in played] == [2, 4, 2, 4]


def test_masks_of_actions_are_said_not_to_be_applied() -> None:
    envs = made(3, id="tests.parallel_envs:Masking")
    envs.reset([5, 5, 5])
    (remark,) = envs.remarks
    assert "action_mask in its info" in remark


def test_seeds_ends_and_bounds_are_compared_as_those_of_gymnasium() -> None:
    envs = made(4, id="tests.parallel_envs:Constant")
    envs.reset([5, 6, 7, 8])
    for _ in range(60):
        envs.step(np.zeros(4, np.int64))
    said = " ".join(envs.remarks)
    assert "draw the same random numbers: Constant.random" in said
    assert "terminated after the same number of steps: 3 steps" in said
    assert "outside of its observation_space" in said
    well = made(6)
    well.reset([5, 6, 7, 8, 9, 10])
    for _ in range(100):
        well.step(np.zeros(6, np.int64))
    assert not well.remarks


def test_whole_environments_are_played() -> None:
    spaces = describe(RACE)

    def act(shown: np.ndarray, _: np.ndarray) -> np.ndarray:
        return np.zeros(len(shown), np.int64)

    episodes = play(RACE, spaces, act, episodes=4, seed=0, longest=100)
    assert [episode.length for episode in episodes] == [2, 4, 3, 2]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"id": "tests.parallel_envs:Unequal"}, "unsupported-space", "pad_"),
        ({"id": "tests.parallel_envs:Turns"}, "not-an-environment", "aec_to_parallel"),
        ({"id": "tests.parallel_envs:Nobody"}, "not-an-environment", "possible_agents"),
        ({"id": "tests.gyms:Script"}, "not-an-environment", "ParallelEnv"),
        ({"id": "tests.parallel_envs:Rac"}, "unknown-simulator", ":Race"),
        ({"id": "tests.no_such_module"}, "missing-library", "install"),
        ({"kwargs": {"end": 3}}, "bad-simulator-kwargs", ""),
    ],
)
def test_what_cannot_be_rows_is_refused(
    fields: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(dataclasses.replace(RACE, **fields))
    found = caught.value.problems[0]
    assert found.code == code
    assert words in str(found.fix)


def test_a_module_with_games_in_turns_alone_is_not_answered_by_a_name_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("games_in_turns")
    vars(module)["env"] = Race
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError) as caught:
        describe(dataclasses.replace(RACE, id=module.__name__))
    (found,) = caught.value.problems
    assert found.code == "unknown-simulator"
    assert "one after the other" in found.what
    assert f"{module.__name__}:parallel_env" not in found.fix
    assert "recipes/self_play.py" in found.fix


def test_rows_that_are_no_whole_environments_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        made(4)
    (found,) = caught.value.problems
    assert (found.code, found.fix) == ("agents-misfit", "env.total_num_envs: 6")


def test_wrappers_of_gymnasium_are_refused() -> None:
    wrapper = WrapperConfig(name="gymnasium.wrappers:ClipReward")
    (found,) = check(dataclasses.replace(RACE, wrappers=(wrapper,)))
    assert found.code == "wrappers-not-applied"


def test_a_result_without_an_agent_is_refused() -> None:
    envs = made(3, id="tests.parallel_envs:Forgetful")
    envs.reset([0, 0, 0])
    with pytest.raises(SimulatorError, match="agent_0"):
        envs.step(np.zeros(3, np.int64))


def test_the_library_is_named_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pettingzoo", None)
    found = refusal(id="pettingzoo.butterfly.pistonball_v6")
    assert found.code == "missing-library"
    assert "pip install pettingzoo" in str(found.fix)


def test_an_environment_of_the_library() -> None:
    pytest.importorskip("pettingzoo")
    config = dataclasses.replace(RACE, id="pettingzoo.classic.rps_v2")
    envs = find_adapter("pettingzoo").make(config, 4)
    envs.reset([0, 1, 2, 3])
    for _ in range(30):
        assert np.isfinite(envs.step(np.zeros(4, np.int64)).rewards).all()


def test_the_small_environment_is_reset_for_each_episode() -> None:
    env = Race((1,))
    env.reset(seed=3)
    env.step({"agent_0": 1})
    assert env.agents == []


def test_rows_that_step_the_same_environment_are_refused() -> None:
    one = Race()
    with pytest.raises(SimulatorError) as raised:
        PettingZooVector([one, one], max_episode_steps=None, name="one")
    assert "another row steps already" in raised.value.problem.what


class Drawing(Race):
    """Rewards are drawn from the space of the actions, which is the same object in each call."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = {each: Discrete(3, start=1) for each in self.possible_agents}

    def action_space(self, agent: str) -> Discrete:
        return self._taken[agent]

    def step(self, actions: Any) -> Any:
        shown, rewards, *others = super().step(actions)
        drawn = {each: float(self.action_space(each).sample()) for each in rewards}
        return (shown, drawn, *others)


def test_numbers_that_agents_draw_from_their_spaces_follow_from_the_seed() -> None:
    def drawn() -> list[list[float]]:
        envs = PettingZooVector([Drawing()], max_episode_steps=None, name="drawing")
        envs.reset([5, 6, 7])
        return [envs.step(np.zeros(3, np.int64)).rewards.tolist() for _ in range(6)]

    assert drawn() == drawn()
