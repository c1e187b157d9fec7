"""The channels of one node: the job folder they live in, and the server by which other nodes reach them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import SPILL, JobFolder, check_space
from rlplace.errors import ChannelError, ClusterError, Problem
from rlplace.workers.launch.reservation import Machine
from rlplace.workers.ray_launch.guard import Guard

if TYPE_CHECKING:
    from rlplace.comm.network import ChannelServer, Keys

_CLOSE_S = 5.0  # for another node to remove its folder


class Node(Protocol):
    """What the driver asks of a node's channels, whichever process holds them."""

    def folder(self) -> Path:
        """The node's job folder."""
        ...

    def check(self, needed_bytes: int) -> None:
        """ClusterError unless the node has so much shared memory free."""
        ...

    def create(self, spec: ChannelSpec) -> Path:
        """Makes a channel; the node's processes attach to the file it returns."""
        ...

    def serve(self, host: str, keys: Keys) -> str:
        """Open the channel server at an address of the node, once. Returns its endpoint."""
        ...

    def close(self) -> None:
        """Breaks the channels and removes the folder. Idempotent; bounded in time."""
        ...


class NodeChannels:
    """A Node in this process. Owns the folder, the channels and the channel server.

    Without `serve` it listens nowhere. Its folder is removed even if the process is killed.
    """

    def __init__(self, parent: Path | None) -> None:
        """`parent`: where the job folder is made; None: where this machine keeps shared memory."""
        self._folder = JobFolder.create(parent)
        self._guard = Guard.removing(self._folder.path, self._folder.file(SPILL).readlink())
        self._channels: list[SharedChannel] = []
        self._server: ChannelServer | None = None
        self._endpoint = ""

    def folder(self) -> Path:
        return self._folder.path

    def check(self, needed_bytes: int) -> None:
        check_space(self._folder.path.parent, needed_bytes, key="cluster.comm.shm_folder")

    def create(self, spec: ChannelSpec) -> Path:
        channel = SharedChannel.create(self._folder.path, spec)
        self._channels.append(channel)
        if self._server is not None:
            self._server.add(spec.name, channel)
        return channel.path

    def serve(self, host: str, keys: Keys) -> str:
        from rlplace.comm.network import ChannelServer  # here: where one node suffices ZeroMQ is not needed

        if self._server is None:
            self._server = ChannelServer(host=host, keys=keys)
            for channel in self._channels:
                self._server.add(channel.spec.name, channel)
            self._endpoint = self._server.start()
        return self._endpoint

    def close(self) -> None:
        channels, self._channels = self._channels, []
        for channel in channels:
            with contextlib.suppress(ChannelError):  # its lock is held by a process that stands still
                channel.break_("the cluster was closed")
        if self._server is not None:
            self._server.close()
            self._server = None
        for channel in channels:
            channel.destroy()
            channel.detach()
        self._folder.close()
        self._guard.dismiss()


class RemoteNode:
    """A Node in an actor on another machine; every question waits for its answer and raises ClusterError without."""

    def __init__(self, machine: Machine, parent: Path | None, timeout_s: float) -> None:
        """Does not wait for the actor to start."""
        on_machine = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "enable_task_events": False}
        self._actor: Any = ray.remote(NodeChannels).options(scheduling_strategy=on_machine, **options).remote(parent)
        self._machine = machine
        self._timeout_s = timeout_s

    def folder(self) -> Path:
        path: Path = self._answer("folder", self._actor.folder.remote())
        return path

    def check(self, needed_bytes: int) -> None:
        self._answer("look at its shared memory", self._actor.check.remote(needed_bytes))

    def create(self, spec: ChannelSpec) -> Path:
        path: Path = self._answer(f"make channel {spec.name}", self._actor.create.remote(spec))
        return path

    def serve(self, host: str, keys: Keys) -> str:
        endpoint: str = self._answer(f"listen at {host}", self._actor.serve.remote(host, keys))
        return endpoint

    def close(self) -> None:
        ray.wait([self._actor.close.remote()], timeout=_CLOSE_S)
        ray.kill(self._actor)

    def _answer(self, what: str, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self._timeout_s)
        except RayTaskError as error:
            raise error.cause from None  # what our own code says there
        except (GetTimeoutError, RayActorError) as error:
            raise ClusterError(
                Problem(
                    code="node-lost",
                    key=f"node {self._machine.address}",
                    what=f"did not {what}",
                    got=f"{type(error).__name__}: {error}".partition("\n")[0],
                    why="the process that holds a node's channels runs there, and it does not answer",
                    fix="look at the load, the memory and the logs of this node",
                )
            ) from error
