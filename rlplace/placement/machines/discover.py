"""Nodes as Ray lists them -> topology, as arithmetic on plain values; whoever talks to Ray hands the list over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.errors import PlacementError, Problem
from rlplace.placement.machines.topology import Node, Topology

RANK_LABEL = "rlplace-node-rank"  # `ray start --labels rlplace-node-rank=3`
HEAD = "node:__internal_head__"
_PRODUCT = "accelerator_type:"


def topology_of_ray(nodes: Sequence[Mapping[str, Any]], memory_bytes: int = 0) -> Topology:
    """The topology of what `ray.nodes()` returns; dead nodes do not count.

    `memory_bytes` is one accelerator's, which Ray does not know. Raises PlacementError.
    """
    alive, order = in_rank_order(nodes)
    made: list[Node] = []
    first = 0
    for rank, node in enumerate(alive):
        resources = _resources(node)
        count = int(resources.get("GPU", 0))
        products = sorted(key.removeprefix(_PRODUCT) for key in resources if key.startswith(_PRODUCT))
        made.append(
            Node(
                rank=rank,
                accelerators=count,
                first=first,
                kind="cuda" if count else "emulated",
                memory_bytes=memory_bytes if count else 0,
                host=str(node.get("NodeManagerHostname") or node.get("NodeManagerAddress", "")),
                labels=tuple(f"{k}={v}" for k, v in sorted(_labels(node).items())),
                product=products[0] if products else "",
                host_memory_bytes=int(resources.get("memory", 0)),
            )
        )
        first += count
    return Topology(tuple(made), order)


def in_rank_order(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The living nodes of `ray.nodes()`, node rank i at entry i, and the order in words. Raises PlacementError.

    Ranks are the labels `rlplace-node-rank` where nodes have them; else the head comes first, the others by address.
    """
    alive = [n for n in nodes if n.get("Alive", True)]
    if not alive:
        why = "a plan needs at least one machine"
        raise PlacementError([_problem("no-node", "Ray lists no living node", "[]", why, "ray start --head")])
    labels = [_labels(n).get(RANK_LABEL) for n in alive]
    if any(label is not None for label in labels):
        return _by_label(alive, labels), f"by the label {RANK_LABEL}"
    alive.sort(key=lambda n: (HEAD not in _resources(n), _numeric(str(n.get("NodeManagerAddress", ""))), _port(n)))
    return alive, "the head first, the others by address"


def _by_label(nodes: Sequence[Mapping[str, Any]], labels: Sequence[object]) -> list[Mapping[str, Any]]:
    ranks: dict[int, Mapping[str, Any]] = {}
    problems: list[Problem] = []
    for node, label in zip(nodes, labels, strict=True):
        host, text = str(node.get("NodeManagerAddress", "?")), str(label)
        fix = f"ray start ... --labels {RANK_LABEL}={len(ranks)}"
        if not text.isdecimal():
            why = "where one node has this label, all have it: a number each"
            problems.append(_problem("node-ranks", f"{host} has no rank", text, why, fix))
        elif int(text) >= len(nodes) or int(text) in ranks:
            why = f"the ranks of {len(nodes)} nodes are 0-{len(nodes) - 1}, each once"
            problems.append(_problem("node-ranks", f"{host} cannot have rank {text}", text, why, fix))
        else:
            ranks[int(text)] = node
    if problems:
        raise PlacementError(problems)
    return [ranks[rank] for rank in sorted(ranks)]


def _labels(node: Mapping[str, Any]) -> Mapping[str, object]:
    found: Mapping[str, object] = node.get("Labels") or {}
    return found


def _resources(node: Mapping[str, Any]) -> Mapping[str, float]:
    found: Mapping[str, float] = node.get("Resources") or {}
    return found


def _port(node: Mapping[str, Any]) -> int:
    return int(node.get("NodeManagerPort", 0))


def _numeric(address: str) -> tuple[int, tuple[int, ...], str]:
    parts = address.split(".")
    plain = all(p.isdecimal() for p in parts)
    return (0, tuple(map(int, parts)), "") if plain else (1, (), address)


def _problem(code: str, what: str, got: str, why: str, fix: str) -> Problem:
    return Problem(code=code, key="ray.address", what=what, got=got, why=why, fix=fix)
