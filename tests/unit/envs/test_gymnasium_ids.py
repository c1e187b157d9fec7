"""Every id that Gymnasium registers is simulated for some steps, or refused in words."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.contract import ContinuousActions, DiscreteActions
from rlplace.envs.gymnasium_adapter import made_with_extra
from rlplace.envs.gymnasium_vector import GymnasiumVector
from rlplace.envs.registry import describe, find_adapter
from rlplace.errors import ConfigError, Problem
from tests.odd_gyms import Odd

IDS = sorted(
    name
    for name, spec in gymnasium.registry.items()
    if "tests." not in str(spec.entry_point)
)
# Ids that Gymnasium registers only to say where they are now
GONE = [
    name
    for name in IDS
    if "mujoco_py" in getattr(gymnasium.registry[name].entry_point, "__name__", "")
]
SIMULATED = [name for name in IDS if name not in (*GONE, "Pusher-v4")]


def refusal(name: str, **kwargs: Any) -> Problem:
    """The problem for which the simulator is refused, before a run and in one."""
    config = SimulatorEnvConfig(id=name, kwargs=kwargs)
    found = []
    for make in (describe, lambda config: find_adapter("gymnasium").make(config, 2)):
        with pytest.raises(ConfigError) as caught:
            make(config)
        found.append(caught.value.problems)
    assert found[0] == found[1]
    (problem,) = found[0]
    assert problem.fix
    return problem


@pytest.mark.parametrize("name", GONE)
def test_an_id_that_is_no_longer_made_names_the_newest(name: str) -> None:
    found = refusal(name)
    assert found.code == "unknown-simulator"
    assert found.fix is not None
    newest = found.fix.removeprefix("id: ")
    assert newest.startswith(name.rpartition("-v")[0])
    assert newest.endswith("-v5")
    assert not made_with_extra(name)


def test_an_id_that_needs_an_older_library_names_the_newest() -> None:
    found = refusal("Pusher-v4")
    assert found.fix == "id: Pusher-v5"
    assert found.why is not None
    assert "mujoco<3" in found.why
    assert not made_with_extra("Pusher-v4")
    assert made_with_extra("Pusher-v5")


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_every_other_id_is_simulated_or_refused_in_words(name: str) -> None:
    config = SimulatorEnvConfig(id=name)
    found: ConfigError | None = None
    try:
        spaces = describe(config)
    except ConfigError as error:
        found = error
    if found is not None:
        assert found.codes == ("missing-library",)
        assert not made_with_extra(name)
        return
    envs = find_adapter("gymnasium").make(config, 2)
    assert isinstance(envs, GymnasiumVector)
    shown = envs.reset([0, 1])
    assert shown.shape == (2, *spaces.observation_shape)
    draw = np.random.default_rng(0)
    for _ in range(30):
        actions: Any
        if isinstance(spaces.actions, DiscreteActions):
            actions = draw.integers(spaces.actions.n, size=2)
        else:
            assert isinstance(spaces.actions, ContinuousActions)
            size = (2, *spaces.actions.shape)
            actions = draw.standard_normal(size).astype(np.float32)
        result = envs.step(actions)
        assert result.observations.shape == shown.shape
        assert result.observations.dtype == spaces.observation_dtype
        assert np.isfinite(result.rewards).all()
    envs.close()
    assert envs.remarks == []


# ── environments of other libraries ──────────────────────────────────────────────────────────────────────────────────


def class_of(library: str, *names: str) -> type:
    """A class with the methods of `Odd` whose bases say that they are of another library."""
    base = type("Base", (), {"__module__": f"{library}.core"})
    methods = {name: vars(Odd)[name] for name in names}
    return type("Theirs", (base,), {**methods, "__module__": __name__})


Theirs = class_of("gym", "step", "reset")
Several = class_of("pettingzoo", "step", "reset")


class NoEnv:
    """Has spaces and methods, and is no gymnasium.Env."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(2)


def nothing() -> None:
    """Return no environment."""


def many() -> Any:
    """Make a vector of environments."""
    return gymnasium.make_vec("CartPole-v1", num_envs=2)


for _name, _made in {"Theirs-v0": Theirs, "Several-v0": Several}.items():
    if _name not in gymnasium.registry:
        gymnasium.register(_name, entry_point=_made)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Theirs", "shimmy.GymV26CompatibilityV0(env=Theirs())"),
        ("Theirs-v0", "shimmy.GymV26CompatibilityV0"),
        ("Several", "env.kind: pettingzoo"),
        ("Several-v0", "env.kind: pettingzoo"),
        ("NoEnv", "class NoEnv(gymnasium.Env)"),
        ("nothing", "gymnasium.Env"),
        ("many", "a function that returns one environment"),
    ],
)
def test_what_is_no_environment_of_gymnasium_is_refused(name: str, words: str) -> None:
    found = refusal(f"{__name__}:{name}")
    assert found.code == "not-an-environment"
    assert found.fix is not None
    assert words in found.fix


def test_an_id_of_gym_is_told_from_an_unknown_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gym: Any = types.ModuleType("gym")
    gym.envs = types.SimpleNamespace(registry={"OnlyThere-v0": None})
    monkeypatch.setitem(sys.modules, "gym", gym)
    found = refusal(f"{__name__}:OnlyThere-v0")
    assert found.fix is not None
    assert (
        "env_id: OnlyThere-v0, make_kwargs: {disable_env_checker: true}}" in found.fix
    )
    assert "gym" not in str(refusal(f"{__name__}:NotThere-v0").what)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        (
            "pettingzoo.butterfly.pistonball_v6",
            "kind: pettingzoo, id: pettingzoo.butterfly.pistonball_v6",
        ),
        (
            "pettingzoo.mpe.simple_spread_v3:parallel_env",
            "kind: pettingzoo, id: pettingzoo.mpe.simple_spread_v3",
        ),
        (
            "gym:Walker-v0",
            "id: shimmy:GymV26CompatibilityV0, kwargs: {env_id: Walker-v0, "
            "make_kwargs: {disable_env_checker: true}}",
        ),
        # Gymnasium has it as well
        ("gym:CartPole-v0", "id: CartPole-v0"),
    ],
)
def test_names_of_other_libraries_get_the_bridge_that_serves_them(
    name: str, fix: str
) -> None:
    found = refusal(name)
    assert found.code == "unknown-simulator"
    assert found.fix is not None
    assert fix in found.fix


class Lacks(Odd):
    """Needs a library of the system."""

    def __init__(self) -> None:
        raise ImportError("libGL.so.1: cannot open shared object file")


def test_a_library_that_cannot_be_loaded_is_told() -> None:
    found = refusal(f"{__name__}:Lacks")
    assert found.code == "missing-library"
    assert found.why is not None
    assert "libGL.so.1" in found.why


class Bridge(Odd):
    """As shimmy converts an environment of gym whose action space begins at 5."""

    __module__ = "shimmy.openai_gym_compatibility"

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Discrete(2)

    def __init__(self, start: int) -> None:
        self.gym_env = types.SimpleNamespace(action_space=Discrete(2, start=start))


def bridge(start: int) -> Bridge:
    return Bridge(start)


def test_an_action_space_whose_start_shimmy_loses_is_refused() -> None:
    config = SimulatorEnvConfig(id=f"{__name__}:bridge", kwargs={"start": 5})
    with pytest.raises(ConfigError) as caught:
        describe(config)
    (found,) = caught.value.problems
    assert (found.code, found.got) == ("unsupported-space", "Discrete(2, start=5)")
    assert "action += 5" in (found.fix or "")
    same = dataclasses.replace(config, kwargs={"start": 0})
    assert describe(same).actions == DiscreteActions(n=2)


# ── spaces of nothing ────────────────────────────────────────────────────────────────────────────────────────────────


class Empty(Odd):
    """Has spaces without numbers."""

    def __init__(self, seen: str = "pair", taken: str = "choice") -> None:
        super().__init__()
        self.observation_space = {
            "pair": Box(-1.0, 1.0, (2,)),
            "none": Box(-1.0, 1.0, (0,)),
            "flat": Box(0, 255, (0, 4, 3), np.uint8),
            "entries": Dict({"a": Box(-1.0, 1.0, (0,))}),
        }[seen]
        self.action_space: Any = {
            "choice": Discrete(2),
            "none": Box(-1.0, 1.0, (0,)),
        }[taken]


@pytest.mark.parametrize("seen", ["none", "flat", "entries"])
def test_observations_without_numbers_are_refused(seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(SimulatorEnvConfig(id=f"{__name__}:Empty", kwargs={"seen": seen}))
    assert caught.value.codes == ("unsupported-space",)
    assert "have no number" in str(caught.value)


@pytest.mark.parametrize("taken", ["none"])
def test_actions_without_elements_are_refused(taken: str) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(SimulatorEnvConfig(id=f"{__name__}:Empty", kwargs={"taken": taken}))
    assert caught.value.codes == ("unsupported-space",)
    assert "have no element" in str(caught.value)
