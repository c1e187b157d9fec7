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
from rlplace.placement.channels import ChannelHome
from rlplace.placement.language.slots import Slot
from rlplace.placement.machines.topology import Topology
from rlplace.workers.launch.devices import Account, CudaDevice, Device, EmulatedDevice, HostDevice
from rlplace.workers.launch.host import Birth, Outcome, WorkerHost
from rlplace.workers.launch.launcher import (
    Call,
    GroupOrder,
    OpenCalls,
    StartReport,
    WorkerHandle,
    memory_account,
    open_rendezvous,
)
from rlplace.workers.worker import Rendezvous


class InlineLauncher:
    """One thread per worker in this process.

    Cancelling is cooperative: a worker that neither looks at `context.cancelled` nor waits on a channel goes on until
    its method returns, but nobody waits for it.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._account: Account = memory_account(topology)
        self._channels: list[Channel] = []
        self._handles: list[InlineWorker] = []

    def start(self, report: StartReport) -> None:
        """Nothing: this process runs already."""

    def reserve(self, slots: Sequence[Slot], report: StartReport) -> None:
        """Nothing: threads are always free."""

    def launch(self, orders: Sequence[GroupOrder], report: StartReport) -> dict[str, tuple[WorkerHandle, ...]]:
        _check_single(orders)
        with report.phase("workers"):
            return {order.name: tuple(self._make(order, slot) for slot in order.slots) for order in orders}

    def _make(self, order: GroupOrder, slot: Slot) -> InlineWorker:
        device: Device
        if not slot.accelerators:
            device = HostDevice()
        elif self._topology.nodes[slot.node].kind == "cuda":
            device = CudaDevice(slot.local_accelerators[0], slot)
        else:
            device = EmulatedDevice(self._account, slot)
        rendezvous = Rendezvous(host="127.0.0.1", port=0)
        if order.worker.needs_own_process:
            door = open_rendezvous("127.0.0.1")
            rendezvous = Rendezvous(host="127.0.0.1", port=door.getsockname()[1], listen_fd=door.detach())
        handle = InlineWorker(order.birth(slot, device), rendezvous)
        self._handles.append(handle)
        return handle

    def channel(self, spec: ChannelSpec, homes: Sequence[ChannelHome]) -> Channel:
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


class InlineWorker:
    """A WorkerHandle whose worker is a thread with a mailbox."""

    def __init__(self, birth: Birth, rendezvous: Rendezvous) -> None:
        self._slot = birth.slot
        self._host = WorkerHost()
        self._calls = OpenCalls(birth.slot)
        self._mailbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._mailbox.put(lambda: self._host.build(birth, rendezvous))
        name = f"{birth.slot.component} rank {birth.slot.rank}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def slot(self) -> Slot:
        return self._slot

    def _work(self) -> None:
        while (task := self._mailbox.get()) is not None:
            task()

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return self._submit(method, lambda: self._host.call(method, args, kwargs))

    def close(self) -> Future[Any]:
        return self._submit("close", self._host.close)

    def _submit(self, method: str, work: Callable[[], Outcome]) -> Call:
        future = self._calls.begin(method)
        if not future.done():
            self._mailbox.put(lambda: self._calls.settle(future, work()))
        return future

    def where(self) -> Future[str]:
        future: Future[str] = Future()
        future.set_result(self._host.where())
        return future

    def cancel(self) -> None:
        self._host.cancel()

    def stop(self) -> None:
        self._host.cancel()
        if self._calls.end("the worker was stopped"):
            self._mailbox.put(self._host.close)  # once it gives up
            self._mailbox.put(None)
