"""The critic of a language model: says what states are worth, learns from what came of them, leaves on demand.

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
from rlplace.workers.training.trained_lm import not_run, optimizer_of, path_of, spec_of
from rlplace.workers.training.worker import TrainingWorker
from rlplace.workers.worker import MoveReport, out_of_step

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from torch import Tensor

    from rlplace.config import Config
    from rlplace.workers.training.announcements import Announcements
    from rlplace.workers.training.critic_learner import CriticUpdate, LmCriticLearner
    from rlplace.workers.training.optimizer import Adam
    from rlplace.workers.training.samples import Groups, SampleShare
    from rlplace.workers.training.sharded_lm import ShardedLm

NAME = "critic"


class Critic(TrainingWorker):
    """One rank of the critic. All methods but `move` and `close` are collectives of the group.

    Owns its shards of the model and of the optimizer state, and from `infer` to `learn` an iteration's samples with
    their values, on the host.
    """

    config: WorkerArguments
    _lm: ShardedLm
    _optimizer: Adam
    _learner: LmCriticLearner
    _announcements: Announcements
    _inferred: _Inferred | None = None

    def setup(self) -> None:
        from rlplace.models.value_lm import build_value_lm
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.announcements import Announcements
        from rlplace.workers.training.critic_learner import LmCriticLearner
        from rlplace.workers.training.sharded_lm import ShardedLm

        config, context = self.config.config, self.context
        ranks = self._join()
        spec = spec_of(NAME, config.critic, critic_folder(self.config), config.runner.seed)
        self._lm = ShardedLm(spec, ranks, build_value_lm)
        self._weights = Offloadable("critic weights", context.device, self._lm.weight_tensors)
        self._optimizer = optimizer_of(config.critic, self._lm)
        self._optimizer_state = Offloadable("optimizer state", context.device, self._optimizer.tensors)
        self._learner = LmCriticLearner(config, self._lm, self._optimizer, ranks, context.owner)
        self._announcements = Announcements(ranks, context, config.runner.stage_timeout_s)
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        report = super().move(to)
        return dataclasses.replace(report, host_bytes=report.host_bytes + self._optimizer.host_bytes)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Waits for all groups of `iteration`; puts the values of their learned tokens and keeps them."""
        with self._computing("infer", Residency.WEIGHTS):
            began = time.perf_counter()
            groups, share = self._receive(iteration)
            received = time.perf_counter()
            values = self._learner.values(share).cpu()
            inferred = time.perf_counter()
        self._inferred = _Inferred(iteration=iteration, groups=groups, share=share, values=values)
        if self.context.rank == 0:
            self._put_scores(self._inferred)
        tokens = sum(share.numbers.lengths)
        return {
            "critic/infer_s": Metric(inferred - received, "max"),
            "critic/infer_wait_s": Metric(received - began, "max"),
            "critic/infer_tokens_per_s": Metric(tokens / (inferred - received), "min"),
            "critic/value": Metric(float(values.mean()) if len(values) else 0.0, weight=len(values)),
        }

    def learn(self, iteration: int, version: int) -> Metrics:
        """Waits for the returns of all groups of `iteration`, whose values were inferred; ends with other weights."""
        from rlplace.algo.token_advantages import explained_variance

        inferred = self._take_inferred(iteration)
        with self._computing("learn", Residency.FULL):
            began = time.perf_counter()
            returns = self._receive_returns(inferred)
            received = time.perf_counter()
            update = self._learner.learn(inferred.share, inferred.values.to(returns.device), returns, iteration)
            learned = time.perf_counter()
        tokens = len(inferred.values)
        return {
            **_metrics(update, learned - received),
            "critic/explained_variance": Metric(explained_variance(inferred.values, returns.cpu()), weight=tokens),
            "critic/return": Metric(float(returns.mean()) if tokens else 0.0, weight=tokens),
            "critic/wait_s": Metric(received - began, "max"),
        }

    def save_policy(self, path: str) -> None:
        """Rank 0 writes a folder of sequence classification with one label, factors merged. OutputError."""
        from rlplace.models.checkpoint import CheckpointWriter
        from rlplace.models.value_lm import value_config

        with self._computing("save_policy", Residency.WEIGHTS):
            writer = None
            if self.context.rank == 0:
                writer = CheckpointWriter(Path(path), self._lm.spec.folder, config=value_config(self._lm.module.lm))
            for name, tensor in self._lm.whole_weights():
                if writer is not None:
                    writer.add(name, tensor)
        if writer is not None:
            writer.finish()

    def digest(self) -> str:
        """SHA-256 of the whole weights as they are trained."""
        from rlplace.models.digest import digest

        with self._computing("digest", Residency.WEIGHTS):
            return digest({name: tensor.cpu() for name, tensor in self._lm.whole_weights()})

    # ── what comes and goes ──────────────────────────────────────────────────────────────────────────────────────────

    def _receive(self, iteration: int) -> tuple[Groups, SampleShare]:
        """All groups on rank 0, none on the others; what this rank needs of them."""
        from rlplace.workers.training.samples import share_out, take_groups

        assert self._ranks is not None, "setup comes first"
        groups: Groups = []
        if self.context.rank == 0:
            groups = take_groups(self.context.channels[samples_for(NAME)], self.config.prompts, self.context.owner)
        self._announcements.meet("samples")
        shares = self._learner.shares(groups, iteration) if self.context.rank == 0 else None
        return groups, share_out(shares, self._ranks)

    def _put_scores(self, inferred: _Inferred) -> None:
        from rlplace.tokens import Scores

        values = iter(inferred.values.split(list(inferred.share.numbers.learned)))
        for group in inferred.groups:
            said = tuple(Scores(group=s.group, sample=s.sample, values=next(values).numpy()) for s in group)
            self.context.channels[scores_of(NAME)].put(said)

    def _take_inferred(self, iteration: int) -> _Inferred:
        inferred, self._inferred = self._inferred, None
        if inferred is None or inferred.iteration != iteration:
            got = "nothing" if inferred is None else f"iteration {inferred.iteration}"
            raise out_of_step(
                self.context.owner, f"learn({iteration}) has no values to start from", got=got, expected="infer before"
            )
        return inferred

    def _receive_returns(self, inferred: _Inferred) -> Tensor:
        """[M] on this rank's device, the same on all."""
        import torch

        from rlplace.workers.training.returns import take_returns

        assert self._ranks is not None, "setup comes first"
        found = torch.zeros(len(inferred.values), device=self._lm.device)
        if self.context.rank == 0:
            samples = [sample for group in inferred.groups for sample in group]
            taken = take_returns(self.context.channels[RETURNS], samples, self.config.prompts, self.context.owner)
            found.copy_(torch.from_numpy(taken))
        self._announcements.meet("returns")
        return self._ranks.sum(found)  # zero on all others

    def _workspace_bytes(self, needs: Residency) -> int:
        return self._lm.gathered_bytes + (self._lm.gradient_bytes if needs is Residency.FULL else 0)

    def _drop_gathered(self) -> None:
        self._lm.drop_gathered()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inferred:
    """An iteration between infer and learn, on the host."""

    iteration: int
    groups: Groups  # all on rank 0, none on the others
    share: SampleShare
    values: Tensor  # [M], of all ranks' samples


def critic_folder(job: WorkerArguments) -> Path:
    """Of its own model, else of the job's: there the head starts anew."""
    path = path_of(job.config.critic)
    return job.model if path is None else Path(path)


def critic_problems(config: Config) -> list[Problem]:
    """What would stop a placed critic after its launch; `config` has the keys of the models' folders."""
    from rlplace.models.value_head import value_head_problem

    problems: list[Problem | None] = [*not_run(NAME, config.critic), _vocabulary_problem(config)]
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


def _metrics(update: CriticUpdate, seconds: float) -> Metrics:
    """The update's numbers, which all ranks agree on; tokens per second are of all ranks together."""
    metrics = {
        "critic/learn_s": Metric(seconds, "max"),
        "critic/tokens_per_s": Metric(update.tokens / seconds, "min"),
        "critic/lr": Metric(update.lr),
        "critic/optimizer_steps": Metric(update.steps),
        "critic/rank_imbalance": Metric(update.imbalance),
    }
    if update.mean is not None:
        metrics |= {f"critic/{name}": Metric(value) for name, value in update.mean._asdict().items()}
    return metrics
