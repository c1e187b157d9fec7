"""The launcher that makes workers threads of this process, for debugging, tests and small jobs."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import ClusterError
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.devices import Device, MemoryAccount, make_device
from rlplace.workers.launch.group import WorkerHandle
from rlplace.workers.launch.host import GroupSpec, Outcome, WorkerHost
from rlplace.workers.worker import Rendezvous


class InlineLauncher:
    """One thread per worker in this process.

    Cancelling is cooperative: a worker that neither looks at `context.cancelled` nor waits on a channel goes on until
    its method returns, but no caller waits for it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._account = MemoryAccount.of(topology)
        self._channels: list[Channel] = []

    def start(self) -> None:
        """Do nothing: this process runs already."""

    def reserve(self, slots: Sequence[Slot] | None) -> None:
        """Do nothing: threads are always free."""

    def launch(self, specs: Sequence[GroupSpec]) -> dict[str, list[WorkerHandle]]:
        crowded = [s for s in specs if s.worker.needs_own_process and len(s.slots) > 1]
        if crowded:
            names = " and ".join(f"{s.name} ({len(s.slots)} ranks)" for s in crowded)
            raise ClusterError.about(
                "inline-needs-one-rank",
                "cluster.launcher",
                f"{names} cannot run as threads of one process",
                got="inline",
                why="a process can join only one process group, so each of these ranks needs a process of its own",
                fix=f"cluster.launcher=ray     (or one rank: cluster.component_placement.{crowded[0].name}=0)",
            )
        return {spec.name: [self._make(spec, slot) for slot in spec.slots] for spec in specs}

    def _make(self, spec: GroupSpec, slot: Slot) -> WorkerHandle:
        device = make_device(slot, self._topology, self._account, index=next(iter(slot.local_accelerators), 0))
        rendezvous = Rendezvous(host="127.0.0.1", port=0)
        if spec.worker.needs_own_process:
            listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
            rendezvous = Rendezvous(host="127.0.0.1", port=listening.getsockname()[1], listen_fd=listening.detach())
        return InlineWorker(spec, slot, device, rendezvous)

    def channel(self, spec: ChannelSpec, locations: Sequence[ChannelLocation]) -> Channel:
        channel = LocalChannel(spec)
        self._channels.append(channel)
        return channel

    def describe(self) -> str:
        return f"threads of process {os.getpid()}"

    def close(self) -> None:
        for channel in self._channels:
            channel.break_("the cluster was closed")
        self._channels.clear()


class InlineWorker(WorkerHandle):
    """A worker in a thread with a mailbox."""

    def __init__(self, spec: GroupSpec, slot: Slot, device: Device, rendezvous: Rendezvous) -> None:
        super().__init__(slot)
        self._device = device
        self._host = WorkerHost()
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._mailbox.put(lambda: self._host.build(spec, slot, device, rendezvous))
        threading.Thread(target=self._work, name=slot.owner, daemon=True).start()

    def _work(self) -> None:
        while (task := self._mailbox.get()) is not None:
            task()

    def send(
        self, settle: Callable[[Outcome], None], method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._mailbox.put(lambda: settle(self._host.call(method, args, kwargs)))

    def where(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._host.where())
        return future

    def cancel(self) -> None:
        self._host.cancel()

    def end(self) -> None:
        self._host.cancel()
        self._mailbox.put(lambda: self._host.call("close", (), {}))  # once it gives up
        self._mailbox.put(None)
        self._device.worker_ended()
