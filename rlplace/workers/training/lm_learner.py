"""Learning of language models over ranks, for actor and critic: from samples to an update that is equal on all ranks.

Letters: N response tokens of one micro-batch, M response tokens of the iteration.

::

    for each epoch, for each optimizer step            algo.packing assigns samples to ranks, from lengths alone
        for each micro-batch of this rank              losses are divided by the totals of the step over all ranks
            actor: scores ──▶ lm_terms + KL from the reference ──▶ loss ──▶ gradients
            critic: values ──▶ clipped value loss ──▶ gradients
        one sum over ranks: metrics and gradient norm
        clip, AdamW

The actor's old log-probabilities come from one of three places. If the algorithm asks for it, `infer` has computed
them. Otherwise, if `tis_cap` corrects for the rounding of the inference engine, the trainer computes them: in the
learning pass itself if the iteration has one step, else in a pass before the first step. Otherwise they are the
engine's.

With `accumulate_early`, the gradients of the iteration's only step are accumulated group by group, as groups arrive.
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
from rlplace.codes import problem
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.metrics import MISMATCH, Metric, Metrics
from rlplace.models.causal_lm import ValuedScores
from rlplace.models.lora import without_factors
from rlplace.models.packed import Packed, TokenScores
from rlplace.models.routers import load_metrics
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
    TokenArray,
)
from rlplace.workers.training.trained_model import TrainedLm
from rlplace.workers.training.variant import variant_of

# Mean difference of log-probabilities in engine and trainer that rounding in 16 or 8 bits does not reach
_MOST_APART = 0.2
# From a micro-batch and the totals of its step to its loss, and its partial sums of the step's
# means by name, float64
Differentiate = Callable[[MicroBatch, Totals], tuple[Tensor, dict[str, Tensor]]]


class LmLearner:
    """Base class of the learners of language models: it assigns samples to ranks and makes the optimizer steps.

    It uses the model and the trainer, but does not own them. Its inference and learning methods are collectives.
    """

    # Tokens of each expert of a mixture of experts [R, E] in the learning passes of this rank
    _expert_counts: Tensor | None = None

    def __init__(
        self,
        config: LanguageModelJobConfig,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        shared_prefix_cost: float | None,
        token_budget: int,
    ) -> None:
        """Prepare the learner.

        `shared_prefix_cost`: cost for each sample of a prompt token that is computed once for the whole group, relative
        to a token of the sample itself; None: each sample computes its own prompt. `token_budget`: the most tokens of
        one micro-batch.
        """
        self._shared_prefix_cost = shared_prefix_cost
        self._config = config
        self._algorithm = config.algorithm
        self._variant = variant_of(config.algorithm)
        self._lm = lm
        self._trainer = trainer
        self._ranks = ranks
        self._token_budget = token_budget
        self._longest = min(
            self._algorithm.max_new_tokens * config.env.max_turns,
            self._algorithm.longest,
        )

    # ── which rank computes what ─────────────────────────────────────────────────────────────────────────────────────

    def plan(self, lengths: Lengths, iteration: int) -> tuple[Packing, ...]:
        """Return for each optimizer step of `iteration` which replica computes which samples. The result is equal on
        every rank.

        `lengths`: lengths of all samples. Actor and critic step on the same samples. The result is empty if the samples
        have no response tokens, because there is nothing to learn.
        """
        has_responses = any(lengths.responses)
        return pack_steps(
            lengths.sizes if has_responses else SampleSizes(()),
            epochs=self._algorithm.epochs,
            train_batch=self._algorithm.train_batch,
            seed=f"{self._config.runner.seed} {iteration}",
            ranks=self._ranks.replicas,
            token_budget=self._token_budget,
        )

    def inference_plan(self, lengths: Lengths) -> Packing:
        """Return which replica computes which samples in one forward pass over all samples. The result is equal on
        every rank.

        `lengths`: lengths of all samples.
        """
        return pack(lengths.sizes, self._ranks.replicas, self._token_budget)

    def shards(
        self,
        groups: Groups,
        iteration: int | None = None,
        *,
        infer: bool = False,
        targets: Mapping[Target, BySample] | None = None,
        kl_coef: float = 0.0,
    ) -> list[SampleShard]:
        """Return for each rank the samples and targets that it needs.

        `iteration`: include what the learning passes of this iteration need; None: no learning passes. `infer`: include
        what a forward pass over all samples needs. `targets`: target -> one array per sample, in the order of `groups`.
        `kl_coef`: weight of the KL from the reference in the loss.
        """
        lengths = Lengths.of(groups, shared_prefix_cost=self._shared_prefix_cost)
        samples = [sample for group in groups for sample in group]
        # All passes over samples that the shard must serve
        passes: list[Packing] = []
        if infer:
            passes.append(self.inference_plan(lengths))
        if iteration is not None:
            passes += self.plan(lengths, iteration)
        shards: list[SampleShard] = []
        for replica in range(self._ranks.replicas):
            needed: set[int] = set()
            for packing in passes:
                for picks in packing.ranks[replica]:
                    needed.update(picks)
            needed_targets: dict[Target, dict[int, TokenArray]] = {}
            for name, values in (targets or {}).items():
                needed_targets[name] = {i: values[i] for i in needed}
            shard = SampleShard(
                lengths=lengths,
                samples={i: samples[i] for i in needed},
                targets=needed_targets,
                kl_coef=kl_coef,
            )
            # The ranks of one replica compute the same samples
            shards += [shard] * self._ranks.replica_size
        return shards

    def _infer(
        self,
        batch: Batch,
        micro_batches: Iterable[MicroBatch],
        scores: Callable[[Packed], Sequence[Tensor]],
        rows: int,
        *,
        replays: bool = True,
    ) -> Tensor:
        """Return the outputs of the model for all M response tokens of all ranks, [rows, M]. Every rank gets all. A
        collective.

        `micro_batches`: micro-batches of this rank. Over all replicas, each sample is in one micro-batch, and each
        replica has the same number of micro-batches. `scores`: runs the model on a packed micro-batch, and returns
        `rows` tensors, each with one number per response token of the micro-batch. `replays`: let routers take the
        experts that the samples have.
        """
        watch = Stopwatch()
        # Each token is filled by one primary rank and stays zero elsewhere, so a sum assembles all tokens
        found = torch.zeros(rows, batch.tokens, device=self._lm.device)
        with torch.no_grad():
            for picks in micro_batches:
                packed = batch.packed(picks, replays=replays)
                scored = torch.stack(tuple(scores(packed)))
                if self._ranks.is_primary:
                    found[:, batch.places(picks)] = scored
                self._lap(watch, self._part("score"), batch.size(picks))
            summed = self._ranks.sum(found.view(-1))
        self._lap(watch, "exchange", self._ranks.world_size)
        return summed.view(found.shape)

    def _value_loss(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
    ) -> Tensor:
        """Return the loss of the value of each of N tokens, [N].

        `values`: values by the present weights. `old_values`: values before the update, to which clipping refers.
        `returns`: the numbers to which the values are fitted. All arguments are [N].
        """
        if self._variant is not None and self._variant.has("value_loss"):
            return self._variant.value_loss(values, old_values, returns)
        return value_loss(values, old_values, returns, self._algorithm.value_clip)

    def _lap(
        self,
        watch: Stopwatch,
        part: str,
        size: float = 0,
    ) -> None:
        """Wait until the accelerator has finished its queued work, then add the time since the last lap (measured
        interval) of `watch` to its part `part`.

        Without the wait, the time of the queued work would be counted for a later part.

        `size`: amount of work in this interval, such as the number of tokens.
        """
        self._lm.synchronize()
        watch.lap(part, size)

    def _part(self, name: str) -> str:
        """Return the name under which a stopwatch counts a pass: `name` for a single rank, `sharded_<name>` for several
        ranks.

        Passes on several ranks also exchange weights, so their times are kept apart.
        """
        if self._ranks.world_size > 1:
            return f"sharded_{name}"
        return name

    # ── mixtures of experts ──────────────────────────────────────────────────────────────────────────────────────────

    def _watch_experts(self) -> None:
        """Let passes of the actor's model count the tokens of each expert, and compute the auxiliary loss if it has a
        weight.
        """
        routers = self._lm.module.routers
        routers.counts = True
        routers.balances = self._config.actor.router_loss_coef > 0

    def _with_balance(
        self,
        loss: Tensor,
        numbers: dict[str, Tensor],
        lengths: Tensor,
        totals: Totals,
    ) -> Tensor:
        """Return the loss of the last pass with the auxiliary loss of its routers, and count the tokens of its experts.

        The auxiliary loss of a micro-batch has the weight that its samples have in the step, so it is a mean over
        micro-batches, as in other trainers: experts are balanced within a micro-batch.

        `numbers`: what the micro-batch adds to each metric; the auxiliary loss is added. `lengths`: response tokens of
        each of its samples. `totals`: numbers of samples and tokens of the step over all ranks.
        """
        balance = self._lm.module.routers.balance()
        # The pass of a micro-batch without samples has one filler token
        if balance is None:
            return loss
        if len(lengths):
            if self._expert_counts is None:
                self._expert_counts = torch.zeros_like(balance.counts)
            self._expert_counts += balance.counts
        if balance.loss is None:
            return loss
        by_tokens = float(lengths.sum()) / max(1, totals.tokens)
        share = by_tokens
        if self._algorithm.mean != "token":
            share = len(lengths) / max(1, totals.samples)
        numbers["router_loss"] = (by_tokens * balance.loss.detach()).double()
        return loss + self._config.actor.router_loss_coef * share * balance.loss

    def _take_load(self) -> Metrics:
        """Return metrics of how tokens are spread over experts since the last call; {} without routers. A collective.

        Each rank counts its own tokens, and all of them return the metrics of all tokens.
        """
        routers = self._lm.module.routers
        if not len(routers):
            return {}
        counts = self._expert_counts
        self._expert_counts = None
        if counts is None:
            counts = torch.zeros(
                (len(routers), routers.experts),
                dtype=torch.int64,
                device=self._lm.device,
            )
        summed = self._ranks.sum(counts.double().view(-1)).view(counts.shape)
        if not summed.sum():
            return {}
        found = load_metrics(summed)
        return {f"actor/{name}": Metric(value) for name, value in found.items()}

    # ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _learn(
        self,
        lengths: Lengths,
        plan: Sequence[Packing],
        iteration: int,
        differentiate: Differentiate,
        counted: Sequence[int] | None = None,
    ) -> Update:
        """Make the optimizer steps of `plan`, and return their result. A collective.

        `lengths`: lengths of all samples. `differentiate`: runs the model on a micro-batch, and returns the loss and
        metrics. `counted`: number of response tokens of each sample that are learned; None: all response tokens.

        A replica also runs micro-batches without samples, because all ranks must take part in the collectives.
        """
        steps: list[Numbers] = []
        lr = 0.0
        watch = Stopwatch()
        for packing in plan:
            lr = self._trainer.learning_rate(iteration)
            # Losses are divided by the totals of the step over all ranks
            picked = packing.samples
            tokens = sum((counted or lengths.responses)[i] for i in picked)
            totals = Totals(samples=len(picked), tokens=tokens, longest=self._longest)
            # Gradients and partial sums of means, over this rank's micro-batches
            partial: dict[str, Tensor] = {}
            for picks in packing.ranks[self._ranks.replica]:
                loss, parts = differentiate(picks, totals)
                loss.backward()
                self._lap(watch, self._part("micro_batch"), lengths.sizes.size(picks))
                partial = {
                    name: partial.get(name, 0.0) + part for name, part in parts.items()
                }
            # Means and gradient norm over all ranks; None: not finite, and the step is skipped
            numbers = self._trainer.sum_over_ranks(
                [*partial],
                torch.stack([*partial.values()]),
                iteration,
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


# Four tensors [N] of response tokens: the trainer's log-probabilities before its first step, the engine's
# log-probabilities, the version of the policy that sampled each token, and whether the importance weight was cut
_Sampled = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(slots=True)
class _Accumulated:
    """An optimizer step in progress: counts and metrics of the samples whose gradients were added up so far.

    `samples`, `tokens`, `responses`: counts of samples, tokens and response tokens over all ranks. `lost`: sum of
    imbalance times tokens over the passes. `partial`: metric -> sum over this rank's tokens, divided by the largest
    number of tokens or samples that the step can have, because the real number is not known yet. `sampled`:
    log-probabilities of the micro-batches by trainer and engine, for `_mismatch`.
    """

    # Counts over all ranks
    samples: int = 0
    tokens: int = 0
    responses: int = 0
    # Sum over packings of imbalance times tokens
    lost: float = 0.0
    # Partial sums of the means, of this rank
    partial: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    sampled: list[_Sampled] = dataclasses.field(default_factory=list)


class ActorLearner(LmLearner):
    """Learner of a policy. With `critic.on_actor`, it also trains a value head on the policy's trunk."""

    _accumulated: _Accumulated | None = None

    def __init__(
        self,
        config: LanguageModelJobConfig,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        shared_prefix_cost: float | None,
    ) -> None:
        super().__init__(
            config,
            lm,
            trainer,
            ranks,
            shared_prefix_cost,
            config.actor.token_budget,
        )
        algorithm = self._algorithm
        self._clip = Clip(
            low=algorithm.clip_ratio_low,
            high=algorithm.clip_high,
            dual=algorithm.dual_clip,
        )
        # Weights that correct for the engine's rounding
        self._correction: Correction | None = None
        if algorithm.tis_cap is not None:
            self._correction = Correction(
                algorithm.tis_cap,
                algorithm.tis_level,
                algorithm.tis_above,
                algorithm.tis_floor,
            )
        # Temperature 0 is greedy: its answers carry log-probabilities at temperature 1
        self._temperature = config.rollout.temperature or 1.0
        self._watch_experts()

    def plan(self, lengths: Lengths, iteration: int) -> tuple[Packing, ...]:
        """Return the result of `LmLearner.plan`, or an empty tuple in the first iterations, in which only the critic
        learns.
        """
        if iteration < self._config.critic.warmup_iterations:
            return ()
        return super().plan(lengths, iteration)

    def infer(
        self,
        shard: SampleShard,
        asked: Collection[Target],
    ) -> dict[Target, BySample]:
        """Return the requested targets of all samples, computed with the present weights; equal on every rank. A
        collective.

        `shard`: the samples that this rank computes. `asked`: names of the targets.
        """
        batch = Batch(shard, self._lm.device)
        micro_batches = self.inference_plan(shard.lengths).ranks[self._ranks.replica]

        def found(*fields: str, replays: bool = True) -> list[BySample]:
            # [fields, M] cut into one array per sample
            scores = self._token_scores(
                batch, micro_batches, fields, replays=replays
            ).cpu()
            responses = list(shard.lengths.responses)
            by_field: list[BySample] = []
            for score in scores:
                by_field.append([part.numpy() for part in score.split(responses)])
            return by_field

        inferred: dict[Target, BySample] = {}
        if "values" in asked:
            inferred["old"], inferred["values"] = found("logprobs", "values")
        elif "old" in asked:
            (inferred["old"],) = found("logprobs")
        if "reference" in asked:
            # LoRA: without its factors the model is the reference, whose routers choose by themselves
            with without_factors(self._lm.module):
                (inferred["reference"],) = found("logprobs", replays=False)
        return inferred

    def _token_scores(
        self,
        batch: Batch,
        micro_batches: Iterable[MicroBatch],
        fields: Sequence[str],
        *,
        replays: bool = True,
    ) -> Tensor:
        """Return outputs of the model for all M response tokens of all ranks, [fields, M]. Every rank gets all. A
        collective.

        `fields`: names of the outputs, such as `logprobs`. `micro_batches`: micro-batches of this rank. Over all
        replicas, each sample is in one micro-batch. `replays`: let routers take the experts that the samples have.
        """

        def scores(packed: Packed) -> list[Tensor]:
            found = self._lm.module(packed, self._temperature)
            return [getattr(found, field) for field in fields]

        return self._infer(batch, micro_batches, scores, len(fields), replays=replays)

    def learn(self, shard: SampleShard, iteration: int) -> Update:
        if self._algorithm.accumulate_early:
            self.accumulate(shard)
            return self._step(iteration)
        algorithm = self._algorithm
        corrects = self._correction is not None
        plan = self.plan(shard.lengths, iteration)
        batch = Batch(shard, self._lm.device)
        replica = self._ranks.replica
        # With several steps, the trainer's old log-probabilities are computed before the first one
        old = None
        if corrects and len(plan) > 1 and "old" not in shard.targets:
            epoch = plan[: len(plan) // algorithm.epochs]
            micro_batches: list[MicroBatch] = []
            for packing in epoch:
                micro_batches += packing.ranks[replica]
            old = self._token_scores(batch, micro_batches, ("logprobs",))[0]
        # Engine and trainer are compared in the first step, while their weights are equal
        in_first_step = len(plan[0].ranks[replica]) if plan else 0
        sampled: list[_Sampled] = []

        def differentiate(
            picks: MicroBatch,
            totals: Totals,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            scores = self._lm.module(batch.packed(picks), self._temperature)
            trainer = scores.logprobs.detach()
            engine = batch.engine_logprobs(picks)
            # Old log-probabilities, from the place that the module's docstring names
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
        metrics = self._take_load()
        if sampled:
            metrics = {**metrics, **self._mismatch(sampled, iteration)}
        return dataclasses.replace(update, metrics=metrics)

    def _mismatch(self, sampled: Sequence[_Sampled], iteration: int) -> Metrics:
        """Return metrics of the difference between the engine's and the trainer's log-probabilities of the same tokens.

        `sampled`: for each micro-batch, log-probabilities by trainer and engine, policy versions, and whether weights
        were cut. `iteration`: equal to the version of the policy that learns. Only tokens that this version has sampled
        are compared. If the difference is larger than rounding in 16 or 8 bits makes it, a metric has a note that says
        so.
        """
        by_trainer, by_engine, versions, cut = (
            torch.cat(parts) for parts in zip(*sampled, strict=True)
        )
        found = mismatch_metrics(by_trainer, by_engine, versions == iteration, cut)
        mean = found[MISMATCH]
        # Penalties change what the engine draws from
        differ = mean.weight > 0 and mean.value > _MOST_APART
        if not differ or self._config.rollout.penalties:
            return found
        told = problem(
            "policies-differ",
            "rollout.engine",
            error="engine",
            difference=f"{mean.value:.3g}",
        )
        note = told.remark()
        return {**found, MISMATCH: dataclasses.replace(mean, notes=(note,))}

    def _corrected(
        self,
        behaviour: Tensor,
        engine: Tensor,
        lengths: Tensor,
    ) -> Corrected | tuple[None, Tensor]:
        """Return for each of N tokens the importance weight, trainer over engine, [N], and whether it was cut at its
        limit, [N] bool.

        If the config does not correct for the engine's rounding, return None in place of the weights, and False for
        each token.

        `behaviour`, `engine`: log-probabilities by trainer and engine, [N]. `lengths`: response tokens of each sample.
        """
        if self._correction is None:
            return None, torch.zeros_like(engine, dtype=torch.bool)
        return importance_weights(behaviour, engine, lengths, self._correction)

    def accumulate(self, shard: SampleShard) -> None:
        """Compute the gradients of this rank's samples, and add them to those of earlier calls. A collective.

        `learn` makes the optimizer step. The number of tokens in the step is not known yet, so the gradients are
        divided by the largest possible number, and `_step` corrects this. No other call may discard the gradients
        before `learn` or `drop`.
        """
        lengths = shard.lengths
        if self._accumulated is None:
            self._accumulated = _Accumulated()
        held = self._accumulated
        watch = Stopwatch()
        batch = Batch(shard, self._lm.device)
        packing = self.inference_plan(lengths)
        # Totals over all ranks, known from the lengths
        tokens = sum(lengths.tokens)
        held.samples += len(lengths.tokens)
        held.tokens += tokens
        held.responses += sum(lengths.responses)
        held.lost += packing.imbalance * tokens
        if not any(lengths.responses):
            return
        # Gradients of this rank's micro-batches
        for picks in packing.ranks[self._ranks.replica]:
            scores = self._lm.module(batch.packed(picks), self._temperature)
            trainer = scores.logprobs.detach()
            engine = batch.engine_logprobs(picks)
            behaviour = engine if self._correction is None else trainer
            importance, cut = self._corrected(behaviour, engine, batch.lengths(picks))
            held.sampled.append((trainer, engine, batch.versions(picks), cut))
            loss, parts = self._loss(
                batch,
                picks,
                self._most,
                scores,
                behaviour,
                importance,
            )
            loss.backward()
            self._lap(watch, self._part("micro_batch"), batch.size(picks))
            held.partial = {
                name: held.partial.get(name, 0.0) + part for name, part in parts.items()
            }

    @property
    def _most(self) -> Totals:
        """The largest numbers of samples and tokens that a step over all samples of an iteration can have."""
        samples = (self._algorithm.prompts or 1) * self._algorithm.samples_per_prompt
        return Totals(
            samples=samples,
            tokens=samples * self._longest,
            longest=self._longest,
        )

    def _step(self, iteration: int) -> Update:
        """Make one optimizer step from all gradients that `accumulate` has added up, and return its result. A
        collective.

        The result is the same as that of a step over all samples at once.
        """
        held = self._accumulated or _Accumulated()
        most = self._most
        self._accumulated = None
        if not held.responses:
            return Update(mean=None, steps=0, lr=0.0)
        # Rescale from the largest totals possible to the step's own
        by_tokens = most.tokens / held.responses
        by_samples = most.samples / held.samples
        by_loss = by_tokens if self._algorithm.mean == "token" else by_samples
        watch = Stopwatch()
        with torch.no_grad():
            torch._foreach_mul_(self._lm.gradients(), by_loss)
        partial = []
        for name, part in held.partial.items():
            # The loss is a mean over samples or tokens, the metrics are means over tokens
            factor = by_loss if name == "loss" else by_tokens
            partial.append(part * factor)
        # Sum over ranks, step
        lr = self._trainer.learning_rate(iteration)
        numbers = self._trainer.sum_over_ranks(
            [*held.partial],
            torch.stack(partial),
            iteration,
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
            metrics={**self._take_load(), **self._mismatch(held.sampled, iteration)},
        )

    def drop(self) -> None:
        """Discard the gradients that `accumulate` has added up, and their counts."""
        self._accumulated = None
        self._expert_counts = None
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
        """Return the loss of a micro-batch, and what it adds to each metric of the step: name -> float64 tensor.

        `picks`: the samples of the micro-batch. `totals`: numbers of samples and tokens of the step over all ranks, by
        which sums are divided. `scores`: the model's outputs for the N response tokens. `old_logprobs`: [N], of the
        policy that sampled the tokens, by trainer or engine. `importance`: importance weights [N]; None: all 1.
        """
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
        # A custom variant may replace the policy loss and add metrics
        more: dict[str, Tensor] = {}
        if self._variant is not None:
            samples = TokenSamples(old_logprobs, advantages, lengths)
            if self._variant.has("policy_loss"):
                each = self._variant.policy_loss(scores.logprobs, samples)
                weighted = each if importance is None else importance * each
                terms = terms._replace(policy_loss=weighted)
            found = self._variant.metrics(scores.logprobs, samples)
            for name, values in found.items():
                more[name] = values.sum(dtype=torch.float64) / tokens
        # Policy loss and entropy, then the KL from the reference
        weights = token_weights(algorithm.mean, lengths, totals)
        loss = terms.loss(weights, algorithm.entropy_coef)
        if algorithm.kl_in == "loss" and batch.kl_coef:
            kl = KL_ESTIMATORS[algorithm.kl_estimator](
                batch.target("reference", picks) - scores.logprobs
            )
            loss = loss + batch.kl_coef * (weights * kl).sum()
        numbers = shares_of(terms, tokens) | more
        # Value head on the same trunk
        if isinstance(scores, ValuedScores):
            returns = batch.target("returns", picks)
            before = batch.target("values", picks)
            valued = self._value_loss(scores.values, before, returns).sum() / tokens
            loss = loss + algorithm.value_coef * valued
            numbers["value_loss"] = valued.detach().double()
        loss = self._with_balance(loss, numbers, lengths, totals)
        del numbers["policy_loss"]
        return loss, {"loss": loss.detach().double(), **numbers}


class CriticLearner(LmLearner):
    """Learner of a critic: it trains the values of response tokens to match their returns."""

    def __init__(
        self,
        config: LanguageModelJobConfig,
        lm: TrainedLm,
        trainer: Trainer,
        ranks: Ranks,
        shared_prefix_cost: float | None,
    ) -> None:
        super().__init__(
            config,
            lm,
            trainer,
            ranks,
            shared_prefix_cost,
            config.critic.token_budget,
        )

    def values(self, shard: SampleShard) -> Tensor:
        """Return the values [M] of all M response tokens of all samples, by the present weights, on every rank. A
        collective.

        Every rank needs all values, because the learning passes may assign a sample to another rank.

        `shard`: the samples that this rank computes.
        """
        batch = Batch(shard, self._lm.device)
        micro_batches = self.inference_plan(shard.lengths).ranks[self._ranks.replica]

        def values_of(packed: Packed) -> list[Tensor]:
            return [self._lm.module(packed)]

        return self._infer(batch, micro_batches, values_of, 1)[0]

    def learn(
        self,
        shard: SampleShard,
        old_values: Tensor,
        returns: Tensor,
        iteration: int,
    ) -> Update:
        """Learn from all samples of `iteration`, in all epochs, and return the result of the optimizer steps. A
        collective.

        `shard`: the samples that this rank learns from. `old_values`, `returns`: [M], for all M response tokens, on
        this rank's device. Tokens with NaN returns are not learned; they belong to samples with non-finite numbers.
        """
        batch = Batch(shard, self._lm.device)
        clip = self._algorithm.value_clip
        lengths = shard.lengths
        # Number of learned tokens of each sample
        sound = ~returns.isnan()
        by_sample = sound.cpu().split(list(lengths.responses))
        counted = [int(part.sum()) for part in by_sample]

        def differentiate(
            picks: MicroBatch,
            totals: Totals,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            places = batch.places(picks)
            tokens = max(1, totals.tokens)
            kept = sound[places]
            values = self._lm.module(batch.packed(picks))[kept]
            old = old_values[places][kept]
            wanted = returns[places][kept]
            loss = self._value_loss(values, old, wanted).sum() / tokens
            is_clipped = is_value_clipped(values.detach(), old, wanted, clip)
            clipped = is_clipped.sum() / tokens
            # clip_share: share of tokens whose value moved as far as the clip allows
            return loss, {
                "value_loss": loss.detach().double(),
                "clip_share": clipped.double(),
            }

        return self._learn(
            lengths,
            self.plan(lengths, iteration),
            iteration,
            differentiate,
            counted,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Numbers of held-out rows with S answers of M tokens together.

    `loss`: mean of -log p over tokens. `token_accuracy`: share of tokens that are the likeliest of all. `accuracy`:
    share of rows of which all learned tokens are: a greedy engine would write exactly these answers. `rows`: S.
    `tokens`: M.
    """

    loss: float
    token_accuracy: float
    accuracy: float
    rows: int
    tokens: int


class SupervisedLearner(LmLearner):
    """Learner of written answers: it makes their tokens likelier (maximum likelihood, SFT).

    The loss of a step is the mean of -log p over all learned tokens of the step, on all ranks and in all micro-batches.
    So it does not depend on how the rows are packed: a mean of the means of micro-batches would weigh the tokens of
    short answers more.
    """

    def learn(self, shard: SampleShard, iteration: int) -> Update:
        """Learn from all rows of `iteration`, and return the result of the optimizer steps. A collective.

        `shard`: the rows that this rank computes.
        """
        batch = Batch(shard, self._lm.device)

        def differentiate(
            picks: MicroBatch,
            totals: Totals,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            scores: TokenScores = self._lm.module(batch.packed(picks))
            lengths = batch.lengths(picks)
            weights = token_weights(self._algorithm.mean, lengths, totals)
            loss = -(weights * scores.logprobs).sum()
            tokens = max(1, totals.tokens)
            right = scores.logprobs == scores.likeliest
            entropies = scores.entropies.detach()
            numbers = {
                "token_accuracy": right.sum(dtype=torch.float64) / tokens,
                "entropy": entropies.sum(dtype=torch.float64) / tokens,
            }
            loss = self._with_balance(loss, numbers, lengths, totals)
            return loss, {"loss": loss.detach().double(), **numbers}

        self._watch_experts()
        plan = self.plan(shard.lengths, iteration)
        update = self._learn(shard.lengths, plan, iteration, differentiate)
        return dataclasses.replace(update, metrics=self._take_load())

    def evaluate(self, shard: SampleShard) -> HeldOut:
        """Return numbers of held-out rows by the present weights, equal on every rank. A collective.

        `shard`: the rows that this rank computes.
        """
        batch = Batch(shard, self._lm.device)
        micro_batches = self.inference_plan(shard.lengths).ranks[self._ranks.replica]

        def scores(packed: Packed) -> list[Tensor]:
            found: TokenScores = self._lm.module(packed)
            right = found.logprobs == found.likeliest
            return [found.logprobs, right.float()]

        logprobs, right = self._infer(batch, micro_batches, scores, 2).cpu()
        # Rows of which nothing is learned are in no mean
        sizes = [size for size in shard.lengths.responses if size]
        whole = [bool(row.all()) for row in right.split(sizes)]
        return HeldOut(
            loss=-float(logprobs.double().mean()) if sizes else 0.0,
            token_accuracy=float(right.double().mean()) if sizes else 0.0,
            accuracy=sum(whole) / max(1, len(whole)),
            rows=len(sizes),
            tokens=sum(sizes),
        )
