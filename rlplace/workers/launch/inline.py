"""The launcher that makes workers threads of this process: for debugging, tests and small jobs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.errors import ClusterError, Problem
from rlplace.placement.channels import ChannelLocation
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.devices import Account, make_device
from rlplace.workers.launch.host import WorkerHost, WorkerSpec
from rlplace.workers.launch.launcher import (
    Call,
    GroupOrder,
    StartReport,
    WorkerHandle,
    memory_account,
    open_rendezvous,
)
from rlplace.workers.worker import Rendezvous


class InlineLauncher:
    """One thread per worker in this process.

    Cancelling is cooperative: a worker that neither looks at `context.cancelled` nor waits on a channel goes on until
    its method returns, but no caller waits for it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._account: Account = memory_account(topology)
        self._channels: list[Channel] = []
        self._handles: list[InlineWorker] = []

    def start(self, report: StartReport) -> None:
        """Do nothing: this process runs already."""

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        """Do nothing: threads are always free."""

    def launch(self, orders: Sequence[GroupOrder], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        _check_single(orders)
        with report.phase("workers"):
            return {order.name: tuple(self._make(order, slot) for slot in order.slots) for order in orders}

    def _make(self, order: GroupOrder, slot: Slot) -> InlineWorker:
        kind = self._topology.nodes[slot.node].kind
        device = make_device(slot, kind, index=next(iter(slot.local_accelerators), 0), account=self._account)
        rendezvous = Rendezvous(host="127.0.0.1", port=0)
        if order.worker.needs_own_process:
            listening = open_rendezvous("127.0.0.1")
            rendezvous = Rendezvous(host="127.0.0.1", port=listening.getsockname()[1], listen_fd=listening.detach())
        handle = InlineWorker(order.spec(slot, device), rendezvous)
        self._handles.append(handle)
        return handle

    def channel(self, spec: ChannelSpec, locations: Sequence[ChannelLocation]) -> Channel:
        channel = LocalChannel(spec)
        self._channels.append(channel)
        return channel

    def forget(self, owner: str) -> None:
        self._account.release_all(owner)

    def describe(self) -> str:
        return f"threads of process {os.getpid()}"

    def close(self) -> None:
        for channel in self._channels:
            channel.break_("the cluster was closed")
        for handle in self._handles:
            handle.stop()
        self._channels.clear()
        self._handles.clear()


def _check_single(orders: Sequence[GroupOrder]) -> None:
    crowded = [o for o in orders if o.worker.needs_own_process and len(o.slots) > 1]
    if crowded:
        names = " and ".join(f"{o.name} ({len(o.slots)} ranks)" for o in crowded)
        raise ClusterError(
            Problem(
                code="inline-needs-one-rank",
                key="cluster.launcher",
                what=f"{names} cannot run as threads of one process",
                got="inline",
                why="a process can join only one process group, so each of these ranks needs a process of its own",
                fix=f"cluster.launcher=ray     (or one accelerator: cluster.component_placement.{crowded[0].name}=0)",
            )
        )


class InlineWorker(WorkerHandle):
    """A worker in a thread with a mailbox."""

    def __init__(self, spec: WorkerSpec, rendezvous: Rendezvous) -> None:
        super().__init__(spec.slot)
        self._host = WorkerHost()
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._mailbox.put(lambda: self._host.build(0, spec, rendezvous))
        threading.Thread(target=self._work, name=spec.slot.owner, daemon=True).start()

    def _work(self) -> None:
        while (task := self._mailbox.get()) is not None:
            task()

    def _send(self, call: Call, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._mailbox.put(lambda: self.settle(call, self._host.call(0, method, args, kwargs)))

    def where(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._host.where(0))
        return future

    def cancel(self) -> None:
        self._host.cancel(0)

    def _end(self) -> None:
        self._host.cancel(0)
        self._mailbox.put(lambda: self._host.call(0, "close", (), {}))  # once it gives up
        self._mailbox.put(None)
