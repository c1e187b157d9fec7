"""Move tensors between accelerator and host in place: the storage is emptied and refilled, the tensor objects stay.

Optimizers, FSDP and views hold on to tensor objects, so tensors must not be replaced. Resizing the storage below them
to nothing releases the memory and leaves every view valid until the bytes come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from rlplace.workers.launch.devices import Device


class Offloadable:
    """Storages of some tensors, either all on the accelerator or all on the host. Owns the host copies.

    `what`: name under which `device` accounts for the bytes. `tensors`: returns the tensors; called again at every
    offload. The storages start on the accelerator, and their bytes are accounted for at once.
    """

    def __init__(
        self, what: str, device: Device, tensors: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.what = what
        self._device = device
        self._tensors = tensors
        # (storage, host copy) by the address of the storage object. None: the storages are on the accelerator.
        self._host: dict[int, tuple[torch.UntypedStorage, Tensor]] | None = None
        device.acquire(self.accelerator_bytes, what)

    def account(self) -> None:
        """Account on the device for the present bytes of the storages, if the storages are on the accelerator.

        Raise AcceleratorOutOfMemory if the bytes do not fit.
        """
        if self._host is None:
            self._device.acquire(self.accelerator_bytes, self.what)

    @property
    def accelerator_bytes(self) -> int:
        """Measured bytes of the storages now; 0 while the storages are offloaded."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Measured bytes of the host copies; 0 while the storages are on the accelerator."""
        return sum(
            copy.untyped_storage().nbytes() for _, copy in (self._host or {}).values()
        )

    def where(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a view of its host copy while it is offloaded.

        The view has the shape and strides of `tensor`.

        The tensor and the view may be read or changed in place.
        """
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
        """Copy the storages to the host, then free the storages and release their accounted bytes.

        Do nothing if the storages are offloaded already.
        """
        if self._host is not None:
            return
        move_to_own_memory(self._tensors())
        self._host = {}
        for storage in storages(self._tensors()):
            on_gpu = storage.device.type == "cuda"
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            copy.copy_(_as_bytes(storage), non_blocking=on_gpu)
            self._host[storage._cdata] = storage, copy
        # One wait for all copies: a wait for each copy would leave the bus idle in between.
        self._arrive()
        for storage, _ in self._host.values():
            storage.resize_(0)
        # On a GPU, this also frees the blocks that torch's allocator caches.
        self._device.release(self.what)

    @torch.no_grad()
    def onload(self) -> None:
        """Copy the bytes from the host back into the storages. Do nothing if the storages are not offloaded.

        Raise AcceleratorOutOfMemory before any change if the bytes do not fit.
        """
        if self._host is None:
            return
        self._device.acquire(self.host_bytes, self.what)
        for storage, copy in self._host.values():
            storage.resize_(copy.numel())
            _as_bytes(storage).copy_(copy, non_blocking=storage.device.type == "cuda")
        # The copies must be complete before their memory is reused.
        self._arrive()
        self._host = None

    def _arrive(self) -> None:
        """Wait until all copies between GPU and host are complete."""
        if any(
            storage.device.type == "cuda" for storage, _ in (self._host or {}).values()
        ):
            torch.cuda.synchronize()


def move_to_own_memory(tensors: Iterable[Tensor]) -> None:
    """Copy tensors whose storage cannot be resized, such as tensors of a mapped weight file, to new storages.

    The tensor objects stay. Tensors that share a storage share the new storage.
    """
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        # Key: the address of the storage object
        if storage._cdata not in moved:
            moved[storage._cdata] = storage.clone()
        own = torch.empty(0, dtype=tensor.dtype)
        own.set_(
            moved[storage._cdata],
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
        tensor.data = own


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of `tensors` that hold memory, each storage once even if several tensors share it."""
    distinct: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            distinct.setdefault(storage.data_ptr(), storage)
    return list(distinct.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
