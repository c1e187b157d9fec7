"""The location of a channel, and the connection to it from a given node and process.

::

    location          an end in its process   on its node      on another node
    ProcessLocation   LocalChannel            -                -                all users share one process
    NodeLocation      SharedChannel           SharedChannel    RemoteChannel, through its node's channel server
    several           SpreadChannel: put and get go by key, close and break_ to all branches

An address is a value: it is sent to a worker, and the worker's place decides which kind of end it becomes.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlplace.comm import channel_errors
from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.ends import LocalChannel
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.errors import ChannelError

if TYPE_CHECKING:
    from rlplace.comm.network import Connection, Keys


class Branch(NamedTuple):
    """A part of a spread channel.

    `keys`: the keys whose items are in this part. `connect`: connects to this part and returns an end of the part. It
    is called when the part is used for the first time, because most ends use only a few of many parts.
    """

    keys: Sequence[str]
    connect: Callable[[], Channel]


class SpreadChannel(Channel):
    """A channel that divides its keys among several channels, which are called its branches.

    All items of a key are in one branch. So the items of a key have the same order as in a single channel, and puts and
    gets at a key wait in the same way.
    """

    def __init__(self, spec: ChannelSpec, branches: Sequence[Branch]) -> None:
        """Make an end of the channel.

        `spec`: name, capacity and other properties of the whole channel. `branches`: its parts; each key belongs to one
        part only.
        """
        super().__init__(spec)
        self._branches = tuple(branches)
        # Every key belongs to exactly one branch
        self._branch_of = {key: branch for branch in branches for key in branch.keys}
        # By owner and key, filled on first use
        self._ends: dict[tuple[str, str], Channel] = {}

    def _end(self, key: str) -> Channel:
        """Return the end of the branch that has `key`, for the worker of this channel end.

        The branch is connected at the first call.
        """
        end = self._ends.get((self.owner, key))
        if end is None:
            # Connect the branch of the key at its first use
            branch = self._branch_of.get(key)
            if branch is None:
                raise channel_errors.unknown_key(self.spec, self.owner, key)
            end = self._ends[self.owner, key] = branch.connect().named(self.owner)
        return end

    def link(self, key: str) -> Connection | None:
        """Return the connection to the node where the items of `key` are stored, or None if it is this node."""
        return self._end(key).link(key)

    def _put(
        self,
        item: Any,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        self._end(key)._put(item, key, weight, version, patience_s)

    def _get(
        self,
        limit: float | None,
        key: str,
        patience_s: float | None,
    ) -> list[Any]:
        return self._end(key)._items(limit, key, patience_s)

    def close(self) -> None:
        self._on_all(lambda branch: branch.close())

    def break_(self, why: str) -> None:
        self._on_all(lambda branch: branch.break_(why))

    def reset(self) -> None:
        self._on_all(lambda branch: branch.reset())

    def _on_all(self, act: Callable[[Channel], None]) -> None:
        """Call `act` on an end of each branch, also after a call has raised ChannelError; then raise the first error.

        `act`: takes the end of a branch.
        """
        failed: ChannelError | None = None
        for branch in self._branches:
            try:
                act(branch.connect().named(self.owner))
            except ChannelError as error:
                # Keep the first error
                failed = failed or error
        if failed is not None:
            raise failed

    def stats(self) -> ChannelStats:
        """Return the statistics of all branches together. Counts and seconds are sums; the staleness is the maximum.

        The high-water mark is the sum of the high-water marks of the branches, which may be of different moments.
        """
        branches = [branch.connect().stats() for branch in self._branches]
        # Puts first; sorting keeps their order
        waits = [wait for branch in branches for wait in branch.waits]
        waits.sort(key=lambda wait: wait.wants == "item")
        # Names without repetitions, in order
        producers: dict[str, None] = {}
        consumers: dict[str, None] = {}
        dead: dict[str, None] = {}
        depth_by_key: dict[str, int] = {}
        put_by: Counter[str] = Counter()
        taken_by: Counter[str] = Counter()
        for branch in branches:
            depth_by_key |= branch.depth_by_key
            producers |= dict.fromkeys(branch.producers)
            consumers |= dict.fromkeys(branch.consumers)
            dead |= dict.fromkeys(branch.dead)
            put_by.update(branch.put_by)
            taken_by.update(branch.taken_by)
        return ChannelStats(
            capacity_items=sum(branch.capacity_items for branch in branches),
            depth_items=sum(branch.depth_items for branch in branches),
            high_water_items=sum(branch.high_water_items for branch in branches),
            puts=sum(branch.puts for branch in branches),
            gets=sum(branch.gets for branch in branches),
            bytes=sum(branch.bytes for branch in branches),
            producer_wait_s=sum(branch.producer_wait_s for branch in branches),
            consumer_wait_s=sum(branch.consumer_wait_s for branch in branches),
            waits=tuple(waits),
            depth_by_key=depth_by_key,
            producers=tuple(producers),
            consumers=tuple(consumers),
            dead=tuple(dead),
            put_by=put_by,
            taken_by=taken_by,
            staleness_max=max(branch.staleness_max for branch in branches),
        )


class ProcessChannels:
    """The local channels, mapped channels and connections to other nodes that all channel ends of one process share."""

    def __init__(self) -> None:
        # By name
        self._local: dict[str, LocalChannel] = {}
        self._shared: dict[Path, SharedChannel] = {}
        # By endpoint
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def local(self, spec: ChannelSpec) -> LocalChannel:
        """Return the local channel with the name of `spec`; the first call with this name creates the channel."""
        with self._lock:
            if spec.name not in self._local:
                self._local[spec.name] = LocalChannel(spec)
            return self._local[spec.name]

    def shared(self, path: Path) -> SharedChannel:
        """Return the channel in the file `path`; the first call maps the file."""
        with self._lock:
            if path not in self._shared:
                self._shared[path] = SharedChannel.attach(path)
            return self._shared[path]

    def connection(self, server: ServerAddress) -> Connection:
        """Return the connection to the channel server at the address `server`; connect at the first call."""
        # Imported here, since a job on one node does not need ZeroMQ
        from rlplace.comm.network import Connection

        with self._lock:
            if server.endpoint not in self._connections:
                self._connections[server.endpoint] = Connection(
                    server.endpoint, server.keys
                )
            return self._connections[server.endpoint]

    def close(self) -> None:
        """Release memory and connections. Afterwards, the ends of this process cannot be used any more. Idempotent."""
        with self._lock:
            shared = self._shared
            self._shared = {}
            connections = self._connections
            self._connections = {}
        # Outside of the lock, since closing may wait
        for channel in shared.values():
            channel.detach()
        for connection in connections.values():
            connection.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The node and the process in which a user of channels runs.

    `node`: number of the node. `process`: name of the process if several workers share the process, else "". `ends`:
    the channels and connections that all ends in the process share.
    """

    node: int
    process: str = ""  # name of the process if several workers share it, else ""
    ends: ProcessChannels = dataclasses.field(
        default_factory=ProcessChannels, repr=False
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLocation:
    """Location of a channel, or of some of its keys, in the memory of one process. All users are in this process.

    `spec`: properties of the channel, or of the part with these keys. `node`, `process`: number of the node and name of
    the process.
    """

    spec: ChannelSpec
    node: int
    process: str

    def connect(self, place: Place) -> Channel:
        assert (place.node, place.process) == (self.node, self.process), (
            f"{self} was asked for at {place}"
        )
        return place.ends.local(self.spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Address of a node's channel server, by which processes on other nodes reach the channels of the node.

    `keys`: the secret keys of the job, with which a client proves that it belongs to the job.
    """

    endpoint: str
    keys: Keys = dataclasses.field(repr=False)  # secret


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocation:
    """Location of a channel, or of some of its keys, in a file in the shared memory of one node.

    `spec`: properties of the channel, or of the part with these keys. `node`: number of the node. `path`: the file.
    `server`: address of the node's channel server, for users on other nodes; None: all users are on this node.
    """

    spec: ChannelSpec
    node: int
    path: Path
    server: ServerAddress | None = None  # None: all users are on its node

    def connect(self, place: Place) -> Channel:
        if place.node == self.node:
            return place.ends.shared(self.path)
        from rlplace.comm.network import RemoteChannel

        assert self.server is not None, f"{self} was asked for at {place}"
        return RemoteChannel(place.ends.connection(self.server), self.spec)


# Where one branch of a channel lives, with its keys and its capacity
Location = ProcessLocation | NodeLocation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """Address of a channel, which is sent to a worker; the worker uses it to connect an end of the channel.

    `spec`: properties of the whole channel. `locations`: a location for each part of the channel; only one if the
    channel is not divided.
    """

    spec: ChannelSpec
    locations: tuple[Location, ...]

    def connect(self, place: Place) -> Channel:
        """Return an end of the channel for a user at `place`."""
        return self.joined(lambda location: location.connect(place))

    def joined(self, connect: Callable[[Location], Channel]) -> Channel:
        """Return one end of the whole channel.

        `connect`: takes a location and returns an end of the part of the channel at that location. If there are several
        locations, a part is connected when it is used for the first time.
        """
        # A channel in one place needs no branches
        if len(self.locations) == 1:
            return connect(self.locations[0])
        branches = [
            Branch(each.spec.keys or (), functools.partial(connect, each))
            for each in self.locations
        ]
        return SpreadChannel(self.spec, branches)
