"""How well stage groups hide the shorter of simulating and deciding behind the longer, and who waited for whom.

    python benchmarks/pipelining.py [repetitions] [ray | inline]

Simulator and policy take a given time and no processor, as if each ran on an accelerator of its own. Efficiency is the
longer of the two, as measured, over the time of the rollout stage: 1 when the shorter one is hidden altogether. The
sum is both together over that time, as one process would take that does them in turns.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from rlplace.comm.channel import ChannelSpec
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.envs.registry import describe
from rlplace.metrics import reduce_metrics
from rlplace.models.policy_networks import build_policy
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import TRAJECTORIES, SimulatorArguments
from rlplace.workers.engines.torch import Decision
from rlplace.workers.launch.cluster import Cluster
from rlplace.workers.launch.group import WorkerGroup, wait_all
from rlplace.workers.launch.machines import declared_topology
from rlplace.workers.roles.env import VectorEnvWorker
from rlplace.workers.roles.rollout import VectorRolloutWorker

ROWS = 8
STEPS = 64
LIMIT_S = 120.0
CASES = (
    (8.0, 8.0),
    (8.0, 4.0),
    (4.0, 8.0),
    (4.0, 4.0),
    (2.0, 2.0),
    (1.0, 1.0),
)  # ms that simulator and policy take for a step of all rows
GROUPS = (1, 2, 4)


class Slow(gymnasium.Env[NDArray[np.float32], Any]):
    """Shows nothing and takes `step_s`."""

    observation_space = Box(-1, 1, (4,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return np.zeros(4, np.float32), 0.0, False, False, {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowJob(SimulatorArguments):
    row_s: float  # the policy takes this for each row


class SlowRollout(VectorRolloutWorker):
    """A rollout worker with a slow policy of its own weights."""

    config: SlowJob

    def begin(self) -> None:
        config = self.config.config
        self.move(Residency.FULL)
        policy = build_policy(
            self.config.spaces, config.actor, config.algorithm, config.runner.seed
        )
        self.engine.load(policy.state_dict(), 0)

    def setup(self) -> None:
        super().setup()
        decide = self.engine.decide

        def slowly(
            observations: NDArray[np.float32], noise: NDArray[np.float32]
        ) -> Decision:
            time.sleep(self.config.row_s * len(observations))
            return decide(observations, noise)

        self.engine.decide = slowly  # type: ignore[method-assign]  # an engine at a pace


def make_job(launcher: str, groups: int, sim_ms: float, policy_ms: float) -> SlowJob:
    module = (
        "pipelining" if __name__ == "__main__" else __name__
    )  # as a worker's process imports this file
    mapping = {
        "cluster": {
            "component_placement": {"actor": 1, "env": 0, "rollout": 1},
            "accelerators_per_node": 2,
            "accelerator": {"kind": "emulated"},
            "allow_resident": ["actor", "rollout"],
            "launcher": launcher,
        },
        "env": {
            "id": f"{module}:Slow-v0",
            "total_num_envs": ROWS,
            "kwargs": {"step_s": sim_ms / 1e3 / ROWS},
        },
        "rollout": {"pipeline_stage_num": groups},
        "algorithm": {"rollout_steps": STEPS},
    }
    config = read_config(mapping)
    assert isinstance(config, SimulatorJobConfig)
    plan = make_plan(config, declared_topology(config.cluster))
    return SlowJob(
        config=config,
        ranks={
            component: plan.placement.world_size(component)
            for component in plan.placement.components
        },
        spaces=describe(config.env),
        routes=plan.row_routes,
        deliveries=plan.deliveries,
        row_s=policy_ms / 1e3 / ROWS,
    )


def measure(job: SlowJob, iterations: int) -> list[dict[str, float]]:
    """Metrics of rollout stages, the first left out, each with the `seconds` it took."""
    plan = make_plan(job.config, declared_topology(job.config.cluster))
    with Cluster.from_config(job.config.cluster, plan.topology) as cluster:
        channels = {
            c.name: cluster.channel(
                ChannelSpec(name=c.name, capacity_items=c.capacity_items, keys=c.keys),
                c.locations(),
            )
            for c in plan.channels
        }
        workers = {"env": VectorEnvWorker, "rollout": SlowRollout}
        groups: dict[str, WorkerGroup] = cluster.launch_all(
            {
                name: (
                    worker.create_group(job),
                    plan.placement.get_strategy(name),
                    channels,
                )
                for name, worker in workers.items()
            }
        )
        wait_all(
            [groups["rollout"].begin(), groups["env"].move(Residency.FULL)],
            timeout_s=LIMIT_S,
        )
        found = []
        for iteration in range(iterations + 1):
            began = time.perf_counter()
            ranks = wait_all(
                [groups["env"].run(iteration), groups["rollout"].generate(iteration)],
                timeout_s=LIMIT_S,
            )
            seconds = time.perf_counter() - began
            channels[TRAJECTORIES].get(key="0")
            found.append(
                reduce_metrics([metrics for group in ranks for metrics in group])
                | {"seconds": seconds}
            )
    return found[1:]


def main(repetitions: str = "3", launcher: str = "ray") -> None:
    print(
        f"{ROWS} rows, {STEPS} steps, {launcher}; seconds of the rollout stage, the best of {repetitions}\n"
    )
    print(
        "  sim ms  policy ms  groups   stage    sim  policy  efficiency    sum   env waited  rollout waited"
    )
    for sim_ms, policy_ms in CASES:
        for groups in GROUPS:
            runs = measure(
                make_job(launcher, groups, sim_ms, policy_ms), int(repetitions)
            )
            run = min(runs, key=lambda run: run["seconds"])
            works = (run["env/sim_s"], run["rollout/policy_s"])
            print(
                f"{sim_ms:8.0f}{policy_ms:11.0f}{groups:8}{run['seconds']:8.3f}{run['env/sim_s']:7.3f}"
                f"{run['rollout/policy_s']:8.3f}{max(works) / run['seconds']:12.2f}{sum(works) / run['seconds']:7.2f}"
                f"{run['env/wait_s']:13.3f}{run['rollout/wait_s']:16.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
else:
    gymnasium.register("Slow-v0", entry_point=lambda **settings: Slow(**settings))
