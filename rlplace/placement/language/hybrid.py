"""Specs x topology -> slots, and the relations between components: collocated, disaggregated or hybrid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from rlplace.config.blocks.machines import ClusterConfig
from rlplace.config.schema import Config
from rlplace.errors import PlacementError, Problem, Source, did_you_mean
from rlplace.placement.language.block import read_block
from rlplace.placement.language.group_blocks import read_node_groups
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.lend import Residents, lend_accelerators
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
    """The place (slot) of every rank of a job: its node and accelerators. Immutable; slots are computed on first use.

    Arguments: `cfg`: a Config, its cluster block, or one of these as a plain mapping. `cluster`: the machines.
    `components`: the components of the algorithm; None: any name may be placed. `sources`: key path -> the place in the
    config where it was written. Raises PlacementError with all problems at once.
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
        """Return a placement from specs that have been checked already. `specs`: component -> spec."""
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
        """Names of the components, in the order of the config."""
        return tuple(self._specs)

    def spec(self, component: str) -> ComponentSpec:
        """Return the spec of a component. Raise KeyError if the component is not placed."""
        try:
            return self._specs[component]
        except KeyError:
            near = did_you_mean(component, self._specs)
            hint = f"; placed are {', '.join(self._specs)}"
            if near:
                hint = f", did you mean {near!r}?"
            raise KeyError(f"no component {component!r} is placed{hint}") from None

    def get_strategy(self, component: str) -> ComponentPlacementStrategy:
        """Return the strategy that gives the slots of a component. Raise KeyError if the component is not placed."""
        return ComponentPlacementStrategy(self.spec(component), self.node_groups)

    def world_size(self, component: str) -> int:
        return self.spec(component).world_size

    def get_world_size(self, component: str) -> int:
        """Return the number of ranks of a component. This is RLinf's name for `world_size`."""
        return self.world_size(component)

    def slots(self, component: str) -> Sequence[Slot]:
        """Return the slots of a component, by rank."""
        if component not in self._slots:
            strategy = self.get_strategy(component)
            self._slots[component] = strategy.get_placement(self.topology)
        return self._slots[component]

    def locations(self, component: str) -> RankLocations:
        """Return node and accelerators of every rank of a component as arrays, which loops over all ranks can use."""
        return self.spec(component).locations

    def accelerators(self, component: str) -> Ranges:
        return self.spec(component).accelerators

    @property
    def used(self) -> Ranges:
        """The accelerators that at least one component uses."""
        pieces: list[range] = []
        for spec in self._specs.values():
            pieces += spec.accelerators.pieces
        return Ranges.of(pieces)

    def canonical(self) -> dict[str, object]:
        """Return the placement as a `component_placement` block in plain numbers.

        Reading that block gives an equal placement.
        """
        return {name: spec.canonical() for name, spec in self._specs.items()}

    @functools.cached_property
    def residents(self) -> Residents:
        """The parts of components that have a residency of their own, such as ranks on lent accelerators."""
        return Residents(self._specs)

    def shared(self, a: str, b: str) -> Ranges:
        """Return the accelerators that both components use."""
        return self.accelerators(a) & self.accelerators(b)

    def sharers(self, component: str) -> list[str]:
        """Return the other components that use at least one accelerator of `component`."""
        others = [name for name in self.components if name != component]
        return [name for name in others if self.shared(name, component)]

    def relation(self, a: str, b: str) -> str:
        """Return the relation of two components: "collocated", "disaggregated" or "hybrid".

        They have the same accelerators, no common accelerators, or some common accelerators.
        """
        shared = self.shared(a, b)
        if not shared:
            return DISAGGREGATED
        if self.accelerators(a) == self.accelerators(b):
            return COLLOCATED
        return HYBRID

    @property
    def mode(self) -> str:
        """The relation that all pairs of components with accelerators have: "collocated", "disaggregated" or "hybrid".

        It is "hybrid" if the pairs have different relations, and "disaggregated" if fewer than two components have
        accelerators.
        """
        placed = [name for name in self.components if self.accelerators(name)]
        relations = {self.relation(a, b) for a, b in itertools.combinations(placed, 2)}
        if not relations:
            return DISAGGREGATED
        if len(relations) == 1:
            return relations.pop()
        return HYBRID


def read_component_placement(
    cfg: Config | ClusterConfig | Mapping[str, object],
    topology: Topology,
    components: Sequence[str] | None,
    sources: Mapping[str, Source],
    optional: Sequence[str] = (),
) -> tuple[dict[str, ComponentSpec], NodeGroups, list[Problem]]:
    """Return component -> spec for the components that are placed correctly, the node groups, and all problems.

    `cfg`: a Config, its cluster block, or one of these as a plain mapping. `components`: the components of the
    algorithm; None: any name may be placed. `sources`: key path -> the place in the config where it was written.
    `optional`: further roles that may be placed.
    """
    cluster: ClusterConfig | Mapping[str, object]
    lend: object
    cluster = cfg.cluster if isinstance(cfg, Config) else cfg
    if isinstance(cluster, ClusterConfig):
        block: object = cluster.component_placement
        groups: object = cluster.node_groups
        lend = cluster.lend
    else:
        # A whole config, its cluster block, or the placements alone.
        inner = cluster.get("cluster", cluster)
        if not isinstance(inner, Mapping):
            inner = {"component_placement": inner}
        block = inner.get("component_placement")
        groups = inner.get("node_groups") or ()
        lend = inner.get("lend")
    node_groups, problems = read_node_groups(groups, topology, sources)
    specs, more = read_block(block, node_groups, components, sources, optional)
    problems += more
    if isinstance(lend, Mapping) and lend and not problems:
        specs, unlent = lend_accelerators(specs, lend)
        problems += unlent
    return specs, node_groups, problems
