"""Ranks of an off-policy run are killed: the run goes back to its checkpoint, memory included, to the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_faults import hurt
from tests.e2e.test_off_policy_inline import TINY, run
from tests.e2e.training import INLINE_LAUNCHER, train

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SHARDED = (
    *(word for word in TINY if word != INLINE_LAUNCHER),
    "env.total_num_envs=2",
    "cluster.component_placement.replay={node_group: node, placement: '0:0-1'}",
    "checkpoint.every=1",
)


def test_killed_ranks_of_each_component_change_no_number(tmp_path: Path) -> None:
    last = "runner.total_iterations=5"
    faults = [
        ("replay", 1, 2, None, "SIGKILL"),
        ("rollout", 0, 3, None, "SIGKILL"),
        ("actor", 0, 4, None, "SIGKILL"),
    ]
    found = hurt("sac", tmp_path / "hurt", *SHARDED, last, faults=faults)
    assert found.code == 0, found.out + found.err
    whole = run(("sac", (*SHARDED, INLINE_LAUNCHER)), tmp_path / "whole", 5)
    for name in ("env/return", "actor/critic_loss", "actor/updates", "replay/steps"):
        expected = [line.get(name) for line in whole.metrics() if line["iteration"]]
        assert [
            line.get(name) for line in found.metrics() if line["iteration"]
        ] == expected, name
    events = found.summary()["faults"]["events"]
    replaced = [["replay rank 1"], ["rollout rank 0"], ["actor rank 0"]]
    assert [event["replaced"] for event in events] == replaced


def test_two_actor_ranks_learn_from_halves_of_each_batch(tmp_path: Path) -> None:
    words = (
        *SHARDED,
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
