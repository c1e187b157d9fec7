"""Policy optimisation of a language model over ranks: from samples to the update that all ranks make together.

Letters: S samples of the iteration, N learned tokens of one micro-batch, M learned tokens of the iteration.

::

    for each epoch, for each optimizer step            who computes what follows from lengths alone (algo.packing)
        for each micro-batch of this rank              divided by the totals of the step over all ranks
            scores ──▶ lm_terms + divergence from the reference ──▶ loss ──▶ gradients
        one sum over ranks: metrics and gradient norm
        clip, AdamW

The old log-probabilities are those that `infer` left, where the algorithm asks for it. Else they are the trainer's own
where its rounding is told from the engine's (`tis_cap`), else the engine's. In an iteration of one step the pass that
learns makes them; else a pass before the first step does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.engine_mismatch import importance_weights, mismatch_metrics
from rlplace.algo.lm_losses import DIVERGENCES, MEANS, RATIOS, Clip, Totals, lm_terms, token_weights
from rlplace.algo.losses import value_loss
from rlplace.algo.packing import MicroBatch, optimizer_steps, pack
from rlplace.config import Config, OptimizerConfig
from rlplace.metrics import Metrics
from rlplace.models.lora import without_factors
from rlplace.workers.refusals import diverged
from rlplace.workers.training.appraisal import Appraisal, Inferred, Scored
from rlplace.workers.training.average import MovingAverage
from rlplace.workers.training.inference import Asked, micro_batches_of, scores_of_tokens
from rlplace.workers.training.optimizer import Adam
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.samples import Batch, Numbers, SampleShare, share_of
from rlplace.workers.training.sharded_lm import ShardedLm


class Step(NamedTuple):
    """What one optimizer step was like, over all ranks; the same numbers on each of them."""

    loss: float
    entropy: float
    approx_kl: float  # of the policy that is left from the one that is reached
    clipped_low: float  # share of tokens
    clipped_high: float
    value_loss: float  # of a head on the trunk; 0 without one
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
    valued: bool  # there is a value head on the trunk

    @property
    def numbers(self) -> dict[str, float]:
        """Of the mean step, by name."""
        said = {} if self.mean is None else self.mean._asdict()
        return said if self.valued else {name: value for name, value in said.items() if name != "value_loss"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One optimizer step before anything is computed."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    tokens: int  # learned or not
    imbalance: float
    totals: Totals


class LmLearner:
    """Owns the clock of the learning rate; borrows model, optimizer and average. `learn` is a collective."""

    def __init__(
        self,
        config: Config,
        lm: ShardedLm,
        optimizer: Adam,
        ranks: Ranks,
        owner: str,
        average: MovingAverage | None = None,
    ) -> None:
        self._config, self._algorithm = config, config.algorithm
        self._lm, self._optimizer, self._ranks, self._average = lm, optimizer, ranks, average
        self._owner = owner  # in errors
        self._device = lm.device
        self._steps_made = 0
        self._clip = Clip(low=self._algorithm.clip_ratio_low, high=self._algorithm.clip_high)
        self._divergence = DIVERGENCES[self._algorithm.kl_estimator]
        self._temperature = config.text_rollout.temperature or 1.0  # greedy answers come with the model's own
        self._longest = min(self._algorithm.max_new_tokens * config.text_env.max_turns, self._algorithm.longest)

    # ── who computes what ────────────────────────────────────────────────────────────────────────────────────────────

    def shares(self, appraisal: Appraisal, iteration: int) -> list[SampleShare]:
        """What each rank needs of an iteration."""
        groups = appraisal.groups
        numbers = Numbers.of(groups)
        plan = self.plan(numbers, iteration)
        needed = (
            {i for step in plan for micro_batch in step.ranks[rank] for i in micro_batch}
            for rank in range(self._ranks.world_size)
        )
        return [share_of(groups, numbers, own, appraisal.marks, appraisal.kl_coef) for own in needed]

    def plan(self, numbers: Numbers, iteration: int) -> tuple[PlannedStep, ...]:
        """All optimizer steps of an iteration, equal on every rank; equally many in each epoch. None in the warm-up."""
        seed = self._config.runner.seed
        warm = iteration >= self._config.critic.warmup_iterations
        samples = len(numbers.lengths) if warm and any(numbers.learned) else 0
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

    # ── before the first step ────────────────────────────────────────────────────────────────────────────────────────

    def infer(self, share: SampleShare, asked: Collection[Asked]) -> Inferred:
        """What is asked of the weights as they are, of all samples; the same on every rank. A collective."""
        batch = Batch(share, self._device)
        micro_batches = micro_batches_of(share, self._ranks, self._config.actor.token_budget)

        def found(*names: str) -> list[Scored]:
            scores = scores_of_tokens(self._lm, self._ranks, batch, micro_batches, self._temperature, names)
            lengths = list(share.numbers.learned)
            return [[part.numpy() for part in score.cpu().split(lengths)] for score in scores]

        names = ("logprobs", *(["values"] if "values" in asked else []))
        old, *values = found(*names) if {"old", "values"} & set(asked) else [None]
        reference = None
        if "reference" in asked:
            with without_factors(self._lm.module):
                (reference,) = found("logprobs")
        return Inferred(old=old, reference=reference, values=values[0] if values else None)

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, share: SampleShare, iteration: int) -> LmUpdate:
        """All epochs over one iteration's samples."""
        plan = self.plan(share.numbers, iteration)
        batch = Batch(share, self._device)
        drift = _Drift(self._algorithm.tis_cap)
        old = None
        if self._algorithm.tis_cap is not None and len(plan) > 1 and not share.inferred:
            epoch = plan[: len(plan) // self._algorithm.epochs]
            micro_batches = [picks for planned in epoch for picks in planned.ranks[self._ranks.rank]]
            (old,) = scores_of_tokens(self._lm, self._ranks, batch, micro_batches, self._temperature)
        steps, lr = [], 0.0
        for number, planned in enumerate(plan):
            progress = iteration / self._config.runner.total_iterations
            lr = learning_rate(self._config.actor.optimizer, self._steps_made, progress)
            terms = self._differentiate(planned, batch, share.kl_coef, old, drift if number == 0 else None)
            step = self._over_ranks(terms)
            if not math.isfinite(sum(step)):
                raise diverged(self._owner, step._asdict(), iteration=iteration)
            self._lm.step(self._optimizer, lr, step.grad_norm, self._config.actor.optimizer.max_grad_norm)
            self._steps_made += 1
            if self._average is not None:
                self._average.update()
            steps.append(step)
        return LmUpdate(
            mean=Step(*(sum(values) / len(steps) for values in zip(*steps, strict=True))) if steps else None,
            steps=len(steps),
            lr=lr,
            tokens=sum(planned.tokens for planned in plan),
            imbalance=max((planned.imbalance for planned in plan), default=0.0),
            mismatch=drift.metrics(),
            valued=self._config.critic.on_actor,
        )

    def _differentiate(
        self, planned: PlannedStep, batch: Batch, kl_coef: float, old: Tensor | None, drift: _Drift | None
    ) -> Tensor:
        """[6] float64, this rank's share of what a Step says but the norm.

        All its micro-batches; also one without samples computes: the other ranks wait for it.
        """
        micro_batches = planned.ranks[self._ranks.rank]
        shares = torch.zeros(len(Step._fields) - 1, dtype=torch.float64, device=self._device)
        for number, picks in enumerate(micro_batches, 1):
            self._lm.reduce_gradients(last=number == len(micro_batches))
            scores = self._lm.module(batch.packed(picks), self._temperature)
            engine, lengths = batch.engine_logprobs(picks), batch.lengths(picks)
            behaviour, importance = batch.old(picks), None
            if behaviour is None and self._algorithm.tis_cap is not None:
                behaviour = scores.logprobs.detach() if old is None else batch.part_of(old, picks)
            if behaviour is None:
                behaviour = engine
            if self._algorithm.tis_cap is not None:
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
            if self._algorithm.kl_in == "loss" and kl_coef:
                loss = loss + kl_coef * (weights * self._divergence(scores.logprobs, batch.reference(picks))).sum()
            valued = loss.new_zeros(())
            if self._config.critic.on_actor:
                valued = self._value_loss(scores.values, batch, picks, planned.totals)
                loss = loss + self._algorithm.value_coef * valued
            loss.backward()
            shares += torch.cat([_number(loss), terms.shares(planned.totals)[1:], _number(valued)])
        return shares

    def _value_loss(self, values: Tensor, batch: Batch, picks: MicroBatch, totals: Totals) -> Tensor:
        """This micro-batch's part of the mean over all learned tokens of the step."""
        old, returns = batch.values_and_returns(picks)
        return value_loss(values, old, returns, self._algorithm.value_clip).sum() / max(1, totals.tokens)

    def _over_ranks(self, shares: Tensor) -> Step:
        mine = torch.cat([shares, self._lm.squared_gradient()])
        *means, squared_norm = self._ranks.sum(mine).tolist()
        return Step._make([*means, math.sqrt(squared_norm)])


def _number(value: Tensor) -> Tensor:
    """[1] float64"""
    return value.detach().double().view(1)


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


def learning_rate(config: OptimizerConfig, steps_made: int, progress: float) -> float:
    """Of the next step; `progress` is the share of iterations that are over."""
    warmth = min(1.0, (steps_made + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.lr * warmth * max(0.0, left[config.schedule])
