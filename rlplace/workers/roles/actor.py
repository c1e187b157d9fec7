"""The actor: trains the policy with FSDP, hands its weights to the rollout ranks, leaves its accelerators on demand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.metrics import Metric, Metrics
from rlplace.placement.flow import deliver_by_rank
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory, concat
from rlplace.workers.arguments import TRAJECTORIES, WorkerArguments
from rlplace.workers.training.worker import TrainingWorker

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.algo.minibatches import Rows
    from rlplace.comm.weights.shards import Shard
    from rlplace.models.mlp import ActorCritic
    from rlplace.workers.training.policy_learner import PPOLearner, Update
    from rlplace.workers.training.ranks import Ranks
    from rlplace.workers.training.trained_policy import TrainedPolicy


class PolicyActor(TrainingWorker):
    """One rank of the learner. `learn`, `push_weights`, `save_policy` and `state_digest` are collectives of the group.

    Owns the policy's shards and the optimizer state; residency `weights` holds parameters and buffers, `full` the
    optimizer state too.
    """

    config: WorkerArguments
    _policy: TrainedPolicy
    _learner: PPOLearner

    def setup(self) -> None:
        import torch

        from rlplace.models.mlp import build_policy
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.policy_learner import PPOLearner

        context, config = self.context, self.config.config
        device = torch.device(context.device.torch_name)
        ranks = self._join()
        module = build_policy(self.config.spaces, config.actor, config.algorithm, config.runner.seed).to(device)
        self._policy = self._make_policy(module, ranks)
        self._weights = Offloadable("actor weights", context.device, self._policy.weight_tensors)
        self._optimizer_state = Offloadable("optimizer state", context.device, self._policy.optimizer_tensors)
        self._learner = PPOLearner(config, self._rows(), self._policy, ranks, device, context.owner)
        job = self.config
        self._open_sync(config.actor.sync, (context.folder and job.deliveries) or deliver_by_rank(job.ranks["rollout"]))
        self.move(Residency.OFF)

    def _make_policy(self, module: ActorCritic, ranks: Ranks) -> TrainedPolicy:
        actor = self.config.config.actor
        if self.context.world_size == 1 and actor.compute == "fp32":
            from rlplace.workers.training.trained_policy import TrainedPolicy

            return TrainedPolicy(module, actor.optimizer)  # nothing to shard or to cast: no work for FSDP
        from rlplace.workers.training.sharded_policy import ShardedPolicy

        return ShardedPolicy(module, actor.optimizer, actor.compute, ranks)

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
        from rlplace.workers.training.policy_learner import no_rows

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

    def _shards(self) -> tuple[Shard, ...]:
        return self._policy.shards()

    def _workspace_bytes(self, needs: Residency) -> int:
        return (2 if needs is Residency.FULL else 1) * self._policy.gathered_bytes  # gradients are as large as weights

    def _drop_gathered(self) -> None:
        self._policy.drop_gathered()


def _metrics(update: Update) -> dict[str, Metric]:
    """The update's numbers, which all ranks agree on."""
    metrics = {f"actor/{name}": Metric(value) for name, value in update.mean._asdict().items()}
    metrics["actor/lr"] = Metric(update.lr)
    metrics["actor/optimizer_steps"] = Metric(update.steps)
    metrics["actor/kl_stop"] = Metric(float(update.stopped))
    if update.explained_variance is not None:
        metrics["actor/explained_variance"] = Metric(update.explained_variance)
    return metrics
