"""The critic's part of PPO over ranks: values of all learned tokens, then the steps that bring them to the returns.

Letters: S samples of the iteration, M their learned tokens, N of one micro-batch.

::

    infer    micro-batches of this rank ──▶ values ──▶ one sum over ranks ──▶ values of all tokens, on every rank
    learn    for each optimizer step of the actor's: the same samples
                 for each micro-batch of this rank: clipped value loss ──▶ gradients
                 one sum over ranks: metrics and gradient norm; clip, AdamW
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from rlplace.algo.losses import is_value_clipped, value_loss
from rlplace.algo.packing import Packing, pack, pack_steps
from rlplace.config import Config
from rlplace.workers.refusals import diverged
from rlplace.workers.training.lm_learner import learning_rate
from rlplace.workers.training.optimizer import Adam
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.samples import Batch, Groups, Numbers, SampleShare, share_of
from rlplace.workers.training.sharded_lm import ShardedLm


class Step(NamedTuple):
    """What one optimizer step was like, over all ranks; the same numbers on each of them."""

    value_loss: float
    clip_share: float  # of tokens, whose value has gone as far as it may
    grad_norm: float  # before clipping


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticUpdate:
    """What one iteration's updates were like; the same on every rank."""

    mean: Step | None  # over the steps; None where there was nothing to learn
    steps: int
    lr: float  # of the last step
    tokens: int  # that went through the model over all ranks, prompts included, in each epoch anew
    imbalance: float  # share of the slowest step's time that was lost to waiting for its slowest rank


class LmCriticLearner:
    """Owns the clock of the learning rate; borrows model and optimizer. `values` and `learn` are collectives."""

    def __init__(self, config: Config, lm: ShardedLm, optimizer: Adam, ranks: Ranks, owner: str) -> None:
        self._config, self._critic, self._algorithm = config, config.critic, config.algorithm
        self._lm, self._optimizer, self._ranks = lm, optimizer, ranks
        self._owner = owner  # in errors
        self._steps_made = 0

    # ── who computes what ────────────────────────────────────────────────────────────────────────────────────────────

    def shares(self, groups: Groups, iteration: int) -> list[SampleShare]:
        """What each rank needs of all groups of an iteration, to infer and to learn."""
        numbers = Numbers.of(groups)
        passes = (self._inference(numbers), *self.plan(numbers, iteration))
        return [
            share_of(groups, numbers, {i for packing in passes for picks in packing.ranks[rank] for i in picks})
            for rank in range(self._ranks.world_size)
        ]

    def _inference(self, numbers: Numbers) -> Packing:
        return pack(numbers.lengths, self._ranks.world_size, self._critic.token_budget)

    def plan(self, numbers: Numbers, iteration: int) -> tuple[Packing, ...]:
        """All optimizer steps of an iteration, equal on every rank: of the same samples as the actor's."""
        return pack_steps(
            numbers.lengths if any(numbers.learned) else (),
            epochs=self._algorithm.epochs,
            train_batch=self._algorithm.train_batch,
            seed=f"{self._config.runner.seed} {iteration}",
            ranks=self._ranks.world_size,
            token_budget=self._critic.token_budget,
        )

    # ── inferring and learning ───────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def values(self, share: SampleShare) -> Tensor:
        """[M] by the weights as they are, on every rank: to learn, a sample may be another rank's."""
        batch = Batch(share, self._lm.device)
        found = torch.zeros(batch.tokens, device=self._lm.device)
        for picks in self._inference(share.numbers).ranks[self._ranks.rank]:
            batch.put(found, picks, self._lm.module(batch.packed(picks)))
        return self._ranks.sum(found)  # each token is found by one rank, and zero on the others

    def learn(self, share: SampleShare, old_values: Tensor, returns: Tensor, iteration: int) -> CriticUpdate:
        """All epochs over one iteration's samples; `old_values` and `returns` [M] are on this rank's device."""
        plan = self.plan(share.numbers, iteration)
        batch = Batch(share, self._lm.device)
        steps, lr, key = [], 0.0, "critic.optimizer.lr"
        for planned in plan:
            progress = iteration / self._config.runner.total_iterations
            lr = learning_rate(self._critic.optimizer, self._steps_made, progress)
            tokens = sum(share.numbers.learned[i] for i in planned.samples)
            step = self._over_ranks(self._differentiate(planned, batch, old_values, returns, tokens))
            if not math.isfinite(sum(step)):
                raise diverged(self._owner, step._asdict(), iteration=iteration, rate=key)
            self._lm.step(self._optimizer, lr, step.grad_norm, self._critic.optimizer.max_grad_norm)
            self._steps_made += 1
            steps.append(step)
        return CriticUpdate(
            mean=Step(*(sum(values) / len(steps) for values in zip(*steps, strict=True))) if steps else None,
            steps=len(steps),
            lr=lr,
            tokens=sum(share.numbers.lengths) * self._algorithm.epochs if steps else 0,
            imbalance=max((planned.imbalance for planned in plan), default=0.0),
        )

    def _differentiate(
        self, planned: Packing, batch: Batch, old_values: Tensor, returns: Tensor, tokens: int
    ) -> Tensor:
        """[2] float64, this rank's share of what a Step says but the norm: means over the `tokens` learned in the step.

        All its micro-batches; also one without samples computes: the other ranks wait for it.
        """
        micro_batches, tokens = planned.ranks[self._ranks.rank], max(1, tokens)
        shares = torch.zeros(len(Step._fields) - 1, dtype=torch.float64, device=self._lm.device)
        clip = self._algorithm.value_clip
        for number, picks in enumerate(micro_batches, 1):
            self._lm.reduce_gradients(last=number == len(micro_batches))
            values = self._lm.module(batch.packed(picks))
            old, wanted = batch.part_of(old_values, picks), batch.part_of(returns, picks)
            loss = value_loss(values, old, wanted, clip).sum() / tokens
            loss.backward()
            clipped = is_value_clipped(values.detach(), old, wanted, clip).sum() / tokens
            shares += torch.stack([loss.detach(), clipped]).double()
        return shares

    def _over_ranks(self, shares: Tensor) -> Step:
        mine = torch.cat([shares, self._lm.squared_gradient()])
        *means, squared_norm = self._ranks.sum(mine).tolist()
        return Step._make([*means, math.sqrt(squared_norm)])
