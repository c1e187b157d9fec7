"""Files of demonstrations: read as the memory has steps, or refused with what is wrong."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlplace.algo.replay import Steps
from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.envs.recorded import (
    narrow_actions,
    next_episodes,
    other_simulator,
    read_demonstrations,
    require_sequence,
    steps_in,
)
from rlplace.envs.recorded_rewards import other_rewards
from rlplace.envs.registry import describe, make_simulator
from rlplace.errors import ConfigError

SPACES = Spaces(
    observation_shape=(3,),
    actions=ContinuousActions(shape=(1,), low=(-4.0,), high=(2.0,)),
)


def arrays(steps: int = 6) -> dict[str, Any]:
    return {
        "observations": np.ones((steps, 3)),
        "next_observations": np.ones((steps, 3)),
        "actions": np.linspace(-4.0, 2.0, steps)[:, None],
        "rewards": np.full(steps, 7.0),
        "terminated": np.zeros(steps, bool),
        "truncated": np.zeros(steps, bool),
    }


def saved(tmp_path: Path, of: dict[str, Any]) -> str:
    np.savez(tmp_path / "steps.npz", **of)
    return str(tmp_path / "steps.npz")


def test_actions_are_scaled_from_the_bounds_to_those_of_the_policy(
    tmp_path: Path,
) -> None:
    steps = read_demonstrations(saved(tmp_path, arrays()), SPACES)
    assert steps.actions.shape == (6, 1, 1)
    assert steps.actions[:, 0, 0] == pytest.approx(np.linspace(-1, 1, 6), abs=1e-6)
    assert steps.observations.dtype == steps.rewards.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("rewards", None, "lacks rewards"),
        ("observations", np.ones((6, 4)), "another shape"),
        ("actions", np.full((6, 1), 2.5), "outside of the bounds"),
        ("rewards", np.full(6, np.nan), "not finite"),
        # Infinite as float32
        ("observations", np.full((6, 3), 1e300), "not finite"),
        ("terminated", np.full(6, 0.5), "other numbers than 0 and 1"),
        ("truncated", np.array([0, 0, 2, 0, 0, 1]), "other numbers than 0 and 1"),
    ],
)
def test_steps_of_another_simulator_are_refused(
    name: str, value: Any, text: str, tmp_path: Path
) -> None:
    of = arrays() | {name: value}
    if value is None:
        del of[name]
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(saved(tmp_path, of), SPACES)
    assert [p.code for p in caught.value.problems] == ["bad-demonstrations"]
    assert text in str(caught.value)


def test_numbers_that_become_equal_as_float32_are_refused(tmp_path: Path) -> None:
    """Seconds since 1970 beside a number that is learned from as it is."""
    count = 20
    of = arrays(count)
    seen = np.random.default_rng(0).normal(size=(count, 3))
    read_demonstrations(saved(tmp_path, of | {"observations": seen}), SPACES)
    times = seen.copy()
    times[:, 1] = 1.7e9 + np.arange(count)
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(saved(tmp_path, of | {"observations": times}), SPACES)
    (problem,) = caught.value.problems
    assert problem.code == "bad-demonstrations"
    assert "observations[:, 1] - 1700000000" in str(problem.fix)
    # What float32 keeps apart, and what never changes
    for numbers in (np.arange(count) * 1000.0 + 1.7e9, np.full(count, 1.7e9)):
        times[:, 1] = numbers
        read_demonstrations(saved(tmp_path, of | {"observations": times}), SPACES)


def test_a_slow_number_is_not_refused(tmp_path: Path) -> None:
    """Neighbouring steps are equal as float32, and the change of some steps is not."""
    count = 400
    seen = np.random.default_rng(0).normal(size=(count, 3))
    seen[:, 1] = 1000 + 1e-5 * np.arange(count)
    assert (np.diff(seen[:, 1].astype(np.float32)) == 0).mean() > 0.5
    of = arrays(count) | {"observations": seen}
    read_demonstrations(saved(tmp_path, of), SPACES)
    # Slower by far: as float32, the file has five of its 400 numbers
    seen[:, 1] = 1.6e7 + 0.01 * np.arange(count)
    with pytest.raises(ConfigError, match="equal as float32"):
        read_demonstrations(saved(tmp_path, of | {"observations": seen}), SPACES)


def test_choices_that_the_simulator_does_not_have_are_refused(tmp_path: Path) -> None:
    spaces = Spaces(observation_shape=(3,), actions=DiscreteActions(n=2))
    of = arrays() | {"actions": np.array([0, 1, 0, 1, 1, 2])}
    with pytest.raises(ConfigError, match="outside of the bounds"):
        read_demonstrations(saved(tmp_path, of), spaces)


def test_choices_are_counted_as_the_simulator_counts_them(tmp_path: Path) -> None:
    """Otherwise the demonstrated action 1 would be learned as the second one."""
    spaces = Spaces(observation_shape=(3,), actions=DiscreteActions(n=3, first=1))
    of = arrays() | {"actions": np.array([1, 2, 3, 1, 2, 2])}
    steps = read_demonstrations(saved(tmp_path, of), spaces)
    assert steps.actions[:, 0].tolist() == [0, 1, 2, 0, 1, 1]
    for wrong in (0, 4, 1.5):
        of["actions"] = np.array([1, 2, 3, 1, 2, wrong])
        with pytest.raises(ConfigError, match="its actions are from 1 to 3"):
            read_demonstrations(saved(tmp_path, of), spaces)


def test_an_element_with_equal_bounds_makes_no_nan(tmp_path: Path) -> None:
    actions = ContinuousActions(shape=(2,), low=(0.0, 2.0), high=(1.0, 2.0))
    spaces = Spaces(observation_shape=(3,), actions=actions)
    of = arrays() | {"actions": np.tile([0.5, 2.0], (6, 1))}
    steps = read_demonstrations(saved(tmp_path, of), spaces)
    assert np.isfinite(steps.actions).all()
    assert steps.actions[:, 0, 0] == pytest.approx(0.0)


def test_sums_of_rewards_need_steps_that_follow_each_other(tmp_path: Path) -> None:
    of = arrays()
    places = np.arange(7.0)[:, None] * np.ones((7, 3))
    of |= {"observations": places[:-1], "next_observations": places[1:]}
    path = saved(tmp_path, of)
    require_sequence(path, read_demonstrations(path, SPACES))
    # Another recorded episode begins at step 3
    of["observations"] = np.where(np.arange(6)[:, None] >= 3, 10, 0) + places[:-1]
    of["next_observations"] = of["observations"] + 1
    path = saved(tmp_path, of)
    with pytest.raises(ConfigError) as caught:
        require_sequence(path, read_demonstrations(path, SPACES))
    assert [p.code for p in caught.value.problems] == ["bad-demonstrations"]
    assert "1 of 6 steps, the first is 2" in str(caught.value)
    # The fix
    of["truncated"][2] = True
    path = saved(tmp_path, of)
    require_sequence(path, read_demonstrations(path, SPACES))


def test_a_file_that_is_no_file_of_arrays_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.npz").write_text("no arrays")
    for path in (tmp_path / "steps.npz", tmp_path / "absent.npz"):
        with pytest.raises(ConfigError) as caught:
            read_demonstrations(str(path), SPACES)
        assert [p.code for p in caught.value.problems] == ["bad-demonstrations"]


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    """Steps of Pendulum with random actions."""
    env = gymnasium.make("Pendulum-v1")
    env.action_space.seed(3)
    shown, _ = env.reset(seed=4)
    steps = []
    for _ in range(600):
        action = env.action_space.sample()
        after, reward, terminated, truncated, _ = env.step(action)
        steps.append((shown, after, action, reward, terminated, truncated))
        shown = env.reset()[0] if truncated else after
    return {
        name: np.array(values)
        for name, values in zip(arrays(), zip(*steps, strict=True), strict=True)
    }


@pytest.mark.parametrize(
    ("factor", "error"),
    [
        (1.0, None),
        (0.6, None),
        (0.01, "another scale"),
        (100.0, "another scale"),
        (-1.0, "opposite sign"),
        (0.0, "only one"),
    ],
)
def test_rewards_of_another_scale_or_sign_than_the_environments_are_told(
    factor: float, error: str | None, recorded: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(tmp_path, {**recorded, "rewards": factor * recorded["rewards"]})
    env = SimulatorEnvConfig(id="Pendulum-v1")
    spaces = describe(env)
    make = partial(make_simulator, env, chunk=1)

    def told() -> Any:
        return other_rewards(path, read_demonstrations(path, spaces), make, spaces, 0)

    found = told()
    assert (found is None) == (error is None)
    if found is None:
        return
    assert error in found.what
    if factor:
        # The fix is pasted
        _, *words = shlex.split(found.fix)
        subprocess.run([sys.executable, *words], check=True)
        assert told() is None


@pytest.mark.parametrize(
    ("scale", "clip", "said"),
    [(1.0, 2.0, False), (0.5, 1.0, True), (1.0, 9.0, False), (0.2, 9.0, False)],
)
def test_actions_that_are_scaled_to_other_bounds_are_told(
    scale: float, clip: float, said: bool, tmp_path: Path
) -> None:
    """Of Pendulum, which takes -2 to 2: as it takes them, in [-1, 1], and without a clip."""
    spaces = dataclasses.replace(
        SPACES, actions=ContinuousActions(shape=(1,), low=(-2.0,), high=(2.0,))
    )
    drawn = 2.0 * np.random.default_rng(0).standard_normal((400, 1))
    if clip > 2.0:
        drawn = 2.0 * np.tanh(drawn / 4.0)
    actions = (scale * drawn).clip(-clip, clip)
    path = saved(tmp_path, {**arrays(400), "actions": actions})
    found = narrow_actions(path, read_demonstrations(path, spaces), spaces)
    assert (found is not None) == said
    if found is None:
        return
    assert found.code == "demonstrated-actions"
    # The fix is pasted
    _, *words = shlex.split(str(found.fix).partition("   ")[0])
    subprocess.run([sys.executable, *words], check=True)
    assert narrow_actions(path, read_demonstrations(path, spaces), spaces) is None


def test_the_fix_of_scaled_actions_changes_the_scaled_elements_alone(
    tmp_path: Path,
) -> None:
    actions = ContinuousActions(shape=(2,), low=(-1.0, -2.0), high=(1.0, 2.0))
    spaces = dataclasses.replace(SPACES, actions=actions)
    drawn = np.random.default_rng(0).standard_normal((400, 2)).clip(-1.0, 1.0)
    path = saved(tmp_path, {**arrays(400), "actions": drawn})
    found = narrow_actions(path, read_demonstrations(path, spaces), spaces)
    assert found is not None
    _, *words = shlex.split(str(found.fix).partition("   ")[0])
    subprocess.run([sys.executable, *words], check=True)
    taken = np.load(path)["actions"]
    np.testing.assert_allclose(taken, drawn * [1.0, 2.0])
    steps = read_demonstrations(path, spaces)
    # A file of another kind gets no command for NumPy
    halved = dataclasses.replace(
        steps, actions=steps.actions / np.array([1.0, 2.0], np.float32)
    )
    other = narrow_actions("data.hdf5", halved, spaces)
    assert other is not None
    assert str(other.fix).startswith("multiply the actions in the file by [1, 2]")


@pytest.mark.parametrize(
    ("last", "end", "said"),
    [
        ("first of the next episode", "truncated", True),
        ("first of the next episode", "terminated", False),
        ("its own", "truncated", False),
    ],
)
def test_truncated_steps_that_lead_to_the_next_episode_are_told(
    last: str, end: str, said: bool, tmp_path: Path
) -> None:
    """Episodes of four steps, in one array of observations or with the last one of each episode."""
    seen = np.random.default_rng(0).normal(size=(41, 3))
    after = seen[1:].copy()
    ends = np.arange(40) % 4 == 3
    if last == "its own":
        after[ends] += 1.0
    of = {**arrays(40), "observations": seen[:-1], "next_observations": after}
    path = saved(tmp_path, {**of, end: ends})
    found = next_episodes(path, read_demonstrations(path, SPACES))
    assert (found is not None) == said
    if found is not None:
        assert found.code == "demonstrated-cuts"
        assert "each of the 9 truncated steps" in found.what


@pytest.mark.parametrize(
    ("simulator", "said"),
    [
        ("Hopper-v4", False),
        ("gymnasium:Hopper-v4", False),
        ("Hopper-v5", True),
        ("gymnasium:Hopper-v5", True),
        ("Walker2d-v4", True),
        ("my.module:make", False),
    ],
)
@pytest.mark.parametrize("as_text", [True, False])
def test_a_data_set_of_another_simulator_is_told(
    simulator: str, said: bool, as_text: bool, tmp_path: Path
) -> None:
    spec: Any = {"id": "Hopper-v4", "max_episode_steps": 1000}
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "metadata.json"
    if as_text:
        spec = json.dumps(spec)
    file.write_text(json.dumps({"env_spec": spec}), encoding="utf-8")
    found = other_simulator(str(tmp_path), simulator)
    assert (found is not None) == said
    if found is not None:
        assert found.code == "demonstrated-simulator"
        # With the module that registers it
        module = simulator[: simulator.find(":") + 1]
        assert str(found.fix).startswith(f"env.id={module}Hopper-v4 ")
    # Nothing is known of other files
    for text in ("{}", "[1]", "{", '{"env_spec": null}'):
        file.write_text(text, encoding="utf-8")
        assert other_simulator(str(tmp_path), simulator) is None
    file.unlink()
    assert other_simulator(str(tmp_path), simulator) is None


def test_nothing_is_said_of_steps_that_the_environment_does_not_reach(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    away = {name: recorded[name] + 50.0 for name in list(recorded)[:2]}
    path = saved(tmp_path, {**recorded, **away, "rewards": -recorded["rewards"]})
    env = SimulatorEnvConfig(id="Pendulum-v1")
    spaces = describe(env)
    make = partial(make_simulator, env, chunk=1)
    steps = read_demonstrations(path, spaces)
    assert other_rewards(path, steps, make, spaces, 0) is None


def of_two_episodes() -> tuple[np.ndarray, np.ndarray]:
    """Return observations [2, 4, 3] of two episodes of three steps, and actions [2, 3, 1]."""
    seen = np.arange(24.0).reshape(2, 4, 3)
    return seen, np.linspace(-4.0, 2.0, 6).reshape(2, 3, 1)


def check_two_episodes(steps: Steps) -> None:
    seen, taken = of_two_episodes()
    assert np.array_equal(steps.observations[:, 0], seen[:, :-1].reshape(6, 3))
    assert np.array_equal(steps.next_observations[:, 0], seen[:, 1:].reshape(6, 3))
    assert steps.actions[:, 0, 0] == pytest.approx(taken.ravel() / 3 + 1 / 3)
    assert steps.terminated[:, 0].tolist() == [False, False, True] + [False] * 3
    assert steps.truncated[:, 0].tolist() == [False] * 5 + [True]


def test_episodes_of_minari_are_read(tmp_path: Path) -> None:
    import h5py

    seen, taken = of_two_episodes()
    (tmp_path / "data").mkdir()
    with h5py.File(tmp_path / "data" / "main_data.hdf5", "w") as file:
        for number in (0, 1):
            episode = file.create_group(f"episode_{number}")
            episode["observations"] = seen[number]
            episode["actions"] = taken[number]
            episode["rewards"] = np.ones(3)
            episode["terminations"] = [False, False, number == 0]
            # The second one breaks off without a word
            episode["truncations"] = [False] * 3
    path = str(tmp_path)
    steps = read_demonstrations(path, SPACES)
    check_two_episodes(steps)
    require_sequence(path, steps)
    assert steps_in(path) == 6


def test_steps_of_d4rl_are_read_as_far_as_their_next_ones_are_known(
    tmp_path: Path,
) -> None:
    import h5py

    seen, taken = of_two_episodes()
    path = str(tmp_path / "steps.hdf5")
    arrays = {
        "observations": seen[:, :-1].reshape(6, 3),
        "next_observations": seen[:, 1:].reshape(6, 3),
        "actions": taken.reshape(6, 1),
        "rewards": np.ones(6),
        "terminals": [False, False, True, False, False, False],
        "timeouts": [False] * 5 + [True],
    }
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    check_two_episodes(read_demonstrations(path, SPACES))
    with h5py.File(path, "a") as file:
        del file["next_observations"]
    steps = read_demonstrations(path, SPACES)
    # What follows the last step was not recorded; the value after the one before counts
    assert len(steps.rewards) == 5
    assert steps.truncated[:, 0].tolist() == [False] * 4 + [True]
    going_on = [0, 1, 3, 4]
    assert np.array_equal(
        steps.next_observations[going_on, 0], seen[:, 1:].reshape(6, 3)[going_on]
    )
    require_sequence(path, steps)


def test_without_h5py_the_command_that_installs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "steps.hdf5").touch()
    with pytest.raises(ConfigError) as caught:
        read_demonstrations(str(tmp_path / "steps.hdf5"), SPACES)
    assert [p.code for p in caught.value.problems] == ["missing-library"]
    assert "h5py" in str(caught.value)


def test_observations_with_several_entries_are_refused(tmp_path: Path) -> None:
    import h5py

    path = str(tmp_path / "main_data.hdf5")
    with h5py.File(path, "w") as file:
        file["episode_0/observations/camera"] = np.ones((4, 2, 2))
        file["episode_0/observations/position"] = np.ones((4, 3))
    with pytest.raises(ConfigError, match="several entries") as caught:
        read_demonstrations(path, SPACES)
    assert "camera, position" in str(caught.value)
