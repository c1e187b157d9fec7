"""Generates actions with a PyTorch policy, numpy in and numpy out; keeps the weights of a module that come and go."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.comm.weights.tensors import copy_tensor
from rlplace.models.mlp import sample
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import Decision
from rlplace.workers.engines.errors import require
from rlplace.workers.engines.weights import mismatches
from rlplace.workers.offload import storages

if TYPE_CHECKING:
    from rlplace.models.lora import Factors
    from rlplace.workers.launch.devices import Device

_WORKSPACE = "rollout workspace"


class ModuleWeights:
    """Parameters and buffers of one module, in eval mode on `device`. Starts dropped.

    Storages are emptied in place, so that references into the module stay valid. `label` names the memory in the
    device's account, `noun` the module in errors.
    """

    def __init__(self, module: nn.Module, device: Device, *, owner: str, label: str, noun: str) -> None:
        self._device, self._owner, self._label, self._noun = device, owner, label, noun
        self.torch_device = torch.device(device.torch_name)
        module.to(self.torch_device).eval().requires_grad_(False)
        # All names, tied weights included; the tensors share storage with the module.
        self.tensors: dict[str, Tensor] = module.state_dict()
        self._storages = [(storage, storage.nbytes()) for storage in storages(self.tensors.values())]
        self.size_bytes = sum(size for _, size in self._storages)
        self.version: int | None = None
        self.drop()

    def drop(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        self._device.release(self._label)
        self.version = None

    def allocate(self) -> None:
        """Make room; the content means nothing until `load`. Raises AcceleratorOutOfMemory."""
        self._device.acquire(self.size_bytes, self._label)
        for storage, size in self._storages:
            storage.resize_(size)

    @property
    def held_bytes(self) -> int:
        return sum(storage.nbytes() for storage, _ in self._storages)

    def load(self, weights: Mapping[str, Tensor], version: int, factors: Mapping[str, Factors]) -> None:
        """Copy all weights in, with their factors added. Raises ValueError, naming all that does not fit."""
        problems = mismatches(weights, {name: tuple(t.shape) for name, t in self.tensors.items()}, self._noun)
        if problems:
            raise ValueError(
                f"{self._owner}: weights of version {version} do not fit the {self._noun}: " + "; ".join(problems)
            )
        self.version = None  # until all are copied, this is no version
        for name, weight in weights.items():
            whole = factors[name].added_to(weight, self.torch_device) if name in factors else weight
            copy_tensor(self.tensors[name], whole)
        self.version = version

    def digest(self) -> str:
        """Return the SHA-256 of all weights by name."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            weight = self.tensors[name].cpu().clone()  # a storage that numpy has seen can never be resized again
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
            digest.update(weight.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class TorchEngine:
    """A VectorEngine over a policy whose forward gives a `PolicyOutput`."""

    def __init__(self, policy: nn.Module, *, device: Device, owner: str, workspace_bytes: int = 0) -> None:
        self._policy, self._device, self._owner, self._workspace_bytes = policy, device, owner, workspace_bytes
        self._weights = ModuleWeights(policy, device, owner=owner, label="policy weights", noun="policy")
        self.residency = Residency.OFF

    @property
    def version(self) -> int | None:
        return self._weights.version

    @property
    def host_bytes(self) -> int:
        return 0

    def move(self, to: Residency) -> int:
        if to < Residency.FULL:
            self._device.release(_WORKSPACE)
        if to == Residency.OFF:
            self._weights.drop()
        if to >= Residency.WEIGHTS > self.residency:
            self._weights.allocate()
            self.residency = Residency.WEIGHTS
        if to == Residency.FULL > self.residency:
            self._device.acquire(self._workspace_bytes, _WORKSPACE)
        self.residency = to
        return self._weights.held_bytes + (self._workspace_bytes if to == Residency.FULL else 0)

    def load(
        self, weights: Mapping[str, Tensor], version: int, factors: Mapping[str, Factors] = MappingProxyType({})
    ) -> None:
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False)
        self._weights.load(weights, version, factors)

    def decide(self, observations: NDArray[np.float32], noise: NDArray[np.float32]) -> Decision:
        require(self, self._owner, "generate", needs=Residency.FULL)
        assert self.version is not None
        with torch.inference_mode():
            output = self._policy(self._to_device(observations))
            actions, logprobs = sample(output, self._to_device(noise))
            return Decision(
                actions=actions.cpu().numpy(),
                logprobs=logprobs.cpu().numpy(),
                values=output.values.cpu().numpy(),
                version=self.version,
            )

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        if not array.flags.writeable:  # torch warns of arrays it could be made to write to
            array = array.copy()
        return torch.from_numpy(array).to(self._weights.torch_device)

    def digest(self) -> str:
        require(self, self._owner, "digest", needs=Residency.WEIGHTS)
        return self._weights.digest()

    def close(self) -> None:
        self.move(Residency.OFF)
