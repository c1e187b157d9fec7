"""The reports that tests of the plan's output look at: today's PPO job, and jobs with many components or nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.show.view import PlanView, view_plan
from rlplace.runtime.prepare import prepare

ON = {"enable_offload": True}
H100 = {"accelerators": 8, "product": "H100", "memory": "80GiB", "host_memory": "2TiB"}
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
HYBRID = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
APART = {"actor": "0-3", "env": "4-5", "rollout": "6-7"}
SIX = {
    "actor": "0-7",
    "critic": "0-7",
    "reference": "0-3",
    "reward.math": "4-5",
    "reward.code": "6-7",
    "rollout": "0-7",
}


def shown(plan: Plan) -> PlanView:
    """A plan without a config, so that no memory is known."""
    return view_plan(
        plan,
        MemoryCase(
            placement=plan.placement, needs=plan.needs, offload=plan.offload, demands={}
        ),
    )


def ppo(
    placement: Mapping[str, object] = HYBRID,
    *,
    name: str = "ppo",
    offload: bool = True,
    envs: int = 128,
    **cluster: Any,
) -> PlanView:
    cluster.setdefault("nodes", [{"accelerators": 8, "memory": "16GiB"}])
    cluster.setdefault("accelerator", {"kind": "emulated"})
    return prepare(
        {
            "cluster": {"component_placement": placement, **cluster},
            "env": {
                "id": "CartPole-v1",
                "total_num_envs": envs,
                "enable_offload": offload,
                "accelerator_memory": "256MiB",
            },
            "rollout": {
                "pipeline_stage_num": 2,
                "enable_offload": offload,
                "workspace_memory": "64MiB",
            },
            "actor": {"enable_offload": offload},
        },
        name=name,
    ).view


def llm_mapping(
    placement: Mapping[str, object] = SIX, **changes: Any
) -> dict[str, Any]:
    """Everything sleeps when it is not needed; 8 x H100 unless `cluster` says otherwise."""
    cluster = {
        "component_placement": placement,
        "nodes": [H100],
        **changes.pop("cluster", {}),
    }
    blocks = {
        c: {**ON, **changes.pop(c, {})}
        for c in ("actor", "critic", "reference", "reward", "rollout")
    }
    blocks["actor"] = {
        "model": {"kind": "causal_lm", **(changes.pop("model", LLAMA_8B) or {})},
        **blocks["actor"],
    }
    return {"cluster": cluster, "algorithm": {"name": "ppo"}, **blocks, **changes}


def llm(
    placement: Mapping[str, object] = SIX, *, name: str = "llm", **changes: Any
) -> PlanView:
    return prepare(llm_mapping(placement, **changes), name=name).view
