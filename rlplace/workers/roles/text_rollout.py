"""The rollout worker of language models: pulls weights, then continues token sequences until the iteration ends.

::

    requests ──▶ take while there is room ──▶ engine.step() ──▶ completions, each as soon as it has finished
                          ▲                        │
                          └── newer weights? load ─┘   no answer waits for a batch

Where the actor learns while answers are in flight, the rest of an answer is sampled by newer weights than its beginning
(a partial rollout: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298). Each token carries its version.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlplace.errors import ChannelEmpty, DivergedError, Problem
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Completion, Request
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, EndOfIteration, WorkerArguments
from rlplace.workers.engines.contract import (
    CacheBytes,
    EngineBudget,
    EngineSettings,
    EngineShare,
    MemoryLimit,
    Sampling,
    TextEngine,
)
from rlplace.workers.roles.rollout import RolloutWorker
from rlplace.workers.worker import WorkerContext, cancelled, out_of_step

if TYPE_CHECKING:
    from rlplace.config import Config


@dataclasses.dataclass(slots=True)
class _Counts:
    """Measurements of one iteration so far."""

    answers: int = 0
    tokens: int = 0  # generated
    prompt_tokens: int = 0  # once per answer
    steps: int = 0
    in_flight: int = 0  # summed over steps
    wait_s: float = 0.0  # with nothing in flight
    policy_s: float = 0.0
    put_s: float = 0.0
    updates: int = 0  # of the weights, with answers in flight
    update_s: float = 0.0

    def metrics(self, *, seconds: float, cached_tokens: int) -> Metrics:
        metrics = {
            "rollout/answers": Metric(self.answers, "sum"),
            "rollout/tokens": Metric(self.tokens, "sum"),
            "rollout/tokens_per_s": Metric(self.tokens / seconds, "sum"),
            "rollout/batch": Metric(self.in_flight / max(1, self.steps), "mean", self.steps),
            "rollout/prompt_cached": Metric(cached_tokens / max(1, self.prompt_tokens), "mean", self.prompt_tokens),
            "rollout/policy_s": Metric(self.policy_s, "max"),
            "rollout/wait_s": Metric(self.wait_s, "max"),
            "rollout/put_s": Metric(self.put_s, "max"),
        }
        if self.updates:
            metrics["rollout/updates"] = Metric(self.updates, "max")
            metrics["rollout/update_s"] = Metric(self.update_s, "max")
        return metrics


class TextRolloutWorker(RolloutWorker[TextEngine]):
    """Ranks share one queue of requests: any rank with room takes the next.

    No rank has more in flight than its even share of an iteration's answers, so that a rank with a large cache does not
    take everything while others idle.
    """

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._share = -(-config.prompts * config.config.algorithm.samples_per_prompt // config.ranks["rollout"])
        self._env_ranks: dict[tuple[int, int, int], int] = {}  # group, sample, turn -> env rank that asked
        self._ahead = -1  # last version that was pulled while generating, before it was asked for

    def setup(self) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.workers.engines.sync_probe import SyncProbe, probe_tokens, tolerance

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        self._engine = engine = build_engine(self.config, self.context)
        tokens, limit = probe_tokens(self.config), tolerance(self.config.config)
        self._open_sync(engine, SyncProbe(engine, tokens, limit, self.context.owner))

    def pull_weights(self, version: int) -> Metrics:
        """Pull as the base class, after all earlier versions that were pushed and not pulled.

        Does nothing when `version` was pulled while generating.
        """
        metrics: Metrics = {}
        if version > self._ahead:
            held = self.engine.version
            for due in range(version if held is None else min(held + 1, version), version + 1):
                metrics = self.weights.pull(due)
        return metrics

    def generate(self, iteration: int) -> Metrics:
        """Answer requests until this rank gets EndOfIteration, then finish what is in flight."""
        verified = self.weights.verify()
        began, cached = time.perf_counter(), self.engine.cached_tokens
        counts = _Counts()
        while self._take(iteration, counts):
            self._step(counts)
        while self.engine.in_flight:  # none where the end is put after the last answer was taken
            self._step(counts)
        seconds = time.perf_counter() - began
        return {**counts.metrics(seconds=seconds, cached_tokens=self.engine.cached_tokens - cached), **verified}

    def _take(self, iteration: int, counts: _Counts) -> bool:
        """Begin requests that have arrived while there is room; wait for one when nothing is in flight.

        Return False at the end of the iteration.
        """
        if self.context.cancelled.is_set():
            raise cancelled(self.context.owner, "generate")
        requests = self.context.channels[REQUESTS]
        while self.engine.room and self.engine.in_flight < self._share:
            if self.engine.in_flight:
                try:
                    item = requests.get_nowait()
                except ChannelEmpty:
                    break
            else:
                began = time.perf_counter()
                item = requests.get()
                counts.wait_s += time.perf_counter() - began
            if item.iteration != iteration:
                raise out_of_step(
                    self.context.owner,
                    "a request is of another iteration",
                    got=f"iteration {item.iteration}",
                    expected=f"iteration {iteration}",
                )
            if isinstance(item, EndOfIteration):
                return False
            self._begin(item, counts)
        return True

    def _begin(self, request: Request, counts: _Counts) -> None:
        self.engine.submit(request)
        for sample in range(request.first_sample, request.first_sample + request.samples):
            self._env_ranks[request.group, sample, request.turn] = request.env_rank
        counts.prompt_tokens += request.samples * len(request.tokens)

    def _step(self, counts: _Counts) -> None:
        began = time.perf_counter()
        while self.weights.announced():  # the actor has begun to push it; answers in flight continue with it
            held = self.engine.version
            assert held is not None, "nothing is generated without weights"
            self.weights.pull(held + 1)
            self._ahead = held + 1
            counts.updates += 1
        updated = time.perf_counter()
        counts.update_s += updated - began
        counts.steps += 1
        counts.in_flight += self.engine.in_flight
        finished = self.engine.step()
        stepped = time.perf_counter()
        for completion in finished:
            if not np.isfinite(completion.logprobs).all():
                raise _not_finite(self.context.owner, completion)
            env_rank = self._env_ranks.pop((completion.group, completion.sample, completion.turn))
            self.context.channels[COMPLETIONS].put(completion, key=str(env_rank))
            counts.tokens += len(completion.tokens)
        counts.answers += len(finished)
        counts.policy_s += stepped - updated
        counts.put_s += time.perf_counter() - stepped

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """Log-probabilities of `tokens` by the engine's weights, from the second on: to compare with the actor's."""
        return self.engine.logprobs(tokens)


def build_engine(job: WorkerArguments, context: WorkerContext) -> TextEngine:
    """Build the engine that the config names, OFF and without weights; import only that one's libraries."""
    rollout, algorithm = job.config.text_rollout, job.config.algorithm
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=Tokenizer.load(job.model).stop_token_ids,
        seed=rollout.seed,
    )
    settings = EngineSettings(
        model=job.model,
        dtype=rollout.dtype,
        context=algorithm.longest,
        memory=_memory(job.config, on_cpu=context.device.torch_name == "cpu"),
        step_sequences=rollout.step_sequences,
        step_tokens=rollout.step_tokens,
        tensor_parallel=len(context.slot.accelerators),
        enforce_eager=rollout.enforce_eager,
        cache_fp8=rollout.cache == "fp8",
        sleep_level=rollout.sleep_level,
    )
    if rollout.engine == "transformers":
        from rlplace.workers.engines.transformers import TransformersEngine

        return TransformersEngine(settings, sampling, device=context.device, owner=context.owner, rank=context.rank)
    from rlplace.workers.engines.vllm import VllmEngine

    return VllmEngine(settings, sampling, device=context.device, owner=context.owner, rank=context.rank)


def _memory(config: Config, *, on_cpu: bool) -> MemoryLimit:
    """Turn a share of an emulated accelerator into bytes: an engine on the CPU would take it of the whole machine."""
    rollout = config.text_rollout
    if rollout.kv_cache_memory is not None:
        return CacheBytes(size_bytes=rollout.kv_cache_memory)
    share = rollout.gpu_memory_utilization
    assert isinstance(share, float), "auto is a number once there is a plan"
    if on_cpu:
        return EngineBudget(size_bytes=int(share * config.cluster.accelerator.memory))
    return EngineShare(gpu_memory_utilization=share)


def _not_finite(owner: str, completion: Completion) -> DivergedError:
    answer = f"group {completion.group}, sample {completion.sample}, turn {completion.turn}"
    versions = ", ".join(str(version) for version in sorted(set(completion.versions.tolist())))
    return DivergedError(
        Problem(
            code="logprob-not-finite",
            key=owner,
            what="a token was drawn with a log-probability that is not finite",
            got=answer,
            why=f"the weights of version {versions} are not finite, or their logits overflow in rollout.dtype",
            fix="actor.optimizer.lr: <smaller>, or rollout.dtype: fp32",
        )
    )
