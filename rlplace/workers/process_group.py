"""The torch.distributed process group of a custom worker group, and the users of a process's default group.

::

    rank 0    its listening socket ─▶ store ─┐
    rank 1 …                     connect ────┴─▶ all are here? ─▶ init_process_group ─▶ the default group
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlplace.codes import problem
from rlplace.errors import ClusterError, WorkerMisuse
from rlplace.placement.language.slots import owner_of
from rlplace.workers.worker import WorkerContext

_PAUSE_S = 0.01


class GroupUsers:
    """Counts the users of torch.distributed's default process group in this process.

    With `cluster.launcher: inline`, the users are several: trainers with one rank each, and an engine of vLLM, which
    makes subgroups of the group. The last user destroys the group. `lock`: hold it while you check for the group and
    join it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._number = 0

    def add(self) -> None:
        """Count one more user. The caller holds the lock."""
        self._number += 1

    def leave(self) -> None:
        """Count one user less, and destroy the group after the last one."""
        with self.lock:
            self._number -= 1
            if not self._number and dist.is_initialized():
                dist.destroy_process_group()

    def leave_by(self, shutdown: Callable[[], object]) -> None:
        """Count one user less. The `shutdown` of this user destroys the group and its subgroups.

        The other users then find no group, and do nothing.
        """
        with self.lock:
            self._number -= 1
            shutdown()


GROUP_USERS = GroupUsers()


class ProcessGroup:
    """A worker's membership in torch.distributed's default process group. Owns the key-value store where the ranks
    meet.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._store: Any = None
        # Whether this worker opened the group; another worker of the process may have opened it
        self._opened = False
        self._round = 0

    def join(self, backend: str | None, timeout_s: float) -> Any:
        """Join the process group together with all ranks, and return the group. A collective: all ranks must call this.

        If the process group is open already, return it. `backend`: "nccl" or "gloo"; None: nccl on GPUs, else gloo.
        `timeout_s`: the most seconds until all ranks have joined, and the timeout of each collective.
        """
        context = self._context
        if dist.is_initialized():
            return _everyone(context)
        cuda = context.device.torch_name != "cpu"
        if cuda:
            torch.cuda.set_device(torch.device(context.device.torch_name))
        if self._store is None:
            self._store = self._connect(timeout_s)
        self._round += 1
        self._meet(timeout_s)
        dist.init_process_group(
            backend or ("nccl" if cuda else "gloo"),
            store=dist.PrefixStore(f"group {self._round}", self._store),  # type: ignore[attr-defined]  # not in the stubs
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._opened = True
        with GROUP_USERS.lock:
            GROUP_USERS.add()
        return _everyone(context)

    def close(self) -> None:
        """Leave the process group, if this worker has opened it. A second call does nothing."""
        if self._opened:
            GROUP_USERS.leave()
        self._opened = False
        self._store = None

    def _connect(self, timeout_s: float) -> Any:
        context = self._context
        meet = context.rendezvous
        first = context.rank == 0
        return dist.TCPStore(  # type: ignore[attr-defined]  # it is there, but not in the stubs
            meet.host,
            meet.port,
            world_size=context.world_size,
            is_master=first,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=meet.listen_fd if first else None,
        )

    def _meet(self, timeout_s: float) -> None:
        """Wait until all ranks have called `join`. Raise ClusterError, which names the missing ranks, after `timeout_s`
        seconds.
        """
        context = self._context
        here = f"here {self._round} "
        self._store.set(f"{here}{context.rank}", "1")
        until = time.monotonic() + timeout_s
        while absent := self._absent(here):
            context.check_cancelled("process_group")
            if time.monotonic() > until:
                raise ClusterError(
                    problem(
                        "ranks-absent",
                        context.owner,
                        "absent: " + ", ".join(absent[:8]),
                        error="process-group",
                        timeout_s=timeout_s,
                    )
                )
            time.sleep(_PAUSE_S)

    def _absent(self, here: str) -> list[str]:
        context = self._context
        return [
            owner_of(context.slot.component, rank)
            for rank in range(context.world_size)
            if not self._store.check([f"{here}{rank}"])
        ]


def _everyone(context: WorkerContext) -> Any:
    """Return torch.distributed's default process group.

    Raise WorkerMisuse if this worker has another rank there than in its worker group, or if the numbers of ranks
    differ.
    """
    if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
        raise WorkerMisuse(
            problem(
                "other-process-group",
                context.owner,
                f"rank {dist.get_rank()} of {dist.get_world_size()}",
                rank=context.rank,
                world_size=context.world_size,
            )
        )
    return dist.group.WORLD
