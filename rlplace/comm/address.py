"""Where a channel lives, and how to reach it from a given place.

::

    home           an end in its process    on its node       on another node
    ProcessHome    LocalChannel             -                 -                     all who use it share one process
    NodeHome       SharedChannel            SharedChannel     RemoteChannel, through the gate of the home's node

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
    from rlplace.comm.shared.channel import SharedChannel


class ProcessChannels:
    """What the ends of one process share: the channels inside it, its hold on shared memory, its lines to gates."""

    def __init__(self) -> None:
        self._local: dict[str, LocalChannel] = {}  # by name
        self._shared: dict[Path, SharedChannel] = {}
        self._connections: dict[str, Connection] = {}  # by endpoint
        self._lock = threading.Lock()

    def local(self, spec: ChannelSpec) -> LocalChannel:
        """The channel of this name, made by whoever asks first."""
        with self._lock:
            if spec.name not in self._local:
                self._local[spec.name] = LocalChannel(spec)
            return self._local[spec.name]

    def shared(self, path: Path) -> SharedChannel:
        from rlplace.comm.shared.channel import SharedChannel

        with self._lock:
            if path not in self._shared:
                self._shared[path] = SharedChannel.attach(path)
            return self._shared[path]

    def connection(self, gate: GateAddress) -> Connection:
        from rlplace.comm.network import Connection  # here: where one node suffices nobody needs ZeroMQ

        with self._lock:
            if gate.endpoint not in self._connections:
                self._connections[gate.endpoint] = Connection(gate.endpoint, gate.keys)
            return self._connections[gate.endpoint]

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


class Home(Protocol):
    """Where one branch of a channel lives."""

    @property
    def spec(self) -> ChannelSpec:
        """The branch's own: its keys and its capacity under the whole channel's name."""
        ...

    def connect(self, place: Place) -> Channel: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHome:
    """All who put to these keys or take from them are workers of one process."""

    spec: ChannelSpec
    node: int
    process: str

    def connect(self, place: Place) -> Channel:
        assert (place.node, place.process) == (self.node, self.process), f"{self} was asked for at {place}"
        return place.ends.local(self.spec)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GateAddress:
    """How other nodes reach a node's channels."""

    endpoint: str
    keys: Keys = dataclasses.field(repr=False)  # secret


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeHome:
    """The channel is in a file of its node's shared memory."""

    spec: ChannelSpec
    node: int
    path: Path
    gate: GateAddress | None = None  # None: everybody who uses it is on its node

    def connect(self, place: Place) -> Channel:
        if place.node == self.node:
            return place.ends.shared(self.path)
        from rlplace.comm.network import RemoteChannel

        assert self.gate is not None, f"{self} was asked for at {place}"
        return RemoteChannel.over(place.ends.connection(self.gate), self.gate.keys, self.spec, self.spec.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelAddress:
    """A channel as it is told to a worker."""

    spec: ChannelSpec
    homes: tuple[Home, ...]

    def connect(self, place: Place) -> Channel:
        """This place's end. Several homes are connected one by one, when first used."""
        if len(self.homes) == 1:
            return self.homes[0].connect(place)
        branches = [Branch(home.spec.keys, functools.partial(home.connect, place)) for home in self.homes]
        return SpreadChannel(self.spec, branches)
