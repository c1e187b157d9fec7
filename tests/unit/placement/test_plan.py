"""make_plan: everything decided, every problem at once."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan
from rlplace.errors import PlacementError, Source
from rlplace.placement import Plan, Topology
from rlplace.placement.flow import Transport
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.transfers import transports_of
from tests.unit.placement.reports import ON, shown

HYBRID = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
EIGHT = Topology.uniform(1, 8)


def config(
    placement: object = HYBRID,
    *,
    envs: int = 64,
    groups: int = 2,
    offload: bool = True,
    **cluster: Any,
) -> Config:
    return read_config(
        {
            "cluster": {"component_placement": placement, **cluster},
            "env": {
                "id": "CartPole-v1",
                "total_num_envs": envs,
                "enable_offload": offload,
            },
            "rollout": {"pipeline_stage_num": groups, "enable_offload": offload},
            "actor": {"enable_offload": offload},
        }
    )


def plan(*args: Any, topology: Topology = EIGHT, **options: Any) -> Plan:
    return make_plan(config(*args, **options), topology)


def codes(*args: Any, topology: Topology = EIGHT, **options: Any) -> list[str]:
    with pytest.raises(PlacementError) as caught:
        plan(*args, topology=topology, **options)
    return list(caught.value.codes)


REMEMBERS = {"actor": {"model": {"memory": "gru"}, **ON}}


def test_placement_residency_and_data_flow_problems_come_together() -> None:
    found = codes(
        {"actor": "0-8", "env": "0-3", "rollout": "0-3,6"},
        envs=13,
        offload=False,
        allow_resident=["actr"],
    )
    assert found == ["accelerator-out-of-range", "unknown-component", "uneven-envs"]
    found = codes(HYBRID, envs=13, offload=False)
    assert found == ["residents-clash"] * 3 + ["uneven-envs"]


def test_environments_must_divide_and_reach_every_rank_and_what_is_proposed_does() -> (
    None
):
    one_env = {"actor": "0-7", "env": "0", "rollout": "4-7"}
    assert codes(envs=60) == ["uneven-envs"]
    assert codes(one_env, envs=2, groups=1) == ["rank-without-rows"] * 2
    with pytest.raises(
        PlacementError, match=r"one of\n *total_num_envs: 64\n *total_num_envs: 56"
    ):
        plan(envs=60)
    with pytest.raises(PlacementError, match="total_num_envs: 8 "):
        plan(one_env, envs=2, groups=1)
    assert plan(envs=56).row_routes.observations.rows == 28
    assert plan(one_env, envs=8, groups=1)


def test_fewer_environments_than_a_block_can_only_become_more() -> None:
    with pytest.raises(PlacementError, match="total_num_envs: 8\\n"):
        plan(envs=6)


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        (
            "actr",
            "no component is called 'actr', did you mean 'actor'?",
            "allow_resident: [env, actor]",
        ),
        ("critic", "no component is called 'critic'", None),
    ],
)
def test_a_resident_that_is_no_component_is_marked(
    name: str, what: str, fix: str | None
) -> None:
    with pytest.raises(PlacementError) as caught:
        plan(allow_resident=["env", name])
    (problem,) = caught.value.problems
    assert (problem.what, problem.fix) == (what, fix)
    assert problem.got is not None
    assert problem.span is not None
    start, end = problem.span
    assert problem.got[start:end] == name


def test_ranks_that_compute_together_are_no_threads_of_one_process() -> None:
    apart = {"actor": "0-1", "env": "2-3", "rollout": "2-3"}
    with pytest.raises(
        PlacementError, match=r"actor \(2 ranks\) cannot run as threads"
    ) as refused:
        plan(apart, launcher="inline")
    (problem,) = refused.value.problems
    assert (problem.code, problem.key) == ("inline-needs-one-rank", "cluster.launcher")
    assert "cluster.launcher: ray" in str(problem.fix)
    assert plan({**apart, "actor": "0"}, launcher="inline"), (
        "ranks of env and rollout are by themselves"
    )
    assert plan(apart, launcher="ray")


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        (
            {"algorithm": {"rollout_steps": 1, "num_minibatches": 9}},
            "empty-minibatches",
        ),
        (
            {"actor": {"sync": {"mode": "lora"}, **ON}, "rollout": ON},
            "sync-without-base",
        ),
        ({"algorithm": {"burn_in": 2}}, "bad-sequences"),
        ({"algorithm": {"unroll_steps": 8}}, "bad-sequences"),
        (
            {**REMEMBERS, "algorithm": {"rollout_steps": 16, "unroll_steps": 3}},
            "bad-sequences",
        ),
        (
            {**REMEMBERS, "algorithm": {"rollout_steps": 16, "unroll_steps": 32}},
            "bad-sequences",
        ),
        (
            {
                **REMEMBERS,
                "algorithm": {"rollout_steps": 16, "unroll_steps": 4, "burn_in": 5},
            },
            "bad-sequences",
        ),
        (
            {**REMEMBERS, "algorithm": {"rollout_steps": 16, "num_minibatches": 9}},
            "empty-minibatches",
        ),
    ],
)
def test_what_no_actor_can_do(blocks: dict[str, object], code: str) -> None:
    mapping = {
        "cluster": {"component_placement": HYBRID},
        "env": {"id": "x", "total_num_envs": 8, **ON},
        **blocks,
    }
    with pytest.raises(PlacementError) as caught:
        make_plan(read_config(mapping), EIGHT)
    assert code in caught.value.codes


@pytest.mark.parametrize(
    ("minibatches", "told"), [(4, []), (7, ["num_minibatches: 8"])]
)
def test_minibatches_that_do_not_divide_are_a_warning(
    minibatches: int, told: list[str]
) -> None:
    mapping = {
        "cluster": {"component_placement": HYBRID},
        "env": {"id": "x", "total_num_envs": 8, **ON},
        "actor": ON,
        "rollout": ON,
        "algorithm": {"rollout_steps": 8, "num_minibatches": minibatches},
    }
    warnings = make_plan(read_config(mapping), EIGHT).warnings
    fixes = [w.fix for w in warnings if w.code == "uneven-minibatches"]
    assert fixes == told


def test_waste_is_a_warning() -> None:
    (idle,) = plan({"actor": "0-3", "env": "4", "rollout": "5"}).warnings
    assert (idle.code, "6-7" in idle.what) == ("idle-accelerators", True)
    uneven = plan({"actor": "0-6", "env": "0-3", "rollout": "4-7"}).warnings
    assert [w.code for w in uneven] == ["uneven-shares"]
    assert uneven[0].fix == "total_num_envs: 112"
    written = {"env.total_num_envs": Source(file="a.yaml", line=7)}
    again = make_plan(
        config({"actor": "0-6", "env": "0-3", "rollout": "4-7"}), EIGHT, written
    )
    assert [str(w.source) for w in again.warnings] == ["a.yaml:7"]
    assert not plan({"actor": "0-6", "env": "0-3", "rollout": "4-7"}, envs=112).warnings


def test_many_nodes_fold() -> None:
    placement = {"actor": "all", "env": "0-4095", "rollout": "4096-8191"}
    made = plan(placement, envs=8192, topology=Topology.uniform(1024, 8))
    text = render_text(shown(made))
    assert "nodes 0-511" in text
    assert "nodes 512-1023" in text
    assert len(text.splitlines()) < 70
    assert render_svg(shown(made)).count("<rect") < 40


@pytest.mark.parametrize(
    ("security", "items"),
    [
        ("encrypted", "tcp, encrypted"),
        ("password", "tcp, with a password, not encrypted"),
    ],
)
def test_the_plan_shows_how_items_between_nodes_are_secured(
    security: str, items: str
) -> None:
    block = {"actor": "0-3", "env": "4-5", "rollout": "6-7"}
    made = make_plan(
        config(block, offload=False, comm={"security": security}),
        Topology.uniform(2, 4),
    )
    assert transports_of(made)[Transport.NETWORK].items == items
    assert any(line.endswith(items) for line in render_text(shown(made)).splitlines())
