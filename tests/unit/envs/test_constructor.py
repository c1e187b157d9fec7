"""Names in `env.kwargs` are compared with what the simulator's constructor takes, without an import of its library."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.simulator import SimulatorEnvConfig
from rlplace.envs.constructor import takes_of
from rlplace.envs.gymnasium_adapter import GymnasiumAdapter

pytest.importorskip("gymnasium")


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
    assert takes_of("my_world:Mine") == ("Mine", ("size",), True)
    assert takes_of("my_world:make") == ("make", ("size",), False)


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
