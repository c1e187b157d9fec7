"""The rollout stage without a launcher: env and rollout workers of a real plan in threads, over local channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.config.read import read_config
from rlplace.contract.planning import make_plan
from rlplace.envs.registry import describe
from rlplace.metrics import Metrics
from rlplace.models.policy_networks import build_policy
from rlplace.placement.machines.topology import Topology
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory
from rlplace.workers.arguments import TRAJECTORIES, SimulatorArguments
from rlplace.workers.launch.devices import Device
from rlplace.workers.lending import Lending
from rlplace.workers.roles.env import VectorEnvWorker
from rlplace.workers.roles.rollout import VectorRolloutWorker
from rlplace.workers.worker import Rendezvous, WorkerContext

GYMS = "tests.gyms"  # where the simulators made for tests are registered


class Ledger(Device):
    """Writes down what is held; `limit` bytes fit."""

    def __init__(self, limit: int | None = None) -> None:
        self.held: dict[str, int] = {}
        self.limit = limit

    def acquire(self, size_bytes: int, what: str) -> None:
        others = sum(size for label, size in self.held.items() if label != what)
        if self.limit is not None and others + size_bytes > self.limit:
            raise MemoryError(f"{what} does not fit")
        self.held[what] = size_bytes

    def release(self, what: str) -> None:
        self.held.pop(what, None)

    def held_bytes(self) -> int:
        return sum(self.held.values())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks, and how the environments are cut into stage groups."""

    env: int = 1
    rollout: int = 1
    actor: int = 1
    stage_groups: int = 1
    shared: bool = (
        False  # each env rank in one process with the rollout rank of its number
    )

    def __str__(self) -> str:
        together = "-shared" if self.shared else ""
        return f"{self.env}env-{self.rollout}rollout-{self.actor}actor-{self.stage_groups}groups{together}"


def plan_of(
    layout: Layout,
    env: Mapping[str, object],
    steps: int,
    seed: int = 0,
    on_poison: str = "stop",
) -> tuple[Plan, SimulatorArguments]:
    """The plan and job of a config whose components sit on accelerators of their own."""
    ranks = {"env": layout.env, "rollout": layout.rollout, "actor": layout.actor}
    placement: dict[str, object] = {}
    first = 0
    for component, count in ranks.items():
        placement[component] = f"{first}-{first + count - 1}"
        first += count
    if layout.shared:
        placement["env"] = {"accelerators": placement["env"], "process": "shared"}
        placement["rollout"] = {"same_as": "env", "process": "shared"}
    config = read_config(
        {
            "cluster": {
                "component_placement": placement,
                "allow_resident": ["env", "rollout"] if layout.shared else [],
            },
            "env": {"total_num_envs": 12, **env},
            "rollout": {"pipeline_stage_num": layout.stage_groups},
            "algorithm": {"rollout_steps": steps},
            "runner": {"seed": seed},
            "faults": {"on_poison": on_poison},
        }
    )
    plan = make_plan(config, Topology.uniform(1, first))
    spaces, routes = describe(config.env), plan.row_routes
    return plan, SimulatorArguments(
        config=config,
        ranks=ranks,
        deliveries=plan.deliveries,
        spaces=spaces,
        routes=routes,
    )


def channels_of(
    plan: Plan, capacity_items: int | None = None
) -> dict[str, LocalChannel]:
    """The channels of the plan, with its capacities or with another for all."""
    specs = (
        ChannelSpec(
            name=c.name,
            capacity_items=capacity_items or c.capacity_items,
            keys=c.keys,
            timeout_s=20,
        )
        for c in plan.channels
    )
    return {spec.name: LocalChannel(spec) for spec in specs}


def context_of(
    plan: Plan,
    component: str,
    rank: int,
    channels: Mapping[str, LocalChannel],
    lending: Lending | None = None,
) -> WorkerContext:
    owner = f"{component} rank {rank}"
    return WorkerContext(
        slot=plan.placement.slots(component)[rank],
        world_size=plan.placement.world_size(component),
        device=Ledger(),
        rendezvous=Rendezvous(host="", port=0),
        channels={name: channel.named(owner) for name, channel in channels.items()},
        lending=lending or Lending(),
    )


class RolloutStage:
    """All env and rollout workers of a job, set up, FULL, with the weights of `weights_seed` loaded as version 0."""

    def __init__(
        self,
        layout: Layout,
        env: Mapping[str, object],
        *,
        steps: int,
        weights_seed: int = 1,
    ) -> None:
        self.plan, self.job = plan_of(layout, env, steps)
        self.channels, self._lending = channels_of(self.plan), Lending()
        self.env = [
            VectorEnvWorker(self.job, self._context("env", r))
            for r in range(layout.env)
        ]
        self.rollout = [
            VectorRolloutWorker(self.job, self._context("rollout", r))
            for r in range(layout.rollout)
        ]
        for worker in (*self.env, *self.rollout):
            worker.setup()
            worker.move(Residency.FULL)
        self.load(weights_seed, version=0)

    def _context(self, component: str, rank: int) -> WorkerContext:
        return context_of(self.plan, component, rank, self.channels, self._lending)

    def load(self, seed: int, version: int) -> None:
        config = self.job.config
        weights = build_policy(
            self.job.spaces, config.actor, config.algorithm, seed
        ).state_dict()
        for worker in self.rollout:
            worker.engine.load(weights, version)

    def run(self, iteration: int) -> list[Metrics]:
        """One iteration of all workers at once; the first failure is raised after all have ended."""
        calls: list[Callable[[int], Metrics]] = [
            *(w.run for w in self.env),
            *(w.generate for w in self.rollout),
        ]
        with ThreadPoolExecutor(len(calls)) as threads:
            pending = [threads.submit(call, iteration) for call in calls]
        return [p.result() for p in pending]

    def trajectories(self) -> dict[int, list[Trajectory]]:
        """What each actor rank was sent since last asked."""
        channel, routes = self.channels[TRAJECTORIES], self.job.routes.trajectories
        ranks = {share.target for share in routes.shares}
        return {
            rank: [channel.get(key=str(rank)) for _ in routes.receives(rank)]
            for rank in sorted(ranks)
        }

    def close(self) -> None:
        for worker in (*self.env, *self.rollout):
            worker.close()


def env_block(gym: str, **kwargs: Any) -> dict[str, object]:
    return {"id": f"{GYMS}:{gym}", "kwargs": kwargs}
