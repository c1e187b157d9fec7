"""Engines that run a PyTorch module whose weights can be offloaded; and the engine that decides on actions, with numpy
arrays as input and output.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplace.comm.weights.shards import copy_tensor
from rlplace.models.policy_networks import PolicyNetwork, decisions_of
from rlplace.models.sharding import digest
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import NO_FACTORS, FactorsOf, Weights, require
from rlplace.workers.engines.weights import check_fit, merged
from rlplace.workers.offload import storages

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device


class ModuleEngine:
    """Base class of engines that run one module, in eval mode. Owns the module's parameters and buffers; starts at OFF.

    When weights are offloaded, the memory of the tensors is freed, but the tensor objects stay valid. At FULL, the
    engine also has a workspace, such as a KV cache. `labels`: labels of weights and workspace in the device's memory
    account.
    """

    host_bytes = 0
    # Names of weights and workspace in the device's account
    labels: tuple[str, str]

    def __init__(self, module: nn.Module, device: Device, owner: str) -> None:
        self._device = device
        self._owner = owner
        self._torch_device = torch.device(device.torch_name)
        module.to(self._torch_device).eval().requires_grad_(False)
        # All names, tied weights included; the tensors share storage with the module.
        self._tensors: dict[str, Tensor] = module.state_dict()
        # Each storage with its size when it is filled
        self._storages = [
            (storage, storage.nbytes()) for storage in storages(self._tensors.values())
        ]
        self._weight_bytes = sum(size for _, size in self._storages)
        # Shape of each tensor, by all its names
        self.shapes = {
            name: tuple(tensor.shape) for name, tensor in self._tensors.items()
        }
        # Bytes of the workspace at FULL
        self._workspace_bytes = 0
        self._drop_weights()

    def _drop_weights(self) -> None:
        """Free the memory of all weights, but keep the tensor objects, and release the bytes in the device's
        account.
        """
        for storage, _ in self._storages:
            storage.resize_(0)
        self._device.release(self.labels[0])
        self.version: int | None = None
        self.residency = Residency.OFF

    def move(self, to: Residency) -> int:
        """Take or free memory to reach residency `to`, and return the bytes that the engine then has on the
        accelerator.

        Memory is freed before other memory is allocated. Allocated weights have no defined content until `load`.
        """
        weights, workspace = self.labels
        if to < Residency.FULL:
            self._set_workspace(made=False)
            self._device.release(workspace)
        if to == Residency.OFF:
            self._drop_weights()
        if to >= Residency.WEIGHTS > self.residency:
            self._device.acquire(self._weight_bytes, weights)
            for storage, size in self._storages:
                # The content is undefined until `load`
                storage.resize_(size)
            self.residency = Residency.WEIGHTS
        if to == Residency.FULL > self.residency:
            self._device.acquire(self._workspace_bytes, workspace)
            self._set_workspace(made=True)
        self.residency = to
        held = sum(storage.nbytes() for storage, _ in self._storages)
        return held + self._held_workspace_bytes

    def _set_workspace(self, *, made: bool) -> None:
        """Allocate the workspace of residency FULL if `made` is true, else free it. The base class has no workspace."""

    @property
    def _held_workspace_bytes(self) -> int:
        """Bytes of the workspace now; 0 below residency FULL."""
        if self.residency == Residency.FULL:
            return self._workspace_bytes
        return 0

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        """Copy all weights into the module, as `Engine.load` describes.

        If an error occurs after some weights were copied, the engine has no version, and refuses to generate.
        """
        require(
            self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False
        )
        check_fit(weights, self.shapes, owner=self._owner, version=version)
        self.version = None
        for name, weight in merged(weights, factors, self._torch_device):
            copy_tensor(self._tensors[name], weight)
        self.version = version

    def close(self) -> None:
        self.move(Residency.OFF)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The actions for a batch of B observations, with their log-probabilities and value estimates.

    `version`: version of the policy that decided. `memory`: the policy's recurrent memory for the next step, [B, size
    of a memory]; None if the policy has no memory. The arrays belong to the caller.
    """

    actions: NDArray[Any]  # [B, *A]
    logprobs: NDArray[np.float32]  # [B]
    values: NDArray[np.float32]  # [B]
    version: int  # of the policy that decided
    # [B, S], for the next step; None: the policy has no memory
    memory: NDArray[np.float32] | None = None


class TorchEngine(ModuleEngine):
    """Decides on actions for batches of observations with a policy network."""

    labels = ("policy weights", "rollout workspace")

    def __init__(
        self,
        policy: PolicyNetwork,
        *,
        device: Device,
        owner: str,
        workspace_bytes: int = 0,
    ) -> None:
        super().__init__(policy, device, owner)
        self._policy = policy
        self._workspace_bytes = workspace_bytes

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        super().load(weights, version, factors)
        self._decisions = decisions_of(self._policy)

    def decide(
        self, observations: NDArray[Any], noise: NDArray[np.float32]
    ) -> Decision:
        """Return one sampled action for each row of `observations`, with log-probability and value.

        `observations`: B observations, [B, *shape of an observation]. `noise`: [B, random numbers per action], from
        which each action is drawn. Raises NotResident below residency FULL or without weights.
        """
        require(self, self._owner, "generate", needs=Residency.FULL)
        assert self.version is not None
        with torch.inference_mode():
            device = self._torch_device
            decided = self._decisions(
                torch.from_numpy(observations).to(device),
                torch.from_numpy(noise).to(device),
            )
            actions, logprobs, values, *memory = (
                part.cpu().numpy() for part in decided
            )
        return Decision(
            actions=actions,
            logprobs=logprobs,
            values=values,
            version=self.version,
            memory=memory[0] if memory else None,
        )

    def copy_to(self, module: nn.Module) -> None:
        """Copy all weights into `module`, which has the same ones on the host. Raises NotResident without weights."""
        require(self, self._owner, "evaluate", needs=Residency.WEIGHTS)
        module.load_state_dict(
            {name: tensor.cpu() for name, tensor in self._tensors.items()}
        )

    def digest(self) -> str:
        """Return the SHA-256 of all weights and their names. It is equal for two engines only if all weights are
        bitwise equal.

        Raises NotResident below residency WEIGHTS or without weights.
        """
        require(self, self._owner, "digest", needs=Residency.WEIGHTS)
        return digest(self._tensors.items())
