"""Placement is arithmetic: config x machines -> one immutable plan. Standard library only, no I/O."""

from rlplace.placement.batches import BatchSizes
from rlplace.placement.declare import declare_topology
from rlplace.placement.discover import topology_of_ray
from rlplace.placement.groups import NodeGroups, read_node_groups
from rlplace.placement.hybrid import HybridComponentPlacement
from rlplace.placement.layout import Layout, make_layout
from rlplace.placement.needs import rlhf_needs
from rlplace.placement.picture import render_svg
from rlplace.placement.plan import ChannelPlan, Plan, make_plan
from rlplace.placement.pools import HardwareItem
from rlplace.placement.record import render_json
from rlplace.placement.render import render_text
from rlplace.placement.routes import Route, Routes, Share, Way, derive_routes
from rlplace.placement.schedule import PPO_NEEDS, Move, Needs, Residency, Schedule, Transition, derive_schedule
from rlplace.placement.sharing import Savings
from rlplace.placement.slots import Slot, Surroundings
from rlplace.placement.strategies import (
    ComponentPlacementStrategy,
    FlexiblePlacementStrategy,
    NodePlacementStrategy,
    PackedPlacementStrategy,
    PlacementStrategy,
)
from rlplace.placement.topology import Links, Node, Topology

__all__ = [
    "PPO_NEEDS",
    "BatchSizes",
    "ChannelPlan",
    "ComponentPlacementStrategy",
    "FlexiblePlacementStrategy",
    "HardwareItem",
    "HybridComponentPlacement",
    "Layout",
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
    "Savings",
    "Schedule",
    "Share",
    "Slot",
    "Surroundings",
    "Topology",
    "Transition",
    "Way",
    "declare_topology",
    "derive_routes",
    "derive_schedule",
    "make_layout",
    "make_plan",
    "read_node_groups",
    "render_json",
    "render_svg",
    "render_text",
    "rlhf_needs",
    "topology_of_ray",
]
