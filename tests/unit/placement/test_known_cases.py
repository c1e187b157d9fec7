"""Placements that users of other libraries know, with the counts their documents give."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.checks import partners
from rlplace.config.blocks.machines import ClusterConfig, NodeConfig
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.errors import PlacementError
from rlplace.placement import Plan, Topology, plan_components
from rlplace.placement.flow import Transport
from rlplace.placement.machines.topology import declare_topology
from rlplace.placement.schedule import Needs, Residency, text_needs

OFF, WEIGHTS, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
RLHF = ("actor", "critic", "reference", "reward", "rollout")


def layout(block: dict[str, Any], topology: Topology, **options: Any) -> Plan:
    options.setdefault("offload", text_needs(RLHF).components)
    return plan_components(
        ClusterConfig(component_placement=block),
        topology,
        rules=partners.OF_BLOCK,
        **options,
    )


def codes(block: dict[str, Any], topology: Topology, **options: Any) -> tuple[str, ...]:
    with pytest.raises(PlacementError) as caught:
        layout(block, topology, **options)
    return caught.value.codes


def test_needs_of_the_roles_that_are_named() -> None:
    needs = text_needs(
        [
            "actor",
            "rollout",
            "reward.math",
            "reward.style",
            "reference",
            "agent.search",
            "typo",
        ]
    )
    assert needs.stages == ("sync", "rollout", "infer", "learn")
    assert set(needs.components) == {
        "actor",
        "rollout",
        "reward.math",
        "reward.style",
        "reference",
        "agent.search",
    }
    assert needs.of("infer", "reward.math") is FULL
    assert needs.of("infer", "actor") is WEIGHTS
    assert needs.of("rollout", "agent.search") is FULL
    assert text_needs(["env"]).stages == (
        "sync",
        "rollout",
        "learn",
    )  # no component infers
    assert text_needs(["env"], actor_infers=True).residency["infer"] == {
        "actor": WEIGHTS
    }
    assert (
        "actor" not in text_needs(["reference"], actor_infers=False).residency["infer"]
    )


def test_colocate_all_with_eight_engines_on_eight() -> None:
    made = layout({"preset": "colocate_all"}, Topology.uniform(1, 8))
    assert made.placement.mode == "collocated"
    assert made.placement.spec("rollout").num_copies == 8
    assert (
        not made.schedule.entries["learn 1"].releases
        + made.schedule.entries["learn 1"].acquires
    )
    assert made.schedule.residency["learn 2"] == dict.fromkeys(RLHF, OFF) | {
        "actor": FULL
    }
    assert made.schedule.residency["rollout"] == dict.fromkeys(RLHF, OFF) | {
        "rollout": FULL
    }
    assert (made.savings.used, made.savings.dedicated) == (8, 40)
    assert str(made.savings).startswith("8 accelerators instead of 40 (actor 8 + ")
    assert (
        codes({"preset": "colocate_all"}, Topology.uniform(1, 8), offload=())
        == ("residents-clash",) * 5
    )


def test_colocate_all_with_four_engines_of_four_on_sixteen() -> None:
    block = {
        "actor,critic,reference,reward": "0-15",
        "rollout": {
            "same_as": "actor",
            "tensor_parallel_size": 4,
            "data_parallel_size": 4,
        },
    }
    made = layout(block, Topology.uniform(2, 8))
    assert made.placement.spec("rollout").num_copies == 4
    assert {s.transport for s in made.routes[0].shares} == {Transport.SAME_ACCELERATOR}
    # Engines x their size must be the actor's accelerators where they share all of them.
    block["rollout"]["data_parallel_size"] = 8
    assert codes(block, Topology.uniform(2, 8)) == ("parallel-sizes",)
    assert (
        codes({"preset": "colocate_all"}, Topology.uniform(2, 8), offload=["actor"])[0]
        == "residents-clash"
    )


def test_seventy_billion_on_48_against_64_or_80() -> None:
    """actor 16, critic 16, reward 8, reference 8: these four alone are 48 when each has its own.

    With engines on 16 more that is 64. Sharing actor with reference and critic with reward brings it back to 48. The
    rule that comes with this sharing elsewhere, equal numbers for both partners, does not hold for 16 and 8; with
    reference and reward grown to 16 the dedicated count is 80.
    """
    topology = declare_topology(
        [NodeConfig(count=6, accelerators=8, product="A100", memory=80 << 30)]
    )
    shared = {
        "actor": "0-15",
        "reference": "0-7",
        "critic": "16-31",
        "reward": "16-23",
        "rollout": {"placement": "32-47", "tensor_parallel_size": 8},
    }
    as_stated = layout(shared, topology)
    assert (as_stated.savings.used, as_stated.savings.dedicated) == (48, 64)
    assert [w.code for w in as_stated.warnings] == [
        "unequal-partners",
        "unequal-partners",
    ]
    assert "reference is on 8 accelerators, actor on 16" in as_stated.warnings[0].what
    sizes = {"actor": 16, "critic": 16, "rollout": 16}
    equal = layout({"preset": "colocate_actor_ref+critic_reward", **sizes}, topology)
    assert (equal.savings.used, equal.savings.dedicated, equal.savings.saved) == (
        48,
        80,
        32,
    )
    assert not equal.warnings
    four = {
        "actor": "0-15",
        "critic": "16-31",
        "reward": "32-39",
        "reference": "40-47",
        "rollout": "0-15",
    }
    assert layout(four, topology).savings.dedicated - 16 == 48
    apart = {
        "actor": "0-15",
        "critic": "16-31",
        "reward": "32-39",
        "reference": "40-47",
        "rollout": "48-63",
    }
    dedicated = layout(apart, Topology.uniform(8, 8))
    assert (dedicated.savings.used, dedicated.savings.saved) == (64, 0)
    assert dedicated.placement.mode == "disaggregated"
    assert codes(apart, topology) == ("accelerator-out-of-range",)


def test_residency_follows_the_partners() -> None:
    made = layout(
        {"preset": "colocate_actor_ref+critic_reward"}, Topology.uniform(1, 9)
    )
    assert {
        c: [made.schedule.residency[s][c] for s in made.needs.stages] for c in RLHF
    } == {
        "actor": [WEIGHTS, OFF, WEIGHTS, FULL],
        "reference": [
            OFF,
            FULL,
            OFF,
            OFF,
        ],  # no engine is there: it scores finished samples during rollout
        "critic": [OFF, OFF, FULL, FULL],
        "reward": [OFF, FULL, OFF, OFF],
        "rollout": [FULL, FULL, FULL, FULL],  # alone on its accelerators
    }


def test_a_robot_group_beside_two_groups_of_accelerators() -> None:
    topology = Topology.uneven([8, 8, 8, 0])
    groups = (
        {"label": "a800", "node_ranks": "0-1"},
        {"label": 4090, "node_ranks": 2},
        {
            "label": "franka",
            "node_ranks": 3,
            "hardware": {
                "type": "Franka",
                "configs": [{"robot_ip": "10.0.0.1", "node_rank": 3}],
            },
        },
    )
    block = {
        "actor": {"node_group": "a800", "placement": "0-15"},
        "rollout": {"node_group": "a800,4090", "placement": "8-23"},
        "env": {"node_group": "franka", "placement": "0:0-1"},
    }
    made = plan_components(
        ClusterConfig(component_placement=block, node_groups=groups),
        topology,
        offload=["actor", "rollout"],
        rules=partners.OF_BLOCK,
    )
    assert str(made.placement.accelerators("rollout")) == "8-23"
    assert str(made.placement.shared("actor", "rollout")) == "8-15"
    assert [s.hardware[0].config["robot_ip"] for s in made.placement.slots("env")] == [
        "10.0.0.1"
    ] * 2
    assert made.routes[0].transports() == {
        Transport.SAME_ACCELERATOR: 8,
        Transport.NETWORK: 8,
    }


def test_partners_of_sizes_that_do_not_divide() -> None:
    block = {"actor": "0-5", "reference": "0-3", "rollout": "6-7"}
    assert codes(block, Topology.uniform(1, 8)) == ("uneven-partners",)
    assert layout({**block, "reference": "6-7"}, Topology.uniform(1, 8)).warnings == ()


def with_batches(block: dict[str, Any], *, micro_batch: int = 1, **sizes: int) -> Plan:
    """Of a job that is planned only, with these sizes."""
    job: dict[str, Any] = {
        "cluster": {"component_placement": block},
        "algorithm": {"name": "ppo", **sizes},
    }
    job |= {role: {"enable_offload": True} for role in RLHF}
    job["actor"] |= {"micro_batch": micro_batch, "model": {"kind": "causal_lm"}}
    return make_plan(read_config(job), Topology.uniform(1, 8))


def test_batches_need_not_divide_over_engines_and_copies() -> None:
    block = {
        "actor,critic": "0-5",
        "rollout": {"placement": "6-7", "tensor_parallel_size": 2},
    }
    sizes = {"prompts": 7, "samples_per_prompt": 3, "train_batch": 8}
    made = with_batches(block, **sizes)
    assert [(r.source, r.target, r.rows) for r in made.routes] == [
        ("rollout", "actor", 21),
        ("rollout", "critic", 21),
        ("actor", "rollout", 2),
    ]
    # Three engines take two, two and three of the samples, as in a run
    with_batches({"actor": "0-4", "rollout": "5-7"}, **sizes)


def test_each_rank_gets_a_sample_also_in_a_job_that_is_planned_only() -> None:
    block = {"actor": "0-5", "rollout": "6-7"}
    with pytest.raises(PlacementError) as caught:
        with_batches(block, prompts=2, samples_per_prompt=2)
    assert caught.value.codes == ("rank-without-rows",)
    (problem,) = caught.value.problems
    assert (problem.fix or "").startswith("prompts: 3 ")


def test_unknown_components_and_own_needs() -> None:
    assert codes({"actor": 0, "rollout": 1, "critc": 2}, Topology.uniform(1, 3)) == (
        "unknown-component",
    )
    own = Needs(stages=("work",), residency={"work": {"a": FULL, "b": FULL}})
    made = layout({"a": 0, "b": 0}, Topology.uniform(1, 1), needs=own)
    assert made.schedule.entries["work"].releases == ()
    assert made.routes == ()
