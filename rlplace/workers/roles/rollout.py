"""The rollout worker: pulls weights, then answers every observation of an iteration with sampled actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlplace.envs.spaces import DiscreteActions
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.job import ACTIONS, OBSERVATIONS, WEIGHTS, Job
from rlplace.workers.roles.noise import RowNoise, normal, uniform
from rlplace.workers.worker import MoveReport, Worker, WorkerContext, cancelled

if TYPE_CHECKING:
    from rlplace.comm.weights.version import WeightReceiver
    from rlplace.workers.engines.vector_contract import Decision, Engine


class RolloutWorker(Worker):
    """Owns an engine. Observations are answered in the order they arrive; no env rank waits for another.

    One by one, a batch is always what one env rank sent, so answers do not depend on timing. With
    `rollout.merge_requests` those that have arrived are answered together: fewer passes through the policy, and answers
    that may differ in the last bits from run to run, since a product of matrices rounds by the shape of its batch.
    """

    config: Job

    def __init__(self, config: Job, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._engine: Engine | None = None
        self._receiver: WeightReceiver | None = None

    def setup(self) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.comm.weights.receiver import receiver_of
        from rlplace.models.distributions import noise_shape
        from rlplace.models.mlp import build_policy
        from rlplace.workers.engines.torch import TorchEngine

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        config, actions = self.config.config, self.config.spaces.actions
        policy = build_policy(self.config.spaces, config.actor, config.algorithm, config.runner.seed)
        self._engine = TorchEngine(
            policy,
            device=self.context.device,
            owner=self.context.owner,
            workspace_bytes=config.torch_rollout.workspace_memory,
        )
        self._receiver = receiver_of(
            self.context.channels[WEIGHTS],
            self.context.rank,
            deliveries=self.config.deliveries if self.context.folder else (),  # else all are threads, without GPUs
            folder=self.context.folder,
            device=torch.device(self.context.device.torch_name),
        )
        self._noise = RowNoise(
            seed=config.runner.seed,
            rows=config.simulator_env.total_num_envs,
            shape=noise_shape(actions),
            draw=uniform if isinstance(actions, DiscreteActions) else normal,
        )

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "setup comes first"
        return self._engine

    def move(self, to: Residency) -> MoveReport:
        began = time.perf_counter()
        held = self.engine.move(to)
        return MoveReport(residency=to, accelerator_bytes=held, host_bytes=0, seconds=time.perf_counter() - began)

    def pull_weights(self, version: int) -> Metrics:
        """Takes the weights the actor pushes as `version`; blocks until they are here, verified and loaded.

        Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        began = time.perf_counter()
        assert self._receiver is not None, "setup comes first"
        with self._receiver.pull(version) as received:
            pulled = time.perf_counter()
            load = self.engine.update if received.partial else self.engine.load
            load(received.tensors, version)
        loaded = time.perf_counter()
        return {
            "rollout/pull_s": Metric(loaded - began, "max"),
            "rollout/load_s": Metric(loaded - pulled, "max"),
            "rollout/pull_gb_per_s": Metric(received.report.size_bytes / (loaded - began) / 1e9, "min"),
            "rollout/pull_bytes": Metric(received.report.size_bytes, "sum"),
            **{f"rollout/pulled_{way}_bytes": Metric(size, "sum") for way, size in received.report.ways.items()},
        }

    def generate(self, iteration: int) -> Metrics:
        """Answers all observations this rank is due in one iteration; returns when the last answer is put."""
        job, context = self.config, self.context
        shares = job.routes.observations.receives(context.rank)
        due = sum(share.stop - share.start for share in shares)  # rows
        due *= job.config.algorithm.rollout_steps * job.config.torch_rollout.pipeline_stage_num
        wait_s = policy_s = put_s = 0.0
        batches = 0
        while due:
            if context.cancelled.is_set():
                raise cancelled(context.owner, "generate")
            began = time.perf_counter()
            asked = self._take(due)
            arrived = time.perf_counter()
            decision = self._decide(iteration, asked)
            decided = time.perf_counter()
            self._answer(asked, decision)
            wait_s += arrived - began
            policy_s += decided - arrived
            put_s += time.perf_counter() - decided
            due -= len(decision.values)
            batches += 1
        return {
            "rollout/policy_s": Metric(policy_s, "max"),
            "rollout/wait_s": Metric(wait_s, "max"),
            "rollout/put_s": Metric(put_s, "max"),
            "rollout/batches": Metric(batches, "sum"),
        }

    def _take(self, due: int) -> list[Observation]:
        """Waits for one observation; with `merge_requests` those behind it come along, up to `due` rows."""
        source, key = self.context.channels[OBSERVATIONS], str(self.context.rank)
        if self.config.config.torch_rollout.merge_requests:
            return source.get_batch(due, key=key)
        return [source.get(key=key)]

    def _decide(self, iteration: int, asked: Sequence[Observation]) -> Decision:
        noise = [self._noise.rows(iteration, o.step, o.first_row, o.first_row + len(o.observations)) for o in asked]
        if len(asked) == 1:
            return self.engine.decide(asked[0].observations, noise[0])
        return self.engine.decide(np.concatenate([o.observations for o in asked]), np.concatenate(noise))

    def _answer(self, asked: Sequence[Observation], decision: Decision) -> None:
        channel, start = self.context.channels[ACTIONS], 0
        for observation in asked:
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
            channel.put(chunk, key=f"{observation.env_rank}/{observation.stage_group}", weight=observation.weight)
            start = stop

    def digest(self) -> str:
        """SHA-256 of the loaded weights, to compare ranks to the bit."""
        return self.engine.digest()

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._engine is not None:
            self._engine.close()
