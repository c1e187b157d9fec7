"""Why two ranks are as far apart as they are, and what carries items and the tensors of accelerators between them."""

from __future__ import annotations

import dataclasses

from rlplace.placement.journeys import AnyPlan, journeys
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.ranges import show_range
from rlplace.placement.machines.topology import Topology
from rlplace.placement.routes import Way
from rlplace.placement.weight_routes import DeviceDelivery


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """What one way stands for."""

    because: str
    items: str  # what carries the items of channels
    tensors: str  # what carries tensors that lie on accelerators


_CARRIERS = {
    Way.SAME_PROCESS: Carrier(because="in one process", items="reference", tensors="reference"),
    Way.SAME_ACCELERATOR: Carrier(
        because="on one accelerator, in two processes", items="shared memory", tensors="CUDA IPC"
    ),
    Way.SAME_NODE: Carrier(because="on one node", items="shared memory", tensors="NCCL"),
    Way.NETWORK: Carrier(because="on different nodes", items="tcp, encrypted", tensors="NCCL"),
}


def carrier(way: Way, plan: AnyPlan) -> Carrier:
    """Tensors that the plan leads through the host, as all of emulated accelerators, travel as items do."""
    found = _CARRIERS[way]
    through_host = plan.deliveries and not any(isinstance(d, DeviceDelivery) for d in plan.deliveries)
    return dataclasses.replace(found, tensors=found.items) if through_host or emulated(plan.topology) else found


def emulated(topology: Topology) -> bool:
    return all(node.kind == "emulated" for node in topology.nodes)


def ways_of(plan: AnyPlan) -> dict[Way, Carrier]:
    """The ways that the routes of a plan take, nearest first."""
    taken = {way for journey in journeys(plan) for way in journey.ways}
    found = {way: carrier(way, plan) for way in Way if way in taken}
    if Way.SAME_PROCESS in found:
        sharers = "; ".join(_sharers(plan.placement))
        found[Way.SAME_PROCESS] = dataclasses.replace(found[Way.SAME_PROCESS], because=sharers)
    return found


def _sharers(placement: HybridComponentPlacement) -> list[str]:
    """`env 0-3 and rollout 0-3 have process: shared`."""
    groups: dict[str, list[str]] = {}
    for component in placement.components:
        if process := placement.spec(component).process:
            ranks = show_range(range(placement.world_size(component)))
            groups.setdefault(process, []).append(f"{component} {ranks}")
    return [" and ".join(names) + " have process: shared" for names in groups.values()]
