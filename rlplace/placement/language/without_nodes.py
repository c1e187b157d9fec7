"""The `cluster` block of a job that has lost nodes: the rest of each placement, numbered over the other nodes.

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

from rlplace.placement.language.group_blocks import PATH, read_nodes
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import ComponentSpec, Segment, parts
from rlplace.placement.language.text import write
from rlplace.placement.machines.pools import WHOLE_CLUSTER
from rlplace.placement.machines.topology import Ranges, Topology

# Placements of components that have lost all ranks, in the order in which they are tried.
AGAIN = ("rest", "all")


def without_nodes(
    cluster: Mapping[str, Any],
    placement: HybridComponentPlacement,
    lost: Collection[int],
    again: str = AGAIN[0],
) -> dict[str, Any]:
    """Return the `cluster` block of a job for the nodes that are left after some were lost.

    Whether the new placements fit is not checked. `cluster`: the block before the loss. `placement`: the placement
    before the loss. `lost`: indices of the lost nodes. `again`: the placement text, "rest" or "all", for components
    that have lost all ranks.
    """
    left = dict(cluster)
    topology = placement.topology
    placements = {}
    for name in placement.components:
        placements[name] = _left_of(placement, name, lost, again)
    left["component_placement"] = placements
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
    """Return the components that have lost all ranks and so have to be placed again.

    `lost`: numbers of the lost nodes.
    """
    names = []
    for name in placement.components:
        if not ranks_left(placement.spec(name), lost):
            names.append(name)
    return names


def _left_of(
    placement: HybridComponentPlacement,
    component: str,
    lost: Collection[int],
    again: str,
) -> str | dict[str, object]:
    """Return the placement of a component on the nodes that are left, as a value for the config.

    `lost`: numbers of the lost nodes. `again`: the placement text for a component that has lost all ranks; a component
    of a node group gets the whole group instead. If a component without accelerators has lost all processes, they are
    placed on the first node.
    """
    spec = placement.spec(component)
    # Of several groups, those that have a node left.
    labels = []
    for label in spec.node_group.split(","):
        if not placement.node_groups[label].nodes <= set(lost):
            labels.append(label)
    if labels:
        pool = dataclasses.replace(spec.pool, label=",".join(labels))
        spec = dataclasses.replace(spec, pool=pool)

    segments = ranks_left(spec, lost)
    if not segments and not spec.pool.holds_accelerators:
        # Processes on hosts: now of the first node.
        segments = (Segment(accelerators=range(1), ranks=range(spec.world_size)),)
    if segments:
        return dataclasses.replace(spec, written=segments).canonical()

    # All ranks are lost: placed again, with ranks of the same size.
    written = spec.canonical()
    block: dict[str, object] = {}
    if isinstance(written, dict):
        block = dict(written)
    block["placement"] = "all"
    if spec.node_group == WHOLE_CLUSTER:
        block["placement"] = again
    shape = spec.written[0]
    if shape.accelerators_per_rank > 1:
        block["accelerators_per_rank"] = shape.accelerators_per_rank
    elif shape.ranks_per_accelerator > 1:
        block["ranks_per_accelerator"] = shape.ranks_per_accelerator
    return block


def ranks_left(
    spec: ComponentSpec, lost: Collection[int], *, renumbered: bool = True
) -> tuple[Segment, ...]:
    """Return the segments of a component on the nodes that are left.

    A segment is a piece `accelerators:ranks` of a placement text. Ranks are numbered anew, without gaps; accelerators
    too, unless `renumbered` is False. `lost`: numbers of the lost nodes.
    """
    lost_intervals = [i for i in spec.pool.intervals if i.node in lost]
    gone = Ranges.of(interval.numbers for interval in lost_intervals)
    kept: list[Segment] = []
    # The next rank
    following = 0
    for segment in sorted(spec.written, key=lambda s: s.ranks.start):
        for interval, numbers in parts(segment, spec.pool):
            if interval.node in lost:
                continue
            count = len(segment.cut_to(numbers).ranks)
            ranks = range(following, following + count)
            start = numbers.start
            if renumbered:
                # Numbers below that are gone leave a gap, which is closed.
                start -= len(gone.within(range(numbers.start)))
            moved = range(start, start + len(numbers))
            kept.append(Segment(accelerators=moved, ranks=ranks))
            following = ranks.stop
    return tuple(kept)


def _machines(
    nodes: list[Mapping[str, Any]], lost: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Yield the entries of `cluster.nodes` that have nodes left, in the order of their nodes, without the key `rank`.

    `nodes`: the entries before the loss. `lost`: numbers of the lost nodes.
    """
    first = 0
    for node in sorted(nodes, key=lambda node: node.get("rank") or 0):
        ranks = range(first, first + int(node.get("count") or 1))
        first = ranks.stop
        count = len(set(ranks) - set(lost))
        if not count:
            continue
        entry = {key: value for key, value in node.items() if key != "rank"}
        if len(ranks) > 1:
            entry["count"] = count
        yield entry


def _groups(
    groups: list[Mapping[str, Any]], topology: Topology, lost: Collection[int]
) -> Iterator[dict[str, Any]]:
    """Yield the entries of `cluster.node_groups` that have nodes left, with the new numbers of their nodes.

    A group that has lost all of its hardware is left out. `lost`: numbers of the lost nodes.
    """
    for group in groups:
        entry = dict(group)
        if not _renumber(entry, "node_ranks", topology, lost):
            continue
        envs = [dict(env) for env in entry.get("env_configs") or ()]
        if envs:
            # An entry without nodes of its own is for all nodes of the group.
            entry["env_configs"] = [
                env
                for env in envs
                if "node_ranks" not in env
                or _renumber(env, "node_ranks", topology, lost)
            ]
        hardware = entry.get("hardware")
        if hardware:
            items = []
            for item in hardware["configs"]:
                renumbered = dict(item)
                if _renumber(renumbered, "node_rank", topology, lost):
                    items.append(renumbered)
            if not items:
                continue
            entry["hardware"] = {**hardware, "configs": items}
        yield entry


def _renumber(
    block: dict[str, Any], key: str, topology: Topology, lost: Collection[int]
) -> bool:
    """Replace the nodes in `block[key]` by the new numbers of those that are left. Return whether any node is left.

    `lost`: numbers of the lost nodes.
    """
    written = write(block[key], PATH, key, {})
    nodes = read_nodes(written, topology, []) or Ranges()
    gone = Ranges.of(range(node, node + 1) for node in lost)
    left = [node - len(gone.within(range(node))) for node in nodes - gone]
    block[key] = str(Ranges.of(range(node, node + 1) for node in left))
    if left and key == "node_rank":
        # A single node, as a number
        block[key] = left[0]
    return bool(left)
