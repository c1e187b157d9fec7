"""Move tensors between accelerator and host in place: storages are emptied and filled, tensor objects stay.

Optimizers, FSDP and views hold on to tensor objects, so tensors must not be replaced. Resizing the storage below them
to nothing releases the memory and leaves every view valid for the day the bytes come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rlplace.workers.launch.devices import Device


class Offloadable:
    """The storages of some tensors, all on the accelerator or all on the host. Owns the host copies.

    `tensors` is asked anew at every offload. They start on the accelerator, and are accounted at once.
    """

    def __init__(
        self, what: str, device: Device, tensors: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.what = what
        self._device = device
        self._tensors = tensors
        # By the address of the emptied storage, which stays. None: on the accelerator.
        self._host: dict[int, tuple[torch.UntypedStorage, Tensor]] | None = None
        device.acquire(self.accelerator_bytes, what)

    def account(self) -> None:
        """Account what the storages hold now, where they are on the accelerator.

        Raises AcceleratorOutOfMemory.
        """
        if self._host is None:
            self._device.acquire(self.accelerator_bytes, self.what)

    @property
    def accelerator_bytes(self) -> int:
        """Bytes that the storages hold now, measured."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copies, measured."""
        return sum(
            copy.untyped_storage().nbytes() for _, copy in (self._host or {}).values()
        )

    def where(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its bytes in the host copy while they are there; to be read, or changed in place."""
        _, copy = (self._host or {}).get(tensor.untyped_storage()._cdata, (None, None))
        if copy is None:
            return tensor
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(
            copy.untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    @torch.no_grad()
    def offload(self) -> None:
        """Copy to the host, release the storage, then the accounted bytes. Free when already offloaded."""
        if self._host is not None:
            return
        self._host = {}
        for storage in storages(self._tensors()):
            on_gpu = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            copy.copy_(_as_bytes(storage), non_blocking=on_gpu)
            self._host[storage._cdata] = storage, copy
        self._arrive()
        for storage, _ in self._host.values():
            storage.resize_(0)
        # A GPU also takes back here what torch's allocator would keep
        self._device.release(self.what)

    @torch.no_grad()
    def onload(self) -> None:
        """Bring the bytes back as they were. Free when already resident.

        Raises AcceleratorOutOfMemory; then nothing has changed.
        """
        if self._host is None:
            return
        self._device.acquire(self.host_bytes, self.what)
        for storage, copy in self._host.values():
            storage.resize_(copy.numel())
            _as_bytes(storage).copy_(copy, non_blocking=storage.device.type == "cuda")
        # Before the copies may be used for something else
        self._arrive()
        self._host = None

    def _arrive(self) -> None:
        """Wait once for all copies between a GPU and the host: to wait for each leaves the bus idle in between."""
        if any(
            storage.device.type == "cuda" for storage, _ in (self._host or {}).values()
        ):
            torch.cuda.synchronize()


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of `tensors` that hold memory; views and tied weights count once."""
    distinct: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            distinct.setdefault(storage.data_ptr(), storage)
    return list(distinct.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
