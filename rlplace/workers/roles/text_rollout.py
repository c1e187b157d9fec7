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
from collections.abc import Callable, Sequence

import numpy as np

from rlplace.errors import ChannelEmpty, DivergedError, Problem
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Completion
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, EndOfIteration, WorkerArguments
from rlplace.workers.engines.contract import EngineSettings, TextEngine
from rlplace.workers.roles.rollout import RolloutWorker
from rlplace.workers.worker import WorkerContext, cancelled, out_of_step


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
        from rlplace.workers.engines.sync_probe import SyncProbe, probe_tokens, tolerance

        super().setup()
        limit = tolerance(self.config.config)
        self._probe = SyncProbe(self.engine, probe_tokens(self.config), limit, self.context.owner)

    def _build_engine(self) -> TextEngine:
        """Build the engine that the config names, OFF and without weights; import only that one's libraries."""
        job, context = self.config, self.context
        settings = EngineSettings(
            rollout=job.config.text_rollout,
            model=job.model,
            context=job.config.algorithm.longest,
            stop_token_ids=Tokenizer.load(job.model).stop_token_ids,
            emulated_memory=job.config.cluster.accelerator.memory,
            tensor_parallel=len(context.slot.accelerators),
        )
        build: Callable[..., TextEngine]
        if settings.rollout.engine == "transformers":
            from rlplace.workers.engines.transformers import TransformersEngine

            build = TransformersEngine
        else:
            from rlplace.workers.engines.vllm import VllmEngine

            build = VllmEngine
        return build(settings, device=context.device, owner=context.owner, rank=context.rank)

    def pull_weights(self, version: int) -> Metrics:
        """Pull as the base class, after all earlier versions that were pushed and not pulled.

        Does nothing when `version` was pulled while generating.
        """
        metrics: Metrics = {}
        if version > self._ahead:
            held = self.engine.version
            for due in range(version if held is None else min(held + 1, version), version + 1):
                metrics = super().pull_weights(due)
        return metrics

    def generate(self, iteration: int) -> Metrics:
        """Answer requests until this rank gets EndOfIteration, then finish what is in flight."""
        assert self._probe is not None, "setup comes first"
        verified = self._probe.compare()
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
                got, expected = f"iteration {item.iteration}", f"iteration {iteration}"
                raise out_of_step(self.context.owner, "a request is of another iteration", got=got, expected=expected)
            if isinstance(item, EndOfIteration):
                return False
            self.engine.submit(item)
            for sample in range(item.first_sample, item.first_sample + item.samples):
                self._env_ranks[item.group, sample, item.turn] = item.env_rank
            counts.prompt_tokens += item.samples * len(item.tokens)
        return True

    def _step(self, counts: _Counts) -> None:
        began = time.perf_counter()
        while self._receiver.announced():  # the actor has begun to push it; answers in flight continue with it
            held = self.engine.version
            assert held is not None, "nothing is generated without weights"
            super().pull_weights(held + 1)
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
