"""Workers that train a model: their memory comes and goes, their weights are saved, whatever the model and its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlplace.placement.schedule import Residency
from rlplace.workers.worker import MoveReport, RoleWorker

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from rlplace.config.schema import OptimizerConfig, TrainedConfig
    from rlplace.models.causal_lm import LmSpec
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.optimizer import Trainer
    from rlplace.workers.training.ranks import Ranks
    from rlplace.workers.training.trained_model import TrainedModel

_WORKSPACE = "gathered weights and gradients"


class JoinedWorker(RoleWorker):
    """Base of workers whose ranks compute together."""

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks

    def _join(self) -> Ranks:
        """Join the other ranks of the group. A collective."""
        from rlplace.workers.training.ranks import Ranks

        self._ranks = Ranks(self.context, self.config.config.runner.stage_timeout_s)
        self._opened.callback(self._ranks.close)
        return self._ranks


class TrainedWorker(JoinedWorker):
    """One rank of a group that trains one model together. Public methods but `move` and `close` are collectives.

    Owns its shards of the model, the optimizer state and the average. Residency `weights` holds parameters and buffers,
    `full` the optimizer state too.
    """

    _model: TrainedModel
    _weights: Offloadable
    _trainer: Trainer
    _optimizer_state: Offloadable

    def _train(self, model: TrainedModel, config: OptimizerConfig, *, ema_decay: float | None = None) -> Trainer:
        """Take ownership of the model; make what steps it. `ema_decay`: of the average; None: keep none."""
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.optimizer import Trainer

        device, component = self.context.device, self.context.slot.component
        iterations = self.config.config.runner.total_iterations
        self._model = model
        self._weights = Offloadable(f"{component} weights", device, model.weight_tensors)
        self._trainer = Trainer(
            model, config, self._ranks, iterations=iterations, component=component, ema_decay=ema_decay
        )
        self._optimizer_state = Offloadable("optimizer state", device, self._trainer.optimizer.tensors)
        return self._trainer

    @property
    def residency(self) -> Residency:
        if not self._weights.resident:
            return Residency.OFF
        return Residency.FULL if self._optimizer_state.resident else Residency.WEIGHTS

    def move(self, to: Residency) -> MoveReport:
        """Bring weights and optimizer state on or off; they come back equal to the bit. Gradients are never kept."""
        parts = {self._weights: Residency.WEIGHTS, self._optimizer_state: Residency.FULL}
        # What leaves makes room first.
        for part in reversed(parts):
            if to < parts[part]:
                part.offload()
        for part, residency in parts.items():
            if to >= residency:
                part.onload()
        return MoveReport(
            residency=self.residency,
            accelerator_bytes=sum(part.accelerator_bytes for part in parts),
            host_bytes=sum(part.host_bytes for part in parts) + self._trainer.host_bytes,
        )

    def save_model(self, path: str) -> None:
        """Save the weights in the optimizer's dtype: a file or folder that rank 0 replaces whole. Raises OutputError.

        Where their average is kept, it is saved too, under the same name with `_ema` behind it.
        """
        with self._computing("save_model", Residency.WEIGHTS):
            self._model.save(Path(path), self.context.rank)
            if self._trainer.average is not None:
                with self._trainer.average.in_place():
                    self._model.save(Path(f"{path}_ema"), self.context.rank)

    def digest(self) -> str:
        """Return the SHA-256 of the whole weights as they are trained."""
        from rlplace.models.sharding import digest

        with self._computing("digest", Residency.WEIGHTS):
            return digest({name: tensor.cpu() for name, tensor in self._model.whole_weights()})

    @contextmanager
    def _computing(self, method: str, needs: Residency) -> Iterator[None]:
        """Refuse below `needs`; account what a computation holds beside the resident state, free it at the end."""
        self._require(needs, method)
        gradients = self._model.gradient_bytes if needs is Residency.FULL else 0
        self.context.device.acquire(self._model.gathered_bytes + gradients, _WORKSPACE)
        try:
            yield
        finally:
            self._model.drop_gathered()
            self.context.device.release(_WORKSPACE)

    def _spec(self, trained: TrainedConfig, own_folder: Path | None = None) -> LmSpec:
        """Describe a language model to train, of its `own_folder` or that of the job."""
        from rlplace.models.causal_lm import LmSpec
        from rlplace.models.lora import LoraSpec

        component, lora = self.context.slot.component, None
        if trained.lora_rank is not None:
            key = f"{component}.lora_targets"
            lora = LoraSpec(rank=trained.lora_rank, alpha=trained.lora_alpha, targets=trained.lora_targets, key=key)
        return LmSpec(
            folder=own_folder or self.config.model,
            weights=trained.weights,
            compute=trained.compute,
            checkpointing=trained.checkpointing,
            gather_again=trained.zero_stage == 3,
            lora=lora,
            seed=self.config.config.runner.seed,
            key=f"{component if own_folder else 'actor'}.model.path",
        )
