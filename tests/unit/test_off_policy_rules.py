"""Off-policy configs that cannot run are refused before anything starts, with the reason and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

import rlplace
from rlplace.cli import train
from rlplace.errors import ConfigError

_MOST = float(np.finfo(np.float32).max)


class Endless(gymnasium.Env[Any, Any]):
    """Takes every float32 number as an action."""

    observation_space = Box(-1.0, 1.0, (2,))
    action_space = Box(-_MOST, _MOST, (2,))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["sac", "env.id=CartPole-v1"], "off-policy-misfit", "one choice among n"),
        (["dqn", "env.id=Pendulum-v1"], "off-policy-misfit", "compares the values"),
        (["dqn", "env.id=tests.gyms:Pixels"], "off-policy-misfit", "images"),
        (["sac", "env.id=rlplace.envs.reach:Reach"], "off-policy-misfit", "are texts"),
        (
            ["sac", "replay.capacity=3000000000000"],
            "replay-does-not-fit",
            "larger than this machine",
        ),
        (
            [
                "sac",
                "replay.capacity=3000000000",
                "cluster.nodes=[{accelerators: 2, host_memory: 24GiB}]",
            ],
            "host-does-not-fit",
            "replay: as declared",
        ),
        (
            ["sac", "algorithm.sync_every=3", "env.total_num_envs=2"],
            "uneven-updates",
            "algorithm.sync_every=4",
        ),
        (
            ["sac", "algorithm.steps_per_iteration=1001"],
            "uneven-updates",
            "algorithm.steps_per_iteration=1008",
        ),
        (
            ["sac", "replay.capacity=101", "env.total_num_envs=4"],
            "uneven-updates",
            "replay.capacity=104",
        ),
        (
            ["sac", "cluster.component_placement.rollout=0-1"],
            "uneven-updates",
            "total_num_envs: 2",
        ),
        (
            ["crossq", "cluster.component_placement.actor=0-1"],
            "off-policy-misfit",
            "statistics of a whole batch",
        ),
        (["td3", "algorithm.name=td3_bc"], "off-policy-misfit", "there are none"),
        (
            ["td3", "algorithm.name=iql", "+replay.demonstrations=absent.npz"],
            "bad-demonstrations",
            "cannot be read",
        ),
        (["sac", "faults.on_poison=skip"], "off-policy-misfit", "not there"),
        (
            ["sac", "+replay.demonstrations=absent.npz"],
            "bad-demonstrations",
            "cannot be read",
        ),
        (
            [
                "sac",
                "+replay.demonstrations=absent.npz",
                "replay.sampling=prioritised",
            ],
            "off-policy-misfit",
            "replay.sampling=uniform",
        ),
        (
            [
                "sac",
                "+replay.demonstrations=absent.npz",
                "+replay.demonstration_share=0.3",
            ],
            "uneven-updates",
            "no whole number",
        ),
        # Many simulators write the largest float32 for infinity
        (["sac", f"env.id={__name__}:Endless"], "off-policy-misfit", "has no bounds"),
        (["sac", "algorithm.gama=1"], "unknown-key", "did you mean 'gamma'"),
        (["sac", "replays.capacity=1"], "unknown-key", "did you mean 'replay'"),
        (["sac", "algorithm.name=sca"], "unknown-choice", "sac"),
        (
            [
                "sac",
                "env.wrappers=[{name: gymnasium.wrappers:NormalizeObservation}]",
            ],
            "off-policy-misfit",
            "older statistics",
        ),
    ],
)
def test_a_wrong_config_is_refused_in_words(
    words: list[str],
    code: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *rest = words
    fixed = ("cluster.launcher=inline", f"runner.output_dir={tmp_path}")
    # 3: a plan that does not fit; 2: a wrong config
    expected = 3 if code == "host-does-not-fit" else 2
    assert train.main(["--config-name", name, *fixed, *rest]) == expected
    said = capsys.readouterr().err
    assert f"[{code}]" in said
    assert text in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        # Keys of the other jobs
        ("actor.optimizer.lr=0.001", "actor.lr=0.001"),
        ("actor.model.hidden=[64]", "'actor.hidden=[64]'"),
        # Keys of other libraries
        ("algorithm.learning_rate=0.001", "actor.lr=0.001"),
        ("buffer_size=5000", "replay.capacity=5000"),
        ("algorithm.ent_coef=0.1", "algorithm.temperature=0.1"),
        ("algorithm.utd_ratio=2", "algorithm.updates_per_step=2"),
        ("env.n_envs=4", "env.total_num_envs=4"),
        # Misspelt
        ("replay.capactiy=5000", "replay.capacity=5000"),
    ],
)
def test_a_fix_of_an_unknown_key_names_a_key_of_this_job(
    typed: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rlplace.plan("sac", [typed])
    (told,) = caught.value.problems
    assert told.code == "unknown-key"
    assert told.fix == meant
    rlplace.plan("sac", [meant.strip("'")])


@pytest.mark.parametrize(
    ("name", "simulator", "suited"),
    [
        ("sac", "CartPole-v1", "dqn"),
        ("td3", "Acrobot-v1", "dqn"),
        ("dqn", "Pendulum-v1", "sac"),
    ],
)
def test_a_plan_refuses_actions_that_the_algorithm_cannot_take(
    name: str, simulator: str, suited: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rlplace.plan(name, [f"env.id={simulator}"])
    (told,) = caught.value.problems
    assert told.code == "off-policy-misfit"
    fix, _, remark = str(told.fix).partition(" " * 8)
    assert fix == f"algorithm.name={suited}"
    assert f"--config-name {suited} env.id={simulator}" in remark
    rlplace.plan(name, [f"env.id={simulator}", fix])
    rlplace.plan(suited, [f"env.id={simulator}"])


def test_a_key_of_the_other_jobs_alone_gets_no_key_that_is_refused_again() -> None:
    with pytest.raises(ConfigError) as caught:
        rlplace.plan("sac", ["algorithm.clip_ratio_low=0.2"])
    (told,) = caught.value.problems
    assert (
        told.fix == "one of the known keys in place of clip_ratio_low, or leave it out"
    )
    assert "did you mean" not in told.render()


def test_a_run_that_ends_before_its_first_update_is_refused() -> None:
    words = ["algorithm.learning_starts=100000", "runner.total_iterations=2"]
    with pytest.raises(ConfigError) as caught:
        rlplace.plan("sac", words)
    assert "no-updates" in [told.code for told in caught.value.problems]
