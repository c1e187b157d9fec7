"""Judges that are models: a reference that says how likely it finds each token, and reward models.

::

    whole      every rank takes groups by itself; no rank waits for another
    sharded    rank 0 takes what is there, packs it for all ranks, announces it ──▶ equally many passes on each rank
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.llm_job import REFERENCE_WEIGHTS
from rlplace.workers.roles.scored_text import retold
from rlplace.workers.roles.scorer import Intake, Judge, Judged, Samples, Tally, Values
from rlplace.workers.worker import MoveReport, not_resident

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.comm.weights.version import WeightReceiver
    from rlplace.config import FrozenConfig
    from rlplace.models.causal_lm import PackedLm
    from rlplace.models.frozen_lm import FrozenLm
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.announcements import Announcements
    from rlplace.workers.training.ranks import Ranks

MicroBatch = tuple[Judged, ...]
_WORKSPACE = "gathered weights"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What one rank scores at a time."""

    micro_batches: tuple[MicroBatch, ...]  # an empty one keeps the other ranks company
    due: int  # groups of the iteration that are still to come, for all ranks


class FrozenJudge(Judge):
    """One rank of a model that only answers. Owns its part of the weights."""

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks | None = None
    _announcements: Announcements
    _lm: FrozenLm[Any]
    _weights: Offloadable | None = None  # None: they live on the host

    # ── what a kind of judge says of itself ──────────────────────────────────────────────────────────────────────────

    @property
    def _block(self) -> FrozenConfig:
        raise NotImplementedError

    def _kind(self) -> type[PackedLm]:
        raise NotImplementedError

    def _judged(self, sample: Sample) -> Judged:
        """What its model is shown of it."""
        return Judged(group=sample.group, sample=sample.sample, tokens=sample.tokens, mask=sample.mask)

    def _values(self, samples: MicroBatch) -> Sequence[Values]:
        """Of each, by one pass."""
        raise NotImplementedError

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def folder(self) -> Path:
        """Of its model: its own, or the job's."""
        own = (self._block.model or {}).get("path")
        return self.config.model if own is None else Path(str(own))

    @property
    def _folder_key(self) -> str:
        named = "path" in (self._block.model or {})
        return f"{self.config.config.key_of(self.component)}.model.path" if named else "actor.model.path"

    @property
    def _sharded(self) -> bool:
        """A single rank has all of it: nothing is to be gathered."""
        return self._block.sharded and self.context.world_size > 1

    def setup(self) -> None:
        import torch

        from rlplace.models.frozen_lm import FrozenLm, FrozenSpec
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.announcements import Announcements
        from rlplace.workers.training.ranks import join_group

        context, block = self.context, self._block
        self._ranks = ranks = join_group(context)
        self._announcements = Announcements(ranks, context, self.config.config.runner.stage_timeout_s)
        mesh = ranks.mesh if self._sharded else ranks.alone() if block.on_host else None
        spec = FrozenSpec(folder=self.folder, dtype=block.dtype, on_host=block.on_host, key=self._folder_key)
        self._lm = FrozenLm(self._kind(), spec, mesh, torch.device(context.device.torch_name))
        for module in self._lm.fsdp_modules:
            ranks.carry(module)
        if not block.on_host:
            self._weights = Offloadable(f"{self.component} weights", context.device, self._lm.weight_tensors)
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        """Brings the weights on or off; those that live on the host stay there."""
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

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def infer(self, iteration: int, version: int) -> Metrics:
        """With a sharded model a collective, but for the waiting: no rank is away for longer than rank 0 waits."""
        self._require_full()
        tally = Tally()
        intake = self._intake(self.config.prompts if self._sharded else self._even_share)
        with self._computing():
            for passes in self._together(intake) if self._sharded else self._alone(intake):
                for samples in passes.micro_batches:
                    self._check_cancelled()
                    began = time.perf_counter()
                    values = self._values(samples)
                    tally.busy_s += time.perf_counter() - began
                    tally.tokens += sum(len(sample.tokens) for sample in samples)
                    self._put(samples, values, tally)
        return tally.metrics(self.component, intake.wait_s)

    def _alone(self, intake: Intake) -> Iterator[Passes]:
        while intake.due:
            (own,) = self._packed(intake.take(), 1)
            yield Passes(micro_batches=own, due=intake.due)

    def _together(self, intake: Intake) -> Iterator[Passes]:
        """Rank 0 alone waits for samples; the others for its announcement, outside of any collective."""
        from rlplace.workers.training.samples import share_out

        assert self._ranks is not None, "setup comes first"
        due = self.config.prompts
        while due:
            shares: list[Passes] | None = None
            if self.context.rank == 0:
                parts = self._packed(intake.take(), self.context.world_size)
                shares = [Passes(micro_batches=part, due=intake.due) for part in parts]
            self._announcements.meet("samples")
            passes = share_out(shares, self._ranks)
            due = passes.due
            yield passes

    def _packed(self, samples: Samples, ranks: int) -> list[tuple[MicroBatch, ...]]:
        """Micro-batches of each rank, within the token budget and equally many."""
        from rlplace.algo.packing import pack

        judged = [self._judged(sample) for sample in samples]
        packing = pack([len(each.tokens) for each in judged], ranks, self._block.token_budget)
        return [tuple(tuple(judged[i] for i in picks) for picks in rank) for rank in packing.ranks]

    def _scored(self, samples: MicroBatch, *others: object) -> Any:
        """What the model gives; with a sharded one, a collective."""
        import torch

        from rlplace.models.packed_attention import Packed

        packed = Packed.of([s.tokens for s in samples], [s.mask for s in samples], self._lm.device)
        with torch.no_grad():
            return self._lm.module(packed, *others)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Accounts what a pass holds beside the resident state, frees it at the end."""
        self.context.device.acquire(self._lm.gathered_bytes, _WORKSPACE)
        try:
            yield
        finally:
            self._lm.drop_gathered()
            self.context.device.release(_WORKSPACE)


class ReferenceWorker(FrozenJudge):
    """The policy that the actor stays near: log-probabilities of the learned tokens as they were drawn."""

    _receiver: WeightReceiver | None = None

    @property
    def _block(self) -> FrozenConfig:
        return self.config.config.reference

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.causal_lm import CausalLm

        return CausalLm

    def setup(self) -> None:
        super().setup()
        if REFERENCE_WEIGHTS in self.context.channels:
            from rlplace.comm.weights.receiver import CopyReceiver

            channel = self.context.channels[REFERENCE_WEIGHTS]
            self._receiver = CopyReceiver(channel, self.context.rank)  # each rank has a copy through the channel

    def _values(self, samples: MicroBatch) -> Sequence[Values]:
        temperature = self.config.config.text_rollout.temperature or 1.0  # greedy answers come with the model's own
        logprobs = self._scored(samples, temperature).logprobs.float().cpu().numpy()
        return np.split(logprobs, np.cumsum([sample.mask.sum() for sample in samples])[:-1]) if samples else []

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Becomes the actor of `version`, which sends itself at the same time, in an iteration in which both do."""
        if not self.config.refreshes(iteration):
            return {}
        if self._residency < Residency.WEIGHTS:
            raise not_resident(self.context.owner, "refresh", has=self._residency, needs=Residency.WEIGHTS)
        assert self._receiver is not None, "a reference that is refreshed has a channel"
        began = time.perf_counter()
        with self._receiver.pull(version) as received:
            self._lm.load(received.tensors)
        return {"reference/refresh_s": Metric(time.perf_counter() - began, "max")}

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        super().close()


class RewardModelWorker(FrozenJudge):
    """Scores whole episodes by a model of sequence classification, in its own tokens where the policy has others."""

    @property
    def _block(self) -> FrozenConfig:
        return self.config.config.reward_of(self.component)

    def _kind(self) -> type[PackedLm]:
        from rlplace.models.reward_model import reward_lm

        return reward_lm(self.config.config.reward_of(self.component).head)

    def setup(self) -> None:
        self._retold = retold(self.config, self.folder)
        super().setup()

    def _judged(self, sample: Sample) -> Judged:
        tokens = self._retold(sample)
        nowhere = np.zeros(len(tokens), np.bool_)  # what is scored is the whole
        return Judged(group=sample.group, sample=sample.sample, tokens=tokens, mask=nowhere)

    def _values(self, samples: MicroBatch) -> Sequence[Values]:
        scores = self._scored(samples).cpu().numpy()
        return [scores[i : i + 1] for i in range(len(samples))]
