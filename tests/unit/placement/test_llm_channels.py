"""The plan of a run with text tasks: channels that never fill up, weights by node, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.contract.planning import make_plan, memory_case
from rlplace.errors import PlacementError
from rlplace.placement import Plan, Topology
from rlplace.placement.show.explain import explain_pair
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import render_json
from tests.unit.placement.memory_cases import engine, trained
from tests.unit.placement.reports import shown

MODEL = {
    "path": "somewhere",
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def config(
    placement: dict[str, Any], *, algorithm: dict[str, Any] | None = None, **blocks: Any
) -> Config:
    asked = {
        "name": "grpo",
        "prompts": 6,
        "samples_per_prompt": 4,
        "max_prompt_length": 32,
        "max_new_tokens": 8,
    }
    mapping = {
        "cluster": {"component_placement": placement},
        "algorithm": asked | (algorithm or {}),
        "env": {"task": "arithmetic"} | blocks.pop("env", {}),
        **blocks,
        "actor": {"model": MODEL} | blocks.get("actor", {}),
    }
    return read_config(mapping)


def layout(config: Config, nodes: int = 1, each: int = 4) -> Plan:
    return make_plan(config, Topology.uniform(nodes, each, "emulated", 1 << 30))


ENVS = {"actor": "0-1", "env": "2-3", "rollout": "1-2"}
LEAVING = {c: {"enable_offload": True} for c in ("actor", "rollout", "env")}


def test_later_turns_and_held_out_prompts_need_room_too() -> None:
    talking = layout(
        config(
            ENVS,
            env={"max_turns": 3, "enable_offload": True},
            actor=LEAVING["actor"],
            rollout=LEAVING["rollout"],
        )
    )
    assert talking.channels[0].capacity_items == 6 * 4 + 2
    tested = layout(
        config(ENVS, runner={"eval_every": 1, "eval_prompts": 100}, **LEAVING)
    )
    assert [c.capacity_items for c in tested.channels[:3]] == [100 + 2, 50 + 2 + 50, 6]


def test_keys_live_where_they_are_taken() -> None:
    spread = layout(
        config({"actor": "0-3", "env": "4-5", "rollout": "2-5"}, **LEAVING), nodes=2
    )
    locations = {
        c.name: [(h.node, h.keys) for h in c.locations()] for c in spread.channels
    }
    assert locations["requests"] == [(0, ("",))]
    assert locations["completions"] == [(1, ("0", "1"))]
    assert locations["samples"] == [(0, ("",))]
    assert locations["weights"] == [(0, ("0", "1")), (1, ("2", "3"))]
    assert [(d.readers, d.near) for d in spread.deliveries] == [
        ((0, 1), (0, 1, 2, 3)),
        ((2, 3), ()),
    ]


def test_the_plan_shows_what_travels() -> None:
    plan = layout(config(ENVS, **LEAVING))
    text = render_text(shown(plan))
    assert "whole groups, to actor rank 0" in text
    assert "6 prompts, and the end of the iteration for 2 rollout ranks" in text
    assert render_json(shown(plan))["routes"]["weights"]["copies"] == [
        {"readers": [0, 1], "near": [0, 1]}
    ]
    assert "prompts so far, to any rank with room" in explain_pair(
        plan, ("env", 1), ("rollout", 0)
    )
    assert "its part, written into the copy of node 0" in explain_pair(
        plan, ("actor", 1), ("rollout", 0)
    )


def test_memory_counts_the_cache_the_tokens_of_a_pass_and_what_is_shared() -> None:
    asked = config(
        {"actor": "0-1", "env": "2", "rollout": "3"},
        rollout={"kv_cache_memory": "4MiB", "dtype": "fp32", "cache_dtype": "fp32"},
        actor={"compute": "fp32", "token_budget": 4096},
    )
    case = memory_case(layout(asked), asked)
    ledger = case.ledger()
    assert ledger.fits
    assert (trained(case).token_budget, engine(case).kv_cache_memory) == (4096, 4 << 20)
    assert {
        getattr(case.demands[c], "sequence_length", None) for c in ("actor", "rollout")
    } == {40}
    assert (
        ledger.shared_bytes(0) > 2 * 4 * 139_648
    )  # two buffers of all weights in fp32, and the channels


@pytest.mark.parametrize(
    ("placement", "algorithm", "code"),
    [
        ({"actor": "0", "rollout": "1"}, {}, "unplaced-component"),
        (
            {"actor": "0", "env": "0", "rollout": "1", "agent": "2"},
            {},
            "unknown-component",
        ),
        (
            {"actor": "0-3", "env": "0", "rollout": "1"},
            {"prompts": 1, "samples_per_prompt": 2},
            "rank-without-rows",
        ),
        (
            {"actor": "0", "env": "0-3", "rollout": "1"},
            {"prompts": 3},
            "rank-without-rows",
        ),
        ({"actor": "0", "env": "1", "rollout": "0"}, {}, "residents-clash"),
    ],
)
def test_what_cannot_be_is_refused(
    placement: dict[str, str], algorithm: dict[str, Any], code: str
) -> None:
    leaving = {} if code == "residents-clash" else LEAVING
    with pytest.raises(PlacementError) as caught:
        layout(config(placement, algorithm=algorithm, **leaving))
    assert code in caught.value.codes


def test_ranks_with_the_same_samples_take_them_together() -> None:
    placement = {
        "actor": {"placement": "0-3", "context_parallel_size": 2},
        "env": "0",
        "rollout": "1",
    }
    with pytest.raises(PlacementError) as caught:
        layout(
            config(
                placement, algorithm={"prompts": 1, "samples_per_prompt": 1}, **LEAVING
            )
        )
    (problem,) = caught.value.problems
    assert (
        problem.what
        == "too few for 2 groups of 2 actor ranks: some would have nothing to do"
    )
    assert problem.why == "each group of 2 actor ranks takes at least one sample"
