"""The rollout worker of language models: pulls weights, then continues what it is asked to until the iteration ends.

::

    requests ──▶ take while there is room ──▶ engine.step() ──▶ completions, each as soon as it has ended
                          ▲                        │
                          └── newer weights? load ─┘   nobody waits for a batch

Where the actor learns while answers are under way, what is left of an answer is sampled by newer weights than what it
began with (a partial rollout: Kimi k1.5, arXiv:2501.12599; AReaL, arXiv:2505.24298). Its tokens say which.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.tokens import Completion, Request
from rlplace.workers.llm_job import COMPLETIONS, REQUESTS, EndOfIteration, LlmJob
from rlplace.workers.refusals import logprob_not_finite
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, cancelled, out_of_step

if TYPE_CHECKING:
    from rlplace.workers.engines.contract import TextEngine
    from rlplace.workers.engines.weights import EngineWeights


@dataclasses.dataclass(slots=True)
class _Tally:
    """What one iteration was made of, so far."""

    answers: int = 0
    tokens: int = 0  # generated
    prompt_tokens: int = 0  # once per answer
    steps: int = 0
    in_flight: int = 0  # summed over steps
    wait_s: float = 0.0  # with nothing to do
    policy_s: float = 0.0
    put_s: float = 0.0
    updates: int = 0  # of the weights, with answers under way
    update_s: float = 0.0

    def metrics(self, *, seconds: float, cached_tokens: int) -> Metrics:
        return {
            "rollout/answers": Metric(self.answers, "sum"),
            "rollout/tokens": Metric(self.tokens, "sum"),
            "rollout/tokens_per_s": Metric(self.tokens / seconds, "sum"),
            "rollout/batch": Metric(self.in_flight / max(1, self.steps), "mean", self.steps),
            "rollout/prompt_cached": Metric(cached_tokens / max(1, self.prompt_tokens), "mean", self.prompt_tokens),
            "rollout/policy_s": Metric(self.policy_s, "max"),
            "rollout/wait_s": Metric(self.wait_s, "max"),
            "rollout/put_s": Metric(self.put_s, "max"),
            **self._refreshed(),
        }

    def _refreshed(self) -> Metrics:
        if not self.updates:
            return {}
        return {"rollout/updates": Metric(self.updates, "max"), "rollout/update_s": Metric(self.update_s, "max")}


class TextRolloutWorker(Worker):
    """Owns an engine. Ranks share one queue of requests: whoever has room takes the next.

    No rank has more in flight than its even share of an iteration's answers, so that one with a large cache does not
    take everything while others idle.
    """

    config: LlmJob

    def __init__(self, config: LlmJob, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._engine: TextEngine | None = None
        self._weights: EngineWeights | None = None
        self._share = -(-config.prompts * config.config.algorithm.samples_per_prompt // config.rollout_ranks)
        self._askers: dict[tuple[int, int, int], int] = {}  # group, sample, turn -> env rank
        self._ahead = -1  # last version that was taken while generating, before it was asked for

    def setup(self) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.workers.engines.build import build_engine
        from rlplace.workers.engines.weights import EngineWeights

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        self._engine = build_engine(self.config, self.context)
        self._weights = EngineWeights(self.config, self.context, self._engine)

    @property
    def engine(self) -> TextEngine:
        assert self._engine is not None, "setup comes first"
        return self._engine

    def move(self, to: Residency) -> MoveReport:
        began = time.perf_counter()
        held = self.engine.move(to)
        return MoveReport(
            residency=to,
            accelerator_bytes=held,
            host_bytes=self.engine.host_bytes,
            seconds=time.perf_counter() - began,
        )

    def pull_weights(self, version: int) -> Metrics:
        """Takes the weights the actor pushes as `version`; blocks until they are here, verified and loaded.

        Those that were pushed before and not taken come first; nothing happens where `version` was taken while
        generating. Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        metrics: Metrics = {}
        if version > self._ahead:
            held = self.engine.version
            for due in range(version if held is None else min(held + 1, version), version + 1):
                metrics = self._weights_of.pull(due)
        return metrics

    @property
    def _weights_of(self) -> EngineWeights:
        assert self._weights is not None, "setup comes first"
        return self._weights

    def _refresh(self, tally: _Tally) -> None:
        """Takes every version that the actor has begun to push; answers under way go on with it."""
        began = time.perf_counter()
        while self._weights_of.announced():
            held = self.engine.version
            assert held is not None, "nothing is generated without weights"
            self._weights_of.pull(held + 1)
            self._ahead = held + 1
            tally.updates += 1
        tally.update_s += time.perf_counter() - began

    def generate(self, iteration: int) -> Metrics:
        """Answers until this rank is told that nothing more will be asked in this iteration."""
        verified = self._weights_of.compare()
        began, cached = time.perf_counter(), self.engine.cached_tokens
        tally = _Tally()
        while self._take(iteration, tally):
            self._step(tally)
        while self.engine.in_flight:  # nothing, where the end is said when all have their answers
            self._step(tally)
        seconds = time.perf_counter() - began
        return {**tally.metrics(seconds=seconds, cached_tokens=self.engine.cached_tokens - cached), **verified}

    def _take(self, iteration: int, tally: _Tally) -> bool:
        """Begins what has arrived, as far as there is room; waits when there is nothing else to do.

        False when nothing more will be asked in this iteration.
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
                tally.wait_s += time.perf_counter() - began
            if item.iteration != iteration:
                raise out_of_step(
                    self.context.owner,
                    "a request is of another iteration",
                    got=f"iteration {item.iteration}",
                    expected=f"iteration {iteration}",
                )
            if isinstance(item, EndOfIteration):
                return False
            self._begin(item, tally)
        return True

    def _begin(self, request: Request, tally: _Tally) -> None:
        self.engine.submit(request)
        for sample in range(request.first_sample, request.first_sample + request.samples):
            self._askers[request.group, sample, request.turn] = request.env_rank
        tally.prompt_tokens += request.samples * len(request.tokens)

    def _step(self, tally: _Tally) -> None:
        self._refresh(tally)
        tally.steps += 1
        tally.in_flight += self.engine.in_flight
        began = time.perf_counter()
        finished = self.engine.step()
        stepped = time.perf_counter()
        for completion in finished:
            self._answer(completion)
            tally.tokens += len(completion.tokens)
        tally.answers += len(finished)
        tally.policy_s += stepped - began
        tally.put_s += time.perf_counter() - stepped

    def _answer(self, completion: Completion) -> None:
        if not np.isfinite(completion.logprobs).all():
            raise logprob_not_finite(self.context.owner, completion)
        asker = self._askers.pop((completion.group, completion.sample, completion.turn))
        self.context.channels[COMPLETIONS].put(completion, key=str(asker))

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """What the engine's weights say of `tokens`, from the second on: to compare with the actor's."""
        return self.engine.logprobs(tokens)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
        if self._engine is not None:
            self._engine.close()
