"""The machines of a job and the launcher that starts workers there.

The inline launcher runs workers as threads of this process; it is meant for small jobs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlplace.codes import problem
from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.config.blocks.machines import (
    AcceleratorConfig,
    ClusterConfig,
    CommConfig,
    RayConfig,
)
from rlplace.config.read import read_cluster
from rlplace.config.worker_variables import named_variables
from rlplace.errors import ClusterError, RayDied, WorkerTimeout
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import PlacementStrategy, Slot
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import setup_order
from rlplace.proxies import keep_local
from rlplace.signals import deferred
from rlplace.workers.launch.devices import (
    AccountOfRuns,
    Device,
    MemoryAccount,
    ProcessClaims,
    make_device,
)
from rlplace.workers.launch.group import (
    GroupBuilder,
    Pending,
    Ranks,
    Settle,
    WorkerGroup,
    WorkerHandle,
    close_all,
    deadline_passed,
    wait_all,
    wait_until,
)
from rlplace.workers.launch.host import Failure, GroupSpec, Request, WorkerHost
from rlplace.workers.launch.machines import count_topology, declared_topology
from rlplace.workers.launch.output import Outputs, output_file
from rlplace.workers.launch.reservation import visible_to
from rlplace.workers.launch.variables import reserve_port, torch_variables
from rlplace.workers.lending import Lending
from rlplace.workers.messages import Mailbox, mailbox_spec
from rlplace.workers.threads import VARIABLE, limit_threads, threads
from rlplace.workers.worker import Rendezvous, Worker

if TYPE_CHECKING:
    from rlplace.workers.ray_launch.launcher import RayLauncher

# What to start, its slots (or a strategy that computes them), and the channels that it uses.
Launch = tuple[GroupBuilder, PlacementStrategy | Sequence[Slot], Mapping[str, Channel]]
Lost = Mapping[str, Collection[int]]  # ranks by component
_DRIVER = "the driver"  # in errors and statistics of channels
_MAIL = "messages to "  # prefix of the names of mailboxes
_REPORT_S = 5.0  # deadline for a callback that reports a group, after the calls of the group are done
_LEAVE_S = 60.0  # deadline for workers that stay to close what depends on the plan
_MEET_S = 30.0  # deadline for the workers of all groups to learn of new groups


class Cluster:
    """The nodes of a job and their accelerators, on which worker groups are launched.

    The cluster starts with `start` or at its first use. It owns all launched groups and channels until `close`.
    """

    def __init__(
        self,
        num_nodes: int | None = None,
        accelerators_per_node: int | Literal["auto"] | None = None,
        *,
        cluster_cfg: ClusterConfig | Mapping[str, Any] | None = None,
        accelerator: AcceleratorConfig | None = None,
        launcher: Literal["ray", "inline"] | None = None,
        ray: RayConfig | None = None,
        comm: CommConfig | None = None,
        topology: Topology | None = None,
        shared_bytes: Mapping[int, int] | None = None,
        tell: Callable[[str], None] = lambda line: None,
        workers: Iterable[type[Worker]] = (),
        output: Path | str | None = None,
        variables: Mapping[str, str] | None = None,
        account: AccountOfRuns | None = None,
        tried: Sequence[str] = (),
        num_gpus_per_node: int | None = None,
        distributed_log_dir: Path | str | None = None,
    ) -> None:
        """Describe the cluster without starting it. By default, it is one node with all of its accelerators, and runs
        on Ray.

        `num_nodes`: number of nodes. `accelerators_per_node`: a number, or "auto" for all accelerators of a node.
        `cluster_cfg`: the `cluster` block of a config, as a ClusterConfig, a mapping or a DictConfig; other arguments
        override its keys. `accelerator`: kind and memory of the accelerators. `launcher`: "ray", or "inline" to run
        workers as threads of this process. `ray`, `comm`: settings of Ray and of channels. `topology`: description of
        each node, instead of the numbers of nodes and accelerators. `shared_bytes`: bytes of free shared memory that
        the start requires, by node rank.

        `tell`: called with one line of text for each step of the start, also from other threads. `workers`: classes
        that will be launched; their modules are imported in advance, to save time at the launch. `output`: folder for
        what workers print and log, with one file per rank on its node, `<output>/<component>-<rank>.txt`; None: Ray's
        own files, or the output of this process. `variables`: environment variables for all worker processes.
        `account`: the memory account that other runs on the same emulated accelerators use; None: there are none.
        `tried`: names of large modules of libraries that workers import. They are imported in advance too, if this is
        possible: a module that starts threads is not.
        `num_gpus_per_node` and `distributed_log_dir`: the names that RLinf uses for `accelerators_per_node` and
        `output`. Raise ConfigError if `cluster_cfg` is wrong.
        """
        # The environment of this process also becomes the workers' environment.
        keep_local()
        if accelerators_per_node is None:
            accelerators_per_node = num_gpus_per_node
        if output is None:
            output = distributed_log_dir
        if cluster_cfg is not None:
            config = _with(
                read_cluster(cluster_cfg),
                num_nodes=num_nodes,
                accelerators_per_node=accelerators_per_node,
                accelerator=accelerator,
            )
            topology = topology or declared_topology(config)
            launcher = launcher or config.launcher
            ray = ray or config.ray
            comm = comm or config.comm
            if variables is None:
                variables = named_variables(config)
        self.launcher = launcher or "ray"
        # Set when workers are sent over and their groups are launched one by one.
        self.job: Any = None
        self._ray = ray or RayConfig()
        local = self._ray.address is None
        self.topology = topology or count_topology(
            1 if num_nodes is None else num_nodes,
            "auto" if accelerators_per_node is None else accelerators_per_node,
            accelerator or AcceleratorConfig(),
            local=local,
        )
        # Start-up seconds, by phase
        self.start_s: dict[str, float] = {}
        self._began = time.perf_counter()
        self._tell_line = tell
        self._launcher: InlineLauncher | RayLauncher
        if self.launcher == "inline":
            self._launcher = InlineLauncher(self.topology, account)
        else:
            self._launcher = self._ray_launcher(
                comm or CommConfig(),
                shared_bytes or {},
                workers,
                variables or {},
                account,
                tried,
            )
        self._groups: dict[str, WorkerGroup] = {}
        # Specs of the launched groups, by name
        self._specs: dict[str, GroupSpec] = {}
        self._channels: dict[str, Channel] = {}
        # Names of the channels that planned weight syncs use
        self._of_weights = set[str]()
        # By the name of the group that receives the messages
        self._mailboxes: dict[str, Mailbox] = {}
        self._mailboxes_made = 0
        self._output = None if output is None else Path(output).expanduser()
        # (node, accelerator number on that node)
        self._given_up = set[tuple[int, int]]()
        self._started = self._reserved = self._closed = False

    def _ray_launcher(
        self,
        comm: CommConfig,
        shared_bytes: Mapping[int, int],
        workers: Iterable[type[Worker]],
        variables: Mapping[str, str],
        account: AccountOfRuns | None,
        tried: Sequence[str],
    ) -> RayLauncher:
        with contextlib.ExitStack() as stopped:
            with deferred():
                from rlplace.workers.ray_launch.session import ray_environment
                from rlplace.workers.ray_launch.template import Template, modules_of

                template = None
                modules = modules_of(workers)
                here = (
                    "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
                )
                if (
                    modules
                    and here
                    and self._ray.address is None
                    and self._ray.start == "fork"
                ):
                    # The template process must exist before Ray is imported.
                    template = Template(modules, variables, tried)
                    stopped.callback(template.stop)
                with ray_environment(self._ray.address):
                    from rlplace.workers.ray_launch.launcher import RayLauncher

                launcher = RayLauncher(
                    self.topology,
                    self._ray,
                    comm,
                    shared_bytes,
                    self._tell,
                    template,
                    variables,
                    account,
                    tried,
                )
            stopped.pop_all()
        return launcher

    @classmethod
    def from_config(
        cls,
        config: ClusterConfig,
        topology: Topology | None = None,
        *,
        shared_bytes: Mapping[int, int] | None = None,
        tell: Callable[[str], None] = lambda line: None,
        workers: Iterable[type[Worker]] = (),
        output: Path | str | None = None,
        variables: Mapping[str, str] | None = None,
        account: AccountOfRuns | None = None,
        tried: Sequence[str] = (),
    ) -> Cluster:
        return cls(
            topology=topology or declared_topology(config),
            launcher=config.launcher,
            ray=config.ray,
            comm=config.comm,
            shared_bytes=shared_bytes,
            tell=tell,
            workers=workers,
            output=output,
            variables=variables,
            account=account,
            tried=tried,
        )

    def start(self) -> None:
        """Start or join Ray and find the machines. Later calls change nothing.

        If `start` was not called, the first launch or channel calls it. Raise ClusterError if a machine is missing or
        the cluster is closed.
        """
        if self._closed:
            raise ClusterError(problem("cluster-closed", "cluster"))
        if not self._started:
            with self._phase("cluster"), deferred():
                self._launcher.start()
            self._started = True

    def reserve(self, slots: Sequence[Slot] | None = None) -> None:
        """Reserve the accelerators of `slots` for this job; None: all accelerators of the cluster.

        Only the first call reserves; later calls change nothing. Raise ClusterError, which names the missing
        accelerators, if the reservation fails.
        """
        self.start()
        if self._reserved:
            return
        with self._phase("reserve"), deferred():
            self._launcher.reserve(slots)
        self._reserved = True

    def reserve_more(self, slots: Sequence[Slot]) -> bool:
        """Reserve the accelerators of `slots` that are not reserved yet. Return whether all of them are reserved now.

        Only accelerators of nodes that the job uses can be added.
        """
        with deferred():
            return self._launcher.reserve_more(slots)

    def channel(
        self, spec: ChannelSpec, locations: Sequence[ChannelLocation] = ()
    ) -> Channel:
        """Create a channel, and return the end by which the driver can use it.

        `spec`: name, capacity and keys of the channel. No other channel of the cluster may have the name. `locations`:
        planned nodes or processes in which the channel's keys live; empty: the driver's node. Raise ClusterError if the
        name is used.
        """
        self.start()
        if spec.name in self._channels:
            raise ClusterError(
                problem("channel-exists", f"channel {spec.name}", name=spec.name)
            )
        with deferred():
            channel = self._launcher.channel(spec, locations).named(_DRIVER)
        self._channels[spec.name] = channel
        return channel

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Channels that the method `channel` has made so far, by name.

        Channels of messages and of weight syncs, which the cluster makes itself, are left out.
        """
        return {
            name: channel
            for name, channel in self._channels.items()
            if not name.startswith(_MAIL) and name not in self._of_weights
        }

    def launch_all(self, launches: Mapping[str, Launch]) -> dict[str, WorkerGroup]:
        """Start, verify and set up all groups of `launches`, and return them by name. If one group fails, end all of
        them.

        `launches`: group name -> (what to launch, its slots, its channels). Raise ClusterError if a worker cannot
        start, WorkerError if a `setup` fails, WorkerTimeout if the groups are not ready after `ray.start_timeout_s`.
        """
        began = time.monotonic()
        specs = [self._spec(name, *launch) for name, launch in launches.items()]
        self.reserve([slot for spec in specs for slot in spec.slots])
        specs = [self._with_weights(spec) for spec in specs]
        made = [self._mailbox(spec) for spec in specs if spec.worker.with_tools]
        self._mailboxes |= {mailbox.group: mailbox for mailbox in made}
        known = tuple(self._mailboxes.values())
        specs = [dataclasses.replace(spec, mailboxes=known) for spec in specs]
        with contextlib.ExitStack() as failed, self._phase("workers"), deferred():
            failed.callback(self._forget_mailboxes, made)
            handles = self._launcher.launch(specs)
            failed.pop_all()
        groups = {
            spec.name: self._group(
                spec, handles[spec.name], launches[spec.name][0].kind
            )
            for spec in specs
        }
        with contextlib.ExitStack() as failed, self._phase("setup"):
            failed.callback(self._forget_mailboxes, made)
            failed.callback(close_all, list(groups.values()), 0.0)
            self._introduce(made)
            self._set_up(
                groups,
                [],
                max(1.0, began + self._ray.start_timeout_s - time.monotonic()),
                tell=True,
            )
            failed.pop_all()
        self._groups.update(groups)
        self._specs.update((spec.name, spec) for spec in specs)
        return groups

    def _group(
        self,
        spec: GroupSpec,
        handles: Sequence[WorkerHandle],
        kind: type[WorkerGroup],
    ) -> WorkerGroup:
        """Return the group of the workers that were started for `spec`.

        When the group ends, the channels of its mailbox break. `handles`: the workers by rank. `kind`: class of the
        group.
        """
        group = kind(spec, handles)
        group.interrupt = self._launcher.check
        if spec.name in self._mailboxes:
            ends = self._mailboxes[spec.name].channels
            group.channels |= {end.spec.name: end for end in ends}
            group.on_end = functools.partial(self._part, spec.name)
        return group

    # ── messages between workers ─────────────────────────────────────────────────────────────────────────────────────

    def _mailbox(self, spec: GroupSpec) -> Mailbox:
        """Create and return the mailbox of a group: on each node of the group, one channel that takes messages to its
        ranks there.
        """
        nodes = sorted({slot.node for slot in spec.slots})
        self._mailboxes_made += 1
        ends = []
        for node in nodes:
            name = f"{_MAIL}{spec.name}"
            if len(nodes) > 1:
                name += f" on node {node}"
            # A mailbox of an earlier group with the same name
            if name in self._channels:
                name += f" ({self._mailboxes_made})"
            ranks = [slot.rank for slot in spec.slots if slot.node == node]
            with deferred():
                end = self._launcher.channel(mailbox_spec(name, len(ranks)), (), node)
            self._channels[name] = end
            ends.append(end)
        of_rank = tuple(nodes.index(slot.node) for slot in spec.slots)
        return Mailbox(group=spec.name, channels=tuple(ends), of_rank=of_rank)

    def _forget_mailboxes(self, mailboxes: Iterable[Mailbox]) -> None:
        """Remove the mailboxes of groups whose launch has failed. Later groups are not told about them."""
        for mailbox in mailboxes:
            self._mailboxes.pop(mailbox.group, None)

    def _introduce(self, mailboxes: Sequence[Mailbox]) -> None:
        """Tell the workers of all running groups about `mailboxes`, so that they can send messages to the groups of the
        mailboxes.

        Wait until all workers have been told, at most `_MEET_S` seconds.
        """
        told = [
            handle.meet(mailboxes)
            for group in self._with_messages()
            for handle in group.handles
        ]
        concurrent.futures.wait(told, _MEET_S)

    def _part(self, name: str, why: str) -> None:
        """Tell the workers of all other running groups that group `name` has ended. Do not wait until they have been
        told.

        `why`: the reason, for errors.
        """
        if self._closed:
            return
        for group in self._with_messages():
            if group.name != name:
                for handle in group.handles:
                    handle.part(name, why)

    def _with_messages(self) -> list[WorkerGroup]:
        """Return the running groups whose workers send and receive messages."""
        return [
            group
            for group in list(self._groups.values())
            if group.worker.with_tools and not group.closed
        ]

    def _set_up(
        self,
        groups: Mapping[str, WorkerGroup | Ranks],
        setups: list[Pending],
        timeout_s: float,
        *,
        tell: bool = False,
    ) -> None:
        """Call `setup` on all groups, and wait until it has ended on all of them. Groups that share accelerators take
        turns.

        `groups`: whole groups, or some ranks of a group, by group name. `setups`: a list to which the started calls are
        added. `timeout_s`: the most seconds for all groups together. `tell`: whether to report the order and each group
        that is ready. Raise the first WorkerError, or WorkerTimeout at the deadline.
        """
        end_s = time.monotonic() + timeout_s
        before = setup_order(
            {name: group.accelerators for name, group in groups.items()}
        )
        if tell and any(before.values()):
            self._tell_line(
                "  set-up: in turns where accelerators are shared, " + _turns(before)
            )
        begun = dict[str, Pending]()
        reported = dict[str, threading.Event]()
        ready = set[str]()
        while True:
            due = [
                name
                for name, others in before.items()
                if name not in begun and ready.issuperset(others)
            ]
            # A call is done a moment before its callbacks run. A group must not report before those that it waited for.
            waited_for = {other for name in due for other in before[name]}
            _await(event for name, event in reported.items() if name in waited_for)
            with deferred():
                begun |= {name: groups[name].setup() for name in due}
            setups += [begun[name] for name in due]
            if tell:
                reported |= {name: self._tell_ready(begun[name]) for name in due}
            calls = [call for pending in setups for call in pending.calls]
            whole = len(begun) == len(before)
            until = (
                concurrent.futures.FIRST_EXCEPTION
                if whole
                else concurrent.futures.FIRST_COMPLETED
            )
            wait_until(
                [call for call in calls if not call.done()],
                end_s - time.monotonic(),
                until,
            )
            ended = [call for call in calls if call.done()]
            if any(call.exception() is not None for call in ended) or (
                whole and len(ended) == len(calls)
            ):
                wait_all(setups)
                _await(reported.values())
                return
            if time.monotonic() >= end_s:
                raise deadline_passed(setups, timeout_s)
            ready = {name for name, pending in begun.items() if pending.done()}

    # ── starting workers again ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def restarts_workers(self) -> bool:
        return self._launcher.restarts_workers

    def lost_nodes(self) -> dict[int, str]:
        """Return the nodes of the job that have failed, as node rank -> address.

        The call may take a minute if a node does not answer.
        """
        with deferred():
            return self._launcher.lost_nodes()

    def check(self, *, idle: bool = False) -> None:
        """Raise RayDied if a process of Ray has died that the run depends on.

        It is raised once, and again if the run has not ended some time after. `idle`: whether no worker is at work; if
        one is, its call may end first where that is possible.
        """
        self._launcher.check(idle=idle)

    def ray_died(self) -> RayDied | None:
        """Return the error about the process of Ray that has died; None if all live."""
        return self._launcher.ray_died()

    def with_peers(self, lost: Lost) -> dict[str, set[int]]:
        """Return `lost` together with all ranks that must be restarted because of them, by component.

        `lost`: ranks that have failed, by component. A lost rank takes with it the ranks of its process, and all ranks
        of its group if the class has `needs_own_process`.
        """
        found = {name: set(ranks) for name, ranks in lost.items() if ranks}
        while True:
            for name in found:
                if self._specs[name].worker.needs_own_process:
                    found[name] = set(range(len(self._specs[name].slots)))
            processes = {
                self._specs[name].slots[rank].process
                for name, ranks in found.items()
                for rank in ranks
            }
            shared = [
                slot
                for spec in self._specs.values()
                for slot in spec.slots
                if slot.process in processes - {""}
            ]
            more = [
                slot
                for slot in shared
                if slot.rank not in found.get(slot.component, ())
            ]
            if not more:
                return found
            for slot in more:
                found.setdefault(slot.component, set()).add(slot.rank)

    def restart(
        self, lost: Lost, make_room: Callable[[Lost], None] = lambda lost: None
    ) -> None:
        """Restart the lost ranks on their slots, empty all channels, and let all groups take calls again.

        Only for groups that outlast failures, and only while no rank is working. `lost`: the result of `with_peers`.
        `make_room`: called with `lost` before the set-up of the new workers, to move other workers off the
        accelerators.

        Raise ClusterError or WorkerError if a worker cannot be restarted. If workers are not ready after
        `ray.start_timeout_s`, raise WorkerTimeout, or WorkerError if all late workers have the same accelerators.
        """
        known = tuple(self._mailboxes.values())
        specs = [
            dataclasses.replace(self._specs[name], mailboxes=known) for name in lost
        ]
        slots = {spec.slots[rank] for spec in specs for rank in lost[spec.name]}
        try:
            with deferred():
                started = self._launcher.restart(specs, slots)
        except ClusterError as error:
            if error.code != "workers-late":
                raise
            raise WorkerTimeout(error.problem) from error
        with deferred():
            for name, group in self._groups.items():
                new = {worker.slot.rank: worker for worker in started.get(name, ())}
                group.go_on(new)
            self._introduce(known)
        make_room(lost)
        setups: list[Pending] = []
        again = {
            name: self._groups[name].execute_on(ranks) for name, ranks in lost.items()
        }
        try:
            self._set_up(again, setups, self._ray.start_timeout_s)
        except WorkerTimeout as late:
            places = {
                call.slot.accelerators
                for pending in setups
                for call in pending.calls
                if not call.done()
            }
            for pending in setups:
                pending.fail_late(Failure(what=str(late), cause=late))
            # Most of these ranks only wait for another one, so the fault cannot be located.
            if len(places) > 1:
                raise
            wait_all(setups)
        self._launcher.empty(self._channels.values())

    # ── other groups on the same machines ────────────────────────────────────────────────────────────────────────────

    def retire(self, staying: Collection[str] = ()) -> None:
        """End all groups with their processes, and remove all channels, within a limited time.

        The machines, Ray and the reservation stay, so other groups can be launched under the same names. Ends of the
        channels must not be used any more. `start_s` counts anew.

        `staying`: names of groups that stay, in processes of their own and with their state; their channels are given
        by `follow`. Raise ClusterError if another node does not answer, WorkerError if a worker that stays has died.
        """
        stay = {name: self._groups[name] for name in staying}
        wait_all([group.leave_plan() for group in stay.values()], _LEAVE_S)
        for group in stay.values():
            group.channels = {}
        close_all([g for name, g in self._groups.items() if name not in stay])
        with deferred():
            self._launcher.retire(staying)
        self._groups = stay
        self._specs = {name: self._specs[name] for name in stay}
        self._channels = {}
        self._of_weights = set()
        self._mailboxes = {}
        self.start_s = {}
        self._began = time.perf_counter()

    def follow(self, launches: Mapping[str, Launch]) -> list[Pending]:
        """Let groups that have stayed continue under another plan. Return the pending calls, to wait for.

        `launches`: as those of `launch_all`, with the same slots as before.
        """
        pending: list[Pending] = []
        for name, (builder, _, channels) in launches.items():
            group = self._groups[name]
            self._specs[name] = dataclasses.replace(
                self._specs[name],
                config=builder.config,
                channels=channels,
                facts=builder.facts,
            )
            group.channels = dict(channels)
            pending.append(group.follow_plan(builder.config, builder.facts, channels))
        return pending

    # ── nodes that leave and join ────────────────────────────────────────────────────────────────────────────────────

    def nodes(self) -> dict[int, str]:
        """Return the nodes of the cluster: number -> address."""
        return self._launcher.nodes()

    def driver_node(self) -> int | None:
        """Return the number of the node of this process; None if the cluster has no such node."""
        return self._launcher.driver_node()

    def leave(self, node: int) -> None:
        """Give up a node on which no worker is left. Its loss is none of the job from now on."""
        with deferred():
            self._launcher.leave(node)

    def return_to(self, node: int) -> str | None:
        """Use a node again that was left. Return its address; None if no machine is there for it."""
        with deferred():
            return self._launcher.return_to(node)

    def joined(self) -> list[str]:
        """Return the addresses of machines that have joined the cluster since the start, and have no number in it."""
        return self._launcher.joined()

    def shared_folder(self, slots: Iterable[Slot]) -> Path | None:
        """Return the job's folder in shared memory if all `slots` are on the node of this process; else None.

        The folder is removed when the job ends, also if this process is killed. With the inline launcher, there is
        none.
        """
        return self._launcher.shared_folder({slot.node for slot in slots})

    def move(self, component: str, rank: int) -> list[Slot]:
        """Plan other accelerators of the same node for a rank, and for all other ranks that use the rank's present
        accelerators.

        Return the new slots, whose ranks must be restarted; return an empty list if too few accelerators are unused.
        The new accelerators have the same kind and memory, and get the same ranks, so the plan's memory proof still
        holds.
        """
        bad = self._specs[component].slots[rank]
        node = self.topology.nodes[bad.node]
        numbers = bad.local_accelerators
        slots = [
            slot
            for spec in self._specs.values()
            for slot in spec.slots
            if slot.node == node.rank
        ]
        taken = {n for slot in slots for n in visible_to(slot)} | {
            n for at, n in self._given_up if at == node.rank
        }
        free = [n for n in range(node.accelerators) if n not in taken][: len(numbers)]
        if (
            not numbers
            or len(free) < len(numbers)
            or not self._launcher.take(node.rank, free)
        ):
            return []
        self._given_up |= {(node.rank, n) for n in numbers}
        instead = dict(zip(numbers, free, strict=True))
        moved = {
            slot.owner: _moved(slot, instead, node.first)
            for slot in slots
            if instead.keys() & {*visible_to(slot)}
        }
        for name, spec in self._specs.items():
            placed = tuple(moved.get(slot.owner, slot) for slot in spec.slots)
            self._specs[name] = dataclasses.replace(spec, slots=placed)
        return [*moved.values()]

    def _spec(
        self,
        name: str,
        builder: GroupBuilder,
        placed: PlacementStrategy | Sequence[Slot],
        channels: Mapping[str, Channel],
    ) -> GroupSpec:
        if name in self._groups and not self._groups[name].closed:
            raise ClusterError(problem("group-exists", name, name=name))
        slots = placed if isinstance(placed, Sequence) else placed.get_placement(self)
        return GroupSpec(
            name=name,
            worker=builder.worker,
            config=builder.config,
            slots=tuple(
                s if s.component == name else dataclasses.replace(s, component=name)
                for s in slots
            ),
            channels=channels,
            output=self._output,
            facts=builder.facts,
        )

    def _with_weights(self, spec: GroupSpec) -> GroupSpec:
        """Return `spec` with the channels of all weight syncs that the group takes part in.

        Channels that the caller has passed are kept. The first launched group of a sync creates its channel. Raise
        ClusterError if the group's number of ranks differs from the number in the job's JobFacts.
        """
        facts = spec.facts
        if facts is None:
            return spec
        ranks = facts.ranks.get(spec.name, len(spec.slots))
        if ranks != len(spec.slots):
            raise ClusterError(
                problem(
                    "facts-misfit",
                    spec.name,
                    launched=len(spec.slots),
                    ranks=ranks,
                    name=spec.name,
                )
            )
        channels = dict(spec.channels)
        for sync in facts.syncs_of(spec.name):
            planned = sync.channel
            if planned.name in channels:
                continue
            if planned.name not in self._channels:
                self._of_weights.add(planned.name)
                self.channel(
                    ChannelSpec(
                        name=planned.name,
                        capacity_items=planned.capacity_items,
                        keys=planned.keys,
                        participants=facts.participants_of(planned),
                        timeout_s=sync.timeout_s,
                    ),
                    planned.locations(),
                )
            channels[planned.name] = self._channels[planned.name]
        return dataclasses.replace(spec, channels=channels)

    def _tell(self, what: str) -> None:
        self._tell_line(f"  {what}, {time.perf_counter() - self._began:.1f} s")

    def _tell_ready(self, setup: Pending) -> threading.Event:
        """Have a group reported as ready as soon as its `setup` has succeeded on all ranks. Return at once.

        `setup`: the started calls of `setup`. The returned event is set after the report, or after a failure.
        """
        left = list(setup.calls)
        over = threading.Event()

        def ended(call: Future[Any]) -> None:
            # Each call that ends removes one entry; the entry that is removed last is `setup.calls[0]`.
            if left.pop() is not setup.calls[0]:
                return
            try:
                if all(call.exception() is None for call in setup.calls):
                    self._tell(f"{setup.group.name}: ready")
            finally:
                over.set()

        for call in setup.calls:
            call.add_done_callback(ended)
        return over

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.start_s[name] = (
                self.start_s.get(name, 0.0) + time.perf_counter() - began
            )

    def describe(self) -> str:
        """Return one line of text: the accelerators, real or emulated, the workers, and the seconds of each phase of
        the start.
        """
        on_cpu = all(node.kind == "emulated" for node in self.topology.nodes)
        emulated = " emulated (computing on the CPU)" if on_cpu else ""
        workers = ", ".join(
            f"{g.world_size} {name}" for name, g in self._groups.items()
        )
        phases = ", ".join(
            f"{name} {seconds:.1f}" for name, seconds in self.start_s.items()
        )
        return (
            f"{self.topology.describe()}{emulated}; {workers or 'no'} workers as {self._launcher.describe()}; "
            f"start {sum(self.start_s.values()):.1f} s ({phases})"
        )

    def close(self) -> None:
        """End all groups, their processes and the channels, within a limited time. A second call does nothing."""
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


def _with(config: ClusterConfig, **given: Any) -> ClusterConfig:
    """Return a copy of `config` with the keys of `given` replaced. A key whose value in `given` is None stays as
    it is.
    """
    changed = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config, **changed)


def _await(events: Iterable[threading.Event]) -> None:
    """Wait until the callbacks of calls that are done have set `events`, at most `_REPORT_S` seconds for each."""
    for event in events:
        event.wait(_REPORT_S)


def _turns(before: Mapping[str, Sequence[str]]) -> str:
    """Return the order of set-up as a text, such as "rollout, then actor".

    `before`: component -> components that must be ready before its set-up. Components that are set up at the same time
    are joined by "and".
    """
    turn = dict[str, int]()
    for name, others in before.items():
        turn[name] = 1 + max((turn[other] for other in others), default=-1)
    return ", then ".join(
        " and ".join(n for n in turn if turn[n] == at)
        for at in range(max(turn.values()) + 1)
    )


def _moved(slot: Slot, instead: Mapping[int, int], first: int) -> Slot:
    """Return `slot` with some of its accelerators replaced by other accelerators of the same node.

    `instead`: replaced accelerator -> new accelerator, by their numbers within the node. `first`: global number of the
    node's first accelerator.
    """
    own, seen = (
        tuple(sorted(instead.get(n, n) for n in numbers))
        for numbers in (slot.local_accelerators, slot.visible_accelerators)
    )
    accelerators = tuple(first + n for n in own)
    return dataclasses.replace(
        slot,
        accelerators=accelerators,
        local_accelerators=own,
        visible_accelerators=seen,
    )


# ── workers as threads of this process ────────────────────────────────────────────────────────────────────────────────


class InlineLauncher:
    """Runs each worker as a thread of this process.

    A thread cannot be stopped from outside. After a cancellation, a worker ends when it waits on a channel or checks
    `context.cancelled`, else when its method returns. The driver does not wait for its end.
    """

    restarts_workers = False

    def __init__(
        self, topology: Topology, account: AccountOfRuns | None = None
    ) -> None:
        """`account`: the memory account that other runs use, too; None: there are none."""
        self._topology = topology
        self._account = MemoryAccount(topology.memory_bytes)
        if account is not None:
            self._account = account.open(topology.memory_bytes)
        self._claims = ProcessClaims()
        self._channels: list[Channel] = []
        self._lending = Lending()
        self._outputs: Outputs | None = None
        # Variables that this launcher has set in `os.environ`
        self._variables: dict[str, str] = {}
        # An open socket that reserves the port of MASTER_PORT
        self._master: socket.socket | None = None

    def start(self) -> None:
        """Set the variable OMP_NUM_THREADS if it is not set, to limit the threads of torch in workers that import
        torch.
        """
        if VARIABLE not in os.environ:
            self._set({VARIABLE: str(threads())})

    def reserve(self, slots: Sequence[Slot] | None) -> None:
        """Do nothing: threads need no reservation."""

    def launch(self, specs: Sequence[GroupSpec]) -> dict[str, list[WorkerHandle]]:
        crowded = [s for s in specs if s.worker.needs_own_process and len(s.slots) > 1]
        if crowded:
            names = " and ".join(f"{s.name} ({len(s.slots)} ranks)" for s in crowded)
            raise ClusterError(
                problem(
                    "inline-needs-one-rank",
                    "cluster.launcher",
                    "inline",
                    groups=names,
                    first=crowded[0].name,
                )
            )
        if self._outputs is None and any(spec.output for spec in specs):
            self._outputs = Outputs()
        return {
            spec.name: [self._make(spec, slot) for slot in spec.slots] for spec in specs
        }

    def restart(
        self, specs: Sequence[GroupSpec], slots: Collection[Slot]
    ) -> dict[str, list[WorkerHandle]]:
        raise AssertionError("a thread cannot be ended, so none is replaced")

    def reserve_more(self, slots: Sequence[Slot]) -> bool:
        return True

    def take(self, node: int, accelerators: Sequence[int]) -> bool:
        raise AssertionError("a thread cannot be ended, so none moves")

    def nodes(self) -> dict[int, str]:
        """Return the nodes of the plan; all of them are this machine."""
        return {node.rank: "this machine" for node in self._topology.nodes}

    def driver_node(self) -> int | None:
        return 0

    def leave(self, node: int) -> None:
        """Do nothing: the node is only a number."""

    def return_to(self, node: int) -> str | None:
        return "this machine"

    def joined(self) -> list[str]:
        return []

    def lost_nodes(self) -> dict[int, str]:
        return {}

    def check(self, *, idle: bool = False) -> None:
        """Do nothing: threads end with this process."""

    def ray_died(self) -> None:
        return None

    def empty(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            channel.reset()

    def retire(self, staying: Collection[str]) -> None:
        """Break and forget all channels. The threads of the workers end by themselves."""
        assert not staying, "threads use the channels of one plan alone"
        for channel in self._channels:
            channel.break_("the placement changes")
        self._channels.clear()
        self._lending = Lending()
        self._claims = ProcessClaims()
        self._account = MemoryAccount(self._topology.memory_bytes)

    def shared_folder(self, nodes: Collection[int]) -> Path | None:
        return None

    def _make(self, spec: GroupSpec, slot: Slot) -> WorkerHandle:
        device = make_device(
            slot,
            self._topology,
            self._account,
            index=next(iter(slot.local_accelerators), 0),
        )
        device.share_process(self._claims)
        rendezvous = Rendezvous(host="127.0.0.1", port=0)
        if spec.worker.needs_own_process:
            listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
            rendezvous = Rendezvous(
                host="127.0.0.1",
                port=listening.getsockname()[1],
                listen_fd=listening.detach(),
            )
            if spec.worker.with_tools:
                self._set_variables(spec, slot, device)
        return InlineWorker(
            spec, slot, device, rendezvous, self._lending, self._outputs
        )

    def _set_variables(self, spec: GroupSpec, slot: Slot, device: Device) -> None:
        """Set the environment variables of torch.distributed for a group with one rank.

        Do nothing if RANK or WORLD_SIZE is set already.
        """
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            return
        self._master = reserve_port("127.0.0.1")
        meet = Rendezvous(
            host="127.0.0.1", port=0, master_port=self._master.getsockname()[1]
        )
        self._set(torch_variables(spec.slots, slot, device, meet))

    def _set(self, variables: Mapping[str, str]) -> None:
        """Set environment variables. `close` removes them."""
        self._variables |= variables
        os.environ.update(variables)

    def channel(
        self,
        spec: ChannelSpec,
        locations: Sequence[ChannelLocation],
        node: int | None = None,
    ) -> Channel:
        channel = LocalChannel(spec)
        self._channels.append(channel)
        return channel

    def describe(self) -> str:
        return f"threads of process {os.getpid()}"

    def close(self) -> None:
        for channel in self._channels:
            channel.break_("the cluster was closed")
        self._channels.clear()
        for name in self._variables:
            os.environ.pop(name, None)
        self._variables = {}
        if self._master is not None:
            self._master.close()
            self._master = None
        if self._outputs is not None:
            self._outputs.close()


class InlineWorker(WorkerHandle):
    """The driver's handle of a worker that runs in a thread of this process. The thread takes its calls from a
    queue.
    """

    def __init__(
        self,
        spec: GroupSpec,
        slot: Slot,
        device: Device,
        rendezvous: Rendezvous,
        lending: Lending,
        outputs: Outputs | None,
    ) -> None:
        super().__init__(slot)
        self._device = device
        self._host = WorkerHost(shows_failures=spec.output is not None)
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        if outputs is not None:
            self._mailbox.put(
                lambda: outputs.enter(output_file(spec.output, slot), slot.owner)
            )
        self._mailbox.put(
            lambda: self._host.build(spec, slot, device, rendezvous, lending=lending)
        )
        threading.Thread(target=self._work, name=slot.owner, daemon=True).start()

    def _work(self) -> None:
        limit_threads()
        while (task := self._mailbox.get()) is not None:
            task()

    def send(self, settle: Settle, requests: Sequence[Request]) -> None:
        self._mailbox.put(lambda: settle(self._host.run(requests)))

    def where(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._host.where())
        return future

    def cancel(self) -> None:
        self._host.cancel()

    def proceed(self) -> Future[None]:
        self._host.proceed()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def meet(self, mailboxes: Sequence[Mailbox]) -> Future[None]:
        self._host.meet(mailboxes)
        return super().meet(mailboxes)

    def part(self, group: str, why: str) -> None:
        self._host.part(group, why)

    def end(self) -> None:
        self._host.cancel()
        # Runs once the current call has ended.
        self._mailbox.put(lambda: self._host.call("close", (), {}))
        self._mailbox.put(None)
        self._device.worker_ended()
