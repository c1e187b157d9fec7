"""Workers whose ranks compute together: their memory comes and goes; what they train is saved, whatever its loss."""

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


class JoinedWorker(RoleWorker):
    """Base of workers whose ranks compute together. Owns this rank's part of a model."""

    needs_own_process: ClassVar[bool] = True  # torch has one default process group per process

    _ranks: Ranks
    _parts: dict[Offloadable, Residency]  # of what comes and goes, and the least residency that has each

    def _join(self) -> Ranks:
        """Join the other ranks of the group. A collective."""
        from rlplace.workers.training.ranks import Ranks

        self._ranks = Ranks(self.context, self.config.config.runner.stage_timeout_s)
        self._opened.callback(self._ranks.close)
        return self._ranks

    def move(self, to: Residency) -> MoveReport:
        """Bring the parts on or off; they come back equal to the bit."""
        self.residency = min(self.residency, to)  # should a part find no room
        for part, needs in reversed(self._parts.items()):  # what leaves makes room first
            if to < needs:
                part.offload()
        for part, needs in self._parts.items():
            if to >= needs:
                part.onload()
        self.residency = to
        return MoveReport(
            residency=to,
            accelerator_bytes=sum(part.accelerator_bytes for part in self._parts),
            host_bytes=sum(part.host_bytes for part in self._parts) + self._host_bytes(),
        )

    def _host_bytes(self) -> int:
        """Return the bytes that are always on the host."""
        return 0

    @contextmanager
    def _working(self, stage: str) -> Iterator[None]:
        """Account what the plan has a stage hold beside the resident state, until the end of the block.

        Raises AcceleratorOutOfMemory before the work begins.
        """
        device, planned, what = self.context.device, self.config.working, f"working memory of {stage}"
        device.acquire(planned.get(self.context.slot.component, {}).get(stage, 0), what)
        try:
            yield
        finally:
            device.release(what)


class TrainedWorker(JoinedWorker):
    """One rank of a group that trains one model together. Public methods but `move` and `close` are collectives.

    Owns its shards of the model, the optimizer state and the average. Residency `weights` holds parameters and buffers,
    `full` the optimizer state too. Gradients are never kept.
    """

    _model: TrainedModel
    _trainer: Trainer

    def _train(self, model: TrainedModel, config: OptimizerConfig, *, ema_decay: float | None = None) -> Trainer:
        """Take ownership of the model; make what steps it. `ema_decay`: of the average; None: keep none."""
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.optimizer import Trainer

        device, component = self.context.device, self.context.slot.component
        iterations = self.config.config.runner.total_iterations
        self._model = model
        weights = Offloadable(f"{component} weights", device, model.weight_tensors)
        self._trainer = Trainer(
            model, config, self._ranks, iterations=iterations, component=component, ema_decay=ema_decay
        )
        state = Offloadable("optimizer state", device, self._trainer.optimizer.tensors)
        self._parts = {weights: Residency.WEIGHTS, state: Residency.FULL}
        return self._trainer

    def _host_bytes(self) -> int:
        return self._trainer.host_bytes

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
        """Refuse below `needs`; account what a stage's computation holds, free it at the end."""
        self._require(needs, method)
        with self._working(method):
            try:
                yield
            finally:
                self._model.drop_gathered()

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
