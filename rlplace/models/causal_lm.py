"""Language models of transformers for training: built without memory, sharded by FSDP2, filled from files.

::

    config.json ──▶ modules without memory ──▶ LoRA? ──▶ one FSDP group per block, one for the rest ──▶ each rank reads
    (meta device)                                                                                     its own rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlplace.models.building import BUILDING
from rlplace.models.checkpoint import Checkpoint, model_mismatch
from rlplace.models.lora import LoraSpec, add_factors, checkpoint_name, is_factor
from rlplace.models.lora import first_values as first_factor
from rlplace.models.packed_attention import Packed, attend_packed
from rlplace.models.sharding import own_rows
from rlplace.models.token_scores import TokenScores, token_scores

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmSpec:
    """The model to train, and its dtypes and sharding."""

    folder: Path  # of transformers' format: config.json and safetensors
    weights: Dtype = "fp32"  # as the optimizer steps them
    compute: Dtype = "fp32"  # as the forward and backward passes have them
    checkpointing: bool = True  # keep the input of each block only, recompute the rest
    gather_again: bool = True  # free a block's gathered weights after its forward pass, gather them for its backward
    lora: LoraSpec | None = None
    seed: int = 0  # of first values: of factors, of a head that the folder lacks
    key: str = "actor.model.path"  # that names the folder, for errors


class PackedLm(nn.Module):
    """A decoder and its head over packed sequences. FSDP gathers its weights in `forward` only.

    Letters: T tokens of the sequences, N of them scored, E size of a state.
    """

    made_by: ClassVar[Any] = AutoModelForCausalLM  # of transformers: from a config to the trunk with its head
    labels: ClassVar[int | None] = None  # rows of a head that the config does not tell the size of
    kept: ClassVar[frozenset[str]] = frozenset()  # weights that only the learner has: neither pushed nor saved

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def hidden(self, packed: Packed) -> Tensor:
        """Return [N, E] before the head, of the states in which the scored tokens were chosen."""
        return self.states(packed)[packed.scored - 1]

    def states(self, packed: Packed) -> Tensor:
        """Return [T, E] before the head, after each token."""
        states: Tensor = self.lm.base_model(
            input_ids=packed.tokens.unsqueeze(0),
            position_ids=packed.positions.unsqueeze(0),
            use_cache=False,
            packed=packed,
        ).last_hidden_state[0]
        return states

    @property
    def head(self) -> nn.Module | None:
        """Return the last layer."""
        return cast("nn.Module | None", self.lm.get_output_embeddings())

    @property
    def blocks(self) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.lm.base_model.layers))

    @property
    def groups(self) -> list[nn.Module]:
        """Return what FSDP gathers at once: each block, and all that belongs to none."""
        return [*self.blocks, self]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters under the names they have in `lm`; tied ones under each."""
        yield from self.lm.named_parameters(remove_duplicate=False)

    def add_factors(self, spec: LoraSpec) -> None:
        """Put LoRA factors without memory beside the weights; a subclass may train more than them."""
        add_factors(self.lm, spec)

    def stored_as(self, name: str) -> tuple[str, ...]:
        """Return the names that a parameter may have in the files of a model."""
        return (name,)

    def saved_config(self) -> Mapping[str, object]:
        """Return what the config.json of a saved model has beside what its folder's has."""
        return {}

    def first_values(self, name: str, shape: tuple[int, ...], seed: int) -> Tensor | None:
        """Return the first values of a parameter that the files lack; None: they must have it."""
        return None


class CausalLm(PackedLm):
    """Scores given tokens."""

    def forward(self, packed: Packed, temperature: float = 1.0) -> TokenScores:
        """Score tokens at `temperature`, each given its own sequence up to it."""
        head = cast(nn.Linear, self.head)
        return token_scores(self.hidden(packed), head.weight, packed.targets, temperature)


Lm = TypeVar("Lm", bound=PackedLm)


def build(spec: LmSpec, mesh: DeviceMesh) -> CausalLm:
    """Build a model that scores tokens; see `build_sharded`."""
    return build_sharded(CausalLm, spec, mesh)


def build_sharded(kind: type[Lm], spec: LmSpec, mesh: DeviceMesh) -> Lm:
    """Build the model on this rank's device, sharded by rows over `mesh` and read from `spec.folder`.

    No rank holds more than its shard and one gathered block. Raises ConfigError where the files are not the model's.
    """
    policy = MixedPrecisionPolicy()
    if spec.compute != "fp32" or spec.weights != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[spec.compute], reduce_dtype=torch.float32)
    with BUILDING:
        module = skeleton(kind, spec)
        if spec.checkpointing:
            module.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
        for block in module.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=spec.gather_again)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fill(module, spec, torch.device(mesh.device_type))
    return module


def skeleton(kind: type[Lm], spec: LmSpec) -> Lm:
    """Build the model with parameters on the meta device and buffers in memory. Hold BUILDING meanwhile."""
    config = AutoConfig.from_pretrained(spec.folder)
    if kind.labels is not None:
        config.num_labels = kind.labels
    if type(config) not in kind.made_by._model_mapping:
        why = f"transformers' {kind.made_by.__name__} does not know {config.model_type}"
        raise model_mismatch(spec.folder, why, spec.key)
    with torch.device("meta"):
        lm: PreTrainedModel = kind.made_by.from_config(config, dtype=DTYPES[spec.weights])
    attend_packed(lm)
    module = kind(lm)
    plain = isinstance(module.head, nn.Linear) and getattr(module.head, "bias", None) is None
    if not plain or not hasattr(lm.base_model, "layers"):
        why = f"{type(lm).__name__} is not a decoder of blocks with a linear head"
        raise model_mismatch(spec.folder, why, spec.key)
    for part in lm.modules():
        _no_dropout(part)
        if any(buffer.is_meta for buffer in part.buffers(recurse=False)):
            _make_buffers(part, lm)
    if spec.lora is not None:
        module.add_factors(spec.lora)
        _as_computed(lm, DTYPES[spec.compute])
    return module


def _as_computed(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast frozen parameters to the compute dtype: only trained ones need float32."""
    for parameter in lm.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _no_dropout(module: nn.Module) -> None:
    """Switch dropout off: the same tokens must have the same probabilities in every pass."""
    if isinstance(module, nn.Dropout):
        module.p = 0.0
    if hasattr(module, "attention_dropout"):
        cast(Any, module).attention_dropout = 0.0


def _make_buffers(module: nn.Module, lm: PreTrainedModel) -> None:
    """Compute buffers that no checkpoint has, such as those of rotary embeddings, from the config."""
    fresh = dict(type(module)(lm.config).named_buffers(recurse=False))
    for name in dict(module.named_buffers(recurse=False)):
        setattr(module, name, fresh[name])


@torch.no_grad()
def fill(module: PackedLm, spec: LmSpec, device: torch.device) -> None:
    """Give every parameter its memory: this rank's rows of it, from the checkpoint or its first values."""
    checkpoint = Checkpoint(spec.folder, spec.key)
    made: dict[Tensor, nn.Parameter] = {}  # tied parameters stay one
    filled: dict[str, Tensor] = {}
    for name, parameter in module.named_tensors():
        if parameter not in made:
            rows = _rows(module, name, parameter, checkpoint, spec.seed)
            local = rows.to(device=device, dtype=parameter.dtype, copy=True)
            made[parameter] = nn.Parameter(_as_sharded(parameter, local), requires_grad=parameter.requires_grad)
        filled[name] = made[parameter]
    module.lm.load_state_dict(filled, assign=True, strict=False)  # at which FSDP takes notice of the new memory
    for buffer_owner in module.lm.modules():
        for name, buffer in dict(buffer_owner.named_buffers(recurse=False)).items():
            setattr(buffer_owner, name, buffer.to(device))


def _rows(module: PackedLm, name: str, parameter: Tensor, checkpoint: Checkpoint, seed: int) -> Tensor:
    start, stop = own_rows(parameter)
    shape = tuple(parameter.shape)
    if is_factor(name):
        return first_factor(name, shape, seed)[start:stop]
    tied = [checkpoint_name(n) for n, p in module.named_tensors() if p is parameter]
    stored = [alias for n in tied for alias in module.stored_as(n)]
    if checkpoint.names.isdisjoint(stored):
        first = module.first_values(name, shape, seed)
        if first is not None:
            return first[start:stop]
    return checkpoint.rows(stored, shape, start, stop)


def _as_sharded(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    # Not from_local, which would move what lies on the host to the mesh's device.
    return DTensor(local, parameter._spec, requires_grad=False)
