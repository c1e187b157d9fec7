"""Rollout workers: pull weights into a generation engine, then generate until the iteration ends.

This module has what all rollout workers share, and the one that answers simulators. `text_rollout` has the one for
language models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.envs.contract import DiscreteActions
from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS, WEIGHTS, WorkerArguments
from rlplace.workers.engines.contract import Decision, Engine, VectorEngine
from rlplace.workers.worker import MoveReport, Worker, cancelled

if TYPE_CHECKING:
    from rlplace.workers.engines.sync_probe import SyncProbe
    from rlplace.workers.engines.weights import EngineWeights


E = TypeVar("E", bound=Engine)
Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float32]]

_KEPT_STEPS = 8  # env ranks drift apart by a few steps; an older step is drawn again


class RolloutWorker(Worker, Generic[E]):
    """Owns an engine and its end of the weight sync. A subclass builds both in `setup` and adds `generate`."""

    config: WorkerArguments

    _engine: E | None = None
    _weights: EngineWeights | None = None

    @property
    def engine(self) -> E:
        assert self._engine is not None, "setup comes first"
        return self._engine

    @property
    def weights(self) -> EngineWeights:
        assert self._weights is not None, "setup comes first"
        return self._weights

    def _open_sync(self, engine: Engine, probe: SyncProbe | None = None) -> None:
        from rlplace.workers.engines.weights import EngineWeights, KeptWeights

        actor, context = self.config.config.actor, self.context
        scale = actor.lora_alpha / actor.lora_rank if actor.sync.mode == "lora" and actor.lora_rank else None
        kept = KeptWeights(context.owner, keeps=actor.sync.mode in ("trainable", "lora"), scale=scale)
        channel = context.channels[WEIGHTS]
        self._weights = EngineWeights(engine, channel, context, self.config.deliveries, kept=kept, probe=probe)

    def move(self, to: Residency) -> MoveReport:
        began = time.perf_counter()
        held = self.engine.move(to)
        seconds = time.perf_counter() - began
        return MoveReport(residency=to, accelerator_bytes=held, host_bytes=self.engine.host_bytes, seconds=seconds)

    def pull_weights(self, version: int) -> Metrics:
        """Pull the weights that the actor pushes as `version`; block until they are here, verified and loaded.

        Raises WeightSyncError or as the channel; then the weights loaded before are still in use.
        """
        return self.weights.pull(version)

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
        if self._engine is not None:
            self._engine.close()


class VectorRolloutWorker(RolloutWorker[VectorEngine]):
    """Answers every observation of an iteration with sampled actions, in order of arrival.

    One by one, a batch is always what one env rank sent, so answers do not depend on timing. With
    `rollout.merge_requests` all that have arrived are answered together: fewer passes through the policy, but answers
    may differ in the last bits from run to run, since a product of matrices rounds by the shape of its batch.
    """

    def setup(self) -> None:
        import torch  # here, not at import: the driver imports this module too

        from rlplace.models.mlp import build_policy, noise_shape
        from rlplace.workers.engines.torch import TorchEngine

        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        config, context, actions = self.config.config, self.context, self.config.spaces.actions
        self._engine = TorchEngine(
            build_policy(self.config.spaces, config.actor, config.algorithm, config.runner.seed),
            device=context.device,
            owner=context.owner,
            workspace_bytes=config.torch_rollout.workspace_memory,
        )
        self._open_sync(self._engine)
        self._noise = RowNoise(
            seed=config.runner.seed,
            rows=config.simulator_env.total_num_envs,
            shape=noise_shape(actions),
            draw=uniform if isinstance(actions, DiscreteActions) else normal,
        )

    def generate(self, iteration: int) -> Metrics:
        """Answer all observations that are due to this rank in one iteration; return when the last answer is put."""
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
            observations = self._take(due)
            arrived = time.perf_counter()
            decision = self._decide(iteration, observations)
            decided = time.perf_counter()
            self._answer(observations, decision)
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
        """Wait for one observation; with `merge_requests` take all that have arrived, up to `due` rows."""
        source, key = self.context.channels[OBSERVATIONS], str(self.context.rank)
        if self.config.config.torch_rollout.merge_requests:
            return source.get_batch(due, key=key)
        return [source.get(key=key)]

    def _decide(self, iteration: int, observations: Sequence[Observation]) -> Decision:
        noise = [
            self._noise.rows(iteration, o.step, o.first_row, o.first_row + len(o.observations)) for o in observations
        ]
        if len(observations) == 1:
            return self.engine.decide(observations[0].observations, noise[0])
        return self.engine.decide(np.concatenate([o.observations for o in observations]), np.concatenate(noise))

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


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def uniform(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return generator.random(shape, dtype=np.float32)


def normal(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return generator.standard_normal(shape, dtype=np.float32)


class RowNoise:
    """Noise for all environments of a job, drawn a step at a time and cut by global row.

    The same row, step and iteration get the same noise whichever rank decides. Philox (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3") counts in 256 bits: iteration and step begin a run of 2^64 blocks of their
    own, so nothing is drawn twice and a step can be drawn without those before it. Drawing all rows costs microseconds
    and needs no agreement between ranks.
    """

    def __init__(self, *, seed: int, rows: int, shape: tuple[int, ...], draw: Draw) -> None:
        self._seed = seed
        self._shape = (rows, *shape)
        self._draw = draw
        self._kept: dict[tuple[int, int], NDArray[np.float32]] = {}

    def rows(self, iteration: int, step: int, first: int, stop: int) -> NDArray[np.float32]:
        """Noise of global rows first..stop-1, [stop - first, *shape]; a read-only view."""
        drawn = self._kept.get((iteration, step))
        if drawn is None:
            counter = (iteration << 128) | (step << 64)
            drawn = self._draw(np.random.Generator(np.random.Philox(key=self._seed, counter=counter)), self._shape)
            drawn.flags.writeable = False
            while len(self._kept) >= _KEPT_STEPS:
                del self._kept[next(iter(self._kept))]
            self._kept[iteration, step] = drawn
        return drawn[first:stop]
