"""Where a channel lives, and how to reach it from a given place.

::

    location          an end in its process   on its node      on another node
    ProcessLocation   LocalChannel            -                -                all its users share one process
    NodeLocation      SharedChannel           SharedChannel    RemoteChannel, through its node's channel server

An address is a value: it is sent to a worker, and the worker's place decides which end it becomes.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.comm.spread import Branch, SpreadChannel

if TYPE_CHECKING:
    from rlplace.comm.network import Connection, Keys
    from rlplace.comm.shared_memory.channel import SharedChannel


class ProcessChannels:
    """What the ends of one process share: its local channels, its shared memory, its connections to other nodes."""

    def __init__(self) -> None:
        self._local: dict[str, LocalChannel] = {}  # by name
        self._shared: dict[Path, SharedChannel] = {}
        self._connections: dict[str, Connection] = {}  # by endpoint
        self._lock = threading.Lock()

    def local(self, spec: ChannelSpec) -> LocalChannel:
        """The channel of this name, made by the first that asks."""
        with self._lock:
            if spec.name not in self._local:
                self._local[spec.name] = LocalChannel(spec)
            return self._local[spec.name]

    def shared(self, path: Path) -> SharedChannel:
        from rlplace.comm.shared_memory.channel import SharedChannel

        with self._lock:
            if path not in self._shared:
                self._shared[path] = SharedChannel.attach(path)
            return self._shared[path]

    def connection(self, server: ServerAddress) -> Connection:
        from rlplace.comm.network import Connection  # here: where one node suffices ZeroMQ is not needed

        with self._lock:
            if server.endpoint not in self._connections:
                self._connections[server.endpoint] = Connection(server.endpoint, server.keys)
            return self._connections[server.endpoint]

    def close(self) -> None:
        """Lets go of memory and lines; the ends are not to be used again. Idempotent."""
        with self._lock:
            shared, self._shared = self._shared, {}
            connections, self._connections = self._connections, {}
        for channel in shared.values():
            channel.detach()
        for connection in connections.values():
            connection.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an end is asked for."""

    node: int
    process: str = ""  # its name where several workers share it, else ""
    ends: ProcessChannels = dataclasses.field(default_factory=ProcessChannels, repr=False)


class Location(Protocol):
    """Where one branch of a channel lives."""

    @property
    def spec(self) -> ChannelSpec:
        """The branch's own: its keys and its capacity under the whole channel's name."""
        ...

    def connect(self, place: Place) -> Channel: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLocation:
    """All users of these keys are workers of one process."""

    spec: ChannelSpec
    node: int
    process: str

    def connect(self, place: Place) -> Channel:
        assert (place.node, place.process) == (self.node, self.process), f"{self} was asked for at {place}"
        return place.ends.local(self.spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """How other nodes reach a node's channels."""

    endpoint: str
    keys: Keys = dataclasses.field(repr=False)  # secret


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeLocation:
    """The channel is in a file of its node's shared memory."""

    spec: ChannelSpec
    node: int
    path: Path
    server: ServerAddress | None = None  # None: all its users are on its node

    def connect(self, place: Place) -> Channel:
        if place.node == self.node:
            return place.ends.shared(self.path)
        from rlplace.comm.network import RemoteChannel

        assert self.server is not None, f"{self} was asked for at {place}"
        return RemoteChannel.over(place.ends.connection(self.server), self.server.keys, self.spec, self.spec.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """A channel as it is told to a worker."""

    spec: ChannelSpec
    locations: tuple[Location, ...]

    def connect(self, place: Place) -> Channel:
        """This place's end. Several locations are connected one by one, when first used."""
        if len(self.locations) == 1:
            return self.locations[0].connect(place)
        branches = [
            Branch(location.spec.keys, functools.partial(location.connect, place)) for location in self.locations
        ]
        return SpreadChannel(self.spec, branches)
