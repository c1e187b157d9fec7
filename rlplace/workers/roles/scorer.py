"""What judges have in common: they are given whole groups of samples as they come, and say something of each sample.

::

    samples.<me> ── groups, all that are there ──▶ score ──▶ scores.<me>: as soon as there are some

A judge whose accelerators nobody else needs during rollout scores while others still generate. It need not know: it
waits for the next group like anybody who takes from a channel, and ends after the last of the iteration.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import block_edges
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores, Tokens
from rlplace.workers.llm_job import LlmJob, samples_for, scores_of
from rlplace.workers.refusals import score_not_finite
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, cancelled, not_resident, out_of_step

Samples = tuple[Sample, ...]
Values = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a model is shown of a sample."""

    group: int
    sample: int
    tokens: Tokens  # [L'], in its own vocabulary
    mask: NDArray[np.bool_]  # [L'], true at the tokens to score


class Intake:
    """Takes the `due` groups that are this rank's part of an iteration of `groups`: which, is whoever comes first."""

    def __init__(self, channel: Channel, due: int, groups: int, owner: str) -> None:
        self._channel, self._groups, self._owner = channel, groups, owner
        self._seen: set[int] = set()
        self.due = due
        self.wait_s = 0.0

    def take(self, *, wait: bool = True) -> Samples:
        """The samples of all groups that are there; `wait`: of one at least.

        Raises ChannelTimeout, ChannelBroken; ChannelMisuse for a group that is not of this iteration.
        """
        taken: list[Sample] = []
        began = time.perf_counter()
        while self.due:
            try:
                group = self._channel.get() if wait and not taken else self._channel.get_nowait()
            except ChannelEmpty:
                break
            self._check(group[0].group)
            self.due -= 1
            taken += group
        self.wait_s += time.perf_counter() - began
        return tuple(taken)

    def _check(self, number: int) -> None:
        if number in self._seen or not 0 <= number < self._groups:
            expected = f"each of the groups 0-{self._groups - 1} once"
            raise out_of_step(
                self._owner, "samples are not of this iteration", got=f"group {number}", expected=expected
            )
        self._seen.add(number)


@dataclasses.dataclass(slots=True)
class Tally:
    """What one iteration was made of, so far."""

    samples: int = 0
    tokens: int = 0
    busy_s: float = 0.0

    def metrics(self, component: str, wait_s: float) -> Metrics:
        return {
            f"{component}/samples": Metric(self.samples, "sum"),
            f"{component}/tokens_per_s": Metric(self.tokens / self.busy_s if self.busy_s else 0.0, "sum"),
            f"{component}/infer_s": Metric(self.busy_s, "max"),
            f"{component}/wait_s": Metric(wait_s, "max"),
        }


class Judge(Worker):
    """Base of all judges that do not learn. Ranks share one channel: each takes its even share of whole groups.

    A subclass says in `infer` how it scores. One that holds nothing on accelerators needs no more.
    """

    config: LlmJob

    def __init__(self, config: LlmJob, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._residency = Residency.OFF

    @property
    def component(self) -> str:
        return self.context.slot.component

    def move(self, to: Residency) -> MoveReport:
        self._residency = to
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0, seconds=0.0)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Scores every sample of this rank's groups of an iteration; returns when the last scores are put."""
        raise NotImplementedError

    def _require_full(self) -> None:
        if self._residency < Residency.FULL:
            raise not_resident(self.context.owner, "infer", has=self._residency, needs=Residency.FULL)

    def _check_cancelled(self) -> None:
        if self.context.cancelled.is_set():
            raise cancelled(self.context.owner, "infer")

    def _intake(self, due: int) -> Intake:
        """Of so many groups."""
        channel = self.context.channels[samples_for(self.component)]
        return Intake(channel, due, self.config.prompts, self.context.owner)

    @property
    def _even_share(self) -> int:
        """Groups of an iteration that this rank takes where each takes by itself."""
        first, stop = block_edges(self.config.prompts, self.context.world_size)[self.context.rank :][:2]
        return stop - first

    def _put(self, samples: Iterable[Sample | Judged], values: Iterable[Values], tally: Tally) -> None:
        """Raises RewardError for what is no finite number, which would end in the update."""
        scores = [
            Scores(group=sample.group, sample=sample.sample, values=np.asarray(value, np.float32))
            for sample, value in zip(samples, values, strict=True)
        ]
        for score in scores:
            if not np.isfinite(score.values).all():
                raise score_not_finite(self.component, score)
        tally.samples += len(scores)
        if scores:
            self.context.channels[scores_of(self.component)].put(tuple(scores), weight=len(scores))
