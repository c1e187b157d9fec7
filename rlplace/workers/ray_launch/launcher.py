"""Slots -> Ray actors: reserve, place, check after start, end.

::

    session ─▶ one placement group, a bundle per used node ─▶ one actor per slot in its node's bundle
            ─▶ each reports node, pid, visible devices; compared with the plan ─▶ rendezvous of rank 0 ─▶ constructors
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.config import CommConfig, RayConfig
from rlplace.errors import ClusterError, Problem
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch import reservation
from rlplace.workers.launch.devices import Device, make_device
from rlplace.workers.launch.host import Failure
from rlplace.workers.launch.launcher import GroupOrder, StartReport, WorkerHandle, failed, memory_account
from rlplace.workers.launch.reservation import Demand, Expected, Machine, WorkerReport, rendezvous_host
from rlplace.workers.ray_launch.actors import (
    CONTROL,
    RayAccount,
    RayHost,
    RayProcess,
    RayWorker,
    explain,
    thread_of,
)
from rlplace.workers.ray_launch.channels import JobChannels
from rlplace.workers.ray_launch.session import RaySession

_END_S = 10.0  # for processes to be gone after they were asked to end


class RayLauncher:
    """Owns the Ray session, the reservation, the actors and the channels of one cluster."""

    def __init__(
        self, topology: Topology, config: RayConfig, comm: CommConfig, shared_bytes: Mapping[int, int]
    ) -> None:
        """`shared_bytes`: what the job takes of a node's shared memory, by node rank, where it is known."""
        self._topology = topology
        self._shared_bytes = shared_bytes
        self._config = config
        self._comm = comm
        self._session = RaySession(config)
        self._account: RayAccount | None = None
        self._machines: list[Machine] = []
        self._reserved: dict[int, Demand] = {}
        self._bundles: PlacementGroup | None = None
        self._physical: dict[int, dict[int, str]] = {}  # node -> local number -> GPU id
        self._workers: list[RayWorker] = []
        self._channels: JobChannels | None = None
        self._shared: dict[str, RayProcess] = {}  # processes of several workers, by name
        self._processes: list[psutil.Process] = []  # of workers on this host

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, report: StartReport) -> None:
        with report.phase("ray"):
            self._session.start()
            self._machines = self._session.machines()
            self._channels = JobChannels(
                self._machines,
                self._comm,
                self._shared,
                shared_bytes=self._shared_bytes,
                timeout_s=self._config.start_timeout_s,
            )
            if any(node.kind == "emulated" for node in self._topology.nodes):
                self._account = RayAccount.start(memory_account(self._topology))

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        with report.phase("reserve"):
            needed = reservation.demands(slots, self._topology)
            problem = reservation.too_small(needed, self._machines, self._session.address)
            if problem is not None:
                raise ClusterError(problem)
            self._bundles = placement_group(
                [demand.resources for demand in needed.values()],
                strategy="STRICT_SPREAD" if len(needed) > 1 else "STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": self._machines[node].id} for node in needed],
            )
            if not self._bundles.wait(self._config.reserve_timeout_s):
                waited_s = self._config.reserve_timeout_s
                problem = reservation.still_missing(needed, self._machines, self._session.free(), waited_s)
                raise ClusterError(problem)
            self._reserved = needed
            self._physical = self._physical_accelerators()

    def _physical_accelerators(self) -> dict[int, dict[int, str]]:
        """Match the plan's local numbers, in order, with the GPUs that Ray gave to the node's bundle, in order."""
        asked = {
            node: ray.remote(_visible_gpus).options(num_cpus=0, num_gpus=len(d.accelerators), **self._on(node)).remote()
            for node, d in self._reserved.items()
            if d.kind == "cuda" and d.accelerators
        }
        return {
            node: dict(zip(self._reserved[node].accelerators, sorted(ids, key=_by_number), strict=True))
            for node, ids in zip(asked, ray.get(list(asked.values())), strict=True)
        }

    def _on(self, node: int) -> dict[str, Any]:
        """Return the options that put a process into the bundle of a node."""
        assert self._bundles is not None, "reserve comes before launch"
        index = list(self._reserved).index(node)
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._bundles, placement_group_bundle_index=index)
        }

    # ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, orders: Sequence[GroupOrder], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        slots = [slot for order in orders for slot in order.slots]
        running = [name for name, process in self._shared.items() if not process.ended]
        problem = reservation.unreserved(slots, self._reserved) or reservation.cannot_share(orders, running)
        if problem is not None:
            raise ClusterError(problem)
        expected = {
            slot: reservation.expected(slot, self._machines[slot.node], self._physical.get(slot.node, {}))
            for slot in slots
        }
        with report.phase("processes"):
            started = {w.slot: w for s in reservation.processes(slots) for w in self._process(s, expected[s[0]])}
            groups = {order.name: [started[slot] for slot in order.slots] for order in orders}
            workers = list(started.values())
            self._workers += workers
            reports = self._reports(workers, {o.name for o in orders if o.worker.needs_own_process})
            self._processes += _processes_here(reports.values())
            for worker in workers:
                problem = expected[worker.slot].misfit(worker.slot, reports[worker])
                if problem is not None:
                    raise ClusterError(problem)
        for order in orders:
            self._build(order, groups[order.name], reports[groups[order.name][0]])
        return {name: tuple(group) for name, group in groups.items()}

    def _build(self, order: GroupOrder, workers: Sequence[RayWorker], first: WorkerReport) -> None:
        """Have the workers of a group built. `first`: report of rank 0, where the group meets."""
        assert self._channels is not None, "start makes the channels' locations"
        nodes = {slot.node for slot in order.slots}
        channels = self._channels.addresses_for(nodes, order.channels)
        folders = {node: self._channels.folder(node) for node in nodes}
        # Once for all: the locations of thousands of channels' keys are much to send to each of thousands of workers.
        common = ray.put(cloudpickle.dumps(order.spec(workers[0].slot, self._device(workers[0].slot), channels)))
        for worker in workers:
            slot = worker.slot
            own = {"slot": slot, "device": self._device(slot), "folder": folders[slot.node]}
            worker.make(common, own, first.address, first.port)

    def _process(self, slots: Sequence[Slot], expected: Expected) -> list[RayWorker]:
        """Start the process of `slots`, with a thread for each of its workers."""
        slot = slots[0]
        runtime_env = slot.runtime_env
        environment = {"OMP_NUM_THREADS": "1", **dict(runtime_env.env_vars), **expected.environment}
        threads = {CONTROL: 2} | {thread_of(number): 1 for number in range(len(slots))}
        # The stubs of ray.remote leave out concurrency_groups.
        host: Any = ray.remote(concurrency_groups=threads)(RayHost)  # type: ignore[call-overload]
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_restarts": 0, "enable_task_events": False}
        if runtime_env.env_vars:  # also for what reads them before our code runs
            options.setdefault("runtime_env", {})["env_vars"] = dict(runtime_env.env_vars)
        if runtime_env.interpreter:
            options.setdefault("runtime_env", {})["py_executable"] = runtime_env.interpreter
        actor = host.options(**options, **self._on(slot.node)).remote(environment, len(slots))
        process = RayProcess(actor, len(slots))
        if slot.process:
            self._shared[slot.process] = process
        return [RayWorker(slot, process, number) for number, slot in enumerate(slots)]

    def _reports(self, workers: Sequence[RayWorker], serving: set[str]) -> dict[RayWorker, WorkerReport]:
        """Wait for the reports of the processes. Raises ClusterError for late ones, WorkerError for dead ones.

        `serving`: the groups whose rank 0 opens a rendezvous.
        """
        asked = {}
        for worker in workers:
            serves = worker.slot.rank == 0 and worker.slot.component in serving
            asked[worker] = worker.report(rendezvous_host(self._reserved) if serves else None)
        _, late = ray.wait(list(asked.values()), num_returns=len(asked), timeout=self._config.start_timeout_s)
        if late:
            missing = [f"{w.slot.owner} (node {w.slot.node})" for w in workers if asked[w] in late]
            raise ClusterError(_late(missing, self._config.start_timeout_s))
        reports = {}
        for worker, reference in asked.items():
            try:
                reports[worker] = ray.get(reference)
            except RayActorError as error:
                raise failed(worker.slot, "start", Failure(what=explain(error))) from error
        return reports

    def _device(self, slot: Slot) -> Device:
        visible = reservation.visible_to(slot)
        index = visible.index(slot.local_accelerators[0]) if slot.accelerators else 0
        return make_device(slot, self._topology.nodes[slot.node].kind, index=index, account=self._account)

    def channel(self, spec: ChannelSpec, locations: Sequence[ChannelLocation]) -> Channel:
        assert self._channels is not None, "start makes the channels' locations"
        return self._channels.create(spec, locations)

    def forget(self, owner: str) -> None:
        if self._account is not None and ray.is_initialized():
            self._account.release_all(owner)

    def describe(self) -> str:
        where = "started here" if self._session.local else f"at {self._session.address}"
        return f"processes of Ray {ray.__version__} {where}"

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()
        try:
            if self._channels is not None:
                self._channels.close()
            if not self._session.local and ray.is_initialized():
                self._give_back()
        finally:
            self._session.close()
            self._end_processes()

    def _give_back(self) -> None:
        """Give back what would outlive this process in a Ray that goes on."""
        if self._account is not None:
            self._account.stop()
        if self._bundles is not None:
            remove_placement_group(self._bundles)
        self._account, self._bundles, self._reserved = None, None, {}

    def _end_processes(self) -> None:
        """Ray ends its processes without waiting for them; a process that stays would hold its GPU's memory."""
        processes, self._processes = self._processes, []
        _, alive = psutil.wait_procs(processes, timeout=_END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _visible_gpus() -> list[str]:
    return [str(gpu) for gpu in ray.get_gpu_ids()]


def _by_number(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdecimal() else (-1, gpu)


def _processes_here(reports: Any) -> list[psutil.Process]:
    here = ray.get_runtime_context().get_node_id()
    found = []
    for report in reports:
        if report.machine == here:
            with contextlib.suppress(psutil.NoSuchProcess):  # dead already: nothing to end
                found.append(psutil.Process(report.pid))
    return found


def _late(missing: Sequence[str], waited_s: float) -> Problem:
    return Problem(
        code="workers-late",
        key="cluster.ray.start_timeout_s",
        what=f"{len(missing)} worker processes did not start within {waited_s:g} s",
        got=", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
        why="each worker is a process of its own; an overloaded node starts them slowly, one without memory not at all",
        fix=f"cluster.ray.start_timeout_s={2 * waited_s:g}, or fewer ranks",
    )
