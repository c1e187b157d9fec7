"""The actor of a language model: takes whole groups, learns, hands its weights to the engines, leaves on demand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.errors import Problem
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.placement.weight_routes import deliver_by_rank
from rlplace.workers.llm_job import SAMPLES, LlmJob
from rlplace.workers.training import TrainingWorker
from rlplace.workers.worker import MoveReport

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.comm.weights.sync import Shard
    from rlplace.llm_config import LlmActorConfig
    from rlplace.models.causal_lm import LmSpec
    from rlplace.workers.adam import Adam
    from rlplace.workers.lm_learner import LmLearner, LmUpdate
    from rlplace.workers.lm_samples import SampleShare
    from rlplace.workers.sharded_lm import ShardedLm


class LmActor(TrainingWorker):
    """One rank of the learner. All methods but `move` and `close` are collectives of the group.

    Owns its shards of the model and of the optimizer state.
    """

    config: LlmJob
    _lm: ShardedLm
    _optimizer: Adam
    _learner: LmLearner

    def setup(self) -> None:
        from rlplace.workers.lm_learner import LmLearner
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.sharded_lm import ShardedLm

        config, device = self.config.config, self.context.device
        ranks = self._join()
        self._lm = ShardedLm(_spec(self.config), ranks)
        self._weights = Offloadable("actor weights", device, self._lm.weight_tensors)
        self._optimizer = _optimizer(config.actor, self._lm)
        self._optimizer_state = Offloadable("optimizer state", device, self._optimizer.tensors)
        self._learner = LmLearner(config, self._lm, self._optimizer, ranks, self.context.owner)
        self._open_sync(
            config.actor.sync,
            (self.context.folder and self.config.deliveries) or deliver_by_rank(self.config.rollout_ranks),
        )
        self.move(Residency.OFF)

    def move(self, to: Residency) -> MoveReport:
        report = super().move(to)
        return dataclasses.replace(report, host_bytes=report.host_bytes + self._optimizer.host_bytes)

    def learn(self, iteration: int, version: int) -> Metrics:
        """Waits for all groups of `iteration`, sampled under `version` or before; makes the next version."""
        with self._computing("learn", Residency.FULL):
            began = time.perf_counter()
            share, sampled = self._receive(iteration, version)
            received = time.perf_counter()
            update = self._learner.learn(share, iteration)
            learned = time.perf_counter()
        return {**sampled, **_metrics(update, learned - received), "actor/wait_s": Metric(received - began, "max")}

    def _receive(self, iteration: int, version: int) -> tuple[SampleShare, Metrics]:
        """This rank's samples; on rank 0 also what there is to say of all of them."""
        from rlplace.algo.sample_metrics import sample_metrics
        from rlplace.workers.lm_samples import share_out, take_groups

        assert self._ranks is not None, "setup comes first"
        if self.context.rank != 0:
            return share_out(None, self._ranks), {}
        groups = take_groups(self.context.channels[SAMPLES], self.config.prompts, self.context.owner)
        return share_out(self._learner.shares(groups, iteration), self._ranks), sample_metrics(groups, version)

    def save_policy(self, path: str) -> None:
        """Rank 0 writes a Hugging Face folder: weights as the optimizer has them, factors merged. OutputError."""
        from rlplace.models.checkpoint import CheckpointWriter

        with self._computing("save_policy", Residency.WEIGHTS):
            writer = CheckpointWriter(Path(path), self.config.model) if self.context.rank == 0 else None
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
        return self._lm.shards()

    def _workspace_bytes(self, needs: Residency) -> int:
        learning = self._lm.gradient_bytes if needs is Residency.FULL else 0
        return self._lm.gathered_bytes + learning

    def _drop_gathered(self) -> None:
        self._lm.drop_gathered()


def not_run(actor: LlmActorConfig) -> list[Problem]:
    """What a plan may say of an actor and a run does not do; to be asked before launch."""
    wanted = {
        "optimizer": (actor.optimizer, ("adamw", "adamw_master"), "a run steps with AdamW in float32"),
        "weights": (actor.weights, ("fp32", "bf16"), "float16 needs its losses scaled, which a run does not do"),
        "compute": (actor.compute, ("fp32", "bf16"), "float16 needs its losses scaled, which a run does not do"),
        "zero_stage": (actor.zero_stage, (2, 3), "a run shards gradients and optimizer over all ranks of the actor"),
        "sync.mode": (actor.sync.mode, ("all", "delta"), "an engine is given all weights at each sync"),
    }
    return [
        Problem(
            code="plan-only",
            key=f"actor.{key}",
            what="is planned, not run",
            got=f"{key}: {value}",
            why=why,
            fix=" or ".join(f"{key}: {choice}" for choice in choices),
        )
        for key, (value, choices, why) in wanted.items()
        if value not in choices
    ]


def _spec(job: LlmJob) -> LmSpec:
    from rlplace.models.causal_lm import LmSpec
    from rlplace.models.lora import LoraSpec

    actor = job.config.actor
    lora = None
    if actor.lora_rank is not None:
        lora = LoraSpec(rank=actor.lora_rank, alpha=actor.lora_alpha, targets=actor.lora_targets)
    return LmSpec(
        folder=job.model,
        weights=actor.weights,
        compute=actor.compute,
        checkpointing=actor.checkpointing,
        gather_again=actor.zero_stage == 3,
        lora=lora,
        seed=job.config.runner.seed,
    )


def _optimizer(actor: LlmActorConfig, lm: ShardedLm) -> Adam:
    from rlplace.workers.adam import Adam, HostAdam, MasterAdam

    masters = actor.optimizer == "adamw_master"
    kind = HostAdam if actor.optimizer_on_host else MasterAdam if masters else Adam
    return kind(lm.trained_shards(), actor.adam)


def _metrics(update: LmUpdate, seconds: float) -> Metrics:
    """The update's numbers, which all ranks agree on; tokens per second are of all ranks together."""
    metrics = {
        "actor/learn_s": Metric(seconds, "max"),
        "actor/tokens_per_s": Metric(update.tokens / seconds, "min"),
        "actor/lr": Metric(update.lr),
        "actor/optimizer_steps": Metric(update.steps),
        "actor/rank_imbalance": Metric(update.imbalance),
    }
    if update.mean is not None:
        metrics |= {f"actor/{name}": Metric(value) for name, value in update.mean._asdict().items()}
    return {**metrics, **update.mismatch}
