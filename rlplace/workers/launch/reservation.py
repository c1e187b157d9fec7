"""What a job uses on real machines: resources per node, processes and visible GPUs; checks for what is missing.

CUDA_VISIBLE_DEVICES of a worker is decided here (`NodeUse.visible_ids`) and set by RayHost before anything imports
torch. The report of a started process shows which node it is on, and that nothing there changed the variable;
CudaDevice compares the UUID of the GPU that CUDA shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlplace.codes import problem
from rlplace.errors import ClusterError
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.host import GroupSpec
from rlplace.workers.launch.machines import Gpu, visible

VISIBLE = "CUDA_VISIBLE_DEVICES"
BUNDLE_CPUS = 0.01  # of a node's reservation without GPUs; the actors in it ask for none (RayLauncher._process)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A living node of the Ray cluster.

    `id`: Ray's id of the node. `address`: IP address of the node. `total`: resource name -> amount on this node, both
    used and free.
    """

    id: str
    address: str
    total: Mapping[str, float]  # resources

    @property
    def product(self) -> str:
        """Product name of the machine's accelerators, if Ray reports it, else an empty text."""
        return next(
            (
                name.partition(":")[2]
                for name in self.total
                if name.startswith("accelerator_type:")
            ),
            "",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    node: int
    accelerators: tuple[int, ...]  # numbered within the node, ascending
    kind: str
    # Known once reserved: the GPU id of each accelerator; empty if emulated.
    ids: Mapping[int, str] = dataclasses.field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()  # all GPUs of the node, as nvidia-smi lists them there

    @property
    def resource(self) -> tuple[str, float]:
        gpus = len(self.accelerators) if self.kind == "cuda" else 0
        if gpus:
            return ("GPU", float(gpus))
        return ("CPU", BUNDLE_CPUS)

    def lack(self, has: Mapping[str, float]) -> str | None:
        kind, needed = self.resource
        if has.get(kind, 0) >= needed:
            return None
        return f"needs {needed:g} {kind}, has {has.get(kind, 0):g}"

    def visible_ids(self, slot: Slot) -> tuple[str, ...]:
        return tuple(self.ids[n] for n in visible_to(slot) if self.ids)

    def uuids(self, slot: Slot) -> tuple[str, ...]:
        """Return the UUIDs of the slot's GPUs, followed by the UUIDs of the node's other GPUs.

        Return an empty tuple if the UUID of one of the slot's GPUs is unknown.
        """
        own = (
            [
                gpu
                for n in slot.local_accelerators
                for gpu in visible(self.gpus, self.ids[n])[:1]
            ]
            if self.ids
            else []
        )
        if not own or not all(gpu.uuid for gpu in own):
            return ()
        return tuple(
            gpu.uuid for gpu in (*own, *(gpu for gpu in self.gpus if gpu not in own))
        )


def visible_to(slot: Slot) -> tuple[int, ...]:
    """Return the accelerators that the worker at `slot` can see, by their numbers within the node."""
    return slot.visible_accelerators or slot.local_accelerators


def node_uses(slots: Sequence[Slot] | None, topology: Topology) -> dict[int, NodeUse]:
    """Return the accelerators that `slots` use, by node rank in ascending order.

    Nodes without slots are left out. `slots`: None means all accelerators of all nodes.
    """
    used: dict[int, set[int]] = {}
    if slots is None:
        used = {node.rank: set(range(node.accelerators)) for node in topology.nodes}
    for slot in slots or ():
        used.setdefault(slot.node, set()).update(visible_to(slot))
    return {
        n: NodeUse(
            node=n, accelerators=tuple(sorted(used[n])), kind=topology.nodes[n].kind
        )
        for n in sorted(used)
    }


def check_reserved(slots: Sequence[Slot], reserved: Mapping[int, NodeUse]) -> None:
    """Raise ClusterError if a slot uses a node or an accelerator that is not reserved.

    `reserved`: node rank -> reserved accelerators; the first launch of the cluster has reserved them.
    """
    for slot in slots:
        if slot.node not in reserved or not set(visible_to(slot)) <= set(
            reserved[slot.node].accelerators
        ):
            raise ClusterError(
                problem(
                    "not-reserved",
                    slot.owner,
                    ",".join(map(str, visible_to(slot))) or "no accelerator",
                    node=slot.node,
                )
            )


def check_size(
    needed: Mapping[int, NodeUse], machines: Sequence[Machine], address: str
) -> None:
    """Raise ClusterError if the cluster has too few nodes, GPUs or CPUs for the job, even if no other job used them.

    `needed`: node rank -> needed accelerators. `machines`: the machines of the cluster, by node rank. `address`: the
    cluster's address, for errors.
    """
    nodes = len(machines)
    most = max(needed, default=0) + 1
    if most > nodes:
        raise ClusterError(
            problem(
                "cluster-too-small",
                "cluster.num_nodes",
                str(most),
                error="nodes",
                last=most - 1,
                there=_count(nodes, "node"),
                address=address,
                listed=", ".join(
                    f"node {i}: {m.address}" for i, m in enumerate(machines)
                ),
                nodes=nodes,
                lacking=_count(most - nodes, "node"),
            )
        )
    for node, use in needed.items():
        lack = use.lack(machines[node].total)
        if lack is not None:
            accelerators = ",".join(map(str, use.accelerators))
            gpus = int(machines[node].total.get("GPU", 0))
            error = "without-gpu"
            if gpus:
                error = "node"
            small = problem(
                "cluster-too-small",
                "cluster.accelerators_per_node",
                lack,
                error=error,
                node=node,
                address=machines[node].address,
                accelerators=accelerators,
                gpus=gpus,
            )
            raise ClusterError(small)


def not_free(
    needed: Mapping[int, NodeUse],
    machines: Sequence[Machine],
    free: Mapping[str, Mapping[str, float]],
    waited_s: float,
) -> ClusterError:
    """Return the error for a reservation that was not granted in time. Its text lists what is not free on each node.

    `needed`: node rank -> needed accelerators. `machines`: the machines of the cluster, by node rank. `free`: machine
    id -> resources that are free now. `waited_s`: duration of the wait in seconds.
    """
    lacks = {
        node: use.lack(free.get(machines[node].id, {})) for node, use in needed.items()
    }
    lines = [
        f"node {node} ({machines[node].address}): {lack}"
        for node, lack in lacks.items()
        if lack is not None
    ]
    return ClusterError(
        problem(
            "reserve-timeout",
            "cluster",
            "\n".join(lines) or "all of it is free now",
            waited_s=waited_s,
        )
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    machine: str  # id of the node it runs on
    host: str
    pid: int
    visible: tuple[str, ...]  # ids of the GPUs it can see
    address: str = ""  # of the rendezvous that the process opened
    port: int = 0
    master_port: int = 0  # MASTER_PORT, kept free beside the rendezvous
    weights_port: int = 0  # of the store for weight syncs between accelerators
    forked: bool = False  # from a template process
    socket: Path | None = None  # where the worker takes requests


def check_place(
    slot: Slot, machine: Machine, use: NodeUse, report: WorkerReport
) -> None:
    """Raise ClusterError if a worker runs on a different machine than planned, or sees different GPUs than planned.

    `slot`: slot of the worker. `machine`: the planned machine. `use`: the reserved accelerators on the planned machine.
    `report`: report of the worker's process.
    """
    visible = use.visible_ids(slot)
    elsewhere = report.machine != machine.id
    if elsewhere or report.visible != visible:
        error = "accelerators"
        if elsewhere:
            error = "node"
        misplaced = problem(
            "worker-misplaced",
            slot.owner,
            f"node {report.machine[:8]} ({report.host}), visible {_names(report.visible)}",
            error=error,
            node=slot.node,
            machine=machine.id[:8],
            visible=_names(visible),
            variable=VISIBLE,
        )
        raise ClusterError(misplaced)


def _names(ids: Iterable[object]) -> str:
    return ",".join(map(str, ids)) or "none"


def rendezvous_host(reserved: Mapping[int, NodeUse]) -> str:
    """Return the address at which rank 0 of each group listens: 127.0.0.1 if the job has one node, else an empty text.

    An empty text stands for the address of rank 0's node. `reserved`: node rank -> reserved accelerators.
    """
    if len(reserved) == 1:
        return "127.0.0.1"
    return ""


# ── processes that several workers share ─────────────────────────────────────────────────────────────────────────────


def processes(slots: Iterable[Slot]) -> list[tuple[Slot, ...]]:
    """Return for each process the slots of the workers that live in it. The processes are in the order of their first
    slots.
    """
    found: dict[tuple[str, int, str], list[Slot]] = {}
    for slot in slots:
        own = ("", 0) if slot.process else (slot.component, slot.rank)
        found.setdefault((*own, slot.process), []).append(slot)
    return [tuple(sharing) for sharing in found.values()]


def check_sharing(specs: Sequence[GroupSpec], running: Iterable[str]) -> None:
    """Raise ClusterError if workers that are planned for the same process cannot share it.

    `specs`: the groups to launch. `running`: names of shared processes that run already, which take no more workers.
    """
    classes = {spec.name: spec.worker for spec in specs}
    for sharing in processes(
        slot for spec in specs for slot in spec.slots if slot.process
    ):
        first = sharing[0]
        for slot in sharing:
            worker = classes[slot.component]
            place = (slot.node, visible_to(slot))
            if first.process in running:
                error = "running"
            elif worker.needs_own_process:
                error = "process-group"
            elif slot.runtime_env != first.runtime_env:
                error = "another-python"
            elif place != (first.node, visible_to(first)):
                error = "another-place"
            else:
                continue
            unshared = problem(
                "process-cannot-be-shared",
                slot.owner,
                f"process {slot.process!r}",
                error=error,
                worker=worker.__name__,
                first=first.owner,
                first_node=first.node,
                first_sees=_names(visible_to(first)),
                owner=slot.owner,
                node=slot.node,
                sees=_names(visible_to(slot)),
            )
            raise ClusterError(unshared)
