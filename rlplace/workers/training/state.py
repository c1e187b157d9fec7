"""The state of a worker group in files: sharded safetensors, as torch.distributed.checkpoint writes and reads them.

Names and shapes of the tensors are those of the whole model, so any number of ranks reads what another number of
ranks wrote: each rank reads its own rows, also from several files. Nothing in the files is executed::

    model.<parameter>             the tensor that the optimizer steps: the float32 copy, if there is one
    optimizer.exp_avg.<parameter>, optimizer.exp_avg_sq.<parameter>     the moments, not packed
    average.<parameter>           the moving average, if there is one
    steps_made                    optimizer steps so far
    ...                           what a learner carries from one iteration to the next

With LoRA factors, the frozen weights are left out: they come from the model's folder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlplace.checkpoints import STATE_FILE_BYTES
from rlplace.models.sharding import like, own
from rlplace.workers.saving import FilesBehind, other_state, unreadable_state
from rlplace.workers.training.moments import Values, Where
from rlplace.workers.training.optimizer import Trainer
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedModel
from rlplace.workers.worker import WorkerContext

State = Mapping[str, Tensor]  # sharded, or whole and equal on all ranks


# ── what a trained model's state is ──────────────────────────────────────────────────────────────────────────────────


def trained_state(
    model: TrainedModel,
    trainer: Trainer,
    moments: Values,
    where: Where,
) -> dict[str, Tensor]:
    """Return the state of model, optimizer and moving average as named tensors. The caller adds the state of a learner.

    `moments`: result of `Moments.read`. `where`: called with a tensor, returns the tensor that has its data now:
    itself, or while it is offloaded, its copy on the host. The returned tensors share memory with the originals.
    """
    state = {f"model.{name}": where(buffer) for name, buffer in model.named_buffers()}
    state["steps_made"] = torch.tensor([trainer.steps_made])
    # Lists in the order of the model's trained shards, by the prefix of their names
    parts = {"model": [*map(where, trainer.optimizer.stepped)]}
    parts |= {f"optimizer.{name}": moment for name, moment in moments.items()}
    if trainer.average is not None:
        parts["average"] = trainer.average.averages
    for part, tensors in parts.items():
        state |= {f"{part}.{name}": tensor for name, tensor in model.by_name(tensors)}
    return state


@torch.no_grad()
def take_over(
    state: State,
    trainer: Trainer,
    moments: Values,
    where: Where,
) -> None:
    """Continue training from `state`, whose tensors and `moments` have been filled from a checkpoint.

    `where`: called with a tensor, returns the tensor that has its data now: itself, or while it is offloaded, its copy
    on the host.
    """
    trainer.steps_made = int(state["steps_made"])
    trainer.optimizer.moments.take_over(moments, trainer.steps_made, where)
    trainer.optimizer.follow(where)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class StateFiles:
    """Saves and loads the state of one rank.

    Owns the copy that is being written, and the thread that writes it.
    """

    def __init__(
        self,
        context: WorkerContext,
        ranks: Ranks,
        *,
        copies: bool,
    ) -> None:
        """Prepare to save and load.

        `copies`: whether the host has room for a copy of this rank's state, so that training can go on while the copy
        is written.
        """
        self._ranks = ranks
        self._component = context.slot.component
        self._copies = copies
        self._behind = FilesBehind(context)
        self._group = ranks.beside()
        # torch warns about both: a single rank saves by itself, and every rank reads its own rows by itself
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def save(
        self,
        folder: Path,
        state: State,
        new: Collection[str] = (),
        beside: Callable[[Path], Sequence[str]] | None = None,
    ) -> None:
        """Copy the state to the host, and start to write the copy into `folder` in the background. A collective.

        Wait first until the previous save is written. If the host has no room for a copy, return when `state` is
        written.

        `new`: names of tensors that need no copy, because nothing else uses them. `beside`: writes further files into
        the folder, on rank 0 after all ranks have written, and returns their names; None: there are no further files.
        """
        self._behind.wait()
        copied = state.keys() - new if self._copies else ()
        there: dict[str, Tensor] = {}
        for name, tensor in state.items():
            there[name] = _copied(tensor) if name in copied else _at_least_1d(tensor)
        self._behind.start(folder, lambda: self._write(folder, there, beside))
        if not self._copies:
            self._behind.wait()

    def wait(self) -> None:
        """Wait until this rank has written its part of the last save, or has reported why it could not."""
        self._behind.wait()

    def _write(
        self,
        folder: Path,
        state: dict[str, Tensor],
        beside: Callable[[Path], Sequence[str]] | None,
    ) -> list[str]:
        """Write this rank's part of `state` into `folder`, and return the names of its files. A collective.

        If several ranks fail, raise the error of the lowest rank. `beside`: as in `save`.
        """
        writer = HuggingFaceStorageWriter(
            str(folder),
            _file_numbers(state, self._ranks),
            save_distributed=True,
        )
        # Copying ahead is for tensors on a GPU; these are on the host, and this thread has no GPU
        writer.per_thread_copy_ahead = 0
        try:
            state_dict_saver.save(
                state,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            failures = iter(error.failures.values())
            raise next(failures)[0] from None
        pattern = f"shard-{self._ranks.rank + 1:05}-*.safetensors"
        names = sorted(file.name for file in folder.glob(pattern))
        if beside is not None and self._ranks.rank == 0:
            names += beside(folder)
        return names

    def load(self, folder: Path, state: State) -> None:
        """Fill the tensors of `state` in place from the files in `folder`.

        Raises ConfigError if the files cannot be read, or if their tensors do not match `state`. If they do not match,
        no tensor is changed.
        """
        reader = HuggingFaceStorageReader(str(folder))
        try:
            found = reader.read_metadata()
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise unreadable_state(self._component, folder, error) from error
        self._compare(folder, found, state)
        shown = {name: _at_least_1d(tensor) for name, tensor in state.items()}
        try:
            state_dict_loader.load(shown, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            failures = iter(error.failures.values())
            first = next(failures)[0]
            raise unreadable_state(self._component, folder, first) from error

    def _compare(
        self,
        folder: Path,
        found: Metadata,
        state: State,
    ) -> None:
        """Raise ConfigError for the first tensor that is missing, unexpected, incomplete, or of a different shape or
        dtype.

        `found`: description of the tensors in `folder`. `state`: tensors of this run.
        """
        there: Mapping[str, object] = found.state_dict_metadata
        for name in sorted(there.keys() | state.keys()):
            expected = _described(state[name]) if name in state else "nothing"
            stored = there.get(name)
            got = "nothing"
            if isinstance(stored, TensorStorageMetadata):
                got = _stored(stored)
            if name not in state or stored is None or not _same(stored, state[name]):
                raise other_state(
                    self._component,
                    f"{folder}: {name} has {got}",
                    expected,
                )

    def close(self) -> None:
        """Wait a few seconds until a save in progress is written, and end the thread."""
        self._behind.close()


def _at_least_1d(tensor: Tensor) -> Tensor:
    """Return a tensor without dimensions as a view [1], and any other tensor unchanged.

    Files address parts of a tensor by its dimensions, so they need at least one.
    """
    if tensor.dim():
        return tensor
    return tensor.view(1)


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` in host memory, sharded in the same way."""
    # Not pinned: torch keeps pinned memory, and rounds it up to a power of two
    local = _at_least_1d(own(tensor))
    return like(tensor, torch.empty(local.shape, dtype=local.dtype).copy_(local))


def _file_numbers(state: State, ranks: Ranks) -> dict[str, int]:
    """Return for each tensor the index of the file to which it is written, so that files have about equal sizes.

    The indices are equal on all ranks, even if the ranks have parts of different sizes.
    """
    numbers = dict[str, int]()
    written = 0
    for name, tensor in state.items():
        written += tensor.nbytes // ranks.world_size
        numbers[name] = 1 + written // STATE_FILE_BYTES
    return numbers


def _same(stored: object, tensor: Tensor) -> bool:
    """Return whether a stored tensor is complete and has the shape and kind of numbers of `tensor`.

    All floating-point dtypes are the same kind, because stored numbers are rounded to the dtype of this run.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return False
    dtype = stored.properties.dtype
    here = tensor.dtype
    numbers = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    is_complete = numbers == math.prod(stored.size)
    both_floating = dtype.is_floating_point and here.is_floating_point
    same_kind = dtype == here or both_floating
    same_shape = tuple(stored.size) == tuple(_at_least_1d(tensor).shape)
    return is_complete and same_kind and same_shape


def _stored(stored: TensorStorageMetadata) -> str:
    """Return dtype and shape of a stored tensor as a text for an error. If it is incomplete, the text says how much is
    stored.
    """
    numbers = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    whole = math.prod(stored.size)
    part = "" if numbers == whole else f", {numbers:,} of its {whole:,} numbers"
    return f"{stored.properties.dtype} {list(stored.size)}{part}".removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    """Return dtype and shape of `tensor` as a text for an error."""
    return f"{tensor.dtype} {list(_at_least_1d(tensor).shape)}".removeprefix("torch.")
