"""Saved models: folders of transformers' format, read by rows of a weight and written whole, and single files.

::

    config.json   tokenizer files   model.safetensors
                                    or model-00001-of-00002.safetensors ... and model.safetensors.index.json
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from rlplace.errors import ConfigError, OutputError, Problem

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".gguf", ".pt", ".pth", ".part")
_FILE_BYTES = 4 << 30  # of weights in one file


class Checkpoint:
    """The weights in a folder. Files are mapped, not read. Raises ConfigError where they are not the model's."""

    def __init__(self, folder: Path, key: str = "actor.model.path") -> None:
        self._folder, self._key = folder, key
        index = folder / _INDEX
        if index.exists():
            self._file_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif (folder / _SINGLE).exists():
            with safe_open(folder / _SINGLE, framework="pt") as single:
                self._file_of = dict.fromkeys(single.keys(), _SINGLE)
        else:
            raise model_mismatch(folder, f"it has neither {_SINGLE} nor {_INDEX}", key)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def rows(self, names: Sequence[str], shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Read rows start..stop-1 of the weight that is stored under any of `names` and is of `shape` as a whole."""
        name = next((n for n in names if n in self._file_of), None)
        if name is None:
            raise model_mismatch(self._folder, f"its files have no weight {' or '.join(names)}", self._key)
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        stored = self._open[file].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            why = f"{name} is {list(stored.get_shape())} there, {list(shape)} in the model"
            raise model_mismatch(self._folder, why, self._key)
        if start == stop:
            return torch.empty((0, *shape[1:]))
        rows: Tensor = stored[start:stop]
        return rows


class CheckpointWriter:
    """Replace `folder` by a complete model once `finish` is called; until then it is what it was before.

    `like` is the folder the model came from: its config, tokenizer and whatever else is no weights are copied; `config`
    are keys of config.json that are others now.
    """

    def __init__(
        self, folder: Path, like: Path, file_bytes: int = _FILE_BYTES, config: Mapping[str, object] | None = None
    ) -> None:
        self._folder, self._like, self._file_bytes, self._config = folder, like, file_bytes, config or {}
        self._part = folder.with_name(folder.name + ".part")
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []  # names of the weights in each
        self._bytes = 0
        self._dtype = "float32"
        self._failed: OSError | None = None
        self._try(self._begin)

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a copy until a file is full. `finish` raises a failure to write: the other ranks gather meanwhile."""
        held = sum(t.nbytes for t in self._held.values())
        if self._held and held + tensor.nbytes > self._file_bytes:
            self._try(self._write_file)
        if self._failed is None:
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._bytes += tensor.nbytes
            self._dtype = str(tensor.dtype).removeprefix("torch.")

    def finish(self) -> None:
        """Move the folder into place. Raises OutputError if anything failed; then `folder` is what it was before."""
        self._try(self._write_file)
        self._try(self._complete)
        if self._failed is not None:
            shutil.rmtree(self._part, ignore_errors=True)
            raise OutputError.of(self._folder, self._failed) from self._failed

    def _try(self, write: Callable[[], None]) -> None:
        if self._failed is None:
            try:
                write()
            except OSError as error:
                self._failed = error
                self._held.clear()

    def _begin(self) -> None:
        if self._part.exists():
            shutil.rmtree(self._part)
        self._part.mkdir(parents=True)
        for file in self._like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, self._part / file.name)

    def _write_file(self) -> None:
        self._files.append(list(self._held))
        file = self._part / f"{len(self._files)}.part"
        try:
            save_file(self._held, file, metadata={"format": "pt"})
        except SafetensorError as error:  # which has the error of the operating system in words only
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
        self._held.clear()

    def _complete(self) -> None:
        count = len(self._files)
        named = [_SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        for number, name in enumerate(named, 1):
            (self._part / f"{number}.part").rename(self._part / name)
        if count > 1:
            weight_map = {weight: name for name, weights in zip(named, self._files, strict=True) for weight in weights}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._part / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        config = json.loads((self._part / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # the key's older name
        config |= {"dtype": self._dtype, **self._config}
        (self._part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        old = self._folder.with_name(self._folder.name + ".old")
        if self._folder.exists():
            self._folder.rename(old)
        self._part.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace `path` by one safetensors file. Raises OutputError; then `path` is what it was before."""
    content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError.of(path, error) from error


def model_mismatch(folder: Path, why: str, key: str = "actor.model.path") -> ConfigError:
    what = "the model cannot be read from its folder"
    fix = "save it anew: AutoModelForCausalLM.from_pretrained(...).save_pretrained(<folder>)"
    return ConfigError([Problem(code="model-weights", key=key, what=what, got=str(folder), why=why, fix=fix)])
