"""Finding simulators: what a config may name, its problems when there is none, and the spaces that come back."""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.envs.contract import (
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    Spaces,
)
from rlplace.envs.gymnasium_adapter import GymnasiumAdapter, spaces_of
from rlplace.envs.registry import check, describe, find_adapter, spaces_of_job
from rlplace.errors import ConfigError, Problem
from rlplace.extras import install_command


class OwnAdapter(GymnasiumAdapter):
    """Found by its path."""


def config(name: str = "CartPole-v1", **fields: object) -> SimulatorEnvConfig:
    return dataclasses.replace(SimulatorEnvConfig(id=name), **fields)


def problem(broken: SimulatorEnvConfig) -> Problem:
    """The one problem that describing meets."""
    with pytest.raises(ConfigError) as caught:
        describe(broken)
    assert len(caught.value.problems) == 1
    return caught.value.problems[0]


PENDULUM = ContinuousActions(shape=(1,), low=(-3.0,), high=(3.0,))


@pytest.mark.parametrize(
    ("name", "actions"),
    [
        ("CartPole-v1", DiscreteActions(n=2)),
        ("InvertedPendulum-v5", PENDULUM),
        ("tests.gyms:Script-v0", DiscreteActions(n=3)),
    ],
)
def test_describe(name: str, actions: DiscreteActions | ContinuousActions) -> None:
    assert not check(config(name))
    assert describe(config(name)) == Spaces(observation_shape=(4,), actions=actions)


@pytest.mark.parametrize(
    ("name", "limit", "steps"),
    [
        ("tests.gyms:Limited-v0", None, [7]),  # the simulator's own limit
        ("tests.gyms:Limited-v0", 9, [9]),
        (
            "tests.gyms:OwnLimit-v0",
            None,
            [7],
        ),  # and a wrapper that the library puts around it
        ("tests.gyms:OwnLimit-v0", 4, [4, 4]),
        ("tests.gyms:Script-v0", None, []),
    ],
)
def test_an_episode_is_as_long_as_the_config_or_the_simulator_says(
    name: str, limit: int | None, steps: list[int]
) -> None:
    simulator = find_adapter("gymnasium").make(config(name, max_episode_steps=limit), 1)
    simulator.reset([0])
    results = [simulator.step(np.zeros(1, np.int64)) for _ in range(10)]
    assert [length for result in results for length in result.episode_lengths] == steps


SKIPS = WrapperConfig(
    name="gymnasium.wrappers:MaxAndSkipObservation", kwargs={"skip": 3}
)
TIMED = WrapperConfig(name="gymnasium.wrappers:TimeAwareObservation")
OF_GYMNASIUM = {
    SKIPS.name: gymnasium.wrappers.MaxAndSkipObservation.wrapper_spec(skip=3),
    TIMED.name: gymnasium.wrappers.TimeAwareObservation.wrapper_spec(),
}


@pytest.mark.parametrize("limit", [None, 9, 2])
@pytest.mark.parametrize("wrappers", [(SKIPS,), (TIMED,), (TIMED, SKIPS)])
def test_a_time_limit_is_inside_of_wrappers_as_gymnasium_puts_it(
    limit: int | None, wrappers: tuple[WrapperConfig, ...]
) -> None:
    made = config("tests.gyms:Limited-v0", max_episode_steps=limit, wrappers=wrappers)
    simulator = find_adapter("gymnasium").make(made, 1)
    simulator.reset([0])
    ours = [simulator.step(np.zeros(1, np.int64)) for _ in range(12)]
    spec = copy.deepcopy(gymnasium.spec("Limited-v0"))
    spec.additional_wrappers += tuple(OF_GYMNASIUM[w.name] for w in wrappers)
    theirs = gymnasium.make(spec, max_episode_steps=limit)
    theirs.reset(seed=0)
    for step in ours:
        shown, reward, terminated, truncated, _ = theirs.step(0)
        assert (step.rewards[0], *step.terminated, *step.truncated) == (
            reward,
            terminated,
            truncated,
        )
        if truncated:
            assert np.array_equal(step.final_observations[0], shown)
            shown, _ = theirs.reset()
        assert np.array_equal(step.observations[0], shown)


def limited(steps: int) -> gymnasium.Env[Any, Any]:
    """Make an environment as `gymnasium.make` does, inside of another wrapper."""
    env = gymnasium.make("tests.gyms:Script-v0", max_episode_steps=steps)
    return gymnasium.wrappers.RecordEpisodeStatistics(env)


@pytest.mark.parametrize("wrappers", [(), (SKIPS,)])
def test_a_limit_that_is_longer_than_that_of_the_simulator_is_refused(
    wrappers: tuple[WrapperConfig, ...],
) -> None:
    name = f"{__name__}:limited"
    asked = config(name, kwargs={"steps": 5}, max_episode_steps=50, wrappers=wrappers)
    found = problem(asked)
    assert found.code == "limit-without-effect"
    assert found.fix is not None
    assert found.fix.startswith("env.max_episode_steps=5 ")
    # A shorter limit, and none, have an effect
    for limit in (5, 4, None):
        describe(dataclasses.replace(asked, max_episode_steps=limit))


def test_a_time_limit_is_inside_of_wrappers_of_a_function_too() -> None:
    made = config("tests.gyms:Script", max_episode_steps=7, wrappers=(SKIPS,))
    simulator = find_adapter("gymnasium").make(made, 1)
    simulator.reset([0])
    results = [simulator.step(np.zeros(1, np.int64)) for _ in range(6)]
    assert [length for r in results for length in r.episode_lengths] == [3, 3]


@pytest.mark.parametrize(
    ("name", "span", "fix"),
    [
        ("InvertedPendulm-v5", (0, 18), "id: InvertedPendulum-v5"),
        ("CartPole", (0, 8), "id: CartPole-v1"),  # a version is part of the id
        (
            "qqqq",
            (0, 4),
            "id: <package.module:Class, or package.module:Name-v0, which it registers>",
        ),
        (
            "tests.gyms:Scrypt",
            (11, 17),
            "id: tests.gyms:Script",
        ),  # a class of the module
        ("tests.gyms:Scrip-v0", (11, 19), "id: tests.gyms:Script-v0"),
        (
            "no_such_module:Thing-v0",
            (0, 14),
            "install it, put its folder on PYTHONPATH, or correct the name",
        ),
    ],
)
def test_an_unknown_simulator(name: str, span: tuple[int, int], fix: str) -> None:
    found = problem(config(name))
    assert (found.code, found.key, found.got, found.span) == (
        "unknown-simulator",
        "env.id",
        name,
        span,
    )
    assert found.fix == fix
    assert [*check(config(name))] == [found]


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "gymnasum",
            "unknown simulator library, did you mean 'gymnasium'?",
            "kind: gymnasium",
        ),
        ("no_such_module:Adapter", "no simulator library can be found there", None),
        ("tests.gyms:NoSuchAdapter", "no simulator library can be found there", None),
    ],
)
def test_an_unknown_adapter(name: str, what: str, fix: str | None) -> None:
    broken = config(kind=name)
    found = problem(broken)
    assert (found.code, found.key, found.got, found.what) == (
        "unknown-adapter",
        "env.kind",
        name,
        what,
    )
    assert fix is None or found.fix == fix
    assert [*check(broken)] == [found]


def test_an_adapter_of_your_own() -> None:
    assert type(find_adapter(f"{__name__}:OwnAdapter")).__name__ == "OwnAdapter"


def test_without_gymnasium_a_plan_is_possible_and_a_run_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    assert not check(config())
    found = problem(config())
    assert (found.code, found.why, found.fix) == (
        "missing-library",
        "there is no module gymnasium",
        install_command("envs"),
    )


def test_a_simulator_whose_library_is_missing() -> None:
    found = problem(config("tests.gyms:NeedsAbsent-v0"))
    assert (found.code, found.why) == (
        "missing-library",
        "there is no module no_such_simulator_library",
    )
    assert "pip install" not in found.fix  # no extra of ours has it


def test_a_module_that_an_extra_has_is_told_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    given = config("gymnasium_robotics:FetchReachDense-v4")
    assert [*check(given)] == [problem(given)]
    assert (problem(given).code, problem(given).fix) == (
        "missing-library",
        install_command("robotics"),
    )


def test_arguments_the_simulator_does_not_take() -> None:
    found = problem(config(kwargs={"gravty": 9.8}))
    assert (found.code, found.key, found.got) == (
        "bad-simulator-kwargs",
        "env.kwargs",
        "gravty: 9.8",
    )


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("max_episode_steps", 5, "remove it here and set env.max_episode_steps"),
        ("id", "Ant-v5", "remove it here and set env.id"),
        ("disable_env_checker", False, "remove it"),
    ],
)
def test_arguments_that_are_not_the_simulators(
    name: str, value: object, fix: str
) -> None:
    broken = config(kwargs={name: value})
    found = problem(broken)
    assert (found.code, found.key, found.fix) == (
        "reserved-simulator-kwarg",
        f"env.kwargs.{name}",
        fix,
    )
    assert [*check(broken)] == [found]


def test_two_entries_of_one_name() -> None:
    numbers = gymnasium.spaces.Box(-1, 1, (2,))
    seen = gymnasium.spaces.Dict(
        {"a.b": numbers, "a": gymnasium.spaces.Dict({"b": numbers})}
    )
    with pytest.raises(ConfigError, match="both are called"):
        spaces_of(seen, gymnasium.spaces.Discrete(2))


def test_spaces_no_policy_can_take() -> None:
    found = problem(config("tests.gyms:WholeNumbers-v0"))
    assert (found.code, found.key) == ("unsupported-space", "env.id")


def test_a_text_alone_is_nothing_to_act_on() -> None:
    with pytest.raises(ConfigError) as caught:
        spaces_of(gymnasium.spaces.Text(5), gymnasium.spaces.Discrete(2))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("unsupported-space", "env.id")


def job(name: str, **model: object) -> Config:
    given = {
        "cluster": {"component_placement": {}},
        "env": {"id": f"tests.gyms:{name}"},
        "actor": {"model": model},
    }
    return read_config(given)


@pytest.mark.parametrize(
    ("name", "model", "key", "fix"),
    [
        ("Pixels-v0", {"kind": "mlp"}, "kind", "kind: cnn"),
        ("Script-v0", {"kind": "cnn"}, "kind", "kind: mlp"),
        ("Texts-v0", {"kind": "mlp"}, "kind", "kwargs: {filter_keys: [a]}"),
        ("Texts-v0", {"kind": "transformer"}, "kind", "{filter_keys: [a]}"),
        ("Corner-v0", {"kind": "cnn"}, "network", "network: impala"),
        (
            "Pixels-v0",
            {"kind": "cnn", "channels": [8]},
            "channels",
            "channels: [32, 64, 64]",
        ),
    ],
)
def test_a_network_for_other_observations_is_refused(
    name: str, model: dict[str, object], key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spaces_of_job(job(name, **model))
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("model-misfit", f"actor.model.{key}")
    assert found.fix is not None
    assert fix in found.fix


def test_images_stay_bytes_and_a_row_of_them_becomes_numbers() -> None:
    images = spaces_of_job(job("Pixels-v0", kind="cnn"))
    assert (images.observation_shape, images.observation_dtype, images.numbers) == (
        (84, 84, 3),
        "uint8",
        0,
    )
    row = spaces_of_job(job("PixelRow-v0"))
    assert (row.observation_shape, row.observation_dtype) == ((84 * 84 * 3,), "float32")
    simulator = find_adapter("gymnasium").make(config("tests.gyms:Corner-v0"), 2)
    shown = simulator.reset([1, 2])
    result = simulator.step(np.zeros(2, np.int64))
    assert {
        each.dtype for each in (shown, result.observations, result.final_observations)
    } == {np.dtype(np.uint8)}
    assert shown.shape == (2, 12, 12, 1)
    assert shown.max() == 255


@pytest.mark.parametrize(
    ("kwargs", "shape"),
    [({}, (4 * 8 + 144,)), ({"beside": True}, (4 * (8 + 6) + 144,))],
    ids=["image", "dict"],
)
def test_what_a_policy_remembers_comes_before_what_is_shown(
    kwargs: dict[str, object], shape: tuple[int, ...]
) -> None:
    shown = describe(config("tests.gyms:Corner-v0", kwargs=kwargs))
    spaces = shown.remembering(8)
    assert (spaces.observation_shape, spaces.numbers) == (shape, shown.numbers + 8)
    assert spaces.shown == shown
    numbers = describe(config()).remembering(3)
    assert (numbers.observation_shape, numbers.observation_dtype) == ((7,), "float32")
    assert numbers.shown == describe(config())
    assert shown.remembering(0) == shown.shown == shown


def test_numbers_that_are_hidden_by_a_wrapper() -> None:
    wrapper = WrapperConfig(
        name="rlplace.envs.wrappers:Shown", kwargs={"indices": [0, 2]}
    )
    hidden = config("CartPole-v1", wrappers=(wrapper,))
    assert describe(hidden).observation_shape == (2,)
    pair = [
        find_adapter("gymnasium").make(each, 1).reset([3])
        for each in (hidden, config("CartPole-v1"))
    ]
    assert pair[0].tolist() == pair[1][:, [0, 2]].tolist()
    found = problem(config("tests.gyms:Pixels-v0", wrappers=(wrapper,)))
    assert (found.code, found.key) == ("bad-wrapper", "env.wrappers[0]")


def test_entries_of_dicts_are_one_row_whose_numbers_come_first() -> None:
    spaces = describe(config("tests.gyms:Corner-v0", kwargs={"beside": True}))
    parts = [
        ("told.noise", (2,), "float32"),
        ("told.turn", (4,), "float32"),
        ("image", (12, 12, 1), "uint8"),
    ]
    assert sorted(
        (part.name, part.shape, part.dtype) for part in spaces.parts
    ) == sorted(parts)
    assert [part.dtype for part in spaces.parts] == ["float32", "float32", "uint8"]
    assert (spaces.observation_shape, spaces.observation_dtype, spaces.numbers) == (
        (4 * 6 + 144,),
        "uint8",
        6,
    )
    simulator = find_adapter("gymnasium").make(
        config("tests.gyms:Corner-v0", kwargs={"beside": True}), 1
    )
    (row,) = simulator.reset([3])
    names, cut = [part.name for part in spaces.parts[:2]], spaces.parts[0].size
    numbers = dict(zip(names, np.split(row[:24].view(np.float32), [cut]), strict=True))
    assert sorted(numbers["told.turn"]) == [0, 0, 0, 1]
    assert np.abs(numbers["told.noise"]).max() <= 1
    assert row[24:].max() == 255


@pytest.mark.parametrize(
    ("space", "actions", "taken"),
    [
        ("many", MultiDiscreteActions(n=(2, 3), shape=(2,)), [[1, 2]]),
        (
            "switches",
            MultiDiscreteActions(n=(2, 2, 2, 2), shape=(2, 2)),
            [[[0, 1], [1, 0]]],
        ),
    ],
)
def test_actions_of_several_choices(
    space: str, actions: MultiDiscreteActions, taken: list[object]
) -> None:
    made = config("tests.gyms:ManyActions-v0", kwargs={"space": space})
    assert describe(made).actions == actions
    simulator = find_adapter("gymnasium").make(made, 1)
    simulator.reset([0])
    chosen = np.array(taken, np.int64)
    assert simulator.step(chosen).observations[0, 3] == chosen.sum()


def test_wrappers_stand_around_each_simulator() -> None:
    wrappers = (
        WrapperConfig(
            name="gymnasium.wrappers:ResizeObservation", kwargs={"shape": [6, 8]}
        ),
        WrapperConfig(
            name="gymnasium.wrappers:FrameStackObservation", kwargs={"stack_size": 3}
        ),
    )
    made = config("tests.gyms:Corner-v0", wrappers=wrappers)
    assert describe(made).observation_shape == (3, 6, 8, 1)
    assert find_adapter("gymnasium").make(made, 2).reset([1, 2]).shape == (
        2,
        3,
        6,
        8,
        1,
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "code", "key"),
    [
        ("ResizeObservation", {}, "unknown-wrapper", "env.wrappers[0].name"),
        (
            "gymnasium.wrappers:ResizeObservations",
            {},
            "unknown-wrapper",
            "env.wrappers[0].name",
        ),
        (
            "gymnasium.wrappers:ResizeObservation",
            {"size": 3},
            "bad-wrapper",
            "env.wrappers[0]",
        ),
        (
            "gymnasium.wrappers:GrayscaleObservation",
            {},
            "bad-wrapper",
            "env.wrappers[0]",
        ),  # of no colours
    ],
)
def test_a_wrapper_that_is_not_there_or_does_not_fit(
    name: str, kwargs: dict[str, object], code: str, key: str
) -> None:
    found = problem(
        config(
            "tests.gyms:Corner-v0", wrappers=(WrapperConfig(name=name, kwargs=kwargs),)
        )
    )
    assert (found.code, found.key) == (code, key)


def test_a_function_makes_the_simulator() -> None:
    made = config("tests.gyms:limited", kwargs={"steps": 3})
    assert not check(made)
    simulator = find_adapter("gymnasium").make(made, 1)
    simulator.reset([0])
    assert [
        int(simulator.step(np.zeros(1, np.int64)).truncated[0]) for _ in range(4)
    ] == [0, 0, 1, 0]


def test_a_dict_of_numbers_alone_is_a_vector() -> None:
    spaces = describe(config("tests.gyms:DictObservations-v0"))
    assert (spaces.observation_shape, spaces.observation_dtype, spaces.numbers) == (
        (2,),
        "float32",
        2,
    )


def test_a_bug_of_the_simulator_is_not_the_configs() -> None:
    with pytest.raises(ValueError, match="a bug in the simulator") as caught:
        describe(config("tests.gyms:Broken-v0"))
    assert not isinstance(caught.value, ConfigError)
