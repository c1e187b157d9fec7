"""The `cluster` block of a job that has lost nodes: what is left of each placement, in the numbers of what is left.

::

    4 nodes of 2, node 1 is lost      accelerators 0 1 | 2 3 | 4 5 | 6 7    ->    0 1 | 2 3 | 4 5
      actor: 0-7                      0-5        its ranks there are gone
      env: 4-5                        2-3        it stays where it is
      rollout: 2-3                    nothing is left: placed again, see `AGAIN`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlplace.placement.language.groups import PATH, read_nodes
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment, parts
from rlplace.placement.language.text import Text
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.topology import Ranges, Topology

# Where components go of which nothing is left, in the order in which it is tried.
AGAIN = ("rest", "all")


def without_nodes(
    cluster: Mapping[str, Any],
    placement: HybridComponentPlacement,
    lost: Collection[int],
    again: str = AGAIN[0],
) -> dict[str, Any]:
    """Return the block for the nodes that are left. It may place what does not fit there, as any config may."""
    left = dict(cluster)
    topology = placement.topology
    left["component_placement"] = {
        name: _left_of(placement, name, lost, again) for name in placement.components
    }
    if int(cluster.get("num_nodes") or 1) > 1:
        left["num_nodes"] = topology.num_nodes - len(lost)
    if cluster.get("nodes"):
        left["nodes"] = list(_machines(cluster["nodes"], lost))
    if cluster.get("node_groups"):
        left["node_groups"] = list(_groups(cluster["node_groups"], topology, lost))
    return left


def placed_again(
    placement: HybridComponentPlacement, lost: Collection[int]
) -> list[str]:
    """Return the components of which nothing is left."""
    return [
        name
        for name in placement.components
        if not _ranks_left(placement.spec(name), lost)
    ]


def _left_of(
    placement: HybridComponentPlacement,
    component: str,
    lost: Collection[int],
    again: str,
) -> str | dict[str, object]:
    spec = placement.spec(component)
    labels = [
        label
        for label in spec.node_group.split(",")
        if not placement.node_groups[label].nodes <= set(lost)
    ]
    if labels:  # of several groups, those of which something is left
        spec = dataclasses.replace(
            spec, pool=dataclasses.replace(spec.pool, label=",".join(labels))
        )
    segments = _ranks_left(spec, lost)
    if (
        not segments and not spec.pool.holds_accelerators
    ):  # processes on hosts: now of the first node
        segments = (Segment(accelerators=range(1), ranks=range(spec.world_size)),)
    if segments:
        return dataclasses.replace(spec, written=segments).canonical()
    written, shape = spec.canonical(), spec.written[0]
    block = dict(written) if isinstance(written, dict) else {}
    block["placement"] = (
        again if spec.node_group == WHOLE_CLUSTER else "all"
    )  # of its group nothing may be left
    if shape.accelerators_per_rank > 1:
        block["accelerators_per_rank"] = shape.accelerators_per_rank
    elif shape.ranks_per_accelerator > 1:
        block["ranks_per_accelerator"] = shape.ranks_per_accelerator
    return block


def _ranks_left(spec: ComponentSpec, lost: Collection[int]) -> tuple[Segment, ...]:
    """Return the segments on other nodes, with ranks and numbers of the pool counted anew."""
    gone = Ranges.of(
        interval.numbers for interval in spec.pool.intervals if interval.node in lost
    )
    kept: list[Segment] = []
    ranks = 0
    for segment in sorted(spec.written, key=lambda s: s.ranks.start):
        for interval, numbers in parts(segment, spec.pool):
            if interval.node not in lost:
                count = len(segment.cut_to(numbers).ranks)
                start = numbers.start - len(gone.within(range(numbers.start)))
                moved = range(start, start + len(numbers))
                kept.append(
                    Segment(accelerators=moved, ranks=range(ranks, ranks + count))
                )
                ranks += count
    return tuple(kept)


def _machines(
    nodes: list[Mapping[str, Any]], lost: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Yield the entries of `cluster.nodes` in the order of their ranks, without ranks of their own."""
    first = 0
    for node in sorted(nodes, key=lambda node: node.get("rank") or 0):
        ranks = range(first, first + int(node.get("count") or 1))
        first = ranks.stop
        count = len(set(ranks) - set(lost))
        entry = {key: value for key, value in node.items() if key != "rank"}
        if count:
            yield entry | ({"count": count} if len(ranks) > 1 else {})


def _groups(
    groups: list[Mapping[str, Any]], topology: Topology, lost: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Yield the node groups of which something is left."""
    for group in groups:
        entry = dict(group)
        if not _renumber(entry, "node_ranks", topology, lost):
            continue
        envs = [dict(env) for env in entry.get("env_configs") or ()]
        if envs:
            entry["env_configs"] = [
                e
                for e in envs
                if "node_ranks" not in e or _renumber(e, "node_ranks", topology, lost)
            ]
        if hardware := entry.get("hardware"):
            items = [dict(item) for item in hardware["configs"]]
            items = [
                item for item in items if _renumber(item, "node_rank", topology, lost)
            ]
            if not items:
                continue
            entry["hardware"] = {**hardware, "configs": items}
        yield entry


def _renumber(
    block: dict[str, Any], key: str, topology: Topology, lost: Collection[int]
) -> bool:
    """Write the nodes of `block[key]` in their new numbers; False where none of them is left."""
    nodes = read_nodes(Text.of(block[key], PATH, key, {}, []), topology) or Ranges()
    gone = Ranges.of(range(node, node + 1) for node in lost)
    left = [node - len(gone.within(range(node))) for node in nodes - gone]
    ranges = Ranges.of(range(node, node + 1) for node in left)
    block[key] = left[0] if left and key == "node_rank" else str(ranges)
    return bool(left)
