"""Ranks of a worker group without a launcher: where each lives, how they join, and processes of their own."""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlplace.comm.channel import Channel, ChannelSpec
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.shared_memory.folder import JobFolder
from rlplace.workers.launch.devices import Device, EmulatedDevice, MemoryAccount
from rlplace.workers.worker import Rendezvous, WorkerContext
from tests.open_calls import slot_of

Scenario = TypeVar("Scenario")
Shown = TypeVar("Shown")
CAPACITY_BYTES = 1 << 30  # of an emulated accelerator
WORKING = {
    "infer": 1000,
    "learn": 1000,
}  # bytes that the made up plans of tests foresee
# All processes of a session are forked from one server, which the first starts: it has imported for all.
_IMPORTED = (
    "tests.actor_ranks",
    "tests.scorer_ranks",
    "tests.lm_ranks",
    "tests.memory_kinds",
    "rlplace.models.causal_lm",
    "rlplace.workers.training.policy_learner",
    "rlplace.workers.training.lm_learner",
    "peft",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.frozen",
)


def fork_server() -> ForkServerContext:
    """What forks processes that have imported before. No test makes it otherwise: its imports are named once, first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Which part of a run these ranks make: from what they load on, until `iterations`; they may save on their way."""

    first: int = 0  # iteration
    load: Path | None = None
    save: Path | None = None
    save_after: int = 0  # iterations

    def begin(self, worker: Any) -> None:
        if self.load is not None:
            worker.read_state(str(self.load))

    def end(self, worker: Any, index: int) -> None:
        """An iteration, all but the next of which may go on while it is written."""
        if self.save is not None and index + 1 == self.save_after:
            worker.write_state(str(self.save))


WHOLE = Session()


def spec_of(name: str) -> ChannelSpec:
    return ChannelSpec(name=name, capacity_items=64, timeout_s=30.0)


def attached(name: str, folder: Path, owner: str) -> Channel:
    """The channel that `in_processes`, or a test, has made there."""
    return SharedChannel.attach(folder / f"{name}.channel").named(owner)


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=64)


def rendezvous_at(listener: socket.socket) -> Rendezvous:
    """As rank 0 has it: the socket becomes the store's."""
    port = listener.getsockname()[1]
    return Rendezvous(
        host="127.0.0.1", port=port, listen_fd=listener.detach(), timeout_s=60.0
    )


def context_of(
    component: str,
    rank: int,
    ranks: int,
    rendezvous: Rendezvous,
    channels: Mapping[str, Channel],
    *,
    folder: Path | None = None,
    device: Device | None = None,
) -> WorkerContext:
    """Without a device, an emulated one."""
    slot = slot_of(component, rank)
    return WorkerContext(
        slot=slot,
        world_size=ranks,
        device=device or EmulatedDevice(MemoryAccount([CAPACITY_BYTES] * ranks), slot),
        rendezvous=rendezvous,
        channels=channels,
        folder=folder,
    )


Follow = Callable[[Scenario, int, Rendezvous, Path], Shown]


def in_processes(
    follow: Follow[Scenario, Shown],
    scenario: Scenario,
    ranks: int,
    *,
    channels: Sequence[ChannelSpec] = (),
    meanwhile: Callable[[Mapping[str, Channel]], None] = lambda _: None,
) -> list[Shown]:
    """What `follow` returns on each rank, in a process of its own; `meanwhile` uses the channels of all from here."""
    processes = ProcessPoolExecutor(ranks, mp_context=fork_server())
    with listen() as listener, JobFolder.create() as folder, processes as pool:
        made = {
            spec.name: SharedChannel.create(folder.path, spec).named("a test")
            for spec in channels
        }
        port = listener.getsockname()[1]
        pending = [
            pool.submit(
                _rank,
                follow,
                scenario,
                rank,
                port,
                None if rank else listener,
                folder.path,
            )
            for rank in range(ranks)
        ]
        for one in pending:
            one.add_done_callback(lambda done: _end(done, made))
        try:
            meanwhile(made)
        finally:  # the error of a rank explains more than that of a wait for it
            shown = [one.result(timeout=120.0) for one in pending]
    return shown


def _end(rank: Future[Any], channels: Mapping[str, Channel]) -> None:
    if rank.exception() is not None:
        for channel in channels.values():
            channel.break_("a rank failed")


def _rank(
    follow: Follow[Any, Shown],
    scenario: Any,
    rank: int,
    port: int,
    listener: socket.socket | None,
    folder: Path,
) -> Shown:
    torch.set_num_threads(1)
    rendezvous = (
        rendezvous_at(listener)
        if listener
        else Rendezvous(host="127.0.0.1", port=port, timeout_s=60.0)
    )
    return follow(scenario, rank, rendezvous, folder)
