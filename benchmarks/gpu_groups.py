"""NCCL on one GPU: `python -m benchmarks.gpu_groups nccl-one`, what a group takes, and how what never completes ends.

As `benchmarks.gpu_tries`: lines that begin with `@` are measurements, the last line is the figure. With `--emulated` a
CPU and gloo stand in for the GPU and NCCL, and nothing is compared.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.gpu_measure import (
    DEVICE,
    MIB,
    ON_CPU,
    expect,
    show,
    synchronize,
    try_named_on_command_line,
)
from benchmarks.gpu_tries import PATIENCE_S
from rlplace.comm.weights.device_group import device_group, within
from rlplace.comm.weights.device_sync import Member
from rlplace.comm.weights.rendezvous import SyncRendezvous
from rlplace.errors import RlplaceError
from rlplace.placement.memory.formulas import CONTEXT_BYTES, communicator
from rlplace.workers.launch.devices import CudaDevice
from rlplace.workers.worker import Rendezvous
from tests.contract.device_sync import serve

DEADLINE_S = 3.0  # of what never completes
GRACE_S = 8.0  # beyond it
STARTED_S = 90.0  # for a process to have imported torch
SPAWN = multiprocessing.get_context("spawn")


def nccl_one() -> str:
    """Bytes of a process, its context and its group; what never completes ends by its deadline, with its reason."""
    taken = memory_of_a_process()
    context = taken["context of CUDA"]
    group = taken["group of one rank"]
    show(
        "context of CUDA",
        f"{context / MIB:.0f} MiB",
        f"ledger {CONTEXT_BYTES / MIB:.0f} MiB",
    )
    show("matrix products, more", f"{taken['matrix products'] / MIB:.0f} MiB")
    show(
        "group of one rank, with its first sum",
        f"{group / MIB:.0f} MiB",
        f"ledger {communicator(1) / MIB:.0f} MiB",
    )
    show(
        "a second group",
        f"{taken['a second group'] / MIB:.0f} MiB",
        f"ledger {communicator(1) / MIB:.0f} MiB",
    )
    began = {name: begin(name, work) for name, work in NEVER.items()}
    for name, (process, pipe) in began.items():
        seconds, why = end(process, pipe)
        print(f"{name}: {why or 'nothing'}        after {seconds:.1f} s", flush=True)
        if not why:  # also where a CPU stands in
            sys.exit(f"{name}: no error after {seconds:.1f} s")
        show(f"{name}, its error", why.partition(":")[0], f"{seconds:.1f} s")
        expect(
            f"{name}, seconds to its error",
            seconds,
            most=DEADLINE_S + GRACE_S,
            unit=" s",
        )
    return f"context {context / MIB:.0f} MiB, group of one rank {group / MIB:.0f} MiB"


def memory_of_a_process() -> Mapping[str, int]:
    """Bytes of the GPU that each stage of `stages` took beside torch's own, as another process sees them."""
    from benchmarks.gpu_tries import _free

    if not ON_CPU:
        torch.ones(8, device=DEVICE)
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=stages, args=(there,), daemon=True)
    process.start()
    there.close()  # else the end of the process would not end what is read
    found: dict[str, int] = {}
    before = 0
    reserved_before = 0
    try:
        while True:
            if not here.poll(STARTED_S):
                sys.exit(
                    f"a process did not answer within {STARTED_S:g} s, after: {', '.join(found) or 'its start'}"
                )
            name, reserved = here.recv()
            if not name:
                return found
            free = 0 if ON_CPU else _free()
            if name != "start":
                found[name] = before - free - (reserved - reserved_before)
            before = free
            reserved_before = reserved
            here.send("go on")
    except EOFError:
        sys.exit(f"a process ended after: {', '.join(found) or 'its start'}")
    finally:
        process.join(GRACE_S)
        stop(process)


def stages(pipe: Connection) -> None:
    """Take memory, and say after each stage how much of it torch has itself."""

    def say(name: str) -> None:
        synchronize() if name != "start" else None
        pipe.send(
            (name, 0 if ON_CPU or name == "start" else torch.cuda.memory_reserved())
        )
        pipe.recv()

    import torch.distributed as dist

    from rlplace.workers.training.ranks import Ranks
    from tests.worker_ranks import context_of, listen, rendezvous_at

    say("start")
    some = torch.ones(1 << 20, device=DEVICE)
    say("context of CUDA")
    left = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    (left @ left).float().sum().item()
    say("matrix products")
    device = None if ON_CPU else CudaDevice()
    ranks = Ranks(
        context_of("actor", 0, 1, rendezvous_at(listen()), {}, device=device),
        timeout_s=PATIENCE_S,
    )
    dist.all_reduce(some)
    if some.sum().item() != len(some):
        sys.exit("a sum over one rank is another number")
    say("group of one rank")
    store, _ = serve()
    group = device_group(
        store, rank=0, size=1, device=device_of_thread(), timeout_s=PATIENCE_S
    )
    group.broadcast(some, root=0).wait()
    say("a second group")
    group.abort() if not ON_CPU else None
    ranks.close()
    pipe.send(("", 0))


def device_of_thread() -> torch.device:
    if ON_CPU:
        return DEVICE
    return torch.device("cuda:0")


# Each is tried in a process of its own, and ends in an error that says why.


def absent_member() -> None:
    """A group for weights of two, of which the second never comes."""
    store, _ = serve()
    form = partial(
        device_group,
        store,
        rank=0,
        size=2,
        device=device_of_thread(),
        timeout_s=DEADLINE_S,
    )
    within(
        time.monotonic() + DEADLINE_S,
        form,
        "actor rank 0 waited until the deadline for rank 1 to form a group",
    )


def absent_rank() -> None:
    """Ranks that learn together, of which the second never comes."""
    from rlplace.workers.training.ranks import Ranks
    from tests.worker_ranks import context_of, listen

    listener = listen()
    port = listener.getsockname()[1]
    meet = Rendezvous(
        host="127.0.0.1", port=port, listen_fd=listener.detach(), timeout_s=DEADLINE_S
    )
    Ranks(
        context_of("actor", 0, 2, meet, {}, device=None if ON_CPU else CudaDevice()),
        timeout_s=DEADLINE_S,
    )


def absent_from_sync() -> None:
    """A sync of weights, to which a rollout rank never comes."""
    _store, point = serve()
    rendezvous = SyncRendezvous(point.connect(DEADLINE_S), "actor rank 0")
    members = ("actor rank 0", "rollout rank 0")
    rendezvous.join(0, "alone", members, deadline_s=time.monotonic() + DEADLINE_S)


def busy_device() -> None:
    """A bucket of a sync, behind work of the GPU that goes on for longer; then the group is aborted."""
    store, _ = serve()
    member = Member("actor rank 0", device_of_thread(), timeout_s=DEADLINE_S)
    member._group = device_group(
        store, rank=0, size=1, device=device_of_thread(), timeout_s=DEADLINE_S
    )
    bucket = torch.ones(1 << 20, device=DEVICE)
    synchronize()
    if ON_CPU:
        raise RuntimeError("a CPU has no work under way")
    torch.cuda._sleep(int(4e9 * DEADLINE_S))  # cycles, of 2e9 in a second
    try:
        member.broadcast(bucket, 0, time.monotonic() + DEADLINE_S / 3)
    finally:
        member.leave()


def one_gpu_for_two() -> None:
    """Two members of one group on one GPU, which plans refuse."""
    _store, point = serve()

    def join(rank: int) -> Any:
        store = point.connect(PATIENCE_S)
        return device_group(
            store, rank=rank, size=2, device=device_of_thread(), timeout_s=DEADLINE_S
        )

    threading.Thread(target=_quietly, args=(partial(join, 1),), daemon=True).start()
    within(
        time.monotonic() + DEADLINE_S + GRACE_S,
        partial(join, 0),
        "two members on one GPU waited for each other",
    )
    if ON_CPU:
        raise RuntimeError("gloo lets two members be on one host")


def _quietly(work: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the other member has the same error
        work()


NEVER: Mapping[str, Callable[[], None]] = {
    "a member of a sync's group that never comes": absent_member,
    "a rank that never comes": absent_rank,
    "a rollout rank that never comes to a sync": absent_from_sync,
    "a GPU that is busy beyond the deadline": busy_device,
    "two members on one GPU": one_gpu_for_two,
}


def begin(name: str, work: Callable[[], None]) -> tuple[Any, Connection]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=told, args=(there, work), name=name)
    process.start()
    there.close()
    return process, here


def told(pipe: Connection, work: Callable[[], None]) -> None:
    """Say that it begins; then after how many seconds it ended, and by what."""
    if not ON_CPU:
        torch.ones(8, device=DEVICE)
    pipe.send("begins")
    began = time.monotonic()
    why = ""
    try:
        work()
    except (RuntimeError, RlplaceError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {'; '.join(lines)[:400]}"
    pipe.send((time.monotonic() - began, why))


def end(process: Any, pipe: Connection) -> tuple[float, str]:
    """Return seconds and error of `told`; no error where it still waited, or its process ended with none."""
    try:
        if not pipe.poll(STARTED_S):
            return STARTED_S, ""
        pipe.recv()
        limit_s = DEADLINE_S + GRACE_S + 1.0
        if not pipe.poll(limit_s):
            return limit_s, ""
        seconds, why = pipe.recv()
        return float(seconds), str(why)
    except EOFError:
        return math.inf, ""
    finally:
        stop(process)


def stop(process: Any) -> None:
    """NCCL may keep it from ending by itself."""
    with suppress(ProcessLookupError):
        process.kill()
    process.join(GRACE_S)


TRIES: Mapping[str, Callable[[], str]] = {"nccl-one": nccl_one}

if __name__ == "__main__":
    try_named_on_command_line(TRIES)
