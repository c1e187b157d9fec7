"""The weights in the saved state of a trained model: whole, merged, under the names that a saved model has.

Nothing but the files is needed: no ranks, no accelerator, and no more memory than a batch of tensors. Names in the
files are those of `workers.training.state`.
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

from rlplace.errors import ConfigError
from rlplace.models.checkpoint import write_file

_MODEL = "model."
_AVERAGE = "average."
# Single ones, which the files hold as vectors of length 1
_NUMBERS = {"normalizer.count"}
_BATCH_BYTES = 1 << 30  # that are read at once


class SavedState:
    """Reads the weights of a component, or their moving average. Raises ConfigError where there is none."""

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
        names = [
            name.removeprefix(_MODEL)
            for name in self._stored
            if name.startswith(_MODEL)
        ]
        averaged = {
            name for name in names if average and _AVERAGE + name in self._stored
        }
        if average and not averaged:
            what = "the checkpoint has no moving average"
            why = "the run kept none: actor.ema_decay"
            raise ConfigError.of(
                "bad-option", "--ema", what, str(folder), why, "leave out --ema"
            )
        self._places = {
            name: (_AVERAGE if name in averaged else _MODEL) + name for name in names
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the module's parameters and buffers that are here."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None where it is not here."""
        if name in self._places:
            return tuple(self._stored[self._places[name]].size)
        return None

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, as many read at once as a batch has."""
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
        places = {self._places[name]: tensor for name, tensor in batch.items()}
        with warnings.catch_warnings():
            # As it is meant
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled", UserWarning
            )
            state_dict_loader.load(
                places,
                storage_reader=HuggingFaceStorageReader(str(self._folder)),
                no_dist=True,
            )
        yield from batch.items()


def write_policy(folder: Path, out: Path) -> None:
    """Write a simulator policy as one file, as a run does at its end. Raises OutputError."""
    write_file(out, policy_tensors(folder))


def policy_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a simulator policy, under the names of its module."""
    state = SavedState(folder, average=False)
    for name, tensor in state.tensors(sorted(state.names)):
        yield name, tensor.view([]) if name in _NUMBERS else tensor
