"""Seconds and memory to plan and check a job on 1,000 to 100,000 accelerators, one process for each size.

python benchmarks/plan_scale.py            prints the table
python benchmarks/plan_scale.py grpo 4000  one job and size

The first three jobs are written for this table. The others are shipped configs, enlarged: their memory ledger is
computed as well. Seconds are those from a config's values to the plan (and its ledger), with imports, without Hydra.
`again` are those of a second plan in the same process: imports, and the models that check config blocks, are there.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
REWARDS = ("reward.math", "reward.code", "reward.style", "reward.safety")


def plan_ppo(count: int) -> None:
    """Three components with all routes and channels."""
    half = count // 2
    make_ppo(
        count,
        {"actor": "all", "env": f"0-{half - 1}", "rollout": f"{half}-{count - 1}"},
    )


def plan_shared(count: int) -> None:
    """The same with each env rank in one process with its rollout rank: two locations of channels for each."""
    shared = {"placement": f"0-{count // 2 - 1}", "process": "shared"}
    make_ppo(count, {"actor": "all", "env": shared, "rollout": shared})


def make_ppo(count: int, placement: dict[str, object]) -> None:
    from rlplace.config.read import read_config
    from rlplace.contract.planning import make_plan
    from rlplace.placement import Topology

    config = read_config(
        {
            "cluster": {"component_placement": placement},
            "env": {
                "id": "CartPole-v1",
                "total_num_envs": count,
                "enable_offload": True,
            },
            "rollout": {"enable_offload": True},
            "actor": {"enable_offload": True},
        }
    )
    make_plan(config, Topology.uniform(count // 8, 8))


def plan_rlhf(count: int) -> None:
    """Ten components, with the routes of samples to all of them."""
    from rlplace.config.read import read_config
    from rlplace.contract.planning import make_plan
    from rlplace.placement import Topology

    half = count // 2
    eighth = count // 8
    placement: dict[str, object] = {
        "actor": f"0-{half - 1}",
        "reference": {"same_as": "actor"},
        "critic": f"{half}-{count - 1}",
        "rollout": {"placement": "all", "tensor_parallel_size": 8},
        "env": f"0-{half - 1}:0-{count - 1}",
        "agent": {"node_group": "node", "placement": "all"},
    }
    placement |= {
        name: f"{half + i * eighth}-{half + (i + 1) * eighth - 1}"
        for i, name in enumerate(REWARDS)
    }
    leaves: dict[str, object] = {"enable_offload": True}
    config = read_config(
        {
            "cluster": {"component_placement": placement},
            "actor": leaves | {"model": {"kind": "causal_lm"}},
            **dict.fromkeys(("reference", "critic", "rollout", "env"), leaves),
            "reward": {name.removeprefix("reward."): leaves for name in REWARDS},
            "algorithm": {
                "name": "ppo",
                "prompts": count,
                "samples_per_prompt": 4,
                "train_batch": count,
            },
        }
    )
    made = make_plan(config, Topology.uniform(count // 8, 8))
    assert len(made.placement.components) == 10


JOBS = {"ppo": plan_ppo, "shared": plan_shared, "rlhf": plan_rlhf}
_GPUS = "cluster=8xH100"
_PLACE = "cluster.component_placement."


def shipped_words(job: str, count: int) -> list[str]:
    """Return the command line that enlarges a shipped config to `count` accelerators, with more samples for them."""
    half = count // 2
    nodes = count // 8
    machines = [f"cluster.num_nodes={nodes}", f"cluster.nodes.0.count={nodes}"]
    emulated = [f"cluster.num_nodes={nodes}", "cluster.accelerators_per_node=8"]
    rows = [f"algorithm.prompts={count}"]
    halves = [f"{_PLACE}actor=0-{half - 1}", f"{_PLACE}rollout={half}-{count - 1}"]
    return {
        # Weights from GPU to GPU: on the same accelerator, and by a broadcast
        "grpo": ["grpo_qwen3_8b", *machines, *rows],
        "grpo apart": ["grpo_qwen3_8b", *machines, *rows, *halves],
        "grpo tp 4": [
            "grpo_qwen3_8b",
            *machines,
            *rows,
            f"{_PLACE}rollout={{placement: all, tensor_parallel_size: 4}}",
        ],
        "grpo 70b": [
            "grpo_llama_70b",
            _GPUS,
            *machines,
            *rows,
            f"{_PLACE}actor=all",
            f"{_PLACE}rollout={{placement: all, tensor_parallel_size: 8}}",
        ],
        "ppo 70b": [
            "rlhf_ppo_70b_hybrid",
            _GPUS,
            *machines,
            *rows,
            f"algorithm.train_batch={count}",
            f"{_PLACE}actor=0-{half - 1}",
            f"{_PLACE}critic={half}-{half + half // 2 - 1}",
            f"{_PLACE}reward={half + half // 2}-{half + 3 * half // 4 - 1}",
            f"{_PLACE}reference={half + 3 * half // 4}-{count - 1}",
        ],
        "hybrid ppo": [
            "hybrid_ppo",
            *emulated,
            f"env.total_num_envs={count}",
            f"{_PLACE}actor=all",
            f"{_PLACE}env=0-{half - 1}",
            f"{_PLACE}rollout={half}-{count - 1}",
        ],
        "hybrid grpo": [
            "hybrid_grpo_llm",
            *emulated,
            *rows,
            f"{_PLACE}actor=all",
            f"{_PLACE}rollout=all",
        ],
    }[job]


SHIPPED = (
    "grpo",
    "grpo apart",
    "grpo tp 4",
    "grpo 70b",
    "ppo 70b",
    "hybrid ppo",
    "hybrid grpo",
)


def shipped_values(job: str, count: int) -> Mapping[str, Any]:
    from rlplace.config import compose

    (composed,) = compose.with_hydra(["--config-name", *shipped_words(job, count)])
    return composed.mapping


def plan_shipped(values: Mapping[str, Any]) -> None:
    from rlplace.config.read import read_config
    from rlplace.contract.planning import make_plan, memory_case
    from rlplace.contract.registry import job_of
    from rlplace.workers.launch.machines import declared_topology

    config = read_config(values)
    config = job_of(config).completed(config, {})
    plan = make_plan(config, declared_topology(config.cluster))
    memory_case(plan, config).ledger()


def measure(job: str, count: int) -> None:
    values = shipped_values(job, count) if job in SHIPPED else {}
    seconds = planned(job, count, values)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    again = planned(job, count, values)
    row = f"{job:<12}{count:>14,}{seconds:>12.2f}{again:>12.3f}"
    print(f"{row}{1e6 * again / count:>22.1f}{peak:>12.0f}", flush=True)


def planned(job: str, count: int, values: Mapping[str, Any]) -> float:
    """Plan a job. Return the processor seconds that this took."""
    began = time.process_time()
    if job in SHIPPED:
        plan_shipped(values)
    else:
        JOBS[job](count)
    return time.process_time() - began


def main() -> None:
    if len(sys.argv) == 3:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    print(
        f"{'job':<12}{'accelerators':>14}{'seconds':>12}{'again':>12}"
        f"{'us / accelerator':>22}{'peak MiB':>12}",
        flush=True,
    )
    for job in (*JOBS, *SHIPPED):
        for count in SIZES:
            subprocess.run([sys.executable, __file__, job, str(count)], check=True)


if __name__ == "__main__":
    main()
