"""A rollout rank's end of the weight sync: takes versions, completes them, loads its engine, has them compared."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rlplace.comm.weights.receiver import receiver_of
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.kept_weights import KeptWeights
from rlplace.workers.llm_job import WEIGHTS, LlmJob
from rlplace.workers.sync_probe import SyncProbe, probe_tokens, tolerance

if TYPE_CHECKING:
    from rlplace.workers.engines.contract import TextEngine
    from rlplace.workers.worker import WorkerContext


class EngineWeights:
    """Owns the receiver, and what it keeps for later versions; `engine` is its worker's."""

    def __init__(self, job: LlmJob, context: WorkerContext, engine: TextEngine) -> None:
        actor = job.config.actor
        self._engine = engine
        self._receiver = receiver_of(
            context.channels[WEIGHTS],
            context.rank,
            deliveries=job.deliveries if context.folder else (),  # else all are threads, without GPUs
            folder=context.folder,
            device=torch.device(context.device.torch_name),
        )
        apart = actor.sync.mode == "lora" and actor.lora_rank is not None
        self._kept = KeptWeights(
            context.owner,
            keeps=actor.sync.mode in ("trainable", "lora"),
            scale=actor.lora_alpha / actor.lora_rank if apart and actor.lora_rank else None,
        )
        self._probe = SyncProbe(probe_tokens(job), tolerance(job.config), context.owner)

    def announced(self) -> bool:
        """As of the receiver."""
        return self._receiver.announced()

    def pull(self, version: int) -> Metrics:
        """Blocks until `version` is here, verified and loaded.

        Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        began = time.perf_counter()
        received = self._receiver.pull(version)
        self._probe.take(received.tensors)
        with self._kept.given(received) as given:
            pulled = time.perf_counter()
            self._engine.load(given.weights.items(), version, given.factors)
        loaded = time.perf_counter()
        report = received.report
        return {
            "rollout/pull_s": Metric(loaded - began, "max"),
            "rollout/load_s": Metric(loaded - pulled, "max"),
            "rollout/pull_gb_per_s": Metric(report.size_bytes / (loaded - began) / 1e9, "min"),
            "rollout/pull_bytes": Metric(report.size_bytes, "sum"),
            **{f"rollout/pulled_{way}_bytes": Metric(size, "sum") for way, size in report.ways.items()},
            **self.compare(),
        }

    def compare(self) -> Metrics:
        """What the actor said of the loaded version with what the engine says, if that is due and it can.

        Raises WeightSyncError where they differ.
        """
        if self._engine.residency is Residency.FULL:
            self._probe.compare(self._engine)
        return self._probe.metrics()

    def close(self) -> None:
        self._kept.close()
        self._receiver.close()
