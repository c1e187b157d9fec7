"""The machines as the config declares them, or as this one is found; imports nothing heavy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from rlplace.config import AcceleratorConfig, ClusterConfig
from rlplace.errors import ClusterError, Problem, Source
from rlplace.placement.machines.nodes import declare_topology
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.gpus import Gpu, list_gpus, runs_of, visible

EMULATED_PER_NODE = 8  # where `auto` finds no GPU


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine that this process may use; starts nvidia-smi, and waits for it for `gpus.LIST_S`."""
    return visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def detect_accelerators() -> int:
    """GPUs of this machine that this process may use."""
    return len(visible_gpus())


def declared_topology(config: ClusterConfig, sources: Mapping[str, Source] | None = None) -> Topology:
    """The machines of the config; `auto` is filled in from this machine. Raises ClusterError, PlacementError.

    Machines declared one by one need not exist: the launcher checks them.
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
    """Nodes that are all alike. `local`: they are this machine, so it must have that many. Raises ClusterError.

    Counted GPUs have the products and memory of this machine's; of another cluster's, none is known.
    """
    kind = accelerator.kind
    gpus = () if kind == "emulated" else visible_gpus()
    found = len(gpus)
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
    if kind == "emulated":
        return Topology.uniform(num_nodes, count, kind, accelerator.memory)
    topology = Topology.uniform(num_nodes, count, kind)
    return _like(topology, gpus[:count]) if local or accelerators_per_node == "auto" else topology


def _like(topology: Topology, gpus: Sequence[Gpu]) -> Topology:
    """The same nodes, each with these GPUs."""
    runs = runs_of(gpus)
    product = " + ".join(run.product for run in runs if run.product)
    least, mixed = min(run.memory_bytes for run in runs), runs if len(runs) > 1 else ()
    return Topology(
        tuple(dataclasses.replace(n, product=product, memory_bytes=least, runs=mixed) for n in topology.nodes)
    )
