"""Where one rank lives, and the arithmetic from "accelerators of each rank" to slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from rlplace.errors import PlacementError, Problem
from rlplace.placement.language.spec import ComponentSpec, parts, process_name, segment_of
from rlplace.placement.machines.pools import WHOLE_CLUSTER, HardwareItem, Pool, Stretch
from rlplace.placement.machines.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process finds on its node beside the machine itself."""

    env_vars: tuple[tuple[str, str], ...] = ()
    interpreter: str = ""  # path of the Python to run; "": the driver's


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where one rank of a component lives."""

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
    surroundings: Surroundings = Surroundings()
    process: str = ""  # slots of one name live in one process: "env+rollout 3"; "": a process of its own


class Slots(Sequence[Slot]):
    """The slots of one component by rank, each worked out when asked for: a million ranks cost what one does."""

    __slots__ = ("_here", "_isolate", "_spec", "_surroundings", "_topology")

    def __init__(
        self,
        spec: ComponentSpec,
        topology: Topology,
        *,
        isolate: bool = True,
        surroundings: Mapping[tuple[str, int], Surroundings] | None = None,
    ) -> None:
        """`surroundings` by (node group, node rank)."""
        self._spec = spec
        self._topology = topology
        self._isolate = isolate
        self._surroundings = surroundings or {}
        self._here: dict[int, list[range]] = {}  # node -> its ranks, filled on first use

    def __len__(self) -> int:
        return self._spec.world_size

    @overload
    def __getitem__(self, rank: int) -> Slot: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Slot, ...]: ...
    def __getitem__(self, rank: int | slice) -> Slot | tuple[Slot, ...]:
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(*rank.indices(len(self))))
        if not -len(self) <= rank < len(self):
            raise IndexError(f"{self._spec.name} has no rank {rank}, its ranks are 0-{len(self) - 1}")
        rank %= len(self)
        numbers = segment_of(self._spec.written, rank).accelerators_of(rank)
        return self._slot(rank, numbers, self._spec.pool.stretch_of(numbers.start))

    def __iter__(self) -> Iterator[Slot]:
        for segment in self._spec.written:
            each, sharing = segment.accelerators_per_rank, segment.ranks_per_accelerator
            rank = segment.ranks.start
            for stretch, numbers in parts(segment, self._spec.pool):
                for start in numbers[::each]:
                    for _ in range(sharing):
                        yield self._slot(rank, range(start, start + each), stretch)
                        rank += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Slot.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple of the same slots, which hashes by its items

    def __repr__(self) -> str:
        return f"<{len(self)} slots of {self._spec.name}: {self._spec.render()}>"

    def _slot(self, rank: int, numbers: range, stretch: Stretch) -> Slot:
        pool, node = self._spec.pool, self._topology.nodes[stretch.node]
        here = self._ranks_on(node.rank)
        held: tuple[int, ...] = ()
        local: tuple[int, ...] = ()
        if pool.holds_accelerators:
            first = numbers.start - stretch.first + stretch.base
            held = tuple(range(first, first + len(numbers)))
            local = tuple(range(first - node.first, first - node.first + len(numbers)))
        return Slot(
            component=self._spec.name,
            rank=rank,
            node=node.rank,
            local_rank=sum(len(r) if r.stop <= rank else max(0, rank - r.start) for r in here),
            local_world_size=sum(map(len, here)),
            accelerators=held,
            local_accelerators=local,
            visible_accelerators=local if self._isolate else tuple(range(node.accelerators)),
            node_group=stretch.node_group,
            hardware=tuple(pool.items[n] for n in numbers) if pool.items else (),
            surroundings=self._surroundings.get((stretch.node_group, node.rank), Surroundings()),
            process=process_name(self._spec.process, rank),
        )

    def _ranks_on(self, node: int) -> list[range]:
        if not self._here:
            for segment in self._spec.written:
                each, sharing = segment.accelerators_per_rank, segment.ranks_per_accelerator
                start = segment.ranks.start
                for stretch, numbers in parts(segment, self._spec.pool):
                    stop = start + len(numbers) // each * sharing
                    ranks = self._here.setdefault(stretch.node, [])
                    if ranks and ranks[-1].stop == start:
                        ranks[-1] = range(ranks[-1].start, stop)
                    else:
                        ranks.append(range(start, stop))
                    start = stop
        return self._here[node]


def place(
    accelerators: Sequence[Sequence[int]],
    pool: Pool,
    topology: Topology,
    *,
    isolate: bool = True,
    key: str,
    surroundings: Mapping[tuple[str, int], Surroundings] | None = None,
) -> tuple[Slot, ...]:
    """Slots of ranks 0..N-1, rank i holding `accelerators[i]` (numbers of `pool`, ascending, at least one).

    `key` names in errors what asked for it. Raises PlacementError for numbers that do not exist and for a rank on two
    nodes or on accelerators of two products.
    """
    problems: list[Problem] = []
    homes: list[Stretch] = []
    for rank, numbers in enumerate(accelerators):
        if not numbers or numbers[0] < 0 or numbers[-1] >= pool.count:
            problems.append(_out_of_range(rank, numbers, pool, key))
            continue
        first, last = pool.stretch_of(numbers[0]), pool.stretch_of(numbers[-1])
        if first != last:
            problems.append(_spans(rank, numbers, first, last, key))
        homes.append(first)
    if problems:
        raise PlacementError(problems)
    world_sizes, seen = Counter(h.node for h in homes), Counter[int]()
    slots: list[Slot] = []
    for rank, (home, numbers) in enumerate(zip(homes, accelerators, strict=True)):
        node = topology.nodes[home.node]
        held = tuple(n - home.first + home.base for n in numbers) if pool.holds_accelerators else ()
        local = tuple(n - node.first for n in held)
        slots.append(
            Slot(
                component="",
                rank=rank,
                node=node.rank,
                local_rank=seen[node.rank],
                local_world_size=world_sizes[node.rank],
                accelerators=held,
                local_accelerators=local,
                visible_accelerators=local if isolate else tuple(range(node.accelerators)),
                node_group=home.node_group,
                hardware=tuple(pool.items[n] for n in numbers) if pool.items else (),
                surroundings=(surroundings or {}).get((home.node_group, node.rank), Surroundings()),
            )
        )
        seen[node.rank] += 1
    return tuple(slots)


def _out_of_range(rank: int, numbers: Sequence[int], pool: Pool, key: str) -> Problem:
    missing = [n for n in numbers if not 0 <= n < pool.count]
    return Problem(
        code="accelerator-out-of-range",
        key=key,
        what=f"{pool.noun} {missing[0]} does not exist" if missing else f"rank {rank} has no {pool.noun}",
        got=f"rank {rank}: {list(numbers)}",
        why=pool.describe(),
        fix=f"use numbers from 0 to {pool.count - 1}",
    )


def _spans(rank: int, numbers: Sequence[int], first: Stretch, last: Stretch, key: str) -> Problem:
    if first.node == last.node:
        code, what = "rank-spans-products", f"rank {rank} would use accelerators of two products"
        why = f"a rank uses accelerators of one product; on node {last.node} another one starts at {last.first}"
    else:
        code, what = "rank-spans-nodes", f"rank {rank} would live on nodes {first.node} and {last.node}"
        why = f"a rank is one process on one node; node {last.node} starts at accelerator {last.first}"
    return Problem(
        code=code,
        key=key,
        what=what,
        got=f"rank {rank}: {list(numbers)}",
        why=why,
        fix="let each rank's accelerators end where its node ends, or give each rank fewer of them",
    )
