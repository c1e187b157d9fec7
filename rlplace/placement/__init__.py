"""Placement is arithmetic: config x machines -> one immutable plan. Standard library only, no I/O.

A name is imported when it is first asked for: a worker needs few of the modules that make a plan.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.placement.channels import ChannelLocation, ChannelPlan
    from rlplace.placement.checks import BatchSizes
    from rlplace.placement.dedicated import Savings
    from rlplace.placement.flow import Route, Routes, Share, Transport, derive_routes
    from rlplace.placement.language.groups import NodeGroups, RuntimeEnv, read_node_groups
    from rlplace.placement.language.hybrid import HybridComponentPlacement
    from rlplace.placement.language.slots import (
        ComponentPlacementStrategy,
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
        PlacementStrategy,
        Slot,
    )
    from rlplace.placement.machines.nodes import declare_topology
    from rlplace.placement.machines.pools import HardwareItem
    from rlplace.placement.machines.topology import Links, Node, Topology
    from rlplace.placement.plan import Plan, make_plan, plan_components
    from rlplace.placement.schedule import (
        PPO_NEEDS,
        Move,
        Needs,
        Residency,
        Schedule,
        Transition,
        derive_schedule,
        rlhf_needs,
    )
    from rlplace.placement.show.json import render_json
    from rlplace.placement.show.svg import render_svg
    from rlplace.placement.show.text import render_text

__all__ = [
    "PPO_NEEDS",
    "BatchSizes",
    "ChannelLocation",
    "ChannelPlan",
    "ComponentPlacementStrategy",
    "FlexiblePlacementStrategy",
    "HardwareItem",
    "HybridComponentPlacement",
    "Links",
    "Move",
    "Needs",
    "Node",
    "NodeGroups",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "PlacementStrategy",
    "Plan",
    "Residency",
    "Route",
    "Routes",
    "RuntimeEnv",
    "Savings",
    "Schedule",
    "Share",
    "Slot",
    "Topology",
    "Transition",
    "Transport",
    "declare_topology",
    "derive_routes",
    "derive_schedule",
    "make_plan",
    "plan_components",
    "read_node_groups",
    "render_json",
    "render_svg",
    "render_text",
    "rlhf_needs",
]

# The same names again, by module: a test compares.
_NAMES_OF = {
    "channels": "ChannelLocation ChannelPlan",
    "checks": "BatchSizes",
    "dedicated": "Savings",
    "flow": "Route Routes Share Transport derive_routes",
    "machines.nodes": "declare_topology",
    "language.groups": "NodeGroups RuntimeEnv read_node_groups",
    "language.hybrid": "HybridComponentPlacement",
    "show.svg": "render_svg",
    "plan": "Plan make_plan plan_components",
    "machines.pools": "HardwareItem",
    "show.json": "render_json",
    "show.text": "render_text",
    "schedule": "PPO_NEEDS Move Needs Residency Schedule Transition derive_schedule rlhf_needs",
    "language.slots": "Slot ComponentPlacementStrategy FlexiblePlacementStrategy NodePlacementStrategy "
    "PackedPlacementStrategy PlacementStrategy",
    "machines.topology": "Links Node Topology",
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found
