"""What workers that train a model have in common: its memory comes and goes, its weights are pushed to the engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import WEIGHTS
from rlplace.workers.worker import MoveReport, Worker, not_resident

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.comm.weights.device_sync import DeviceSender
    from rlplace.comm.weights.sender import WeightSender
    from rlplace.comm.weights.shards import Shard
    from rlplace.config import SyncConfig
    from rlplace.placement.flow import Delivery
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.ranks import Ranks

_DELTA_SHARE = 0.5  # of the bytes: above it, all are sent
_WORKSPACE = "gathered weights and gradients"


class TrainingWorker(Worker):
    """One rank of a group that trains one model together.

    Residency `weights` holds parameters and buffers, `full` the optimizer state too. A subclass makes in `setup` what
    is declared here.
    """

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks | None = None
    _sender: WeightSender | None = None
    _sync_mode: str
    _pushes: int = 0
    _weights: Offloadable
    _optimizer_state: Offloadable

    def _join(self) -> Ranks:
        """Joins the other ranks of the group, on this rank's device. A collective."""
        from rlplace.workers.training.ranks import join_group

        self._ranks = join_group(self.context)
        return self._ranks

    def _open_sync(self, sync: SyncConfig, deliveries: Sequence[Delivery], *, checksums: bool = True) -> None:
        """`deliveries` count where ranks share memory. `checksums`: they are what `verify_every` means."""
        from rlplace.comm.weights.sender import PushRules, WeightSender
        from rlplace.placement.flow import DeviceDelivery

        context = self.context
        past_host = any(isinstance(delivery, DeviceDelivery) for delivery in deliveries)
        self._sender = WeightSender(
            context.channels[WEIGHTS],
            rank=context.rank,
            deliveries=deliveries,
            folder=context.folder,
            rules=PushRules(
                verify_every=sync.verify_every if checksums else 0,
                delta_share=_DELTA_SHARE if sync.mode == "delta" else 0.0,
            ),
            device=self._device_sender() if past_host else None,
        )
        self._sync_mode = sync.mode

    def _device_sender(self) -> DeviceSender:
        """All members of a sync meet at the store by which the ranks of this group have joined."""
        import torch

        from rlplace.comm.weights.device_sync import DeviceSender
        from rlplace.comm.weights.rendezvous import StoreAddress

        context = self.context
        return DeviceSender(
            context.channels[WEIGHTS],
            rank=context.rank,
            device=torch.device(context.device.torch_name),
            store=StoreAddress(host=context.rendezvous.host, port=context.rendezvous.port),
        )

    @property
    def residency(self) -> Residency:
        if not self._weights.resident:
            return Residency.OFF
        return Residency.FULL if self._optimizer_state.resident else Residency.WEIGHTS

    def move(self, to: Residency) -> MoveReport:
        """Brings weights and optimizer state on or off; they come back equal to the bit. Gradients are never kept."""
        began = time.perf_counter()
        if to < Residency.FULL:
            self._optimizer_state.offload()
        if to < Residency.WEIGHTS:
            self._weights.offload()
        if to >= Residency.WEIGHTS:
            self._weights.onload()
        if to >= Residency.FULL:
            self._optimizer_state.onload()
        parts = (self._weights, self._optimizer_state)
        return MoveReport(
            residency=self.residency,
            accelerator_bytes=sum(part.accelerator_bytes for part in parts),
            host_bytes=sum(part.host_bytes for part in parts),
            seconds=time.perf_counter() - began,
        )

    def push_weights(self, version: int) -> Metrics:
        """Writes this rank's share of the weights for the rollout ranks as `version`; blocks until it is written.

        The first push is of all weights, whatever the selection.
        """
        from rlplace.comm.weights.shards import select

        if self.residency < Residency.WEIGHTS:
            raise not_resident(self.context.owner, "push_weights", has=self.residency, needs=Residency.WEIGHTS)
        shards = self._shards()
        picked = select(self._sync_mode, shards) if self._pushes else shards
        enclosed = self._enclosed()
        assert self._sender is not None, "setup comes first"
        report = self._sender.push(version, (*picked, *enclosed), partial=len(picked) < len(shards)).wait()
        self._pushes += 1
        return {
            "actor/push_s": Metric(report.seconds, "max"),
            "actor/push_gb_per_s": Metric(report.gb_per_s, "sum"),
            "actor/pushed_bytes": Metric(report.size_bytes, "sum"),
            **{f"actor/pushed_{way}_bytes": Metric(size, "sum") for way, size in report.ways.items()},
        }

    def _shards(self) -> tuple[Shard, ...]:
        """What this rank holds of the weights."""
        raise NotImplementedError

    def _enclosed(self) -> tuple[Shard, ...]:
        """What goes along with the weights of every push, the same tensors each time."""
        return ()

    def _workspace_bytes(self, needs: Residency) -> int:
        """What a computation that needs so much residency holds beside it."""
        raise NotImplementedError

    def _drop_gathered(self) -> None:
        """Frees what a computation left beside the resident state."""
        raise NotImplementedError

    @contextmanager
    def _computing(self, method: str, needs: Residency) -> Iterator[None]:
        """Refuses below `needs`; accounts what a computation holds beside the resident state, frees it at the end."""
        if self.residency < needs:
            raise not_resident(self.context.owner, method, has=self.residency, needs=needs)
        self.context.device.acquire(self._workspace_bytes(needs), _WORKSPACE)
        try:
            yield
        finally:
            self._drop_gathered()
            self.context.device.release(_WORKSPACE)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
