"""Slots, each the place of one rank, and the placement strategies of Python callers, which give one slot per process.

::

    PackedPlacementStrategy(0, 7, num_hardware_per_process=2)            [0,1] [2,3] [4,5] [6,7]
    PackedPlacementStrategy(0, 7, num_hardware_per_process=2, stride=2)  [0,2] [1,3] [4,6] [5,7]
    FlexiblePlacementStrategy([[0], [4, 5]])                             [0] [4,5]
    NodePlacementStrategy([0, 0, 1])                                     no accelerators; two on node 0, one on node 1
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rlplace.errors import PlacementError, Problem, did_you_mean, suggestion
from rlplace.placement.language.fit import cut_between
from rlplace.placement.language.groups import NodeGroups, RuntimeEnv
from rlplace.placement.language.spec import ComponentSpec, process_name
from rlplace.placement.machines.pools import NODE, WHOLE_CLUSTER, HardwareItem, Interval, Pool, node_pool
from rlplace.placement.machines.topology import Topology

_ONE = "a group has at least one process"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one rank of a component."""

    component: str
    rank: int
    node: int
    local_rank: int  # among the component's ranks on this node
    local_world_size: int
    accelerators: tuple[int, ...]  # global numbers, ascending; empty for a CPU-only rank
    local_accelerators: tuple[int, ...]  # the same, numbered within the node
    visible_accelerators: tuple[int, ...] = ()  # numbered within the node; more than its own when not isolated
    node_group: str = WHOLE_CLUSTER
    hardware: tuple[HardwareItem, ...] = ()  # other than accelerators
    runtime_env: RuntimeEnv = dataclasses.field(default_factory=RuntimeEnv)
    process: str = ""  # slots of one name share one process: "env+rollout 3"; "": a process of its own

    @property
    def owner(self) -> str:
        """Name of the worker that lives here, in errors, accounts and statistics."""
        return owner_of(self.component, self.rank)


def owner_of(component: str, rank: int) -> str:
    """ "actor rank 3"."""
    return f"{component} rank {rank}"


def component_of(owner: str) -> str:
    """Return the component of `Slot.owner`; "" for other names."""
    return owner.rpartition(" rank ")[0]


class HasTopology(Protocol):
    """A cluster, as far as placement cares: a Topology, or the NodeGroups of a placement where nodes have labels."""

    @property
    def topology(self) -> Topology: ...


class PlacementStrategy(Protocol):
    """Places the processes of one group."""

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        """Return one slot per process, by rank. Raises PlacementError.

        `isolate_accelerator=False` shows each process all accelerators of its node.
        """
        ...


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

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        key, groups = type(self).__name__, _groups_of(cluster)
        pool = _pool(key, "node_group", self.node_group, groups)
        start, end = self.start_hardware_rank, self.end_hardware_rank
        each, stride = self.num_hardware_per_process, self.stride
        count, block = end - start + 1, each * stride
        for field, value in (("stride", stride), ("num_hardware_per_process", each)):
            if value < 1:
                raise _error("bad-strategy", f"{key}.{field}", "must be at least 1", str(value), None, f"{field}=1")
        if count < 1:
            fix = f"start_hardware_rank={end}, end_hardware_rank={start}"
            what, why = "the range runs backwards", "both ends are included"
            raise _error("reversed-range", key, what, f"{start}-{end}", why, fix)
        if count % block:
            what = f"{count} accelerators do not pack into processes of {each}, stride {stride}"
            why = f"the number of accelerators must be a multiple of num_hardware_per_process x stride = {block}"
            fix = f"end_hardware_rank={start + max(1, count // block) * block - 1}"
            raise _error("uneven-packing", key, what, f"{start}-{end}", why, fix)
        held = [
            range(first + lane, first + lane + block, stride)
            for first in range(start, end + 1, block)
            for lane in range(stride)
        ]
        return _place(held, pool, groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class FlexiblePlacementStrategy:
    """The accelerators of each process, written out. Several processes may share one."""

    hardware_ranks_list: Sequence[Sequence[int]]
    node_group_label: str | None = None

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        key, groups = type(self).__name__, _groups_of(cluster)
        pool = _pool(key, "node_group_label", self.node_group_label, groups)
        if not self.hardware_ranks_list:
            fix = "hardware_ranks_list=[[0]]"
            raise _error("empty-placement", f"{key}.hardware_ranks_list", "names no process", "[]", _ONE, fix)
        for rank, numbers in enumerate(self.hardware_ranks_list):
            if len(set(numbers)) != len(numbers):
                what, why = f"rank {rank} names an accelerator twice", "each entry is the set of one process"
                fix = str(sorted(set(numbers)))
                raise _error("duplicate-accelerator", key, what, str(list(numbers)), why, fix)
        held = [sorted(numbers) for numbers in self.hardware_ranks_list]
        return _place(held, pool, groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlacementStrategy:
    """One process per entry on that node, holding no accelerator. With a group, its nodes are numbered from 0."""

    node_ranks: Sequence[int]
    node_group_label: str | None = None

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        key, groups, label = type(self).__name__, _groups_of(cluster), self.node_group_label or WHOLE_CLUSTER
        pool = _pool(key, "node_group_label", label, groups)
        if not self.node_ranks:
            raise _error("empty-placement", f"{key}.node_ranks", "names no process", "[]", _ONE, "node_ranks=[0]")
        nodes = groups.topology.nodes
        if label != WHOLE_CLUSTER:
            nodes = tuple(nodes[n] for n in sorted(pool.nodes))
        return _place([[n] for n in self.node_ranks], node_pool(nodes, label), groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentPlacementStrategy:
    """The place of one component of `component_placement`."""

    spec: ComponentSpec
    groups: NodeGroups

    def get_placement(self, cluster: HasTopology, isolate_accelerator: bool = True) -> Sequence[Slot]:
        """Place the component; on another cluster than that of its placement, the same numbers are checked again."""
        spec, groups, key = self.spec, self.groups, self.spec.key or self.spec.name
        pool = spec.pool
        if cluster.topology != groups.topology:
            groups = _groups_of(cluster)
            pool = _pool(key, "node_group", spec.node_group, groups)
        held = [segment.accelerators_of(rank) for segment in spec.written for rank in segment.ranks]
        return _place(held, pool, groups, key, isolate_accelerator, spec.name, spec.process)


def _groups_of(cluster: HasTopology) -> NodeGroups:
    return cluster if isinstance(cluster, NodeGroups) else NodeGroups(cluster.topology)


def _error(code: str, key: str, what: str, got: str, why: str | None, fix: str) -> PlacementError:
    return PlacementError([Problem(code=code, key=key, what=what, got=got, why=why, fix=fix)])


def _pool(key: str, field: str, label: str | None, groups: NodeGroups) -> Pool:
    """Return the pool of a node group, or of several joined by commas."""
    names = (label or WHOLE_CLUSTER).split(",")
    unknown = next((name for name in names if name not in groups.labels), None)
    if unknown is None:
        return groups[",".join(names)]
    near = did_you_mean(unknown, groups.labels)
    what = f"there is no node group {unknown!r}" + suggestion(near)
    why = "the node groups of this cluster are " + ", ".join(groups.labels)
    fix = f'{field}="{near}"' if near else "leave the node group out"
    raise _error("unknown-node-group", f"{key}.{field}", what, str(label), why, fix)


def _place(
    held: Sequence[Sequence[int]],
    pool: Pool,
    groups: NodeGroups,
    key: str,
    isolate: bool,
    component: str = "",
    process: str = "",
) -> tuple[Slot, ...]:
    """Make the slots of ranks 0..N-1; rank i has the numbers `held[i]` of `pool`, ascending.

    Raises PlacementError for numbers that do not exist, and for a rank on two nodes or on two products.
    """
    problems: list[Problem] = []
    locations: list[Interval] = []
    for rank, numbers in enumerate(held):
        got = f"rank {rank}: {list(numbers)}"
        missing = [n for n in numbers if not 0 <= n < pool.count]
        if missing or not numbers:
            what = f"{pool.noun} {missing[0]} does not exist" if missing else f"rank {rank} has no {pool.noun}"
            fix = f"use numbers from 0 to {pool.count - 1}"
            code = "node-out-of-range" if pool.noun == NODE else "accelerator-out-of-range"
            problems += _error(code, key, what, got, pool.describe(), fix).problems
            continue
        first, last = pool.interval_of(numbers[0]), pool.interval_of(numbers[-1])
        locations.append(first)
        if first != last:
            code, on, why = cut_between(first, last, pool)
            what = f"rank {rank} would hold {pool.noun}s {numbers[0]} and {numbers[-1]}, {on}"
            fix = "let each rank's accelerators end where its node ends, or give each rank fewer of them"
            problems += _error(code, key, what, got, why, fix).problems
    if problems:
        raise PlacementError(problems)
    world_sizes, seen = Counter(h.node for h in locations), Counter[int]()
    slots: list[Slot] = []
    for rank, (location, numbers) in enumerate(zip(locations, held, strict=True)):
        node = groups.topology.nodes[location.node]
        accelerators = tuple(n - location.first + location.base for n in numbers) if pool.holds_accelerators else ()
        own = tuple(n - node.first for n in accelerators)
        slot = Slot(
            component=component,
            rank=rank,
            node=node.rank,
            local_rank=seen[location.node],
            local_world_size=world_sizes[location.node],
            accelerators=accelerators,
            local_accelerators=own,
            visible_accelerators=own if isolate else tuple(range(node.accelerators)),
            node_group=location.node_group,
            hardware=tuple(pool.items[n] for n in numbers) if pool.items else (),
            runtime_env=groups.runtime_envs.get((location.node_group, node.rank), RuntimeEnv()),
            process=process_name(process, rank),
        )
        slots.append(slot)
        seen[location.node] += 1
    return tuple(slots)
