"""The rollout worker of language models: pulls weights, then continues token sequences until the iteration ends.

::

    requests ──▶ take while there is room ──▶ engine.step() ──▶ completions, each as soon as it has finished
                          ▲                        │
                          └── newer weights? load ─┘   no answer waits for a batch

Where the actor learns while answers are in flight, the rest of an answer is sampled by newer weights than its beginning
(a partial rollout: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298). Each token carries its version.
"""

from __future__ import annotations

import time

import numpy as np

from rlplace.errors import ChannelEmpty, DivergedError
from rlplace.metrics import Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Completion
from rlplace.workers.arguments import COMPLETIONS, REQUESTS, EndOfIteration, WorkerArguments
from rlplace.workers.engines.contract import EngineSettings, TextEngine
from rlplace.workers.roles.rollout import RolloutWorker
from rlplace.workers.roles.stopwatch import Stopwatch
from rlplace.workers.worker import WorkerContext, cancelled, out_of_step


class _Counts:
    """Measurements of one iteration so far."""

    def __init__(self, cached_tokens: int) -> None:
        self.began, self.watch = time.perf_counter(), Stopwatch("policy", "wait", "put")
        self.cached_before = cached_tokens
        self.answers = self.tokens = 0  # generated
        self.prompt_tokens = 0  # once per answer
        self.steps = self.in_flight = 0  # the latter summed over steps
        self.updates = 0  # of the weights, with answers in flight

    def metrics(self, cached_tokens: int) -> Metrics:
        cached, seconds = cached_tokens - self.cached_before, time.perf_counter() - self.began
        return {
            "rollout/answers": Metric(self.answers, "sum"),
            "rollout/tokens": Metric(self.tokens, "sum"),
            "rollout/tokens_per_s": Metric(self.tokens / seconds, "sum"),
            "rollout/batch": Metric(self.in_flight / max(1, self.steps), "mean", self.steps),
            "rollout/prompt_cached": Metric(cached / max(1, self.prompt_tokens), "mean", self.prompt_tokens),
            **({"rollout/updates": Metric(self.updates, "max")} if self.updates else {}),
            **self.watch.metrics("rollout"),
        }


class TextRolloutWorker(RolloutWorker):
    """Ranks share one queue of requests: any rank with room takes the next.

    No rank has more in flight than its even share of an iteration's answers, so that a rank with a large cache does not
    take everything while others idle.
    """

    engine: TextEngine

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._share = -(-config.prompts * config.config.algorithm.samples_per_prompt // config.ranks["rollout"])
        self._ahead = -1  # last version that was pulled while generating, before it was asked for

    def setup(self) -> None:
        from rlplace.workers.engines.sync_probe import SyncProbe, probe_tokens, tolerance

        self._open(self._engine())
        limit = tolerance(self.config.config)
        self._probe = SyncProbe(self.engine, probe_tokens(self.config), limit, self.context.owner)

    def _engine(self) -> TextEngine:
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
        if settings.rollout.engine == "transformers":
            from rlplace.workers.engines.transformers import TransformersEngine

            return TransformersEngine(settings, device=context.device, owner=context.owner)
        from rlplace.workers.engines.vllm import VllmEngine

        return VllmEngine(settings, device=context.device, owner=context.owner)

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
        verified, counts = self._probe.compare(), _Counts(self.engine.cached_tokens)
        while self._take(iteration, counts):
            self._step(counts)
        while self.engine.in_flight:  # none where the end is put after the last answer was taken
            self._step(counts)
        return {**counts.metrics(self.engine.cached_tokens), **verified}

    def _take(self, iteration: int, counts: _Counts) -> bool:
        """Begin requests that have arrived while there is room; wait for one when nothing is in flight.

        Return False at the end of the iteration.
        """
        if self.context.cancelled.is_set():
            raise cancelled(self.context.owner, "generate")
        requests = self.context.channels[REQUESTS]
        while self.engine.room and self.engine.in_flight < self._share:
            try:
                item = requests.get_nowait() if self.engine.in_flight else requests.get()
            except ChannelEmpty:
                break
            if not self.engine.in_flight:
                counts.watch.lap("wait")
            if item.iteration != iteration:
                got, expected = f"iteration {item.iteration}", f"iteration {iteration}"
                raise out_of_step(self.context.owner, "a request is of another iteration", got=got, expected=expected)
            if isinstance(item, EndOfIteration):
                return False
            self.engine.submit(item)
            counts.prompt_tokens += item.samples * len(item.tokens)
        return True

    def _step(self, counts: _Counts) -> None:
        while self._receiver.announced():  # the actor has begun to push it; answers in flight continue with it
            held = self.engine.version
            assert held is not None, "nothing is generated without weights"
            super().pull_weights(held + 1)
            self._ahead = held + 1
            counts.updates += 1
            counts.watch.lap("update")
        counts.steps += 1
        counts.in_flight += self.engine.in_flight
        finished = self.engine.step()
        counts.watch.lap("policy")
        for completion in finished:
            if not np.isfinite(completion.logprobs).all():
                raise _not_finite(self.context.owner, completion)
            self.context.channels[COMPLETIONS].put(completion, key=str(completion.env_rank))
            counts.tokens += len(completion.tokens)
        counts.answers += len(finished)
        counts.watch.lap("put")


def _not_finite(owner: str, completion: Completion) -> DivergedError:
    what, versions = "a token's log-probability is not finite", ", ".join(map(str, np.unique(completion.versions)))
    why = f"the weights of version {versions} are not finite, or their logits overflow in rollout.dtype"
    got = f"group {completion.group}, sample {completion.sample}, turn {completion.turn}"
    fix = "actor.optimizer.lr: <smaller>, or rollout.dtype: fp32"
    return DivergedError.about("logprob-not-finite", owner, what, got=got, why=why, fix=fix)
