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

from rlplace.codes import problem
from rlplace.errors import PlacementError, Problem
from rlplace.placement.language.complaints.numbers import between
from rlplace.placement.language.complaints.problems import problems_of
from rlplace.placement.language.faults import Fault
from rlplace.placement.language.fit import crossing
from rlplace.placement.language.groups import NodeGroups, RuntimeEnv
from rlplace.placement.language.lines import read_label
from rlplace.placement.language.spec import ComponentSpec, process_name
from rlplace.placement.language.text import write
from rlplace.placement.machines.pools import (
    NODE,
    WHOLE_CLUSTER,
    HardwareItem,
    Interval,
    Pool,
    node_pool,
)
from rlplace.placement.machines.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one rank of a component.

    `node`: index of the node. `local_rank`: index of the rank among the component's ranks on this node. `accelerators`:
    indices of the rank's accelerators in the cluster. `local_accelerators`: their indices within the node.
    `visible_accelerators`: indices within the node of all accelerators that the process sees. `node_group`: label of
    the slot's node group. `hardware`: hardware items of the rank other than accelerators. `runtime_env`: environment of
    its process. `process`: name of the process, which slots of several components may share; "": a process of its own.
    """

    component: str
    rank: int
    node: int
    local_rank: int  # among the component's ranks on this node
    # Global numbers, ascending; empty for a CPU-only rank.
    accelerators: tuple[int, ...]
    local_accelerators: tuple[int, ...]  # the same, numbered within the node
    # Numbered within the node; more than its own where a rank is not isolated.
    visible_accelerators: tuple[int, ...] = ()
    node_group: str = WHOLE_CLUSTER
    hardware: tuple[HardwareItem, ...] = ()  # other than accelerators
    runtime_env: RuntimeEnv = dataclasses.field(default_factory=RuntimeEnv)
    # Slots of one name share one process: "env+rollout 3"; "": a process of its own.
    process: str = ""

    @property
    def owner(self) -> str:
        """The name of the worker in this slot, as used in errors, memory accounts and statistics."""
        return owner_of(self.component, self.rank)


def owner_of(component: str, rank: int) -> str:
    """Return the name of a rank as it is shown in texts, such as "actor rank 3"."""
    return f"{component} rank {rank}"


def component_of(owner: str) -> str:
    """Return the component in a name that `owner_of` has made; "" for any other name."""
    return owner.rpartition(" rank ")[0]


class HasTopology(Protocol):
    """Anything with the attribute `topology`: a cluster, a Topology, or NodeGroups for nodes with labels."""

    @property
    def topology(self) -> Topology: ...


class PlacementStrategy(Protocol):
    """A rule that decides on which nodes and accelerators the processes of one worker group run."""

    def get_placement(
        self, cluster: HasTopology, isolate_accelerator: bool = True
    ) -> Sequence[Slot]:
        """Return one slot per process, by rank. Raise PlacementError if the processes do not fit.

        The slots have a component name only if the strategy is that of a component; otherwise, the name is filled in
        when the group is launched. `cluster`: the machines. `isolate_accelerator`: True: a process sees only its own
        accelerators; False: it sees all accelerators of its node.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPlacementStrategy:
    """A placement strategy that gives a range of accelerators to processes, in order.

    The range is `start_hardware_rank` to `end_hardware_rank`, both included. Each process gets
    `num_hardware_per_process` accelerators, whose numbers are `stride` apart. `node_group`: label of the group that
    numbers them; None: the whole cluster.
    """

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int = 1
    stride: int = 1
    node_group: str | None = None

    def get_placement(
        self, cluster: HasTopology, isolate_accelerator: bool = True
    ) -> Sequence[Slot]:
        """Return one slot for each process, by rank. Raise PlacementError if the processes do not fit.

        `cluster`: the machines. `isolate_accelerator`: True: a process sees only its own accelerators; False: it sees
        all accelerators of its node.
        """
        start = self.start_hardware_rank
        end = self.end_hardware_rank
        each = self.num_hardware_per_process
        stride = self.stride
        count = end - start + 1
        block = each * stride
        key = type(self).__name__
        got = str(self)
        if min(each, stride) < 1:
            raise PlacementError([problem("bad-strategy", key, got)])
        if count < 1:
            backwards = problem(
                "reversed-range",
                key,
                got,
                error="of-strategy",
                first=start,
                last=end,
            )
            raise PlacementError([backwards])
        if count % block:
            uneven = problem(
                "uneven-packing",
                key,
                got,
                count=count,
                each=each,
                stride=stride,
                block=block,
                last=start + max(1, count // block) * block - 1,
            )
            raise PlacementError([uneven])
        # The processes of a block take turns: each begins one accelerator further on.
        held = []
        for first in range(start, end + 1, block):
            for lane in range(first, first + stride):
                held.append(range(lane, lane + block, stride))
        groups = _groups_of(cluster)
        pool = _pool(f"{key}.node_group", self.node_group or WHOLE_CLUSTER, groups)
        return _place(held, pool, groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class FlexiblePlacementStrategy:
    """A placement strategy with a list of accelerators for each process. Processes may share accelerators.

    `hardware_ranks_list`: the accelerators of each process. `node_group_label`: the group that numbers them; None: the
    whole cluster.
    """

    hardware_ranks_list: Sequence[Sequence[int]]
    node_group_label: str | None = None

    def get_placement(
        self, cluster: HasTopology, isolate_accelerator: bool = True
    ) -> Sequence[Slot]:
        """Return one slot for each process, by rank. Raise PlacementError if the processes do not fit.

        `cluster`: the machines. `isolate_accelerator`: True: a process sees only its own accelerators; False: it sees
        all accelerators of its node.
        """
        key = type(self).__name__
        groups = _groups_of(cluster)
        label = self.node_group_label or WHOLE_CLUSTER
        pool = _pool(f"{key}.node_group_label", label, groups)
        held = [sorted(numbers) for numbers in self.hardware_ranks_list]
        return _place(held, pool, groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class NodePlacementStrategy:
    """A placement strategy that runs one process on a node for each entry of `node_ranks`.

    The processes have no accelerators. `node_ranks`: numbers of nodes. `node_group_label`: the group that numbers its
    nodes from 0; None: the whole cluster.
    """

    node_ranks: Sequence[int]
    node_group_label: str | None = None

    def get_placement(
        self, cluster: HasTopology, isolate_accelerator: bool = True
    ) -> Sequence[Slot]:
        """Return one slot for each process, by rank. Raise PlacementError if a node or the group does not exist."""
        key = type(self).__name__
        groups = _groups_of(cluster)
        label = self.node_group_label or WHOLE_CLUSTER
        members: set[int] = set()
        for one in label.split(","):
            members |= _pool(f"{key}.node_group_label", one, groups).nodes
        nodes = list(groups.topology.nodes)
        if label != WHOLE_CLUSTER:
            nodes = [node for node in nodes if node.rank in members]
        held = [[node] for node in self.node_ranks]
        pool = node_pool(nodes, label)
        return _place(held, pool, groups, key, isolate_accelerator)


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentPlacementStrategy:
    """A placement strategy with the place that `component_placement` gives to one component.

    If it is used on another cluster than that of `groups`, its numbers are checked again.
    """

    spec: ComponentSpec
    groups: NodeGroups

    def get_placement(
        self, cluster: HasTopology, isolate_accelerator: bool = True
    ) -> Sequence[Slot]:
        """Return one slot for each rank of the component, by rank. Raise PlacementError if the ranks do not fit.

        `cluster`: the machines. `isolate_accelerator`: True: a process sees only its own accelerators; False: it sees
        all accelerators of its node.
        """
        spec = self.spec
        groups = self.groups
        pool = spec.pool
        key = spec.key or spec.name
        if cluster.topology != groups.topology:
            groups = _groups_of(cluster)
            pool = _pool(f"{key}.node_group", spec.node_group, groups)
        held = []
        for segment in spec.written:
            held += [segment.accelerators_of(rank) for rank in segment.ranks]
        return _place(
            held, pool, groups, key, isolate_accelerator, spec.name, spec.process
        )


def _groups_of(cluster: HasTopology) -> NodeGroups:
    if isinstance(cluster, NodeGroups):
        return cluster
    return NodeGroups(cluster.topology)


def _pool(key: str, label: str, groups: NodeGroups) -> Pool:
    """Return the pool of a node group, or of several groups joined by commas.

    Raise PlacementError for an unknown label. `key`: class and argument that have the label, for errors. `label`: one
    or more labels, joined by commas.
    """
    argument = key.rpartition(".")[2]
    faults: list[Fault] = []
    found = read_label(write(label, key, argument, {}), groups, faults)
    if found is None:
        # The fix is an argument in Python here, not a line of YAML.
        problems = []
        for told in problems_of(faults):
            value = str(told.fix).removeprefix(f"{argument}: ").strip('"')
            problems.append(dataclasses.replace(told, fix=f'{argument}="{value}"'))
        raise PlacementError(problems)
    return groups[found]


def _locate(held: Sequence[Sequence[int]], pool: Pool, key: str) -> list[Interval]:
    """Return the interval of the pool on which each rank lies.

    `held`: for each rank, its numbers of `pool`, ascending. `key`: the key path or class that an error names. Raise
    PlacementError if a number does not exist or is given twice in a rank, or if a rank lies on two nodes or accelerator
    models.
    """
    if not held:
        raise PlacementError(
            [problem("empty-placement", key, "[]", error="no-process")]
        )
    problems: list[Problem] = []
    locations: list[Interval] = []
    for rank, numbers in enumerate(held):
        got = f"rank {rank}: {list(numbers)}"
        # The numbers exist.
        missing = [n for n in numbers if not 0 <= n < pool.count]
        if missing or not numbers:
            code = "accelerator-out-of-range"
            if pool.noun == NODE:
                code = "node-out-of-range"
            found = problem(
                code,
                key,
                got,
                error="missing-number" if missing else "rank-without-number",
                rank=rank,
                noun=pool.noun,
                missing=missing[0] if missing else None,
                inventory=pool.describe(),
                last=pool.count - 1,
            )
            problems.append(found)
            continue

        # Each is there once.
        if len(set(numbers)) < len(numbers):
            twice = problem(
                "duplicate-accelerator",
                key,
                got,
                error="in-rank",
                rank=rank,
                once=sorted(set(numbers)),
            )
            problems.append(twice)

        # They are on one node, and of one product.
        first = pool.interval_of(numbers[0])
        last = pool.interval_of(numbers[-1])
        locations.append(first)
        if first != last:
            on, rule = between(first, last, pool)
            spanning = problem(
                crossing(first, last),
                key,
                got,
                error="numbers-apart",
                rank=rank,
                noun=pool.noun,
                first=numbers[0],
                last=numbers[-1],
                on=on,
                rule=rule,
            )
            problems.append(spanning)
    if problems:
        raise PlacementError(problems)
    return locations


def _place(
    held: Sequence[Sequence[int]],
    pool: Pool,
    groups: NodeGroups,
    key: str,
    isolate: bool,
    component: str = "",
    process: str = "",
) -> tuple[Slot, ...]:
    """Return the slots of ranks 0..N-1. Raise PlacementError if a rank cannot be placed.

    `held`: for each rank, its numbers of `pool`. `key`: the key path or class that an error names. `isolate`: whether a
    rank sees only its own accelerators. `component`: "" if the slots do not belong to a component. `process`: the
    components that share processes, such as "env+rollout"; "" for none.
    """
    locations = _locate(held, pool, key)
    slots: list[Slot] = []
    # Ranks so far, by node
    seen = Counter[int]()
    for rank, (location, numbers) in enumerate(zip(locations, held, strict=True)):
        node = groups.topology.nodes[location.node]
        # Numbers of the pool -> over the cluster -> within the node.
        accelerators: tuple[int, ...] = ()
        if pool.holds_accelerators:
            shift = location.base - location.first
            accelerators = tuple(number + shift for number in numbers)
        own = tuple(number - node.first for number in accelerators)
        visible = own
        if not isolate:
            visible = tuple(range(node.accelerators))
        hardware: tuple[HardwareItem, ...] = ()
        if pool.items:
            hardware = tuple(pool.items[number] for number in numbers)
        place = (location.node_group, node.rank)
        slot = Slot(
            component=component,
            rank=rank,
            node=node.rank,
            local_rank=seen[location.node],
            accelerators=accelerators,
            local_accelerators=own,
            visible_accelerators=visible,
            node_group=location.node_group,
            hardware=hardware,
            runtime_env=groups.runtime_envs.get(place, RuntimeEnv()),
            process=process_name(process, rank),
        )
        slots.append(slot)
        seen[location.node] += 1
    return tuple(slots)
