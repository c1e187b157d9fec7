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
from rlplace.models import BUILDING
from rlplace.models.causal_lm import LmSpec, PackedLm, rows_of, skeleton
from rlplace.models.checkpoint import Checkpoint, model_mismatch, write_file, write_model
from rlplace.models.lora import Factors, checkpoint_name, factors_of, is_factor

_MODEL, _AVERAGE = "model.", "average."
_NUMBERS = {"normalizer.count"}  # single ones, which the files hold as vectors of length 1
_BATCH_BYTES = 1 << 30  # that are read at once


class SavedState:
    """Reads the weights of a component, or their moving average. Raises ConfigError where there is none."""

    def __init__(self, folder: Path, *, average: bool) -> None:
        self._folder = folder
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        self._stored = {name: of for name, of in found.items() if isinstance(of, TensorStorageMetadata)}
        names = [name.removeprefix(_MODEL) for name in self._stored if name.startswith(_MODEL)]
        averaged = {name for name in names if average and _AVERAGE + name in self._stored}
        if average and not averaged:
            what, why = "the checkpoint has no moving average", "the run kept none: actor.ema_decay"
            raise ConfigError.of("bad-option", "--ema", what, str(folder), why, "leave out --ema")
        self._places = {name: (_AVERAGE if name in averaged else _MODEL) + name for name in names}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the module's parameters and buffers that are here."""
        return tuple(self._places)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None where it is not here."""
        return tuple(self._stored[self._places[name]].size) if name in self._places else None

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, as many read at once as a batch has."""
        batch, size = dict[str, Tensor](), 0
        for name in names:
            stored = self._stored[self._places[name]]
            batch[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            size += batch[name].nbytes
            if size > _BATCH_BYTES:
                yield from self._read(batch)
                batch, size = {}, 0
        yield from self._read(batch)

    def _read(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        places = {self._places[name]: tensor for name, tensor in batch.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is meant
            state_dict_loader.load(places, storage_reader=HuggingFaceStorageReader(str(self._folder)), no_dist=True)
        yield from batch.items()


def write_policy(folder: Path, out: Path) -> None:
    """Write a simulator policy as one file, as a run does at its end. Raises OutputError."""
    state = SavedState(folder, average=False)
    found = state.tensors(sorted(state.names))
    write_file(out, ((name, tensor.view([]) if name in _NUMBERS else tensor) for name, tensor in found))


def write_lm(folder: Path, out: Path, spec: LmSpec, kind: type[PackedLm], *, average: bool) -> None:
    """Write a language model as a folder of transformers, as a run does at its end. Raises OutputError, ConfigError."""
    with BUILDING:
        module = skeleton(kind, spec)
    weights = _lm_weights(SavedState(folder, average=average), spec, module)
    write_model(out, spec.folder, weights, config=module.saved_config())


def _lm_weights(state: SavedState, spec: LmSpec, module: PackedLm) -> Iterator[tuple[str, Tensor]]:
    parameters: dict[Tensor, str] = {}  # under the first of its names
    for name, parameter in module.named_tensors():
        parameters.setdefault(parameter, name)
    dtypes = {name: parameter.dtype for parameter, name in parameters.items()}
    for parameter, name in parameters.items():
        if parameter.requires_grad and state.shape(name) != tuple(parameter.shape):
            why = f"{name} is {list(parameter.shape)} there, {list(state.shape(name) or ())} in the checkpoint"
            raise model_mismatch(spec.folder, why, spec.key)
    if spec.lora is None:
        saved = [name for name in parameters.values() if name not in module.kept]
        yield from ((checkpoint_name(name), tensor.to(dtypes[name])) for name, tensor in state.tensors(saved))
        return
    trained = {name: tensor.to(dtypes[name]) for name, tensor in state.tensors(state.names)}
    frozen = Checkpoint(spec.folder, spec.key)
    for parameter, name in parameters.items():
        if name in trained:
            weight = trained[name]
        else:
            weight = rows_of(module, name, parameter, frozen, spec.seed).to(parameter.dtype)
        if pair := factors_of(name):
            a, b = (trained[factor] for factor in pair)
            weight = Factors(a=a, b=b, scale=spec.lora.scale).added_to(weight, weight.device)
        if not is_factor(name) and name not in module.kept:
            yield checkpoint_name(name), weight
