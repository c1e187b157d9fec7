"""Autoreset in the same step, ends and cuts, final observations, seeds and clipping, row by row."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiBinary

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.gymnasium_results import Ends, Results
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.observations import encoding_of
from rlplace.envs.registry import find_adapter, row_seeds
from rlplace.errors import SimulatorError
from tests.gyms import Script

ZEROS = np.zeros(1, np.int64)


def vector(rows: int = 1, limit: int | None = None, **kwargs: Any) -> GymnasiumVector:
    return GymnasiumVector(
        [Script(**kwargs) for _ in range(rows)], max_episode_steps=limit
    )


def test_an_end_is_followed_by_the_next_episode_in_the_same_step() -> None:
    envs = vector(terminate_at=2)
    first = envs.reset([0])
    one, two, three = (envs.step(ZEROS) for _ in range(3))
    assert first[0, :2].tolist() == [1, 0]
    assert (one.terminated.tolist(), one.truncated.tolist(), one.episode_returns) == (
        [False],
        [False],
        [],
    )
    assert two.observations[0, :2].tolist() == [2, 0]
    assert (two.terminated.tolist(), two.truncated.tolist()) == ([True], [False])
    assert (two.rewards.tolist(), two.episode_returns, two.episode_lengths) == (
        [2.0],
        [3.0],
        [2],
    )
    assert two.final_observations.shape == (0, 4)
    assert three.observations[0, :2].tolist() == [2, 1]
    assert (three.rewards.tolist(), three.terminated.tolist()) == ([1.0], [False])


@pytest.mark.parametrize("how", [{"truncate_at": 2}, {"limit": 2}])
def test_a_cut_shows_where_it_was_cut_and_both_at_once_is_an_end(
    how: dict[str, int],
) -> None:
    envs = vector(**how)
    envs.reset([0])
    envs.step(ZEROS)
    cut = envs.step(ZEROS)
    assert (cut.terminated.tolist(), cut.truncated.tolist()) == ([False], [True])
    assert cut.final_observations[:, :2].tolist() == [[1, 2]]
    assert cut.observations[0, :2].tolist() == [2, 0]
    assert (cut.episode_returns, cut.episode_lengths) == ([3.0], [2])
    both = vector(terminate_at=2, **how)
    both.reset([0])
    both.step(ZEROS)
    ended = both.step(ZEROS)
    assert (ended.terminated.tolist(), ended.truncated.tolist()) == ([True], [False])
    assert ended.final_observations.shape == (0, 4)


class OneArray(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows all observations in one array of its own, as some simulators do."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._array = np.zeros(env.observation_space.shape or (), np.float32)

    def observation(self, observation: Any) -> Any:
        self._array[:] = observation
        return self._array


def test_a_cut_shows_where_it_was_cut_also_if_the_simulator_reuses_its_array() -> None:
    envs = GymnasiumVector(
        [OneArray(Script()), OneArray(Script())], max_episode_steps=2
    )
    envs.reset([0, 0])
    envs.step(np.zeros(2, np.int64))
    cut = envs.step(np.zeros(2, np.int64))
    assert cut.truncated.tolist() == [True, True]
    assert cut.final_observations[:, :2].tolist() == [[1, 2], [1, 2]]
    assert cut.observations[:, :2].tolist() == [[2, 0], [2, 0]]


class ByItself(Script):
    """Begins its next episode in the step that ends one, as a vector of environments does."""

    def __init__(self, name: str, last: Any = None) -> None:
        super().__init__(truncate_at=2)
        self._name = name
        self._last = last

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, reward, terminated, truncated, info = super().step(action)
        if truncated:
            info = {self._name: shown if self._last is None else self._last}
            shown, _ = self.reset()
        return shown, reward, terminated, truncated, info


@pytest.mark.parametrize(
    "name", ["final_obs", "final_observation", "terminal_observation"]
)
def test_a_cut_shows_where_it_was_cut_also_if_the_environment_resets_itself(
    name: str,
) -> None:
    """Otherwise the value after the cut would be that of the next episode's beginning."""
    envs = GymnasiumVector([ByItself(name)], max_episode_steps=None)
    envs.reset([0])
    envs.step(ZEROS)
    assert envs.step(ZEROS).final_observations[:, :2].tolist() == [[1, 2]]
    # What is no observation stays out
    other = GymnasiumVector([ByItself(name, "the end")], max_episode_steps=None)
    other.reset([0])
    other.step(ZEROS)
    assert other.step(ZEROS).final_observations[:, :2].tolist() == [[2, 0]]


def test_the_time_limit_counts_from_each_reset() -> None:
    envs = vector(limit=3, terminate_at=[2, 9])
    envs.reset([0])
    cuts = [bool(envs.step(ZEROS).truncated[0]) for _ in range(8)]
    assert cuts == [False, False, False, False, True, False, False, True]
    envs.step(ZEROS)
    envs.reset([0])
    assert [bool(envs.step(ZEROS).truncated[0]) for _ in range(3)] == [
        False,
        False,
        True,
    ]


def test_all_arrays_have_the_types_and_shapes_of_the_contract() -> None:
    envs = vector(rows=3, truncate_at=1)
    assert (
        vector(dtype="uint8").reset([0]).dtype
        == envs.reset([0, 1, 2]).dtype
        == np.float32
    )
    result = envs.step(np.zeros(3, np.int64))
    before = result.observations.copy()
    envs.step(np.ones(3, np.int64))
    assert np.array_equal(result.observations, before), (
        "the arrays belong to the caller"
    )
    assert {
        a.dtype
        for a in (result.observations, result.rewards, result.final_observations)
    } == {np.dtype("f4")}
    assert result.observations.shape == result.final_observations.shape == (3, 4)
    for each in (result.rewards, result.terminated, result.truncated):
        assert each.shape == (3,)
    assert result.terminated.dtype == result.truncated.dtype == np.bool_


def test_discrete_actions_count_from_the_spaces_first() -> None:
    env = Script(action_space="from_five")
    envs = GymnasiumVector([env], max_episode_steps=None)
    envs.reset([0])
    for action in (0, 2):
        envs.step(np.array([action]))
    assert env.taken == [5, 7]


def test_the_simulator_gets_continuous_actions_clipped_and_the_caller_keeps_them() -> (
    None
):
    env = Script(action_space="box")
    envs = GymnasiumVector([env], max_episode_steps=None)
    envs.reset([0])
    actions = np.array([[-3.0, 3.0]], np.float32)
    envs.step(actions)
    envs.step(np.array([[0.25, 0.125]], np.float32))
    assert [taken.tolist() for taken in env.taken] == [[-1.0, 0.5], [0.25, 0.125]]
    assert actions.tolist() == [[-3.0, 3.0]]


def test_a_row_depends_on_its_seed_alone() -> None:
    together, apart = vector(rows=4, terminate_at=1), vector(rows=2, terminate_at=1)
    seeds = row_seeds(7, 0, 4)
    assert len({*seeds, *row_seeds(8, 0, 4)}) == 8
    whole, part = together.reset(seeds), apart.reset(row_seeds(7, 2, 2))
    assert np.array_equal(whole[2:], part)
    for _ in range(5):  # later episodes too
        whole, part = (
            together.step(np.zeros(4, np.int64)).observations,
            apart.step(np.zeros(2, np.int64)).observations,
        )
        assert np.array_equal(whole[2:], part)


class Masked(Script):
    """Gives a mask of actions in its info, or as an entry of its observation."""

    def __init__(self, place: str, name: str = "action_mask") -> None:
        super().__init__()
        self._place = place
        self._name = name
        if place == "observation":
            entries = {"seen": self.observation_space, name: MultiBinary(3)}
            self.observation_space = gymnasium.spaces.Dict(entries)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        shown, info = super().reset(**options)
        if self._place == "observation":
            return self._both(shown), info
        return shown, {self._name: np.ones(3, np.int8)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, *others = super().step(action)
        return (self._both(shown) if self._place == "observation" else shown, *others)

    def _both(self, shown: Any) -> dict[str, Any]:
        return {"seen": shown, self._name: np.ones(3, np.int8)}


@pytest.mark.parametrize("place", ["observation", "info"])
@pytest.mark.parametrize("name", ["action_mask", "legal_actions", "avail_actions"])
def test_a_mask_of_actions_is_said_not_to_be_applied(place: str, name: str) -> None:
    masked = [Masked(place, name) for _ in range(2)]
    envs = GymnasiumVector(masked, max_episode_steps=2)
    envs.reset([0, 1])
    for _ in range(5):
        envs.step(np.zeros(2, np.int64))
    (remark,) = envs.remarks
    assert "the policy does not apply" in remark
    assert f"{name} in its {place}" in remark


class MaskedByMethod(Script):
    """Has the method by which sb3-contrib asks for a mask."""

    def action_masks(self) -> Any:
        return np.ones(3, np.int8)


def test_a_method_that_returns_a_mask_is_said_not_to_be_called() -> None:
    wrapped = gymnasium.wrappers.TimeLimit(MaskedByMethod(), 5)
    (remark,) = GymnasiumVector([wrapped], max_episode_steps=2).remarks
    assert "a method action_masks()" in remark
    assert not vector().remarks


def test_an_environment_may_have_an_object_without_attributes_as_env() -> None:
    script: Any = Script()
    script.env = object()
    assert not GymnasiumVector([script], max_episode_steps=2).remarks


def test_an_environment_may_have_itself_as_env() -> None:
    script: Any = Script()
    script.env = script
    assert not GymnasiumVector([script], max_episode_steps=2).remarks


class HalfOld(Script):
    """Returns the five values of Gymnasium, and tells a time limit as Gym did."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        shown, reward, terminated, truncated, _ = super().step(action)
        info = {"TimeLimit.truncated": truncated}
        return shown, reward, terminated or truncated, False, info


def test_a_time_limit_that_only_info_tells_is_said() -> None:
    for ending, said in (("truncate_at", 1), ("terminate_at", 0)):
        envs = GymnasiumVector([HalfOld(**{ending: 3})], max_episode_steps=None)
        envs.reset([0])
        for _ in range(7):
            assert not envs.step(ZEROS).truncated.any()
        assert len(envs.remarks) == said
        assert all("info says that a time limit" in each for each in envs.remarks)


class Sized(Script):
    """Another action space, or another form of observations, in each environment."""

    def __init__(self, choices: int = 3, seen: Any = None) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(choices)
        self.observation_space = seen or self.observation_space


def test_environments_with_different_spaces_are_refused() -> None:
    """One policy decides for all: choice 2 of 3 is none of the second environment's."""
    others = [Sized(2), Sized(seen=Box(-1, 1, (5,))), Sized(seen=MultiBinary(4))]
    for other in others:
        with pytest.raises(SimulatorError) as raised:
            GymnasiumVector([Sized(), other], max_episode_steps=None)
        assert raised.value.problem.code == "environment-interface"
        assert "different spaces" in raised.value.problem.what
    first = Sized()
    shape = first.observation_space.shape
    # Bounds of observations may differ
    wider = Sized(seen=Box(-9.0, 900.0, shape, np.float32))
    GymnasiumVector([first, wider], max_episode_steps=None)


def test_runs_of_neighbouring_seeds_share_no_environment() -> None:
    """Seed plus row would give runs 0 and 1 all but one of their environments in common."""
    seeds = [seed for run in range(5) for seed in row_seeds(run, 0, 64)]
    assert len(set(seeds)) == len(seeds)
    # The rows of all ranks together are the rows of one
    assert [*row_seeds(3, 0, 4), *row_seeds(3, 4, 4)] == list(row_seeds(3, 0, 8))


def test_it_is_gymnasium_step_for_step() -> None:
    """Against environments made by Gymnasium with all its wrappers, reset by hand."""
    rows, steps, limit = 3, 120, 20
    envs = find_adapter("gymnasium").make(
        SimulatorEnvConfig(id="CartPole-v1", max_episode_steps=limit), rows
    )
    theirs = [
        gymnasium.make("CartPole-v1", max_episode_steps=limit) for _ in range(rows)
    ]
    seeds = row_seeds(0, 0, rows)
    shown = [env.reset(seed=seed)[0] for env, seed in zip(theirs, seeds, strict=True)]
    assert np.array_equal(envs.reset(seeds), np.stack(shown))
    actions = np.random.default_rng(0).integers(2, size=(steps, rows))
    ends = 0
    for t in range(steps):
        result = envs.step(actions[t])
        finals = list(result.final_observations)
        for row, env in enumerate(theirs):
            observation, reward, terminated, truncated, _ = env.step(
                int(actions[t, row])
            )
            if truncated and not terminated:
                assert np.array_equal(finals.pop(0), observation)
            if terminated or truncated:
                observation, ends = env.reset()[0], ends + 1
            assert np.array_equal(result.observations[row], observation)
            assert (result.rewards[row], result.terminated[row]) == (reward, terminated)
            assert result.truncated[row] == (truncated and not terminated)
        assert finals == []
    assert ends > rows
    envs.close()


def remarks_after(steps: int, rows: int = 2, **kwargs: Any) -> str:
    envs = vector(rows, **kwargs)
    envs.reset(row_seeds(0, 0, rows))
    for _ in range(steps):
        envs.step(np.zeros(rows, np.int64))
    return "\n".join(envs.remarks)


@pytest.mark.parametrize("more", [{}, {"truncate_at": 5}])
def test_a_time_limit_that_terminates_episodes_is_said(more: dict[str, int]) -> None:
    assert remarks_after(45, terminate_at=5, **more) == ""
    said = remarks_after(100, terminate_at=5, **more)
    assert "after the same number of steps: 5 steps;" in said
    assert said.count("truncated=True") == 1


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        # A limit of 30 steps, and falls before it
        ([30 if at % 3 else 7 + at % 11 for at in range(60)], True),
        # Longer and longer episodes, such as those of a policy that learns
        (list(range(20, 80)), False),
        # The limit is reached rarely; it is told; a board has 9 fields
        ([30 if at % 7 == 0 else 7 + at % 11 for at in range(200)], False),
        ([9 if at % 3 else 5 + at % 4 for at in range(200)], False),
        ([*range(7, 17), *[30] * 19, 31, *[30] * 30], False),
    ],
)
def test_a_time_limit_that_terminates_many_episodes_is_said(
    lengths: list[int], said: bool
) -> None:
    results = Results("odd")
    ends = Ends()
    for length in lengths:
        results.ended(ends, length, terminated=True)
    assert len(results.remarks) == said
    assert all("and none was longer: 30 steps;" in each for each in results.remarks)
    # An environment that truncates tells its limits
    told = Ends()
    told.add(12, terminated=False)
    for length in lengths:
        told.add(length, terminated=True)
    assert told.longest is None


@pytest.mark.parametrize(
    "ends",
    [
        # By the environment or by a limit of the config; each episode is one step; one episode is longer
        {"truncate_at": 5},
        {"terminate_at": 9, "limit": 5},
        {"terminate_at": 1},
        {"terminate_at": [5, 5, 6, 5]},
    ],
)
def test_other_ends_of_episodes_are_not_said(ends: dict[str, Any]) -> None:
    assert remarks_after(200, **ends) == ""


class Pictures(Script):
    """Shows images of bytes up to `brightest`, in a Dict or alone."""

    def __init__(self, brightest: int, *, beside: bool = False) -> None:
        super().__init__(truncate_at=3)
        image = Box(0, brightest, (8, 8, 1), np.uint8)
        self._beside = beside
        self.observation_space = (  # type: ignore[assignment]
            Dict({"image": image, "speed": Box(0, 1, (1,))}) if beside else image
        )

    def _show(self, action: float) -> Any:
        image = np.ones((8, 8, 1), np.uint8)
        if self._beside:
            return {"image": image, "speed": np.zeros(1, np.float32)}
        return image


@pytest.mark.parametrize(
    ("brightest", "beside", "said"),
    [(1, False, "0.0039"), (10, True, "0.039"), (255, False, None), (255, True, None)],
)
def test_images_that_stay_dark_for_the_network_are_said(
    brightest: int, beside: bool, said: str | None
) -> None:
    envs = [Pictures(brightest, beside=beside) for _ in range(2)]
    simulator = GymnasiumVector(envs, max_episode_steps=None)
    if said is None:
        assert simulator.remarks == []
        return
    (remark,) = simulator.remarks
    assert f"they see {said} at most" in remark


_ONE: list[Script] = []


def cached() -> gymnasium.Env[Any, Any]:
    """Return the same environment in each call, in another wrapper each time."""
    if not _ONE:
        _ONE.append(Script())
    return gymnasium.wrappers.OrderEnforcing(_ONE[0])


def test_rows_that_step_the_same_environment_are_refused() -> None:
    config = SimulatorEnvConfig(id=f"{__name__}:cached")
    adapter = find_adapter("gymnasium")
    with pytest.raises(SimulatorError) as raised:
        adapter.make(config, 2)
    assert raised.value.problem.code == "environment-interface"
    assert "another row steps already" in raised.value.problem.what
    _ONE.clear()
    # The rows of a second simulator of this process, such as that of an evaluation
    first = adapter.make(config, 1)
    with pytest.raises(SimulatorError):
        adapter.make(config, 1)
    first.close()
    adapter.make(config, 1).close()


class Lives(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends an episode after four steps, and begins the environment anew only where its own episode has ended.

    `fires`: whether a step follows each true reset, as in games that have to be started.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], fires: bool = False) -> None:
        super().__init__(env)
        self._fires = fires
        self._steps = 0
        self._over = True

    def reset(self, **options: Any) -> Any:
        self._steps = 0
        if not self._over:
            return self.env.step(0)[0], {}
        found = self.env.reset(**options)
        if self._fires:
            return self.env.step(0)[0], {}
        return found

    def step(self, action: Any) -> Any:
        shown, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        self._over = terminated or truncated
        return shown, reward, terminated or self._steps == 4, truncated, info


def lives(terminate_at: int, fires: bool = False) -> gymnasium.Env[Any, Any]:
    """Make an environment with a wrapper inside."""
    return Lives(Script(terminate_at=terminate_at), fires)


class Prepared(Lives):
    """Begins the environment anew in the step that ends an episode, and shows what it has begun at the next reset."""

    def step(self, action: Any) -> Any:
        shown, reward, _, truncated, info = super().step(action)
        ended = self._steps == 4
        if ended:
            self._next = self.env.reset()
        return shown, reward, ended, truncated, info

    def reset(self, **options: Any) -> Any:
        if self._steps == 0:
            return super().reset(**options)
        self._steps = 0
        return self._next


def test_a_wrapper_that_begins_the_environment_anew_within_a_step_cuts_no_lives() -> (
    None
):
    wrapper = WrapperConfig(name=f"{__name__}:Prepared")
    config = SimulatorEnvConfig(
        id="tests.gyms:Script", kwargs={"terminate_at": 11}, wrappers=(wrapper,)
    )
    envs = find_adapter("gymnasium").make(config, 1)
    assert isinstance(envs, GymnasiumVector)
    envs.reset([0])
    for _ in range(9):
        envs.step(ZEROS)
    assert not [each for each in envs.remarks if "such as lives" in each]


class Served(Script):
    """Uses one server for all environments, which has a step and no episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.env = _SERVER


class Server:
    def step(self) -> None: ...


_SERVER = Server()


def test_a_server_that_environments_use_is_no_environment() -> None:
    envs = [Served(), Served()]
    GymnasiumVector(envs, max_episode_steps=None).close()
    with pytest.raises(SimulatorError):
        GymnasiumVector([envs[0], envs[0]], max_episode_steps=None)


@pytest.mark.parametrize("place", ["within", "outside"])
@pytest.mark.parametrize(("terminate_at", "said"), [(11, 1), (4, 0), (3, 0)])
def test_episodes_that_wrappers_cut_from_a_longer_one_are_said(
    place: str, terminate_at: int, said: int
) -> None:
    """A game of 11 steps is three episodes; games of 4 and 3 steps are one each."""
    fires = terminate_at == 4
    kwargs = {"terminate_at": terminate_at}
    config = SimulatorEnvConfig(
        id=f"{__name__}:lives", kwargs={**kwargs, "fires": fires}
    )
    if place == "outside":
        name = f"{__name__}:Lives"
        wrapper = WrapperConfig(name=name, kwargs={"fires": fires})
        config = SimulatorEnvConfig(
            id="tests.gyms:Script", kwargs=kwargs, wrappers=(wrapper,)
        )
    envs = find_adapter("gymnasium").make(config, 1)
    assert isinstance(envs, GymnasiumVector)
    envs.reset([0])
    for _ in range(9):
        envs.step(ZEROS)
    assert len([each for each in envs.remarks if "such as lives" in each]) == said


class Sampling(Script):
    """Draws its rewards from its action space, and its numbers from its observation space."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, _, terminated, truncated, info = super().step(action)
        reward = float(self.action_space.sample())
        return self.observation_space.sample(), reward, terminated, truncated, info


def test_numbers_that_an_environment_draws_from_its_spaces_follow_from_its_seed() -> (
    None
):
    def drawn(seed: int) -> list[list[float]]:
        made = [Sampling(), gymnasium.wrappers.OrderEnforcing(Sampling())]
        envs = GymnasiumVector(made, max_episode_steps=None)
        envs.reset([seed, seed + 1])
        found = []
        for _ in range(8):
            step = envs.step(np.zeros(2, np.int64))
            found.append([*step.rewards.tolist(), *step.observations.ravel().tolist()])
        return found

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(5)


class Grown(Script):
    """Has a list in its class, a table there, and an argument with a list as its default. `how`: which one changes."""

    walls: ClassVar[list[Any]] = [0]
    table: ClassVar[dict[str, Any]] = {"sizes": [1, 2], "names": ("a", "b")}

    def __init__(self, how: str, items: list[Any] = [0]) -> None:  # noqa: B006
        super().__init__()
        self._how = how
        self._items = items
        self._own = [0]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        changing = {"class": self.walls, "default": self._items, "own": self._own}
        changing[self._how][0] += 1
        return super().step(action)


@pytest.mark.parametrize(
    ("how", "name"), [("class", "walls"), ("default", "_items"), ("own", "")]
)
def test_an_object_that_environments_share_and_change_is_said(
    how: str, name: str
) -> None:
    envs = GymnasiumVector([Grown(how), Grown(how)], max_episode_steps=None)
    envs.reset([0, 1])
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    told = [each for each in envs.remarks if "share an object" in each]
    assert len(told) == bool(name)
    assert all(f": {name};" in each for each in told)


def test_a_module_may_be_named_like_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grown, "__module__", "gym_walls.tasks")
    envs = GymnasiumVector([Grown("class"), Grown("class")], max_episode_steps=None)
    envs.reset([0, 1])
    for _ in range(3):
        envs.step(np.zeros(2, np.int64))
    assert any("share an object" in each for each in envs.remarks)


class Shuffled(Script):
    """Returns the entries of its observation in another order than its space has, and another one in each step."""

    def __init__(self) -> None:
        super().__init__()
        entries = {"b": Box(-1, 9, (2,)), "a": Box(-1, 9, (1,))}
        self.observation_space = cast(Any, Dict(entries))

    def _show(self, action: float) -> Any:
        entries = [("a", [1.0]), ("b", [2.0, 3.0])]
        if self._step % 2:
            entries.reverse()
        return {name: np.array(value, np.float32) for name, value in entries}


def test_entries_of_an_observation_are_found_by_their_names() -> None:
    envs = GymnasiumVector([Shuffled()], max_episode_steps=None)
    rows = [envs.reset([0]), *(envs.step(ZEROS).observations for _ in range(3))]
    encoding = encoding_of(Shuffled().observation_space)
    assert encoding is not None
    names = [part.name for part in encoding.parts]
    expected = {"a": [1.0], "b": [2.0, 3.0]}
    whole = [number for name in names for number in expected[name]]
    assert all(row[0].tolist() == whole for row in rows)
