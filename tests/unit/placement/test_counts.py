"""What the numbers of a plan follow from, and engines that leave accelerators of the actor idle."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.checks import partners
from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.jobs.language_model.counts import explain_counts
from rlplace.placement import Topology, plan_components

FORTY_EIGHT = Topology.uniform(6, 8)
THIRDS = {
    "actor": "0-15",
    "reference": {"same_as": "actor"},
    "critic": "16-31",
    "reward": {"same_as": "critic"},
    "rollout": {"placement": "32-47", "tensor_parallel_size": 4},
}
ROLES = ("actor", "critic", "reference", "reward", "rollout")


def counts(placement: dict[str, Any], **algorithm: Any) -> dict[str, tuple[str, str]]:
    blocks: dict[str, Any] = {role: {"enable_offload": True} for role in ROLES} | {
        "env": {"kind": "text"}
    }
    config = read_config(
        {
            "cluster": {"component_placement": placement},
            "algorithm": {"name": "ppo"} | algorithm,
            **blocks,
        }
    )
    layout = make_plan(config, FORTY_EIGHT)
    return {
        c.subject: (c.count, c.why) for c in explain_counts(config, layout.placement)
    }


def test_thirds() -> None:
    found = counts(THIRDS, prompts=1024, train_batch=128)
    assert found["rollout"] == (
        "4 engines x 4 = 16 accelerators",
        "of their own, none of the actor's",
    )
    assert found["actor"] == (
        "16 ranks",
        "each holds 1/16 of optimizer, gradients and weights (zero_stage: 3)",
    )
    assert found["reference"] == ("16 ranks", "each holds 1/16 of the weights")
    assert found["rollout : actor : critic"] == (
        "1 : 1 : 1",
        "in accelerators; reference with actor; reward with critic",
    )
    assert found["samples"] == (
        "1024 in an iteration",
        "1024 prompts x 1; 256 for each engine",
    )
    assert found["steps"] == (
        "8 of the optimizer",
        "1024 samples in batches of 128, 8 for each rank of the actor",
    )


def test_ranks_that_have_a_copy_or_its_tokens_between_them() -> None:
    cut = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    placed = THIRDS | {
        "actor": {"placement": "0-15", **cut},
        "reference": {"placement": "0-15", **cut},
    }
    found = counts(placed, prompts=1024, train_batch=128)
    assert found["actor"] == (
        "16 ranks",
        "each holds 1/16 of optimizer, gradients and weights (zero_stage: 3)",
    )
    assert found["reference"] == ("16 ranks", "each holds 1/16 of the weights")
    assert (
        found["steps"][1]
        == "1024 samples in batches of 128, 32 for every 4 ranks of the actor"
    )


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ("0-15", "all of the actor's: none of them idles while engines generate"),
        ("0-7", "8 of the actor's 16"),
        ("8-23", "8 of the actor's 16, and 8 of their own"),
    ],
)
def test_engines_and_the_actor(rollout: str, said: str) -> None:
    assert counts({"actor": "0-15", "rollout": rollout})["rollout"][1] == said


def test_what_does_not_divide_is_said_to_be_about_that_much() -> None:
    task = {"env": {"task": "arithmetic"}, "reference": {"enable_offload": True}}
    mapping = {
        "cluster": {
            "component_placement": {"actor": "0", "rollout": "1-3", "env": "4"}
        },
        "algorithm": {"name": "grpo", "prompts": 8, "samples_per_prompt": 8},
        "actor": {"model": {"path": "somewhere"}},
        **task,
    }
    config = read_config(mapping)
    placement = make_plan(config, FORTY_EIGHT, {}).placement
    found = {c.subject: c.why for c in explain_counts(config, placement)}
    assert found["samples"] == "8 prompts x 8; about 21.3 for each engine"


def test_engines_of_several_accelerators_for_one_rank_are_counted() -> None:
    found = counts({"actor": "0-15", "rollout": "0-15:0-3"}, prompts=64)
    assert found["rollout"][0] == "4 engines x 4 = 16 accelerators"
    assert found["samples"][1] == "64 prompts x 1; 16 for each engine"
    assert {"samples", "steps"}.isdisjoint(counts({"actor": "0-15", "rollout": "0-15"}))


def warned(placement: dict[str, Any]) -> list[str | None]:
    layout = plan_components(
        ClusterConfig(component_placement=placement),
        FORTY_EIGHT,
        offload=placement,
        rules=partners.OF_BLOCK,
    )
    return [w.fix for w in layout.warnings if w.code == "engines-leave-idle"]


def test_engines_that_leave_accelerators_of_the_actor_idle() -> None:
    few = {"placement": "0-11", "tensor_parallel_size": 4}
    three = {"placement": "0-5", "tensor_parallel_size": 3}
    for rollout, size in ((few, 4), (three, 2)):
        fix = f"rollout: {{same_as: actor, tensor_parallel_size: {size}}}        ({16 // size} engines x {size} = 16)"
        assert warned({"actor": "0-15", "rollout": rollout}) == [fix]
    assert warned({"actor": "0-15", "rollout": few, "env": "12-15"}) == [], (
        "the env works there meanwhile"
    )
    assert warned({"actor": "0-15", "rollout": few, "reference": "12-15"}) == [], (
        "the reference streams there"
    )
    assert warned({"actor": "0-15", "rollout": {"same_as": "actor"}}) == []
    assert warned({"actor": "0-15", "rollout": "16-31"}) == []
