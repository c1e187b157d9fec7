"""The machines as the config declares them, or as this one is found; starts nothing and imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rlplace.config import AcceleratorConfig, ClusterConfig
from rlplace.errors import ClusterError, Problem, Source
from rlplace.placement.declare import declare_topology
from rlplace.placement.topology import Topology

EMULATED_PER_NODE = 8  # where `auto` finds no GPU


def detect_accelerators() -> int:
    """GPUs of this machine that this process may use, counted without torch and without starting anything."""
    found = sum(1 for _ in Path("/proc/driver/nvidia/gpus").glob("*")) or len(list(Path("/dev").glob("nvidia[0-9]*")))
    return visible_count(os.environ.get("CUDA_VISIBLE_DEVICES"), found)


def visible_count(visible: str | None, found: int) -> int:
    """How many of `found` GPUs CUDA_VISIBLE_DEVICES leaves: CUDA reads it up to the first that does not exist."""
    if visible is None:
        return found
    count = 0
    for name in map(str.strip, visible.split(",")):
        if not name or name.startswith("-") or (name.isdecimal() and int(name) >= found):
            break
        count += 1
    return min(count, found)


def declared_topology(config: ClusterConfig, sources: Mapping[str, Source] | None = None) -> Topology:
    """The machines as the config says; `auto` is filled in from this machine. Raises ClusterError, PlacementError.

    Machines declared one by one need not exist: whether they do, the launcher finds out.
    """
    if config.nodes:
        kind = "emulated" if config.accelerator.kind == "emulated" else "cuda"
        budget = config.accelerator.memory if kind == "emulated" else 0
        nodes = [dataclasses.replace(node, memory=node.memory or budget) for node in config.nodes]
        return declare_topology(nodes, kind, config.num_nodes if config.num_nodes > 1 else None, sources)
    return count_topology(
        config.num_nodes, config.accelerators_per_node, config.accelerator, local=config.ray.address is None
    )


def count_topology(
    num_nodes: int, accelerators_per_node: int | Literal["auto"], accelerator: AcceleratorConfig, *, local: bool
) -> Topology:
    """Nodes that are all alike. `local`: they are this machine, so it must have that many. Raises ClusterError."""
    found = detect_accelerators()
    kind = accelerator.kind
    if kind == "auto":
        kind = "cuda" if found else "emulated"
    count = accelerators_per_node
    if count == "auto":
        count = found if kind == "cuda" else EMULATED_PER_NODE
    if kind == "cuda" and (count == 0 or (local and count > found)):
        why = f"this machine has {found} GPU{'s' if found != 1 else ''} (CUDA_VISIBLE_DEVICES counts)"
        raise ClusterError(
            Problem(
                code="too-few-accelerators",
                key="cluster.accelerators_per_node",
                what=f"{count or 'some'} GPUs are asked for",
                got=str(accelerators_per_node),
                why=why,
                fix=f"cluster.accelerators_per_node={found}" if found else "cluster.accelerator.kind=emulated",
            )
        )
    return Topology.uniform(num_nodes, count, kind, accelerator.memory if kind == "emulated" else 0)
