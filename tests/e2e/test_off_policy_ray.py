"""Ranks of an off-policy run are killed: the run goes back to its checkpoint, memory included, to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.test_faults import hurt
from tests.e2e.test_off_policy_inline import Job, each_algorithm, run, weights
from tests.e2e.training import INLINE_LAUNCHER, Finished, train

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SHARDED = (
    "cluster.component_placement.replay={node_group: node, placement: '0:0-1'}",
    "checkpoint.every=1",
)


@pytest.mark.parametrize("name", ["sac", "crossq", "td3", "dqn", "td3_bc", "iql"])
def test_killed_ranks_of_each_component_change_no_number(
    name: str, tmp_path: Path
) -> None:
    config, words = on_ray(name, tmp_path)
    last = "runner.total_iterations=5"
    faults = [
        ("replay", 1, 2, None, "SIGKILL"),
        ("rollout", 0, 3, None, "SIGKILL"),
        ("actor", 0, 4, None, "SIGKILL"),
    ]
    found = hurt(config, tmp_path / "hurt", *words, last, faults=faults)
    assert found.code == 0, found.out + found.err
    whole = run((config, (*words, INLINE_LAUNCHER)), tmp_path / "whole", 5)
    for metric in ("env/return", "actor/critic_loss", "actor/updates", "replay/steps"):
        expected = [line.get(metric) for line in whole.metrics() if line["iteration"]]
        assert [
            line.get(metric) for line in found.metrics() if line["iteration"]
        ] == expected, metric
    for weight, array in weights(whole).items():
        assert np.array_equal(array, weights(found)[weight]), weight
    events = found.summary()["faults"]["events"]
    replaced = [["replay rank 1"], ["rollout rank 0"], ["actor rank 0"]]
    assert [event["replaced"] for event in events] == replaced


def on_ray(name: str, folder: Path) -> Job:
    """Return a small job of an algorithm with two replay ranks. `folder`: of recorded steps."""
    config, words = each_algorithm(folder)[name]
    kept = [word for word in words if word != INLINE_LAUNCHER]
    return config, (*kept, *SHARDED)


@pytest.mark.parametrize("name", ["sac", "td3", "dqn", "td3_bc", "iql"])
def test_two_actor_ranks_go_on_with_all_that_one_has_learned(
    name: str, tmp_path: Path
) -> None:
    config, words = on_ray(name, tmp_path)
    one = (*words, "cluster.component_placement.actor=0", INLINE_LAUNCHER)
    first = run((config, one), tmp_path / "runs", 2)
    before = learned(first, 2)
    two = (
        *words,
        "cluster.component_placement.actor=0-1",
        "cluster.component_placement.rollout=0-1",
        "cluster.allow_resident=[actor,rollout]",
    )
    job = (config, two)
    found = run(job, tmp_path / "runs", 3, f"resume={first.folder}")
    after = learned(found, 3)
    made = [line["actor/updates"] for line in found.metrics() if line["iteration"] == 3]
    assert after["updates"] == before["updates"] + made[0] > before["updates"]
    for optimizer, state in after["optimizers"].items():
        steps = {int(each["step"]) for each in state["state"].values()}
        old = before["optimizers"][optimizer]["state"][0]["step"]
        # Adam goes on with its steps; TD3's policy is delayed
        assert min(steps) == max(steps) > int(old), optimizer
    for module, tensors in before["modules"].items():
        for place, tensor in tensors.items():
            gap = (after["modules"][module][place] - tensor).abs().max()
            # A network of new weights would be further away
            assert 0.0 < gap < 0.2, (module, place)


def learned(found: Finished, iterations: int) -> dict[str, Any]:
    """Return the state of the learner in the checkpoint after a number of iterations."""
    assert found.folder is not None
    folder = found.folder / "checkpoints" / f"{iterations:06}"
    state: dict[str, Any] = torch.load(
        folder / "actor" / "state_00000.pt", weights_only=True
    )
    return state


def test_two_actor_ranks_learn_from_halves_of_each_batch(tmp_path: Path) -> None:
    words = (
        *on_ray("sac", tmp_path)[1],
        "cluster.component_placement.actor=0-1",
        "cluster.component_placement.rollout=0-1",
        "cluster.allow_resident=[actor,rollout]",
    )
    found = train("sac", tmp_path, *words, "runner.total_iterations=3")
    assert found.code == 0, found.out + found.err
    updates = [line["actor/updates"] for line in found.metrics() if line["iteration"]]
    assert updates == [16, 48, 48]


@pytest.mark.parametrize(
    ("name", "iterations", "words", "goal"),
    [
        ("sac", 8, (), -250.0),
        ("td3", 18, (), -250.0),
        ("dqn", 30, (), 400.0),
    ],
)
def test_it_learns(
    name: str, iterations: int, words: tuple[str, ...], goal: float, tmp_path: Path
) -> None:
    """Pendulum, where a random policy has about -1,200; CartPole, where it has about 20."""
    found = train(
        name,
        tmp_path,
        *words,
        "actor.hidden=[64,64]",
        f"runner.total_iterations={iterations}",
        f"runner.eval_every={iterations}",
    )
    assert found.code == 0, found.out + found.err
    assert found.metrics()[-1]["eval/return"] > goal
