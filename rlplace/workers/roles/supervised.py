"""The workers of a run on written answers: env reads rows, and the actor learns their answers.

::

    read        env: rows of a data set ── samples: one row each ──▶ actor rank 0
    learn       actor rank 0: tokens ──▶ every rank: the update
    evaluate    env ── samples.held_out: one row each, then an empty tuple ──▶ actor rank 0 ──▶ every rank: loss
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlplace.metrics import CUT_ROWS, DROPPED_PROMPTS, Metric, Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Sample
from rlplace.workers.arguments import HELD_OUT, SAMPLES, TextArguments
from rlplace.workers.roles.answered_rows import AnsweredRow, AnsweredRows
from rlplace.workers.roles.env import EnvWorker
from rlplace.workers.roles.learn_metrics import as_text, update_metrics
from rlplace.workers.roles.prompts import splits
from rlplace.workers.training.worker import TrainedWorker

if TYPE_CHECKING:  # the driver imports this module too; torch is imported only in setup
    from rlplace.workers.training.samples import Groups, SampleShard
    from rlplace.workers.training.trained_model import TrainedLm


class RowsWorker(EnvWorker):
    """One env rank: it reads a block of neighbouring rows of each iteration, and sends their tokens to the actor.

    Which row comes next depends only on its number in the run.
    """

    uses_accelerators: ClassVar[bool] = False
    holds: ClassVar[str] = "rows"

    config: TextArguments

    def setup(self) -> None:
        config = self.config.config
        self._seed_numbers()
        self._rows = {
            split: AnsweredRows(config, self.config.model, split)
            for split in splits(config)
        }

    def read(self, iteration: int) -> Metrics:
        """Send this rank's rows of `iteration` to the actor, and return metrics."""
        self._require(Residency.FULL, "read")
        rows = self._rows["train"]
        first = self.config.first_prompt(iteration)
        sent: list[AnsweredRow] = []
        for group in self.config.groups(self.context.rank):
            row = rows.row(first + group)
            sent.append(row)
            self._put(SAMPLES, group, row)
        return self._metrics("env", rows, sent)

    def evaluate(self, iteration: int) -> Metrics:
        """Send this rank's held-out rows to the actor, then an empty tuple, and return metrics."""
        rows = self._rows["held_out"]
        sent: list[AnsweredRow] = []
        for number in self.config.held_out(self.context.rank, rows.asked):
            row = rows.row(number)
            sent.append(row)
            self._put(HELD_OUT, number, row)
        self.context.channels[HELD_OUT].put(())
        return self._metrics("eval", rows, sent)

    def _put(self, channel: str, group: int, row: AnsweredRow) -> None:
        sample = Sample(
            group=group,
            sample=0,
            tokens=row.tokens,
            mask=row.mask,
            logprobs=np.zeros(len(row.tokens), np.float32),
            versions=np.full(len(row.tokens), -1, np.int32),
            reward=0.0,
            rewards={},
            turns=1,
            truncated=row.is_cut,
        )
        self.context.channels[channel].put((sample,), weight=len(row.tokens))

    def _metrics(
        self, component: str, rows: AnsweredRows, sent: Sequence[AnsweredRow]
    ) -> Metrics:
        """Return the metrics of the rows that were sent. `component`: first part of the metrics' names."""
        remark = rows.remark(component)
        notes = () if remark is None else (remark,)
        metrics = {
            f"{component}/rows": Metric(len(sent), "sum"),
            f"{component}/{CUT_ROWS}": Metric(
                sum(row.is_cut for row in sent), "sum", notes=notes
            ),
            f"{component}/rows_unlearned": Metric(
                sum(not row.mask.any() for row in sent), "sum"
            ),
        }
        if rows.dropped:
            longest = self.config.config.algorithm.max_prompt_length
            note = f"{component}: left out {rows.dropped} rows with prompts of more than {longest} tokens"
            metrics[f"{component}/{DROPPED_PROMPTS}"] = Metric(
                rows.dropped, "max", notes=(note,)
            )
        return metrics


class SupervisedActor(TrainedWorker):
    """One rank of an actor that learns written answers. Rank 0 receives all rows of an iteration."""

    imports: ClassVar[tuple[str, ...]] = (
        "rlplace.models.causal_lm",
        "rlplace.workers.training.lm_learner",
        "rlplace.workers.training.state",
    )

    config: TextArguments
    _model: TrainedLm

    def setup(self) -> None:
        from rlplace.models.vision import policy_of
        from rlplace.workers.training.lm_learner import SupervisedLearner
        from rlplace.workers.training.trained_model import TrainedLm

        config, actor = self.config.config, self.config.config.actor
        ranks = self._join()
        folder = self.config.model
        lm = TrainedLm(self._spec(actor, folder), ranks, policy_of(config, folder))
        trainer = self._train(lm, actor.optimizer, ema_decay=actor.ema_decay)
        self._learner = SupervisedLearner(
            config, lm, trainer, ranks, None, actor.token_budget
        )
        self.move(Residency.OFF)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.config.model)

    def learn(self, iteration: int, version: int) -> Metrics:
        """Update the weights from `version` to the next version with the rows of `iteration`, and return metrics."""
        from rlplace.workers.training.samples import take_groups

        groups: Groups = []
        shards: list[SampleShard] | None = None
        with self._computing("learn", Residency.FULL):
            watch = Stopwatch()
            if self.context.rank == 0:
                channel = self.context.channels[SAMPLES]
                groups = take_groups(channel, self.config.prompts, self.context.owner)
                shards = self._learner.shards(groups, iteration)
            shard = self._ranks.scatter(shards, "samples")
            watch.lap("wait")
            update = self._learner.learn(shard, iteration)
            watch.lap("learn")
        return {
            **self._row_metrics(groups),
            **update_metrics("actor", [update], learn_s=watch.seconds["learn"]),
            **watch.metrics("actor"),
        }

    def _row_metrics(self, groups: Groups) -> Metrics:
        """Return the metrics of the rows of all ranks; empty without rows, as on all ranks but 0."""
        samples = [sample for group in groups for sample in group]
        if not samples:
            return {}
        lengths = [sample.weight for sample in samples]
        learned = [sample.response_tokens for sample in samples]
        most = self.config.config.runner.samples
        texts = tuple(as_text(groups, most, self._tokenizer)) if most else ()
        rows = len(samples)
        return {
            "actor/samples": Metric(rows, "sum", notes=texts),
            "actor/tokens": Metric(sum(lengths), "sum"),
            "actor/tokens_learned": Metric(sum(learned), "sum"),
            "actor/length": Metric(sum(lengths) / rows, weight=rows),
            "actor/length_max": Metric(max(lengths), "max"),
            "actor/length_learned": Metric(sum(learned) / rows, weight=rows),
            "actor/length_learned_max": Metric(max(learned), "max"),
        }

    def evaluate(self, iteration: int) -> Metrics:
        """Return loss and accuracy of the held-out rows by the present weights. The env ranks run `evaluate` too."""
        with self._computing("learn", Residency.WEIGHTS):
            shards: list[SampleShard] | None = None
            if self.context.rank == 0:
                rows = sorted(self._held_out(), key=lambda sample: sample.group)
                shards = self._learner.shards([[row] for row in rows], infer=True)
            shard = self._ranks.scatter(shards, "held-out rows")
            found = self._learner.evaluate(shard)
        return {
            "eval/loss": Metric(found.loss, weight=found.tokens),
            "eval/token_accuracy": Metric(found.token_accuracy, weight=found.tokens),
            "eval/accuracy": Metric(found.accuracy, weight=found.rows),
            "eval/tokens_learned": Metric(found.tokens, "max"),
        }

    def _held_out(self) -> Iterator[Sample]:
        """Yield the held-out rows of all env ranks, in the order of arrival."""
        channel = self.context.channels[HELD_OUT]
        left = self.config.ranks["env"]
        while left:
            group: Sequence[Sample] = channel.get()
            left -= not group
            yield from group
