"""Plans and a few errors as text, as in the files beside this one (UPDATE_GOLDEN=1 rewrites them); the form of all."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import rlplace.placement
from rlplace.config import AcceleratorRunConfig, ClusterConfig, Config, NodeConfig, read_config
from rlplace.errors import PlacementError, Problem, Source
from rlplace.placement import (
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    Plan,
    Topology,
    make_plan,
    plan_components,
)
from rlplace.placement.checks import BatchSizes
from rlplace.placement.machines.nodes import RANK_LABEL, declare_topology, in_rank_order
from rlplace.placement.show.json import render_json
from rlplace.placement.show.text import render_text
from tests.unit.placement.reports import shown

HERE = Path(__file__).parent
EIGHT = Topology.uniform(1, 8, memory_bytes=16 << 30)
HYBRID = {"actor": "0-7", "env": "0-3", "rollout": "4-7"}
PLACEMENTS = {
    "hybrid": HYBRID,
    "disaggregated": {"actor": "0-3", "env": "4-5", "rollout": "6-7"},
    "one_process": {"actor": "0-7", "env,rollout": {"accelerators": "0-7", "process": "shared"}},
}


def config(
    placement: Mapping[str, object],
    *,
    offload: bool = True,
    envs: int = 64,
    minibatches: int = 4,
    sync: str = "all",
) -> Config:
    return read_config(
        {
            "cluster": {"component_placement": placement},
            "env": {"id": "InvertedPendulum-v5", "total_num_envs": envs, "enable_offload": offload},
            "rollout": {"pipeline_stage_num": 2, "enable_offload": offload},
            "actor": {"enable_offload": offload, "sync": {"mode": sync}},
            "algorithm": {"num_minibatches": minibatches},
        }
    )


def plan(name: str) -> Plan:
    return make_plan(config(PLACEMENTS[name], offload=name != "disaggregated"), EIGHT)


def wrong(placement: Mapping[str, object], topology: Topology = EIGHT, **options: Any) -> Callable[[], object]:
    lines = {f"cluster.component_placement.{key}": 7 + i for i, key in enumerate(placement)}
    sources = {key: Source(file="hybrid_ppo.yaml", line=line) for key, line in lines.items()}
    return lambda: make_plan(config(placement, **options), topology, sources=sources)


def asked(strategy: Any) -> Callable[[], object]:
    return lambda: strategy.get_placement(EIGHT)


def laid_out(
    placement: Mapping[str, object], *groups: Mapping[str, object], topology: Topology = EIGHT, **options: Any
) -> Callable[[], object]:
    """An RLHF job, which has no config of its own."""
    cluster = ClusterConfig(component_placement=placement, node_groups=groups)
    paths = [*(f"component_placement.{k}" for k in placement), *(f"node_groups[{i}]" for i in range(len(groups)))]
    sources = {f"cluster.{path}": Source(file="rlhf.yaml", line=7 + i) for i, path in enumerate(paths)}
    return lambda: plan_components(cluster, topology, sources=sources, **options)


def job(placement: Mapping[str, object], **blocks: Mapping[str, object]) -> Callable[[], object]:
    """A job with language models that leave the accelerators they share."""
    roles = ("actor", "critic", "reward", "rollout")
    mapping: dict[str, Any] = {
        "cluster": {"component_placement": placement},
        "algorithm": {"name": "ppo", "prompts": 8},
        "env": {"task": "arithmetic", "enable_offload": True},
        **{role: {"enable_offload": True} for role in roles},
        "actor": {"model": {"path": "somewhere"}, "enable_offload": True},
    }
    mapping |= {name: {**mapping.get(name, {}), **block} for name, block in blocks.items()}
    return lambda: make_plan(read_config(mapping), EIGHT)


def group(**changes: Any) -> dict[str, object]:
    return {"label": "train", "node_ranks": "0"} | changes


def in_group(label: str, *groups: Mapping[str, object]) -> Callable[[], object]:
    return laid_out({"actor": {"node_group": label, "placement": 0}, "rollout": 1}, *groups)


def beside(value: object, actor: object = "0-3", topology: Topology = EIGHT, **options: Any) -> Callable[[], object]:
    return laid_out({"actor": actor, "rollout": value}, topology=topology, **options)


def hardware(**changes: Any) -> Callable[[], object]:
    return laid_out(PAIR, group(hardware={"type": "Arm"} | changes))


PAIR = {"actor": 0, "rollout": 1}
SHARED = {"process": "shared"}
TWO = Topology.uniform(2, 4)
MIXED_NODE = NodeConfig(
    accelerators=4, mixed=(AcceleratorRunConfig(count=3, product="A100"), AcceleratorRunConfig(count=2, product="L40"))
)
TWO_PRODUCTS = declare_topology([NodeConfig(mixed=MIXED_NODE.mixed)])
ROBOT = {"type": "Arm", "configs": [{"robot_ip": "10.0.0.1", "node_rank": 0}]}

ERRORS: dict[str, Callable[[], object]] = {
    "accelerator-out-of-range": wrong(HYBRID | {"actor": "0-8"}),
    "bad-placement": wrong(HYBRID | {"actor": "0..7"}),
    "bad-strategy": asked(PackedPlacementStrategy(0, 7, 0)),
    "base-60-integer": wrong(HYBRID | {"rollout": 247}),
    "component-placed-twice": wrong({"actor,env": "0-7", "env": "0-3", "rollout": "4-7"}),
    "duplicate-accelerator": wrong(HYBRID | {"actor": "0-3,2-7"}),
    "duplicate-rank": wrong(HYBRID | {"actor": "0-3:0-3,4-7:3-6"}),
    "empty-minibatches": wrong(HYBRID, minibatches=5000),
    "empty-placement": wrong(HYBRID | {"env": None}),
    "node-out-of-range": asked(NodePlacementStrategy([0, 1])),
    "not-a-hyphen": wrong(HYBRID | {"actor": "0\u20137"}),
    "rank-gap": wrong(HYBRID | {"actor": "0-7:1-8"}),
    "rank-spans-nodes": wrong(HYBRID | {"actor": "2-7:0-1"}, Topology.uniform(2, 4)),
    "rank-without-rows": wrong({"actor": "0-7", "env": "0", "rollout": "4-7"}, envs=6),
    "residents-clash": wrong(HYBRID, offload=False),
    "reversed-range": wrong(HYBRID | {"rollout": "7-4"}),
    "sync-without-base": wrong(HYBRID, sync="lora"),
    "too-many-ranks": wrong(HYBRID | {"env": "0:0-5000"}),
    "uneven-envs": wrong(HYBRID, envs=60),
    "uneven-packing": asked(PackedPlacementStrategy(0, 6, 2)),
    "uneven-ranks": wrong(HYBRID | {"rollout": "4-7:0-2"}),
    "unknown-component": wrong({"actor": "0-7", "env": "0-3", "rolout": "4-7"}),
    "unknown-node-group": asked(FlexiblePlacementStrategy([[0]], node_group_label="a800")),
    "unplaced-component": wrong({"actor": "0-7", "rollout": "4-7"}),
    # blocks, counts, relations
    "bad-count": beside({"accelerators": -1}),
    "comma-in-braces": beside({"placement": "0-3", "5-7": None}),
    "circular-placement": beside({"same_as": "rollout"}),
    "copy-spans-nodes": beside({"placement": "2-5", "tensor_parallel_size": 4}, 0, TWO),
    "not-enough-free": beside({"accelerators": 6}),
    "nothing-left": beside("rest", "all"),
    "parallel-sizes": beside({"same_as": "actor", "tensor_parallel_size": 2, "data_parallel_size": 4}),
    "preset-sizes": wrong({"preset": "colocate_all", "actor": 4, "env": 8}),
    "rank-spans-products": beside("2-3:0", 0, TWO_PRODUCTS),
    "uneven-fraction": beside("1/3"),
    "uneven-partners": laid_out({"actor": "0-5", "reference": "0-3", "rollout": "6-7"}, offload=["actor", "reference"]),
    "uneven-batches": beside("4-7", batches=BatchSizes(prompts=10, train_batch=10)),
    "unknown-key": beside({"placement": "4-7", "tensor_paralel_size": 2}),
    "unknown-preset": wrong({"preset": "colocate_everything"}),
    # processes
    "process-alone": wrong(HYBRID | {"env": SHARED | {"accelerators": "0-3"}}),
    "process-apart": wrong(
        HYBRID | {"env": SHARED | {"accelerators": "0-3"}, "rollout": SHARED | {"accelerators": "4-7"}}
    ),
    "process-of-its-own": wrong(HYBRID | {"actor": SHARED | {"accelerators": "0-7"}}),
    # node groups
    "bad-env-config": laid_out(PAIR, group(env_configs="PATH=/opt")),
    "bad-hardware": hardware(configs=[]),
    "bad-label": laid_out(PAIR, group(label="cluster")),
    "bad-node-group": laid_out(PAIR, "train"),  # type: ignore[arg-type]
    "env-var-twice": laid_out(PAIR, group(env_configs=[{"env_vars": [{"A": 1}, {"A": 2}]}])),
    "mixed-node-groups": in_group("train,arms", group(), group(label="arms", hardware=ROBOT)),
    "node-group-declared-twice": laid_out(PAIR, group(), group()),
    "node-group-repeated": in_group("train,train", group()),
    "node-outside-group": laid_out(PAIR, group(env_configs=[{"node_ranks": "0-1"}]), topology=TWO),
    "overlapping-env-configs": laid_out(PAIR, group(env_configs=[{"node_ranks": 0}, {"node_ranks": 0}])),
    "overlapping-node-groups": in_group("train,more", group(), group(label="more")),
    # roles
    "critic-missing": job({"actor,rollout,env": "0-7"}),
    "needs-no-accelerators": job({"actor,rollout,critic,env": "0-7", "reward": "0-7"}, reward={"url": "http://judge"}),
    "overlap-takes-turns": job(
        {"actor,rollout,env": "0-7"}, algorithm={"name": "grpo", "prompts": 8, "max_staleness": 1}
    ),
    "reference-missing": job(
        {"actor,rollout,env,critic": "0-7"}, algorithm={"name": "ppo", "prompts": 8, "kl_coef": 0.01}
    ),
    "roles-contradict": job({"actor,rollout,env,critic": "0-7"}, critic={"on_actor": True}),
    # machines
    "mixed-count": lambda: declare_topology([MIXED_NODE]),
    "node-count": lambda: declare_topology([NodeConfig(count=6)], num_nodes=8),
    "no-node": lambda: in_rank_order([]),
    "node-ranks": lambda: declare_topology([NodeConfig(rank=0), NodeConfig(rank=2)]),
    # channels
}


def warned(placement: Mapping[str, object]) -> Callable[[], Sequence[Problem]]:
    return lambda: make_plan(config(placement), EIGHT).warnings


def layout_warned(placement: Mapping[str, object], topology: Topology = EIGHT) -> Callable[[], Sequence[Problem]]:
    cluster = ClusterConfig(component_placement=placement)
    return lambda: plan_components(cluster, topology, offload=placement).warnings


WARNINGS: dict[str, Callable[[], Sequence[Problem]]] = {
    "engines-leave-idle": layout_warned(
        {"actor": "0-15", "rollout": {"placement": "0-11", "tensor_parallel_size": 4}}, Topology.uniform(2, 8)
    ),
    "idle-accelerators": warned({"actor": "0-3", "env": "0-1", "rollout": "2-3"}),
    "unequal-partners": layout_warned({"actor": "0-7", "reference": "0-3", "rollout": "0-7"}),
    "uneven-shares": warned({"actor": "0-7", "env": "0-3", "rollout": "4-6,7,0"}),
}


def check(file: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text, f"{file.name} differs; UPDATE_GOLDEN=1 accepts the new text"


SHOWN = {  # in full: a caret, two problems, two lines of why, three problems, a remark beside the fix
    "accelerator-out-of-range",
    "base-60-integer",
    "rank-without-rows",
    "residents-clash",
    "unknown-key",
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_plan_text(name: str) -> None:
    check(HERE / "plans" / f"{name}.txt", render_text(shown(plan(name))) + "\n")


def test_plan_json() -> None:
    record: Any = json.loads(json.dumps(render_json(shown(plan("hybrid")))))
    assert record["mode"] == "hybrid"
    assert record["topology"]["nodes"][0] == {
        "rank": 0,
        "accelerators": 8,
        "first": 0,
        "kind": "emulated",
        "memory_bytes": 16 << 30,
    }
    env = record["components"]["env"]
    assert (env["placement"], env["world_size"], env["accelerators"]) == ("0-3", 4, "0-3")
    assert env["ranks"][3] == {"rank": 3, "node": 0, "local_rank": 3, "accelerators": [3]}
    assert record["pairs"][0] == {"a": "actor", "b": "env", "relation": "hybrid", "shared": "0-3"}
    assert set(record["schedule"]) == {"stages", "active", "residency", "first", "entries"}
    assert record["schedule"]["active"] == {
        "sync": ["actor", "rollout"],
        "rollout": ["env", "rollout"],
        "learn": ["actor"],
    }
    assert record["schedule"]["residency"]["rollout"] == {"actor": "off", "env": "full", "rollout": "full"}
    assert set(record["routes"]) == {"observations", "trajectories", "weights"}
    assert [channel["name"] for channel in record["channels"]] == ["observations", "actions", "trajectories", "weights"]
    assert record["warnings"] == []


def assert_standard_format(problem: Problem, code: str) -> None:
    """Code, key and fix are there, and the rendering has them in this order."""
    assert problem.code == code
    assert problem.key
    assert problem.fix
    first, *rest = problem.render().splitlines()
    assert first.startswith(f"{problem.key}: ")
    assert first.endswith(f"[{code}]")
    labels = [line[:9].strip() for line in rest if line.startswith("    ") and line[4:8].strip().endswith(":")]
    assert labels == [name for name in ("got:", "why:", "fix:") if getattr(problem, name[:-1]) is not None]


@pytest.mark.parametrize("code", ERRORS)
def test_error(code: str) -> None:
    with pytest.raises(PlacementError) as caught:
        ERRORS[code]()
    for problem in caught.value.problems:
        assert_standard_format(problem, code)
    if code in SHOWN:
        check(HERE / "errors" / f"{code}.txt", f"{caught.value}\n")


@pytest.mark.parametrize("code", WARNINGS)
def test_warning(code: str) -> None:
    (warning,) = WARNINGS[code]()
    assert_standard_format(warning, code)


def test_every_code_of_the_source_occurs() -> None:
    """A code is any text literal with hyphens, other than the label of a node."""
    made: set[str] = set()
    room = Path(rlplace.placement.__file__).parent
    for file in {*room.rglob("*.py")} - {*(room / "memory").rglob("*.py")}:
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        made |= {text for text in texts if re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)+", text)}
    made.discard(RANK_LABEL)
    assert made == {*ERRORS, *WARNINGS}
    assert {f.stem for f in (HERE / "errors").glob("*.txt")} == SHOWN
