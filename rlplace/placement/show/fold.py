"""Nodes that look alike folded into one, alike accelerators into bands: a plan for 1,000 nodes fits one page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import Segment
from rlplace.placement.machines.ranges import Ranges
from rlplace.placement.machines.topology import Node


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Neighbouring accelerators of a node that the same components use."""

    accelerators: range  # numbered within the node
    components: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFold:
    """Neighbouring nodes with the same components, in the same pattern, on the same local accelerators."""

    nodes: range
    accelerators: int  # of one node
    first: int  # global number of the first node's first accelerator
    first_rank: Mapping[str, int]  # component -> its lowest rank on the first node
    local: Mapping[str, tuple[Segment, ...]]  # component -> segments, numbered within the node and from its lowest rank

    @property
    def label(self) -> str:
        return f"node {self.nodes.start}" if len(self.nodes) == 1 else f"nodes {self.nodes.start}-{self.nodes.stop - 1}"

    def bands(self) -> list[Band]:
        used = {c: Ranges.of(s.accelerators for s in segments) for c, segments in self.local.items()}
        edges = {0, self.accelerators} | {e for r in used.values() for p in r.pieces for e in (p.start, p.stop)}
        ordered = sorted(edges)
        return [
            Band(accelerators=range(a, b), components=tuple(c for c, r in used.items() if a in r))
            for a, b in itertools.pairwise(ordered)
        ]


def fold_nodes(placement: HybridComponentPlacement) -> tuple[NodeFold, ...]:
    """All nodes in order. Linear in nodes x components and in segments."""
    waiting = {
        c: sorted(placement.spec(c).segments, key=lambda s: s.accelerators.start, reverse=True)
        for c in placement.components
    }
    folds: list[NodeFold] = []
    for node in placement.topology.nodes:
        fold = _fold(node, {c: _take(segments, node) for c, segments in waiting.items()})
        last = folds[-1] if folds else None
        if last is not None and (last.accelerators, last.local) == (fold.accelerators, fold.local):
            folds[-1] = dataclasses.replace(last, nodes=range(last.nodes.start, node.rank + 1))
        else:
            folds.append(fold)
    return tuple(folds)


def _fold(node: Node, segments: Mapping[str, list[Segment]]) -> NodeFold:
    first_rank = {c: min((s.ranks.start for s in found), default=0) for c, found in segments.items()}
    return NodeFold(
        nodes=range(node.rank, node.rank + 1),
        accelerators=node.accelerators,
        first=node.first,
        first_rank=first_rank,
        local={c: tuple(_shifted(s, node.first, first_rank[c]) for s in found) for c, found in segments.items()},
    )


def _take(waiting: list[Segment], node: Node) -> list[Segment]:
    """The parts of the next segments that lie on `node`; what goes on after it stays in `waiting`."""
    taken: list[Segment] = []
    while waiting and waiting[-1].accelerators.start < node.numbers.stop:
        segment = waiting.pop()
        here = min(segment.accelerators.stop, node.numbers.stop) - segment.accelerators.start
        # Nodes never cut a rank, so `here` is a whole number of ranks.
        ranks = here // segment.accelerators_per_rank * segment.ranks_per_accelerator
        taken.append(Segment(accelerators=segment.accelerators[:here], ranks=segment.ranks[:ranks]))
        if here < len(segment.accelerators):
            waiting.append(Segment(accelerators=segment.accelerators[here:], ranks=segment.ranks[ranks:]))
    return taken


def _shifted(segment: Segment, accelerator: int, rank: int) -> Segment:
    return Segment(
        accelerators=range(segment.accelerators.start - accelerator, segment.accelerators.stop - accelerator),
        ranks=range(segment.ranks.start - rank, segment.ranks.stop - rank),
    )
