"""The state of a worker group in files: sharded safetensors, as torch.distributed.checkpoint writes and reads them.

Names and shapes of the tensors are those of the whole model, so any number of ranks reads what another number wrote:
each its own rows, also from several files. Nothing in the files is executed::

    model.<parameter>             as the optimizer steps it: its float32 copy, where it keeps one
    optimizer.exp_avg.<parameter>, optimizer.exp_avg_sq.<parameter>     the moments, not packed
    average.<parameter>           the moving average, where there is one
    steps_made                    by the optimizer
    ...                           what a learner carries from one iteration to the next

Of a model with LoRA factors, what is frozen is left out: it comes from the model's folder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
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
    model: TrainedModel, trainer: Trainer, moments: Values, where: Where
) -> dict[str, Tensor]:
    """Return all but what a learner carries; `moments`: as the optimizer's are read. Only numbers are copied."""
    state = {f"model.{name}": where(buffer) for name, buffer in model.named_buffers()}
    state["steps_made"] = torch.tensor([trainer.steps_made])
    parts = {"model": [*map(where, trainer.optimizer.stepped)]}
    parts |= {f"optimizer.{name}": moment for name, moment in moments.items()}
    if trainer.average is not None:
        parts["average"] = trainer.average.averages
    for part, tensors in parts.items():
        state |= {f"{part}.{name}": tensor for name, tensor in model.by_name(tensors)}
    return state


@torch.no_grad()
def take_over(state: State, trainer: Trainer, moments: Values, where: Where) -> None:
    """Make the rest follow from a state of `trained_state` and its `moments` that were filled with other numbers."""
    trainer.steps_made = int(state["steps_made"])
    trainer.optimizer.moments.take_over(moments, trainer.steps_made, where)
    trainer.optimizer.follow(where)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class StateFiles:
    """Saves and loads the state of a rank. Owns the copy that is being written, and the thread that writes it."""

    def __init__(self, context: WorkerContext, ranks: Ranks, *, copies: bool) -> None:
        """`copies`: the host has room for one of this rank's state."""
        self._ranks = ranks
        self._component = context.slot.component
        self._copies = copies
        self._behind = FilesBehind(context)
        self._group = ranks.beside()
        # Both are right here: a single rank saves by itself, and every rank reads its own rows by itself.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def save(self, folder: Path, state: State, new: Collection[str] = ()) -> None:
        """Copy to the host, and write into `folder` behind; first wait for the save before. A collective.

        Without room for a copy, return when the state itself is written. `new`: tensors that are such copies already.
        """
        self._behind.wait()
        copied = state.keys() - new if self._copies else ()
        there = {
            name: _copied(tensor) if name in copied else _at_least_1d(tensor)
            for name, tensor in state.items()
        }
        self._behind.start(folder, lambda: self._write(folder, there))
        if not self._copies:
            self._behind.wait()

    def _write(self, folder: Path, state: dict[str, Tensor]) -> list[str]:
        writer = HuggingFaceStorageWriter(
            str(folder), _file_numbers(state, self._ranks), save_distributed=True
        )
        # From a GPU: there is nothing to copy, and this thread has none
        writer.per_thread_copy_ahead = 0
        try:
            state_dict_saver.save(
                state,
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None  # of the lowest rank
        return sorted(
            file.name
            for file in folder.glob(f"shard-{self._ranks.rank + 1:05}-*.safetensors")
        )

    def load(self, folder: Path, state: State) -> None:
        """Fill the tensors of `state` in place from `folder`. Raises ConfigError; then nothing has changed."""
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
            raise unreadable_state(
                self._component, folder, next(iter(error.failures.values()))[0]
            ) from error

    def _compare(self, folder: Path, found: Metadata, state: State) -> None:
        """Raise ConfigError for the first difference."""
        there: Mapping[str, object] = found.state_dict_metadata
        for name in sorted(there.keys() | state.keys()):
            expected = _described(state[name]) if name in state else "nothing"
            stored = there.get(name)
            got = (
                _stored(stored)
                if isinstance(stored, TensorStorageMetadata)
                else "nothing"
            )
            if name not in state or stored is None or not _same(stored, state[name]):
                raise other_state(
                    self._component, f"{folder}: {name} has {got}", expected
                )

    def close(self) -> None:
        self._behind.close()


def _at_least_1d(tensor: Tensor) -> Tensor:
    """A file has places within tensors, and a single number has none."""
    if tensor.dim():
        return tensor
    return tensor.view(1)


def _copied(tensor: Tensor) -> Tensor:
    # Not pinned: what torch has pinned once, it keeps, and rounds up to a power of two.
    local = _at_least_1d(own(tensor))
    return like(tensor, torch.empty(local.shape, dtype=local.dtype).copy_(local))


def _file_numbers(state: State, ranks: Ranks) -> dict[str, int]:
    """Cut the tensors into files of about equal size; the same on all ranks, whose parts may differ in size."""
    numbers = dict[str, int]()
    written = 0
    for name, tensor in state.items():
        written += tensor.nbytes // ranks.world_size
        numbers[name] = 1 + written // STATE_FILE_BYTES
    return numbers


def _same(stored: object, tensor: Tensor) -> bool:
    """Compare shapes and kinds of numbers: floating point is rounded to the dtype that this run has."""
    if not isinstance(stored, TensorStorageMetadata):
        return False
    dtype, here = stored.properties.dtype, tensor.dtype
    whole = sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(
        stored.size
    )
    same = dtype == here or (dtype.is_floating_point and here.is_floating_point)
    return whole and same and tuple(stored.size) == tuple(_at_least_1d(tensor).shape)


def _stored(stored: TensorStorageMetadata) -> str:
    numbers = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
    whole = math.prod(stored.size)
    part = "" if numbers == whole else f", {numbers:,} of its {whole:,} numbers"
    return f"{stored.properties.dtype} {list(stored.size)}{part}".removeprefix("torch.")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(_at_least_1d(tensor).shape)}".removeprefix("torch.")
