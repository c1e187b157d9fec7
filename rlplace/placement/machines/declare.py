"""`cluster.nodes` -> topology: machines that need not exist, so that any cluster is planned on a laptop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlplace.config import NodeConfig
from rlplace.errors import PlacementError, Problem, Source, source_of
from rlplace.placement.machines.topology import Links, Node, Run, Topology

PATH = "cluster.nodes"


def declare_topology(
    nodes: Sequence[NodeConfig],
    kind: str = "cuda",
    num_nodes: int | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Topology:
    """The machines in the order of their ranks; without ranks, as written. Raises PlacementError.

    `kind` is how the accelerators will be driven: "cuda" or "emulated". `num_nodes`, where given, must be right.
    """
    places = sources or {}
    problems = _check_ranks(nodes, places) + _check_mixed(nodes, places) + _check_count(nodes, num_nodes, places)
    if problems:
        raise PlacementError(problems)
    ranked = nodes[0].rank is not None
    ordered = sorted(nodes, key=lambda n: n.rank or 0) if ranked else nodes
    made: list[Node] = []
    first = 0
    for declared in ordered:
        runs = tuple(Run(count=r.count, product=r.product, memory_bytes=r.memory) for r in declared.mixed)
        links = Links(
            nvlink_gb_per_s=declared.nvlink_gb_per_s,
            pcie_gb_per_s=declared.pcie_gb_per_s,
            network_gb_per_s=declared.network_gb_per_s,
        )
        accelerators = sum(r.count for r in runs) or declared.accelerators
        for i in range(declared.count):
            node = Node(
                rank=len(made),
                accelerators=accelerators,
                first=first,
                kind=kind,
                memory_bytes=min((r.memory_bytes for r in runs), default=declared.memory),
                host=declared.host if i == 0 else "",
                product=" + ".join(r.product for r in runs) if runs else declared.product,
                host_memory_bytes=declared.host_memory,
                links=links,
                runs=runs,
            )
            made.append(node)
            first += accelerators
    return Topology(tuple(made), "by the ranks given in cluster.nodes" if ranked else "as written in cluster.nodes")


def _check_ranks(nodes: Sequence[NodeConfig], sources: Mapping[str, Source]) -> list[Problem]:
    """Ranks on all entries or on none, and together 0, 1, 2, ..."""
    if all(n.rank is None for n in nodes):
        return []
    without = [i for i, n in enumerate(nodes) if n.rank is None]
    if without:
        why = "either every entry of cluster.nodes says its rank, or they are numbered as written"
        return [_ranks(f"{PATH}[{without[0]}]", "has no rank, others have one", why, "remove all ranks", sources)]
    following = 0
    for i, node in sorted(enumerate(nodes), key=lambda entry: entry[1].rank or 0):
        if node.rank != following:
            what = f"rank {node.rank} where {following} comes next"
            why = "node ranks are 0, 1, 2, ..., each once; an entry with a count takes that many"
            return [_ranks(f"{PATH}[{i}].rank", what, why, f"rank: {following}", sources)]
        following += node.count
    return []


def _check_mixed(nodes: Sequence[NodeConfig], sources: Mapping[str, Source]) -> list[Problem]:
    problems: list[Problem] = []
    for i, node in enumerate(nodes):
        total = sum(run.count for run in node.mixed)
        if node.mixed and node.accelerators not in (0, total):
            key = f"{PATH}[{i}].accelerators"
            problems.append(
                Problem(
                    code="mixed-count",
                    key=key,
                    what=f"says {node.accelerators}, mixed adds up to {total}",
                    got=f"accelerators: {node.accelerators}",
                    source=source_of(key, sources),
                    why="mixed lists all accelerators of the machine",
                    fix=f"accelerators: {total}",
                )
            )
    return problems


def _check_count(nodes: Sequence[NodeConfig], num_nodes: int | None, sources: Mapping[str, Source]) -> list[Problem]:
    total = sum(node.count for node in nodes)
    if num_nodes in (None, total):
        return []
    key = "cluster.num_nodes"
    return [
        Problem(
            code="node-count",
            key=key,
            what=f"says {num_nodes}, cluster.nodes declares {total}",
            got=f"num_nodes: {num_nodes}",
            source=source_of(key, sources),
            why="both count the machines of the cluster; cluster.nodes alone is enough",
            fix=f"num_nodes: {total}",
        )
    ]


def _ranks(key: str, what: str, why: str, fix: str, sources: Mapping[str, Source]) -> Problem:
    return Problem(code="node-ranks", key=key, what=what, source=source_of(key, sources), why=why, fix=fix)
