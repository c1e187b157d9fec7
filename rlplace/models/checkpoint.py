"""Saved models: folders of transformers' format, read by parts of a weight and written whole, and single files.

::

    config.json   tokenizer files   model.safetensors
                                    or model-00001-of-00002.safetensors ... and model.safetensors.index.json

Files have a weight for each expert of a layer, models one for all::

    mlp.experts.gate_up_proj [experts, 2 width, E]      mlp.experts.0.gate_proj.weight, ...up_proj.weight [width, E]
    mlp.experts.down_proj [experts, E, width]           mlp.experts.0.down_proj.weight [E, width]

In Mixtral's, `mlp` is called block_sparse_moe, and its projections w1, w3 and w2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from rlplace.checkpoints import MODEL_FILE_BYTES
from rlplace.errors import ConfigError, OutputError
from rlplace.models.heads import INDEX, SINGLE, unread_weights

if TYPE_CHECKING:
    from rlplace.models.sharding import Part

_EXPERTS = re.compile(r"(.+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_PROJECTIONS = {  # of an expert, by the room of all and the weight of a model
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "block_sparse_moe": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".gguf", ".pt", ".pth", ".part")


class Checkpoint:
    """The weights in a folder. Files are mapped, not read. Raises ConfigError where they are not the model's."""

    def __init__(self, folder: Path, key: str = "actor.model.path") -> None:
        self._folder = folder
        self._key = key
        if (why := unread_weights(folder)) is not None:
            raise model_mismatch(folder, why, key)
        index = folder / INDEX
        if index.exists():
            self._file_of: Mapping[str, str] = json.loads(
                index.read_text(encoding="utf-8")
            )["weight_map"]
        else:
            # For torch all of it is mapped at once
            with safe_open(folder / SINGLE, framework="np") as single:
                self._file_of = dict.fromkeys(single.keys(), SINGLE)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def part(self, names: Sequence[str], shape: tuple[int, ...], part: Part) -> Tensor:
        """Read part of the weight that is stored under any of `names` and is of `shape` as a whole."""
        name = next(
            (n for name in names for n in _names_of(name) if n in self._file_of), None
        )
        if name is not None:
            return self._read(name, shape, part)
        projections = next(
            (found for name in names if (found := of_experts(name, self.names))), ()
        )
        if not projections:
            raise model_mismatch(
                self._folder,
                f"its files have no weight {' or '.join(names)}",
                self._key,
            )
        experts, rows, columns = part
        each = (shape[1] // len(projections), shape[2])
        whole = torch.empty(tuple(dim.stop - dim.start for dim in part))
        for own, expert in zip(whole, range(experts.start, experts.stop), strict=True):
            read = [
                self._read(of.format(expert), each, (slice(0, each[0]), columns))
                for of in projections
            ]
            own.copy_(torch.cat(read)[rows])
        return whole

    def _read(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        stored = self._open[file].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            why = f"{name} is {list(stored.get_shape())} there, {list(shape)} in the model"
            raise model_mismatch(self._folder, why, self._key)
        sizes = [dim.stop - dim.start for dim in part]
        found: Tensor = stored[part] if all(sizes) else torch.empty(sizes)
        return found


def _names_of(name: str) -> tuple[str, ...]:
    older = name.replace("model.language_model.", "model.").replace(
        "model.visual.", "visual."
    )
    return name, name.replace(".mlp.", ".block_sparse_moe."), older


def of_experts(name: str, stored: Container[str]) -> tuple[str, ...]:
    """Return the names of its projections in files, {} for an expert; none where they have no weight for each."""
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return ()
    above, weight = match.groups()
    for room, projections in _PROJECTIONS.items():
        names = tuple(
            f"{above}{room}.experts.{{}}.{projection}.weight"
            for projection in projections[weight]
        )
        if names[0].format(0) in stored:
            return names
    return ()


def as_stored(
    weights: Iterable[tuple[str, Tensor]], stored: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of a model as files have them that have the names `stored`: those of experts by themselves."""
    for name, tensor in weights:
        projections = of_experts(name, stored)
        for expert in range(len(tensor) if projections else 0):
            names = (each.format(expert) for each in projections)
            yield from zip(names, tensor[expert].chunk(len(projections)), strict=True)
        if not projections:
            yield next((n for n in _names_of(name) if n in stored), name), tensor
        del tensor  # before the next one is gathered


def write_model(
    folder: Path,
    like: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, object] | None = None,
    file_bytes: int = MODEL_FILE_BYTES,
) -> None:
    """Replace `folder` by a complete model. Raises OutputError; then `folder` is what it was before.

    `like` is the folder the model came from: its config, tokenizer and whatever else is no weights are copied; `config`
    are keys of config.json that are others now. `weights` are taken one after the other, held until a file is full.
    """
    part = folder.with_name(folder.name + ".part")
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        for file in like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, part / file.name)
        size = 0
        stored = []
        dtype = torch.float32
        for number, held in enumerate(
            _by_file(as_stored(weights, Checkpoint(like).names), file_bytes), 1
        ):
            _save(held, part / f"{number}.part")
            stored.append(list(held))
            for tensor in held.values():
                size = size + tensor.nbytes
                dtype = tensor.dtype
        _complete(
            part,
            stored,
            size,
            {"dtype": str(dtype).removeprefix("torch."), **(config or {})},
        )
        old = folder.with_name(folder.name + ".old")
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OutputError.of(folder, error) from error


def _by_file(
    weights: Iterable[tuple[str, Tensor]], file_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield copies on the host, as many at once as a file may have."""
    held: dict[str, Tensor] = {}
    for name, tensor in _on_host(weights):
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > file_bytes:
            yield held
            held = {}
        held[name] = tensor
    yield held


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield copies, and let go of each weight before the next one is gathered."""
    for name, tensor in weights:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        del tensor
        yield name, copy


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # Which has the error of the operating system in words only
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def _complete(
    part: Path,
    stored: Sequence[Sequence[str]],
    size: int,
    changed: Mapping[str, object],
) -> None:
    """Name the files of weights as transformers does, and write the index and what has `changed` in config.json."""
    count = len(stored)
    named = (
        [SINGLE]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    for number, name in enumerate(named, 1):
        (part / f"{number}.part").rename(part / name)
    if count > 1:
        weight_map = {
            weight: name
            for name, weights in zip(named, stored, strict=True)
            for weight in weights
        }
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (part / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    config = json.loads((part / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the key's older name
    (part / "config.json").write_text(
        json.dumps(config | changed, indent=2), encoding="utf-8"
    )


def write_file(path: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace `path` by one safetensors file. Raises OutputError; then `path` is what it was before."""
    write_bytes(path, save(dict(_on_host(weights))))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file of `content`. Raises OutputError; then `path` is what it was before."""
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


def model_mismatch(
    folder: Path, why: str, key: str = "actor.model.path"
) -> ConfigError:
    what = "the model cannot be read from its folder"
    fix = "save it anew: AutoModelForCausalLM.from_pretrained(...).save_pretrained(<folder>)"
    return ConfigError.of("model-weights", key, what, str(folder), why, fix)
