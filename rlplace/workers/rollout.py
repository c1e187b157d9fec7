"""The rollout worker: pulls weights, then answers every observation of an iteration with sampled actions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rlplace.envs.spaces import DiscreteActions
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.job import ACTIONS, OBSERVATIONS, WEIGHTS, Job
from rlplace.workers.noise import RowNoise, normal, uniform
from rlplace.workers.refusals import cancelled
from rlplace.workers.worker import MoveReport, Worker, WorkerContext

if TYPE_CHECKING:
    from rlplace.comm.weight_sync import ChannelWeightReceiver
    from rlplace.workers.engine import Decision, Engine


class RolloutWorker(Worker):
    """Owns an engine. Observations are answered one by one in the order they arrive.

    No env rank waits for another, and since a batch is always what one env rank sent, answers do not depend on timing.
    """

    config: Job

    def __init__(self, config: Job, context: WorkerContext) -> None:
        super().__init__(config, context)
        self._engine: Engine | None = None

    def setup(self) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.comm.weight_sync import ChannelWeightReceiver
        from rlplace.models.distributions import noise_shape
        from rlplace.models.mlp import build_policy
        from rlplace.workers.torch_engine import TorchEngine

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        config, actions = self.config.config, self.config.spaces.actions
        policy = build_policy(self.config.spaces, config.actor, config.algorithm, config.runner.seed)
        self._engine = TorchEngine(
            policy,
            device=self.context.device,
            owner=self.context.owner,
            workspace_bytes=config.rollout.workspace_memory,
        )
        self._receiver: ChannelWeightReceiver = ChannelWeightReceiver(self.context.channels[WEIGHTS], self.context.rank)
        self._noise = RowNoise(
            seed=config.runner.seed,
            rows=config.env.total_num_envs,
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
        received = self._receiver.pull(version)
        self.engine.load(received.tensors, version)
        return {
            "rollout/pull_s": Metric(time.perf_counter() - began, "max"),
            "rollout/pull_bytes": Metric(received.report.size_bytes, "sum"),
        }

    def generate(self, iteration: int) -> Metrics:
        """Answers all observations this rank is due in one iteration; returns when the last answer is put."""
        job, context = self.config, self.context
        due = job.config.algorithm.rollout_steps * job.config.rollout.pipeline_stage_num
        due *= len(job.routes.observations.receives(context.rank))
        source, key = context.channels[OBSERVATIONS], str(context.rank)
        wait_s = policy_s = put_s = 0.0
        for _ in range(due):
            if context.cancelled.is_set():
                raise cancelled(context.owner, "generate")
            began = time.perf_counter()
            observation = source.get(key=key)
            arrived = time.perf_counter()
            decision = self._decide(iteration, observation)
            decided = time.perf_counter()
            self._answer(observation, decision)
            wait_s += arrived - began
            policy_s += decided - arrived
            put_s += time.perf_counter() - decided
        return {
            "rollout/policy_s": Metric(policy_s, "max"),
            "rollout/wait_s": Metric(wait_s, "max"),
            "rollout/put_s": Metric(put_s, "max"),
            "rollout/batches": Metric(due, "sum"),
        }

    def _decide(self, iteration: int, observation: Observation) -> Decision:
        first = observation.first_row
        noise = self._noise.rows(iteration, observation.step, first, first + len(observation.observations))
        return self.engine.decide(observation.observations, noise)

    def _answer(self, observation: Observation, decision: Decision) -> None:
        chunk = ActionChunk(
            stage_group=observation.stage_group,
            step=observation.step,
            first_row=observation.first_row,
            actions=decision.actions,
            logprobs=decision.logprobs,
            values=decision.values,
            version=decision.version,
        )
        key = f"{observation.env_rank}/{observation.stage_group}"
        self.context.channels[ACTIONS].put(chunk, key=key, weight=observation.weight)

    def digest(self) -> str:
        """SHA-256 of the loaded weights, to compare ranks to the bit."""
        return self.engine.digest()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
