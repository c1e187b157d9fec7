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

from rlplace.codes import config_error
from rlplace.config.blocks.training import ActorConfig, TrainedConfig
from rlplace.config.fields import Dtype
from rlplace.errors import ConfigError
from rlplace.models import BUILDING
from rlplace.models.adapters import adapter_part
from rlplace.models.checkpoint import Checkpoint
from rlplace.models.context_parallel import ContextParallel
from rlplace.models.heads import HEAD, HEADS, stored_heads, value_head_problem
from rlplace.models.lora import LoraSpec, add_factors, checkpoint_name, is_factor
from rlplace.models.lora import first_values as first_factor
from rlplace.models.packed import Packed, TokenScores, attend_packed, token_scores
from rlplace.models.routers import Routers
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

# Words in the names of attributes by which modules of transformers draw random numbers in training
_NOISE = ("dropout", "jitter")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmSpec:
    """The model to train: its folder, dtypes, sharding and LoRA factors.

    `folder`: folder with config.json and safetensors files, as transformers writes them. `weights`: dtype of the
    parameters that the optimizer changes. `compute`: dtype of forward and backward passes. `checkpointing`: activation
    checkpointing, which saves only the input of each block. `activation_offload`: keep these saved inputs in host
    memory. `gather_again`: free a block's gathered weights after its forward pass, and gather them again for its
    backward pass. `seed`: seed of the initial values of LoRA factors, and of a head that the folder lacks. `key`: the
    config key that names the folder, for errors. `chat`: whether the model is trained on chats, which its saved folder
    then ends as the chat template does.
    """

    # Of transformers' format: config.json and safetensors
    folder: Path
    # Dtype of the parameters that the optimizer steps
    weights: Dtype = "fp32"
    # Dtype of forward and backward passes
    compute: Dtype = "fp32"
    # Activation checkpointing: save only the input of each block, recompute the rest
    checkpointing: bool = True
    # Keep these saved inputs in host memory
    activation_offload: bool = False
    # Free a block's gathered weights after its forward pass, gather them for its backward
    gather_again: bool = True
    lora: LoraSpec | None = None
    # Seed of initial values: of LoRA factors, and of a head that the folder lacks
    seed: int = 0
    # Config key that names the folder, for error messages
    key: str = "actor.model.path"
    # Whether the model is trained on chats
    chat: bool = False

    @classmethod
    def of(
        cls,
        trained: TrainedConfig,
        component: str,
        seed: int,
        *,
        job_folder: Path,
        own_folder: Path | None,
        chat: bool = False,
    ) -> LmSpec:
        """Return the spec of the model that `component` trains.

        `trained`: the config block of the component. `own_folder`: folder of the component's own model; None: the model
        is in `job_folder`. `seed`: seed of initial values. `chat`: whether it is trained on chats.
        """
        lora = None
        if trained.lora_rank is not None:
            key = f"{component}.lora_targets"
            start = None
            if isinstance(trained, ActorConfig) and trained.lora_adapter is not None:
                start = Path(trained.lora_adapter)
            lora = LoraSpec(
                rank=trained.lora_rank,
                alpha=trained.lora_alpha,
                targets=trained.lora_targets,
                key=key,
                start=start,
            )
        # An error names the key that the folder came from
        named_by = component if own_folder else "actor"
        return cls(
            folder=own_folder or job_folder,
            weights=trained.weights,
            compute=trained.compute,
            checkpointing=trained.checkpointing,
            activation_offload=trained.activation_offload,
            gather_again=trained.zero_stage == 3,
            lora=lora,
            seed=seed,
            key=f"{named_by}.model.path",
            chat=chat and component == "actor",
        )


# ── kinds ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PackedLm(nn.Module):
    """A decoder with its head, run over packed sequences. FSDP gathers the weights in `forward` only.

    `made_by`: class of transformers that builds the decoder with its head. `labels`: number of rows of the head; None:
    the config gives it. `value_heads`: names that the value head may have in weight files. `new_head`: whether a value
    head that the files lack is initialised. `kept`: weights that are neither synced to engines nor saved. `parallel`:
    the ranks among which tensor parallelism splits the weights; None: no split. `context`: the ranks among which
    context parallelism splits the tokens; None: no split. `routers`: the routers of a mixture of experts.

    Letters: T tokens in s sequences, N of them scored, n of those on this rank; E size of a hidden state.
    """

    # Class of transformers that builds the decoder with its head from a config
    made_by: ClassVar[Any] = AutoModelForCausalLM
    # Number of rows of the head, where the config does not give it
    labels: ClassVar[int | None] = None
    # Names that the value head may have in weight files
    value_heads: ClassVar[tuple[str, ...]] = ()
    # Whether a value head that the files lack is initialised instead
    new_head: ClassVar[bool] = False
    # Weights that only the learner has: neither synced to engines nor saved
    kept: ClassVar[frozenset[str]] = frozenset()

    # Set where tensor parallelism splits the weights over several ranks
    parallel: TensorParallel | None = None
    # Set where context parallelism splits the tokens over several ranks
    context: ContextParallel | None = None

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.routers = Routers(self.decoder_of(lm))

    @staticmethod
    def decoder_of(lm: PreTrainedModel) -> PreTrainedModel:
        """Return the part of `lm` that has the decoder blocks, or `lm` itself if it has no such part."""
        return cast(PreTrainedModel, lm.base_model)

    def states(self, packed: Packed, places: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Return hidden states [n, E] before the head, and for each state the index of its token in `places`, [n].

        `packed`: the sequences to read. `places` [N]: indices of tokens; the result has the state after each of these
        tokens, as far as the tokens are on this rank (n of N; E is the size of a state). Without context parallelism a
        rank has all tokens: then n = N, and the indices are a full slice.
        """
        context = self.context
        parallel = self.parallel
        # T must divide by the ranks that split the tokens: pad it
        ranks = 1
        if context is not None:
            ranks *= context.size
        if parallel is not None:
            ranks *= parallel.mesh.size()
        whole = packed.padded(ranks)
        # With context parallelism this rank computes its part of the tokens
        tokens = whole.tokens
        positions = whole.positions
        routes = whole.routes
        real = len(packed.tokens)
        if context is not None:
            tokens = context.part(tokens)
            positions = context.part(positions)
            if routes is not None:
                routes = context.part(routes)
            real = context.own_count(real, len(tokens))
        # Attention reads the edges of the sequences from `packed`, routers their routes
        given = dataclasses.replace(whole, context=context, routes=routes)
        self.routers.check(routes)
        with self.routers.counted(real):
            states: Tensor = self.lm.base_model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                packed=given,
            ).last_hidden_state[0]
        # Sequence parallelism: each rank returned T / ranks states
        if parallel is not None:
            states = parallel.gather(states)
        # Select the requested tokens among those of this rank
        if context is None:
            return states[places], slice(None)
        own, picks = context.own(places, len(states))
        return states[own], picks

    def _of_all(
        self,
        found: Tensor,
        picks: Tensor | slice,
        total: int,
    ) -> Tensor:
        """Return values [total], joined from the values of all ranks.

        `found` [n]: the values of this rank. `picks` [n]: their indices in the result, or a full slice if this rank has
        all values. In the backward pass, each rank gets the gradient of its own values.
        """
        if isinstance(picks, slice) or self.context is None:
            return found
        return self.context.join(found, picks, total)

    @property
    def head(self) -> nn.Linear:
        """The linear layer from hidden states to logits."""
        # `skeleton` has refused every other kind of head
        return cast(nn.Linear, self.lm.get_output_embeddings())

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in order."""
        return list(cast(nn.ModuleList, self.lm.base_model.layers))

    @property
    def groups(self) -> list[nn.Module]:
        """The modules whose weights FSDP gathers together: each block, and this module for all other weights."""
        return [*self.blocks, self]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in `lm`, parameter); a tied parameter is yielded once for each of its names."""
        yield from self.lm.named_parameters(remove_duplicate=False)

    def saved_config(self) -> Mapping[str, object]:
        """Return key -> value: the entries of config.json that change when this model is saved. Empty: no changes."""
        return {}

    def _values(self, hidden: Tensor) -> Tensor:
        """Return the values [n] of n hidden states, computed in float32. `hidden`: [n, size of a state]."""
        head = cast(nn.Linear, self.lm.score)
        values = hidden.float() @ head.weight.squeeze(0).float()
        if self.parallel is None:
            return values
        return self.parallel.alike(values)


class CausalLm(PackedLm):
    """A causal language model, which computes log-probabilities and entropies of given tokens."""

    @property
    def divisor(self) -> float:
        """The constant that divides the logits, in addition to the temperature; 1 except in Granite and Cohere."""
        config = self.lm.config
        granite = float(getattr(config, "logits_scaling", 1.0))
        cohere = float(getattr(config, "logit_scale", 1.0))
        return granite / cohere

    def forward(self, packed: Packed, temperature: float = 1.0) -> TokenScores:
        """Return the scores of the N scored tokens at `temperature`, [N] each.

        `packed`: the sequences, with the tokens to score. `temperature`: divides the logits. Each token is conditioned
        on the tokens before it in its own sequence.
        """
        hidden, picks = self.states(packed, packed.before)
        return self._scores(hidden, picks, packed, temperature)

    def _scores(
        self,
        hidden: Tensor,
        picks: Tensor | slice,
        packed: Packed,
        temperature: float,
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
        joined = [self._of_all(part, picks, len(targets)) for part in found]
        return TokenScores(*joined)


class ValuedScores(NamedTuple):
    """Scores of N given tokens, and values of the states before these tokens; [N] float32 each."""

    logprobs: Tensor
    entropies: Tensor
    values: Tensor


class ActorCriticLm(CausalLm):
    """Actor and critic in one model: one pass returns scores of given tokens, and values of the states before them.

    Both have all layers in common except the heads.
    """

    value_heads = HEADS
    new_head = True
    kept = frozenset({HEAD})

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        lm.score = nn.Linear(
            self.head.in_features,
            1,
            bias=False,
            device="meta",
            dtype=lm.dtype,
        )

    def forward(self, packed: Packed, temperature: float = 1.0) -> ValuedScores:  # type: ignore[override]  # more than scores
        hidden, picks = self.states(packed, packed.before)
        scores = self._scores(hidden, picks, packed, temperature)
        values = self._of_all(self._values(hidden), picks, len(packed.scored))
        return ValuedScores(scores.logprobs, scores.entropies, values)


class ValueLm(PackedLm):
    """A critic: values of states, computed by a linear head with one output.

    Its folder holds a model for sequence classification with a single label.
    """

    made_by = AutoModelForSequenceClassification
    labels = 1
    value_heads: ClassVar[tuple[str, ...]] = HEADS
    new_head = True

    def forward(self, packed: Packed) -> Tensor:
        """Return values [N] float32: for each of the N scored tokens in `packed`, the value of the state before it."""
        hidden, picks = self.states(packed, packed.before)
        values = self._values(hidden)
        return self._of_all(values, picks, len(packed.scored))

    @property
    def head(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.lm, "score", None))

    def saved_config(self) -> Mapping[str, object]:
        """Return the entries of config.json that make transformers load a head with one output."""
        names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return {"architectures": [type(self.lm).__name__], **names}


class RewardLm(ValueLm):
    """A reward model: one score for each whole sequence, from the state after its last token."""

    new_head = False  # an untrained head gives no scores

    def forward(self, packed: Packed) -> Tensor:
        """Return a score for each of s sequences, [s] float32. `packed`: the sequences.

        The product with the head is computed in float32, too: in bfloat16 two different scores would differ by at least
        1/128 of their size.
        """
        ends = packed.edges[1:].long() - 1
        last, picks = self.states(packed, ends)
        weight = self.head.weight.float()
        scores = (last.float() @ weight.t()).squeeze(-1)
        return self._of_all(scores, picks, len(packed.lengths))


def reward_lm(head: str) -> type[RewardLm]:
    """Return the class of reward models whose head is stored under the name `head`."""

    class Named(RewardLm):
        value_heads = stored_heads(head)

    return Named


def first_head(hidden_size: int, seed: int) -> Tensor:
    """Return the initial weights [1, hidden_size] of a value head.

    The weights are small, so that the first values are near 0 compared with returns.
    """
    generator = generator_of(seed, HEAD)
    values = torch.randn((1, hidden_size), generator=generator)
    return values / (hidden_size + 1)


# ── trained ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Lm = TypeVar("Lm", bound=PackedLm)


def build(
    kind: type[Lm],
    spec: LmSpec,
    mesh: DeviceMesh,
    context: ContextParallel | None = None,
) -> Lm:
    """Return a model on this rank's device, sharded over `mesh`, with the weights of `spec.folder`.

    `kind`: the class to make. `spec`: folder, dtypes and sharding of the model. `mesh`: one or two dimensions; with
    two, the first has the data-parallel replicas and the second the tensor-parallel ranks. `context`: the ranks that
    split the tokens; None: the tokens are not split.

    A rank never holds more than its shard and one gathered block. Raises ConfigError if the files do not fit the model,
    or if the stored head of a value model has several outputs.
    """
    # A stored value head must have one output
    if issubclass(kind, ValueLm):
        misfit = value_head_problem(spec.folder, spec.key)
        if misfit is not None:
            raise ConfigError([misfit])
    # Below float32, weights are cast for passes and gradients are reduced in float32
    policy = MixedPrecisionPolicy()
    if spec.compute != "fp32" or spec.weights != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[spec.compute],
            reduce_dtype=torch.float32,
        )
    with BUILDING:
        # Modules without memory, cut by tensor parallelism where the mesh has that
        # dimension
        module = skeleton(kind, spec)
        module.context = context
        shard = _cut(module, spec, mesh)
        # What a backward pass recomputes, and where its inputs wait
        if spec.checkpointing:
            module.lm.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        if spec.activation_offload:
            for block in module.blocks:
                _keep_on_host(block, pinned=mesh.device_type == "cuda")
        # One FSDP unit for each block, and one for all other weights
        module.train()
        for block in module.blocks:
            fully_shard(
                block,
                mesh=shard,
                mp_policy=policy,
                reshard_after_forward=spec.gather_again,
            )
        fully_shard(module, mesh=shard, mp_policy=policy, reshard_after_forward=False)
        # Only now do parameters get memory: this rank's shards
        _fill(module, spec, torch.device(mesh.device_type))
    return module


def _keep_on_host(block: nn.Module, *, pinned: bool) -> None:
    """Make activation checkpointing keep the inputs of `block` in host memory. `pinned`: use pinned memory."""
    checkpoint = cast(Callable[..., Any], block._gradient_checkpointing_func)

    def checkpoint_from_host(*inputs: Any) -> Any:
        # Covers only the block's inputs: `checkpoint` saves nothing else
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
            return checkpoint(*inputs)

    block._gradient_checkpointing_func = checkpoint_from_host  # type: ignore[assignment]  # no module or parameter


def _cut(module: PackedLm, spec: LmSpec, mesh: DeviceMesh) -> DeviceMesh | None:
    """Split the model by tensor parallelism if `mesh` has a dimension for it; return the mesh over which FSDP shards.

    `spec`: names the config key and the folder in errors. Returns None if no ranks are left for FSDP. Raises
    ConfigError if tensor parallelism cannot split the model's family.
    """
    names = names_of(mesh)
    if TENSOR not in names:
        return mesh
    try:
        module.parallel = cut(module.lm, mesh[TENSOR])
    except ValueError as error:
        raise config_error(
            "model-weights",
            spec.key,
            str(spec.folder),
            error="not-cut",
            family=type(module.lm).__name__,
            reason=error,
        ) from error
    if SHARD in names:
        return mesh[SHARD]
    return None


def skeleton(kind: type[Lm], spec: LmSpec) -> Lm:
    """Return the model with parameters on the meta device and buffers in memory.

    The caller must hold the lock `BUILDING`. `kind`: the class to make. Raises ConfigError if transformers does not
    know the model, or if the model is not a decoder of blocks with a linear head.
    """
    # The config decides the class; a value model has one label
    config = AutoConfig.from_pretrained(spec.folder)
    if kind.labels is not None:
        config.num_labels = kind.labels
    if type(config) not in kind.made_by._model_mapping:
        raise config_error(
            "model-weights",
            spec.key,
            str(spec.folder),
            error="unknown",
            maker=kind.made_by.__name__,
            family=config.model_type,
        )
    # Only shapes and dtypes: nothing is allocated
    with torch.device("meta"):
        lm: PreTrainedModel = kind.made_by.from_config(
            config,
            dtype=DTYPES[spec.weights],
        )
    # Packed attention needs a decoder of blocks, scores need a linear head without bias
    attend_packed(kind.decoder_of(lm))
    module = kind(lm)
    plain = (
        isinstance(module.head, nn.Linear)
        and getattr(module.head, "bias", None) is None
    )
    if not plain or not hasattr(kind.decoder_of(lm), "layers"):
        raise config_error(
            "model-weights",
            spec.key,
            str(spec.folder),
            error="no-decoder",
            family=type(lm).__name__,
        )
    for part in lm.modules():
        _remove_noise(part)
        # Buffers that no checkpoint has, such as those of rotary embeddings, follow from the config.
        unmade = [
            name for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta
        ]
        for name in unmade:
            setattr(part, name, torch.empty_like(getattr(part, name), device="cpu"))
        if unmade:
            lm._init_weights(part)
    # LoRA: freeze all weights but the factors. A value head is trained whole, so it is
    # set aside while the factors are put in.
    if spec.lora is not None:
        score = lm._modules.pop("score", None)
        add_factors(lm, spec.lora)
        if score is not None:
            lm.score = score
        # Frozen weights need no optimizer dtype: keep them in the compute dtype
        for parameter in lm.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[spec.compute])
    return module


def _remove_noise(part: nn.Module) -> None:
    """Switch off the random numbers that a module of transformers would draw in training.

    The same tokens must have the same probabilities in every pass, also those that the engine drew. Families keep the
    shares under names of their own, such as `embedding_dropout` of Starcoder2 and `jitter_noise` of Mixtral's router.
    """
    if isinstance(part, nn.Dropout):
        part.p = 0.0
    for name, value in vars(part).items():
        if isinstance(value, float) and any(word in name for word in _NOISE):
            setattr(part, name, 0.0)


@torch.no_grad()
def _fill(module: PackedLm, spec: LmSpec, device: torch.device) -> None:
    """Allocate this rank's part of every parameter and fill it from the files in `spec.folder`, or with initial values.

    `device`: where the parts are allocated.
    """
    checkpoint = Checkpoint(spec.folder, spec.key)
    # Tied parameters stay one: by the parameter on the meta device
    made: dict[Tensor, nn.Parameter] = {}
    filled: dict[str, Tensor] = {}
    for name, parameter in module.named_tensors():
        if parameter not in made:
            part = stored_part(module, name, parameter, checkpoint, spec)
            local = part.to(device=device, dtype=parameter.dtype, copy=True)
            if isinstance(parameter, DTensor):
                # Not from_local, which would move host tensors to the mesh's device
                local = DTensor(local, parameter._spec, requires_grad=False)
            made[parameter] = nn.Parameter(local, requires_grad=parameter.requires_grad)
        filled[name] = made[parameter]
    # FSDP notices here that the memory is new
    module.lm.load_state_dict(filled, assign=True, strict=False)
    _move_buffers(module, device)


def stored_part(
    module: PackedLm,
    name: str,
    parameter: Tensor,
    checkpoint: Checkpoint,
    spec: LmSpec,
) -> Tensor:
    """Return this rank's part of a parameter: from the files, or its initial values if the files lack it.

    `name`: name of the parameter in `module.lm`. `checkpoint`: the files. `spec`: the model, with the seed of initial
    values, and the adapter with those of LoRA factors. Raises ConfigError if the files do not fit the model.
    """
    part = own_part(parameter)
    shape = tuple(parameter.shape)
    # LoRA factors are never in the files of the base model
    if is_factor(name):
        if spec.lora is not None and spec.lora.start is not None:
            return adapter_part(spec.lora.start, name, part)
        return first_factor(name, shape, spec.seed)[part]
    # A tied parameter may be stored under any of its names
    stored = [checkpoint_name(n) for n, p in module.named_tensors() if p is parameter]
    # A value head has other names in files, and may be missing there
    if name == HEAD and module.value_heads:
        stored = list(module.value_heads)
        if module.new_head and checkpoint.names.isdisjoint(stored):
            return first_head(shape[1], spec.seed)[part]
    return checkpoint.part(stored, shape, part)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for buffer in module.buffers():
        buffer.data = buffer.to(device)


# ── frozen ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FrozenLm(Generic[Lm]):
    """A language model without gradients, or the part of it that this rank has.

    `module`: the model. If the model is shared with a mesh of ranks, all of them must call `module(...)` together.
    """

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
        """Build the model and read its weights.

        `kind`: the class to make. `folder`: folder with the model's config and weights. `device`: this rank's device.
        `mesh`: the ranks that share the model, tensor-parallel ranks included; None: this rank has all of it. `dtype`:
        dtype of weights and passes. `context`: the ranks that split the tokens; None: the tokens are not split.
        `on_host`: keep the weights in host memory. `key`: the config key of the folder, for errors. Raises ConfigError
        if the files do not fit the model.
        """
        assert mesh is not None or not on_host, "what lies on the host comes by a mesh"
        self.device = device
        spec = LmSpec(
            folder=folder,
            weights=dtype,
            compute=dtype,
            checkpointing=False,
            key=key,
        )
        # Modules without memory and without gradients
        with BUILDING:
            self.module = skeleton(kind, spec)
            self.module.requires_grad_(False).eval()
            self.module.context = context
            shard = None if mesh is None else _cut(self.module, spec, mesh)
            # With replicas, FSDP shards each block; blocks are gathered for a pass and
            # freed after it
            if shard is not None:
                policy = OffloadPolicy()
                if on_host:
                    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
                for group in self.module.groups:
                    fully_shard(
                        group,
                        mesh=shard,
                        offload_policy=policy,
                        reshard_after_forward=True,
                    )
            # Weights are read to where they stay; buffers are always on the device
            weights_device = torch.device("cpu") if on_host else device
            _fill(self.module, spec, weights_device)
        _move_buffers(self.module, device)
        self.fsdp_modules: list[FSDPModule] = []
        if shard is not None:
            groups = self.module.groups
            self.fsdp_modules = [cast(FSDPModule, group) for group in groups]

    def drop_gathered(self) -> None:
        """Free the memory of all weights that were gathered from other ranks."""
        for group in self.fsdp_modules:
            group.reshard()

    def weight_tensors(self) -> list[Tensor]:
        """Return this rank's parts of all weights, and all buffers."""
        return [*map(own, self.module.lm.parameters()), *self.module.buffers()]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of every weight from `weights`: name in a checkpoint -> whole weight."""
        for name, parameter in self.module.lm.named_parameters():
            part = own_part(parameter)
            own(parameter).copy_(weights[name][part])
