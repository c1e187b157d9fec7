"""The critic of a language model: infers the values of states, learns from their returns, leaves on demand.

::

    infer    samples.critic ──▶ rank 0 ──▶ every rank: its samples ──▶ values of all tokens ──▶ rank 0 ──▶ scores.critic
    learn    returns ──▶ rank 0 ──▶ every rank: values are brought nearer to them
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rlplace.metrics import Metric, Metrics, Stopwatch
from rlplace.placement.schedule import Residency
from rlplace.tokens import Scores
from rlplace.workers.arguments import RETURNS, samples_for, scores_of
from rlplace.workers.roles.checks import folder_of
from rlplace.workers.training.worker import TrainedWorker
from rlplace.workers.worker import out_of_step

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from torch import Tensor

    from rlplace.workers.training.samples import Groups, SampleShard
    from rlplace.workers.training.trained_model import TrainedLm


class Critic(TrainedWorker):
    """One rank of the critic.

    Owns from `infer` to `learn` an iteration's samples with their values, on the host.
    """

    _model: TrainedLm
    _inferred: _Inferred | None = None

    def setup(self) -> None:
        from rlplace.models.causal_lm import ValueLm
        from rlplace.workers.training.lm_learner import CriticLearner
        from rlplace.workers.training.trained_model import TrainedLm

        config, critic = self.config.config, self.config.config.critic
        ranks = self._join()
        spec = self._spec(critic, folder_of(critic.model))  # the job's folder has no value head: it starts anew
        lm = TrainedLm(spec, ranks, ValueLm)
        trainer = self._train(lm, critic.optimizer)
        self._learner = CriticLearner(config, lm, trainer, ranks, critic.token_budget)
        self.move(Residency.OFF)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Wait for all groups of `iteration`; put the values of their response tokens and keep them."""
        from rlplace.workers.training.samples import take_groups

        context = self.context
        with self._computing("infer", Residency.WEIGHTS):
            watch = Stopwatch()
            groups: Groups = []
            shards: list[SampleShard] | None = None
            if context.rank == 0:
                groups = take_groups(context.channels[samples_for("critic")], self.config.prompts, context.owner)
                shards = self._learner.shards(groups, iteration, infer=True)
            shard = self._ranks.scatter(shards, "samples")
            watch.lap("infer_wait")
            values = self._learner.values(shard).cpu()
            watch.lap("infer")
        self._inferred = _Inferred(iteration=iteration, groups=groups, shard=shard, values=values)
        parts = iter(values.split(list(shard.lengths.responses)))
        for group in groups:
            scores = tuple(Scores(group=s.group, sample=s.sample, values=next(parts).numpy()) for s in group)
            context.channels[scores_of("critic")].put(scores)
        return {
            **watch.metrics("critic"),
            "critic/infer_tokens_per_s": Metric(sum(shard.lengths.tokens) / watch.seconds["infer"], "min"),
            "critic/value": Metric(float(values.mean()) if len(values) else 0.0, weight=len(values)),
        }

    def learn(self, iteration: int, version: int) -> Metrics:
        """Wait for the returns of all groups of `iteration`, whose values were inferred; end with other weights."""
        from rlplace.algo.advantages import explained_variance

        inferred, self._inferred = self._inferred, None
        if inferred is None or inferred.iteration != iteration:
            got = "nothing" if inferred is None else f"iteration {inferred.iteration}"
            what = f"learn({iteration}) has no values to start from"
            raise out_of_step(self.context.owner, what, got=got, expected="infer before")
        with self._computing("learn", Residency.FULL):
            watch = Stopwatch()
            returns = self._receive_returns(inferred)
            watch.lap("wait")
            update = self._learner.learn(inferred.shard, inferred.values.to(returns.device), returns, iteration)
            watch.lap("learn")
        tokens = len(inferred.values)
        return {  # all ranks agree on the numbers of the update; tokens per second are of all ranks together
            **watch.metrics("critic"),
            "critic/tokens_per_s": Metric(update.tokens / watch.seconds["learn"], "min"),
            "critic/lr": Metric(update.lr),
            "critic/optimizer_steps": Metric(update.steps),
            "critic/rank_imbalance": Metric(update.imbalance),
            **{f"critic/{name}": Metric(value) for name, value in (update.mean or {}).items()},
            "critic/explained_variance": Metric(explained_variance(inferred.values, returns.cpu()), weight=tokens),
            "critic/return": Metric(float(returns.mean()) if tokens else 0.0, weight=tokens),
        }

    def _receive_returns(self, inferred: _Inferred) -> Tensor:
        """Return [M] on this rank's device, the same on all."""
        import torch

        from rlplace.workers.training.samples import joined, take_returns

        found = torch.zeros(len(inferred.values), device=self._model.device)
        if self.context.rank == 0:
            samples = [sample for group in inferred.groups for sample in group]
            taken = take_returns(self.context.channels[RETURNS], samples, self.context.owner)
            found.copy_(torch.from_numpy(joined(taken)))
        self._ranks.wait_for_rank_0("returns")
        return self._ranks.sum(found)  # zero on all others


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inferred:
    """An iteration between infer and learn, on the host."""

    iteration: int
    groups: Groups  # all on rank 0, none on the others
    shard: SampleShard
    values: Tensor  # [M], of all ranks' samples
