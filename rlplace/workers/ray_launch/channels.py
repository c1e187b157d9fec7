"""The channels of one Ray cluster: the node where each part of a channel lives, and the addresses for workers.

::

    driver ── NodeChannels ─────────── job folder of the driver's node, in this process
           ├─ RemoteNode ── actor ──── NodeChannels of another node       (only where the plan has another node)
           └─ ProcessEnd ───────────── channel inside a worker process    (only where workers share a process)

A node listens only where a worker on another node uses one of its channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlplace.codes import problem
from rlplace.comm import channel_errors
from rlplace.comm.address import (
    ChannelAddress,
    Location,
    NodeLocation,
    Place,
    ProcessLocation,
    ServerAddress,
)
from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import SPILL, JobFolder, check_space
from rlplace.config.blocks.machines import CommConfig
from rlplace.errors import ChannelBroken, ChannelError, ChannelMisuse, ClusterError
from rlplace.placement.channels import ChannelLocation
from rlplace.workers.launch.devices import AccountOfRuns, SharedAccount
from rlplace.workers.launch.reservation import Machine
from rlplace.workers.ray_launch.actors import CONTROL, RayProcess, answer_of
from rlplace.workers.ray_launch.session import Guard

if TYPE_CHECKING:
    from rlplace.comm.network import ChannelServer, Keys

ACCOUNT = "accelerators"  # file in the job folder of a node
DRIVER_APART = -1  # rank of the driver's node if the plan does not use that node
_CLOSE_S = 5.0  # longest wait for another node to remove its folder
_ANSWER_S = 5.0  # longest wait for a worker process to answer while it works


class JobChannels:
    """Owns all channels of a cluster, and the job folder of each node in which channels live.

    A job folder is a folder in shared memory for files that the job's processes on one node share.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        config: CommConfig,
        processes: dict[str, RayProcess],
        shared_bytes: Mapping[int, int],
        timeout_s: float,
        account: AccountOfRuns | None = None,
    ) -> None:
        """Prepare the channels. A node's job folder is created when the node is first needed.

        `machines`: machines by node number. `processes`: name -> handle, for the processes in which several workers
        live. `shared_bytes`: node number -> bytes of shared memory that the job needs there; a node without an entry is
        not checked. `timeout_s`: the most seconds to wait for an answer of another node. `account`: the memory account
        of this machine's emulated accelerators that other runs use, too; None: there are none.
        """
        self._machines = machines
        self._config = config
        self._processes = processes
        self._shared_bytes = shared_bytes
        self._timeout_s = timeout_s
        self._account = account
        here = ray.get_runtime_context().get_node_id()
        apart = (node for node, machine in enumerate(machines) if machine.id == here)
        self._place = Place(node=next(apart, DRIVER_APART))
        self._nodes: dict[int, NodeChannels | RemoteNode] = {}
        self._addresses: dict[str, ChannelAddress] = {}
        self._servers: dict[int, ServerAddress] = {}

    def create(
        self,
        spec: ChannelSpec,
        locations: Sequence[ChannelLocation],
        node: int | None = None,
    ) -> Channel:
        """Create a channel, and return the end by which the driver can use it.

        `locations`: nodes or processes in which the keys of the channel live. If it is empty, all keys live on `node`;
        None: the driver's node.
        """
        node = self._place.node if node is None else node
        self._start({location.node for location in locations if not location.process})
        found: list[Location] = []
        for planned in locations:
            branch = dataclasses.replace(
                spec, keys=planned.keys, capacity_items=planned.capacity_items
            )
            if planned.process:
                found.append(
                    ProcessLocation(
                        spec=branch, node=planned.node, process=planned.process
                    )
                )
            else:
                found.append(self._node_location(branch, planned.node))
        found = found or [self._node_location(spec, node)]
        address = self._addresses[spec.name] = ChannelAddress(
            spec=spec, locations=tuple(found)
        )
        return self._served(address, {self._place.node}).joined(self._end)

    def addresses_for(
        self, nodes: set[int], channels: Mapping[str, Channel]
    ) -> dict[str, ChannelAddress]:
        """Return the address of each channel for workers on `nodes`, by the names in `channels`.

        Raise ClusterError for a channel that was not created by this object.
        """
        self._start(nodes)
        return {
            name: self._served(self._address_of(end), nodes)
            for name, end in channels.items()
        }

    def _address_of(self, end: Channel) -> ChannelAddress:
        address = self._addresses.get(end.spec.name)
        if address is None or end.spec not in (
            address.spec,
            *(location.spec for location in address.locations),
        ):
            raise ClusterError(
                problem(
                    "foreign-channel", f"channel {end.spec.name}", type(end).__name__
                )
            )
        return address

    def drop_weights(self) -> None:
        """Remove on all nodes the buffers in shared memory through which weights are synced. The next push creates new
        buffers.
        """
        for node in self._nodes.values():
            node.drop_weights()

    def folder(self, node: int) -> Path:
        return self._node(node).folder()

    def account(self, node: int, capacity_bytes: Sequence[int]) -> SharedAccount:
        """Return the account of the memory of a node's emulated accelerators.

        `capacity_bytes`: memory of each accelerator of the cluster, by its global number.
        """
        if self._account is not None:
            return self._account.open(capacity_bytes)
        return SharedAccount(capacity_bytes, self._node(node).folder() / ACCOUNT)

    def release(self, node: int, owners: Iterable[str]) -> None:
        """Remove the bytes of the workers `owners` from the memory account of `node`.

        `owners`: names of the workers. Raise ClusterError if the node does not answer.
        """
        self._node(node).release(tuple(owners))

    def folder_here(self, nodes: Collection[int]) -> Path | None:
        """Return the job folder of the driver's node if all of `nodes` are this node; else None."""
        here = self._place.node
        if here == DRIVER_APART or set(nodes) != {here}:
            return None
        return self._node(here).folder()

    def clear(self) -> None:
        """Remove all channels and buffers of weights, so that channels with the same names can be created.

        Job folders stay. Raise ClusterError if another node does not answer.
        """
        self._place.ends.close()
        self._addresses = {}
        self._servers = {}
        for node in self._nodes.values():
            node.clear()

    def leave(self, node: int) -> None:
        """Remove the job folder of a node that no channel uses any more."""
        left = self._nodes.pop(node, None)
        self._servers.pop(node, None)
        if left is not None:
            left.close()

    def close(self) -> None:
        nodes = self._nodes
        self._nodes = {}
        for node in nodes.values():
            node.close()
        self._place.ends.close()

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _node_location(self, spec: ChannelSpec, node: int) -> NodeLocation:
        return NodeLocation(spec=spec, node=node, path=self._node(node).create(spec))

    def _end(self, location: Location) -> Channel:
        if isinstance(location, ProcessLocation):
            return ProcessEnd(location.spec, location.process, self._processes)
        return location.connect(self._place)

    def _served(self, address: ChannelAddress, nodes: set[int]) -> ChannelAddress:
        """Return a copy of `address` that workers on `nodes` can use.

        Workers of other nodes use a node's channels through the channel server of this node. The copy has the addresses
        of all servers that are needed; a server that does not run yet is started.
        """
        found = tuple(
            dataclasses.replace(location, server=self._server(location.node))
            if isinstance(location, NodeLocation) and not nodes <= {location.node}
            else location
            for location in address.locations
        )
        return dataclasses.replace(address, locations=found)

    def _server(self, node: int) -> ServerAddress:
        if node not in self._servers:
            apart = node == DRIVER_APART
            host = self._config.interface or (
                ray.util.get_node_ip_address()
                if apart
                else self._machines[node].address
            )
            self._servers[node] = ServerAddress(
                endpoint=self._node(node).serve(host, self._keys), keys=self._keys
            )
        return self._servers[node]

    @functools.cached_property
    def _keys(self) -> Keys:
        return make_keys(self._config.security)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, nodes: Iterable[int]) -> None:
        """Create the job folders of those `nodes` that have none yet, in parallel.

        Raise ClusterError if a node has too little shared memory.
        """
        started = {
            node: self._node(node) for node in sorted(set(nodes) - self._nodes.keys())
        }
        for node, channels in started.items():
            channels.check(self._shared_bytes.get(node, 0))

    def _node(self, node: int) -> NodeChannels | RemoteNode:
        if node not in self._nodes:
            parent = Path(self._config.shm_folder) if self._config.shm_folder else None
            here = node == self._place.node
            self._nodes[node] = (
                NodeChannels(parent, self._account)
                if here
                else RemoteNode(self._machines[node], parent, self._timeout_s)
            )
        return self._nodes[node]


def make_keys(security: Literal["encrypted", "password"]) -> Keys:
    # Imported here: ZeroMQ is needed only with several nodes.
    from rlplace.comm.network import (
        JobKeys,
        JobPassword,
    )

    if security == "password":
        return JobPassword.create()
    return JobKeys.create()


class NodeChannels:
    """Owns the job folder of one node, the channels in this folder, and a channel server if other nodes use the
    channels.

    A job folder is a folder in shared memory for files that the job's processes on one node share. It is removed even
    if the process is killed.
    """

    def __init__(
        self, parent: Path | None, account: AccountOfRuns | None = None
    ) -> None:
        """Create the job folder.

        `parent`: folder in which the job folder is created; None: the machine's folder for shared memory. `account`:
        the memory account that other runs use, too; None: it is in the job folder.
        """
        self._account = account
        self._folder = JobFolder.create(parent)
        self._guard = Guard.removing(
            self._folder.path, (self._folder.path / SPILL).readlink()
        )
        self._channels: list[SharedChannel] = []
        self._server: ChannelServer | None = None

    def folder(self) -> Path:
        return self._folder.path

    def check(self, needed_bytes: int) -> None:
        """Raise ClusterError if the node has less than `needed_bytes` bytes of free shared memory."""
        check_space(self._folder.path.parent, needed_bytes)

    def create(self, spec: ChannelSpec) -> Path:
        """Create a channel in the job folder, and return the path of its file. Processes of the node use the channel by
        this file.
        """
        channel = SharedChannel.create(self._folder.path, spec)
        self._channels.append(channel)
        if self._server is not None:
            self._server.add(spec.name, channel)
        return channel.path

    def release(self, owners: Iterable[str]) -> None:
        """Remove the bytes of the workers `owners` from the node's account of accelerator memory."""
        account = SharedAccount((), self._folder.path / ACCOUNT)
        if self._account is not None:
            account = self._account.open()
        for owner in owners:
            account.release_all(owner)

    def drop_weights(self) -> None:
        """Remove the node's buffers in shared memory through which weights are synced.

        Their memory is freed when no process uses it any more.
        """
        for buffer in self._folder.path.glob("weights-*.buffer"):
            # A buffer that did not fit into shared memory is a file on disk.
            buffer.resolve().unlink(missing_ok=True)
            buffer.unlink(missing_ok=True)

    def serve(self, host: str, keys: Keys) -> str:
        """Start the channel server, through which other nodes use the channels of this node, and return its endpoint.

        `host`: address of this node at which the server listens. `keys`: secrets that clients must know.
        """
        # Imported here: ZeroMQ is needed only with several nodes.
        from rlplace.comm.network import (
            ChannelServer,
        )

        self._server = ChannelServer(host=host, keys=keys)
        for channel in self._channels:
            self._server.add(channel.spec.name, channel)
        return self._server.start()

    def clear(self) -> None:
        """Remove the channels, the channel server and the buffers of weights. The job folder stays."""
        for channel in self._channels:
            # The segments of items that are left become free
            with contextlib.suppress(ChannelError):
                channel.reset()
        self._remove("the placement changes")
        self.drop_weights()

    def close(self) -> None:
        """Break the channels and remove the job folder, within a limited time. A second call does nothing."""
        self._remove("the cluster was closed")
        self._folder.close()
        self._guard.dismiss()

    def _remove(self, why: str) -> None:
        """Break and remove all channels, and end the channel server. `why`: the reason, for errors."""
        channels = self._channels
        self._channels = []
        for channel in channels:
            # A stopped process may hold the lock of a channel.
            with contextlib.suppress(ChannelError):
                channel.break_(why)
        if self._server is not None:
            self._server.close()
            self._server = None
        for channel in channels:
            channel.destroy()
            channel.detach()


class RemoteNode:
    """A NodeChannels that lives in a Ray actor on another machine. This object has the same methods.

    Each method waits for the actor's answer, and raises ClusterError if no answer comes.
    """

    def __init__(self, machine: Machine, parent: Path | None, timeout_s: float) -> None:
        """Start the actor on `machine`, without waiting until it runs.

        `parent`: folder in which the job folder is created; None: the machine's folder for shared memory. `timeout_s`:
        the most seconds to wait for each answer.
        """
        on_machine = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "enable_task_events": False,
        }
        self._actor: Any = (
            ray.remote(NodeChannels)
            .options(scheduling_strategy=on_machine, **options)
            .remote(parent)
        )
        self._machine = machine
        self._timeout_s = timeout_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            try:
                return answer_of(
                    getattr(self._actor, method).remote(*arguments), self._timeout_s
                )
            except (GetTimeoutError, RayActorError) as error:
                raise ClusterError(
                    problem(
                        "node-lost",
                        f"node {self._machine.address}",
                        f"{type(error).__name__}: {error}".partition("\n")[0],
                        error="channels",
                        method=method,
                    )
                ) from error

        return call

    def close(self) -> None:
        ray.wait([self._actor.close.remote()], timeout=_CLOSE_S)
        ray.kill(self._actor)


class ProcessEnd(Channel):
    """The driver's end of a channel that lives inside a worker process.

    The driver can read statistics, and can break, reset and close the channel. `put` and `get` raise ChannelMisuse.
    """

    def __init__(
        self, spec: ChannelSpec, name: str, processes: dict[str, RayProcess]
    ) -> None:
        """Create the driver's end; the process need not run yet.

        `name`: name of the process in which the channel lives. `processes`: name -> handle of each running process; the
        process of this channel may be added later.
        """
        super().__init__(spec, "the driver")
        self._name = name
        self._processes = processes

    def close(self) -> None:
        self._ask("close")

    def break_(self, why: str) -> None:
        self._ask("break_", why)

    def reset(self) -> None:
        self._ask("reset")

    def stats(self) -> ChannelStats:
        stats: ChannelStats = self._ask("stats")
        return stats

    def _ask(self, method: str, *arguments: object) -> Any:
        process = self._processes.get(self._name)
        if process is None:
            raise self._gone("it does not run yet")
        on_channel = process.actor.on_channel.options(concurrency_group=CONTROL)
        try:
            return ray.get(
                on_channel.remote(self.spec, method, arguments), timeout=_ANSWER_S
            )
        except GetTimeoutError:
            raise channel_errors.silent(
                self.spec, self.owner, method, _ANSWER_S
            ) from None
        except RayActorError as death:
            raise self._gone("it has ended") from death

    def _gone(self, what: str) -> ChannelBroken:
        return channel_errors.broken(
            self.spec, self.owner, f"it lives inside process {self._name!r}; {what}"
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ChannelMisuse(
            problem(
                "inside-a-process",
                f"channel {self.spec.name}",
                f"keys {', '.join(self.spec.keys or ())}",
                name=self._name,
            )
        )

    _put = _get = _refuse
