"""The components that learn: the actor trains the policy and sends its weights to rollout; the critic predicts returns.

A simulator policy learns from trajectories, one for each actor rank. A language model learns from groups of samples::

    infer                 samples ──▶ every rank: log-probabilities by its own weights ──▶ rank 0      if asked for
    compute_advantages    rank 0: scores of all components ──▶ advantages of each token ──▶ returns, for a critic
    accumulate            rank 0: whole groups, as many as come, while others are generated ──▶ every rank: gradients
    learn                 rank 0: tokens and targets ──▶ every rank: the update
    critic, infer         samples.critic ──▶ rank 0 ──▶ every rank: values of all tokens ──▶ rank 0 ──▶ scores.critic
    critic, learn         returns ──▶ rank 0 ──▶ every rank: the values are fitted to the returns
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rlplace.metrics import MISMATCH, MISMATCH_MAX, Metric, Metrics
from rlplace.models.folders import folder_of
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.flow import deliver_by_rank
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Scores
from rlplace.trajectory import Trajectory, concat
from rlplace.workers.arguments import (
    REFERENCE_WEIGHTS,
    RETURNS,
    SAMPLES,
    TRAJECTORIES,
    WEIGHTS,
    SimulatorArguments,
    TextArguments,
    asked_of,
    parts_of,
    samples_for,
    scores_of,
)
from rlplace.workers.roles.env import Recording
from rlplace.workers.roles.learn_metrics import (
    as_text,
    sample_metrics,
    skipped_metric,
    update_metrics,
)
from rlplace.workers.training.worker import TrainedWorker
from rlplace.workers.worker import out_of_step

if TYPE_CHECKING:  # the driver imports this module too; torch is imported only in setup
    from torch import Tensor

    from rlplace.comm.weights.host_sync import WeightSender
    from rlplace.comm.weights.shards import Shard
    from rlplace.workers.training.experience import Experience
    from rlplace.workers.training.optimizer import Update
    from rlplace.workers.training.samples import BySample, Groups, SampleShard, Target
    from rlplace.workers.training.trained_model import TrainedLm

_DELTA_SHARE = 0.5  # share of the bytes; if more have changed, all are sent


class Actor(TrainedWorker):
    """One rank of the actor component: it trains the policy, and sends the policy's weights to the rollout ranks."""

    _pushes: int = 0

    def _enter_plan(self) -> None:
        """Open the sender of this rank's weights to the rollout ranks. Its next push sends all weights."""
        from rlplace.workers.weights import open_sender

        sync = self.config.config.actor.sync
        self._sender = open_sender(
            self.context,
            WEIGHTS,
            target="rollout",
            ranks=self.config.ranks["rollout"],
            deliveries=self.config.deliveries,
            verify_every=sync.verify_every if sync.verify == "checksum" else 0,
            delta_share=_DELTA_SHARE if sync.mode == "delta" else 0.0,
        )
        self._of_plan.callback(self._sender.close)
        self._pushes = 0

    def push_weights(self, version: int, to: str | None = None) -> Metrics:
        """Send this rank's shard of the weights as policy version `version`; return metrics once the shard is written.

        The first push sends all weights. Later pushes send only the weights that have changed, if `actor.sync.mode`
        says so.

        `to`: component that receives the weights; only "rollout" and None are allowed, and None means "rollout".
        """
        from rlplace.workers.weights import push_metrics

        assert to in (None, "rollout"), "an actor sends its weights to rollout alone"
        self._require(Residency.WEIGHTS, "push_weights")
        mode = self.config.config.actor.sync.mode
        again = self._pushes > 0
        with self._working("sync"):
            shards = self._model.shards(mode, again=again)
            enclosed = self._enclosed()
            began = time.perf_counter()
            partial = again and self._model.leaves_out(mode)
            pushed = self._sender.push(version, (*shards, *enclosed), partial=partial)
        seconds = time.perf_counter() - began
        self._pushes += 1
        return push_metrics("actor", seconds, pushed)

    def _enclosed(self) -> tuple[Shard, ...]:
        """Return additional tensors, which every push sends together with the weights. The base class returns none."""
        return ()

    def begin_again(self, iteration: int) -> Metrics:
        """Prepare this rank for the repetition of `iteration`, and return metrics.

        The next push sends all weights, even if it repeats a version, because a restarted rollout rank has no weights.
        """
        self._sender.begin_again()
        self._pushes = 0
        return super().begin_again(iteration)


class PolicyActor(Actor):
    """One rank of an actor that trains a policy for simulators."""

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.policy_networks",
        "rlplace.workers.training.policy_learner",
        "rlplace.workers.training.state",
        "rlplace.workers.weights",
    )

    follows_plans: ClassVar[bool] = True

    config: SimulatorArguments

    def setup(self) -> None:
        from rlplace.algo.minibatches import Rows
        from rlplace.models.policy_networks import build_policy
        from rlplace.workers.training.policy_learner import PolicyLearner
        from rlplace.workers.training.trained_model import TrainedPolicy

        context = self.context
        job = self.config
        config = self.config.config
        ranks = self._join()
        module = build_policy(
            job.spaces, config.actor, config.algorithm, config.runner.seed
        )
        if job.begins_with is not None:
            # Imported here: few runs need it
            from rlplace.models.transfer import take_over

            take_over(module, job.begins_with, "init_from")
        policy = TrainedPolicy(
            module.to(context.device.torch_name), config.actor.compute, ranks
        )
        trainer = self._train(policy, config.actor.optimizer)
        route = job.routes.trajectories
        mine = route.receives(context.rank)
        rows = Rows(
            steps=config.algorithm.rollout_steps,
            total=route.rows,
            first=mine[0].start if mine else 0,
            count=sum(share.stop - share.start for share in mine),
        )
        self._learner = PolicyLearner(config, rows, policy, trainer, ranks)
        self._enter_plan()
        self.move(Residency.OFF)

    def learn(self, iteration: int, version: int) -> Metrics:
        """Wait for this rank's trajectories of `iteration`, update the weights to the next version, and return metrics.

        `version`: policy version before the update; the trajectories were sampled under it.
        """
        with self._computing("learn", Residency.FULL):
            watch = Stopwatch()
            trajectory = self._receive(version)
            watch.lap("wait")
            update = self._learner.learn(trajectory, iteration)
            watch.lap("learn")
        further = dict(update.metrics)
        # Older weights have other log-probabilities
        if trajectory.version_min != version:
            for name in (MISMATCH, MISMATCH_MAX):
                further.pop(name, None)
        return {
            **{
                f"actor/{name}": Metric(value)
                for name, value in (update.mean or {}).items()
            },
            "actor/lr": Metric(update.lr),
            "actor/optimizer_steps": Metric(update.steps),
            **skipped_metric("actor", [update]),
            **further,
            **watch.metrics("actor"),
            "actor/version_lag": Metric(version - trajectory.version_min, "max"),
            "actor/samples": Metric(trajectory.weight, "sum"),
        }

    def _carried(self) -> dict[str, Tensor]:
        return self._learner.state()

    def _take_over(self, carried: Mapping[str, Tensor]) -> None:
        self._learner.take_over(carried)

    def _receive(self, version: int) -> Trajectory:
        channel = self.context.channels[TRAJECTORIES]
        key = str(self.context.rank)
        shares = self.config.routes.trajectories.receives(self.context.rank)
        # This rank has no rows and only takes part in the collectives.
        if not shares:
            steps = self.config.config.algorithm.rollout_steps
            recording = Recording(steps=steps, rows=0, spaces=self.config.spaces)
            recording.versions.add(version)
            return recording.trajectory(first_row=0, env_rank=0)
        trajectory = concat([channel.get(key=key) for _ in shares])
        rows = range(trajectory.first_row, trajectory.first_row + trajectory.rows)
        assert rows == range(shares[0].start, shares[-1].stop), (
            f"{self.context.owner} got rows {rows}, not its own"
        )
        return trajectory


class LmActor(Actor):
    """One rank of an actor that trains a language model.

    Rank 0 receives all samples of an iteration, and keeps them until the actor has learned from them.
    """

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.causal_lm",
        "rlplace.workers.training.experience",
        "rlplace.workers.training.lm_learner",
        "rlplace.workers.training.state",
        "rlplace.workers.weights",
    )

    follows_plans: ClassVar[bool] = True

    config: TextArguments
    _model: TrainedLm
    _groups: Groups | None = None
    _inferred: dict[Target, BySample] | None = None
    _experience: Experience | None = None
    # The estimator's state when estimation began; kept until the iteration's learn ends
    _before: Tensor | None = None
    # Sender of the weights to the reference, if the reference is refreshed
    _reference: WeightSender | None = None
    # Rank 0: the samples whose gradients were accumulated in this iteration
    _accumulated: tuple[Experience, ...] = ()
    _accumulate_s: float = 0.0  # Seconds of accumulating in this iteration

    def setup(self) -> None:
        from rlplace.models.vision import policy_of
        from rlplace.workers.training.experience import AdvantageEstimator
        from rlplace.workers.training.lm_learner import ActorLearner
        from rlplace.workers.training.trained_model import TrainedLm

        config, actor = self.config.config, self.config.config.actor
        ranks = self._join()
        folder = self.config.model
        spec = self._spec(actor, folder)
        lm = TrainedLm(spec, ranks, policy_of(config, folder))
        trainer = self._train(lm, actor.optimizer, ema_decay=actor.ema_decay)
        self._learner = ActorLearner(
            config, lm, trainer, ranks, self.config.read_again.get("actor")
        )
        self._estimate_advantages = AdvantageEstimator(self.config)
        self._enter_plan()
        self.move(Residency.OFF)

    def _enter_plan(self) -> None:
        from rlplace.comm.weights.host_sync import WeightSender

        super()._enter_plan()
        # Each reference rank gets a copy through the channel.
        if REFERENCE_WEIGHTS in self.context.channels:
            channel = self.context.channels[REFERENCE_WEIGHTS]
            count = self.config.ranks["reference"]
            readers = deliver_by_rank(count, "actor", "reference")
            self._reference = WeightSender(
                channel,
                rank=self.context.rank,
                deliveries=readers,
                check=lambda: self.context.check_cancelled("refresh_reference"),
            )
            self._of_plan.callback(self._reference.close)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.config.model)

    def begin_again(self, iteration: int) -> Metrics:
        self._groups = self._inferred = self._experience = None
        self._accumulated = ()
        self._accumulate_s = 0.0
        self._learner.drop()
        if self._before is not None:
            self._estimate_advantages.take_over(self._before)
            self._before = None
        if self._reference is not None:
            self._reference.begin_again()
        return super().begin_again(iteration)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Compute the log-probabilities or values that the loss needs for the response tokens of `iteration`.

        The config decides what is computed: old log-probabilities, reference log-probabilities or values (see
        `asked_of`). If it needs nothing, this method does nothing. Otherwise it waits until all groups have arrived,
        and computes with the weights of `version`. Rank 0 keeps the results for `compute_advantages`. Return the
        seconds of each part as metrics.
        """
        asked = asked_of(self.config.config)
        if not asked:
            return {}
        with self._computing("infer", Residency.WEIGHTS):
            watch = Stopwatch()
            shards = (
                self._learner.shards(self._take(), infer=True)
                if self.context.rank == 0
                else None
            )
            shard = self._ranks.scatter(shards, "samples")
            watch.lap("infer_wait")
            found = self._learner.infer(shard, asked)
            watch.lap("infer")
        if self.context.rank == 0:
            self._inferred = found
        return watch.metrics("actor")

    def compute_advantages(self, iteration: int) -> Metrics:
        """On rank 0, receive the scores of all scorers for `iteration`, compute the advantages, and return metrics.

        If there is a critic, rank 0 also sends the returns to the critic. All other ranks do nothing and return no
        metrics. The method uses no accelerator and no collective.
        """
        if self.context.rank != 0:
            return {}
        self._experience = self._gather()
        return self._experience.metrics

    def accumulate(self, iteration: int, version: int) -> Metrics:
        """Compute gradients of the groups that are complete, while rollout still generates other groups.

        The gradients are added up and kept until `learn`, which makes the optimizer step. Groups with too few tokens
        for one more forward pass on every rank are left to `learn`. No other gradients may be computed before `learn`.
        Return the seconds of each part as metrics.
        """
        self._require(Residency.FULL, "accumulate")
        coming = self._waves() if self.context.rank == 0 else None
        with self._working("rollout"):
            watch = Stopwatch("accumulate_wait", "accumulate")
            while (
                shard := self._ranks.scatter(
                    self._next_wave(coming, iteration), "samples"
                )
            ) is not None:
                watch.lap("accumulate_wait")
                self._learner.accumulate(shard)
                watch.lap("accumulate")
            watch.lap("accumulate_wait")
        self._accumulate_s = watch.seconds["accumulate"]
        return watch.metrics("actor")

    def _waves(self) -> Iterator[Groups]:
        """Yield lists of arrived groups, each list as soon as it has enough tokens for one forward pass on every rank.

        At the end, store the remaining groups in `self._groups`. Only rank 0 calls this.
        """
        from rlplace.workers.training.samples import arriving_groups, streamed_batches

        arriving = arriving_groups(
            self.context.channels[SAMPLES], self.config.prompts, self.context.owner
        )
        tokens = self.config.config.actor.token_budget * self._ranks.replicas
        self._groups = yield from streamed_batches(
            arriving, tokens, shared_prefix_cost=self.config.read_again.get("actor")
        )

    def _next_wave(
        self, coming: Iterator[Groups] | None, iteration: int
    ) -> Sequence[SampleShard | None] | None:
        """Return the shards that rank 0 scatters for the next gradient pass: one shard of samples for each rank.

        If no further pass can be filled, the list has None for each rank. On all ranks but 0, return None, because only
        rank 0 scatters.

        `coming`: the groups of each pass, on rank 0; None on all other ranks.
        """
        if coming is None:
            return None
        groups = next(coming, None)
        if groups is None:
            return [None] * self._ranks.world_size
        experience = self._estimate_advantages(groups, {}, {})
        self._accumulated += (experience,)
        return self._shards(experience, iteration)

    def learn(self, iteration: int, version: int) -> Metrics:
        """Update the weights from `version` to the next version with the samples of `iteration`, and return metrics.

        The samples were generated by `version` or earlier versions. The groups are learned in parts, whose sizes
        `parts_of` returns. If `accumulate` has computed gradients before, there is one part, and its optimizer step
        includes them.
        """
        taken = [*self._accumulated]
        self._accumulated = ()
        updates: list[Update] = []
        with self._computing("learn", Residency.FULL):
            watch = Stopwatch()
            for part in parts_of(self.config):
                shard, experience = self._receive(iteration, part)
                watch.lap("wait")
                taken += [] if experience is None else [experience]
                updates.append(self._learner.learn(shard, iteration))
                watch.lap("learn")
        self._before = None
        accumulate_s = self._accumulate_s
        self._accumulate_s = 0.0
        poisoned = [
            note for experience in taken for note in self._named(experience, iteration)
        ]
        groups = [group for experience in taken for group in experience.groups]
        algorithm = self.config.config.algorithm
        learned = [
            group
            for experience in taken
            for group in experience.learned(algorithm).groups
        ]
        most = self.config.config.runner.samples
        texts = tuple(as_text(groups, most, self._tokenizer)) if groups and most else ()
        return {
            **sample_metrics(groups, version, texts, learned),
            **(
                {"actor/poisoned": Metric(len(poisoned), "sum", notes=tuple(poisoned))}
                if poisoned
                else {}
            ),
            **update_metrics(
                "actor", updates, learn_s=watch.seconds["learn"] + accumulate_s
            ),
            **watch.metrics("actor"),
        }

    def _named(self, experience: Experience, iteration: int) -> list[str]:
        """Return one line of text for each sample that was left out because of non-finite numbers.

        `experience`: the experience with these samples and the reasons.
        """
        first = self.config.first_prompt(iteration)
        return [
            f"{self.context.owner}: sample {sample.sample} of prompt {first + sample.group}: {why}"
            for sample, why in experience.non_finite
        ]

    def _receive(
        self, iteration: int, part: int
    ) -> tuple[SampleShard, Experience | None]:
        """Return this rank's share of the samples of the next part; on rank 0 also the experience of all ranks, else
        None.

        The experience includes groups without a learning signal, whereas the shares do not.

        `part`: number of groups in the part.
        """
        shards: list[SampleShard] | None = None
        experience: Experience | None = None
        if self.context.rank == 0:
            experience = self._experience or self._gather(part)
            self._groups = self._inferred = self._experience = None
            shards = self._shards(experience, iteration)
        return self._ranks.scatter(shards, "samples"), experience

    def _shards(self, experience: Experience, iteration: int) -> list[SampleShard]:
        learned = experience.learned(self.config.config.algorithm)
        targets = learned.targets
        kl_coef = learned.kl_coef
        return self._learner.shards(
            learned.groups, iteration, targets=targets, kl_coef=kl_coef
        )

    def _gather(self, part: int | None = None) -> Experience:
        """Receive groups and their scores, compute the advantages, send the critic its returns, and return the
        experience.

        Only rank 0 calls this. `part`: number of groups to receive; None: all groups of the iteration.
        """
        from rlplace.workers.training.samples import take_scores

        groups = self._take(part)
        context = self.context
        skip = self.config.config.leaves_out
        samples = [sample for group in groups for sample in group]
        scores = {
            scorer: take_scores(
                context.channels[scores_of(scorer)],
                scorer,
                samples,
                context.owner,
                skip=skip,
            )
            for scorer in self.config.scorers
        }
        if self._before is None:
            self._before = self._estimate_advantages.state()
        experience = self._estimate_advantages(groups, scores, self._inferred or {})
        if "critic" in self.config.ranks:
            for returns in experience.returns():
                context.channels[RETURNS].put(returns)
        return experience

    def _take(self, part: int | None = None) -> Groups:
        """Wait for groups of this iteration, and return them in ascending order of their numbers. Only rank 0 calls
        this.

        `part`: number of groups to receive; None: all groups. If groups were received before and are not learned yet,
        return those groups instead.
        """
        from rlplace.workers.training.samples import take_groups

        if self._groups is None:
            prompts = self.config.prompts
            owner = self.context.owner
            self._groups = take_groups(
                self.context.channels[SAMPLES], prompts, owner, part=part
            )
        return self._groups

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Send the weights of `version` to the reference, and return the duration of the transfer as a metric.

        Do nothing if the reference is not refreshed before `iteration`.
        """
        if not self.config.refreshes(iteration):
            return {}
        with self._computing("refresh", Residency.WEIGHTS):
            assert self._reference is not None, (
                "a reference that is refreshed has a channel"
            )
            shards = self._model.shards()
            began = time.perf_counter()
            self._reference.push(version, shards)
            seconds = time.perf_counter() - began
        return {"actor/refresh_s": Metric(seconds, "max")}

    def _carried(self) -> dict[str, Tensor]:
        ours = (
            self._estimate_advantages.state()
            if self._before is None
            else self._before.clone()
        )
        # Only rank 0's estimator has seen samples, so the other ranks add zero.
        ours = ours if self.context.rank == 0 else ours.zero_()
        return {"advantages": self._ranks.sum(ours.to(self._model.device))}

    def _take_over(self, carried: Mapping[str, Tensor]) -> None:
        self._estimate_advantages.take_over(carried["advantages"].cpu())

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return log p(tokens[i] | tokens[:i]) for each i >= 1, at temperature 1.

        The values are compared with the log-probabilities of a generation engine.
        """
        import numpy as np
        import torch

        from rlplace.models.packed import Packed

        with self._computing("logprobs", Residency.WEIGHTS), torch.no_grad():
            ids = np.asarray(tokens)
            packed = Packed.of(
                [ids], [np.arange(len(ids)) > 0], self.context.device.torch_name
            )
            scores: list[float] = self._model.module(packed).logprobs.tolist()
        return scores

    def _enclosed(self) -> tuple[Shard, ...]:
        """Return the log-probabilities of a fixed probe text under the pushed weights, as one tensor to send with the
        weights.

        The engine compares them with its own log-probabilities of this text. Return an empty tuple if the config does
        not check pushes with a probe text.
        """
        sync = self.config.config.actor.sync
        if sync.verify == "checksum" or not sync.verify_every:
            return ()
        from rlplace.workers.engines.weights import probe_shard, probe_tokens

        tokens = probe_tokens(self.config)
        scores = (
            self.logprobs(tokens) if self._pushes % sync.verify_every == 0 else None
        )
        return (probe_shard(scores, len(tokens), self.context.world_size),)


# ── the critic of a language model ────────────────────────────────────────────────────────────────────────────────────


class Critic(TrainedWorker):
    """One rank of the critic.

    Between `infer` and `learn`, the rank keeps the iteration's samples and their values in host memory.
    """

    imports: ClassVar[tuple[str, ...]] = LmActor.imports

    follows_plans: ClassVar[bool] = True

    config: TextArguments
    _model: TrainedLm
    _inferred: _Inferred | None = None

    def setup(self) -> None:
        from rlplace.models.causal_lm import ValueLm
        from rlplace.workers.training.lm_learner import CriticLearner
        from rlplace.workers.training.trained_model import TrainedLm

        config, critic = self.config.config, self.config.config.critic
        ranks = self._join()
        # The model folder of the job has no value head, so the head is initialized.
        spec = self._spec(critic, self.config.model, folder_of(critic.model))
        lm = TrainedLm(spec, ranks, ValueLm)
        trainer = self._train(lm, critic.optimizer)
        self._learner = CriticLearner(
            config, lm, trainer, ranks, self.config.read_again.get("critic")
        )
        self.move(Residency.OFF)

    def begin_again(self, iteration: int) -> Metrics:
        self._inferred = None
        return super().begin_again(iteration)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Compute the values of all response tokens of `iteration` once all groups have arrived, and return metrics.

        The values are sent to the actor, and also kept for `learn`.
        """
        from rlplace.workers.training.samples import take_groups

        context = self.context
        with self._computing("infer", Residency.WEIGHTS):
            watch = Stopwatch()
            groups: Groups = []
            shards: list[SampleShard] | None = None
            if context.rank == 0:
                groups = take_groups(
                    context.channels[samples_for("critic")],
                    self.config.prompts,
                    context.owner,
                )
                shards = self._learner.shards(groups, iteration, infer=True)
            shard = self._ranks.scatter(shards, "samples")
            watch.lap("infer_wait")
            values = self._learner.values(shard).cpu()
            watch.lap("infer")
        self._inferred = _Inferred(
            iteration=iteration, groups=groups, shard=shard, values=values
        )
        parts = iter(values.split(list(shard.lengths.responses)))
        for group in groups:
            scores = tuple(
                Scores(group=s.group, sample=s.sample, values=next(parts).numpy())
                for s in group
            )
            context.channels[scores_of("critic")].put(scores)
        return {
            **watch.metrics("critic"),
            "critic/infer_tokens_per_s": Metric(
                sum(shard.lengths.tokens) / watch.seconds["infer"], "min"
            ),
            "critic/value": Metric(
                float(values.mean()) if len(values) else 0.0, weight=len(values)
            ),
        }

    def learn(self, iteration: int, version: int) -> Metrics:
        """Wait for the actor's returns for the groups of the last `infer`, update the weights, and return metrics."""
        from rlplace.algo.advantages import explained_variance

        inferred = self._inferred
        self._inferred = None
        if inferred is None or inferred.iteration != iteration:
            got = (
                "nothing" if inferred is None else f"iteration {inferred.iteration + 1}"
            )
            raise out_of_step(
                self.context.owner,
                "values",
                got=got,
                expected="infer before",
                iteration=iteration,
            )
        with self._computing("learn", Residency.FULL):
            watch = Stopwatch()
            returns = self._receive_returns(inferred)
            watch.lap("wait")
            update = self._learner.learn(
                inferred.shard, inferred.values.to(returns.device), returns, iteration
            )
            watch.lap("learn")
        returns = returns.cpu()
        sound = ~returns.isnan()
        values = inferred.values[sound]
        returns = returns[sound]
        tokens = len(values)
        return {
            **watch.metrics("critic"),
            **update_metrics("critic", [update], learn_s=watch.seconds["learn"]),
            "critic/explained_variance": Metric(
                explained_variance(values, returns), weight=tokens
            ),
            "critic/return": Metric(
                float(returns.mean()) if tokens else 0.0, weight=tokens
            ),
        }

    def _receive_returns(self, inferred: _Inferred) -> Tensor:
        """Return the returns of all M response tokens, an array [M] on this rank's device with equal values on all
        ranks.

        Tokens of samples with non-finite numbers have the return nan.

        `inferred`: the samples and values that `infer` has kept.
        """
        import torch

        from rlplace.workers.training.samples import joined, take_returns

        found = torch.zeros(len(inferred.values), device=self._model.device)
        if self.context.rank == 0:
            samples = [sample for group in inferred.groups for sample in group]
            skip = self.config.config.leaves_out
            taken = take_returns(
                self.context.channels[RETURNS], samples, self.context.owner, skip=skip
            )
            found.copy_(torch.from_numpy(joined(taken)))
        self._ranks.wait_for_rank_0("returns")
        # The returns are zero on all ranks but 0.
        return self._ranks.sum(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inferred:
    """The samples and values of one iteration that the critic keeps on the host from `infer` to `learn`.

    `shard`: this rank's share of the samples. `values`: one value for each of the M response tokens of all ranks.
    """

    iteration: int
    groups: Groups  # rank 0: all groups; other ranks: none
    shard: SampleShard
    values: Tensor  # [M], of the samples of all ranks
