"""Nodes declared in `cluster.nodes` -> topology; nodes as Ray lists them -> the same order.

Declared machines need not exist, so that any cluster is planned on a laptop. Both are arithmetic on plain values: the
caller reads the config and talks to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.config.schema import NodeConfig
from rlplace.errors import PlacementError, Problem, Source, source_of
from rlplace.placement.machines.topology import Node, Run, Topology

PATH = "cluster.nodes"
RANK_LABEL = "rlplace-node-rank"  # `ray start --labels rlplace-node-rank=3`
HEAD = "node:__internal_head__"


def declare_topology(
    nodes: Sequence[NodeConfig],
    kind: str = "cuda",
    num_nodes: int | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Topology:
    """Return the machines in the order of their ranks; without ranks, as written. Raises PlacementError.

    `kind` is how the accelerators will be driven: "cuda" or "emulated". `num_nodes`, where given, must be right.
    """
    problems = _check(nodes, num_nodes, sources or {})
    if problems:
        raise PlacementError(problems)
    ranked = nodes[0].rank is not None
    made: list[Node] = []
    for declared in sorted(nodes, key=lambda n: n.rank or 0):
        runs = tuple(Run(count=r.count, product=r.product, memory_bytes=r.memory) for r in declared.mixed)
        for i in range(declared.count):
            node = Node(
                rank=len(made),
                accelerators=sum(r.count for r in runs) or declared.accelerators,
                first=made[-1].numbers.stop if made else 0,
                kind=kind,
                memory_bytes=min((r.memory_bytes for r in runs), default=declared.memory),
                host=declared.host if i == 0 else "",
                product=" + ".join(r.product for r in runs) or declared.product,
                host_memory_bytes=declared.host_memory,
                pcie_gb_per_s=declared.pcie_gb_per_s,
                runs=runs,
            )
            made.append(node)
    return Topology(tuple(made), "by the ranks given in cluster.nodes" if ranked else "as written in cluster.nodes")


def _check(nodes: Sequence[NodeConfig], num_nodes: int | None, sources: Mapping[str, Source]) -> list[Problem]:
    """Return the problems of ranks, of mixed accelerators and of the number of nodes."""
    problems: list[Problem] = []

    def reject(code: str, key: str, what: str, why: str, fix: str, got: str | None = None) -> None:
        source = source_of(key, sources)
        problems.append(Problem(code=code, key=key, what=what, got=got, source=source, why=why, fix=fix))

    without = [i for i, n in enumerate(nodes) if n.rank is None]
    if 0 < len(without) < len(nodes):
        why = "either every entry of cluster.nodes has a rank, or they are numbered as written"
        reject("node-ranks", f"{PATH}[{without[0]}]", "has no rank, others have one", why, "remove all ranks")
    following = 0
    for i, node in sorted(enumerate(nodes), key=lambda entry: entry[1].rank or 0) if not without else ():
        if node.rank != following:
            what, fix = f"rank {node.rank} where {following} comes next", f"rank: {following}"
            why = "node ranks are 0, 1, 2, ..., each once; an entry with a count takes that many"
            reject("node-ranks", f"{PATH}[{i}].rank", what, why, fix)
            break
        following += node.count
    for i, node in enumerate(nodes):
        count, total = node.accelerators, sum(run.count for run in node.mixed)
        if node.mixed and count not in (0, total):
            what, why = f"is {count}, mixed adds up to {total}", "mixed lists all accelerators of the machine"
            key = f"{PATH}[{i}].accelerators"
            reject("mixed-count", key, what, why, f"accelerators: {total}", f"accelerators: {count}")
    total = sum(node.count for node in nodes)
    if num_nodes not in (None, total):
        what, why = f"is {num_nodes}, cluster.nodes declares {total}", "both count machines; cluster.nodes is enough"
        reject("node-count", "cluster.num_nodes", what, why, f"num_nodes: {total}", f"num_nodes: {num_nodes}")
    return problems


def in_rank_order(nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the living nodes of `ray.nodes()`, node rank i at entry i. Raises PlacementError.

    Ranks are the labels `rlplace-node-rank` where nodes have them; else the head comes first, the others by address.
    """
    alive = [n for n in nodes if n.get("Alive", True)]
    problems: list[Problem] = []

    def reject(code: str, what: str, got: str, why: str, fix: str) -> None:
        problems.append(Problem(code=code, key="ray.address", what=what, got=got, why=why, fix=fix))

    if not alive:
        reject("no-node", "Ray lists no living node", "[]", "a plan needs at least one machine", "ray start --head")
    labels = [(n.get("Labels") or {}).get(RANK_LABEL) for n in alive]
    ranks: dict[int, Mapping[str, Any]] = {}
    for node, label in zip(alive, map(str, labels), strict=True) if any(x is not None for x in labels) else ():
        if label.isdecimal() and int(label) < len(alive) and int(label) not in ranks:
            ranks[int(label)] = node
            continue
        what = f"{node.get('NodeManagerAddress', '?')} cannot have rank {label}"
        why = f"where one node has this label, all have it: a number of 0-{len(alive) - 1}, each once"
        reject("node-ranks", what, label, why, f"ray start ... --labels {RANK_LABEL}={len(ranks)}")
    if problems:
        raise PlacementError(problems)

    def head_first(node: Mapping[str, Any]) -> tuple[bool, bool, tuple[int, ...], str, int]:
        address = str(node.get("NodeManagerAddress", ""))
        numbers = tuple(int(part) for part in address.split(".") if part.isdecimal())
        named = len(numbers) < address.count(".") + 1  # host names come after numeric addresses
        head = HEAD in (node.get("Resources") or {})
        return not head, named, () if named else numbers, address, int(node.get("NodeManagerPort", 0))

    return [ranks[rank] for rank in sorted(ranks)] if ranks else sorted(alive, key=head_first)
