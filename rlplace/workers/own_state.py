"""Checkpoint state of custom workers: the result of `save_state` as one file per rank, and back.

A state is made of dicts, lists, tuples, numbers, texts, bytes, None, tensors and NumPy arrays, nested at will, so that
reading a checkpoint runs no code. The state is copied at once, and the copy is written while the worker continues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.codes import config_error, problem
from rlplace.errors import ConfigError, WorkerMisuse
from rlplace.workers.saving import FilesBehind, unreadable_state

if TYPE_CHECKING:
    from rlplace.workers.worker import Worker

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_ARRAY = "numpy"  # marks an array among the tensors of a file


class StateOfRank:
    """Writes the state of one rank into a checkpoint, and reads the states of all ranks. Owns the writing thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._behind = FilesBehind(worker.context)

    def write(self, folder: Path, state: Any) -> None:
        """Copy `state`, and start to write the copy into a file in `folder` in the background.

        Raise WorkerMisuse if `state` contains a value that cannot be stored.
        """
        import torch

        copied = _copied(state, "save_state()", self._worker)
        name = _file_of(self._worker.rank)

        def write() -> list[str]:
            # The file is valid only once it is on disk.
            with open(folder / name, "wb") as file:
                torch.save(copied, file)
                file.flush()
                os.fsync(file.fileno())
            return [name]

        self._behind.start(folder, write)

    def read(self, folder: Path) -> list[Any]:
        """Return the states of all ranks that have written into `folder`, in rank order.

        Raise ConfigError if a file cannot be read.
        """
        import torch

        component = self._worker.component
        files = sorted(folder.glob("state_*.pt"))
        states = []
        for file in files:
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except (OSError, EOFError, RuntimeError, ValueError) as error:
                raise unreadable_state(component, file, error) from error
            states.append(_restored(state))
        return states

    def close(self) -> None:
        self._behind.close()


def other_ranks(worker: Worker, saved: int) -> ConfigError:
    """Return the error that another number of ranks, `saved`, has saved states of their own."""
    return config_error(
        "other-ranks",
        "resume",
        f"{worker.world_size} ranks",
        component=worker.component,
        saved=saved,
        world_size=worker.world_size,
        kind=type(worker).__name__,
    )


def state_for(worker: Worker, states: list[Any]) -> Any:
    """Return the state that `worker` has to load.

    This is the state of rank 0 if all other ranks have saved None, else the state of the worker's own rank. Return None
    if no state was saved. Raise ConfigError if ranks have saved states of their own and the number of ranks has
    changed.

    `states`: the states of all ranks that saved, in rank order.
    """
    if all(state is None for state in states[1:]):
        return states[0] if states else None
    if len(states) == worker.world_size:
        return states[worker.rank]
    raise other_ranks(worker, len(states))


def _file_of(rank: int) -> str:
    return f"state_{rank:05}.pt"


def _copied(value: Any, path: str, worker: Worker) -> Any:
    """Return a copy of `value`, a part of a state, in host memory.

    `path`: where `value` is in the state, for errors. Raise WorkerMisuse, which names the path, if a value cannot be
    stored.
    """
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if worker._registered is not None:
            tensor = worker._registered.where(tensor)
        return tensor.to("cpu", copy=True)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return {_ARRAY: torch.from_numpy(np.array(value))}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        copied = {}
        for key, each in value.items():
            if not isinstance(key, _PLAIN):
                raise _not_stored(worker, f"the key {key!r} of {path}", key)
            copied[key] = _copied(each, f"{path}[{key!r}]", worker)
        return copied
    if isinstance(value, list | tuple):
        items = [_copied(each, f"{path}[{i}]", worker) for i, each in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise _not_stored(worker, path, value)


def _restored(value: Any) -> Any:
    """Return a state as it was before `_copied`: with NumPy arrays where `_copied` has stored tensors for them.

    Each tensor gets memory of its own, which can be freed in place, as `Offloadable` requires.
    """
    import torch

    if isinstance(value, torch.Tensor):
        # An optimizer keeps the tensors that it loads, and `offload` empties their storages.
        return value.clone()
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].clone().numpy()
        return {key: _restored(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if isinstance(value, tuple):
        return tuple(_restored(each) for each in value)
    return value


def _not_stored(worker: Worker, path: str, value: object) -> WorkerMisuse:
    return WorkerMisuse(
        problem(
            "state-not-stored",
            worker.context.owner,
            f"{type(value).__module__}.{type(value).__qualname__}",
            path=path,
        )
    )
