"""What a run of today's job will hold: the demands of its config, for the placement of its plan."""

from __future__ import annotations

from collections.abc import Mapping

from rlplace.config import Config
from rlplace.placement.memory.demands import (
    DeviceSync,
    PolicyLearner,
    PolicySampler,
    PolicyShape,
    PolicySpaces,
    Simulator,
    policy_shape,
)
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.ledger import Measurements, MemoryCase, MemoryLedger
from rlplace.placement.memory.shared import SharedMemory, count_shared, ppo_item_bytes
from rlplace.placement.plan import Plan

_UNKNOWN = PolicyShape(weights=(), buffer_numbers=0)
_NOT_COUNTED = "the simulator's shapes are not known: the policy's weights are not counted, nor large items"


def memory_case(
    plan: Plan, config: Config, spaces: PolicySpaces | None, measured: Measurements | None = None
) -> MemoryCase:
    """The question `predict` answers; keep it to ask for remedies or to solve for a size.

    Without `spaces`, the simulator's shapes, the policy's weights cannot be counted; the ledger says so.
    """
    policy, item_bytes = _UNKNOWN, {}
    if spaces is not None:
        normalize = config.algorithm.normalize_observations
        policy = policy_shape(config.actor.mlp, spaces, normalize_observations=normalize)
        item_bytes = ppo_item_bytes(plan, spaces, config.algorithm.rollout_steps, policy.weights_bytes)
    demands: Mapping[str, Demand] = {
        "actor": PolicyLearner(policy=policy, sync=DeviceSync.giving(plan.deliveries)),
        "rollout": PolicySampler(
            policy=policy,
            workspace_bytes=config.torch_rollout.workspace_memory,
            sync=DeviceSync.taking(plan.deliveries),
        ),
        "env": Simulator(accelerator_bytes=config.simulator_env.accelerator_memory),
    }
    shared = SharedMemory()
    if config.cluster.launcher != "inline":  # threads of one process need none
        shared = count_shared(plan, item_bytes, policy.weights_bytes)
    return MemoryCase(
        placement=plan.placement,
        needs=plan.needs,
        offload={c: bool(getattr(config, c).enable_offload) for c in plan.placement.components},
        demands=demands,
        measured=measured or {},
        notes=() if spaces is not None else (_NOT_COUNTED,),
        shared=shared,
    )


def predict(
    plan: Plan, config: Config, spaces: PolicySpaces | None, measured: Measurements | None = None
) -> MemoryLedger:
    """The ledger of a run. `spaces` are the simulator's, `measured` comes from `read_measurements`."""
    return memory_case(plan, config, spaces, measured).ledger()
