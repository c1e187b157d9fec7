"""Placement strategies: what a Python caller asks for -> one slot per process.

::

    PackedPlacementStrategy(0, 7, num_hardware_per_process=2)            [0,1] [2,3] [4,5] [6,7]
    PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)  [0,2] [1,3] [4,6] [5,7]
    FlexiblePlacementStrategy([[0], [4, 5]])                             [0] [4,5]
    NodePlacementStrategy([0, 0, 1])                                     no accelerators; two on node 0, one on node 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from rlplace.errors import PlacementError, Problem, did_you_mean
from rlplace.placement.language.groups import NodeGroups
from rlplace.placement.language.slots import Slot, Slots, place
from rlplace.placement.language.spec import ComponentSpec, Homes, process_name
from rlplace.placement.machines.pools import WHOLE_CLUSTER, Pool, accelerator_pool, node_pool
from rlplace.placement.machines.topology import Topology


class HasTopology(Protocol):
    """A cluster, as far as placement cares. One with labelled nodes has them in `node_groups`, a NodeGroups."""

    @property
    def topology(self) -> Topology: ...


class PlacementStrategy(Protocol):
    """Decides where the processes of one group live."""

    def get_placement(self, cluster: Topology | HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        """One slot per process, by rank. Raises PlacementError.

        `isolate_accelerator=False` shows each process all accelerators of its node.
        """
        ...


def topology_of(cluster: Topology | HasTopology) -> Topology:
    return cluster if isinstance(cluster, Topology) else cluster.topology


def groups_of(cluster: Topology | HasTopology) -> NodeGroups:
    """The node groups of a cluster; the reserved ones only, where it has no others."""
    groups = cluster if isinstance(cluster, NodeGroups) else getattr(cluster, "node_groups", None)
    return groups if isinstance(groups, NodeGroups) else NodeGroups(topology_of(cluster))


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPlacementStrategy:
    """Accelerators start..end (both included) dealt out in order, `stride` apart within a process.

    Slots carry an empty component name; launching the group fills it in.
    """

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int = 1
    stride: int = 1
    node_group: str | None = None

    def get_placement(self, cluster: Topology | HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        name = type(self).__name__
        groups = groups_of(cluster)
        pool = _pool(name, "node_group", self.node_group, groups)
        self._check()
        each, stride = self.num_hardware_per_process, self.stride
        accelerators = [
            range(first + lane, first + lane + each * stride, stride)
            for first in range(self.start_hardware_rank, self.end_hardware_rank + 1, each * stride)
            for lane in range(stride)
        ]
        return _place(accelerators, pool, groups, isolate_accelerator, name)

    def _check(self) -> None:
        count = self.end_hardware_rank - self.start_hardware_rank + 1
        block = self.num_hardware_per_process * self.stride
        name, stride = type(self).__name__, self.stride
        if self.num_hardware_per_process < 1 or self.stride < 1:
            low = "stride" if self.stride < 1 else "num_hardware_per_process"
            raise _error(
                "bad-strategy", f"{name}.{low}", "must be at least 1", str(getattr(self, low)), None, f"{low}=1"
            )
        if count < 1:
            fix = f"start_hardware_rank={self.end_hardware_rank}, end_hardware_rank={self.start_hardware_rank}"
            got = f"{self.start_hardware_rank}-{self.end_hardware_rank}"
            raise _error("reversed-range", name, "the range runs backwards", got, "both ends are included", fix)
        if count % block:
            last = self.start_hardware_rank + max(1, count // block) * block - 1
            raise _error(
                "uneven-packing",
                name,
                f"{count} accelerators do not pack into processes of {self.num_hardware_per_process}, stride {stride}",
                f"{self.start_hardware_rank}-{self.end_hardware_rank}",
                f"the number of accelerators must be a multiple of num_hardware_per_process x stride = {block}",
                f"end_hardware_rank={last}",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class FlexiblePlacementStrategy:
    """The accelerators of each process, written out. Several processes may share one."""

    hardware_ranks_list: Sequence[Sequence[int]]
    node_group_label: str | None = None

    def get_placement(self, cluster: Topology | HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        name = type(self).__name__
        groups = groups_of(cluster)
        pool = _pool(name, "node_group_label", self.node_group_label, groups)
        _check_some(name, "hardware_ranks_list", self.hardware_ranks_list, "[[0]]")
        for rank, numbers in enumerate(self.hardware_ranks_list):
            if len(set(numbers)) != len(numbers):
                raise _error(
                    "duplicate-accelerator",
                    name,
                    f"rank {rank} names an accelerator twice",
                    str(list(numbers)),
                    "each entry is the set of accelerators of one process",
                    str(sorted(set(numbers))),
                )
        accelerators = [sorted(numbers) for numbers in self.hardware_ranks_list]
        return _place(accelerators, pool, groups, isolate_accelerator, name)


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlacementStrategy:
    """One process per entry on that node, holding no accelerator. With a group, its nodes are numbered from 0."""

    node_ranks: Sequence[int]
    node_group_label: str | None = None

    def get_placement(self, cluster: Topology | HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        name = type(self).__name__
        groups = groups_of(cluster)
        label = self.node_group_label
        pool = _pool(name, "node_group_label", label, groups)
        _check_some(name, "node_ranks", self.node_ranks, "[0]")
        members = sorted({s.node for s in pool.stretches}) if label not in (None, WHOLE_CLUSTER) else None
        nodes = groups.topology.nodes if members is None else [groups.topology.nodes[n] for n in members]
        unknown = sorted({n for n in self.node_ranks if not 0 <= n < len(nodes)})
        if unknown:
            left = [n for n in self.node_ranks if n not in unknown] or [0]
            many = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
            owner = "this cluster" if members is None else f"node group {label}"
            why = f"{owner} has {many}, numbered from 0"
            what = f"node {unknown[0]} does not exist"
            raise _error("node-out-of-range", name, what, str(list(self.node_ranks)), why, str(left))
        spots = [[n] for n in self.node_ranks]
        return _place(spots, node_pool(nodes, label or WHOLE_CLUSTER), groups, isolate_accelerator, name)


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentPlacementStrategy:
    """What `component_placement` says about one component."""

    spec: ComponentSpec
    groups: NodeGroups

    def get_placement(self, cluster: Topology | HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        spec, topology = self.spec, topology_of(cluster)
        surroundings = self.groups.surroundings
        if topology is self.groups.topology or topology == self.groups.topology:
            return Slots(spec, topology, isolate=isolate_accelerator, surroundings=surroundings)
        # Another cluster than the one it was planned for: every rank is checked against what is there.
        homes = Homes.of(spec)
        if spec.pool.holds_accelerators:
            spots = [range(first, first + count) for first, count in zip(homes.first, homes.count, strict=True)]
            pool = accelerator_pool(topology.nodes)
        else:
            spots = [range(node, node + 1) for node in homes.node]
            pool = node_pool(topology.nodes)
        slots = place(spots, pool, topology, isolate=isolate_accelerator, key=spec.key or spec.name)
        return tuple(
            dataclasses.replace(slot, component=spec.name, process=process_name(spec.process, slot.rank))
            for slot in slots
        )


def _pool(name: str, field: str, label: str | None, groups: NodeGroups) -> Pool:
    """The pool of a node group, or of several joined by commas."""
    parts = (label or WHOLE_CLUSTER).split(",")
    unknown = [part for part in parts if part not in groups.labels]
    if not unknown:
        return groups[",".join(parts)]
    near = did_you_mean(unknown[0], groups.labels)
    raise _error(
        "unknown-node-group",
        f"{name}.{field}",
        f"there is no node group {unknown[0]!r}" + (f", did you mean {near!r}?" if near else ""),
        str(label),
        "the node groups of this cluster are " + ", ".join(groups.labels),
        f'{field}="{near}"' if near else "leave the node group out",
    )


def _place(
    spots: Sequence[Sequence[int]], pool: Pool, groups: NodeGroups, isolate: bool, name: str
) -> tuple[Slot, ...]:
    return place(spots, pool, groups.topology, isolate=isolate, key=name, surroundings=groups.surroundings)


def _check_some(name: str, field: str, values: Sequence[object], example: str) -> None:
    if not values:
        why = "a group has at least one process"
        raise _error("empty-placement", f"{name}.{field}", "names no process", "[]", why, f"{field}={example}")


def _error(code: str, key: str, what: str, got: str, why: str | None, fix: str) -> PlacementError:
    return PlacementError([Problem(code=code, key=key, what=what, got=got, why=why, fix=fix)])
