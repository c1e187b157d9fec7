"""Generates actions with a PyTorch policy, numpy in and numpy out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.comm.weights.tensors import copy_tensor
from rlplace.models.distributions import sample
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.vector_contract import Decision
from rlplace.workers.offload import storages
from rlplace.workers.refusals import no_weights
from rlplace.workers.worker import not_resident

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

_WEIGHTS = "policy weights"
_WORKSPACE = "rollout workspace"


class TorchEngine:
    """An Engine over a policy whose forward gives a `PolicyOutput`.

    Owns the policy's storages; on the way OFF they are emptied in place, so that references into the module stay valid.
    """

    def __init__(self, policy: nn.Module, *, device: Device, owner: str, workspace_bytes: int = 0) -> None:
        self._device = device
        self._owner = owner
        self._torch_device = torch.device(device.torch_name)
        self._policy = policy.to(self._torch_device).eval().requires_grad_(False)
        # All names, tied weights included; the tensors share storage with the policy.
        self._weights: dict[str, Tensor] = self._policy.state_dict()
        self._storages = [(storage, storage.nbytes()) for storage in storages(self._weights.values())]
        self._workspace_bytes = workspace_bytes
        self._residency = Residency.OFF
        self._version: int | None = None
        self._free()

    @property
    def residency(self) -> Residency:
        return self._residency

    def move(self, to: Residency) -> int:
        if to < Residency.FULL:
            self._device.release(_WORKSPACE)
        if to == Residency.OFF:
            self._free()
        if to >= Residency.WEIGHTS > self._residency:
            self._device.acquire(sum(size for _, size in self._storages), _WEIGHTS)
            for storage, size in self._storages:
                storage.resize_(size)
            self._residency = Residency.WEIGHTS
        if to == Residency.FULL > self._residency:
            self._device.acquire(self._workspace_bytes, _WORKSPACE)
        self._residency = to
        return self._held_bytes()

    def _free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._torch_device.type == "cuda":
            torch.cuda.empty_cache()
        self._device.release(_WEIGHTS)
        self._version = None

    def _held_bytes(self) -> int:
        workspace = self._workspace_bytes if self._residency == Residency.FULL else 0
        return sum(storage.nbytes() for storage, _ in self._storages) + workspace

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._copy(weights, version, missing=self._weights.keys() - weights.keys())

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self._version is None and self._residency >= Residency.WEIGHTS:
            raise no_weights(self._owner, "pull_weights")
        self._copy(weights, version)

    def _copy(self, weights: Mapping[str, Tensor], version: int, missing: Iterable[str] = ()) -> None:
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self._owner, "pull_weights", has=self._residency, needs=Residency.WEIGHTS)
        problems = [f"{name} is missing" for name in missing]
        problems += [f"{name} is not the policy's" for name in weights.keys() - self._weights.keys()]
        problems += [
            f"{name} is {list(weight.shape)}, expected {list(self._weights[name].shape)}"
            for name, weight in weights.items()
            if name in self._weights and weight.shape != self._weights[name].shape
        ]
        if problems:
            raise ValueError(
                f"{self._owner}: weights of version {version} do not fit the policy: " + "; ".join(sorted(problems))
            )
        self._version = None  # until all are copied, this is no version
        for name, weight in weights.items():
            copy_tensor(self._weights[name], weight)
        self._version = version

    def decide(self, observations: NDArray[np.float32], noise: NDArray[np.float32]) -> Decision:
        if self._residency < Residency.FULL:
            raise not_resident(self._owner, "generate", has=self._residency, needs=Residency.FULL)
        if self._version is None:
            raise no_weights(self._owner, "generate")
        with torch.inference_mode():
            output = self._policy(self._to_device(observations))
            actions, logprobs = sample(output, self._to_device(noise))
            return Decision(
                actions=actions.cpu().numpy(),
                logprobs=logprobs.cpu().numpy(),
                values=output.values.cpu().numpy(),
                version=self._version,
            )

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        if not array.flags.writeable:  # torch warns of arrays it could be made to write to
            array = array.copy()
        return torch.from_numpy(array).to(self._torch_device)

    def digest(self) -> str:
        if self._version is None:
            raise no_weights(self._owner, "digest")
        digest = hashlib.sha256()
        for name in sorted(self._weights):
            weight = self._weights[name].cpu().clone()  # a storage that numpy has seen can never be resized again
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
            digest.update(weight.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.move(Residency.OFF)
