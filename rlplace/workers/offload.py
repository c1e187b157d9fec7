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
    """Some tensors whose memory is either on the accelerator or on the host. Owns the host copies.

    `what`: label of the bytes in the account of `device`. `tensors`: returns the tensors; called again at every
    offload. At first, the tensors are on the accelerator, and their bytes are in the account.
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
        """Record the present bytes of the tensors in the device's account, if the tensors are on the accelerator.

        Raise AcceleratorOutOfMemory if the bytes do not fit.
        """
        if self._host is None:
            self._device.acquire(self.accelerator_bytes, self.what)

    @property
    def accelerator_bytes(self) -> int:
        """Bytes of the tensors on the accelerator now; 0 while they are offloaded."""
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Bytes of the host copies now; 0 while the tensors are on the accelerator."""
        return sum(
            copy.untyped_storage().nbytes() for _, copy in (self._host or {}).values()
        )

    def where(self, tensor: Tensor) -> Tensor:
        """Return `tensor`; while it is offloaded, return a view of its host copy with the same shape and strides.

        The result may be read, and changed in place.
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
        """Copy the tensors' memory to the host, free it on the accelerator, and remove its bytes from the device's
        account.

        The tensor objects stay. Do nothing if the tensors are offloaded already.
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
        """Allocate the tensors' memory on the accelerator, and copy their bytes back from the host.

        Do nothing if the tensors are not offloaded. Raise AcceleratorOutOfMemory, and change nothing, if the bytes do
        not fit.
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
    """Move tensors whose memory cannot be freed in place, such as tensors in a mapped weight file, to new memory.

    The tensor objects stay. Tensors that share memory share the new memory too.
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
    """Return the storages of `tensors` that are not empty. A storage that several tensors share is returned once."""
    distinct: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            distinct.setdefault(storage.data_ptr(), storage)
    return list(distinct.values())


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
