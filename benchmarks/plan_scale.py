"""Seconds and memory to plan and check a job on 1,000 to 100,000 accelerators, one process for each size.

python benchmarks/plan_scale.py            prints the table
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

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


def measure(job: str, count: int) -> None:
    began = time.perf_counter()
    JOBS[job](count)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{job:<6}{count:>14,}{seconds:>12.2f}{1e6 * seconds / count:>22.1f}{peak:>12.0f}",
        flush=True,
    )


def main() -> None:
    if len(sys.argv) == 3:
        measure(sys.argv[1], int(sys.argv[2]))
        return
    print(
        f"{'job':<6}{'accelerators':>14}{'seconds':>12}{'us / accelerator':>22}{'peak MiB':>12}",
        flush=True,
    )
    for job in JOBS:
        for count in SIZES:
            subprocess.run([sys.executable, __file__, job, str(count)], check=True)


if __name__ == "__main__":
    main()
