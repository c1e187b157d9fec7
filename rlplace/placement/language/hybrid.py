"""Specs x topology -> slots, and the relations between components: collocated, disaggregated or hybrid."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from rlplace.config.schema import ClusterConfig, Config
from rlplace.errors import PlacementError, Problem, Source, did_you_mean
from rlplace.placement.language.block import read_block
from rlplace.placement.language.groups import NodeGroups, read_node_groups
from rlplace.placement.language.slots import (
    ComponentPlacementStrategy,
    HasTopology,
    Slot,
)
from rlplace.placement.language.spec import ComponentSpec, RankLocations
from rlplace.placement.machines.topology import Ranges, Topology

COLLOCATED = "collocated"  # the same accelerators
DISAGGREGATED = "disaggregated"  # none shared
HYBRID = "hybrid"  # some shared


class HybridComponentPlacement:
    """All slots of a job. Never changes; slots are worked out when first asked for.

    `cfg` is a Config, its cluster block, or either as a plain mapping. `components` are the algorithm's; with them,
    a name that is missing, or that the algorithm does not have, is a problem too. Raises PlacementError with all
    problems at once.
    """

    def __init__(
        self,
        cfg: Config | ClusterConfig | Mapping[str, object],
        cluster: HasTopology,
        *,
        components: Sequence[str] | None = None,
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        specs, groups, problems = read_component_placement(
            cfg, cluster.topology, components, sources or {}
        )
        if problems:
            raise PlacementError(problems)
        self._become(specs, groups)

    @classmethod
    def of(
        cls, specs: Mapping[str, ComponentSpec], groups: NodeGroups
    ) -> HybridComponentPlacement:
        """Make a placement of specs that are known to fit."""
        placement = cls.__new__(cls)
        placement._become(specs, groups)
        return placement

    def _become(self, specs: Mapping[str, ComponentSpec], groups: NodeGroups) -> None:
        self.topology = groups.topology
        self.node_groups = groups
        self._specs = dict(specs)
        self._slots: dict[str, Sequence[Slot]] = {}

    @property
    def components(self) -> tuple[str, ...]:
        """In the order they are written."""
        return tuple(self._specs)

    def spec(self, component: str) -> ComponentSpec:
        try:
            return self._specs[component]
        except KeyError:
            near = did_you_mean(component, self._specs)
            hint = (
                f", did you mean {near!r}?"
                if near
                else f"; placed are {', '.join(self._specs)}"
            )
            raise KeyError(f"no component {component!r} is placed{hint}") from None

    def get_strategy(self, component: str) -> ComponentPlacementStrategy:
        return ComponentPlacementStrategy(self.spec(component), self.node_groups)

    def world_size(self, component: str) -> int:
        return self.spec(component).world_size

    def slots(self, component: str) -> Sequence[Slot]:
        """Return the slots of a component by rank. They are computed on first use."""
        if component not in self._slots:
            self._slots[component] = self.get_strategy(component).get_placement(
                self.topology
            )
        return self._slots[component]

    def locations(self, component: str) -> RankLocations:
        """Return node and accelerators of every rank as arrays, for loops over all ranks."""
        return self.spec(component).locations

    def accelerators(self, component: str) -> Ranges:
        return self.spec(component).accelerators

    @property
    def used(self) -> Ranges:
        """The accelerators that any component uses."""
        return Ranges.of(
            piece for spec in self._specs.values() for piece in spec.accelerators.pieces
        )

    def canonical(self) -> dict[str, object]:
        """Write a `component_placement` in plain numbers that reads as this placement."""
        return {name: spec.canonical() for name, spec in self._specs.items()}

    def shared(self, a: str, b: str) -> Ranges:
        """Return the accelerators that both components use."""
        return self.accelerators(a) & self.accelerators(b)

    def sharers(self, component: str) -> list[str]:
        """Return the other components that use any of its accelerators."""
        return [
            c for c in self.components if c != component and self.shared(c, component)
        ]

    def relation(self, a: str, b: str) -> str:
        """Return collocated, disaggregated or hybrid."""
        shared = self.shared(a, b)
        if not shared:
            return DISAGGREGATED
        if self.accelerators(a) == self.accelerators(b):
            return COLLOCATED
        return HYBRID

    @property
    def mode(self) -> str:
        """The relation of all pairs that have accelerators, else hybrid. A single component is disaggregated."""
        placed = [c for c in self.components if self.accelerators(c)]
        words = {self.relation(a, b) for a, b in itertools.combinations(placed, 2)} or {
            DISAGGREGATED
        }
        if len(words) == 1:
            return words.pop()
        return HYBRID


def read_component_placement(
    cfg: Config | ClusterConfig | Mapping[str, object],
    topology: Topology,
    components: Sequence[str] | None,
    sources: Mapping[str, Source],
    optional: Sequence[str] = (),
) -> tuple[dict[str, ComponentSpec], NodeGroups, list[Problem]]:
    """Return the components of a config that are placed rightly, the node groups, and the problems of the rest.

    `optional`: roles that the job may have beside its `components`; a name may be meant for one.
    """
    cluster = cfg.cluster if isinstance(cfg, Config) else cfg
    if not isinstance(cluster, ClusterConfig):
        inner = cluster.get("cluster", cluster)
        mapping = (
            inner if isinstance(inner, Mapping) else {"component_placement": inner}
        )
        block = mapping.get("component_placement")
        groups = mapping.get("node_groups") or ()
    else:
        block = cluster.component_placement
        groups = cluster.node_groups
    node_groups, problems = read_node_groups(groups, topology, sources)
    specs, more = read_block(block, node_groups, components, sources, optional)
    return specs, node_groups, [*problems, *more]
