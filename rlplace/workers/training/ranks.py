"""The collectives of one worker group: its process group and device mesh, sums over ranks, values from rank 0.

NCCL is used as it is. Gloo's collectives pass messages around a ring, and on a host with fewer cores than ranks every
hop waits for a context switch: with 8 ranks on 2 cores an all-gather of 40 kB takes 14 ms and a reduce-scatter 24 ms.
An exchange in which each rank sends to all others at once takes 4 ms for either and moves no more bytes. A sum of
that size through shared memory, which all ranks must be able to map, takes 0.4 ms.

Rank 0 takes from channels for all ranks, which may take long. Until then the others poll the group's store, because a
waiting collective would run into its timeout and end the process::

    rank 0    channel.get(), for as long as it takes ── key in the store ──┐ ┌── scatter
    rank 1    wait_for_rank_0() ···· polls the key ························┴─┴── scatter
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from rlplace.codes import problem
from rlplace.errors import ChannelTimeout, ClusterError
from rlplace.models.context_parallel import ContextParallel
from rlplace.models.sharding import SHARD, TENSOR
from rlplace.placement.flow import SUMMED_AT_ONCE_BYTES
from rlplace.placement.language.spec import Parallel
from rlplace.units import plural
from rlplace.workers.process_group import GROUP_USERS
from rlplace.workers.threads import threads
from rlplace.workers.training.shared_sum import MOST_BYTES, SharedSum
from rlplace.workers.worker import WorkerContext, cancelled

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Shard = TypeVar("Shard")
_ALONE = Parallel()
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_MOST_NAMED = 8  # ranks named in an error


class Ranks:
    """This rank as a member of the process group of its worker group, with the group's collectives.

    torch allows one default process group per process. Workers that are threads of one process are groups with a single
    rank each, and share a process group of size 1. The last of them that closes destroys the process group.
    """

    def __init__(
        self,
        context: WorkerContext,
        timeout_s: float,
        parallel: Parallel = _ALONE,
    ) -> None:
        """Join the process group, and wait until all ranks have joined. Set the calling thread's CUDA device to the
        worker's GPU.

        `timeout_s`: the most seconds to wait for rank 0. It must be as long as a stage, because rank 0 may receive from
        channels many times, each time with a shorter deadline.

        `parallel`: how ranks share a model. `tensor_parallel_size` neighbouring ranks hold one copy of the model, and
        `context_parallel_size` neighbouring copies split the tokens. The ranks of these copies together are a
        data-parallel replica, and compute the same samples.

        Raises ClusterError, which names the missing ranks, and ChannelBroken if the run is cancelled.
        """
        # Place of this rank: replicas, and within a replica context-parallel copies of tensor-parallel ranks
        rank = context.rank
        world_size = context.world_size
        tensor_parallel = parallel.tensor_parallel_size
        self.rank = rank
        self.world_size = world_size
        self.tensor_parallel = tensor_parallel
        self.replica_size = parallel.ranks
        self.replicas = world_size // self.replica_size
        self.replica, place = divmod(rank, self.replica_size)
        self.tp_rank = rank % tensor_parallel
        # The ranks of a replica have equal numbers, so only its first rank counts in a sum over all ranks
        self.is_primary = place == 0
        self._context = context
        self._timeout_s = timeout_s
        self._epoch = 0
        self._waits = 0
        # Device of this thread
        device = torch.device(context.device.torch_name)
        meet = context.rendezvous
        self._on_host = device.type != "cuda"
        context.device.verify()
        if not self._on_host:
            torch.cuda.set_device(device)
        torch.set_num_threads(threads())
        # Store, then all ranks, then the process group
        timeout = timedelta(seconds=meet.timeout_s)
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # it is there, but not in the stubs
            meet.host,
            meet.port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=meet.listen_fd if rank == 0 else None,
        )
        self._meet(meet.timeout_s)
        with GROUP_USERS.lock:
            # Single ranks of one process share a group
            alone = world_size == 1
            shared = alone and dist.is_initialized() and dist.get_world_size() == 1
            if not shared:
                dist.init_process_group(
                    "gloo" if self._on_host else "nccl",
                    store=self.store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=None if self._on_host else device,
                )
            GROUP_USERS.add()
        # Meshes: over all ranks, over replicas by tensor-parallel ranks, and the groups that split tokens
        everyone = dist.group.WORLD
        assert everyone is not None, "init_process_group made no group"
        self.mesh = DeviceMesh.from_group(
            everyone,
            device.type,
            mesh_dim_names=(SHARD,),
        )
        if tensor_parallel > 1:
            self.mesh = self._tensor_parallel_mesh(device.type, timeout)
        self.context: ContextParallel | None = None
        if self.replica_size > tensor_parallel:
            # [replicas * tp ranks, cp ranks]: one row per context-parallel group
            parts = (
                torch.arange(world_size)
                .view(self.replicas, -1, tensor_parallel)
                .transpose(1, 2)
                .flatten(0, 1)
            )
            self.context = ContextParallel(_subgroup(parts, timeout))
        # Sums through shared memory, for ranks of one host
        self._shared: SharedSum | None = None
        if world_size > 1 and self._on_host:
            self._shared = self._share_memory(meet.timeout_s)

    def _meet(self, timeout_s: float) -> None:
        """Wait until every rank of the group has written its number to the key-value store of the group.

        NCCL would wait without a deadline for a rank that never comes. Raises ClusterError, which names the missing
        ranks, after `timeout_s` seconds, and ChannelBroken if the run is cancelled.
        """
        self.store.set(f"here {self.rank}", "1")
        here = self.store.add("here", 1)
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while here < self.world_size:
            if self._context.cancelled.wait(pause_s):
                raise cancelled(
                    self._context.owner, "waiting for the other ranks of its group"
                )
            if time.monotonic() > deadline:
                raise self._absent(timeout_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            here = self.store.add("here", 0)

    def _absent(self, timeout_s: float) -> ClusterError:
        """Return the error that names the ranks that have not joined the process group within `timeout_s` seconds."""
        component = self._context.slot.component
        absent = [
            rank
            for rank in range(self.world_size)
            if not self.store.check([f"here {rank}"])
        ]
        return ClusterError(
            problem(
                "ranks-absent",
                self._context.owner,
                error="training",
                timeout_s=timeout_s,
                component=component,
                noun=plural(len(absent), "rank"),
                absent=_listed(absent),
            )
        )

    def _tensor_parallel_mesh(self, device_type: str, timeout: timedelta) -> DeviceMesh:
        """Return the device mesh with the dimensions [copies of the model, ranks of a copy]. A collective.

        `device_type`: "cpu" or "cuda". `timeout`: longest wait of a collective.
        """
        ranks = torch.arange(self.world_size).view(-1, self.tensor_parallel)
        groups = [_subgroup(of, timeout) for of in (ranks.T, ranks)]
        return DeviceMesh.from_group(
            groups,
            device_type,
            mesh=ranks,
            mesh_dim_names=(SHARD, TENSOR),
        )

    def _share_memory(self, timeout_s: float) -> SharedSum | None:
        """Return an object that sums over ranks through shared memory; None if not all ranks can use the memory. A
        collective.

        `timeout_s`: the most seconds that a sum waits for another rank.
        """
        # Rank 0 picks a name and creates the file
        if self.rank == 0:
            self.store.set("sums", f"sums-{uuid.uuid4().hex}")
        folder = self._context.folder or Path("/nowhere")
        file = folder / self.store.get("sums").decode()
        shared = None
        if self.rank == 0:
            # No folder, or no room in it
            with suppress(OSError):
                SharedSum.create(file, self.world_size)
        dist.barrier()
        if SharedSum.possible():
            # The file is on another host
            with suppress(OSError):
                shared = SharedSum(file, self.rank, self.world_size, timeout_s)
        # All ranks use it, or none
        every = torch.tensor(int(shared is not None))
        dist.all_reduce(every, dist.ReduceOp.MIN)
        if self.rank == 0:
            file.unlink(missing_ok=True)
        if every:
            return shared
        return None

    def alone(self) -> DeviceMesh:
        """Return a device mesh with this rank only. A collective."""
        if self.world_size == 1:
            return self.mesh
        group, _ = dist.new_subgroups(group_size=1)
        return DeviceMesh.from_group(
            group,
            self.mesh.device_type,
            mesh_dim_names=(SHARD,),
        )

    def beside(self) -> dist.ProcessGroup | None:
        """Return a second process group of all ranks, with the backend gloo; None for a single rank. A collective.

        Another thread can use it for collectives on host memory. It exists as long as the default process group.
        """
        if self.world_size == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=self._timeout_s)
        )
        return group

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [n] over ranks, with equal bits on all ranks. A collective.

        With a single rank, return `values` itself, not a copy.
        """
        if self.world_size == 1:
            return values
        if self._shared is not None and values.nbytes <= MOST_BYTES:
            return self._shared.sum(values)
        if self._on_host and values.nbytes * self.world_size <= SUMMED_AT_ONCE_BYTES:
            # Small: every rank sends all values to every rank
            received = _exchange(values.repeat(self.world_size))
            return received.view(self.world_size, -1).sum(dim=0)
        if self._on_host:
            # Large: each rank sums its part, then sends the sum of that part to every rank
            missing = -len(values) % self.world_size
            received = _exchange(functional.pad(values, (0, missing)))
            mine = received.view(self.world_size, -1).sum(dim=0)
            return _exchange(mine.repeat(self.world_size))[: len(values)]
        total = values.clone()
        dist.all_reduce(total)
        return total

    def carry(self, module: FSDPModule) -> None:
        """Make a sharded module sum its gradients over ranks instead of averaging them.

        On the host, the module also gets faster collectives than those of gloo.
        """
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if self._on_host:
            # Their base classes are private to torch, which only calls `allocate` and the object itself
            gather: Any = _DirectAllGather()
            scatter: Any = _DirectReduceScatter()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)

    def scatter(self, shards: Sequence[Shard] | None, what: str) -> Shard:
        """Return this rank's element of `shards`, which rank 0 passes. A collective.

        `shards`: on rank 0, one element for each rank; None on all other ranks. `what`: noun for the elements, in
        errors. The other ranks wait for rank 0 by `wait_for_rank_0`, and raise its errors.
        """
        self.wait_for_rank_0(what)
        if self.world_size == 1:
            assert shards is not None, "the only rank is rank 0"
            return shards[0]
        # Filled in place
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if shards is None else list(shards))
        return mine[0]

    def wait_for_rank_0(self, what: str) -> None:
        """Wait until rank 0 has called this method too. On rank 0, return at once.

        All ranks must call this method equally often. Raises ChannelTimeout at the deadline, and ChannelBroken if the
        run is cancelled.

        `what`: noun for the data that rank 0 will send afterwards, for errors.
        """
        number = f"{self._epoch}.{self._waits}"
        self._waits += 1
        if self.rank == 0:
            for rank in range(1, self.world_size):
                self.store.set(f"call {number} for rank {rank}", "1")
            return
        key = f"call {number} for rank {self.rank}"
        # The store's own wait cannot be cancelled; one check takes it about 50 microseconds.
        deadline = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while not self.store.check([key]):
            if self._context.cancelled.wait(pause_s):
                raise cancelled(self._context.owner, f"waiting for {what}")
            if time.monotonic() > deadline:
                first = f"{self._context.slot.component} rank 0"
                raise ChannelTimeout(
                    problem(
                        "rank-0-late",
                        self._context.owner,
                        timeout_s=self._timeout_s,
                        first=first,
                        awaited=what,
                    )
                )
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self.store.delete_key(key)

    def begin_again(self) -> None:
        """Count the calls of `wait_for_rank_0` from 0 again. All ranks must call this after a failure.

        Some ranks may have waited for a call that rank 0 never made, so their counts could differ.
        """
        self._epoch = self._epoch + 1
        self._waits = 0

    def close(self) -> None:
        """Leave the process group. Its last user in this process destroys it."""
        GROUP_USERS.leave()


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    if len(ranks) > _MOST_NAMED:
        return f"{shown} and {len(ranks) - _MOST_NAMED} more"
    return shown


def _subgroup(ranks: Tensor, timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group for each row of `ranks`, and return the group that contains this rank. A collective.

    `ranks`: numbers of the ranks, [groups, ranks of a group]. `timeout`: longest wait of a collective.
    """
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
        ranks.tolist(), timeout=timeout
    )[0]
    return group


class _OnHost:
    """Base class of collectives that FSDP uses on the host instead of its own."""

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class _DirectAllGather(_OnHost):
    """All-gather in one exchange: every rank sends its shard to all other ranks at once."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        _exchange(input_tensor.repeat(group.size()), output_tensor, group)


class _DirectReduceScatter(_OnHost):
    """Reduce-scatter in one exchange: each rank receives its shard of every rank's gradients, and sums them in rank
    order.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, (
            f"gradients are summed here, not reduced by {op}"
        )
        shards = _exchange(input_tensor, group=group).view(group.size(), -1)
        torch.sum(shards, dim=0, out=output_tensor)


def _exchange(
    outgoing: Tensor,
    incoming: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Send piece i of `outgoing` to rank i, and return the pieces that arrive, in rank order. A collective.

    `incoming`: tensor for the result; None: a new tensor. `group`: the ranks that exchange; None: all ranks.
    """
    incoming = torch.empty_like(outgoing) if incoming is None else incoming
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming
