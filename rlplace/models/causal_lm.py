"""Language models of transformers, trained or frozen: built without memory, sharded by FSDP2, filled from files.

::

    config.json ──▶ modules without memory ──▶ LoRA? ──▶ one FSDP group per block, one for the rest ──▶ each rank reads
    (meta device)                                                                                     its own rows

A frozen model has no gradients and no optimizer. Where its weights are::

    mesh      on_host
    None      no        whole on this rank's device, nothing is gathered
    ranks     no        sharded by rows; a block is gathered before its pass and freed after it
    any       yes       the same from host memory: a block is copied to the device, and gathered there, while the one
                        before it computes; a mesh of this rank alone where the rank has all of it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from rlplace.config.schema import Dtype, TrainedConfig
from rlplace.errors import ConfigError
from rlplace.models import BUILDING
from rlplace.models.checkpoint import Checkpoint, model_mismatch
from rlplace.models.context_parallel import ContextParallel
from rlplace.models.heads import HEAD, HEADS, stored_heads, value_head_problem
from rlplace.models.lora import LoraSpec, add_factors, checkpoint_name, is_factor
from rlplace.models.lora import first_values as first_factor
from rlplace.models.packed import Packed, TokenScores, attend_packed, token_scores
from rlplace.models.sharding import (
    DTYPES,
    SHARD,
    TENSOR,
    generator_of,
    names_of,
    own,
    own_part,
)
from rlplace.models.tensor_parallel import TensorParallel, cut, local


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmSpec:
    """The model to train, and its dtypes and sharding."""

    folder: Path  # of transformers' format: config.json and safetensors
    weights: Dtype = "fp32"  # as the optimizer steps them
    compute: Dtype = "fp32"  # as the forward and backward passes have them
    checkpointing: bool = True  # keep the input of each block only, recompute the rest
    activation_offload: bool = False  # keep it on the host
    gather_again: bool = True  # free a block's gathered weights after its forward pass, gather them for its backward
    lora: LoraSpec | None = None
    seed: int = 0  # of first values: of factors, of a head that the folder lacks
    key: str = "actor.model.path"  # that names the folder, for errors

    @classmethod
    def of(
        cls,
        trained: TrainedConfig,
        component: str,
        seed: int,
        *,
        job_folder: Path,
        own_folder: Path | None,
    ) -> LmSpec:
        """Describe the model of a component: of its `own_folder`, or of that of the job."""
        lora = None
        if trained.lora_rank is not None:
            key = f"{component}.lora_targets"
            lora = LoraSpec(
                rank=trained.lora_rank,
                alpha=trained.lora_alpha,
                targets=trained.lora_targets,
                key=key,
            )
        return cls(
            folder=own_folder or job_folder,
            weights=trained.weights,
            compute=trained.compute,
            checkpointing=trained.checkpointing,
            activation_offload=trained.activation_offload,
            gather_again=trained.zero_stage == 3,
            lora=lora,
            seed=seed,
            key=f"{component if own_folder else 'actor'}.model.path",
        )


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PackedLm(nn.Module):
    """A decoder and its head over packed sequences. FSDP gathers its weights in `forward` only.

    Letters: T tokens of s sequences, N of them scored, E size of a state.
    """

    # Of transformers: from a config to the trunk with its head
    made_by: ClassVar[Any] = AutoModelForCausalLM
    # Rows of a head that the config does not tell the size of
    labels: ClassVar[int | None] = None
    # Names that the value head may have in the files
    value_heads: ClassVar[tuple[str, ...]] = ()
    # The value head starts anew where the files have none
    new_head: ClassVar[bool] = False
    # Weights that only the learner has: neither pushed nor saved
    kept: ClassVar[frozenset[str]] = frozenset()

    # Where several ranks have a copy of the weights between them
    parallel: TensorParallel | None = None
    # Where several ranks have the tokens between them
    context: ContextParallel | None = None

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    @staticmethod
    def decoder_of(lm: PreTrainedModel) -> PreTrainedModel:
        """Return what has the blocks; `lm` itself where it has none."""
        return cast(PreTrainedModel, lm.base_model)

    def states(self, packed: Packed, places: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Return [n, E] before the head, after those tokens at `places` that this rank has, and which it has.

        Without context parallelism, all of them.
        """
        context = self.context
        parallel = self.parallel
        whole = packed.padded(
            (context.size if context else 1) * (parallel.mesh.size() if parallel else 1)
        )
        tokens = whole.tokens
        positions = whole.positions
        if context is not None:
            tokens = context.part(tokens)
            positions = context.part(positions)
        states: Tensor = self.lm.base_model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            packed=dataclasses.replace(whole, context=context),
        ).last_hidden_state[0]
        if parallel is not None:
            states = parallel.gather(states)
        own, picks = (
            (places, slice(None))
            if context is None
            else context.own(places, len(states))
        )
        return states[own], picks

    def _of_all(self, found: Tensor, picks: Tensor | slice, total: int) -> Tensor:
        """Return [total] of what was found of this rank's tokens; gradients are its own tokens'."""
        if isinstance(picks, slice) or self.context is None:
            return found
        return self.context.join(found, picks, total)

    @property
    def head(self) -> nn.Linear:
        # Any other is refused when the model is built
        return cast(nn.Linear, self.lm.get_output_embeddings())

    @property
    def blocks(self) -> list[nn.Module]:
        return list(cast(nn.ModuleList, self.lm.base_model.layers))

    @property
    def groups(self) -> list[nn.Module]:
        """What FSDP gathers at once: each block, and all that belongs to none."""
        return [*self.blocks, self]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters under the names they have in `lm`; tied ones under each."""
        yield from self.lm.named_parameters(remove_duplicate=False)

    def saved_config(self) -> Mapping[str, object]:
        """Return what the config.json of a saved model has beside what its folder's has."""
        return {}

    def _values(self, hidden: Tensor) -> Tensor:
        """Return [n] float32, from products in float32, of `hidden` [n, E]."""
        values = (
            hidden.float() @ cast(nn.Linear, self.lm.score).weight.squeeze(0).float()
        )
        if self.parallel is None:
            return values
        return self.parallel.alike(values)


class CausalLm(PackedLm):
    @property
    def divisor(self) -> float:
        """What the products with the head are divided by, beside the temperature: of Granite and of Cohere."""
        config = self.lm.config
        return float(getattr(config, "logits_scaling", 1.0)) / float(
            getattr(config, "logit_scale", 1.0)
        )

    def forward(self, packed: Packed, temperature: float = 1.0) -> TokenScores:
        """Score tokens at `temperature`, each given its own sequence up to it."""
        return self._scores(*self.states(packed, packed.before), packed, temperature)

    def _scores(
        self, hidden: Tensor, picks: Tensor | slice, packed: Packed, temperature: float
    ) -> TokenScores:
        targets = packed.targets
        divided = temperature * self.divisor
        found = token_scores(
            hidden,
            local(self.head.weight),
            targets[picks],
            divided,
            parallel=self.parallel,
        )
        return TokenScores(*(self._of_all(part, picks, len(targets)) for part in found))


class ValuedScores(NamedTuple):
    logprobs: Tensor
    entropies: Tensor
    values: Tensor  # of the states in which they were chosen


class ActorCriticLm(CausalLm):
    """Scores given tokens, and gives the values of the states in which they were chosen: one trunk, one pass."""

    value_heads = HEADS
    new_head = True
    kept = frozenset({HEAD})

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        lm.score = nn.Linear(
            self.head.in_features, 1, bias=False, device="meta", dtype=lm.dtype
        )

    def forward(self, packed: Packed, temperature: float = 1.0) -> ValuedScores:  # type: ignore[override]  # more than scores
        hidden, picks = self.states(packed, packed.before)
        scores = self._scores(hidden, picks, packed, temperature)
        return ValuedScores(
            *scores, self._of_all(self._values(hidden), picks, len(packed.scored))
        )


class ValueLm(PackedLm):
    """Gives the values of states, by a head to one number. Its folder is of sequence classification with one label."""

    made_by = AutoModelForSequenceClassification
    labels = 1
    value_heads: ClassVar[tuple[str, ...]] = HEADS
    new_head = True

    def forward(self, packed: Packed) -> Tensor:
        """Return [N] float32: for each scored token the value of the state before it."""
        hidden, picks = self.states(packed, packed.before)
        return self._of_all(self._values(hidden), picks, len(packed.scored))

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.lm, "score", None))

    def saved_config(self) -> Mapping[str, object]:
        """Return what makes transformers load a head of one number."""
        names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {"architectures": [type(self.lm).__name__], **names}


class RewardLm(ValueLm):
    """Scores whole sequences, from the state after the last token."""

    new_head = False  # an untrained head gives no scores

    def forward(self, packed: Packed) -> Tensor:
        """Return [s] float32. The product is float32 too: bfloat16 scores would lie 1/128 of their size apart."""
        last, picks = self.states(packed, packed.edges[1:].long() - 1)
        return self._of_all(
            (last.float() @ self.head.weight.float().t()).squeeze(-1),
            picks,
            len(packed.lengths),
        )


def reward_lm(head: str) -> type[RewardLm]:
    class Named(RewardLm):
        value_heads = stored_heads(head)

    return Named


def first_head(hidden_size: int, seed: int) -> Tensor:
    """Return [1, E] small enough that first values are near 0, beside any return."""
    return torch.randn((1, hidden_size), generator=generator_of(seed, HEAD)) / (
        hidden_size + 1
    )


# ── trained ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Lm = TypeVar("Lm", bound=PackedLm)


def build(
    kind: type[Lm],
    spec: LmSpec,
    mesh: DeviceMesh,
    context: ContextParallel | None = None,
) -> Lm:
    """Build the model on this rank's device, sharded over `mesh` and read from `spec.folder`.

    A mesh of two dimensions is of copies, and of the ranks of each. `context`: ranks that have the tokens between them.

    No rank holds more than its shard and one gathered block. Raises ConfigError where the files are not the model's, or
    where the head of a value model in them gives several numbers.
    """
    problem = (
        value_head_problem(spec.folder, spec.key) if issubclass(kind, ValueLm) else None
    )
    if problem is not None:
        raise ConfigError([problem])
    policy = MixedPrecisionPolicy()
    if spec.compute != "fp32" or spec.weights != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[spec.compute], reduce_dtype=torch.float32
        )
    with BUILDING:
        module = skeleton(kind, spec)
        module.context = context
        shard = _cut(module, spec, mesh)
        if spec.checkpointing:
            module.lm.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if spec.activation_offload:
            for block in module.blocks:
                _keep_on_host(block, pinned=mesh.device_type == "cuda")
        module.train()
        for block in module.blocks:
            fully_shard(
                block,
                mesh=shard,
                mp_policy=policy,
                reshard_after_forward=spec.gather_again,
            )
        fully_shard(module, mesh=shard, mp_policy=policy, reshard_after_forward=False)
        _fill(module, spec, torch.device(mesh.device_type))
    return module


def _keep_on_host(block: nn.Module, *, pinned: bool) -> None:
    """Keep on the host what a block is recomputed from."""
    checkpoint = cast(Callable[..., Any], block._gradient_checkpointing_func)

    def checkpoint_from_host(*inputs: Any) -> Any:
        # Of the inputs; `checkpoint` saves nothing else
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return checkpoint(*inputs)

    block._gradient_checkpointing_func = checkpoint_from_host  # type: ignore[assignment]  # no module or parameter


def _cut(module: PackedLm, spec: LmSpec, mesh: DeviceMesh) -> DeviceMesh | None:
    """Cut the model within each copy, if that has several ranks; return the mesh of copies that share it, if any do."""
    names = names_of(mesh)
    if TENSOR not in names:
        return mesh
    try:
        module.parallel = cut(module.lm, mesh[TENSOR])
    except ValueError as error:
        why = (
            f"{type(module.lm).__name__} cannot be cut for tensor parallelism: {error}"
        )
        raise model_mismatch(spec.folder, why, spec.key) from error
    if SHARD in names:
        return mesh[SHARD]
    return None


def skeleton(kind: type[Lm], spec: LmSpec) -> Lm:
    """Build the model with parameters on the meta device and buffers in memory. Hold BUILDING meanwhile."""
    config = AutoConfig.from_pretrained(spec.folder)
    if kind.labels is not None:
        config.num_labels = kind.labels
    if type(config) not in kind.made_by._model_mapping:
        why = f"transformers' {kind.made_by.__name__} does not know {config.model_type}"
        raise model_mismatch(spec.folder, why, spec.key)
    with torch.device("meta"):
        lm: PreTrainedModel = kind.made_by.from_config(
            config, dtype=DTYPES[spec.weights]
        )
    attend_packed(kind.decoder_of(lm))
    module = kind(lm)
    plain = (
        isinstance(module.head, nn.Linear)
        and getattr(module.head, "bias", None) is None
    )
    if not plain or not hasattr(kind.decoder_of(lm), "layers"):
        why = f"{type(lm).__name__} is not a decoder of blocks with a linear head"
        raise model_mismatch(spec.folder, why, spec.key)
    for part in lm.modules():
        # Without dropout: the same tokens must have the same probabilities in every pass.
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("attention_dropout", "residual_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
        # Buffers that no checkpoint has, such as those of rotary embeddings, follow from the config.
        unmade = [
            name for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta
        ]
        for name in unmade:
            setattr(part, name, torch.empty_like(getattr(part, name), device="cpu"))
        if unmade:
            lm._init_weights(part)
    if spec.lora is not None:
        score = lm._modules.pop("score", None)  # a value head is trained as it is
        add_factors(lm, spec.lora)
        if score is not None:
            lm.score = score
        # Only trained ones need the optimizer's dtype
        for parameter in lm.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[spec.compute])
    return module


@torch.no_grad()
def _fill(module: PackedLm, spec: LmSpec, device: torch.device) -> None:
    """Give every parameter its memory: this rank's part of it, from the checkpoint or its first values."""
    checkpoint = Checkpoint(spec.folder, spec.key)
    made: dict[Tensor, nn.Parameter] = {}  # tied parameters stay one
    filled: dict[str, Tensor] = {}
    for name, parameter in module.named_tensors():
        if parameter not in made:
            part = stored_part(module, name, parameter, checkpoint, spec.seed)
            local = part.to(device=device, dtype=parameter.dtype, copy=True)
            if isinstance(parameter, DTensor):
                # Not from_local, which would move what lies on the host to the mesh's device.
                local = DTensor(local, parameter._spec, requires_grad=False)
            made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        filled[name] = made[parameter]
    # FSDP registers the new memory here
    module.lm.load_state_dict(filled, assign=True, strict=False)
    _move_buffers(module, device)


def stored_part(
    module: PackedLm, name: str, parameter: Tensor, checkpoint: Checkpoint, seed: int
) -> Tensor:
    """Return this rank's part as the files have it, or of first values."""
    part = own_part(parameter)
    shape = tuple(parameter.shape)
    if is_factor(name):
        return first_factor(name, shape, seed)[part]
    stored = [checkpoint_name(n) for n, p in module.named_tensors() if p is parameter]
    if name == HEAD and module.value_heads:
        stored = list(module.value_heads)
        if module.new_head and checkpoint.names.isdisjoint(stored):
            return first_head(shape[1], seed)[part]
    return checkpoint.part(stored, shape, part)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


# ── frozen ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FrozenLm(Generic[Lm]):
    """Holds this rank's part of the model; with a mesh, `module(...)` is a collective of its ranks."""

    def __init__(
        self,
        kind: type[Lm],
        folder: Path,
        dtype: Dtype,
        mesh: DeviceMesh | None,
        device: torch.device,
        *,
        on_host: bool = False,
        context: ContextParallel | None = None,
        key: str = "actor.model.path",
    ) -> None:
        """`mesh`: of ranks that share it, and of those that cut a copy. `dtype`: as it is kept and computes.

        `context`: ranks that have the tokens between them.

        `key` names the folder, for errors. Raises ConfigError where the files are not the model's.
        """
        assert mesh is not None or not on_host, "what lies on the host comes by a mesh"
        self.device = device
        spec = LmSpec(
            folder=folder, weights=dtype, compute=dtype, checkpointing=False, key=key
        )
        with BUILDING:
            self.module = skeleton(kind, spec)
            self.module.requires_grad_(False).eval()
            self.module.context = context
            shard = None if mesh is None else _cut(self.module, spec, mesh)
            if shard is not None:
                policy = (
                    CPUOffloadPolicy(pin_memory=device.type == "cuda")
                    if on_host
                    else OffloadPolicy()
                )
                for group in self.module.groups:
                    fully_shard(
                        group,
                        mesh=shard,
                        offload_policy=policy,
                        reshard_after_forward=True,
                    )
            _fill(self.module, spec, torch.device("cpu") if on_host else device)
        _move_buffers(self.module, device)
        self.fsdp_modules = (
            [cast(FSDPModule, group) for group in self.module.groups]
            if shard is not None
            else []
        )

    def drop_gathered(self) -> None:
        for group in self.fsdp_modules:
            group.reshard()

    def weight_tensors(self) -> list[Tensor]:
        return [*map(own, self.module.lm.parameters()), *self.module.buffers()]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's part out of whole weights, all there are, by the names of the checkpoint."""
        for name, parameter in self.module.lm.named_parameters():
            own(parameter).copy_(weights[name][own_part(parameter)])
