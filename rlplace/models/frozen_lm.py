"""A language model for inference only: no gradients, no optimizer, weights whole or sharded, on device or host.

::

    mesh      on_host
    None      no        whole on this rank's device, nothing is gathered
    ranks     no        sharded by rows; a block is gathered before its pass and freed after it
    any       yes       the same from host memory: a block is copied to the device, and gathered there, while the one
                        before it computes; a mesh of this rank alone where the rank has all of it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from rlplace.models.building import BUILDING
from rlplace.models.causal_lm import DTYPES, Dtype, Lm, LmSpec, fill, skeleton
from rlplace.models.sharding import elements, own, own_rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSpec:
    """The model, its dtype and where its weights are kept."""

    folder: Path  # of transformers' format: config.json and safetensors
    dtype: Dtype  # as it is kept and computes
    on_host: bool = False
    key: str = "actor.model.path"  # that names the folder, for errors


class FrozenLm(Generic[Lm]):
    """Holds this rank's part of the model; with a mesh, `module(...)` is a collective of its ranks."""

    def __init__(self, kind: type[Lm], spec: FrozenSpec, mesh: DeviceMesh | None, device: torch.device) -> None:
        """Raises ConfigError where the files are not the model's."""
        assert mesh is not None or not spec.on_host, "what lies on the host comes by a mesh"
        self.spec, self.device, self._mesh = spec, device, mesh
        lm_spec = LmSpec(folder=spec.folder, weights=spec.dtype, compute=spec.dtype, checkpointing=False, key=spec.key)
        with BUILDING:
            self.module = skeleton(kind, lm_spec)
            self.module.requires_grad_(False).eval()
            if mesh is not None:
                policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if spec.on_host else OffloadPolicy()
                for sharded in self.module.groups:
                    fully_shard(sharded, mesh=mesh, offload_policy=policy, reshard_after_forward=True)
            fill(self.module, lm_spec, torch.device("cpu") if spec.on_host else device)
        for owner in self.module.modules():
            for name, buffer in dict(owner.named_buffers(recurse=False)).items():
                setattr(owner, name, buffer.to(device))

    @property
    def fsdp_modules(self) -> list[FSDPModule]:
        return [] if self._mesh is None else [cast(FSDPModule, sharded) for sharded in self.module.groups]

    def drop_gathered(self) -> None:
        """Free what a pass gathered."""
        for sharded in self.fsdp_modules:
            sharded.reshard()

    # ── the weights ──────────────────────────────────────────────────────────────────────────────────────────────────

    def weight_tensors(self) -> list[Tensor]:
        """Return this rank's parameters and buffers."""
        return [*map(own, self._parameters()), *self.module.buffers()]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows out of whole weights, all there are, by the names of the checkpoint."""
        for name, parameter in self.module.lm.named_parameters():
            start, stop = own_rows(parameter)
            own(parameter).copy_(weights[name][start:stop])

    # ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a pass holds on the device beside the weights: two blocks and what belongs to no block."""
        if self._mesh is None:
            return 0
        blocks = [elements(block.parameters()) for block in self.module.blocks]
        rest = elements(self._parameters()) - sum(blocks)
        return (rest + sum(sorted(blocks)[-2:])) * DTYPES[self.spec.dtype].itemsize

    def _parameters(self) -> Iterator[Tensor]:
        return self.module.lm.parameters()
