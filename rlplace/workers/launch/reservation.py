"""What a job uses on real machines: resources per node, processes, visible GPUs, and what is missing or misplaced.

CUDA_VISIBLE_DEVICES of a worker is decided here (`visible_ids`) and set by RayHost before anything imports torch. The
report of a started process shows which node it is on, and that nothing there changed the variable; CudaDevice compares
the UUID of the GPU that CUDA shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rlplace.errors import Problem
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.host import GroupSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
BUNDLE_CPUS = 0.01  # of a node's reservation without GPUs; the actors in it ask for none (RayLauncher._process)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One living node of the cluster software."""

    id: str
    address: str
    total: Mapping[str, float]  # resources


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What the job uses of one node."""

    node: int
    accelerators: tuple[int, ...]  # numbered within the node, ascending
    kind: str

    @property
    def resource(self) -> tuple[str, float]:
        gpus = len(self.accelerators) if self.kind == "cuda" else 0
        return ("GPU", float(gpus)) if gpus else ("CPU", BUNDLE_CPUS)


def visible_to(slot: Slot) -> tuple[int, ...]:
    """List the accelerators, numbered within the node, that a rank may see."""
    return slot.visible_accelerators or slot.local_accelerators


def node_uses(slots: Sequence[Slot], topology: Topology) -> dict[int, NodeUse]:
    """Sum up what slots use, by node rank, ascending; only nodes that are used."""
    used: dict[int, set[int]] = {}
    for slot in slots:
        used.setdefault(slot.node, set()).update(visible_to(slot))
    return {n: NodeUse(node=n, accelerators=tuple(sorted(used[n])), kind=topology.nodes[n].kind) for n in sorted(used)}


def unreserved(slots: Sequence[Slot], reserved: Mapping[int, NodeUse]) -> Problem | None:
    """Find a slot outside of what was reserved at the first launch."""
    for slot in slots:
        if slot.node not in reserved or not set(visible_to(slot)) <= set(reserved[slot.node].accelerators):
            return Problem(
                code="not-reserved",
                key=slot.owner,
                what=f"its accelerators on node {slot.node} were not reserved",
                got=",".join(map(str, visible_to(slot))) or "no accelerator",
                why="the first launch_all reserves what its groups use, and a reservation does not grow",
                fix="launch all groups with one launch_all, or call cluster.reserve() before it",
            )
    return None


def too_small(needed: Mapping[int, NodeUse], machines: Sequence[Machine], address: str) -> Problem | None:
    """Find what the cluster does not have even when no other job uses it. `machines` in order."""
    most = max(needed, default=0)
    if most >= len(machines):
        return Problem(
            code="cluster-too-small",
            key="cluster.num_nodes",
            what=f"the placement uses node {most}, the cluster has {_count(len(machines), 'node')}",
            got=str(most + 1),
            why=f"{address} has " + ", ".join(f"node {i}: {m.address}" for i, m in enumerate(machines)),
            fix=f"cluster.num_nodes={len(machines)}     (or add {_count(most + 1 - len(machines), 'node')})",
        )
    for node, use in needed.items():
        lack = _lack(use, machines[node].total)
        if lack is not None:
            return Problem(
                code="cluster-too-small",
                key="cluster.accelerators_per_node",
                what=f"node {node} has too little",
                got=lack,
                why=f"node {node} is {machines[node].address}; the placement uses its accelerators "
                + ",".join(map(str, use.accelerators)),
                fix="place the components on fewer accelerators, or join a larger cluster: ray.address",
            )
    return None


def still_missing(
    needed: Mapping[int, NodeUse], machines: Sequence[Machine], free: Mapping[str, Mapping[str, float]], waited_s: float
) -> Problem:
    """Describe what kept the reservation waiting. `free` maps machine ids to what is free there now."""
    lines = []
    for node, use in needed.items():
        lack = _lack(use, free.get(machines[node].id, {}))
        if lack is not None:
            lines.append(f"node {node} ({machines[node].address}): {lack}")
    return Problem(
        code="reserve-timeout",
        key="cluster",
        what=f"its accelerators were not free within {waited_s:g} s",
        got="\n".join(lines) or "all of it is free now",
        why="the job reserves everything it uses at once, and other jobs hold what is missing",
        fix="end the other jobs, or wait longer: cluster.ray.reserve_timeout_s",
    )


def _lack(use: NodeUse, has: Mapping[str, float]) -> str | None:
    kind, needed = use.resource
    return None if has.get(kind, 0) >= needed else f"needs {needed:g} {kind}, has {has.get(kind, 0):g}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a started process reports of itself."""

    machine: str  # id of the node it runs on
    host: str
    pid: int
    visible: tuple[str, ...]  # ids of the GPUs it can see
    address: str = ""  # of the rendezvous it opened
    port: int = 0


def visible_ids(slot: Slot, physical: Mapping[int, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that a rank sees. `physical`: by reserved local number; empty where emulated."""
    return tuple(physical[n] for n in visible_to(slot) if physical)


def misplaced(slot: Slot, machine: Machine, visible: tuple[str, ...], report: WorkerReport) -> Problem | None:
    """Compare where a worker is with the plan: a machine, and the ids of the GPUs that it may see there."""
    elsewhere = report.machine != machine.id
    if not elsewhere and report.visible == visible:
        return None
    return Problem(
        code="worker-misplaced",
        key=slot.owner,
        what="runs on another node than planned" if elsewhere else "sees other accelerators than planned",
        got=f"node {report.machine[:8]} ({report.host}), visible {_names(report.visible)}",
        why=f"planned is node {slot.node}, {machine.id[:8]}, visible {_names(visible)}",
        fix=f"start again; if it stays, look for something that sets {VISIBLE} on that host",
    )


def _names(ids: Iterable[object]) -> str:
    return ",".join(map(str, ids)) or "none"


def rendezvous_host(reserved: Mapping[int, NodeUse]) -> str:
    """Return where ranks 0 listen; "" is the address of their node, needed where any reserved node is another.

    Later launches count as well: their workers may have to reach a group that was launched on one node alone.
    """
    return "127.0.0.1" if len(reserved) == 1 else ""


# ── processes that several workers share ─────────────────────────────────────────────────────────────────────────────


def processes(slots: Iterable[Slot]) -> list[tuple[Slot, ...]]:
    """Group slots by process, in the order of its first slot."""
    found: dict[tuple[str, int, str], list[Slot]] = {}
    for slot in slots:
        own = ("", 0) if slot.process else (slot.component, slot.rank)
        found.setdefault((*own, slot.process), []).append(slot)
    return [tuple(sharing) for sharing in found.values()]


def cannot_share(specs: Sequence[GroupSpec], running: Iterable[str]) -> Problem | None:
    """Find what keeps workers from sharing the processes that their slots name. `running`: processes there are."""
    classes = {spec.name: spec.worker for spec in specs}
    for sharing in processes(slot for spec in specs for slot in spec.slots):
        first = sharing[0]
        if not first.process:
            continue
        if first.process in running:
            why = "the workers of a process start together"
            return _unshareable(first, "its process runs already", why, "launch all that share with one launch_all")
        for slot in sharing:
            if classes[slot.component].needs_own_process:
                why = f"a process can join only one process group, and {classes[slot.component].__name__} joins one"
                return _unshareable(slot, "needs a process of its own", why, "leave its slots' `process` empty")
            if slot.runtime_env != first.runtime_env:
                why = f"{first.owner} and {slot.owner} have other environment variables or another Python"
                return _unshareable(
                    slot, "needs another runtime environment than its process", why, "give both node groups the same"
                )
            if (slot.node, visible_to(slot)) != (first.node, visible_to(first)):
                why = f"{first.owner} is on node {first.node} and sees accelerators {_names(visible_to(first))} there, "
                why += f"{slot.owner} is on node {slot.node} and sees {_names(visible_to(slot))}"
                return _unshareable(slot, "sees other things than its process", why, "place them alike")
    return None


def _unshareable(slot: Slot, what: str, why: str, fix: str) -> Problem:
    return Problem(
        code="process-cannot-be-shared", key=slot.owner, what=what, got=f"process {slot.process!r}", why=why, fix=fix
    )
