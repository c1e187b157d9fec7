"""The critic of a language model: infers the values of states, learns from their returns, leaves on demand.

::

    infer    samples.critic ──▶ rank 0 ──▶ every rank: its samples ──▶ values of all tokens ──▶ rank 0 ──▶ scores.critic
    learn    returns ──▶ rank 0 ──▶ every rank: values are brought nearer to them
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import Problem
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import RETURNS, WorkerArguments, samples_for, scores_of
from rlplace.workers.training.worker import TrainedWorker, not_run, path_of, spec_of
from rlplace.workers.worker import out_of_step

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from torch import Tensor

    from rlplace.config import Config
    from rlplace.workers.training.lm_learner import CriticLearner
    from rlplace.workers.training.ranks import FromRank0
    from rlplace.workers.training.samples import Groups, SampleShard
    from rlplace.workers.training.trained_model import TrainedLm


class Critic(TrainedWorker):
    """One rank of the critic.

    Owns from `infer` to `learn` an iteration's samples with their values, on the host.
    """

    config: WorkerArguments
    _model: TrainedLm
    _learner: CriticLearner
    _from_rank_0: FromRank0
    _inferred: _Inferred | None = None

    def setup(self) -> None:
        from rlplace.models.causal_lm import ValueLm
        from rlplace.workers.training.lm_learner import CriticLearner
        from rlplace.workers.training.ranks import FromRank0
        from rlplace.workers.training.trained_model import TrainedLm

        config, critic = self.config.config, self.config.config.critic
        ranks = self._join()
        spec = spec_of("critic", critic, critic_folder(self.config), config.runner.seed)
        lm = TrainedLm(spec, ranks, ValueLm)
        trainer = self._train(lm, critic.optimizer, config.runner.total_iterations)
        self._learner = CriticLearner(config, lm, trainer, ranks)
        self._from_rank_0 = FromRank0(ranks, self.context, config.runner.stage_timeout_s)
        self.move(Residency.OFF)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Wait for all groups of `iteration`; put the values of their response tokens and keep them."""
        with self._computing("infer", Residency.WEIGHTS):
            began = time.perf_counter()
            groups, shard = self._receive(iteration)
            received = time.perf_counter()
            values = self._learner.values(shard).cpu()
            inferred = time.perf_counter()
        self._inferred = _Inferred(iteration=iteration, groups=groups, shard=shard, values=values)
        if self.context.rank == 0:
            self._put_scores(self._inferred)
        tokens = sum(shard.lengths.tokens)
        return {
            "critic/infer_s": Metric(inferred - received, "max"),
            "critic/infer_wait_s": Metric(received - began, "max"),
            "critic/infer_tokens_per_s": Metric(tokens / (inferred - received), "min"),
            "critic/value": Metric(float(values.mean()) if len(values) else 0.0, weight=len(values)),
        }

    def _receive(self, iteration: int) -> tuple[Groups, SampleShard]:
        """Return all groups on rank 0, none on the others; and what this rank needs of them."""
        from rlplace.workers.training.samples import take_groups

        groups: Groups = []
        shards: list[SampleShard] | None = None
        if self.context.rank == 0:
            groups = take_groups(self.context.channels[samples_for("critic")], self.config.prompts, self.context.owner)
            shards = self._learner.shards(groups, iteration)
        return groups, self._from_rank_0.scatter(shards, "samples")

    def _put_scores(self, inferred: _Inferred) -> None:
        from rlplace.tokens import Scores

        values = iter(inferred.values.split(list(inferred.shard.lengths.responses)))
        for group in inferred.groups:
            scores = tuple(Scores(group=s.group, sample=s.sample, values=next(values).numpy()) for s in group)
            self.context.channels[scores_of("critic")].put(scores)

    def learn(self, iteration: int, version: int) -> Metrics:
        """Wait for the returns of all groups of `iteration`, whose values were inferred; end with other weights."""
        from rlplace.algo.advantages import explained_variance

        inferred, self._inferred = self._inferred, None
        if inferred is None or inferred.iteration != iteration:
            got = "nothing" if inferred is None else f"iteration {inferred.iteration}"
            what = f"learn({iteration}) has no values to start from"
            raise out_of_step(self.context.owner, what, got=got, expected="infer before")
        with self._computing("learn", Residency.FULL):
            began = time.perf_counter()
            returns = self._receive_returns(inferred)
            received = time.perf_counter()
            update = self._learner.learn(inferred.shard, inferred.values.to(returns.device), returns, iteration)
            seconds = time.perf_counter() - received
        tokens = len(inferred.values)
        return {  # all ranks agree on the numbers of the update; tokens per second are of all ranks together
            "critic/learn_s": Metric(seconds, "max"),
            "critic/tokens_per_s": Metric(update.tokens / seconds, "min"),
            "critic/lr": Metric(update.lr),
            "critic/optimizer_steps": Metric(update.steps),
            "critic/rank_imbalance": Metric(update.imbalance),
            **{f"critic/{name}": Metric(value) for name, value in (update.mean or {}).items()},
            "critic/explained_variance": Metric(explained_variance(inferred.values, returns.cpu()), weight=tokens),
            "critic/return": Metric(float(returns.mean()) if tokens else 0.0, weight=tokens),
            "critic/wait_s": Metric(received - began, "max"),
        }

    def _receive_returns(self, inferred: _Inferred) -> Tensor:
        """Return [M] on this rank's device, the same on all."""
        import torch

        from rlplace.workers.training.samples import take_returns

        assert self._ranks is not None, "setup comes first"
        found = torch.zeros(len(inferred.values), device=self._model.device)
        if self.context.rank == 0:
            samples = [sample for group in inferred.groups for sample in group]
            taken = take_returns(self.context.channels[RETURNS], samples, self.config.prompts, self.context.owner)
            found.copy_(torch.from_numpy(taken))
        self._from_rank_0.wait_for_rank_0("returns")
        return self._ranks.sum(found)  # zero on all others


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inferred:
    """An iteration between infer and learn, on the host."""

    iteration: int
    groups: Groups  # all on rank 0, none on the others
    shard: SampleShard
    values: Tensor  # [M], of all ranks' samples


def critic_folder(job: WorkerArguments) -> Path:
    """Return the folder of its own model, else of the job's: there the head starts anew."""
    path = path_of(job.config.critic)
    return job.model if path is None else Path(path)


def critic_problems(config: Config) -> list[Problem]:
    """Report what would stop a placed critic after its launch; `config` has the keys of the models' folders."""
    from rlplace.models.heads import value_head_problem

    problems: list[Problem | None] = [*not_run("critic", config.critic), _vocabulary_problem(config)]
    path = path_of(config.critic)
    if path is not None and Path(path).is_dir():
        problems.append(value_head_problem(Path(path), "critic.model.path"))
    return [problem for problem in problems if problem is not None]


def _vocabulary_problem(config: Config) -> Problem | None:
    actor, critic = ((model or {}).get("vocab_size") for model in (config.model, config.critic.model))
    if not isinstance(actor, int) or not isinstance(critic, int) or critic >= actor:
        return None
    return Problem(
        code="critic-vocabulary",
        key="critic.model",
        what="it does not know all tokens of the actor",
        got=f"vocab_size: {critic}, and the actor's is {actor}",
        why="a critic is given the very tokens that were sampled; it needs the actor's vocabulary",
        fix="critic.model: null        (the actor's own, with a new head; or another model with its tokenizer)",
    )
