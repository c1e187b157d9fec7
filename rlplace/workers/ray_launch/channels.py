"""The channels of one Ray cluster: on which node each branch lives, and which addresses its workers are given.

::

    driver ── NodeChannels ─────────── job folder of the driver's node, in this process
           └─ RemoteNode ── actor ──── NodeChannels of another node       (only where the plan has another node)

A node listens only where a worker on another node uses one of its channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ray

from rlplace.comm.address import (
    Branch,
    ChannelAddress,
    Location,
    NodeLocation,
    Place,
    ProcessLocation,
    ServerAddress,
    SpreadChannel,
)
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.config import CommConfig
from rlplace.placement.channels import ChannelLocation
from rlplace.workers.launch.reservation import Machine
from rlplace.workers.ray_launch.actors import RayProcess
from rlplace.workers.ray_launch.node_channels import Node, NodeChannels, RemoteNode
from rlplace.workers.ray_launch.process_end import ProcessEnd

if TYPE_CHECKING:
    from rlplace.comm.network import Keys

DRIVER_APART = -1  # stands for the driver's node where it is none of the plan's


class JobChannels:
    """Owns all channels of a cluster and the folders they live in."""

    def __init__(
        self,
        machines: Sequence[Machine],
        config: CommConfig,
        processes: dict[str, RayProcess],
        *,
        shared_bytes: Mapping[int, int],
        timeout_s: float,
    ) -> None:
        """`machines` by node rank; `processes` that several workers share, by name, as the launcher starts them.

        `shared_bytes`: what the job takes of a node's shared memory, where it is known. `timeout_s`: longest wait for
        what runs on another node.
        """
        self._machines = machines
        self._folders = Path(config.shm_folder) if config.shm_folder else None
        self._interface = config.interface
        self._security = config.security
        self._processes = processes
        self._shared_bytes = shared_bytes
        self._timeout_s = timeout_s
        here = ray.get_runtime_context().get_node_id()
        apart = (node for node, machine in enumerate(machines) if machine.id == here)
        self._place = Place(node=next(apart, DRIVER_APART))
        self._nodes: dict[int, Node] = {}
        self._addresses: dict[str, ChannelAddress] = {}
        self._keys: Keys | None = None
        self._servers: dict[int, ServerAddress] = {}

    def create(self, spec: ChannelSpec, locations: Sequence[ChannelLocation]) -> Channel:
        """The driver's end of a new channel; without `locations` all of it lives on the driver's node."""
        self._start({location.node for location in locations if not location.process})
        found = [self._location(spec, location) for location in locations] or [
            self._node_location(spec, self._place.node)
        ]
        address = ChannelAddress(spec=spec, locations=tuple(found))
        self._addresses[spec.name] = address
        branches = [self._branch(location) for location in self._served(address, {self._place.node}).locations]
        return branches[0].channel() if len(branches) == 1 else SpreadChannel(spec, branches)

    def addresses_for(self, nodes: set[int], channels: Mapping[str, Channel]) -> dict[str, Channel | ChannelAddress]:
        """For workers on `nodes`: the addresses of these channels; a channel that was not made here as it is."""
        self._start(nodes)
        return {name: self._address(channel, nodes) for name, channel in channels.items()}

    def folder(self, node: int) -> Path:
        return self._node(node).folder()

    def close(self) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.close()
        self._place.ends.close()

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _location(self, spec: ChannelSpec, planned: ChannelLocation) -> Location:
        branch = dataclasses.replace(spec, keys=planned.keys, capacity_items=planned.capacity_items)
        if planned.process:
            return ProcessLocation(spec=branch, node=planned.node, process=planned.process)
        return self._node_location(branch, planned.node)

    def _node_location(self, spec: ChannelSpec, node: int) -> NodeLocation:
        return NodeLocation(spec=spec, node=node, path=self._node(node).create(spec))

    def _branch(self, location: Location) -> Branch:
        """As the driver sees it."""
        if isinstance(location, ProcessLocation):
            inside = ProcessEnd(location.spec, location.process, self._processes)
            return Branch(location.spec.keys, lambda: inside)
        return Branch(location.spec.keys, lambda: location.connect(self._place))

    def _address(self, channel: Channel, nodes: set[int]) -> Channel | ChannelAddress:
        address = self._addresses.get(channel.spec.name)
        if address is None or address.spec != channel.spec:
            return channel
        return self._served(address, nodes)

    def _served(self, address: ChannelAddress, nodes: set[int]) -> ChannelAddress:
        """The address with a channel server for each location that `nodes` reach from another node."""
        found = tuple(self._with_server(location, nodes) for location in address.locations)
        return dataclasses.replace(address, locations=found)

    def _with_server(self, location: Location, nodes: set[int]) -> Location:
        if not isinstance(location, NodeLocation) or nodes <= {location.node}:
            return location
        return dataclasses.replace(location, server=self._server(location.node))

    def _server(self, node: int) -> ServerAddress:
        server = self._servers.get(node)
        if server is None:
            if self._keys is None:
                self._keys = make_keys(self._security)
            endpoint = self._node(node).serve(self._interface or self._address_of(node), self._keys)
            server = self._servers[node] = ServerAddress(endpoint=endpoint, keys=self._keys)
        return server

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, nodes: Iterable[int]) -> None:
        """All of them side by side. Raises ClusterError where one lacks shared memory."""
        started = {node: self._node(node) for node in sorted(set(nodes) - self._nodes.keys())}
        for node, channels in started.items():
            channels.check(self._shared_bytes.get(node, 0))

    def _node(self, node: int) -> Node:
        if node not in self._nodes:
            here = node == self._place.node
            self._nodes[node] = (
                NodeChannels(self._folders)
                if here
                else RemoteNode(self._machines[node], self._folders, self._timeout_s)
            )
        return self._nodes[node]

    def _address_of(self, node: int) -> str:
        return ray.util.get_node_ip_address() if node == DRIVER_APART else self._machines[node].address


def make_keys(security: Literal["encrypted", "password"]) -> Keys:
    """New ones, for one job."""
    from rlplace.comm.network import JobKeys, JobPassword  # here: where one node suffices ZeroMQ is not needed

    return JobPassword.create() if security == "password" else JobKeys.create()
