"""Rollout workers: pull weights into a generation engine, then generate until the iteration ends.

This module has what all rollout workers share, and the one that answers simulators. `text_rollout` has the one for
language models.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import DiscreteActions
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS, WEIGHTS
from rlplace.workers.engines.contract import Engine
from rlplace.workers.roles.stopwatch import Stopwatch
from rlplace.workers.worker import MoveReport, RoleWorker, cancelled

if TYPE_CHECKING:
    from rlplace.comm.weights.version import WeightReceiver
    from rlplace.workers.engines.sync_probe import SyncProbe
    from rlplace.workers.engines.torch import Decision, TorchEngine
    from rlplace.workers.engines.weights import KeptWeights

_KEPT_STEPS = 8  # env ranks drift apart by a few steps; an older step is drawn again


class RolloutWorker(RoleWorker):
    """Owns an engine, and its rank's end of the weight sync: the receiver and the kept weights.

    A subclass opens it with its engine in `setup`, and adds `generate`.
    """

    engine: Engine
    _receiver: WeightReceiver
    _kept: KeptWeights
    _probe: SyncProbe | None = None

    def _open(self, engine: Engine) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.comm.weights.receiver import receiver_of
        from rlplace.workers.engines.weights import KeptWeights

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        self.engine = engine
        self._opened.callback(engine.close)
        actor, context = self.config.config.actor, self.context
        self._receiver = receiver_of(
            context.channels[WEIGHTS],
            context.rank,
            deliveries=self.config.deliveries if context.folder else (),  # else all ranks are threads without GPUs
            folder=context.folder,
            device=torch.device(context.device.torch_name),
        )
        self._opened.callback(self._receiver.close)
        scale = actor.lora_alpha / actor.lora_rank if actor.sync.mode == "lora" and actor.lora_rank else None
        self._kept = KeptWeights(context.owner, keeps=actor.sync.mode in ("trainable", "lora"), scale=scale)
        self._opened.callback(self._kept.close)

    def move(self, to: Residency) -> MoveReport:
        return MoveReport(residency=to, accelerator_bytes=self.engine.move(to), host_bytes=self.engine.host_bytes)

    def pull_weights(self, version: int) -> Metrics:
        """Pull the weights that the actor pushes as `version`; block until they are here, verified and loaded.

        Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        began = time.perf_counter()
        received = self._receiver.pull(version)
        if self._probe is not None:
            self._probe.take(received.tensors)
        with self._kept.completed(received) as (weights, factors):
            pulled = time.perf_counter()
            self.engine.load(weights, version, factors)
        loaded = time.perf_counter()
        report = received.report
        return {
            "rollout/pull_s": Metric(loaded - began, "max"),
            "rollout/load_s": Metric(loaded - pulled, "max"),
            "rollout/pull_gb_per_s": Metric(report.size_bytes / (loaded - began) / 1e9, "min"),
            "rollout/pull_bytes": Metric(report.size_bytes, "sum"),
            **{f"rollout/pulled_{name}_bytes": Metric(size, "sum") for name, size in report.transports.items()},
            **(self._probe.compare() if self._probe is not None else {}),
        }


class VectorRolloutWorker(RolloutWorker):
    """Answers every observation of an iteration with sampled actions, in order of arrival.

    One by one, a batch is always what one env rank sent, so answers do not depend on timing. With
    `rollout.merge_requests` all that have arrived are answered together: fewer passes through the policy, but answers
    may differ in the last bits from run to run, since a product of matrices rounds by the shape of its batch.
    """

    engine: TorchEngine

    def setup(self) -> None:
        from rlplace.models.mlp import build_policy, noise_shape
        from rlplace.workers.engines.torch import TorchEngine

        config, context, spaces = self.config.config, self.context, self.config.spaces
        policy = build_policy(spaces, config.actor, config.algorithm, config.runner.seed)
        workspace = config.torch_rollout.workspace_memory
        self._open(TorchEngine(policy, device=context.device, owner=context.owner, workspace_bytes=workspace))
        self._noise = RowNoise(
            seed=config.runner.seed,
            rows=config.simulator_env.total_num_envs,
            shape=noise_shape(spaces.actions),
            uniform=isinstance(spaces.actions, DiscreteActions),
        )

    def generate(self, iteration: int) -> Metrics:
        """Answer all observations that are due to this rank in one iteration; return when the last answer is put."""
        context, config = self.context, self.config.config.torch_rollout
        source, key = context.channels[OBSERVATIONS], str(context.rank)
        due = sum(share.stop - share.start for share in self.config.routes.observations.receives(context.rank))  # rows
        due *= self.config.config.algorithm.rollout_steps * config.pipeline_stage_num
        batches, watch = 0, Stopwatch("policy", "wait", "put")
        while due:
            if context.cancelled.is_set():
                raise cancelled(context.owner, "generate")
            arrived = source.get_batch(due, key=key) if config.merge_requests else [source.get(key=key)]
            watch.lap("wait")
            noise = [self._noise.rows(iteration, o.step, o.first_row, len(o.observations)) for o in arrived]
            decision = self.engine.decide(np.concatenate([o.observations for o in arrived]), np.concatenate(noise))
            watch.lap("policy")
            self._answer(arrived, decision)
            watch.lap("put")
            due -= len(decision.values)
            batches += 1
        return {**watch.metrics("rollout"), "rollout/batches": Metric(batches, "sum")}

    def _answer(self, observations: Sequence[Observation], decision: Decision) -> None:
        start = 0
        for observation in observations:
            stop = start + len(observation.observations)
            chunk = ActionChunk(
                stage_group=observation.stage_group,
                step=observation.step,
                first_row=observation.first_row,
                actions=decision.actions[start:stop],
                logprobs=decision.logprobs[start:stop],
                values=decision.values[start:stop],
                version=decision.version,
            )
            key = f"{observation.env_rank}/{observation.stage_group}"
            self.context.channels[ACTIONS].put(chunk, key=key, weight=observation.weight)
            start = stop

    def digest(self) -> str:
        """Return the SHA-256 of the loaded weights, to compare ranks bit for bit."""
        return self.engine.digest()


class RowNoise:
    """Noise for all environments of a job, drawn a step at a time and cut by global row.

    The same row, step and iteration get the same noise whichever rank decides. Philox (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3") counts in 256 bits: iteration and step begin a run of 2^64 blocks of their
    own, so nothing is drawn twice and a step can be drawn without those before it. Drawing all rows costs microseconds
    and needs no agreement between ranks.
    """

    def __init__(self, *, seed: int, rows: int, shape: tuple[int, ...], uniform: bool) -> None:
        """`uniform`: in [0, 1); else standard normal."""
        self._seed, self._shape, self._uniform = seed, (rows, *shape), uniform
        self._step = functools.lru_cache(maxsize=_KEPT_STEPS)(self._draw)

    def rows(self, iteration: int, step: int, first: int, count: int) -> NDArray[np.float32]:
        """Noise of `count` global rows from `first` on, [count, *shape]; a read-only view."""
        return self._step(iteration, step)[first : first + count]

    def _draw(self, iteration: int, step: int) -> NDArray[np.float32]:
        counter = (iteration << 128) | (step << 64)
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=counter))
        draw = generator.random if self._uniform else generator.standard_normal
        drawn = draw(self._shape, dtype=np.float32)
        drawn.flags.writeable = False
        return drawn
