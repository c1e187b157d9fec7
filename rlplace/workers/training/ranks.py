"""The collectives of one worker group: an explicitly joined process group, its device mesh and a sum over ranks.

NCCL is used as it comes. Gloo's collectives pass messages around a ring, world size - 1 hops one after the other, and
on a host with fewer cores than ranks every hop waits for a context switch: at 8 ranks on 2 cores an all-gather of 40 kB
takes 14 ms and a reduce-scatter 24 ms. One exchange in which each rank sends to all others at once takes 4 ms for
either, and moves no more bytes than the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlplace.workers.worker import Rendezvous, WorkerContext

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Ranks:
    """Joins the default process group of this process, which is open until the last to join it has closed.

    torch allows one per process. Groups of a single rank each, as threads of one process are, have the same one.
    """

    backend = "nccl"
    _opening = threading.Lock()
    _members = 0  # of the process group, in this process

    def __init__(self, rank: int, world_size: int, rendezvous: Rendezvous, device: torch.device) -> None:
        """Blocks until all ranks have joined, at most `rendezvous.timeout_s`; takes over `rendezvous.listen_fd`."""
        timeout = timedelta(seconds=rendezvous.timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]  # it is there, but not in the stubs
            rendezvous.host,
            rendezvous.port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=rendezvous.listen_fd if rank == 0 else None,
        )
        with Ranks._opening:
            if not _alone_together(world_size):
                dist.init_process_group(
                    self.backend,
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=device if device.type == "cuda" else None,
                )
            Ranks._members += 1
        self.rank = rank
        self.world_size = world_size
        self.store = store  # of keys and values, served by rank 0
        everyone = dist.group.WORLD
        assert everyone is not None, "init_process_group made no group"
        self.mesh = DeviceMesh.from_group(everyone, device.type, mesh_dim_names=("shard",))

    def alone(self) -> DeviceMesh:
        """A mesh of each rank by itself. A collective."""
        if self.world_size == 1:
            return self.mesh
        group, _ = dist.new_subgroups(group_size=1)
        return DeviceMesh.from_group(group, self.mesh.device_type, mesh_dim_names=("shard",))

    def sum(self, values: Tensor) -> Tensor:
        """[n] summed over ranks, equal to the bit on all of them. A collective."""
        total = values.clone()
        dist.all_reduce(total)
        return total

    def carry(self, module: FSDPModule) -> None:
        """Makes the gradients of a sharded module sums over ranks, not means, and picks the fastest way for them."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def close(self) -> None:
        with Ranks._opening:
            Ranks._members -= 1
            if not Ranks._members:
                dist.destroy_process_group()


class GlooRanks(Ranks):
    """Ranks on hosts: each collective is one direct exchange."""

    backend = "gloo"

    def sum(self, values: Tensor) -> Tensor:
        return _exchange(values.repeat(self.world_size)).view(self.world_size, -1).sum(dim=0)

    def carry(self, module: FSDPModule) -> None:
        super().carry(module)
        # Their base classes live in a private module of torch; what is called is `allocate` and the object itself.
        module.set_custom_all_gather(DirectAllGather())  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(DirectReduceScatter())  # type: ignore[arg-type]


def _alone_together(world_size: int) -> bool:
    """Whether this process is in a group of one already, which another one of one rank can be in as well."""
    return world_size == 1 and dist.is_initialized() and dist.get_world_size() == 1


def join_ranks(rank: int, world_size: int, rendezvous: Rendezvous, device: torch.device) -> Ranks:
    kind = Ranks if device.type == "cuda" else GlooRanks if world_size > 1 else SoleRank
    return kind(rank, world_size, rendezvous, device)


def join_group(context: WorkerContext) -> Ranks:
    """The other ranks of a worker's group, on its device, which its thread computes on from now on. A collective."""
    device = torch.device(context.device.torch_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
    return join_ranks(context.rank, context.world_size, context.rendezvous, device)


class SoleRank(GlooRanks):
    """One rank on a host: a sum over ranks is what it has."""

    def sum(self, values: Tensor) -> Tensor:
        return values


class _OnHost:
    """The buffers FSDP asks its collectives for."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DirectAllGather(_OnHost):
    """Every rank sends its shard to every other at once."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        _exchange(input_tensor.repeat(group.size()), output_tensor, group)


class DirectReduceScatter(_OnHost):
    """Every rank gets its shard of all others' gradients at once and sums them in rank order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, f"gradients are summed here, not reduced by {op}"
        shards = _exchange(input_tensor, group=group).view(group.size(), -1)
        torch.sum(shards, dim=0, out=output_tensor)


def _exchange(outgoing: Tensor, incoming: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Piece i of `outgoing` goes to rank i; piece i of the result came from rank i."""
    incoming = torch.empty_like(outgoing) if incoming is None else incoming
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming
