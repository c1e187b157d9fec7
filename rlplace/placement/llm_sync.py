"""How a language model's weights go from its actor to the engines, and what that takes of memory.

::

    mode all           past the host where accelerators allow it, else over a board of each node
    trainable, lora    over boards: engines' ranks keep the first version there, and later ones are small
    delta              over boards, to which other nodes send what changed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from rlplace.config import ActorConfig, Config
from rlplace.placement.flow import Delivery, deliver, deliver_by_node
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.layout import Layout
from rlplace.placement.memory.demands import DeviceSync, EngineModel, TrainedModel
from rlplace.placement.memory.footprint import Demand
from rlplace.placement.memory.formulas import DTYPE_BYTES
from rlplace.placement.memory.model import ModelShape


def plan_deliveries(config: Config, placement: HybridComponentPlacement) -> tuple[Delivery, ...]:
    """While engines generate ahead of the actor, only a board holds a version until they come for it."""
    sync = config.actor.sync
    past_host = sync.mode == "all" and not sync.through_host and config.algorithm.max_staleness == 0
    return deliver(placement) if past_host else deliver_by_node(placement)


def with_sync(demands: Mapping[str, Demand], config: Config, layout: Layout) -> dict[str, Demand]:
    """With what a sync holds of actor and engines."""
    sync, deliveries, actors = config.actor.sync, layout.deliveries, layout.placement.world_size("actor")
    found = dict(demands)
    match found.get("actor"):
        case TrainedModel() as actor:
            found["actor"] = dataclasses.replace(
                actor,
                sync=DeviceSync.giving(deliveries),
                merged=actor.lora_rank is not None and sync.mode != "lora",
                probed=sync.verify == "logprobs" and sync.verify_every > 0,
                sent=_most_far(deliveries, actors) if sync.mode == "delta" else 0,
            )
    match found.get("rollout"):
        case EngineModel() as engine:
            found["rollout"] = dataclasses.replace(engine, sync=DeviceSync.taking(deliveries))
    return found


def _most_far(deliveries: Collection[Delivery], actors: int) -> int:
    """Copies that an actor rank cannot write itself: of the rank with the most."""
    return max(sum(rank not in delivery.near for delivery in deliveries) for rank in range(actors))


def version_bytes(model: ModelShape, actor: ActorConfig) -> int:
    """Of one buffer of each board of a node: all weights as they travel, and what later versions bring instead."""
    later = 0
    if actor.lora_rank is not None and actor.sync.mode == "lora":
        later = sum(elements * copies for elements, copies in model.lora_parts(actor.lora_rank))
    elif actor.lora_rank is not None and actor.sync.mode == "trainable":
        later = sum(w.elements * copies for w, copies in model.weights() if w.projection)
    return (model.parameters + later) * DTYPE_BYTES[actor.compute]
