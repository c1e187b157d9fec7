"""Scorers: workers that read whole groups of samples as they arrive and score each sample, and that do not learn.

::

    samples.<component> ── all groups that are there ──▶ score ──▶ scores.<component>, as soon as there are some

A scorer whose accelerators no other component needs during rollout scores while rollout still generates: it waits for
the next group like any reader of a channel, and ends after the last group of the iteration. A model scores in passes:

    whole      every rank reads groups by itself; no rank waits for another
    sharded    rank 0 reads what is there, packs it for all ranks, announces it ──▶ equally many passes on each rank
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.errors import ChannelEmpty
from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import block_edges
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores, Tokens
from rlplace.workers.arguments import WorkerArguments, samples_for, scores_of
from rlplace.workers.worker import (
    MoveReport,
    Worker,
    WorkerContext,
    cancelled,
    not_resident,
    out_of_step,
    score_not_finite,
)

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.config import FrozenConfig
    from rlplace.models.causal_lm import FrozenLm, PackedLm
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.ranks import FromRank0, Ranks

Samples = tuple[Sample, ...]
Values = NDArray[np.float32]

_WORKSPACE = "gathered weights"


class SampleReader:
    """Reads this rank's `due` groups of an iteration of `groups`, in order of arrival."""

    def __init__(self, channel: Channel, due: int, groups: int, owner: str) -> None:
        self._channel, self._groups, self._owner = channel, groups, owner
        self._seen: set[int] = set()
        self.due = due
        self.wait_s = 0.0

    def take(self, *, wait: bool = True) -> Samples:
        """Return the samples of all groups that are there; with `wait`, of one group at least.

        Raises ChannelTimeout, ChannelBroken; ChannelMisuse for a group that is not of this iteration.
        """
        taken: list[Sample] = []
        began = time.perf_counter()
        while self.due:
            try:
                group = self._channel.get() if wait and not taken else self._channel.get_nowait()
            except ChannelEmpty:
                break
            number = group[0].group
            if number in self._seen or not 0 <= number < self._groups:
                expected = f"each of the groups 0-{self._groups - 1} once"
                raise out_of_step(
                    self._owner, "samples are not of this iteration", got=f"group {number}", expected=expected
                )
            self._seen.add(number)
            self.due -= 1
            taken += group
        self.wait_s += time.perf_counter() - began
        return tuple(taken)


@dataclasses.dataclass(slots=True)
class ScoringCounts:
    """Measurements of one iteration so far."""

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One sample as a model reads it."""

    group: int
    sample: int
    tokens: Tokens  # [L'], in the model's own vocabulary
    mask: NDArray[np.bool_]  # [L'], true at the tokens to score


class Scorer(Worker):
    """Base of all scorers. Ranks share one channel: each reads its even share of whole groups."""

    config: WorkerArguments

    def __init__(self, config: WorkerArguments, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._residency = Residency.OFF

    @property
    def component(self) -> str:
        return self.context.slot.component

    def move(self, to: Residency) -> MoveReport:
        self._residency = to
        return MoveReport(residency=to, accelerator_bytes=0, host_bytes=0, seconds=0.0)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Score every sample of this rank's groups of an iteration; return when the last scores are put."""
        if self._residency < Residency.FULL:
            raise not_resident(self.context.owner, "infer", has=self._residency, needs=Residency.FULL)
        channel, due = self.context.channels[samples_for(self.component)], self._groups_due()
        reader, counts = SampleReader(channel, due, self.config.prompts, self.context.owner), ScoringCounts()
        self._score_all(reader, counts)
        return counts.metrics(self.component, reader.wait_s)

    def _groups_due(self) -> int:
        """Count the groups of an iteration that this rank reads."""
        first, stop = block_edges(self.config.prompts, self.context.world_size)[self.context.rank :][:2]
        return stop - first

    def _score_all(self, reader: SampleReader, counts: ScoringCounts) -> None:
        """Read, score and put until nothing is due."""
        raise NotImplementedError

    def _check_cancelled(self) -> None:
        if self.context.cancelled.is_set():
            raise cancelled(self.context.owner, "infer")

    def _put(self, samples: Sequence[Sample | ModelInput], values: Iterable[Values], counts: ScoringCounts) -> None:
        """Put one Scores per sample. Raises RewardError for a value that is not finite, before it can be learned."""
        scores = [
            Scores(group=sample.group, sample=sample.sample, values=np.asarray(value, np.float32))
            for sample, value in zip(samples, values, strict=True)
        ]
        for score in scores:
            if not np.isfinite(score.values).all():
                raise score_not_finite(self.component, score)
        counts.samples += len(scores)
        counts.tokens += sum(len(sample.tokens) for sample in samples)
        if scores:
            self.context.channels[scores_of(self.component)].put(tuple(scores), weight=len(scores))


class StreamingScorer(Scorer):
    """Base of scorers that work outside of this thread: submits samples as they arrive, puts scores as they finish."""

    def _submit(self, samples: Samples) -> None:
        raise NotImplementedError

    def _finished(self) -> tuple[list[Sample], list[float]]:
        """Wait for some of the submitted samples; return them with their scores, maybe none."""
        raise NotImplementedError

    def _score_all(self, reader: SampleReader, counts: ScoringCounts) -> None:
        in_flight = 0
        while reader.due or in_flight:
            self._check_cancelled()
            arrived = reader.take(wait=not in_flight)
            self._submit(arrived)
            began = time.perf_counter()
            samples, scores = self._finished()
            counts.busy_s += time.perf_counter() - began
            in_flight += len(arrived) - len(samples)
            self._put(samples, [np.array([score], np.float32) for score in scores], counts)


MicroBatches = tuple[tuple[ModelInput, ...], ...]  # an empty one takes part in the other ranks' collectives


class ModelScorer(Scorer):
    """Base of scorers that are models. Owns this rank's part of the weights."""

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks | None = None
    _from_rank_0: FromRank0
    _lm: FrozenLm[Any]
    _weights: Offloadable | None = None  # None: they live on the host

    @property
    def _block(self) -> FrozenConfig:
        """Config of this component."""
        raise NotImplementedError

    def _kind(self) -> type[PackedLm]:
        raise NotImplementedError

    def _input(self, sample: Sample) -> ModelInput:
        return ModelInput(group=sample.group, sample=sample.sample, tokens=sample.tokens, mask=sample.mask)

    def _values(self, batch: tuple[ModelInput, ...]) -> Sequence[Values]:
        """Score each sample of a micro-batch by one pass."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """Folder of the component's own model, or of the job's."""
        own = (self._block.model or {}).get("path")
        return self.config.model if own is None else Path(str(own))

    @property
    def _sharded(self) -> bool:
        """A single rank has the whole model: nothing is to be gathered."""
        return self._block.sharded and self.context.world_size > 1

    def setup(self) -> None:
        import torch

        from rlplace.models.causal_lm import FrozenLm
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.ranks import FromRank0, join_group

        context, block = self.context, self._block
        self._ranks = ranks = join_group(context)
        self._from_rank_0 = FromRank0(ranks, context, self.config.config.runner.stage_timeout_s)
        mesh = ranks.mesh if self._sharded else ranks.alone() if block.on_host else None
        own_folder = "path" in (block.model or {})
        key = f"{self.config.config.key_of(self.component)}.model.path" if own_folder else "actor.model.path"
        device = torch.device(context.device.torch_name)
        self._lm = FrozenLm(self._kind(), self.folder, block.dtype, mesh, device, on_host=block.on_host, key=key)
        for module in self._lm.fsdp_modules:
            ranks.carry(module)
        if not block.on_host:
            self._weights = Offloadable(f"{self.component} weights", context.device, self._lm.weight_tensors)
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        """Bring the weights on or off; those that live on the host stay there."""
        began = time.perf_counter()
        weights = self._weights
        if weights is not None:
            weights.offload() if to is Residency.OFF else weights.onload()
        self._residency = to
        on_host = sum(tensor.nbytes for tensor in self._lm.weight_tensors()) if weights is None else weights.host_bytes
        return MoveReport(
            residency=to,
            accelerator_bytes=0 if weights is None else weights.accelerator_bytes,
            host_bytes=on_host,
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _groups_due(self) -> int:
        return self.config.prompts if self._sharded else super()._groups_due()

    def _score_all(self, reader: SampleReader, counts: ScoringCounts) -> None:
        """Score in passes. A sharded model's passes are collectives; waiting for samples is not.

        What a pass holds beside the resident state is accounted for, and freed at the end.
        """
        self.context.device.acquire(self._lm.gathered_bytes, _WORKSPACE)
        try:
            for batches in self._together(reader) if self._sharded else self._alone(reader):
                for batch in batches:
                    self._check_cancelled()
                    began = time.perf_counter()
                    values = self._values(batch)
                    counts.busy_s += time.perf_counter() - began
                    self._put(batch, values, counts)
        finally:
            self._lm.drop_gathered()
            self.context.device.release(_WORKSPACE)

    def _alone(self, reader: SampleReader) -> Iterator[MicroBatches]:
        while reader.due:
            yield self._packed(reader.take(), 1)[0]

    def _together(self, reader: SampleReader) -> Iterator[MicroBatches]:
        """Rank 0 alone waits for samples; the others wait for its announcement, outside of any collective."""
        due = self.config.prompts  # groups of the iteration that are still to come, for all ranks
        while due:
            parts: list[tuple[int, MicroBatches]] | None = None
            if self.context.rank == 0:
                packed = self._packed(reader.take(), self.context.world_size)
                parts = [(reader.due, batches) for batches in packed]
            due, batches = self._from_rank_0.scatter(parts, "samples")
            yield batches

    def _packed(self, samples: Samples, ranks: int) -> list[tuple[tuple[ModelInput, ...], ...]]:
        """Make micro-batches for each rank, within the token budget and equally many."""
        from rlplace.algo.packing import pack

        inputs = [self._input(sample) for sample in samples]
        packing = pack([len(each.tokens) for each in inputs], ranks, self._block.token_budget)
        return [tuple(tuple(inputs[i] for i in picks) for picks in rank) for rank in packing.ranks]

    def _forward(self, batch: tuple[ModelInput, ...], *others: object) -> Any:
        """Run one pass of the model; with a sharded one, a collective."""
        import torch

        from rlplace.models.packed_attention import Packed

        packed = Packed.of([each.tokens for each in batch], [each.mask for each in batch], self._lm.device)
        with torch.no_grad():
            return self._lm.module(packed, *others)
