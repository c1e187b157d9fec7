"""A causal language model of transformers as the learner uses it: built without memory, sharded, filled from files.

::

    config.json ──▶ modules without memory ──▶ LoRA? ──▶ one FSDP group per block, one for the rest ──▶ each rank reads
    (meta device)                                                                                     its own rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlplace.models.checkpoint import Checkpoint, model_mismatch
from rlplace.models.lora import LoraSpec, add_factors, checkpoint_name, first_values, is_factor
from rlplace.models.packed_attention import Packed, attend_packed
from rlplace.models.token_scores import TokenScores, token_scores

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmSpec:
    """Which model is trained, and how it lies in memory."""

    folder: Path  # of transformers' format: config.json and safetensors
    weights: Dtype = "fp32"  # as the optimizer steps them
    compute: Dtype = "fp32"  # as the forward and backward passes have them
    checkpointing: bool = True  # keep the input of each block only, recompute the rest
    gather_again: bool = True  # free a block's gathered weights after its forward pass, gather them for its backward
    lora: LoraSpec | None = None
    seed: int = 0  # of the factors' first values


class CausalLm(nn.Module):
    """Scores given tokens. Sharded as a whole: everything that needs its weights happens in `forward`."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, packed: Packed, temperature: float = 1.0) -> TokenScores:
        """Of the scored tokens, each given its own sequence up to it, at `temperature`."""
        hidden = self.lm.base_model(
            input_ids=packed.tokens.unsqueeze(0),
            position_ids=packed.positions.unsqueeze(0),
            use_cache=False,
            packed=packed,
        ).last_hidden_state[0]
        head = cast(nn.Linear, self.lm.get_output_embeddings())
        return token_scores(hidden[packed.scored - 1], head.weight, packed.targets, temperature)

    @property
    def blocks(self) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.lm.base_model.layers))

    @property
    def groups(self) -> list[nn.Module]:
        """What FSDP gathers at once: each block, and all that belongs to none."""
        return [*self.blocks, self]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters under the names they have in `lm`; tied ones under each."""
        yield from self.lm.named_parameters(remove_duplicate=False)


def build(spec: LmSpec, mesh: DeviceMesh) -> CausalLm:
    """The model on this rank's device, its parameters sharded by rows over `mesh` and read from `spec.folder`.

    No rank holds more than its shard and one gathered block. Raises ConfigError where the files are not the model's.
    """
    module = CausalLm(skeleton(spec))
    if spec.checkpointing:
        module.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    policy = MixedPrecisionPolicy()
    if spec.compute != "fp32" or spec.weights != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[spec.compute], reduce_dtype=torch.float32)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=spec.gather_again)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fill(module, spec, torch.device(mesh.device_type))
    return module


def skeleton(spec: LmSpec) -> PreTrainedModel:
    """The model with parameters on the meta device and buffers in memory."""
    config = AutoConfig.from_pretrained(spec.folder)
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[spec.weights])
    attend_packed(lm)
    head = lm.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and getattr(head, "bias", None) is None
    if not plain or not hasattr(lm.base_model, "layers"):
        raise model_mismatch(spec.folder, f"{type(lm).__name__} is not a decoder of blocks with a linear head")
    for module in lm.modules():
        _no_dropout(module)
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            _make_buffers(module, lm)
    if spec.lora is not None:
        add_factors(lm, spec.lora)
    return lm


def _no_dropout(module: nn.Module) -> None:
    """The policy that learns is the one that sampled: the same tokens have the same probabilities in every pass."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if hasattr(module, "attention_dropout"):
        cast(Any, module).attention_dropout = 0.0


def _make_buffers(module: nn.Module, lm: PreTrainedModel) -> None:
    """Buffers that no checkpoint has follow from the config alone, as those of rotary embeddings do."""
    fresh = dict(type(module)(lm.config).named_buffers(recurse=False))
    for name in dict(module.named_buffers(recurse=False)):
        setattr(module, name, fresh[name])


@torch.no_grad()
def fill(module: CausalLm, spec: LmSpec, device: torch.device) -> None:
    """Gives every parameter its memory: this rank's rows of it, from the checkpoint or the first values of factors."""
    checkpoint = Checkpoint(spec.folder)
    made: dict[Tensor, nn.Parameter] = {}  # tied parameters stay one
    filled: dict[str, Tensor] = {}
    for name, parameter in module.named_tensors():
        if parameter not in made:
            start, stop = own_rows(parameter)
            if is_factor(name):
                rows = first_values(name, tuple(parameter.shape), spec.seed)[start:stop]
            else:
                names = [checkpoint_name(n) for n, p in module.named_tensors() if p is parameter]
                rows = checkpoint.rows(names, tuple(parameter.shape), start, stop)
            local = rows.to(device=device, dtype=parameter.dtype, copy=True)
            made[parameter] = nn.Parameter(_as_sharded(parameter, local), requires_grad=parameter.requires_grad)
        filled[name] = made[parameter]
    module.lm.load_state_dict(filled, assign=True, strict=False)  # at which FSDP takes notice of the new memory
    for buffer_owner in module.lm.modules():
        for name, buffer in dict(buffer_owner.named_buffers(recurse=False)).items():
            setattr(buffer_owner, name, buffer.to(device))


def own_rows(parameter: Tensor) -> tuple[int, int]:
    """What this rank has of a sharded parameter: FSDP gives each rank equally many rows, the last ones fewer."""
    if not isinstance(parameter, DTensor):
        return 0, len(parameter)
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    each = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * each, rows)
    stop = min(start + each, rows)
    assert stop - start == parameter.to_local().shape[0], f"FSDP sharded {rows} rows otherwise"
    return start, stop


def _as_sharded(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
