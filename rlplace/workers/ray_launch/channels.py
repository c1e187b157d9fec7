"""The channels of one Ray cluster: on which node each branch lives, and what a worker on another node is told.

::

    driver ── NodeChannels ─────────── job folder of the driver's node, in this process
           └─ RemoteNode ── actor ──── NodeChannels of another node       (only where the plan has another node)

A gate is opened where somebody on another node uses a channel, and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ray

from rlplace.comm.address import ChannelAddress, GateAddress, Home, NodeHome, Place, ProcessHome
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.spread import Branch, SpreadChannel
from rlplace.config import CommConfig
from rlplace.placement.channels import ChannelHome
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
        self._gates: dict[int, GateAddress] = {}

    def create(self, spec: ChannelSpec, homes: Sequence[ChannelHome]) -> Channel:
        """The driver's end of a new channel; without `homes` all of it lives on the driver's node."""
        self._start({home.node for home in homes if not home.process})
        found = [self._home(spec, home) for home in homes] or [self._node_home(spec, self._place.node)]
        address = ChannelAddress(spec=spec, homes=tuple(found))
        self._addresses[spec.name] = address
        branches = [self._branch(home) for home in self._served(address, {self._place.node}).homes]
        return branches[0].channel() if len(branches) == 1 else SpreadChannel(spec, branches)

    def told_to(self, nodes: set[int], channels: Mapping[str, Channel]) -> dict[str, Channel | ChannelAddress]:
        """What workers on `nodes` are given for these channels: addresses, and what was not made here as it is."""
        self._start(nodes)
        return {name: self._told(channel, nodes) for name, channel in channels.items()}

    def folder(self, node: int) -> Path:
        return self._node(node).folder()

    def close(self) -> None:
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.close()
        self._place.ends.close()

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _home(self, spec: ChannelSpec, planned: ChannelHome) -> Home:
        branch = dataclasses.replace(spec, keys=planned.keys, capacity_items=planned.capacity_items)
        if planned.process:
            return ProcessHome(spec=branch, node=planned.node, process=planned.process)
        return self._node_home(branch, planned.node)

    def _node_home(self, spec: ChannelSpec, node: int) -> NodeHome:
        return NodeHome(spec=spec, node=node, path=self._node(node).create(spec))

    def _branch(self, home: Home) -> Branch:
        """As the driver sees it."""
        if isinstance(home, ProcessHome):
            inside = ProcessEnd(home.spec, home.process, self._processes)
            return Branch(home.spec.keys, lambda: inside)
        return Branch(home.spec.keys, lambda: home.connect(self._place))

    def _told(self, channel: Channel, nodes: set[int]) -> Channel | ChannelAddress:
        address = self._addresses.get(channel.spec.name)
        if address is None or address.spec != channel.spec:
            return channel
        return self._served(address, nodes)

    def _served(self, address: ChannelAddress, nodes: set[int]) -> ChannelAddress:
        """The address with a gate at each home that somebody on `nodes` reaches from another node."""
        return dataclasses.replace(address, homes=tuple(self._with_gate(home, nodes) for home in address.homes))

    def _with_gate(self, home: Home, nodes: set[int]) -> Home:
        if not isinstance(home, NodeHome) or nodes <= {home.node}:
            return home
        return dataclasses.replace(home, gate=self._gate(home.node))

    def _gate(self, node: int) -> GateAddress:
        gate = self._gates.get(node)
        if gate is None:
            if self._keys is None:
                self._keys = make_keys(self._security)
            endpoint = self._node(node).serve(self._interface or self._address_of(node), self._keys)
            gate = self._gates[node] = GateAddress(endpoint=endpoint, keys=self._keys)
        return gate

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
    from rlplace.comm.network import JobKeys, JobPassword  # here: where one node suffices nobody needs ZeroMQ

    return JobPassword.create() if security == "password" else JobKeys.create()
