"""A generation engine in a worker that a user has written: vLLM, transformers, or a class with the contract of a
TextEngine.

::

    setup      self.engine = GenerationEngine(self, "models/Qwen3-0.6B", context=1024)
    sync       actor ── weights ──▶ self.engine                            (self.weights_of(self.engine) in setup)
    a stage    self.engine.generate(prompts) ──▶ answers, each token with its log-probability and weight version
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.codes import config_error, problem
from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import ConfigError, Problem, WorkerMisuse
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request
from rlplace.workers.engines.contract import BatchScorer, EngineSettings, Weights

if TYPE_CHECKING:
    from rlplace.workers.engines.contract import TextEngine
    from rlplace.workers.engines.weights import ExpectedWeights
    from rlplace.workers.worker import Worker, WorkerContext

_NAME = "GenerationEngine"
_FROZEN_VERSION = 0
_TOKEN_BUDGET = 4096  # tokens of a pass that scores several sequences


class GenerationEngine:
    """Generates answers to prompts of token ids, and scores given tokens, on the accelerators of its worker.

    Create the engine in the worker's `setup`. It is offloaded and closed together with the worker; `offload` need not
    be called for it. The engine starts without weights. They come from another component, if `setup` calls
    `self.weights_of(self.engine)`; from a call of `load`; or from the model's folder, with `frozen=True`. Only one
    thread may use the engine.
    """

    def __init__(
        self,
        worker: Worker,
        model: str | Path,
        *,
        context: int,
        frozen: bool = False,
        **options: Any,
    ) -> None:
        """Build the engine, in the `setup` of `worker`. Raises ConfigError, ClusterError.

        `model`: a Hugging Face folder with a tokenizer. `context`: longest prompt and answer together, in tokens.
        `frozen`: whether to load the weights of the folder each time the engine is onloaded without weights. `options`:
        keys of the config block `rollout` of language models, such as engine="transformers", temperature=0.7,
        dtype="fp32", kv_cache_memory="2GiB".
        """
        from rlplace.workers.engines.build import build_engine
        from rlplace.workers.engines.weights import ExpectedWeights

        self._worker = worker
        self._folder = Path(model).expanduser()
        self._frozen = frozen
        settings = _settings_of(worker.context, self._folder, context, options)
        self.context = context
        self._expected: ExpectedWeights = ExpectedWeights.of_folder(self._folder)
        self._engine: TextEngine = build_engine(settings, worker.context)
        worker.context.opened.callback(self._engine.close)
        # Bytes on each accelerator since the last move
        self.accelerator_bytes = 0
        self._calls = 0
        worker.offload(self)

    @property
    def version(self) -> int | None:
        """Version of the loaded weights; None without weights."""
        return self._engine.version

    @property
    def residency(self) -> Residency:
        return self._engine.residency

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies of weights that the engine keeps on the host, as measured."""
        return self._engine.host_bytes

    # ── memory and weights ───────────────────────────────────────────────────────────────────────────────────────────

    def move(self, to: Residency) -> int:
        """Move the engine to the residency `to`, and return the bytes that it then has on each accelerator.

        The worker's own `move` calls this method. Raises AcceleratorOutOfMemory.
        """
        from rlplace.workers.engines.weights import weights_of_folder

        self.accelerator_bytes = self._engine.move(to)
        if self._frozen and to > Residency.OFF and self._engine.version is None:
            weights = weights_of_folder(self._engine, self._folder, _NAME)
            self._engine.load(weights, _FROZEN_VERSION)
        return self.accelerator_bytes

    def load(self, weights: Weights, version: int) -> None:
        """Copy all weights into the engine, as policy version `version`.

        `weights`: name in transformers -> tensor; a tied weight needs only one of its names. Raises ValueError if names
        or shapes are not those of the model, NotResident while the component is offloaded.
        """
        self._engine.load(self._expected.complete(weights), version)

    def drop(self) -> None:
        """Discard all answers in flight."""
        self._engine.drop()

    # ── generating ───────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int = 1,
        max_new_tokens: int | None = None,
        greedy: bool = False,
        iteration: int | None = None,
    ) -> list[list[Completion]]:
        """Return `samples` answers to each prompt: one list of answers per prompt, in the order of `prompts`.

        An answer has `tokens`; `logprobs`, of each token in the distribution from which it was drawn; `versions`, the
        version of the weights that drew each token; and `finish`, which is "stop" or "length".

        `prompts`: token ids of each prompt. `max_new_tokens`: longest answer; None: an answer may fill the context.
        `greedy`: take the most probable tokens instead of sampled tokens. `iteration`: a number from which the seeds of
        the answers are derived; None: the number of calls of this method before. If the engine has the option `seed`,
        the answers depend only on the seed, the iteration, the rank, the prompt and the sample number.

        Raises ConfigError if a prompt leaves no room for an answer, NotResident if the engine is not at residency FULL
        or has no weights.
        """
        context = self._worker.context
        if iteration is None:
            iteration = self._calls
        self._calls += 1
        longest = self.context if max_new_tokens is None else max_new_tokens
        for number, prompt in enumerate(prompts):
            tokens = np.asarray(prompt, np.int32)
            _check_prompt(context.owner, number, tokens)
            request = Request(
                env_rank=context.rank,
                iteration=iteration,
                # Prompts of several ranks have different numbers, so that their draws differ
                group=number * context.world_size + context.rank,
                first_sample=0,
                samples=samples,
                turn=0,
                tokens=tokens,
                max_new_tokens=min(longest, self.context - len(tokens)),
                greedy=greedy,
            )
            self._engine.submit(request)
        answers: list[list[Completion]] = [[] for _ in prompts]
        with self._worker.timer("generate"):
            while self._engine.in_flight:
                context.check_cancelled("generate")
                for answer in self._engine.step():
                    answers[answer.group // context.world_size].append(answer)
        generated = sum(len(a.tokens) for found in answers for a in found)
        self._worker.metric("generated_tokens", generated, reduce="sum")
        for found in answers:
            found.sort(key=lambda answer: answer.sample)
        return answers

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return log p(tokens[i] | tokens[:i]) for each i >= 1, by the loaded weights, at temperature 1, from one
        forward pass.

        Raises NotResident if the engine has no weights, or if its residency is too low for a forward pass.
        """
        given = [int(token) for token in tokens]
        return np.asarray(self._engine.logprobs(given), np.float32)

    def logprobs_of(
        self, sequences: Sequence[Sequence[int]], *, token_budget: int = _TOKEN_BUDGET
    ) -> list[NDArray[np.float32]]:
        """Return the result of `logprobs` for each of the sequences, with several sequences in a forward pass.

        `token_budget`: the most tokens of a pass, padding included; a longer sequence has a pass of its own. An engine
        of one's own without `logprobs_of`, and a vLLM server, take a pass for each sequence. Raises NotResident as
        `logprobs` does.
        """
        given = [[int(token) for token in tokens] for tokens in sequences]
        scores: Sequence[Sequence[float]]
        if isinstance(self._engine, BatchScorer):
            scores = self._engine.logprobs_of(given, token_budget)
        else:
            scores = [self._engine.logprobs(tokens) for tokens in given]
        return [np.asarray(each, np.float32) for each in scores]


def _settings_of(
    context: WorkerContext, folder: Path, length: int, options: Mapping[str, Any]
) -> EngineSettings:
    """Return the settings from which the engine is built.

    `context`: context of the worker. `folder`: folder of the model. `length`: longest prompt and answer together, in
    tokens. `options`: keys of the config block `rollout`. Raises ConfigError with all problems of the options.
    """
    from rlplace.config.read import read_block
    from rlplace.models.tokenizer import Tokenizer
    from rlplace.workers.engines.contract import engine_args_problems

    if not folder.is_dir():
        raise config_error(
            "no-model-folder", _NAME, str(folder), error="generation-engine", name=_NAME
        )
    rollout, problems = read_block(TextRolloutConfig, dict(options))
    if rollout is not None and rollout.engine == "vllm":
        problems = [*problems, *engine_args_problems(rollout.engine_args)]
    if rollout is not None and rollout.gpu_memory_utilization == "auto":
        problems = [*problems, _no_plan()]
    if problems or rollout is None:
        raise ConfigError(problems)
    stop_token_ids, stop_texts = Tokenizer.load(folder).stops(rollout.stop)
    return EngineSettings(
        rollout=rollout,
        model=folder,
        context=length,
        stop_token_ids=stop_token_ids,
        stop_texts=stop_texts,
        emulated_memory=context.device.capacity_bytes,
        tensor_parallel=max(1, len(context.slot.accelerators)),
    )


def _no_plan() -> Problem:
    return problem(
        "unknown-choice",
        "gpu_memory_utilization",
        "auto",
        error="no-plan-of-engine",
        name=_NAME,
    )


def _check_prompt(owner: str, number: int, tokens: NDArray[np.int32]) -> None:
    """Raise WorkerMisuse if `tokens` is empty or does not have exactly one dimension.

    `owner`: rank that owns the engine, and `number`: index of the prompt in the call; both for the error.
    """
    if tokens.ndim == 1 and len(tokens):
        return
    shape = f"shape {list(tokens.shape)}"
    raise WorkerMisuse(problem("bad-prompt", owner, shape, number=number))
