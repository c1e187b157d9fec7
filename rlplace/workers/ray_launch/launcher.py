"""Place workers in Ray: reserve resources, start one actor per process, verify places, end everything.

::

    session ─▶ one placement group, a bundle per used node ─▶ one actor per slot in its node's bundle
            ─▶ each reports node, pid, visible devices; compared with the plan ─▶ rendezvous of rank 0 ─▶ constructors
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlplace.codes import problem
from rlplace.comm.address import ChannelAddress
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.config.blocks.machines import CommConfig, RayConfig
from rlplace.errors import ClusterError, RayDied
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.signals import deliver_deferred
from rlplace.units import counted
from rlplace.workers.launch import reservation
from rlplace.workers.launch.devices import AccountOfRuns, Device, make_device
from rlplace.workers.launch.exchange import exchanged
from rlplace.workers.launch.group import WorkerHandle, failed
from rlplace.workers.launch.host import Failure, GroupSpec
from rlplace.workers.launch.machines import Gpu, list_gpus
from rlplace.workers.launch.output import output_file
from rlplace.workers.launch.reservation import (
    VISIBLE,
    Machine,
    NodeUse,
    WorkerReport,
    rendezvous_host,
    visible_to,
)
from rlplace.workers.ray_launch.actors import (
    CONTROL,
    RayHost,
    RayProcess,
    RayWorker,
    explain,
    thread_of,
)
from rlplace.workers.ray_launch.channels import JobChannels
from rlplace.workers.ray_launch.code_folder import code_folder
from rlplace.workers.ray_launch.connections import Connections
from rlplace.workers.ray_launch.modules import let_modules_travel
from rlplace.workers.ray_launch.servers import Servers
from rlplace.workers.ray_launch.session import RaySession
from rlplace.workers.ray_launch.template import Template, modules_of
from rlplace.workers.ray_launch.templates import Templates, late_of, wait_ready
from rlplace.workers.worker import Rendezvous

_CONNECT_S = 2.0  # longest wait for the server of a node to accept a connection
# longest wait until Ray notices that a server is gone: several health checks must fail first
_DECIDED_S = 60.0
_LOOK_S = 0.5
_FREE_S = 10.0  # longest wait for Ray to say whether accelerators are free
_END_S = 10.0  # longest wait for processes to end after they were asked to


class RayLauncher:
    """Owns the Ray session, the reserved resources, the actors and the channels of one cluster."""

    restarts_workers = True

    def __init__(
        self,
        topology: Topology,
        config: RayConfig,
        comm: CommConfig,
        shared_bytes: Mapping[int, int],
        tell: Callable[[str], None],
        template: Template | None,
        variables: Mapping[str, str] | None = None,
        account: AccountOfRuns | None = None,
        tried: Sequence[str] = (),
    ) -> None:
        """Create a launcher; Ray is not started yet.

        `shared_bytes`: node number -> bytes of shared memory that the job needs there; a node without an entry is not
        checked. `tell`: called with one line of text for each step of the start. `template`: template process of this
        machine, from which workers are forked if Ray runs on this machine alone; None: no template. `variables`:
        environment variables of all workers. `account`: the memory account that other runs on the same emulated
        accelerators use; None: there are none. `tried`: names of large modules that workers import; a template has
        them if it can then be forked.
        """
        self._variables = variables or {}
        self._tried = tried
        self._tell = tell
        self._topology = topology
        self._shared_bytes = shared_bytes
        self._config = config
        self._comm = comm
        self._account = account
        self._session = RaySession(config)
        self._machines: list[Machine] = []
        self._reserved: dict[int, NodeUse] = {}
        self._bundles: PlacementGroup | None = None
        # Node -> the placement group and the bundle that reserve it
        self._bundle_of: dict[int, tuple[PlacementGroup, int]] = {}
        # Reserved accelerators of nodes that the job has left
        self._left: dict[int, NodeUse] = {}
        # Placement groups of replacement accelerators, and of nodes that have joined
        self._more: list[PlacementGroup] = []
        self._workers: list[RayWorker] = []
        self._channels: JobChannels | None = None
        # Number of workers in a process -> the Ray actor class of such a process
        self._host_classes: dict[int, Any] = {}
        # Shared processes, by name
        self._shared: dict[str, RayProcess] = {}
        # Processes of workers on this machine
        self._processes: dict[Slot, psutil.Process] = {}
        self._templates = Templates(template, self._variables)
        # Number of workers that were forked
        self._forks = 0
        self._connections: Connections | None = None

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start or join Ray, and list its machines. Call this once. Raise ClusterError if it fails."""
        self._session.start()
        self._tell(
            "Ray: started"
            if self._session.local
            else f"Ray: joined at {self._session.address}"
        )
        for note in self._session.notes:
            self._tell(f"Ray: {note}")
        # Another program's Ray was joined, but the template was made for this machine alone.
        if not self._session.local:
            self._templates.stop()
            self._templates = Templates(None, self._variables)
        self._machines = self._session.machines()
        self._connections = Connections()
        self._channels = JobChannels(
            self._machines,
            self._comm,
            self._shared,
            self._shared_bytes,
            self._config.start_timeout_s,
            self._account,
        )

    def reserve(self, slots: Sequence[Slot] | None) -> None:
        """Reserve the nodes and accelerators of `slots`; wait until they are free. Call this once.

        `slots`: None means the whole cluster. Raise ClusterError, which names the missing resources, if they are
        missing or not free in time.
        """
        needed = reservation.node_uses(slots, self._topology)
        reservation.check_size(needed, self._machines, self._session.address)
        self._bundles = placement_group(
            [dict([use.resource]) for use in needed.values()],
            strategy="STRICT_SPREAD" if len(needed) > 1 else "STRICT_PACK",
            bundle_label_selector=[
                {"ray.io/node-id": self._machines[node].id} for node in needed
            ],
        )
        self._reserved = needed
        self._bundle_of = {
            node: (self._bundles, index) for index, node in enumerate(needed)
        }
        waited_s = self._config.reserve_timeout_s
        if not wait_ready(self._bundles.wait, waited_s, self._check_start):
            raise reservation.not_free(
                needed, self._machines, self._session.free(), waited_s
            )
        self._name_gpus(needed)

    def _name_gpus(self, needed: dict[int, NodeUse]) -> None:
        """Add the GPUs that Ray has given to the job, to reserved nodes with GPUs. Raise ClusterError if a node is
        late.
        """
        asked = {
            node: _ask(_given_gpus, *self._bundle_of[node], len(use.accelerators))
            for node, use in needed.items()
            if use.kind == "cuda" and use.accelerators
        }
        limit_s = self._config.start_timeout_s
        if late_of(list(asked.values()), limit_s, self._check_start):
            raise _late(
                [f"one that lists the GPUs of node {node}" for node in asked], limit_s
            )
        given = ray.get(list(asked.values()))
        for node, (ids, gpus) in zip(asked, given, strict=True):
            use = needed[node]
            needed[node] = dataclasses.replace(
                use, ids=dict(zip(use.accelerators, ids, strict=True)), gpus=gpus
            )

    def reserve_more(self, slots: Sequence[Slot]) -> bool:
        """Reserve the accelerators of `slots` that are not reserved yet. Return whether all of them are reserved now.

        A node of which nothing is reserved cannot be added.
        """
        lacking: dict[int, set[int]] = {}
        for slot in slots:
            if slot.node not in self._reserved:
                return False
            own = set(self._reserved[slot.node].accelerators)
            lacking.setdefault(slot.node, set()).update(set(visible_to(slot)) - own)
        return all(
            self.take(node, sorted(numbers))
            for node, numbers in lacking.items()
            if numbers
        )

    def take(self, node: int, accelerators: Sequence[int]) -> bool:
        """Reserve more accelerators of a node that the job uses already. Return whether they were free.

        `node`: number of the node. `accelerators`: numbers of the additional accelerators within the node.
        """
        use = self._reserved[node]
        ids = dict[int, str]()
        if use.kind == "cuda":
            label = {"ray.io/node-id": self._machines[node].id}
            more = placement_group(
                [{"GPU": float(len(accelerators))}], bundle_label_selector=[label]
            )
            try:
                given = None
                if wait_ready(more.wait, _FREE_S, self._check_start):
                    asked = _ask(_given_ids, more, 0, len(accelerators))
                    limit_s = self._config.start_timeout_s
                    if not late_of([asked], limit_s, self._check_start):
                        given = ray.get(asked)
            except RayError:  # its node is gone
                given = None
            if not given:
                remove_placement_group(more)
                return False
            self._more.append(more)
            ids = dict(zip(accelerators, given, strict=True))
        numbers = tuple(sorted((*use.accelerators, *accelerators)))
        self._reserved[node] = dataclasses.replace(
            use, accelerators=numbers, ids={**use.ids, **ids}
        )
        return True

    def _on(self, node: int) -> dict[str, Any]:
        """Return Ray options that place a process on `node`, within the resources that are reserved there."""
        bundles, index = self._bundle_of[node]
        strategy = PlacementGroupSchedulingStrategy(
            bundles, placement_group_bundle_index=index
        )
        return {"scheduling_strategy": strategy}

    # ── nodes that leave and join ────────────────────────────────────────────────────────────────────────────────────

    def nodes(self) -> dict[int, str]:
        """Return the nodes of the cluster: number -> address."""
        return {
            number: machine.address for number, machine in enumerate(self._machines)
        }

    def driver_node(self) -> int | None:
        """Return the number of the node of this process; None if the cluster has no such node."""
        here = ray.get_runtime_context().get_node_id()
        for number, machine in enumerate(self._machines):
            if machine.id == here:
                return number
        return None

    def leave(self, node: int) -> None:
        """Give up a node on which no worker is left: end its template, and remove its job folder.

        Its accelerators stay reserved while the node is there. The loss of the node is none of the job from now on.
        """
        if node in self._reserved:
            self._left[node] = self._reserved.pop(node)
        self._templates.stop_on(node)
        if self._channels is not None:
            self._channels.leave(node)

    def return_to(self, node: int) -> str | None:
        """Use a node again that was left. Return its address; None if no machine is there for it.

        The machine that had the number has it again if its server answers. Otherwise a machine that has joined gets it.
        """
        use = self._left[node]
        server = self._session.servers().get(self._machines[node].id)
        # Ray counts a machine as living for some seconds after its end
        if server is None or not _listens(*server):
            joined = self._strangers()
            fitting = [machine for machine in joined if not use.lack(machine.total)]
            if not fitting:
                return None
            machine = fitting[0]
            more = placement_group(
                [dict([use.resource])],
                bundle_label_selector=[{"ray.io/node-id": machine.id}],
            )
            if not wait_ready(more.wait, _FREE_S, self._check_start):
                remove_placement_group(more)
                return None
            self._more.append(more)
            self._machines[node] = machine
            self._bundle_of[node] = (more, 0)
            again = {node: use}
            self._name_gpus(again)
            use = again[node]
        self._reserved[node] = use
        del self._left[node]
        return self._machines[node].address

    def joined(self) -> list[str]:
        """Return the addresses of machines that have joined Ray since the start, and have no number in the job."""
        watch = self._session.watch
        if self._session.local or (watch is not None and not watch.answers()):
            return []
        return [machine.address for machine in self._strangers()]

    def _strangers(self) -> list[Machine]:
        known = {machine.id for machine in self._machines}
        return [each for each in self._session.living() if each.id not in known]

    # ── launching ────────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(self, specs: Sequence[GroupSpec]) -> dict[str, list[WorkerHandle]]:
        """Start the workers of all groups and check where they run. Return their handles: group name -> handles in rank
        order.

        Constructors of workers may still run after the return; the first call of a worker reports their errors. Raise
        ClusterError if a worker cannot start or a slot is not reserved.
        """
        slots = [slot for spec in specs for slot in spec.slots]
        running = [name for name, process in self._shared.items() if not process.ended]
        reservation.check_reserved(slots, self._reserved)
        reservation.check_sharing(specs, running)
        if self._config.start == "fork":
            nodes = {node: self._on(node) for node in self._reserved}
            workers = (spec.worker for spec in specs)
            self._templates.start_on(
                nodes,
                modules_of(workers),
                self._config.start_timeout_s / 3,
                self._check_start,
                self._tried,
            )
        return self._launch(specs, slots, self._tell)

    def restart(
        self, specs: Sequence[GroupSpec], slots: Collection[Slot]
    ) -> dict[str, list[WorkerHandle]]:
        """End the workers of `slots` and start new ones in their place. Return the new handles by group name.

        `specs`: specs of the groups of these workers. No other worker may live in the processes of these workers. Raise
        the errors of `launch`.
        """
        self._await_ray()
        # These workers may have been in other slots before.
        owners = {slot.owner for slot in slots}
        self._end([w for w in self._workers if w.slot.owner in owners], patience_s=0.0)
        return self._launch(
            specs, [slot for spec in specs for slot in spec.slots if slot in slots]
        )

    def retire(self, staying: Collection[str]) -> None:
        """End all workers with their processes, except those of the groups `staying`, and remove all channels.

        Ray, templates and reservations stay. A group that stays shares no process. Raise ClusterError if another node
        does not answer, RayDied if Ray has died.
        """
        self._await_ray()
        ending = [w for w in self._workers if w.slot.component not in staying]
        self._end(ending, patience_s=_END_S)
        # The object stays: channels look up processes in it
        self._shared.clear()
        if self._channels is not None:
            self._channels.clear()

    def shared_folder(self, nodes: Collection[int]) -> Path | None:
        """Return the job folder of the driver's node if it is the only one of `nodes`; else None."""
        if self._channels is None:
            return None
        return self._channels.folder_here(nodes)

    def _end(self, workers: Sequence[RayWorker], patience_s: float) -> None:
        """End `workers` with their processes, and release their memory on emulated accelerators.

        `patience_s`: the most seconds to wait for processes on this machine, before they are killed.
        """
        for worker in workers:
            worker.end()
            self._workers.remove(worker)
        owners = {worker.slot.owner for worker in workers}
        ended = [
            self._processes.pop(slot)
            for slot in list(self._processes)
            if slot.owner in owners
        ]
        self._end_processes(ended, patience_s)
        assert self._channels is not None, "start makes the folders"
        for node in {worker.slot.node for worker in workers}:
            self._channels.release(
                node, [w.slot.owner for w in workers if w.slot.node == node]
            )

    def lost_nodes(self) -> dict[int, str]:
        """Return the nodes of the job that are lost: node number -> address.

        If a node does not answer, wait at most `_DECIDED_S` seconds until Ray has decided whether the node is lost.
        Raise RayDied if the run has started Ray, and Ray has decided that this machine is lost.
        """
        watch = self._session.watch
        if self._session.local and self._reserved and watch and watch.answers():
            self._check_counted(watch)
        until = time.monotonic() + _DECIDED_S
        while self._reserved and not self._session.local:
            deliver_deferred()
            # Without its GCS, Ray would not answer, and end this process in the end.
            if self._session.watch is not None and not self._session.watch.answers():
                self.check(idle=True)
                time.sleep(_LOOK_S)
                until = time.monotonic() + _DECIDED_S
                continue
            servers = self._session.servers()
            used = {node: self._machines[node] for node in self._reserved}
            lost = {
                node: machine.address
                for node, machine in used.items()
                if machine.id not in servers
            }
            silent = not lost and not all(
                _listens(*servers[machine.id]) for machine in used.values()
            )
            if not silent or time.monotonic() > until:
                return lost
            time.sleep(_LOOK_S)
        return {}

    def _check_counted(self, watch: Servers) -> None:
        """Raise RayDied if the GCS of the run's own Ray counts this machine, its only one, as lost.

        In this case the raylet lives and is not stopped by a signal, but has not answered the GCS for half a minute.
        """
        if not self._session.servers():
            raise watch.unanswered()

    def check(self, *, idle: bool = False) -> None:
        """Raise RayDied if a process of Ray has died that the run depends on.

        It is raised once, and again if the run has not ended some time after. `idle`: whether no worker is at work; if
        one is, its call may end first where that is possible.
        """
        if self._session.watch is not None:
            self._session.watch.check(idle=idle)

    def _check_start(self) -> None:
        """Raise RayDied if a process of Ray that is needed to start a worker has died or stands still."""
        if self._session.watch is not None:
            self._session.watch.check(idle=True, starting=True)

    def _await_ray(self) -> None:
        """Wait until the processes of Ray that are needed to start a worker answer; otherwise Ray's calls would block.

        Raise RayDied if one of these processes has died, or stands still for too long.
        """
        watch = self._session.watch
        while watch is not None and not watch.answers(starting=True):
            deliver_deferred()
            self._check_start()
            time.sleep(_LOOK_S)

    def ray_died(self) -> RayDied | None:
        """Return the error about the process of Ray that has died; None if all live."""
        if self._session.watch is None:
            return None
        death = self._session.watch.death()
        return None if death is None else death.error()

    def empty(self, channels: Iterable[Channel]) -> None:
        """Remove all items from `channels`, and remove the buffers in shared memory through which weights are synced.

        The next push of weights creates new buffers.
        """
        assert self._channels is not None, "start makes the channels' locations"
        for channel in channels:
            channel.reset()
        self._channels.drop_weights()

    def _launch(
        self,
        specs: Sequence[GroupSpec],
        slots: Sequence[Slot],
        tell: Callable[[str], None] = lambda line: None,
    ) -> dict[str, list[WorkerHandle]]:
        output = next((spec.output for spec in specs), None)
        sharings = reservation.processes(slots)
        started = {
            worker.slot: worker
            for sharing in sharings
            for worker in self._process(sharing, output)
        }
        self._workers += started.values()
        serving = {spec.name for spec in specs if spec.worker.needs_own_process}
        sending = {
            spec.name
            for spec in specs
            if spec.facts is not None and spec.facts.sends_on_devices(spec.name)
        }
        reports = self._reports(started, serving, sending, tell, output)
        here = ray.get_runtime_context().get_node_id()
        self._forks += sum(found.forked for found in reports.values())
        for slot, found in reports.items():
            if found.machine == here:
                # The process is dead already.
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._processes[slot] = psutil.Process(found.pid)
        for slot, found in reports.items():
            reservation.check_place(
                slot, self._machines[slot.node], self._reserved[slot.node], found
            )
            if found.socket is not None and self._connections is not None:
                started[slot].connect(self._connections, found.socket)
        for spec in specs:
            self._build(
                spec, [started[slot] for slot in spec.slots if slot in started], reports
            )
        return {
            spec.name: [started[slot] for slot in spec.slots if slot in started]
            for spec in specs
        }

    def _build(
        self,
        spec: GroupSpec,
        workers: Sequence[RayWorker],
        reports: Mapping[Slot, WorkerReport],
    ) -> None:
        """Start to create the workers of one group, without waiting.

        `workers`: handles of the workers. `reports`: reports of the started processes by slot; the ranks meet at the
        address in the report of rank 0, if it is there.
        """
        assert self._channels is not None, "start makes the channels' locations"
        nodes = {slot.node for slot in spec.slots}
        addresses = self._channels.addresses_for(nodes, spec.channels)
        folders = {node: self._channels.folder(node) for node in nodes}
        # Stored once in Ray: addresses of thousands of channels are too large to send to each worker.
        channels = self._channels
        mailboxes = exchanged(
            spec.mailboxes,
            (Channel,),
            lambda end: channels.addresses_for(nodes, {"": end})[""],
        )
        sent = dataclasses.replace(spec, channels={}, mailboxes=mailboxes)
        let_modules_travel()
        # Pickled twice: the folder has to be known before the classes are imported.
        whole = cloudpickle.dumps((sent, addresses))
        pickled = ray.put(cloudpickle.dumps((code_folder(spec.worker), whole)))
        first = reports.get(spec.slots[0])
        rendezvous = (
            Rendezvous(
                host=first.address,
                port=first.port,
                master_port=first.master_port,
                weights_port=first.weights_port,
            )
            if first
            else Rendezvous(host="", port=0)
        )
        for worker in workers:
            worker.make(pickled, folders[worker.slot.node], rendezvous)

    def _process(self, slots: Sequence[Slot], output: Path | None) -> list[RayWorker]:
        """Start one process for the workers of `slots`, with one thread for each worker. Return the handles of the
        workers.

        `output`: folder for the output files of the workers; None: no files.
        """
        slot = slots[0]
        runtime_env = slots[0].runtime_env
        environment = {
            "OMP_NUM_THREADS": "1",
            **self._variables,
            **dict(runtime_env.env_vars),
        }
        # Number GPUs by PCI bus, as Ray does; CUDA's default order is by speed.
        ids = self._reserved[slot.node].visible_ids(slot)
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: ",".join(ids)}
        host = self._host_class(len(slots))
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": 0,
            "max_restarts": 0,
            "enable_task_events": False,
        }
        # Also set for code that reads the environment before ours runs
        if runtime_env.env_vars:
            options["runtime_env"] = {"env_vars": dict(runtime_env.env_vars)}
        if runtime_env.interpreter:
            options.setdefault("runtime_env", {})["py_executable"] = (
                runtime_env.interpreter
            )
        if (
            not runtime_env.env_vars
            and not runtime_env.interpreter
            and (command := self._templates.command(slot.node))
        ):
            options["runtime_env"] = {"py_executable": command}
        # Absolute paths, because processes have other working folders
        files = [output_file(output and output.absolute(), each) for each in slots]
        nodes = [machine.address for machine in self._machines]
        actor = host.options(**options, **self._on(slot.node)).remote(
            environment, files, nodes
        )
        process = RayProcess(actor, len(slots))
        if slot.process:
            self._shared[slot.process] = process
        return [
            RayWorker(
                slot,
                self._device(slot),
                process,
                number,
                functools.partial(self._address_of, slot.node),
            )
            for number, slot in enumerate(slots)
        ]

    def _host_class(self, workers: int) -> Any:
        """Return the Ray actor class of a process with so many workers. Ray pickles and stores a class once."""
        if workers not in self._host_classes:
            threads = {CONTROL: 2} | {thread_of(number): 1 for number in range(workers)}
            made: Any = ray.remote(concurrency_groups=threads)(RayHost)  # type: ignore[call-overload]  # not in its stubs
            self._host_classes[workers] = made
        return self._host_classes[workers]

    def _device(self, slot: Slot) -> Device:
        assert self._channels is not None, "start makes the folders"
        index = (
            reservation.visible_to(slot).index(slot.local_accelerators[0])
            if slot.accelerators
            else 0
        )
        uuids = self._reserved[slot.node].uuids(slot)
        account = self._channels.account(slot.node, self._topology.memory_bytes)
        return make_device(slot, self._topology, account, index=index, uuids=uuids)

    def _reports(
        self,
        workers: Mapping[Slot, RayWorker],
        serving: set[str],
        sending: set[str],
        tell: Callable[[str], None],
        output: Path | None,
    ) -> dict[Slot, WorkerReport]:
        """Wait until all started workers have reported, and return their reports by slot.

        `serving`: names of the groups whose rank 0 opens a socket at which the ranks meet. `sending`: names of the
        groups whose rank 0 opens a socket for weight syncs between accelerators. `tell`: called with one line
        of text for each group that has started. `output`: folder with the output files of workers, for errors. Raise
        ClusterError if a worker is late, WorkerError if a worker has died.
        """
        assert self._channels is not None, "start makes the folders"
        asked = dict[Slot, Any]()
        here = ray.get_runtime_context().get_node_id()
        for slot, worker in workers.items():
            serves = slot.rank == 0 and slot.component in serving
            sends = slot.rank == 0 and slot.component in sending
            folder = (
                self._channels.folder(slot.node)
                if self._machines[slot.node].id == here
                else None
            )
            host = rendezvous_host(self._reserved)
            asked[slot] = worker.report(
                host if serves else None, host if sends else None, folder
            )
        limit_s = self._config.start_timeout_s
        groups: dict[str, list[Any]] = {}
        for slot, reference in asked.items():
            groups.setdefault(slot.component, []).append(reference)
        until = time.monotonic() + limit_s
        late = list[Any]()
        for name, references in groups.items():
            left_s = max(0.0, until - time.monotonic())
            late += (unanswered := late_of(references, left_s, self._check_start))
            if not unanswered:
                tell(f"{name}: {counted(len(references), 'worker')} started")
        if late:
            missing = [
                f"{slot.owner} (node {slot.node})"
                for slot, reference in asked.items()
                if reference in late
            ]
            raise _late(missing, limit_s)
        reports = {}
        for slot, reference in asked.items():
            try:
                reports[slot] = ray.get(reference)
            except RayActorError as error:
                raise failed(
                    slot, "start", Failure(what=explain(error)), output
                ) from error
        return reports

    def channel(
        self,
        spec: ChannelSpec,
        locations: Sequence[ChannelLocation],
        node: int | None = None,
    ) -> Channel:
        """Create a channel, and return the end by which the driver can use it.

        `locations`: nodes or processes in which the keys of the channel live. If it is empty, all keys live on `node`;
        None: the driver's node.
        """
        assert self._channels is not None, "start makes the channels' locations"
        return self._channels.create(spec, locations, node)

    def _address_of(self, node: int, channel: Channel) -> ChannelAddress:
        """Return the address of `channel` for a worker on `node`. Raise ClusterError if this cluster did not create the
        channel.
        """
        assert self._channels is not None, "start makes the channels' locations"
        return self._channels.addresses_for({node}, {"": channel})[""]

    def describe(self) -> str:
        where = "started here" if self._session.local else f"at {self._session.address}"
        forks = (
            f", {counted(self._forks, 'fork')} of a process that has made their imports"
            if self._forks
            else ""
        )
        why_not = self._templates.why_not()
        plain = (
            f", {'others' if forks else 'all'} with their own imports: {why_not}"
            if why_not
            else ""
        )
        left_out = self._templates.left_out()
        more = f"; {left_out}" if left_out else ""
        return f"processes of Ray {ray.__version__} {where}{forks}{plain}{more}"

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End all that this launcher has started, within a limited time. A second call does nothing."""
        self._session.wake()
        workers = self._workers
        self._workers = []
        for worker in workers:
            worker.end()
        try:
            if not self._session.local:
                # Templates on other nodes are actors that Ray ends.
                self._templates.stop()
            if self._connections is not None:
                self._connections.close()
            if self._channels is not None:
                self._channels.close()
            # A Ray that was joined continues to run, and would keep these reservations
            lives = self.ray_died() is None
            if not self._session.local and ray.is_initialized() and lives:
                for bundles in filter(None, (self._bundles, *self._more)):
                    remove_placement_group(bundles)
                self._bundles = None
                self._more = []
                self._reserved = {}
        finally:
            processes = {*self._processes.values(), *self._session.processes()}
            self._processes = {}
            try:
                self._session.close()
            finally:
                # Not earlier: a client that waits for the template would begin to import for itself
                self._templates.stop()
                self._end_processes(list(processes), patience_s=_END_S)

    def _end_processes(
        self, processes: Sequence[psutil.Process], patience_s: float
    ) -> None:
        """Wait up to `patience_s` seconds for the end of `processes`, then kill those that still run.

        Ray does not wait for its processes, and a process that still runs would keep GPU memory.
        """
        _, alive = psutil.wait_procs(processes, timeout=patience_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_END_S)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _late(missing: Sequence[str], limit_s: float) -> ClusterError:
    return ClusterError(
        problem(
            "workers-late",
            "cluster.ray.start_timeout_s",
            ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
            count=len(missing),
            limit_s=limit_s,
            longer_s=2 * limit_s,
        )
    )


def _ask(
    what: Callable[[], object], bundles: PlacementGroup, index: int, count: int
) -> Any:
    """Call the function `what` in a Ray process that has `count` GPUs. Return a Ray reference to the result.

    `bundles`: reserved resources, as a placement group. `index`: number of the bundle with the GPUs.
    """
    strategy = PlacementGroupSchedulingStrategy(
        bundles, placement_group_bundle_index=index
    )
    return (
        ray.remote(what)
        .options(num_cpus=0, num_gpus=count, scheduling_strategy=strategy)
        .remote()
    )


def _given_ids() -> list[str]:
    """Return the ids of the GPUs that Ray has assigned to this process, in ascending order."""
    return sorted(
        map(str, ray.get_gpu_ids()),
        key=lambda gpu: (int(gpu), "") if gpu.isdecimal() else (-1, gpu),
    )


def _given_gpus() -> tuple[list[str], tuple[Gpu, ...]]:
    """Return the ids of the GPUs that Ray has assigned to this process, and a list of all GPUs of the node."""
    return _given_ids(), list_gpus()
