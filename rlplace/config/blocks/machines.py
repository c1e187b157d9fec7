"""The config block `cluster` and the blocks in it: machines, Ray, and the network between machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import block, knob

# Larger numbers are typing mistakes: the largest known clusters have 100,000 to 250,000 accelerators, 8 in a machine.
MOST_NODES = 32_768
MOST_PER_NODE = 1_024
# Why and fix of the error about 0 accelerators of a machine
_WITHOUT = (
    "machines without accelerators are declared one by one; components on them are placed by cpu or a node group",
    "cluster.nodes: [{accelerators: 0}]        (in place of accelerators_per_node)",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorConfig:
    kind: Literal["auto", "cuda", "emulated"] = knob(
        "auto: the GPUs of this machine, or else emulated accelerators", "auto"
    )
    memory: int = knob(
        "bytes of one emulated accelerator; not used for GPUs",
        16 << 30,
        unit="bytes",
    )
    emulated_per_node: int = knob(
        "emulated accelerators of a machine, if accelerators_per_node is auto",
        8,
        minimum=1,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    address: str | None = knob(
        "null starts Ray here; host:port joins a cluster, auto that of RAY_ADDRESS or `ray start`",
        None,
    )
    machines: bool = knob(
        "plan for the machines of the cluster at address, instead of declared ones",
        False,
    )
    start: Literal["fork", "plain"] = knob(
        "fork: a process of each node imports what workers need, and these are forks of it; plain: each imports it",
        "fork",
    )
    start_timeout_s: float = knob(
        "largest number of seconds for the start of Ray and of all workers",
        1800.0,
        above=0,
        simulator=120.0,
    )
    reserve_timeout_s: float = knob(
        "largest number of seconds to wait for free accelerators in the cluster",
        60.0,
        above=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """Settings for the transport of data and weights: shared memory on a node, network between nodes."""

    shm_folder: str | None = knob(
        "folder of shared memory, on every node; null: /dev/shm", None
    )
    interface: str | None = knob(
        "address or network interface for connections from other nodes; null: the node's Ray address",
        None,
    )
    security: Literal["encrypted", "password"] = knob(
        "protection of traffic between nodes; password: without encryption, for networks of the cluster only",
        "encrypted",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorRunConfig:
    """Neighbouring accelerators of the same kind, on a node with several kinds of accelerators.

    `product`: their model, such as H100. `memory`: bytes of one accelerator; 0: the memory of its model, if that is
    known.
    """

    count: int = knob(
        "number of these accelerators, which have consecutive numbers",
        minimum=1,
        maximum=MOST_PER_NODE,
    )
    product: str = knob("product name, such as H100", "")
    memory: int = knob(
        "bytes of one accelerator; 0: those of its product, if it is known",
        0,
        unit="bytes",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One or more equal machines, as the config declares them.

    `product`: model of the accelerators. `mixed`: runs of equal accelerators, given in place of `accelerators`,
    `product` and `memory` if the accelerators of a machine differ. Rates are in gigabytes per second.
    """

    count: int = knob("how many machines", 1, minimum=1, maximum=MOST_NODES)
    rank: int | None = knob(
        "node rank of the first machine of this entry; null: in the order of the entries",
        None,
        minimum=0,
    )
    accelerators: int = knob(
        "accelerators of one machine", 0, minimum=0, maximum=MOST_PER_NODE
    )
    product: str = knob(
        "product name of the accelerators, such as H100 or A100-80GB", ""
    )
    memory: int = knob(
        "bytes of one accelerator; 0: those of its product, if it is known",
        0,
        unit="bytes",
    )
    mixed: tuple[AcceleratorRunConfig, ...] = knob(
        "used instead of accelerators, product and memory, if the accelerators of a machine differ",
        (),
    )
    host_memory: int = knob(
        "bytes of the machine's own memory; 0: not known", 0, unit="bytes"
    )
    nvlink_gb_per_s: float = knob(
        "rate between two accelerators of the machine, in each direction; 0: not known",
        0.0,
        minimum=0,
    )
    pcie_gb_per_s: float = knob(
        "rate between an accelerator and the machine's memory; 0: not known",
        0.0,
        minimum=0,
    )
    network_gb_per_s: float = knob(
        "rate to other machines, for each accelerator; 0: not known", 0.0, minimum=0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeConfig:
    """A change of the placement while the run goes on, between two iterations."""

    after: int = knob("iterations after which the components move", minimum=1)
    component_placement: Mapping[str, object] = knob(
        "new places of components; those that are not named stay where they are"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """A search for better placements while the run goes on. A plain word stands for the block with this mode."""

    mode: Literal["off", "advise", "on"] = knob(
        "advise: print better placements; on: also change to them, and go back where that was wrong",
        "off",
    )
    warmup: int = knob("iterations before the first search", 10, minimum=4)
    every: int = knob("iterations from a search to the next one", 20, minimum=1)
    pay_back: int = knob(
        "largest number of iterations until a change has saved more time than it took",
        50,
        minimum=1,
    )
    share: float = knob(
        "largest share of a core that a search uses", 0.25, above=0, maximum=1
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    component_placement: Mapping[str, object] = knob(
        "the placement of each component: the accelerators that it uses, such as actor: 0-7"
    )
    nodes: tuple[NodeConfig, ...] = knob(
        "an entry for each kind of machine; without entries, all machines are alike", ()
    )
    node_groups: tuple[Mapping[str, object], ...] = knob(
        "groups of nodes, each with a label, hardware and environment variables", ()
    )
    env_vars: Mapping[str, object] = knob(
        "environment variables of all workers, by name; null: the run's own value, also for secrets",
        dict,
    )
    num_nodes: int = knob("machines in the cluster", 1, minimum=1, maximum=MOST_NODES)
    accelerators_per_node: int | Literal["auto"] = knob(
        "auto counts the GPUs of this machine",
        "auto",
        minimum=1,
        maximum=MOST_PER_NODE,
        zero=_WITHOUT,
    )
    accelerator: AcceleratorConfig = block(AcceleratorConfig)
    allow_resident: tuple[str, ...] = knob(
        "components that may stay on accelerators others use", ()
    )
    shared: bool = knob(
        "other runs use the accelerators in turns: what has enable_offload leaves them while it does not work",
        False,
    )
    lend: Mapping[str, str | None] = knob(
        "component -> the one that works on its accelerators while it waits, such as actor: rollout; null: none",
        dict,
    )
    changes: tuple[ChangeConfig, ...] = knob(
        "changes of the placement during the run, in the order of iterations", ()
    )
    elastic: ElasticConfig = block(ElasticConfig, word="mode")
    launcher: Literal["ray", "inline"] = knob(
        "ray: processes; inline: threads of this process, for debugging", "ray"
    )
    ray: RayConfig = block(RayConfig)
    comm: CommConfig = block(CommConfig)
