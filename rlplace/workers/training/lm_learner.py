"""Learning of language models over ranks, actor and critic: from samples to the update that all ranks make together.

Letters: N response tokens of one micro-batch, M response tokens of the iteration.

::

    for each epoch, for each optimizer step            which rank computes what follows from lengths alone: algo.packing
        for each micro-batch of this rank              divided by the totals of the step over all ranks
            actor: scores ──▶ lm_terms + KL from the reference ──▶ loss ──▶ gradients
            critic: values ──▶ clipped value loss ──▶ gradients
        one sum over ranks: metrics and gradient norm
        clip, AdamW

The actor's old log-probabilities are those that `infer` left, where the algorithm asks for it. Else they are the
trainer's own where `tis_cap` corrects for the engine's rounding, else the engine's. In an iteration of one step the
pass that learns makes them; else a pass before the first step does.

With `accumulate_early`, the only step of an iteration is accumulated from groups as they come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rlplace.algo.kl import (
    KL_ESTIMATORS,
    Corrected,
    Correction,
    importance_weights,
    mismatch_metrics,
)
from rlplace.algo.losses import (
    Clip,
    Totals,
    is_value_clipped,
    lm_terms,
    shares_of,
    token_weights,
    value_loss,
)
from rlplace.algo.packing import MicroBatch, Packing, SampleSizes, pack, pack_steps
from rlplace.algo.variants import TokenSamples
from rlplace.config.schema import Config
from rlplace.metrics import Metrics
from rlplace.models.causal_lm import ValuedScores
from rlplace.models.lora import without_factors
from rlplace.models.packed import Packed, TokenScores
from rlplace.stopwatch import Stopwatch
from rlplace.workers.training.optimizer import Numbers, Trainer, Update, mean_of
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.samples import (
    Batch,
    BySample,
    Groups,
    Lengths,
    SampleShard,
    Target,
)
from rlplace.workers.training.trained_model import TrainedLm
from rlplace.workers.training.variant import variant_of

# The loss of a micro-batch, and its parts of the means over the step by name, float64.
Differentiate = Callable[[MicroBatch, Totals], tuple[Tensor, dict[str, Tensor]]]


class LmLearner:
    """The steps of an actor or critic. Borrows model and trainer; what infers or learns is a collective."""

    def __init__(
        self,
        config: Config,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        again: float | None,
        token_budget: int,
    ) -> None:
        """`again`: what a prompt costs for each answer that reads it, as of `sizes_of`."""
        self._again = again
        self._config = config
        self._algorithm = config.algorithm
        self._variant = variant_of(config.algorithm)
        self._lm = lm
        self._trainer = trainer
        self._ranks = ranks
        self._token_budget = token_budget
        self._longest = min(
            self._algorithm.max_new_tokens * config.text_env.max_turns,
            self._algorithm.longest,
        )

    # ── which rank computes what ─────────────────────────────────────────────────────────────────────────────────────

    def plan(self, lengths: Lengths, iteration: int) -> tuple[Packing, ...]:
        """Pack all optimizer steps of an iteration for each copy, equal on every rank.

        Actor and critic step on the same samples.
        """
        return pack_steps(
            lengths.sizes if any(lengths.responses) else SampleSizes(()),
            epochs=self._algorithm.epochs,
            train_batch=self._algorithm.train_batch,
            seed=f"{self._config.runner.seed} {iteration}",
            ranks=self._ranks.copies,
            token_budget=self._token_budget,
        )

    def inference_plan(self, lengths: Lengths) -> Packing:
        """Pack a pass over all samples for each copy, equal on every rank."""
        return pack(lengths.sizes, self._ranks.copies, self._token_budget)

    def shards(
        self,
        groups: Groups,
        iteration: int | None = None,
        *,
        infer: bool = False,
        targets: Mapping[Target, BySample] | None = None,
        kl_coef: float = 0.0,
    ) -> list[SampleShard]:
        """Cut out what each rank needs of all groups, to infer them, to learn them in `iteration`, or both.

        `targets` are of all samples, in their order.
        """
        lengths = Lengths.of(groups, again=self._again)
        samples = [sample for group in groups for sample in group]
        passes = [self.inference_plan(lengths)] if infer else []
        passes += () if iteration is None else self.plan(lengths, iteration)
        shards: list[SampleShard] = []
        for copy in range(self._ranks.copies):
            needed = {
                i for packing in passes for picks in packing.ranks[copy] for i in picks
            }
            shard = SampleShard(
                lengths=lengths,
                own={i: samples[i] for i in needed},
                targets={
                    name: {i: values[i] for i in needed}
                    for name, values in (targets or {}).items()
                },
                kl_coef=kl_coef,
            )
            shards += [shard] * self._ranks.together
        return shards

    def _infer(
        self,
        batch: Batch,
        micro_batches: Iterable[MicroBatch],
        scores: Callable[[Packed], Sequence[Tensor]],
        rows: int,
    ) -> Tensor:
        """Return [rows, M] of what `scores` gives for the response tokens, on every rank. A collective.

        The micro-batches of all ranks, equally many, have each sample once.
        """
        watch = Stopwatch()
        found = torch.zeros(rows, batch.tokens, device=self._lm.device)
        with torch.no_grad():
            for picks in micro_batches:
                found[:, batch.places(picks)] = (
                    torch.stack(tuple(scores(batch.packed(picks)))) * self._ranks.counts
                )
                self._lap(watch, self._part("score"), batch.size(picks))
            # Each token is found by one rank, and zero on the others
            summed = self._ranks.sum(found.view(-1))
        self._lap(watch, "exchange", self._ranks.world_size)
        return summed.view(found.shape)

    def _value_loss(
        self, values: Tensor, old_values: Tensor, returns: Tensor
    ) -> Tensor:
        """All tensors are [N]."""
        if self._variant is not None and self._variant.has("value_loss"):
            return self._variant.value_loss(values, old_values, returns)
        return value_loss(values, old_values, returns, self._algorithm.value_clip)

    def _lap(self, watch: Stopwatch, part: str, size: float = 0) -> None:
        """End a lap when its work is over, which a GPU is only given: else the next that waits would have it all."""
        self._lm.settle()
        watch.lap(part, size)

    def _part(self, name: str) -> str:
        """Name a pass for a stopwatch: with several ranks, each pass exchanges weights."""
        if self._ranks.world_size > 1:
            return f"sharded_{name}"
        return name

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _learn(
        self,
        lengths: Lengths,
        plan: Sequence[Packing],
        iteration: int,
        differentiate: Differentiate,
        counted: Sequence[int] | None = None,
    ) -> Update:
        """Make the steps of `plan`. A micro-batch without samples computes too: the other ranks wait for it.

        `counted`: response tokens of each sample that are learned from; None: all.
        """
        steps: list[Numbers] = []
        lr = 0.0
        watch = Stopwatch()
        for packing in plan:
            lr = self._trainer.learning_rate(iteration)
            picked = packing.samples
            tokens = sum((counted or lengths.responses)[i] for i in picked)
            totals = Totals(samples=len(picked), tokens=tokens, longest=self._longest)
            shares: dict[str, Tensor] = {}
            for picks in packing.ranks[self._ranks.copy]:
                loss, parts = differentiate(picks, totals)
                loss.backward()
                self._lap(watch, self._part("micro_batch"), lengths.sizes.size(picks))
                shares = {
                    name: shares.get(name, 0.0) + part for name, part in parts.items()
                }
            numbers = self._trainer.sum_over_ranks(
                [*shares], torch.stack([*shares.values()]), iteration
            )
            watch.lap("exchange", self._ranks.world_size)
            if numbers is not None:
                self._trainer.step(numbers["grad_norm"], lr)
                self._lap(watch, "step")
                steps.append(numbers)
        return Update(
            mean=mean_of(steps),
            steps=len(steps),
            skipped=self._trainer.take_skipped(),
            lr=lr,
            tokens=sum(lengths.tokens) * self._algorithm.epochs if steps else 0,
            imbalance=max((packing.imbalance for packing in plan), default=0.0),
        )


# Of response tokens [N]: log-probabilities by the trainer before its first step, by the engine, what sampled them, and
# whether the correction of the engine's has cut their weight.
_Sampled = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(slots=True)
class _Accumulated:
    """What an optimizer step has so far beside this rank's gradients, divided by totals that are not the step's own."""

    samples: int = 0  # over all ranks, as are tokens
    tokens: int = 0
    responses: int = 0
    lost: float = 0.0  # imbalance, times tokens
    # Of the means, of this rank
    shares: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    sampled: list[_Sampled] = dataclasses.field(default_factory=list)


class ActorLearner(LmLearner):
    """Policy optimisation, with a value head on the trunk where `critic.on_actor` asks for it."""

    _accumulated: _Accumulated | None = None

    def __init__(
        self,
        config: Config,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        again: float | None,
    ) -> None:
        super().__init__(config, lm, trainer, ranks, again, config.actor.token_budget)
        algorithm = self._algorithm
        self._clip = Clip(
            low=algorithm.clip_ratio_low,
            high=algorithm.clip_high,
            dual=algorithm.dual_clip,
        )
        cap = algorithm.tis_cap
        self._correction = (
            None
            if cap is None
            else Correction(
                cap, algorithm.tis_level, algorithm.tis_above, algorithm.tis_floor
            )
        )
        # Greedy answers come with the model's own
        self._temperature = config.text_rollout.temperature or 1.0

    def plan(self, lengths: Lengths, iteration: int) -> tuple[Packing, ...]:
        """None in the warm-up of a critic."""
        if iteration < self._config.critic.warmup_iterations:
            return ()
        return super().plan(lengths, iteration)

    def infer(
        self, shard: SampleShard, asked: Collection[Target]
    ) -> dict[Target, BySample]:
        """Infer what is `asked` of the weights as they are, of all samples; the same on every rank. A collective."""
        batch = Batch(shard, self._lm.device)
        micro_batches = self.inference_plan(shard.lengths).ranks[self._ranks.copy]

        def found(*fields: str) -> list[BySample]:
            scores = self._token_scores(batch, micro_batches, fields).cpu()
            return [
                [part.numpy() for part in score.split(list(shard.lengths.responses))]
                for score in scores
            ]

        inferred: dict[Target, BySample] = {}
        if "values" in asked:
            inferred["old"], inferred["values"] = found("logprobs", "values")
        elif "old" in asked:
            (inferred["old"],) = found("logprobs")
        if "reference" in asked:
            with without_factors(self._lm.module):
                (inferred["reference"],) = found("logprobs")
        return inferred

    def _token_scores(
        self, batch: Batch, micro_batches: Iterable[MicroBatch], fields: Sequence[str]
    ) -> Tensor:
        """Return [fields, M] of the model's scores."""

        def scores(packed: Packed) -> list[Tensor]:
            found = self._lm.module(packed, self._temperature)
            return [getattr(found, field) for field in fields]

        return self._infer(batch, micro_batches, scores, len(fields))

    def learn(self, shard: SampleShard, iteration: int) -> Update:
        if self._algorithm.accumulate_early:
            self.accumulate(shard)
            return self._step(iteration)
        algorithm = self._algorithm
        corrects = self._correction is not None
        plan = self.plan(shard.lengths, iteration)
        batch = Batch(shard, self._lm.device)
        copy = self._ranks.copy
        old = None
        if corrects and len(plan) > 1 and "old" not in shard.targets:
            epoch = plan[: len(plan) // algorithm.epochs]
            micro_batches = [
                picks for packing in epoch for picks in packing.ranks[copy]
            ]
            old = self._token_scores(batch, micro_batches, ("logprobs",))[0]
        in_first_step = len(plan[0].ranks[copy]) if plan else 0
        sampled: list[_Sampled] = []

        def differentiate(
            picks: MicroBatch, totals: Totals
        ) -> tuple[Tensor, dict[str, Tensor]]:
            scores = self._lm.module(batch.packed(picks), self._temperature)
            trainer = scores.logprobs.detach()
            engine = batch.engine_logprobs(picks)
            if "old" in shard.targets:
                behaviour = batch.target("old", picks)
            elif corrects:
                behaviour = trainer if old is None else old[batch.places(picks)]
            else:
                behaviour = engine
            importance, cut = self._corrected(behaviour, engine, batch.lengths(picks))
            if len(sampled) < in_first_step:
                sampled.append((trainer, engine, batch.versions(picks), cut))
            return self._loss(batch, picks, totals, scores, behaviour, importance)

        update = self._learn(shard.lengths, plan, iteration, differentiate)
        if sampled:
            return dataclasses.replace(
                update, metrics=self._mismatch(sampled, iteration)
            )
        return update

    def _mismatch(self, sampled: Sequence[_Sampled], iteration: int) -> Metrics:
        """Compare engine and trainer; an iteration is learned by the policy version of its number."""
        by_trainer, by_engine, versions, cut = (
            torch.cat(parts) for parts in zip(*sampled, strict=True)
        )
        return mismatch_metrics(by_trainer, by_engine, versions == iteration, cut)

    def _corrected(
        self, behaviour: Tensor, engine: Tensor, lengths: Tensor
    ) -> Corrected | tuple[None, Tensor]:
        """Weigh tokens [N] by how much likelier the actor finds them than the engine did; None: all alike."""
        if self._correction is None:
            return None, torch.zeros_like(engine, dtype=torch.bool)
        return importance_weights(behaviour, engine, lengths, self._correction)

    def accumulate(self, shard: SampleShard) -> None:
        """Add the gradients of samples to those of the iteration's step, which `learn` makes. A collective.

        How many tokens the step has is known at its end only, so these are divided by the most there can be. Keeps the
        gradients: until `learn` or `drop`, nothing else may be computed that drops them.
        """
        lengths = shard.lengths
        held = self._accumulated = self._accumulated or _Accumulated()
        watch = Stopwatch()
        batch = Batch(shard, self._lm.device)
        packing = self.inference_plan(lengths)
        held.samples += len(lengths.tokens)
        held.tokens += sum(lengths.tokens)
        held.responses += sum(lengths.responses)
        held.lost += packing.imbalance * sum(lengths.tokens)
        for picks in packing.ranks[self._ranks.copy] if any(lengths.responses) else ():
            scores = self._lm.module(batch.packed(picks), self._temperature)
            trainer = scores.logprobs.detach()
            engine = batch.engine_logprobs(picks)
            behaviour = engine if self._correction is None else trainer
            importance, cut = self._corrected(behaviour, engine, batch.lengths(picks))
            held.sampled.append((trainer, engine, batch.versions(picks), cut))
            loss, parts = self._loss(
                batch, picks, self._most, scores, behaviour, importance
            )
            loss.backward()
            self._lap(watch, self._part("micro_batch"), batch.size(picks))
            held.shares = {
                name: held.shares.get(name, 0.0) + part for name, part in parts.items()
            }

    @property
    def _most(self) -> Totals:
        """What a step of all samples of an iteration can have at most."""
        samples = (self._algorithm.prompts or 1) * self._algorithm.samples_per_prompt
        return Totals(
            samples=samples, tokens=samples * self._longest, longest=self._longest
        )

    def _step(self, iteration: int) -> Update:
        """Make the step of all samples that were accumulated, as if they had come at once. A collective."""
        held = self._accumulated or _Accumulated()
        most = self._most
        self._accumulated = None
        if not held.responses:
            return Update(mean=None, steps=0, lr=0.0)
        by_tokens = most.tokens / held.responses
        by_loss = (
            by_tokens
            if self._algorithm.mean == "token"
            else most.samples / held.samples
        )
        watch = Stopwatch()
        with torch.no_grad():
            torch._foreach_mul_(self._lm.gradients(), by_loss)
        shares = [
            part * (by_loss if name == "loss" else by_tokens)
            for name, part in held.shares.items()
        ]
        lr = self._trainer.learning_rate(iteration)
        numbers = self._trainer.sum_over_ranks(
            [*held.shares], torch.stack(shares), iteration
        )
        watch.lap("exchange", self._ranks.world_size)
        if numbers is not None:
            self._trainer.step(numbers["grad_norm"], lr)
            self._lap(watch, "step")
        return Update(
            mean=numbers,
            steps=int(numbers is not None),
            skipped=self._trainer.take_skipped(),
            lr=lr,
            tokens=held.tokens if numbers is not None else 0,
            imbalance=held.lost / held.tokens,
            metrics=self._mismatch(held.sampled, iteration),
        )

    def drop(self) -> None:
        """Forget what was accumulated."""
        self._accumulated = None
        self._lm.drop_gathered()

    def _loss(
        self,
        batch: Batch,
        picks: MicroBatch,
        totals: Totals,
        scores: TokenScores | ValuedScores,
        old_logprobs: Tensor,
        importance: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self._algorithm
        lengths = batch.lengths(picks)
        tokens = max(1, totals.tokens)
        advantages = batch.target("advantages", picks)
        terms = lm_terms(
            logprobs=scores.logprobs,
            entropies=scores.entropies,
            old_logprobs=old_logprobs,
            advantages=advantages,
            lengths=lengths,
            clip=self._clip,
            ratio=algorithm.ratio,
            surrogate=algorithm.surrogate,
            importance=importance,
        )
        more: dict[str, Tensor] = {}
        if self._variant is not None:
            samples = TokenSamples(old_logprobs, advantages, lengths)
            if self._variant.has("policy_loss"):
                each = self._variant.policy_loss(scores.logprobs, samples)
                terms = terms._replace(
                    policy_loss=each if importance is None else importance * each
                )
            found = self._variant.metrics(scores.logprobs, samples).items()
            more = {
                name: values.sum(dtype=torch.float64) / tokens for name, values in found
            }
        weights = token_weights(algorithm.mean, lengths, totals)
        loss = terms.loss(weights, algorithm.entropy_coef)
        if algorithm.kl_in == "loss" and batch.kl_coef:
            kl = KL_ESTIMATORS[algorithm.kl_estimator](
                batch.target("reference", picks) - scores.logprobs
            )
            loss = loss + batch.kl_coef * (weights * kl).sum()
        numbers = shares_of(terms, tokens) | more
        if isinstance(scores, ValuedScores):
            returns = batch.target("returns", picks)
            before = batch.target("values", picks)
            valued = self._value_loss(scores.values, before, returns).sum() / tokens
            loss = loss + algorithm.value_coef * valued
            numbers["value_loss"] = valued.detach().double()
        del numbers["policy_loss"]
        return loss, {"loss": loss.detach().double(), **numbers}


class CriticLearner(LmLearner):
    """Brings the values of response tokens nearer to their returns."""

    def __init__(
        self,
        config: Config,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        again: float | None,
    ) -> None:
        super().__init__(config, lm, trainer, ranks, again, config.critic.token_budget)

    def values(self, shard: SampleShard) -> Tensor:
        """Infer [M] by the weights as they are, on every rank: to learn, a sample may be another rank's."""
        batch = Batch(shard, self._lm.device)
        micro_batches = self.inference_plan(shard.lengths).ranks[self._ranks.copy]
        return self._infer(
            batch, micro_batches, lambda packed: [self._lm.module(packed)], 1
        )[0]

    def learn(
        self, shard: SampleShard, old_values: Tensor, returns: Tensor, iteration: int
    ) -> Update:
        """Learn from an iteration's samples in all epochs; `old_values` and `returns` [M] are on this rank's device."""
        batch = Batch(shard, self._lm.device)
        clip = self._algorithm.value_clip
        lengths = shard.lengths
        sound = ~returns.isnan()
        counted = [
            int(part.sum()) for part in sound.cpu().split(list(lengths.responses))
        ]

        def differentiate(
            picks: MicroBatch, totals: Totals
        ) -> tuple[Tensor, dict[str, Tensor]]:
            places = batch.places(picks)
            tokens = max(1, totals.tokens)
            counts = sound[places]  # poisoned: nothing is learned from it
            values, old, wanted = (
                each[counts]
                for each in (
                    self._lm.module(batch.packed(picks)),
                    old_values[places],
                    returns[places],
                )
            )
            loss = self._value_loss(values, old, wanted).sum() / tokens
            clipped = (
                is_value_clipped(values.detach(), old, wanted, clip).sum() / tokens
            )
            # clip_share: of tokens, whose value has gone as far as it may
            return loss, {
                "value_loss": loss.detach().double(),
                "clip_share": clipped.double(),
            }

        return self._learn(
            lengths, self.plan(lengths, iteration), iteration, differentiate, counted
        )
