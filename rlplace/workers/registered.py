"""The objects that a custom worker has passed to `self.offload(...)`: weights, and state that only training needs.

::

    residency   OFF        WEIGHTS                         FULL
    there       nothing    parameters, buffers, tensors    and gradients, optimizer state
    engines     nothing    weights                         and the KV cache
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.codes import problem
from rlplace.errors import WorkerMisuse
from rlplace.placement.language.slots import Slot
from rlplace.placement.schedule import Residency
from rlplace.units import clipped
from rlplace.workers.engines.generation import GenerationEngine
from rlplace.workers.launch.devices import Device
from rlplace.workers.offload import Offloadable
from rlplace.workers.worker import MoveReport


class Registered:
    """The modules, optimizers, tensors and engines of a worker that are offloaded together with its component."""

    def __init__(self, slot: Slot, device: Device) -> None:
        self._slot = slot
        self._device = device
        self._modules: list[nn.Module] = []
        self._optimizers: list[Any] = []
        # Tensors, and nested mappings of tensors
        self._tensors: list[Any] = []
        # Engines move their memory, and account for it, themselves.
        self._engines: list[GenerationEngine] = []
        # Newly registered objects are on the accelerator.
        self._residency = Residency.FULL
        weights = f"{slot.component} weights"
        state = f"{slot.component} gradients and optimizer state"
        # Tensors by the lowest residency that needs them
        self._parts: dict[Residency, Offloadable] = {
            Residency.WEIGHTS: Offloadable(weights, device, self._weights),
            Residency.FULL: Offloadable(state, device, self._state),
        }

    def add(self, things: tuple[Any, ...]) -> MoveReport:
        """Register objects to be offloaded; return the present residency and the bytes of all registered objects.

        `things`: torch modules, optimizers, tensors, nested containers of tensors, or engines. Raise WorkerMisuse, and
        register nothing, if one of them cannot be offloaded.
        """
        for thing in things:
            known = isinstance(thing, GenerationEngine)
            if not known and not _is_module(thing) and not _is_optimizer(thing):
                self._check_tensors(thing)
        for thing in things:
            if isinstance(thing, GenerationEngine):
                if thing not in self._engines:
                    self._engines.append(thing)
            elif _is_module(thing):
                self._modules.append(thing)
            elif _is_optimizer(thing):
                self._optimizers.append(thing)
            else:
                self._tensors.append(thing)
        self.account()
        return self._report(self._residency)

    def account(self) -> None:
        """Record the present bytes of all registered objects except engines in the device's account.

        This must be repeated, because gradients and optimizer state are allocated only in the first step.
        """
        for part in self._parts.values():
            part.account()

    @property
    def residency(self) -> Residency:
        return self._residency

    def where(self, tensor: Tensor) -> Tensor:
        """Return `tensor`; while it is offloaded, return a view of its host copy with the same shape and strides."""
        for part in self._parts.values():
            there = part.where(tensor)
            if there is not tensor:
                return there
        return tensor

    def move(self, to: Residency) -> MoveReport:
        """Offload or onload the registered objects as residency `to` requires; return the new residency and the bytes.

        A tensor that was offloaded and onloaded is bitwise equal to the tensor before.
        """
        # Offload first, to make room for what is onloaded.
        for engine in self._engines:
            if to < engine.residency:
                engine.move(to)
        for needs in reversed(self._parts):
            if to < needs:
                self._parts[needs].offload()
        for needs, part in self._parts.items():
            if to >= needs:
                part.onload()
        for engine in self._engines:
            if to > engine.residency:
                engine.move(to)
        self._residency = to
        return self._report(to)

    def begin_again(self) -> None:
        """Discard unfinished answers of the registered engines. Called before an iteration is repeated."""
        for engine in self._engines:
            engine.drop()

    def _report(self, residency: Residency) -> MoveReport:
        holders: list[Offloadable | GenerationEngine]
        holders = [*self._parts.values(), *self._engines]
        return MoveReport(
            residency=residency,
            accelerator_bytes=self._device.measured_bytes(
                sum(holder.accelerator_bytes for holder in holders)
            ),
            host_bytes=sum(holder.host_bytes for holder in holders),
        )

    def _weights(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from self._local(module.parameters())
            yield from self._local(module.buffers())
        for thing in self._tensors:
            yield from self._local(_tensors_in(thing))

    def _state(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from self._local(_gradients(module.parameters()))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from self._local(_gradients(group["params"]))
            yield from self._local(_tensors_in(dict(optimizer.state)))

    def _local(self, tensors: Any) -> Iterator[Tensor]:
        """Yield the tensors that this rank has; for a DTensor, its local shard.

        If the worker has a real GPU, tensors on the CPU are left out.
        """
        real = self._device.torch_name != "cpu"
        for tensor in tensors:
            here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if not (real and here.device.type == "cpu"):
                yield here

    def _check_tensors(self, thing: Any) -> None:
        found = list(_tensors_in(thing))
        if found and (isinstance(thing, Tensor) or _holds_only_tensors(thing)):
            return
        raise WorkerMisuse(
            problem(
                "nothing-to-offload",
                self._slot.owner,
                clipped(repr(thing), 80),
                error="thing",
                kind=type(thing).__name__,
            )
        )


def _is_module(thing: Any) -> bool:
    return isinstance(thing, nn.Module)


def _is_optimizer(thing: Any) -> bool:
    """Return whether `thing` is a torch optimizer, or an object with the same attributes `param_groups` and `state`."""
    return isinstance(thing, torch.optim.Optimizer) or (
        hasattr(thing, "param_groups") and hasattr(thing, "state")
    )


def _gradients(parameters: Any) -> Iterator[Tensor]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad


def _tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yield all tensors in `thing`: a tensor, or mappings, lists and tuples that contain tensors, nested at will."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors_in(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from _tensors_in(value)


def _holds_only_tensors(thing: Any) -> bool:
    if isinstance(thing, Mapping):
        return all(_holds_only_tensors(value) for value in thing.values())
    if isinstance(thing, list | tuple):
        return all(_holds_only_tensors(value) for value in thing)
    return isinstance(thing, Tensor)
