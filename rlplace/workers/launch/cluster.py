"""The machines a job runs on: what is declared or found, the launcher that starts workers there, and their end."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.config.schema import AcceleratorConfig, ClusterConfig, CommConfig, RayConfig
from rlplace.errors import ClusterError
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import PlacementStrategy, Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.group import GroupBuilder, WorkerGroup, close_all, wait_all
from rlplace.workers.launch.host import GroupSpec
from rlplace.workers.launch.inline import InlineLauncher
from rlplace.workers.launch.machines import count_topology, declared_topology

if TYPE_CHECKING:
    from rlplace.workers.ray_launch.launcher import RayLauncher

# What to start, where (slots of a plan, or a strategy that makes them), and the channels it uses.
Launch = tuple[GroupBuilder, PlacementStrategy | Sequence[Slot], Mapping[str, Channel]]


class Cluster:
    """Nodes and their accelerators. Starts on first use or with `start`; owns what is launched on it until `close`."""

    def __init__(
        self,
        num_nodes: int = 1,
        accelerators_per_node: int | Literal["auto"] = "auto",
        *,
        accelerator: AcceleratorConfig | None = None,
        launcher: Literal["ray", "inline"] = "ray",
        ray: RayConfig | None = None,
        comm: CommConfig | None = None,
        topology: Topology | None = None,
        shared_bytes: Mapping[int, int] | None = None,
    ) -> None:
        """`topology` overrides the counts, for machines that are not alike.

        `shared_bytes`: what the job takes of each node's shared memory; a start is refused where that is not free.
        """
        self._ray = ray or RayConfig()
        local = self._ray.address is None
        self.topology = topology or count_topology(
            num_nodes, accelerators_per_node, accelerator or AcceleratorConfig(), local=local
        )
        self.start_s: dict[str, float] = {}  # seconds, by phase
        self._launcher: InlineLauncher | RayLauncher
        if launcher == "inline":
            self._launcher = InlineLauncher(self.topology)
        else:
            from rlplace.workers.ray_launch.session import ray_environment

            with ray_environment(self._ray.address):
                from rlplace.workers.ray_launch.launcher import RayLauncher

            self._launcher = RayLauncher(self.topology, self._ray, comm or CommConfig(), shared_bytes or {})
        self._groups: dict[str, WorkerGroup] = {}
        self._channels: set[str] = set()  # names
        self._started = self._reserved = self._closed = False

    @classmethod
    def from_config(
        cls,
        config: ClusterConfig,
        topology: Topology | None = None,
        *,
        shared_bytes: Mapping[int, int] | None = None,
    ) -> Cluster:
        return cls(
            topology=topology or declared_topology(config),
            launcher=config.launcher,
            ray=config.ray,
            comm=config.comm,
            shared_bytes=shared_bytes,
        )

    def start(self) -> None:
        """Reach the machines; the first `channel` or launch does it otherwise. Idempotent. Raises ClusterError."""
        if self._closed:
            raise ClusterError.about("cluster-closed", "cluster", "is closed", fix="make a new Cluster(...)")
        if not self._started:
            with self._phase("start"):
                self._launcher.start()
            self._started = True

    def reserve(self, slots: Sequence[Slot] | None = None) -> None:
        """Take what `slots` use, or all accelerators of all nodes; once: what a launch before it took stays.

        Raises ClusterError, which names what is missing and where.
        """
        self.start()
        if self._reserved:
            return
        with self._phase("reserve"):
            self._launcher.reserve(slots)
        self._reserved = True

    def channel(self, spec: ChannelSpec, locations: Sequence[ChannelLocation] = ()) -> Channel:
        """Make a channel and return the driver's end; workers get theirs at launch. A name is used once per cluster.

        `locations`: where its keys live, as planned; without them all of it lives on the driver's node.
        """
        self.start()
        if spec.name in self._channels:
            raise ClusterError.about(
                "channel-exists",
                f"channel {spec.name}",
                "a channel of this name was made in this cluster before",
                why="the name stands for the channel in errors and statistics",
                fix=f'ChannelSpec(name="{spec.name}_2", ...)',
            )
        self._channels.add(spec.name)
        return self._launcher.channel(spec, locations)

    def launch_all(self, launches: Mapping[str, Launch], *, seed: int = 0) -> dict[str, WorkerGroup]:
        """Start, verify and set up groups together, all or none. Returns them by name.

        Raises ClusterError, WorkerError and, after `ray.start_timeout_s`, WorkerTimeout.
        """
        began = time.monotonic()
        specs = [self._spec(name, *launch, seed) for name, launch in launches.items()]
        self.reserve([slot for spec in specs for slot in spec.slots])
        with self._phase("workers"):
            handles = self._launcher.launch(specs)
        groups = {spec.name: WorkerGroup(spec, handles[spec.name]) for spec in specs}
        with contextlib.ExitStack() as failed, self._phase("setup"):
            failed.callback(close_all, list(groups.values()), 0.0)
            left_s = self._ray.start_timeout_s - (time.monotonic() - began)
            wait_all([g.setup() for g in groups.values()], max(1.0, left_s))
            failed.pop_all()
        self._groups.update(groups)
        return groups

    def _spec(
        self,
        name: str,
        builder: GroupBuilder,
        placed: PlacementStrategy | Sequence[Slot],
        channels: Mapping[str, Channel],
        seed: int,
    ) -> GroupSpec:
        if name in self._groups and not self._groups[name].closed:
            why = "the name stands for the component in errors, channels and accounts"
            fix = f'close it first, or launch(..., name="{name}_2")'
            raise ClusterError.about("group-exists", name, "a group of this name is running", why=why, fix=fix)
        slots = placed if isinstance(placed, Sequence) else placed.get_placement(self)
        return GroupSpec(
            name=name,
            worker=builder.worker,
            config=builder.config,
            slots=tuple(s if s.component == name else dataclasses.replace(s, component=name) for s in slots),
            channels=channels,
            seed=seed,
        )

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.start_s[name] = self.start_s.get(name, 0.0) + time.perf_counter() - began

    def describe(self) -> str:
        """Describe in one line the accelerators, whether emulated, the workers, and where start-up time went."""
        on_cpu = all(node.kind == "emulated" for node in self.topology.nodes)
        emulated = " emulated (computing on the CPU)" if on_cpu else ""
        workers = ", ".join(f"{g.world_size} {name}" for name, g in self._groups.items())
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.start_s.items())
        return (
            f"{self.topology.describe()}{emulated}; {workers or 'no'} workers as {self._launcher.describe()}; "
            f"start {sum(self.start_s.values()):.1f} s ({phases})"
        )

    def close(self) -> None:
        """End all groups and whatever was started for them. Idempotent; bounded in time."""
        if self._closed:
            return
        self._closed = True
        try:
            close_all(list(self._groups.values()))
        finally:
            self._launcher.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
