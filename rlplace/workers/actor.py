"""The actor: trains the policy with FSDP, hands its weights to the rollout ranks, leaves its accelerators on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory, concat
from rlplace.workers.job import TRAJECTORIES, WEIGHTS, Job
from rlplace.workers.refusals import not_resident
from rlplace.workers.worker import MoveReport, Worker

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.algo.minibatches import Rows
    from rlplace.comm.weight_sync import WeightSender
    from rlplace.workers.learner import PPOLearner, Update
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.ranks import Ranks
    from rlplace.workers.sharded_policy import ShardedPolicy

_WORKSPACE = "gathered weights and gradients"


class FSDPActor(Worker):
    """One rank of the learner. `learn`, `push_weights`, `save_policy` and `state_digest` are collectives of the group.

    Owns the policy's shards and the optimizer state; residency `weights` holds parameters and buffers, `full` the
    optimizer state too.
    """

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    config: Job
    _ranks: Ranks | None = None
    _policy: ShardedPolicy
    _learner: PPOLearner
    _sender: WeightSender
    _weights: Offloadable
    _optimizer_state: Offloadable

    def setup(self) -> None:
        import torch

        from rlplace.models.mlp import build_policy
        from rlplace.workers.learner import PPOLearner
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.ranks import join_ranks
        from rlplace.workers.sharded_policy import ShardedPolicy

        context, config = self.context, self.config.config
        device = torch.device(context.device.torch_name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(1)  # a rank has one core; more threads only wake each other
        self._ranks = join_ranks(context.rank, context.world_size, context.rendezvous, device)
        module = build_policy(self.config.spaces, config.actor, config.algorithm, config.runner.seed).to(device)
        self._policy = ShardedPolicy(module, config.actor.optimizer, config.actor.precision, self._ranks)
        self._weights = Offloadable("actor weights", context.device, self._policy.weight_tensors)
        self._optimizer_state = Offloadable("optimizer state", context.device, self._policy.optimizer_tensors)
        self._learner = PPOLearner(config, self._rows(), self._policy, self._ranks, device, context.owner)
        self._sender = self._make_sender()
        self.move(Residency.OFF)

    def _make_sender(self) -> WeightSender:
        from rlplace.comm.weight_sync import ChannelWeightSender

        targets = [share.target for share in self.config.routes.weights.sends(self.context.rank)]
        return ChannelWeightSender(self.context.channels[WEIGHTS], targets=targets)

    def _rows(self) -> Rows:
        from rlplace.algo.minibatches import Rows

        route = self.config.routes.trajectories
        mine = route.receives(self.context.rank)
        return Rows(
            steps=self.config.config.algorithm.rollout_steps,
            total=route.rows,
            first=mine[0].start if mine else 0,
            count=sum(share.stop - share.start for share in mine),
        )

    @property
    def residency(self) -> Residency:
        if not self._weights.resident:
            return Residency.OFF
        return Residency.FULL if self._optimizer_state.resident else Residency.WEIGHTS

    def move(self, to: Residency) -> MoveReport:
        """Brings weights and optimizer state on or off; they come back equal to the bit. Gradients are never kept."""
        began = time.perf_counter()
        if to < Residency.FULL:
            self._optimizer_state.offload()
        if to < Residency.WEIGHTS:
            self._weights.offload()
        if to >= Residency.WEIGHTS:
            self._weights.onload()
        if to >= Residency.FULL:
            self._optimizer_state.onload()
        parts = (self._weights, self._optimizer_state)
        return MoveReport(
            residency=self.residency,
            accelerator_bytes=sum(part.accelerator_bytes for part in parts),
            host_bytes=sum(part.host_bytes for part in parts),
            seconds=time.perf_counter() - began,
        )

    def push_weights(self, version: int) -> Metrics:
        """Sends the whole weights to this rank's rollout ranks as `version`; blocks until they have taken them."""
        began = time.perf_counter()
        with self._computing("push_weights", Residency.WEIGHTS):
            sends = bool(self.config.routes.weights.sends(self.context.rank))
            tensors = self._policy.export(keep=sends)
        gathered = time.perf_counter()
        report = self._sender.push(version, tensors).wait()
        return {
            "actor/gather_s": Metric(gathered - began, "max"),
            "actor/push_s": Metric(time.perf_counter() - gathered, "max"),
            "actor/pushed_bytes": Metric(report.size_bytes, "sum"),
        }

    def learn(self, iteration: int, version: int) -> Metrics:
        """Waits for this rank's trajectories of `iteration`, sampled under `version`; makes the next version."""
        with self._computing("learn", Residency.FULL):
            began = time.perf_counter()
            trajectory = self._receive(version)
            received = time.perf_counter()
            update = self._learner.learn(trajectory, iteration)
            learned = time.perf_counter()
        return _metrics(update) | {
            "actor/wait_s": Metric(received - began, "max"),
            "actor/learn_s": Metric(learned - received, "max"),
            "actor/version_lag": Metric(version - trajectory.version_min, "max"),
            "actor/samples": Metric(trajectory.weight, "sum"),
        }

    def _receive(self, version: int) -> Trajectory:
        from rlplace.workers.learner import no_rows

        channel, key = self.context.channels[TRAJECTORIES], str(self.context.rank)
        shares = self.config.routes.trajectories.receives(self.context.rank)
        if not shares:
            return no_rows(self.config.spaces, self.config.config.algorithm.rollout_steps, version)
        trajectory = concat([channel.get(key=key) for _ in shares])
        rows = range(trajectory.first_row, trajectory.first_row + trajectory.rows)
        assert rows == range(shares[0].start, shares[-1].stop), f"{self.context.owner} got rows {rows}, not its own"
        return trajectory

    def save_policy(self, path: str) -> None:
        """Rank 0 writes weights and buffers, in float32, as safetensors. Raises OutputError."""
        from rlplace.workers.policy_file import write_policy

        with self._computing("save_policy", Residency.WEIGHTS):
            tensors = self._policy.master_weights()
        if self.context.rank == 0:
            write_policy(Path(path), tensors)

    def digest(self) -> str:
        """SHA-256 of the whole weights, to compare with what the rollout ranks loaded."""
        from rlplace.models.digest import digest

        with self._computing("digest", Residency.WEIGHTS):
            return digest(self._policy.export(keep=True))

    def state_digest(self) -> str:
        """SHA-256 of the whole training state: weights, buffers and optimizer state."""
        from rlplace.models.digest import digest

        with self._computing("state_digest", Residency.FULL):
            return digest(self._policy.master_weights() | self._policy.optimizer_state())

    @contextmanager
    def _computing(self, method: str, needs: Residency) -> Iterator[None]:
        """Refuses below `needs`; accounts what a computation holds beside the resident state, frees it at the end."""
        if self.residency < needs:
            raise not_resident(self.context.owner, method, has=self.residency, needs=needs)
        copies = 2 if needs is Residency.FULL else 1  # gradients are as large as the weights
        self.context.device.acquire(copies * self._policy.gathered_bytes, _WORKSPACE)
        try:
            yield
        finally:
            self._policy.drop_gathered()
            self.context.device.release(_WORKSPACE)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _metrics(update: Update) -> dict[str, Metric]:
    """The update's numbers, which all ranks agree on."""
    metrics = {f"actor/{name}": Metric(value) for name, value in update.mean._asdict().items()}
    metrics["actor/lr"] = Metric(update.lr)
    metrics["actor/optimizer_steps"] = Metric(update.steps)
    metrics["actor/kl_stop"] = Metric(float(update.stopped))
    if update.explained_variance is not None:
        metrics["actor/explained_variance"] = Metric(update.explained_variance)
    return metrics
