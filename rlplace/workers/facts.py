"""What the engine tells every worker of a job, besides the user's config: numbers of ranks and weight syncs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rlplace.codes import problem
from rlplace.errors import PlacementError, did_you_mean
from rlplace.placement.channels import ChannelPlan, participants_for, plan_weights
from rlplace.placement.flow import Delivery, DeviceDelivery, deliver, deliver_by_node

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement

_TIMEOUT_S = 120.0  # deadline of a channel without one of its own


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """Plan of a weight sync, which sends all weights of component `source` to every rank of component `target`.

    `deliveries`: the planned copies of the weights, with the target ranks that read each copy. `channel`: channel that
    announces the copies. `timeout_s`: deadline of a push and of a pull.
    """

    source: str
    target: str
    deliveries: tuple[Delivery, ...]  # one for each copy of the weights
    channel: ChannelPlan  # announces the copies, and carries what cannot be written into them
    timeout_s: float = _TIMEOUT_S  # deadline of a push, and of a pull

    @property
    def on_devices(self) -> bool:
        """Whether some target ranks get the weights from accelerator to accelerator."""
        return any(isinstance(each, DeviceDelivery) for each in self.deliveries)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Numbers of ranks and planned weight syncs of a job. All workers of the job get the same facts.

    `ranks`: component -> number of ranks.
    """

    ranks: Mapping[str, int]  # number of ranks of each component
    syncs: tuple[WeightSync, ...] = ()

    def syncs_from(self, source: str) -> tuple[WeightSync, ...]:
        return tuple(sync for sync in self.syncs if sync.source == source)

    def syncs_to(self, target: str) -> tuple[WeightSync, ...]:
        return tuple(sync for sync in self.syncs if sync.target == target)

    def sends_on_devices(self, component: str) -> bool:
        """Return whether weights of `component` go from accelerator to accelerator, in some sync."""
        return any(sync.on_devices for sync in self.syncs_from(component))

    def syncs_of(self, component: str) -> tuple[WeightSync, ...]:
        """Return the weight syncs in which `component` sends, followed by those in which it receives."""
        return (*self.syncs_from(component), *self.syncs_to(component))

    def participants_of(self, channel: ChannelPlan) -> int:
        return participants_for(self.ranks[channel.source] + self.ranks[channel.target])


def facts_of(
    placement: HybridComponentPlacement,
    *,
    weights: Iterable[tuple[str, str]] = (),
    on_devices: Collection[str] = (),
    timeout_s: float = _TIMEOUT_S,
) -> JobFacts:
    """Return the facts of a job: the number of ranks of each component, and the planned weight syncs.

    `weights`: pairs (source, target) of component names for which a weight sync is planned, such as `[("learner",
    "sampler")]`. `on_devices`: components out of the sources whose weights go from GPU to GPU where the placement
    allows it; those of all others go through the host. `timeout_s`: deadline of a push and of a pull, in seconds.

    Create all groups of the job with the same facts, `Learner.create_group(config, facts)`, and launch each group where
    `placement` puts it. Raise PlacementError if a pair names a component that is not placed, or the same component
    twice.
    """
    pairs = list(dict.fromkeys(weights))
    for pair in pairs:
        _check_pair(placement, *pair)
    return JobFacts(
        ranks={name: placement.world_size(name) for name in placement.components},
        syncs=tuple(
            WeightSync(
                source=source,
                target=target,
                deliveries=_deliveries(placement, source, target, on_devices),
                channel=plan_weights(
                    placement, weights_channel(source, target), source, target
                ),
                timeout_s=timeout_s,
            )
            for source, target in pairs
        ),
    )


def _deliveries(
    placement: HybridComponentPlacement,
    source: str,
    target: str,
    on_devices: Collection[str],
) -> tuple[Delivery, ...]:
    if source in on_devices:
        return deliver(placement, source, target)
    return deliver_by_node(placement, source, target)


def weights_channel(source: str, target: str) -> str:
    """Return the name of the channel for the weight sync from `source` to `target`, two components of custom
    workers.
    """
    return f"weights.{source}.{target}"


def _check_pair(placement: HybridComponentPlacement, source: str, target: str) -> None:
    placed = placement.components
    key = "weights"
    unknown = [component for component in (source, target) if component not in placed]
    if unknown:
        name = unknown[0]
        near = did_you_mean(name, placed)
        error = "weights"
        pair = (source, target)
        if near:
            error = "weights-misspelt"
            right = {name: near}
            pair = (right.get(source, source), right.get(target, target))
        wrong = problem(
            "unknown-component",
            key,
            repr((source, target)),
            error=error,
            name=name,
            near=near,
            placed=", ".join(placed),
            pair=pair,
        )
        raise PlacementError([wrong])
    if source == target:
        got = repr((source, target))
        raise PlacementError([problem("weights-to-itself", key, got, name=source)])
