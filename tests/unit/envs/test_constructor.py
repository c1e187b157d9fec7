"""Names in `env.kwargs` are compared with what the simulator's constructor takes, without an import of its library."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig, WrapperConfig
from rlplace.envs.argument_kinds import Argument
from rlplace.envs.constructor import takes_of
from rlplace.envs.gymnasium_adapter import GymnasiumAdapter
from rlplace.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")

OWN = f"{__name__}:Steps"


def told(**settings: Any) -> list[tuple[str, str, str | None]]:
    config = dataclasses.replace(SimulatorEnvConfig(), **settings)
    return [(p.code, p.key, p.fix) for p in GymnasiumAdapter().check(config)]


def test_arguments_are_those_of_the_class_and_of_its_bases() -> None:
    takes = takes_of("gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv")
    assert takes is not None
    assert {"ctrl_cost_weight", "render_mode", "camera_id"} <= {*takes.names}
    assert not takes.more
    assert takes_of("no_such_module:Env") is None
    assert takes_of("gymnasium.envs.mujoco.half_cheetah_v5:NoSuch") is None


def test_nothing_is_imported() -> None:
    code = (
        "import sys\n"
        "from rlplace.envs.constructor import takes_of\n"
        "assert takes_of('gymnasium.envs.classic_control.cartpole:CartPoleEnv').names\n"
        "assert not {'numpy', 'gymnasium'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_base_of_another_folder_may_take_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "class Mine(Other):\n"
        "    def __init__(self, size=3, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "def make(size):\n"
        "    return None\n"
    )
    (tmp_path / "my_world.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    number = Argument("number", is_annotated=False, default=3)
    assert takes_of("my_world:Mine") == ("Mine", ("size",), True, {"size": number})
    assert takes_of("my_world:make") == ("make", ("size",), False, {})


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"id": "CartPole-v1", "kwargs": {"gravity": 9.8}}, "remove gravity"),
        (
            {"id": "HalfCheetah-v5", "kwargs": {"forward_reward_wieght": 1.0}},
            "forward_reward_weight: 1.0",
        ),
        (
            {"id": "Pendulum-v1", "kwargs": {"rendermode": "human"}},
            "render_mode: human",
        ),
        ({"id": "rlplace.envs.reach:Reach", "kwargs": {"size": 32}}, "pixels: 32"),
        ({"id": "rlplace.envs.reach:Reach", "kwargs": {"pixel": 32}}, "pixels: 32"),
    ],
)
def test_an_argument_that_is_not_taken_is_a_problem(
    settings: dict[str, object], fix: str
) -> None:
    ((code, key, said),) = told(**settings)
    assert code == "bad-simulator-kwargs"
    assert key.startswith("env.kwargs.")
    assert said == fix


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("Pendulum-v1", {"g": 5.0}),
        ("HalfCheetah-v5", {"ctrl_cost_weight": 0.2, "camera_id": 0}),
        ("rlplace.envs.reach:Reach", {"pixels": 32}),
    ],
)
def test_arguments_that_are_taken_are_none(
    name: str, kwargs: dict[str, object]
) -> None:
    assert told(id=name, kwargs=kwargs) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ALE/Pong-v5", "ale_py:ALE/Pong-v5"),
        ("FetchReach-v4", "gymnasium_robotics:FetchReach-v4"),
        ("panda_gym:Panda-v0", None),
    ],
)
def test_ids_of_other_packages_name_their_module(name: str, meant: str | None) -> None:
    ((code, _, fix),) = told(id=name)
    assert code == "unknown-simulator"
    assert fix is not None
    assert fix.startswith(f"id: {meant}        (pip install") == (meant is not None)


class Steps(gymnasium.Env[Any, Any]):
    """Compares and multiplies its arguments, as environments do."""

    def __init__(
        self,
        steps=20,
        shaped=False,
        size=64,
        flag=0,
        *,
        noise: float = 0.1,
        lives: int = 3,
        mode="a",
    ) -> None:  # type: ignore[no-untyped-def]  # as environments of others have it
        self.given = (steps, shaped, size, flag, noise, lives, mode)


@pytest.mark.parametrize(
    ("name", "kwargs", "fix"),
    [
        # Never ends, always shaped, and fails in the first step
        (OWN, {"steps": "many"}, "steps: 20"),
        (OWN, {"steps": "1_000"}, "steps: 1000"),
        (OWN, {"steps": True}, "steps: 20"),
        (OWN, {"shaped": "no"}, "shaped: false"),
        (OWN, {"noise": "low"}, "noise: 0.1"),
        (OWN, {"lives": 2.5}, "lives: 3"),
        (OWN, {"lives": [3]}, "lives: 3"),
        ("Pendulum-v1", {"g": "moon"}, "g: 10.0"),
        ("FrozenLake-v1", {"is_slippery": "off"}, "is_slippery: false"),
        ("HalfCheetah-v5", {"frame_skip": "5"}, "frame_skip: 5"),
        ("rlplace.envs.reach:Reach", {"pixels": "many"}, "pixels: 32"),
    ],
)
def test_a_value_of_another_kind_is_a_problem(
    name: str, kwargs: dict[str, object], fix: str
) -> None:
    ((code, key, said),) = told(id=name, kwargs=kwargs)
    (argument,) = kwargs
    assert (code, key, said) == ("bad-simulator-kwargs", f"env.kwargs.{argument}", fix)


class Asserting(gymnasium.Env[Any, Any]):
    """Asserts what it is given, as MiniGrid does."""

    def __init__(self, kind: str | int = 0) -> None:
        assert isinstance(kind, int), "kind must be an integer"


def test_an_assertion_of_a_constructor_is_told_in_words() -> None:
    name = f"{__name__}:Asserting"
    config = SimulatorEnvConfig(id=name, kwargs={"kind": "a"})
    with pytest.raises(ConfigError) as raised:
        GymnasiumAdapter().describe(config)
    (problem,) = raised.value.problems
    assert problem.code == "bad-simulator-kwargs"
    assert "kind must be an integer" in str(problem.why)


def test_ids_of_libraries_of_extras_are_compared_with_those_that_they_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library of an extra is not imported for an id that its source has."""
    text = 'from gymnasium import register\nregister(id="LargeGrid-v0", entry_point="a:B")\n'
    folder = tmp_path / "minigrid"
    folder.mkdir()
    (folder / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
    assert told(id="minigrid:LargeGrid-v0") == []
    assert "minigrid" not in sys.modules
    registry = dict(gymnasium.registry)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", registry)
    monkeypatch.setattr(gymnasium, "registry", registry)
    ((code, _, fix),) = told(id="minigrid:LagreGrid-v0")
    monkeypatch.delitem(sys.modules, "minigrid", raising=False)
    assert (code, fix) == ("unknown-simulator", "id: minigrid:LargeGrid-v0")
    ((code, _, fix),) = told(id="gymnasium:CartPoel-v1")
    assert (code, fix) == ("unknown-simulator", "id: gymnasium:CartPole-v1")


def test_values_that_may_be_meant_are_none() -> None:
    given = {"steps": None, "size": [64, 64], "flag": True, "noise": 1, "lives": 2.0}
    assert told(id=OWN, kwargs={**given, "shaped": 1, "mode": 3}) == []


def test_arguments_of_wrappers_are_compared_too() -> None:
    limit = WrapperConfig(
        name="gymnasium.wrappers:TimeLimit", kwargs={"max_episode_steps": "many"}
    )
    ((code, key, fix),) = told(id="CartPole-v1", wrappers=(limit,))
    assert (code, key) == (
        "unknown-wrapper",
        "env.wrappers[0].kwargs.max_episode_steps",
    )
    assert fix == "max_episode_steps: <a whole number>"


def test_a_text_that_reads_like_a_number_is_shown_with_its_quotes() -> None:
    config = SimulatorEnvConfig(id="Ant-v5", kwargs={"frame_skip": "5"})
    (problem,) = GymnasiumAdapter().check(config)
    assert (problem.got, problem.fix) == ('frame_skip: "5"', "frame_skip: 5")
