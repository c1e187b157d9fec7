"""Bases of workers whose ranks compute one model together: they offload, train, save and load the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlplace.metrics import Metric, Metrics
from rlplace.placement.schedule import Residency
from rlplace.workers.worker import MoveReport, RoleWorker

if TYPE_CHECKING:  # the driver imports this module too: torch waits for setup
    from torch import Tensor

    from rlplace.config.blocks.training import OptimizerConfig, TrainedConfig
    from rlplace.models.causal_lm import LmSpec
    from rlplace.workers.offload import Offloadable
    from rlplace.workers.training.moments import Values
    from rlplace.workers.training.optimizer import Trainer
    from rlplace.workers.training.ranks import Ranks
    from rlplace.workers.training.state import State, StateFiles
    from rlplace.workers.training.trained_model import TrainedModel


class JoinedWorker(RoleWorker):
    """Base class of workers whose ranks compute one model together. Owns this rank's part of the model."""

    # Torch has one default process group per process
    needs_own_process: ClassVar[bool] = True

    _ranks: Ranks
    # Each part that can be offloaded, with the least residency at which it is on the accelerator
    _parts: dict[Offloadable, Residency]
    _files: StateFiles | None = None

    def _join(self) -> Ranks:
        """Join the process group of this worker's ranks, and return an object with the group's collectives. A
        collective.
        """
        from rlplace.workers.training.ranks import Ranks

        parallel = self.config.parallel_of(self.context.slot.component)
        self._ranks = Ranks(
            self.context, self.config.config.runner.stage_timeout_s, parallel
        )
        self._opened.callback(self._ranks.close)
        return self._ranks

    def move(self, to: Residency) -> MoveReport:
        """Offload or onload this rank's state as residency `to` requires; return the new residency and the measured
        bytes.

        A tensor that was offloaded and onloaded has the same bits as before.
        """
        # The residency is right also if a part finds no room
        self.residency = min(self.residency, to)
        # Offload first, to make room
        for part, needs in reversed(self._parts.items()):
            if to < needs:
                part.offload()
        for part, needs in self._parts.items():
            if to >= needs:
                part.onload()
        self.residency = to
        return MoveReport(
            residency=to,
            accelerator_bytes=self.context.device.measured_bytes(
                sum(part.accelerator_bytes for part in self._parts)
            ),
            host_bytes=sum(part.host_bytes for part in self._parts)
            + self._host_bytes(),
        )

    def begin_again(self, iteration: int) -> Metrics:
        self._ranks.begin_again()
        return super().begin_again(iteration)

    def _host_bytes(self) -> int:
        """Return the bytes of this rank that are always on the host, at every residency."""
        return 0

    # ── its state in files, at any residency: offloaded tensors are read and changed on the host ─────────────────────

    def _where(self, tensor: Tensor) -> Tensor:
        """Return `tensor`; while it is offloaded, return its copy on the host instead."""
        for part in self._parts:
            tensor = part.where(tensor)
        return tensor

    def _save(
        self,
        folder: str,
        state: State,
        new: Collection[str] = (),
        beside: Callable[[Path], Sequence[str]] | None = None,
    ) -> Metrics:
        """Copy `state`, start to write the copy into `folder` in the background, and return the copy's duration. A
        collective.

        `new`: names of tensors that need no copy, because nothing else uses them. `beside`: as in `StateFiles.save`.
        """
        began = time.perf_counter()
        self._state_files().save(Path(folder), state, new, beside)
        return {
            f"{self.context.slot.component}/save_copy_s": Metric(
                time.perf_counter() - began, "max"
            )
        }

    def _state_files(self) -> StateFiles:
        from rlplace.workers.training.state import StateFiles

        if self._files is None:
            self._files = StateFiles(
                self.context, self._ranks, copies=self.config.copies_checkpoints
            )
            self._opened.callback(self._files.close)
        return self._files

    @contextmanager
    def _working(self, stage: str) -> Iterator[None]:
        """Return a context manager that reserves the working memory that the plan gives to `stage`, during its `with`
        block.

        This memory is in addition to the resident state. Raises AcceleratorOutOfMemory before the block begins.
        """
        device = self.context.device
        planned = self.config.working
        what = f"working memory of {stage}"
        device.acquire(planned.get(self.context.slot.component, {}).get(stage, 0), what)
        try:
            yield
        finally:
            device.release(what)


class TrainedWorker(JoinedWorker):
    """One rank of a worker group that trains one model. All public methods except `move` and `close` are collectives.

    Owns its shards of the model, the optimizer state and the moving average. At residency WEIGHTS, parameters and
    buffers are on the accelerator; at FULL, the optimizer state is there too. No gradients are kept after a method has
    returned.
    """

    _model: TrainedModel
    _trainer: Trainer

    def _train(
        self,
        model: TrainedModel,
        config: OptimizerConfig,
        *,
        ema_decay: float | None = None,
    ) -> Trainer:
        """Take over `model`, and return the trainer that makes its optimizer steps.

        `ema_decay`: decay of the moving average of the weights; None: keep no average.
        """
        from rlplace.workers.offload import Offloadable
        from rlplace.workers.training.optimizer import Trainer

        device = self.context.device
        component = self.context.slot.component
        iterations = self.config.config.runner.total_iterations
        self._model = model
        weights = Offloadable(f"{component} weights", device, model.weight_tensors)
        self._trainer = Trainer(
            model,
            config,
            self._ranks,
            iterations=iterations,
            component=component,
            ema_decay=ema_decay,
            on_poison=self.config.config.faults.on_poison,
        )
        state = Offloadable("optimizer state", device, self._trainer.optimizer.tensors)
        self._parts = {weights: Residency.WEIGHTS, state: Residency.FULL}
        return self._trainer

    def _host_bytes(self) -> int:
        return self._trainer.host_bytes

    def save_model(self, path: str) -> None:
        """Save the weights, in the optimizer's dtype, as the file or folder `path`. Rank 0 replaces an earlier `path`
        as a whole.

        If a moving average of the weights is kept, it is saved too, as `path` with `_ema` appended. LoRA factors of an
        actor are saved a second time as an adapter of the library peft, as `path` with `_adapter` appended. Raises
        OutputError.
        """
        with self._computing("save_model", Residency.WEIGHTS):
            self._model.save(Path(path), self.context.rank)
            if self._trainer.average is not None:
                with self._trainer.average.in_place():
                    self._model.save(Path(f"{path}_ema"), self.context.rank)

    def write_state(self, folder: str) -> Metrics:
        """Copy the state that the next iteration depends on, start to write the copy into `folder`, and return the
        copy's duration.

        The files are written in the background, after those of the previous checkpoint. `checkpoints.written` tells
        when they are complete, `checkpoints.failed` why they are not.
        """
        moments = self._trainer.optimizer.moments
        state = self._state(moments.read(self._where))
        unpacked = [
            name for name in state if moments.packed and name.startswith("optimizer.")
        ]
        everything = state | self._carried()
        return self._save(folder, everything, unpacked, self._model.write_beside)

    def read_state(self, folder: str) -> Metrics:
        """Continue from the state in `folder`; return the duration as a metric.

        The number of ranks that saved the state does not matter. Raises ConfigError if the state does not match this
        model and config.
        """
        from rlplace.workers.training.state import take_over

        began = time.perf_counter()
        carried = self._carried()
        moments = self._trainer.optimizer.moments.read(self._where)
        state = self._state(moments) | carried
        self._state_files().load(Path(folder), state)
        take_over(state, self._trainer, moments, self._where)
        self._take_over(carried)
        return {
            f"{self.context.slot.component}/load_s": Metric(
                time.perf_counter() - began, "max"
            )
        }

    def _state(self, moments: Values) -> dict[str, Tensor]:
        """Return the state of model, optimizer and moving average as named tensors.

        `moments`: result of `Moments.read`.
        """
        from rlplace.workers.training.state import trained_state

        return trained_state(self._model, self._trainer, moments, self._where)

    def _carried(self) -> dict[str, Tensor]:
        """Return what a learner keeps from one iteration to the next, as named new tensors that are equal on all
        ranks.
        """
        return {}

    def _take_over(self, carried: Mapping[str, Tensor]) -> None:
        """Continue from `carried`, the tensors of `_carried` after they were filled from a checkpoint."""

    def digest(self) -> str:
        """Return the SHA-256 of the whole weights, in the optimizer's dtype."""
        from rlplace.models.sharding import digest

        with self._computing("digest", Residency.WEIGHTS):
            return digest(self._model.whole_weights())

    @contextmanager
    def _computing(self, method: str, needs: Residency) -> Iterator[None]:
        """Return a context manager that reserves the working memory of `method` during its `with` block.

        At the end of the block, the parameters that were gathered from other ranks, and all gradients, are freed.
        `needs`: the least residency for the block; below it, raise NotResident.
        """
        self._require(needs, method)
        with self._working(method):
            try:
                yield
            finally:
                self._model.drop_gathered()

    def _spec(
        self, trained: TrainedConfig, job_folder: Path, own_folder: Path | None = None
    ) -> LmSpec:
        """Return the description of the language model to train.

        `trained`: config block of the component. `job_folder`: folder of the job's model. `own_folder`: folder of the
        component's model; None: the job's model folder.
        """
        from rlplace.models.causal_lm import LmSpec

        component = self.context.slot.component
        seed = self.config.config.runner.seed
        return LmSpec.of(
            trained,
            component,
            seed,
            job_folder=job_folder,
            own_folder=own_folder,
            chat=self.config.config.env.chat,
        )
