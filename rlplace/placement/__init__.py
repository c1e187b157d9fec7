"""Placement is arithmetic: config x machines -> one immutable plan. Standard library only, no I/O.

The names of the Python API are imported on first use: workers import modules of this package and need no plan.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.placement.language.hybrid import HybridComponentPlacement
    from rlplace.placement.language.slots import (
        ComponentPlacementStrategy,
        FlexiblePlacementStrategy,
        NodePlacementStrategy,
        PackedPlacementStrategy,
    )
    from rlplace.placement.machines.topology import Topology
    from rlplace.placement.plan import Plan, plan_components

__all__ = [
    "ComponentPlacementStrategy",
    "FlexiblePlacementStrategy",
    "HybridComponentPlacement",
    "NodePlacementStrategy",
    "PackedPlacementStrategy",
    "Plan",
    "Topology",
    "plan_components",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        # Small ones first
        for module in (
            "machines.topology",
            "language.slots",
            "language.hybrid",
            "plan",
        ):
            found: object = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
