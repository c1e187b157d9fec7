"""Whole weights from the saved state of a trained model, under the names of a saved model.

Only the files are needed: no ranks, no accelerator, and memory for one batch of tensors. Names in the files are those
of `workers.training.state`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlplace.codes import config_error
from rlplace.models.checkpoint import write_file

# Beginnings of names in the files: weights, and their moving average
_MODEL = "model."
_AVERAGE = "average."
# Single numbers, which the files store as vectors of length 1
_NUMBERS = {"normalizer.count"}
# Bytes of the tensors that are read at once
_BATCH_BYTES = 1 << 30


class SavedState:
    """Reads a component's saved weights, or with `average` their moving average.

    `folder`: folder of the component's saved state. Raises ConfigError if `average` is set and the folder has no
    average.
    """

    def __init__(self, folder: Path, *, average: bool) -> None:
        self._folder = folder
        found = (
            HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        )
        self._stored = {
            name: of
            for name, of in found.items()
            if isinstance(of, TensorStorageMetadata)
        }
        # Names of the module's tensors; for an average, those that have one
        names = []
        for stored_name in self._stored:
            if stored_name.startswith(_MODEL):
                names.append(stored_name.removeprefix(_MODEL))
        averaged = {
            name for name in names if average and _AVERAGE + name in self._stored
        }
        if average and not averaged:
            raise config_error("bad-option", "--ema", str(folder), error="no-average")
        # Buffers have no average and come from the weights
        self._places = {}
        for name in names:
            kind = _AVERAGE if name in averaged else _MODEL
            self._places[name] = kind + name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the module's parameters and buffers in these files."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if the files have no tensor of this name."""
        if name in self._places:
            return tuple(self._stored[self._places[name]].size)
        return None

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) for each of `names`. Tensors are read in batches of `_BATCH_BYTES`."""
        batch = dict[str, Tensor]()
        size = 0
        for name in names:
            stored = self._stored[self._places[name]]
            batch[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            size += batch[name].nbytes
            if size > _BATCH_BYTES:
                yield from self._read(batch)
                batch = {}
                size = 0
        yield from self._read(batch)

    def _read(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Fill the tensors of a batch from the files, and yield each (name, tensor).

        `batch`: name -> uninitialized tensor of the right shape and dtype.
        """
        places = {self._places[name]: tensor for name, tensor in batch.items()}
        with warnings.catch_warnings():
            # This process has no ranks, on purpose
            warnings.filterwarnings(
                "ignore",
                "torch.distributed is disabled",
                UserWarning,
            )
            state_dict_loader.load(
                places,
                storage_reader=HuggingFaceStorageReader(str(self._folder)),
                no_dist=True,
            )
        yield from batch.items()


def write_policy(folder: Path, out: Path) -> None:
    """Write a saved simulator policy to the file `out`, as a run does at its end. Raises OutputError.

    `folder`: folder of the component's saved state.
    """
    write_file(out, policy_tensors(folder))


def policy_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the module, weight) of a saved simulator policy. `folder`: folder of the saved state."""
    state = SavedState(folder, average=False)
    for name, tensor in state.tensors(sorted(state.names)):
        if name in _NUMBERS:
            tensor = tensor.view([])
        yield name, tensor
