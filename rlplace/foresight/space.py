"""The search space: the plans that a search chooses among, and the config keys that each plan changes.

A component has an interval of accelerators, one rank on each. An interval lies within a node, at a multiple of its
length or at the node's end, or it consists of whole nodes. Accelerators of a node with the same components are equal,
and nodes with equal accelerators are equal. Of places that differ only in the numbers of equal accelerators, only the
first is tried::

    actor 0-3, env 0-1      the same as      actor 0-3, env 2-3      or      actor 4-7, env 4-5
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from rlplace.codes import config_error
from rlplace.config.keys import PLACEMENT
from rlplace.contract.registry import job_of
from rlplace.errors import did_you_mean
from rlplace.foresight.loads import Mode, Size, Sizes, Spread
from rlplace.foresight.model import model_of
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.topology import Ranges, show_range
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Schedule, schedule_of

# node -> accelerator -> bit mask of the components there
Cells = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One plan of a search space: the sizes and places of all components.

    `mode`: settings that hold for all components. `sizes`: component -> its size. `starts`: component whose place the
    search chooses -> its first accelerator.
    `stays`: components that are not offloaded, although other components need the same accelerators.
    """

    mode: Mode
    sizes: Sizes
    starts: Mapping[str, int]
    stays: tuple[str, ...] = ()


class _Shared(NamedTuple):
    """The pairs of components that share accelerators, in the form that `schedule_of` reads.

    `pairs`: each pair in both orders, (a, b) and (b, a).
    """

    components: tuple[str, ...]
    pairs: frozenset[tuple[str, str]]

    def shared(self, a: str, b: str) -> bool:
        return (a, b) in self.pairs

    def sharers(self, component: str) -> list[str]:
        return [c for c in self.components if (component, c) in self.pairs]


class Space:
    """All plans of a job that a search may choose. They differ in the places and sizes of the free components.

    A component is free if the search may change its place and size.
    """

    def __init__(
        self,
        config: Any,
        plan: Plan,
        *,
        fixed: Collection[str] = (),
        accelerators: Collection[int] = (),
        varied: Mapping[str, Any] | None = None,
        written: Any = None,
    ) -> None:
        """Prepare the search space of a config.

        `plan`: the plan of the config. `fixed`: components that keep their place. `accelerators`: allowed numbers of
        accelerators of a plan; empty: any number. `varied`: key -> value, for keys outside of the placement in which
        `config` differs from the config `written` by the user; None: no keys. Raises ConfigError for unknown
        components, for more accelerators than the cluster has, and for a plan with lent accelerators.
        """
        placement = plan.placement
        for component in placement.residents.borrowers:
            raise config_error(
                "cannot-lend",
                "cluster.lend",
                error="searched",
                borrower=component,
                lender=placement.spec(component).lenders[0],
            )
        for name in fixed:
            if name not in placement.components:
                raise config_error(
                    "bad-option",
                    "fix",
                    name,
                    error="fixed-component",
                    components=", ".join(placement.components),
                    near=did_you_mean(name, placement.components) or "actor",
                )
        for count in accelerators:
            if not 0 < count <= plan.topology.num_accelerators:
                raise config_error(
                    "bad-option",
                    "accelerators",
                    str(count),
                    error="accelerators",
                    cluster=plan.topology.describe(),
                    most=plan.topology.num_accelerators,
                )
        self.config = config
        self.plan = plan
        self.counts = frozenset(accelerators)
        self.varied = dict(varied or {})
        self._written = written or config
        self.most = max(self.counts, default=plan.topology.num_accelerators)
        self.free = tuple(
            c for c in placement.components if c not in fixed and _movable(placement, c)
        )
        self.nodes = plan.topology.nodes
        self._schedules: dict[object, Schedule] = {}
        # Cache of the last layout's spread
        self._spread: tuple[object, Spread] = (
            None,
            {},
        )
        self._bits = {c: 1 << at for at, c in enumerate(placement.components)}
        self.model = model_of(config)
        self.now = self.model.mode(plan)

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """All modes that a plan of this space may have; the mode of the present plan is the first.

        A mode: the settings that all components share, such as the number of stage groups.
        """
        return self.model.modes(self)

    def sizes(self, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return component -> the sizes that it may have in this mode. A component with a fixed place has one size."""
        return self.model.sizes(self, mode)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of accelerators that a component may have: up to one whole node, or several whole nodes."""
        each = max(node.accelerators for node in self.nodes)
        alike = sum(node.accelerators == each for node in self.nodes)
        found = [*range(1, each + 1), *(each * n for n in range(2, alike + 1))]
        return tuple(n for n in found if n <= self.most)

    def size_now(self, component: str) -> Size:
        placement = self.plan.placement
        return Size(
            len(placement.accelerators(component)), placement.world_size(component)
        )

    @cached_property
    def empty(self) -> Cells:
        """The cells in which only the fixed components are placed.

        Cells: for each accelerator of each node, the components on it.
        """
        fixed = {
            number: sum(
                bit
                for c, bit in self._bits.items()
                if c not in self.free and number in self.plan.placement.accelerators(c)
            )
            for number in self.plan.placement.topology.all
        }
        return tuple(
            tuple(fixed[number] for number in node.numbers) for node in self.nodes
        )

    def places(
        self, cells: Cells, component: str, length: int
    ) -> Iterator[tuple[int, Cells]]:
        """Yield (first accelerator, cells) for each place that a component may get; `cells` then include the component.

        Of places that differ only in the numbers of equal accelerators, only the first is yielded. `cells`: for each
        accelerator of each node, the components already placed on it. `length`: number of accelerators of the
        component.
        """
        bit = self._bits[component]
        seen = set[object]()
        for start, touched in self._intervals(length):
            covered = tuple(
                (
                    self._alike[node],
                    tuple(sorted(Counter(cells[node][first:stop]).items())),
                    tuple(sorted(cells[node])),
                )
                for node, first, stop in touched
            )
            key = tuple(sorted(covered)) if len(covered) > 1 else covered
            if key in seen:
                continue
            seen.add(key)
            after = list(cells)
            for node, first, stop in touched:
                row = cells[node]
                after[node] = (
                    *row[:first],
                    *(here | bit for here in row[first:stop]),
                    *row[stop:],
                )
            yield start, tuple(after)

    def again(self, cells: Cells, component: str, other: str) -> Cells:
        """Return a copy of `cells` with `component` added on each accelerator on which `other` is placed.

        `cells`: for each accelerator of each node, the components on it.
        """
        bit = self._bits[component]
        there = self._bits[other]
        return tuple(
            tuple(here | bit if here & there else here for here in row) for row in cells
        )

    def _intervals(self, length: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Return (first accelerator, parts) for each interval of `length` accelerators that a component may have.

        Each part is (node, begin, end), with `begin` and `end` counted from the node's first accelerator.
        """
        each = max(node.accelerators for node in self.nodes)
        found: list[tuple[int, list[tuple[int, int, int]]]] = []
        if length > each:
            count = length // each
            full = [node for node in self.nodes if node.accelerators == each]
            for at in dict.fromkeys(
                [*range(0, len(full) - count + 1, count), len(full) - count]
            ):
                run = full[at : at + count]
                if run[-1].rank - run[0].rank == count - 1:
                    found.append((run[0].first, [(node.rank, 0, each) for node in run]))
            return found
        for node in self.nodes:
            last = node.accelerators - length
            for at in (
                dict.fromkeys([*range(0, last + 1, length), last]) if last >= 0 else ()
            ):
                found.append((node.first + at, [(node.rank, at, at + length)]))
        return found

    @cached_property
    def _alike(self) -> tuple[int, ...]:
        """For each node, the number of its class of equal nodes. The driver's node is a class of its own."""
        kinds: dict[object, int] = {}
        return tuple(
            kinds.setdefault(
                (n.rank == 0, n.kind, n.alike, n.host_memory_bytes), len(kinds)
            )
            for n in self.nodes
        )

    def spread(self, layout: Layout) -> Spread:
        """Return component -> node -> number of the component's ranks on the node."""
        key = (*layout.starts.items(), *layout.sizes.items())
        if self._spread[0] != key:
            self._spread = key, self._spread_of(layout)
        return self._spread[1]

    def _spread_of(self, layout: Layout) -> Spread:
        found: dict[str, Mapping[int, int]] = {}
        for component, size in layout.sizes.items():
            if component not in layout.starts:
                found[component] = Counter(
                    self.plan.placement.locations(component).node
                )
                continue
            window = range(
                layout.starts[component], layout.starts[component] + size.accelerators
            )
            parts = self.plan.topology.parts(window)
            found[component] = {
                node.rank: len(part) // size.each for node, part in parts
            }
        return found

    def sharing(self, cells: Cells) -> tuple[str, ...]:
        """Return the free components that share accelerators. A search chooses which of them are offloaded.

        `cells`: for each accelerator of each node, the components on it.
        """
        present = {here for row in cells for here in row}
        return tuple(
            c
            for c in self.free
            if any(here & self._bits[c] and here != self._bits[c] for here in present)
        )

    def schedule(self, cells: Cells, stays: Collection[str]) -> Schedule:
        """Return the schedule of a plan: the residencies of its components in each stage, and the moves.

        `cells`: for each accelerator of each node, the components on it. `stays`: free components that are not
        offloaded, although they share accelerators.
        """
        pairs = frozenset(
            (a, b)
            for here in {here for row in cells for here in row}
            for a, b in itertools.permutations(
                (c for c, bit in self._bits.items() if here & bit), 2
            )
        )
        offload = tuple(
            (
                c,
                c not in stays
                if c in self.free and any(c == a for a, _ in pairs)
                else leaves,
            )
            for c, leaves in self.plan.offload.items()
        )
        key = (pairs, offload)
        if key not in self._schedules:
            sharing = _Shared(self.plan.placement.components, pairs)
            self._schedules[key] = schedule_of(sharing, self.plan.needs, dict(offload))
        return self._schedules[key]

    def used(self, cells: Cells) -> int:
        return sum(1 for row in cells for here in row if here)

    def current(self) -> Layout:
        """Return the layout of the config's own plan.

        If a component has several intervals of accelerators, only the first one is kept.
        """
        placement = self.plan.placement
        starts = {c: placement.accelerators(c).pieces[0].start for c in self.free}
        sizes = {c: self.size_now(c) for c in placement.components}
        allowed = self.config.cluster.allow_resident
        stays = [c for c in self.free if not self.plan.offload[c] and c in allowed]
        return Layout(mode=self.now, sizes=sizes, starts=starts, stays=tuple(stays))

    def changes(self, layout: Layout) -> dict[str, Any]:
        """Return config key -> new value, for all keys in which a layout differs from the config that the user wrote.

        A value of None means that the key is removed.
        """
        lines = self._lines(layout)
        written = self._written.cluster.component_placement
        changed: dict[str, Any] = self.varied | {
            f"{PLACEMENT}.{name}": None for name in written if name not in lines
        }
        for component, line in lines.items():
            if written.get(component) != line:
                changed[f"{PLACEMENT}.{component}"] = line
        changed.update(self.model.mode_changes(layout.mode, self.now))
        sharing = self._sharing(layout)
        job = job_of(self.config)
        for component in sharing:
            key = f"{job.key_of(self.config, component)}.enable_offload"
            if self.plan.offload[component] is (component in layout.stays):
                changed[key] = component not in layout.stays
        stays = [
            c
            for c in self.config.cluster.allow_resident
            if c not in sharing or c in layout.stays
        ]
        stays += [c for c in layout.stays if c not in stays]
        if stays != [*self.config.cluster.allow_resident]:
            changed["cluster.allow_resident"] = stays
        return changed

    def _sharing(self, layout: Layout) -> list[str]:
        """Return the free components that share accelerators with another component."""
        on = self._held(layout)
        return [
            c for c in self.free if any(on[c] & on[other] for other in on if other != c)
        ]

    def _held(self, layout: Layout) -> dict[str, Ranges]:
        """Return component -> its accelerators in a layout."""
        on = {
            c: self.plan.placement.accelerators(c)
            for c in self.plan.placement.components
        }
        return on | {
            c: Ranges.of([range(at, at + layout.sizes[c].accelerators)])
            for c, at in layout.starts.items()
        }

    def at_once(
        self, layout: Layout, groups: Iterable[Collection[str]]
    ) -> tuple[tuple[str, str, int], ...]:
        """Return (a, b, distance) for each pair of components in the same group that share accelerators.

        `groups`: sets of components that work, or move, at the same time. The distance is the number of accelerators
        from the first accelerator of a to the first one of b.
        """
        on = self._held(layout)
        pairs = {
            pair
            for group in groups
            for pair in itertools.combinations(sorted(group), 2)
        }
        return tuple(
            (a, b, on[b].pieces[0].start - on[a].pieces[0].start)
            for a, b in sorted(pairs)
            if on[a] & on[b]
        )

    def _lines(self, layout: Layout) -> dict[str, Any]:
        """Return component -> its placement in a layout, as it is written in a config.

        A fixed component keeps the text of the config if this text still gives the same placement.
        """
        written = self.config.cluster.component_placement
        plain = self.plan.placement.canonical()
        # Lines with explicit numbers do not depend on other components.
        kept = {
            c: line
            for c, line in written.items()
            if not isinstance(line, Mapping) and "rest" not in str(line)
        }
        lines: dict[str, Any] = {}
        for component in self.plan.placement.components:
            if component not in layout.starts:
                lines[component] = kept.get(component, plain[component])
                continue
            start = layout.starts[component]
            size = layout.sizes[component]
            place = (
                start
                if size.accelerators == 1
                else show_range(range(start, start + size.accelerators))
            )
            # Within a block, `accelerators: 1` means a count.
            own: dict[str, Any] = {"placement": place}
            if size.each > 1:
                own["accelerators_per_rank"] = size.each
            if layout.mode.shared and component in self.model.pair:
                own["process"] = "shared"
            lines[component] = own if len(own) > 1 else place
            if component in kept and len(own) == 1 and plain[component] == str(place):
                lines[component] = kept[component]
        return lines

    def config_of(self, layout: Layout) -> Any:
        """Return the config of the space, changed to the placement and settings of a layout."""
        config = self.model.replaced(
            self.config, PLACEMENT.split("."), self._lines(layout)
        )
        for key, value in self.changes(layout).items():
            if not key.startswith(PLACEMENT):
                value = tuple(value) if isinstance(value, list) else value
                config = self.model.replaced(config, key.split("."), value)
        return config


def _movable(placement: HybridComponentPlacement, component: str) -> bool:
    """Return whether a search may change the place and size of a component.

    The search may change them if the component can be on all nodes and each rank has one accelerator. In rollout, each
    rank may also have several accelerators, if all ranks have the same number.
    """
    spec = placement.spec(component)
    each = {segment.accelerators_per_rank for segment in spec.segments}
    plain = spec.parallel.ranks == 1 and spec.node_group == WHOLE_CLUSTER
    alone = all(segment.ranks_per_accelerator == 1 for segment in spec.segments)
    return (
        plain and alone and (each == {1} or (component == "rollout" and len(each) == 1))
    )
