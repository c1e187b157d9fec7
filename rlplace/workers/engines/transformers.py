"""A TextEngine over a Hugging Face model with a continuous batch of its own: the reference of the contract.

::

    submit ──▶ waiting ── a row is free: one pass over its tokens ──▶ active ── stop, length ──▶ Completion
                  ▲                                                     │ one pass for all of them per step
                  └──────────────── load: new weights, new keys ────────┘

The answers of a request share the pass over its prompt. For machines without vLLM: simple and exact, not fast.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PretrainedConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.initialization import no_init_weights

from rlplace.codes import config_error
from rlplace.comm.weights.device_sync import LoadedParts, WindowTaker
from rlplace.comm.weights.shards import copy_tensor
from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.models import BUILDING
from rlplace.models.lora import (
    LoraSpec,
    add_empty_factors,
    checkpoint_name,
    is_factor,
    stored_factors,
)
from rlplace.models.routers import Routers, route_dtype
from rlplace.models.tokenizer import StopTexts, Tokenizer
from rlplace.models.vision import VisionSpec
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Files, Finish, Request, Routes, Tokens
from rlplace.workers.engines.contract import (
    NO_FACTORS,
    TORCH_NAMES,
    AdapterSettings,
    EngineSettings,
    FactorsOf,
    Weights,
    answer_seed,
    check_length,
    engine_busy,
    require,
)
from rlplace.workers.engines.torch import ModuleEngine
from rlplace.workers.engines.weights import NAME as PROBE
from rlplace.workers.engines.weights import check_fit

if TYPE_CHECKING:
    from rlplace.comm.weights.device_push import DevicePush
    from rlplace.workers.launch.devices import Device

# Stop texts of so many requests are kept, with what finds them
_KEPT_FINDERS = 256


def _kind_of(sampling: TextRolloutConfig) -> tuple[float, float, int]:
    """Return the sampling parameters by which rows are drawn together."""
    return sampling.temperature, sampling.top_p, sampling.top_k


@dataclasses.dataclass(slots=True)
class _Answer:
    """An answer in flight.

    `sample`: index of the answer in its group. `numbers`: generator of the answer's own random numbers. `tokens`,
    `logprobs`, `versions`: one entry for each token so far. `spared`: how many more tokens than positions the answer's
    images have. `routes`: the experts of all tokens that were read so far, by pass; empty if they are not recorded.
    """

    request: Request
    sample: int
    numbers: random.Random
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    spared: int = 0  # tokens minus positions of its images, where an image has fewer positions than tokens
    # [tokens of a pass, routers, k] each
    routes: list[Routes] = dataclasses.field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer so far."""
        return len(self.request.tokens) + len(self.tokens)

    def learned_routes(self) -> Routes | None:
        """Return the experts of all tokens that were read, [tokens, routers, k]; None if nothing replays them."""
        if not self.routes or self.request.held_out:
            return None
        return np.concatenate(self.routes)

    def finish(
        self, stops: Sequence[int], texts: StopTexts | None, least: int, context: int
    ) -> Finish | None:
        """Return how the answer ends with its last token, "stop" or "length"; None if it does not end yet.

        `stops`: tokens that end the answer. `texts`: texts that end the answer. `least`: number of tokens up to which
        texts do not end the answer. `context`: longest prompt and answer together, in tokens.
        """
        if self.tokens[-1] in stops:
            return "stop"
        if texts is not None and len(self.tokens) > least and texts.end(self.tokens):
            return "stop"
        if len(self.tokens) >= self.request.max_new_tokens or self.length >= context:
            return "length"
        return None


class TransformersEngine(ModuleEngine):
    """A TextEngine that runs a decoder of the transformers library. All layers must attend to all tokens of an answer.

    Each move to residency FULL creates a new KV cache. After a load, the keys and values of answers in flight are
    recomputed with the new weights.
    """

    labels = ("engine weights", "KV cache")

    def __init__(self, settings: EngineSettings, *, device: Device, owner: str) -> None:
        rollout = settings.rollout
        self._settings = settings
        self._sampling = rollout
        # Stop texts of requests -> what finds them
        self._finders: dict[tuple[str, ...], StopTexts | None] = {(): None}
        self._tokenizer: Tokenizer | None = None
        # A model for images, or one for text only
        whole = AutoConfig.from_pretrained(settings.model, local_files_only=True)
        config = whole.get_text_config(decoder=True)
        vision = VisionSpec.of(settings.model, settings.env)
        self._vision_input: VisionInput | None = None
        made_by: Any = AutoModelForCausalLM
        if vision is not None:
            from rlplace.models.vision_lm import VisionInput, VisionLm

            self._vision_input = VisionInput(vision)
            made_by = VisionLm.made_by
        # A sliding window is fine if the context is not longer
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        other_kinds = kinds - {"full_attention", "sliding_attention"}
        window_is_short = window and window < settings.context
        if other_kinds or window_is_short:
            raise config_error(
                "attention-not-full",
                "rollout.engine",
                "transformers",
                error="layers",
                owner=owner,
                family=config.model_type,
            )
        # Build the model without initial values, which a load overwrites
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[rollout.dtype])
        with BUILDING:
            # The weights are dropped at once; only sdpa takes boolean masks
            with no_init_weights():
                self._model = made_by.from_config(
                    whole, dtype=dtype, attn_implementation="sdpa"
                )
            # Skipped above: a tied head would be stored twice
            self._model.tie_weights()
            if settings.adapter is not None:
                add_empty_factors(self._model, _spec_of(settings.adapter))
        # Records the experts of each token, if the learner replays them
        self._routers: Routers | None = None
        if settings.routes:
            self._routers = Routers(self._model.base_model)
        self._cache: BatchCache | None = None
        self._waiting: collections.deque[_Answer] = collections.deque()
        # The answer in each row of the cache
        self._active: list[_Answer] = []
        self.cached_tokens = 0
        # This engine's end of device syncs, from the first one on
        self._taker: WindowTaker | None = None
        random_seed = int.from_bytes(os.urandom(4), "little")
        self._seed = random_seed if rollout.seed is None else rollout.seed
        super().__init__(self._model, device, owner)
        # Under the names of files; factors apart from weights
        self._factor_shapes: dict[str, tuple[int, ...]] = {}
        if settings.adapter is not None:
            named = {checkpoint_name(n): each for n, each in self._tensors.items()}
            self._tensors = named
            factors = {checkpoint_name(n) for n in self.shapes if is_factor(n)}
            shapes = {name: tuple(each.shape) for name, each in named.items()}
            self._factor_shapes = {name: shapes.pop(name) for name in factors}
            self.shapes = shapes
        self._make_cache = functools.partial(
            BatchCache, config, dtype, tokens=settings.context
        )
        # Rows of the cache, each for an answer of full length. All that fit are made, even if fewer are ever used,
        # because the plan counts the whole limit as held.
        each = self._make_cache(rows=1, device=torch.device("meta")).size_bytes
        total = settings.emulated_memory
        if self._torch_device.type != "cpu":
            total = torch.cuda.get_device_properties(self._torch_device).total_memory
        limit = settings.cache_bytes(total, self._weight_bytes)
        self._rows = limit // each
        if self._rows < 1:
            key = "rollout.kv_cache_memory"
            raise config_error(
                "kv-cache-too-small",
                key,
                str(limit),
                error="transformers",
                owner=owner,
                each=each,
                context=settings.context,
                name=key,
            )
        self._workspace_bytes = self._rows * each
        self._most = min(self._rows, rollout.step_sequences)

    @property
    def in_flight(self) -> int:
        return len(self._active) + len(self._waiting)

    @property
    def room(self) -> int:
        return max(0, self._most - self.in_flight)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def move(self, to: Residency) -> int:
        if to < Residency.FULL and self.in_flight:
            raise engine_busy(self._owner, self.in_flight, to)
        return super().move(to)

    def _set_workspace(self, *, made: bool) -> None:
        self._cache = None
        if made:
            self._cache = self._make_cache(rows=self._rows, device=self._torch_device)

    @property
    def _held_workspace_bytes(self) -> int:
        if self._cache is None:
            return 0
        return self._cache.size_bytes

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        if self._settings.adapter is None:
            super().load(weights, version, factors)
        else:
            tensors = self._fitting(factors, version)
            super().load(weights, version)
            self._copy(tensors)
        self._read_again()

    def load_factors(self, factors: FactorsOf, version: int) -> None:
        require(self, self._owner, "pull_weights", needs=Residency.WEIGHTS)
        tensors = self._fitting(factors, version)
        # Until all factors are copied, there is no version
        self.version = None
        self._copy(tensors)
        self.version = version
        self._read_again()

    def _fitting(self, factors: FactorsOf, version: int) -> Weights:
        """Return the factors under their names in files. Raise UnfitWeights if names or shapes are not the engine's."""
        tensors = stored_factors(factors)
        check_fit(tensors, self._factor_shapes, owner=self._owner, version=version)
        return tensors

    def load_from(self, sync: DevicePush, rank: int, deadline_s: float) -> LoadedParts:
        """Receive a weight sync on the engine's accelerator, and load the weights as they arrive, window by window.

        Return the transport that carried the bytes, and the tensors of the sync that are not weights. There is no
        second copy of the weights. If an error occurs after some weights were loaded, the engine has no version, and
        refuses to generate until the next load.

        `sync`: the sync. `rank`: the rollout rank that receives. `deadline_s`: deadline, in seconds of the monotonic
        clock. Raises the errors of `load`, WeightSyncError and ChannelTimeout.
        """
        require(
            self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False
        )
        # Names and shapes are compared before anything is loaded
        tensors = sync.assembly.layout.tensors
        shapes = {name: spec for spec in tensors for name in spec.names}
        shapes.pop(PROBE, None)
        version = sync.push.version
        check_fit(shapes, self.shapes, owner=self._owner, version=version)
        # One connection for all syncs
        if self._taker is None:
            left_s = max(1.0, deadline_s - time.monotonic())
            self._taker = WindowTaker(
                rank, None, device=self._torch_device, timeout_s=left_s
            )
        others: dict[str, Tensor] = {}
        error: Exception | None = None
        for window in self._taker.take(sync, deadline_s):
            # From the first window to the last one there is no version
            self.version = None
            if PROBE in window:
                others[PROBE] = window.pop(PROBE).cpu().clone()
            try:
                # After an error the rest is only received, since other processes wait for this one
                if error is None:
                    self._copy(window)
            except RuntimeError as raised:
                error = raised
            # The memory of a window goes before the next one comes
            window.clear()
        if error is not None:
            raise self._taker.not_loaded(sync, error)
        self.version = version
        self._read_again()
        moved = sum(spec.size_bytes for spec in tensors)
        return LoadedParts(
            transports={self._taker.transport(sync): moved}, others=others
        )

    def _copy(self, window: Weights) -> None:
        for name, weight in window.items():
            copy_tensor(self._tensors[name], weight)

    def _read_again(self) -> None:
        """Let all answers in flight wait for a pass over their tokens by the new weights, in the same order."""
        self._waiting.extendleft(reversed(self._active))
        self._active = []

    # ── generating ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, request: Request) -> None:
        require(self, self._owner, "submit", needs=Residency.FULL)
        check_length(self._owner, len(request.tokens), self._settings.context)
        first = request.first_sample
        for sample in range(first, first + request.samples):
            numbers = random.Random(answer_seed(self._seed, request, sample))
            self._waiting.append(_Answer(request, sample, numbers))

    @torch.inference_mode()
    def step(self, watch: Stopwatch | None = None) -> Sequence[Completion]:
        watch = watch or Stopwatch()
        require(self, self._owner, "step", needs=Residency.FULL)
        assert self._cache is not None, "FULL has a cache"
        cache = self._cache
        finished: list[Completion] = []
        # One token for each active answer
        if self._active:
            lengths = [answer.length - 1 for answer in self._active]
            positions, mask = cache.extend(lengths)
            spared = [[answer.spared] for answer in self._active]
            positions = positions - torch.tensor(spared, device=self._torch_device)
            last = [[answer.tokens[-1]] for answer in self._active]
            with self._recorded() as found:
                output = self._model(
                    input_ids=torch.tensor(last, device=self._torch_device),
                    position_ids=positions,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                )
            routes = self._routes_of(found)
            if routes is not None:
                for row, answer in enumerate(self._active):
                    answer.routes.append(routes[row : row + 1])
            self._choose(self._active, output.logits[:, -1])
            active = len(self._active)
            finished += self._take_finished(cache)
            watch.lap("decode", active)
        # Waiting answers take the free rows, and get their first token
        while self._waiting and len(self._active) < self._most:
            watch.lap("prefill", self._begin(cache))
        return finished + self._take_finished(cache)

    def _begin(self, cache: BatchCache) -> int:
        """Begin the next waiting answer: run one forward pass over its tokens so far, draw its next token, and put it
        into the batch.

        Waiting answers of the same request that have no tokens yet share this pass. Return the number of tokens of the
        pass.

        `cache`: gets the keys and values of the tokens.
        """
        first = self._waiting.popleft()
        alike = [first]
        while self._waiting and len(self._active) + len(alike) < self._most:
            following = self._waiting[0]
            same_request = following.request is first.request
            if not same_request or following.tokens or first.tokens:
                break
            alike.append(self._waiting.popleft())
        # Keys and values of the prefix, copied to each answer's row
        prefix = DynamicCache()
        so_far = torch.from_numpy(
            np.concatenate([first.request.tokens, np.array(first.tokens, np.int32)])
        )
        with self._recorded() as found:
            logits = self._read(
                so_far.to(self._torch_device), first.request.images, prefix, alike
            )
        routes = self._routes_of(found)
        if routes is not None:
            for answer in alike:
                answer.routes = [routes]
        cache.fill(len(self._active), len(alike), prefix)
        self.cached_tokens += (len(alike) - 1) * len(so_far)
        self._choose(alike, logits.expand(len(alike), -1))
        self._active += alike
        return len(so_far)

    def _read(
        self,
        tokens: Tensor,
        images: Files,
        prefix: DynamicCache,
        answers: Sequence[_Answer],
    ) -> Tensor:
        """Run a forward pass over the L `tokens` [L]: return the logits after the last token, [1, size of the
        vocabulary], and fill `prefix` with keys and values.

        `images`: images of the prompt. `prefix`: cache for the keys and values. `answers`: answers that begin with
        these tokens. An image may have fewer positions than tokens; the difference is stored as `spared` in each
        answer.
        """
        if self._vision_input is None or not images:
            output = self._model(
                input_ids=tokens[None],
                past_key_values=prefix,
                use_cache=True,
                logits_to_keep=1,
            )
            return cast(Tensor, output.logits[:, -1])
        given = {"past_key_values": prefix, "use_cache": True}
        states, positions = self._vision_input.states(
            self._model, [tokens.long()], [images], [None], **given
        )
        for answer in answers:
            answer.spared = len(tokens) - 1 - int(positions.max())
        return cast(Tensor, self._model.get_output_embeddings()(states[-1:]))

    def _recorded(self) -> contextlib.AbstractContextManager[list[Tensor]]:
        """Record the experts of the pass inside of the `with` block, if the settings ask for it.

        The yielded list then gets one tensor [tokens, k] for each router; else it stays empty.
        """
        if self._routers is None:
            return contextlib.nullcontext([])
        return self._routers.recorded()

    def _routes_of(self, found: Sequence[Tensor]) -> Routes | None:
        """Return the routes of a pass on the host, [tokens, routers, k]; None if nothing was recorded.

        `found`: the experts of each router, [tokens, k].
        """
        if self._routers is None or not found:
            return None
        stacked = torch.stack(list(found), dim=1)
        dtype = route_dtype(self._routers.experts)
        return stacked.to(dtype).cpu().numpy()

    def _choose(self, answers: Sequence[_Answer], logits: Tensor) -> None:
        """Draw the next token of each answer from `logits` [answers, size of the vocabulary], and append it to the
        answer.
        """
        assert self.version is not None
        # Each answer is drawn with the sampling parameters of its request
        drawn = [self._settings.drawn(answer.request) for answer in answers]
        made = [(answer.request.tokens, answer.tokens) for answer in answers]
        allowed = penalised(logits, self._sampling, made, self._settings.stop_token_ids)
        # Only a sampled token takes a number from the answer's generator
        uniforms: list[float | None] = []
        for answer, kind in zip(answers, drawn, strict=True):
            greedy = kind.temperature == 0 or answer.request.greedy
            uniforms.append(None if greedy else answer.numbers.random())
        # Draw all rows with the parameters of the first row, then draw the rows with other parameters again
        tokens, logprobs = choose(allowed, drawn[0], uniforms)
        kinds = [_kind_of(parameters) for parameters in drawn]
        for other in dict.fromkeys(kinds):
            if other == kinds[0]:
                continue
            rows = [row for row, each in enumerate(kinds) if each == other]
            found = choose(
                allowed[rows], drawn[rows[0]], [uniforms[row] for row in rows]
            )
            tokens[rows], logprobs[rows] = found
        for answer, token, logprob in zip(
            answers, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.versions.append(self.version)

    def _take_finished(self, cache: BatchCache) -> list[Completion]:
        """Remove the finished answers from the batch, and return them.

        Each row that becomes free is filled with the last active answer, so that the rows in use stay the first ones.

        `cache`: the KV cache, with one row per active answer.
        """
        taken: list[Completion] = []
        # Backwards from the last row, so that rows that are not checked yet do not move
        for row in reversed(range(len(self._active))):
            answer = self._active[row]
            least = self._sampling.min_tokens
            ids, texts = self._settings.stops(answer.request)
            finish = answer.finish(
                ids, self._finder(texts), least, self._settings.context
            )
            if finish is None:
                continue
            taken.append(
                Completion(
                    env_rank=answer.request.env_rank,
                    iteration=answer.request.iteration,
                    held_out=answer.request.held_out,
                    group=answer.request.group,
                    sample=answer.sample,
                    turn=answer.request.turn,
                    tokens=np.array(answer.tokens, np.int32),
                    logprobs=np.array(answer.logprobs, np.float32),
                    versions=np.array(answer.versions, np.int32),
                    finish=finish,
                    routes=answer.learned_routes(),
                )
            )
            last = self._active.pop()
            if last is not answer:
                cache.copy(len(self._active), row, last.length - 1)
                self._active[row] = last
        return taken[::-1]

    def _finder(self, texts: tuple[str, ...]) -> StopTexts | None:
        """Return what finds these stop texts in an answer; None without texts."""
        if texts not in self._finders:
            # Requests may bring any number of texts
            if len(self._finders) > _KEPT_FINDERS:
                self._finders = {(): None}
            self._tokenizer = self._tokenizer or Tokenizer.load(self._settings.model)
            self._finders[texts] = StopTexts(self._tokenizer, texts)
        return self._finders[texts]

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        (scores,) = self.logprobs_of([tokens], len(tokens))
        return scores

    @torch.inference_mode()
    def logprobs_of(
        self, sequences: Sequence[Sequence[int]], token_budget: int
    ) -> Sequence[Sequence[float]]:
        """Return the result of `logprobs` for each of the sequences.

        `token_budget`: the most tokens of a pass, padding included; a longer sequence has a pass of its own.
        """
        require(self, self._owner, "logprobs", needs=Residency.WEIGHTS)
        scores: list[list[float]] = [[] for _ in sequences]
        lengths = [len(sequence) for sequence in sequences]
        for batch in batches_of(lengths, token_budget):
            # Padding stands behind the tokens, so that no token attends to it.
            longest = max(lengths[number] for number in batch)
            given = torch.zeros(len(batch), longest, dtype=torch.long)
            mask = torch.zeros_like(given)
            for row, number in enumerate(batch):
                given[row, : lengths[number]] = torch.tensor(list(sequences[number]))
                mask[row, : lengths[number]] = 1
            given = given.to(self._torch_device)
            padded: dict[str, Tensor] = {}
            if not mask.all():
                padded["attention_mask"] = mask.to(self._torch_device)
            logits = self._model(input_ids=given, use_cache=False, **padded).logits
            # One row at a time, so that logits in fp32 are never those of the whole batch.
            for row, number in enumerate(batch):
                last = lengths[number]
                chosen = given[row, 1:last, None]
                found = logits[row, : last - 1].float().log_softmax(-1)
                scores[number] = found.gather(-1, chosen)[:, 0].tolist()
        return scores

    def drop(self) -> None:
        self._active = []
        self._waiting.clear()

    def close(self) -> None:
        self.drop()
        if self._taker is not None:
            self._taker.close()
        super().close()


def _spec_of(adapter: AdapterSettings) -> LoraSpec:
    return LoraSpec(
        rank=adapter.rank, alpha=adapter.scale * adapter.rank, targets=adapter.targets
    )


def batches_of(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return the numbers of sequences, from 0, in batches of similar lengths, the longest first.

    `lengths`: tokens of each sequence. `token_budget`: the most tokens of a batch in which each sequence is padded to
    the longest; a longer sequence is a batch of its own.
    """
    batches: list[list[int]] = []
    most = 0
    for number in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if not batches or len(batches[-1]) >= most:
            batches.append([])
            most = max(1, token_budget // max(1, lengths[number]))
        batches[-1].append(number)
    return batches


# ── keys and values ──────────────────────────────────────────────────────────────────────────────────────────────────
#
#   row 0   k k k k k k k . . .      an answer's tokens stand in its row from the left; the next one goes behind them
#   row 1   k k k . . . . . . .
#   row 2   . . . . . . . . . .      the rows in use are the first ones, so that a batch of them is a view


class BatchCache(Cache):
    """A KV cache with one row per answer. A forward pass adds one token to each of the first rows.

    Owns the memory. The model must be given mask and positions, because this cache implements only `update`.
    """

    def __init__(
        self,
        model: PretrainedConfig,
        dtype: torch.dtype,
        *,
        rows: int,
        tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        layers = model.num_hidden_layers
        heads = model.num_attention_heads
        key_heads = getattr(model, "num_key_value_heads", None) or heads
        head_size = getattr(model, "head_dim", None) or model.hidden_size // heads
        size = (rows, key_heads, tokens, head_size)
        # One tensor per layer for keys, one for values.
        # Zeros, not whatever was in memory: what is masked is still multiplied, and NaN times 0 is NaN.
        pools = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(2 * layers)
        ]
        self._keys = pools[:layers]
        self._values = pools[layers:]
        self._device = device
        # Row and column of each new token of the pass in progress
        self._rows = torch.empty(0, dtype=torch.long, device=device)
        self._columns = torch.empty(0, dtype=torch.long, device=device)
        self._longest = 0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def extend(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prepare a forward pass that adds one token to each of the first B rows.

        Return the positions of the new tokens, [B, 1], and the attention mask [B, 1, 1, tokens of the longest row],
        which is true where a row has a token, including the new one. `lengths`: number of tokens in each row before the
        pass, [B].
        """
        self._columns = torch.tensor(lengths, device=self._device)
        self._rows = torch.arange(len(lengths), device=self._device)
        self._longest = max(lengths) + 1
        columns = torch.arange(self._longest, device=self._device)
        seen = columns <= self._columns[:, None]
        return self._columns[:, None], seen[:, None, None, :]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one new token per row; return the keys and values of all tokens of the first B
        rows.

        `key_states`, `value_states`: of the new tokens, [B, heads, 1, size]. `layer_idx`: index of the layer.
        """
        count = len(self._rows)
        longest = self._longest
        keys = self._keys[layer_idx]
        values = self._values[layer_idx]
        keys[self._rows, :, self._columns] = key_states[:, :, 0]
        values[self._rows, :, self._columns] = value_states[:, :, 0]
        return keys[:count, :, :longest], values[:count, :, :longest]

    def fill(self, first: int, count: int, prefix: DynamicCache) -> None:
        """Copy the keys and values of one token sequence into `count` rows, from row `first` on.

        `prefix`: cache of the forward pass over the sequence.
        """
        for keys, values, layer in zip(
            self._keys, self._values, prefix.layers, strict=True
        ):
            assert isinstance(layer, DynamicLayer), (
                "the only kind there is under full attention"
            )
            for pool, made in ((keys, layer.keys), (values, layer.values)):
                assert made is not None, "a pass went through it"
                pool[first : first + count, :, : made.shape[2]] = made

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first `length` tokens from row `source` to row `target`."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]


# ── drawing tokens ───────────────────────────────────────────────────────────────────────────────────────────────────
# Each row has a number of its own, so that a draw does not depend on its batch.
# Letters: B rows, V vocabulary, K tokens that top_k keeps.

Chosen = tuple[Tensor, Tensor]  # token ids [B] and their log-probabilities [B]


def penalised(
    logits: Tensor,
    sampling: TextRolloutConfig,
    made: Sequence[tuple[Tokens, Sequence[int]]],
    stops: Sequence[int],
) -> Tensor:
    """Return the logits [B answers, V tokens of the vocabulary] after penalties, with minus infinity for forbidden stop
    tokens, as vLLM computes them.

    `sampling`: sampling parameters, with the penalties. `made`: for each row, the tokens of the prompt and of the
    answer so far. `stops`: tokens that are forbidden as long as an answer is shorter than `min_tokens`.
    """
    repeated = sampling.repetition_penalty
    present = sampling.presence_penalty
    frequent = sampling.frequency_penalty
    if (sampling.min_tokens, repeated, present, frequent) == (0, 1.0, 0.0, 0.0):
        return logits
    logits = logits.float().clone()
    for row, (prompt, answer) in zip(logits, made, strict=True):
        if len(answer) < sampling.min_tokens:
            row[list(stops)] = float("-inf")
        # How often the prompt and the answer have each token, [V]
        asked = _token_counts(prompt, row)
        counts = _token_counts(answer, row)
        seen = (asked + counts) > 0
        row[seen] = torch.where(
            row[seen] > 0, row[seen] / repeated, row[seen] * repeated
        )
        # Both penalties count the answer's tokens only
        row -= frequent * counts + present * (counts > 0)
    return logits


def _token_counts(tokens: Tokens | Sequence[int], row: Tensor) -> Tensor:
    """Return how often each token of the vocabulary occurs in `tokens`, [size of the vocabulary].

    `row`: logits of one answer, which give the size of the vocabulary and the device.
    """
    numbers = torch.tensor(tokens, dtype=torch.long, device=row.device)
    return numbers.bincount(minlength=len(row))


def choose(
    logits: Tensor, sampling: TextRolloutConfig, uniforms: Sequence[float | None]
) -> Chosen:
    """Return one token for each row of `logits` [rows, size of the vocabulary], with its log-probability.

    `sampling`: sampling parameters. `uniforms`: for each row, a random number in [0, 1) by which the token is drawn;
    None: take the most probable token.
    """
    drawn = [row for row, uniform in enumerate(uniforms) if uniform is not None]
    if not drawn:
        return likeliest(logits)
    numbers = [uniform for uniform in uniforms if uniform is not None]
    if len(drawn) == len(logits):
        return draw(logits, sampling, numbers)
    # Greedy rows, with the sampled rows written over them
    tokens, logprobs = likeliest(logits)
    tokens[drawn], logprobs[drawn] = draw(logits[drawn], sampling, numbers)
    return tokens, logprobs


def likeliest(logits: Tensor) -> Chosen:
    """Return the most probable token of each row of `logits` [rows, size of the vocabulary], with its
    log-probability.
    """
    logprobs, tokens = logits.float().log_softmax(-1).max(-1)
    return tokens, logprobs


def draw(
    logits: Tensor, sampling: TextRolloutConfig, uniforms: Sequence[float]
) -> Chosen:
    """Return one sampled token for each row of `logits` [rows, size of the vocabulary], with its log-probability.

    `sampling`: sampling parameters. `uniforms`: for each row, a random number in [0, 1), at which the cumulative
    distribution is inverted. The distribution is in double precision, which is fine enough for any vocabulary.
    """
    scaled = logits.float() / sampling.temperature
    kept = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    # Keep the likeliest tokens; `order` maps them back to token ids
    order = None
    if kept < logits.shape[-1] or sampling.top_p < 1:
        # [B, K], the likeliest first
        scaled, order = scaled.topk(kept)
        scaled = _nucleus(scaled, sampling.top_p)
    logprobs = scaled.log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    # The point of each row on its cumulative distribution, [B, 1]
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    points = numbers[:, None] * cumulative[:, -1:]
    # The first entry above the point. Never an entry of probability 0, which adds nothing to the one before.
    places = torch.searchsorted(cumulative, points, right=True)
    places = places.clamp(max=cumulative.shape[-1] - 1)
    tokens = places if order is None else order.gather(-1, places)
    return tokens[:, 0], logprobs.gather(-1, places)[:, 0]


def _nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Keep in each row only the smallest set of most probable entries whose probabilities sum to at least `top_p`.

    Return the rows with all other entries at minus infinity. `scaled`: logits [rows, entries], divided by the
    temperature, the most probable first in each row. The method is that of Holtzman et al. 2020.
    """
    probabilities = scaled.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return scaled.masked_fill(before >= top_p, float("-inf"))
