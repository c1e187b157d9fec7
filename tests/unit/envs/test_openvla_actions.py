"""What tokens of OpenVLA mean for a robot: bins, statistics, grippers, and statistics of another robot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiDiscrete

from rlplace.config.read import read_config
from rlplace.envs.openvla import OpenVlaActions, middles
from rlplace.envs.registry import describe
from rlplace.errors import ConfigError

ARM: dict[str, Any] = {
    "q01": [-0.5, 0.0, 0.0],
    "q99": [0.5, 0.2, 1.0],
    "min": [-1.0, -1.0, 0.0],
    "max": [1.0, 1.0, 1.0],
    "mask": [True, True, False],
}


class Arm(gymnasium.Env[Any, Any]):
    """It takes three numbers, the last of which is a gripper."""

    def __init__(self, elements: int = 3, bound: float = 1.0) -> None:
        self.observation_space = Box(-1, 1, (1,))
        self.action_space = Box(-bound, bound, (elements,))
        self.given = np.zeros(0)

    def step(self, action: Any) -> Any:
        self.given = action
        return np.zeros(1, np.float32), 0.0, False, False, {}


def folder_with(folder: Path, **statistics: Any) -> str:
    (folder / "dataset_statistics.json").write_text(
        json.dumps({name: {"action": each} for name, each in statistics.items()})
    )
    return str(folder)


def given(env: Arm, folder: str, choices: list[int], **kwargs: Any) -> list[float]:
    OpenVlaActions(env, folder, **kwargs).step(np.array(choices))
    found: list[float] = env.given.tolist()
    return found


def published(choice: int, low: float, high: float) -> float:
    """As `predict_action` of OpenVLA: choice -> token -> bin -> number."""
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2.0
    token = 32_000 - 1 - choice
    at = np.clip(32_000 - token - 1, a_min=0, a_max=centres.shape[0] - 1)
    return float(0.5 * (centres[at] + 1) * (high - low) + low)


@pytest.mark.parametrize("choice", [0, 1, 127, 128, 254, 255])
def test_a_choice_means_what_it_means_in_openvla(tmp_path: Path, choice: int) -> None:
    folder = folder_with(tmp_path, arm=ARM)
    found = given(Arm(), folder, [choice, choice, choice])
    expected = [
        published(choice, -0.5, 0.5),
        published(choice, 0.0, 0.2),
        # It is not normalised
        published(choice, -1.0, 1.0),
    ]
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_last_two_choices_are_one_bin() -> None:
    between = middles(256)
    assert len(between) == 256
    assert between[254] == between[255] == pytest.approx(1 - 1 / 255)


def test_extremes_are_those_of_openvla_oft_for_aloha(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, arm=ARM)
    found = given(Arm(), folder, [0, 254, 0], normalization="extremes")
    assert found[:2] == pytest.approx(
        [published(0, -1, 1), published(254, -1, 1)], abs=1e-6
    )


@pytest.mark.parametrize(
    ("gripper", "closed", "opened"), [("libero", 1.0, -1.0), ("bridge", -1.0, 1.0)]
)
def test_a_gripper_gets_what_its_simulator_takes(
    tmp_path: Path, gripper: Any, closed: float, opened: float
) -> None:
    folder = folder_with(tmp_path, arm={**ARM, "mask": [True, True, True]})
    assert given(Arm(), folder, [0, 0, 0], gripper=gripper)[-1] == closed
    assert given(Arm(), folder, [0, 0, 254], gripper=gripper)[-1] == opened


def test_the_space_has_a_choice_of_each_bin(tmp_path: Path) -> None:
    env = OpenVlaActions(Arm(), folder_with(tmp_path, arm=ARM))
    assert env.action_space == MultiDiscrete([256] * 3)


def test_statistics_of_a_fine_tuned_checkpoint_come_before_those_of_its_base(
    tmp_path: Path,
) -> None:
    base = {"norm_stats": {"base": {"action": {**ARM, "q99": [0.25, 0.2, 1.0]}}}}
    (tmp_path / "config.json").write_text(json.dumps(base))
    assert given(Arm(), str(tmp_path), [254] * 3)[0] == pytest.approx(
        published(254, -0.5, 0.25), abs=1e-6
    )
    folder = folder_with(tmp_path, arm=ARM)
    assert given(Arm(), folder, [254] * 3)[0] == pytest.approx(
        published(254, -0.5, 0.5), abs=1e-6
    )


@pytest.mark.parametrize(
    ("env", "kwargs", "reason"),
    [
        (Arm(elements=7), {"unnorm_key": "arm"}, "they are of another robot"),
        (
            Arm(bound=0.3),
            {"unnorm_key": "arm"},
            "element 0 of an action goes from -0.5 to 0.5 by the statistics",
        ),
        (Arm(), {"unnorm_key": "amr"}, "has no statistics amr, did you mean 'arm'?"),
        (Arm(), {}, "statistics of several data sets"),
        (Arm(), {"unnorm_key": "odd"}, "other lengths"),
        (Arm(), {"unnorm_key": "swapped"}, "no number above q01"),
        (Arm(), {"unnorm_key": "empty"}, "no numbers q01 and q99"),
        (Arm(), {"unnorm_key": "arm", "normalization": "q99"}, "quantiles, extremes"),
        (Arm(), {"unnorm_key": "arm", "gripper": "aloha"}, "as_is, libero, bridge"),
        (Arm(), {"unnorm_key": "arm", "bins": 1}, "two or more"),
    ],
)
def test_statistics_that_do_not_fit_are_told(
    tmp_path: Path, env: Arm, kwargs: dict[str, Any], reason: str
) -> None:
    folder = folder_with(
        tmp_path,
        arm=ARM,
        odd={**ARM, "q99": [1.0]},
        swapped={**ARM, "q01": [2.0, 2.0, 2.0]},
        empty={},
    )
    with pytest.raises(ValueError, match=re.escape(reason)):
        OpenVlaActions(env, folder, **kwargs)


def test_actions_are_clipped_if_that_is_asked_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, arm=ARM)
    assert given(Arm(bound=0.3), folder, [0, 254, 0], clip=True) == pytest.approx(
        [-0.3, published(254, 0.0, 0.2), -0.3], abs=1e-6
    )


def test_a_run_is_told_before_its_start(tmp_path: Path) -> None:
    """The task moves in two directions."""
    kwargs = {"folder": folder_with(tmp_path, arm=ARM)}
    wrapper = {"name": "rlplace.envs.openvla:OpenVlaActions", "kwargs": kwargs}
    config: Any = read_config(
        {
            "cluster": {"component_placement": {}},
            "env": {"id": "rlplace.envs.reach:Reach", "wrappers": [wrapper]},
        }
    )
    with pytest.raises(ConfigError) as caught:
        describe(config.env)
    (found,) = caught.value.problems
    assert (found.code, found.key) == ("bad-wrapper", "env.wrappers[0]")
    assert found.why is not None
    assert (
        "the statistics have 3 elements of an action, and the simulator has 2"
        in found.why
    )
