"""Policy optimisation of a language model over ranks: from samples to the update that all ranks make together.

Letters: S samples of the iteration, N learned tokens of one micro-batch, M learned tokens of the iteration.

::

    for each epoch, for each optimizer step            who computes what follows from lengths alone (algo.packing)
        for each micro-batch of this rank              divided by the totals of the step over all ranks
            scores ──▶ lm_terms ──▶ loss ──▶ gradients
        one sum over ranks: metrics and gradient norm
        clip, AdamW

The old log-probabilities are the trainer's own where its rounding is told from the engine's (`tis_cap`), else the
engine's. In an iteration of one step the pass that learns makes them; else a pass before the first step does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.dynamic_sampling import carries_signal
from rlplace.algo.engine_mismatch import importance_weights, mismatch_metrics
from rlplace.algo.group_advantages import ESTIMATORS
from rlplace.algo.lm_losses import MEANS, RATIOS, Clip, Totals, lm_terms, token_weights
from rlplace.algo.packing import MicroBatch, optimizer_steps, pack
from rlplace.llm_config import AdamConfig, LlmConfig
from rlplace.metrics import Metrics
from rlplace.workers.adam import Adam
from rlplace.workers.lm_samples import Batch, Groups, Numbers, SampleShare, share_of
from rlplace.workers.ranks import Ranks
from rlplace.workers.refusals import diverged
from rlplace.workers.sharded_lm import ShardedLm


class Step(NamedTuple):
    """What one optimizer step was like, over all ranks; the same numbers on each of them."""

    loss: float
    entropy: float
    approx_kl: float  # of the policy that is left from the one that is reached
    clipped_low: float  # share of tokens
    clipped_high: float
    grad_norm: float  # before clipping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmUpdate:
    """What one iteration's updates were like; but for `mismatch` the same on every rank."""

    mean: Step | None  # over the steps; None where there was nothing to learn
    steps: int
    lr: float  # of the last step
    tokens: int  # that went through the model over all ranks, prompts included, in each epoch anew
    imbalance: float  # share of the slowest step's time that was lost to waiting for its slowest rank
    mismatch: Metrics  # of trainer and engine, on this rank's tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One optimizer step before anything is computed."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    tokens: int  # learned or not
    imbalance: float
    totals: Totals


class LmLearner:
    """Owns the clock of the learning rate; borrows model and optimizer. `learn` is a collective."""

    def __init__(self, config: LlmConfig, lm: ShardedLm, optimizer: Adam, ranks: Ranks, owner: str) -> None:
        self._config, self._algorithm = config, config.algorithm
        self._lm, self._optimizer, self._ranks = lm, optimizer, ranks
        self._owner = owner  # in errors
        self._device = lm.device
        self._steps_made = 0
        self._clip = Clip(low=self._algorithm.clip_ratio_low, high=self._algorithm.clip_high)
        self._temperature = config.rollout.temperature or 1.0  # greedy answers come with the model's own
        self._longest = min(self._algorithm.max_new_tokens * config.env.max_turns, self._algorithm.longest)

    # ── who computes what ────────────────────────────────────────────────────────────────────────────────────────────

    def shares(self, groups: Groups, iteration: int) -> list[SampleShare]:
        """What each rank needs of all groups of an iteration."""
        if self._algorithm.mixed_only:
            groups = [group for group in groups if carries_signal([s.reward for s in group])]
        numbers = Numbers.of(groups, ESTIMATORS[self._algorithm.name])
        plan = self.plan(numbers, iteration)
        return [
            share_of(groups, numbers, {i for step in plan for micro_batch in step.ranks[rank] for i in micro_batch})
            for rank in range(self._ranks.world_size)
        ]

    def plan(self, numbers: Numbers, iteration: int) -> tuple[PlannedStep, ...]:
        """All optimizer steps of an iteration, equal on every rank; equally many in each epoch."""
        seed = self._config.runner.seed
        samples = len(numbers.lengths) if any(numbers.learned) else 0
        return tuple(
            self._planned(picks, numbers)
            for epoch in range(self._algorithm.epochs)
            for picks in optimizer_steps(samples, self._algorithm.train_batch, f"{seed} {iteration} {epoch}")
        )

    def _planned(self, picks: Sequence[int], numbers: Numbers) -> PlannedStep:
        lengths = [numbers.lengths[i] for i in picks]
        packing = pack(lengths, self._ranks.world_size, self._config.actor.token_budget)
        return PlannedStep(
            ranks=tuple(tuple(tuple(picks[i] for i in micro) for micro in share) for share in packing.ranks),
            tokens=sum(lengths),
            imbalance=packing.imbalance,
            totals=Totals(samples=len(picks), tokens=sum(numbers.learned[i] for i in picks), longest=self._longest),
        )

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, share: SampleShare, iteration: int) -> LmUpdate:
        """All epochs over one iteration's samples."""
        plan = self.plan(share.numbers, iteration)
        batch = Batch(share, self._device)
        drift = _Drift(self._algorithm.tis_cap)
        old = None
        if self._algorithm.tis_cap is not None and len(plan) > 1:
            old = self._old_logprobs(plan[: len(plan) // self._algorithm.epochs], batch)
        steps, lr = [], 0.0
        for number, planned in enumerate(plan):
            progress = iteration / self._config.runner.total_iterations
            lr = learning_rate(self._config.actor.adam, self._steps_made, progress)
            step = self._over_ranks(self._differentiate(planned, batch, old, drift if number == 0 else None))
            if not math.isfinite(sum(step)):
                raise diverged(self._owner, step._asdict(), iteration=iteration)
            self._lm.step(self._optimizer, lr, step.grad_norm, self._config.actor.adam.max_grad_norm)
            self._steps_made += 1
            steps.append(step)
        return LmUpdate(
            mean=Step(*(sum(values) / len(steps) for values in zip(*steps, strict=True))) if steps else None,
            steps=len(steps),
            lr=lr,
            tokens=sum(planned.tokens for planned in plan),
            imbalance=max((planned.imbalance for planned in plan), default=0.0),
            mismatch=drift.metrics(),
        )

    def _differentiate(self, planned: PlannedStep, batch: Batch, old: Tensor | None, drift: _Drift | None) -> Tensor:
        """[5] float64, this rank's share of what a Step says but the norm.

        All its micro-batches; also one without samples computes: the other ranks wait for it.
        """
        micro_batches = planned.ranks[self._ranks.rank]
        shares = torch.zeros(len(Step._fields) - 1, dtype=torch.float64, device=self._device)
        for number, picks in enumerate(micro_batches, 1):
            self._lm.reduce_gradients(last=number == len(micro_batches))
            scores = self._lm.module(batch.packed(picks), self._temperature)
            engine, lengths = batch.engine_logprobs(picks), batch.lengths(picks)
            behaviour, importance = engine, None
            if self._algorithm.tis_cap is not None:
                behaviour = scores.logprobs.detach() if old is None else batch.part_of(old, picks)
                importance = importance_weights(behaviour, engine, self._algorithm.tis_cap)
            if drift is not None:
                drift.see(scores.logprobs, engine)
            terms = lm_terms(
                logprobs=scores.logprobs,
                entropies=scores.entropies,
                old_logprobs=behaviour,
                advantages=batch.advantages(picks),
                lengths=lengths,
                clip=self._clip,
                ratio=RATIOS[self._algorithm.ratio],
                importance=importance,
            )
            weights = token_weights(MEANS[self._algorithm.mean], lengths, planned.totals)
            loss = terms.loss(weights, self._algorithm.entropy_coef)
            loss.backward()
            shares += torch.cat([loss.detach().double().view(1), terms.shares(planned.totals)[1:]])
        return shares

    @torch.no_grad()
    def _old_logprobs(self, epoch: Sequence[PlannedStep], batch: Batch) -> Tensor:
        """[M] by the weights as they are, on every rank: in another epoch a sample may be another rank's."""
        found = torch.zeros(batch.tokens, device=self._device)
        for planned in epoch:
            for picks in planned.ranks[self._ranks.rank]:
                batch.put(found, picks, self._lm.module(batch.packed(picks), self._temperature).logprobs)
        return self._ranks.sum(found)  # each token is found by one rank, and zero on the others

    def _over_ranks(self, shares: Tensor) -> Step:
        mine = torch.cat([shares, self._lm.squared_gradient()])
        *means, squared_norm = self._ranks.sum(mine).tolist()
        return Step._make([*means, math.sqrt(squared_norm)])


class _Drift:
    """Collects what trainer and engine say of the same tokens under the same weights."""

    def __init__(self, cap: float | None) -> None:
        self._cap = cap
        self._trainer: list[Tensor] = []
        self._engine: list[Tensor] = []

    def see(self, trainer: Tensor, engine: Tensor) -> None:
        self._trainer.append(trainer.detach())
        self._engine.append(engine)

    def metrics(self) -> Metrics:
        return mismatch_metrics(torch.cat(self._trainer), torch.cat(self._engine), self._cap) if self._trainer else {}


def learning_rate(config: AdamConfig, steps_made: int, progress: float) -> float:
    """Of the next step; `progress` is the share of iterations that are over."""
    warmth = min(1.0, (steps_made + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * warmth * max(0.0, left[config.schedule])
