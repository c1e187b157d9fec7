"""The actor of a language model: takes whole groups, learns, hands its weights to the engines, leaves on demand.

::

    infer      samples ──▶ every rank: what its own weights say of them ──▶ rank 0      where the algorithm asks for it
    appraise   rank 0: scores of all that judge ──▶ what each token was worth ──▶ returns, for a critic
    learn      rank 0: tokens and marks ──▶ every rank: the update
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import deliver_by_rank
from rlplace.placement.schedule import Residency
from rlplace.workers.arguments import REFERENCE_WEIGHTS, RETURNS, SAMPLES, WorkerArguments
from rlplace.workers.training.trained_lm import optimizer_of, spec_of
from rlplace.workers.training.worker import TrainingWorker
from rlplace.workers.worker import MoveReport

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.comm.weights.sender import WeightSender
    from rlplace.comm.weights.shards import Shard
    from rlplace.workers.training.announcements import Announcements
    from rlplace.workers.training.appraisal import Appraisal, Appraiser, Inferred
    from rlplace.workers.training.average import MovingAverage
    from rlplace.workers.training.lm_learner import LmLearner
    from rlplace.workers.training.optimizer import Adam
    from rlplace.workers.training.parts import Part
    from rlplace.workers.training.samples import Groups, SampleShare
    from rlplace.workers.training.sharded_lm import ShardedLm

NAME = "actor"


class LmActor(TrainingWorker):
    """One rank of the learner. All methods but `move` and `close` are collectives of the group.

    Owns its shards of the model, of the optimizer state and of the average. Rank 0 also owns the samples of an
    iteration, from when it takes them until they are learned.
    """

    config: WorkerArguments
    _lm: ShardedLm
    _optimizer: Adam
    _learner: LmLearner
    _announcements: Announcements
    _average: MovingAverage | None = None
    _reference: WeightSender | None = None
    _appraiser: Appraiser
    _groups: Groups | None = None
    _inferred: Inferred | None = None
    _appraisal: Appraisal | None = None

    def setup(self) -> None:
        from rlplace.models.causal_lm import build
        from rlplace.models.value_lm import build_actor_critic_lm
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.announcements import Announcements
        from rlplace.workers.training.appraisal import Appraiser
        from rlplace.workers.training.average import MovingAverage
        from rlplace.workers.training.lm_learner import LmLearner
        from rlplace.workers.training.sharded_lm import ShardedLm

        config, device = self.config.config, self.context.device
        ranks = self._join()
        spec = spec_of(NAME, config.actor, self.config.model, config.runner.seed)
        self._lm = ShardedLm(spec, ranks, build_actor_critic_lm if config.critic.on_actor else build)
        self._weights = Offloadable("actor weights", device, self._lm.weight_tensors)
        self._optimizer = optimizer_of(config.actor, self._lm)
        self._optimizer_state = Offloadable("optimizer state", device, self._optimizer.tensors)
        if config.actor.ema_decay is not None:
            self._average = MovingAverage(self._lm.trained_shards(), config.actor.ema_decay)
        self._learner = LmLearner(config, self._lm, self._optimizer, ranks, self.context.owner, self._average)
        self._announcements = Announcements(ranks, self.context, config.runner.stage_timeout_s)
        self._appraiser = Appraiser(self.config)
        self._open_sync(
            config.actor.sync,
            (self.context.folder and self.config.deliveries) or deliver_by_rank(self.config.ranks["rollout"]),
            checksums=config.actor.sync.verify == "checksum",
        )
        if REFERENCE_WEIGHTS in self.context.channels:
            self._open_refresh()
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        report = super().move(to)
        averaged = 0 if self._average is None else self._average.host_bytes
        return dataclasses.replace(report, host_bytes=report.host_bytes + self._optimizer.host_bytes + averaged)

    def infer(self, iteration: int, version: int) -> Metrics:
        """Waits for all groups of `iteration`; keeps what the weights of `version` say of their learned tokens.

        Does nothing where the algorithm asks for nothing of it.
        """
        from rlplace.workers.training.inference import asked_of_actor

        asked = asked_of_actor(self.config.config)
        if not asked:
            return {}
        with self._computing("infer", Residency.WEIGHTS):
            began = time.perf_counter()
            share = self._share_to_infer()
            received = time.perf_counter()
            found = self._learner.infer(share, asked)
            inferred = time.perf_counter()
        if self.context.rank == 0:
            self._inferred = found
        return {
            "actor/infer_s": Metric(inferred - received, "max"),
            "actor/infer_wait_s": Metric(received - began, "max"),
        }

    def appraise(self, iteration: int) -> Metrics:
        """Rank 0 gathers all scores of `iteration` and puts the returns. Needs no accelerator, is no collective."""
        if self.context.rank != 0:
            return {}
        self._appraisal = self._appraise()
        return self._appraisal.metrics

    def learn(self, iteration: int, version: int) -> Metrics:
        """Waits for the groups of `iteration`, sampled under `version` or before; makes the next version.

        In parts, as soon as there are groups for one, where generating goes on meanwhile: see lm_parts.
        """
        from rlplace.workers.training.parts import metrics_of, parts_of

        with self._computing("learn", Residency.FULL):
            parts = [self._learn_part(iteration, groups) for groups in parts_of(self.config.config)]
        return metrics_of(parts, version)

    def _learn_part(self, iteration: int, groups: int) -> Part:
        from rlplace.workers.training.parts import Part

        began = time.perf_counter()
        share, taken = self._receive(iteration, groups)
        received = time.perf_counter()
        update = self._learner.learn(share, iteration)
        return Part(
            groups=taken,
            update=update,
            wait_s=received - began,
            learn_s=time.perf_counter() - received,
        )

    def _share_to_infer(self) -> SampleShare:
        """This rank's samples, of which nothing is known yet."""
        from rlplace.workers.training.inference import inference_shares
        from rlplace.workers.training.samples import share_out

        assert self._ranks is not None, "setup comes first"
        shares = None
        if self.context.rank == 0:
            shares = inference_shares(self._take(), self.context.world_size, self.config.config.actor.token_budget)
        self._announcements.meet("samples")
        return share_out(shares, self._ranks)

    def _take(self, part: int | None = None) -> Groups:
        """All groups of this iteration, or so many more of them; on rank 0."""
        from rlplace.workers.training.samples import take_groups

        if self._groups is None:
            prompts, owner = self.config.prompts, self.context.owner
            self._groups = take_groups(self.context.channels[SAMPLES], prompts, owner, part=part)
        return self._groups

    def _appraise(self, part: int | None = None) -> Appraisal:
        from rlplace.workers.training.appraisal import Inferred
        from rlplace.workers.training.scores import gather_scores

        groups, context = self._take(part), self.context
        samples = [sample for group in groups for sample in group]
        scores = gather_scores(context.channels, self.config.scorers, samples, context.owner)
        appraisal = self._appraiser.appraise(groups, scores, self._inferred or Inferred())
        if "critic" in self.config.ranks:
            for returns in appraisal.returns():
                context.channels[RETURNS].put(returns)
        return appraisal

    def _receive(self, iteration: int, part: int) -> tuple[SampleShare, Groups]:
        """This rank's samples; on rank 0 also all groups, whatever becomes of them."""
        from rlplace.workers.training.samples import share_out

        assert self._ranks is not None, "setup comes first"
        shares: list[SampleShare] | None = None
        groups: Groups = ()
        if self.context.rank == 0:
            appraisal = self._appraisal or self._appraise(part)
            self._groups = self._inferred = self._appraisal = None
            learned = appraisal.with_signal() if self.config.config.algorithm.mixed_only else appraisal
            shares, groups = self._learner.shares(learned, iteration), appraisal.groups
        self._announcements.meet("samples")
        return share_out(shares, self._ranks), groups

    def refresh(self, iteration: int, version: int) -> Metrics:
        """Sends the weights to the reference, in an iteration before which it takes them."""
        if not self.config.refreshes(iteration):
            return {}
        with self._computing("refresh", Residency.WEIGHTS):
            assert self._reference is not None, "a reference that is refreshed has a channel"
            report = self._reference.push(version, self._lm.shards()).wait()
        return {"actor/refresh_s": Metric(report.seconds, "max")}

    def _open_refresh(self) -> None:
        """Each rank of the reference gets a copy of its own, through the channel."""
        from rlplace.comm.weights.sender import WeightSender

        channel, readers = self.context.channels[REFERENCE_WEIGHTS], deliver_by_rank(self.config.ranks["reference"])
        self._reference = WeightSender(channel, rank=self.context.rank, deliveries=readers)

    def save_policy(self, path: str) -> None:
        """Rank 0 writes a Hugging Face folder: weights as the optimizer has them, factors merged. OutputError.

        Where the average of them is kept, a second one of the same name with `_ema` behind it.
        """
        with self._computing("save_policy", Residency.WEIGHTS):
            self._save(Path(path))
            if self._average is not None:
                with self._average.in_place():
                    self._save(Path(f"{path}_ema"))

    def _save(self, folder: Path) -> None:
        from rlplace.models.checkpoint import CheckpointWriter

        writer = CheckpointWriter(folder, self.config.model) if self.context.rank == 0 else None
        for name, tensor in self._lm.whole_weights():
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.finish()

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """log p(tokens[i] | tokens[:i]) for i >= 1, without temperature, to compare with an engine's."""
        import numpy as np
        import torch

        from rlplace.models.packed_attention import Packed

        with self._computing("logprobs", Residency.WEIGHTS), torch.no_grad():
            ids = np.asarray(tokens)
            packed = Packed.of([ids], [np.arange(len(ids)) > 0], self.context.device.torch_name)
            scores: list[float] = self._lm.module(packed).logprobs.tolist()
        return scores

    def digest(self) -> str:
        """SHA-256 of the whole weights as they are trained."""
        from rlplace.models.digest import digest

        with self._computing("digest", Residency.WEIGHTS):
            return digest({name: tensor.cpu() for name, tensor in self._lm.whole_weights()})

    def _shards(self) -> tuple[Shard, ...]:
        return self._lm.shards_apart() if self.config.config.actor.sync.mode == "lora" else self._lm.shards()

    def _enclosed(self) -> tuple[Shard, ...]:
        """What the weights that are pushed say of the probe, where that is how a sync is verified."""
        sync = self.config.config.actor.sync
        if sync.verify == "checksum" or not sync.verify_every:
            return ()
        from rlplace.workers.sync_probe import probe_shard, probe_tokens

        tokens = probe_tokens(self.config)
        scores = self.logprobs(tokens) if self._pushes % sync.verify_every == 0 else None
        return (probe_shard(scores, len(tokens), self.context.world_size),)

    def _workspace_bytes(self, needs: Residency) -> int:
        learning = self._lm.gradient_bytes if needs is Residency.FULL else 0
        return self._lm.gathered_bytes + learning

    def _drop_gathered(self) -> None:
        self._lm.drop_gathered()
