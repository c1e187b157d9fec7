"""What a job on simulators takes of accelerators and hosts: the demand of each component, and its channels."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from rlplace.config.blocks.simulator import (
    SimulatorEnvConfig,
    SimulatorJobConfig,
    TorchRolloutConfig,
)
from rlplace.config.blocks.training import AlgorithmConfig, TrainedConfig
from rlplace.placement.flow import Route
from rlplace.placement.memory.case import Replan, case_of, shares_memory
from rlplace.placement.memory.demands import Demand, DeviceSync, SimulatorDemand
from rlplace.placement.memory.ledger import Measurements, MemoryCase, SharedMemory
from rlplace.placement.memory.policies import (
    PolicyShape,
    PolicySpaces,
    action_bytes,
    observation_bytes,
    policy_shape,
)
from rlplace.placement.memory.policy_demands import (
    PolicyRolloutDemand,
    PolicyTrainingDemand,
)
from rlplace.placement.memory.shared_memory import ITEM_BYTES, count_shared
from rlplace.placement.plan import Plan

_FLOAT32 = 4
_NO_SPACES = "the simulator's shapes are not known: the policy's weights are not counted, nor large items"


def simulator_case(
    plan: Plan,
    config: SimulatorJobConfig,
    replan: Replan[SimulatorJobConfig],
    spaces: PolicySpaces | None = None,
    measured: Measurements | None = None,
) -> MemoryCase:
    """Return the memory case of a job on simulators. Its method `ledger()` computes the bytes that a run holds.

    `replan`: function that plans the job with another config; it is used to try remedies. `spaces`: shapes of the
    simulator's observations and actions; None: the weights of the policy are not counted, and the ledger has a note.
    `measured`: bytes that an earlier run measured; None: there was no earlier run.
    """
    policy = PolicyShape(weights=(), buffer_bytes=0)
    notes = [_NO_SPACES]
    if spaces is not None:
        normalize = config.algorithm.normalize_observations
        policy = policy_shape(
            config.actor.policy, spaces, normalize_observations=normalize
        )
        notes = []
    demands = {
        component: _simulator_demand(config, component, plan, policy)
        for component in plan.placement.components
    }
    shared: SharedMemory = {}
    if shares_memory(plan, config):
        items = {}
        if spaces is not None:
            items = simulator_items(plan, spaces, config.algorithm.rollout_steps)
        shared = count_shared(plan, items, policy.weights_bytes)
    return case_of(plan, config, demands, notes, shared, {}, replan, measured)


def _simulator_demand(
    config: SimulatorJobConfig, component: str, plan: Plan, policy: PolicyShape
) -> Demand:
    """Return the memory demand of one component of a job on simulators.

    `policy`: the sizes of the policy; without weights if they are not known.
    """
    match config.block_of(component):
        case SimulatorEnvConfig() as env:
            return SimulatorDemand(accelerator_bytes=env.accelerator_memory)
        case TorchRolloutConfig() as rollout:
            sync = DeviceSync.receiving(plan.deliveries)
            rows = _answered(plan, rollout) if policy.weights else 0
            return PolicyRolloutDemand(
                policy=policy,
                workspace_bytes=rollout.workspace_memory,
                sync=sync,
                rows=rows,
                evaluates=config.runner.eval_every > 0,
                played_bytes=config.evaluation_memory(plan.placement.world_size("env")),
            )
        case TrainedConfig() as trained:
            samples = minibatch = 0
            if policy.weights:
                samples, minibatch = _learned(plan, config.algorithm)
            return PolicyTrainingDemand(
                policy=policy,
                sync=DeviceSync.sending(plan.deliveries),
                compute=trained.compute,
                samples=samples,
                minibatch=minibatch,
                copied=True,
            )


def _answered(plan: Plan, rollout: TorchRolloutConfig) -> int:
    """Return for how many rows (environments), at most, a rollout rank computes actions in one call.

    The number is the rows of one env rank. With `merge_requests`, it is all rows whose observations can have arrived.
    """
    route = plan.row_routes.observations
    if not rollout.merge_requests:
        return route.most_rows
    return max(_rows(route).values()) * rollout.pipeline_stage_num


def _learned(plan: Plan, algorithm: AlgorithmConfig) -> tuple[int, int]:
    """Return (samples per iteration, samples of one minibatch) of the actor rank that has the most samples.

    Minibatches are drawn at random over all ranks, so the second number is an upper bound: the mean plus four standard
    deviations.
    """
    route = plan.row_routes.trajectories
    share = max(_rows(route).values()) / route.rows
    most = algorithm.rollout_steps * max(_rows(route).values())
    size = route.rows * algorithm.rollout_steps
    drawn = -(-size // algorithm.num_minibatches)
    spread = 4 * math.sqrt(drawn * share * (1 - share))
    return most, min(most, drawn, math.ceil(drawn * share + spread))


def _rows(route: Route) -> Counter[int]:
    """Return rank -> number of rows that it receives, for the target ranks of a route."""
    found: Counter[int] = Counter()
    for target, (start, stop) in zip(
        route.targets, itertools.pairwise(route.edges), strict=True
    ):
        found[target] += stop - start
    return found


def simulator_items(
    plan: Plan, spaces: PolicySpaces, rollout_steps: int
) -> dict[str, int]:
    """Return channel -> bytes of its largest item, in a job on simulators.

    Every episode is assumed to end once per iteration. Weights pass through no channel: actor ranks write into the copy
    on their own node, and stream their part to the rank that writes the copy on another node.
    """
    routes = plan.row_routes
    observation = observation_bytes(spaces)
    # An action with its log-probability and value.
    decision = action_bytes(spaces.actions) + 2 * _FLOAT32
    # A step also has its reward and two end flags (terminated, truncated).
    step = observation + decision + _FLOAT32 + 2
    observed = routes.observations.most_rows
    gathered = routes.trajectories.most_rows
    return {
        "observations": observed * observation + ITEM_BYTES,
        "actions": observed * (decision + _FLOAT32 * spaces.memory) + ITEM_BYTES,
        "trajectories": gathered * (rollout_steps * step + 2 * observation)
        + ITEM_BYTES,
    }
