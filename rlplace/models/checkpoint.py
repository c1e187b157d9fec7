"""Saved models: folders in transformers' format, read in parts, written whole; single files.

::

    config.json   tokenizer files   model.safetensors
                                    or model-00001-of-00002.safetensors ... and model.safetensors.index.json

Files hold one weight for each expert of a layer; a module holds one for all experts::

    mlp.experts.gate_up_proj [experts, 2 width, E]      mlp.experts.0.gate_proj.weight, ...up_proj.weight [width, E]
    mlp.experts.down_proj [experts, E, width]           mlp.experts.0.down_proj.weight [E, width]

In files of Mixtral, `mlp` is called block_sparse_moe, and its projections w1, w3 and w2.
"""

from __future__ import annotations

import itertools
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
from rlplace.codes import config_error
from rlplace.errors import ConfigError, OutputError
from rlplace.json_text import read_object
from rlplace.models.heads import INDEX, SINGLE, unread_weights

if TYPE_CHECKING:
    from rlplace.models.sharding import Part

# A module's weight of all experts: what stands above it, and its name
_EXPERTS = re.compile(r"(.+\.)mlp\.experts\.(gate_up_proj|down_proj)")
# Projections of one expert in files: by the layer's name there, then by the module's weight
_PROJECTIONS = {
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "block_sparse_moe": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
_WEIGHT_FILES = (".safetensors", ".index.json", ".bin", ".gguf", ".pt", ".pth", ".part")


class Checkpoint:
    """The weight files of a model's folder. Files are memory-mapped; a weight is read only when the caller asks for it.

    `key`: the config key that names the folder, for errors. Raises ConfigError if weight files are missing or damaged.
    """

    def __init__(self, folder: Path, key: str = "actor.model.path") -> None:
        self._folder = folder
        self._key = key
        reason = unread_weights(folder)
        if reason is not None:
            raise config_error(
                "model-weights", key, str(folder), error="damaged", reason=reason
            )
        # Which file holds which weight: from the index, or the only file
        index = folder / INDEX
        if index.exists():
            self._file_of: Mapping[str, str] = read_object(index, key)["weight_map"]
        else:
            # Framework "np": with "pt" the whole file would be mapped at once
            with safe_open(folder / SINGLE, framework="np") as single:
                self._file_of = dict.fromkeys(single.keys(), SINGLE)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights in the files."""
        return frozenset(self._file_of)

    def part(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        part: Part,
    ) -> Tensor:
        """Return the slice `part` of the weight that is stored under one of `names`.

        `shape`: shape of the whole weight. If the files store experts one by one, their weights are joined. Raises
        ConfigError if no file has the weight or if its shape differs.
        """
        # The weight itself, under its present or an older name
        for stored_name in itertools.chain.from_iterable(map(_names_of, names)):
            if stored_name in self._file_of:
                return self._read(stored_name, shape, part)
        # Or one weight for each projection of each expert
        projections: tuple[str, ...] = ()
        for name in names:
            projections = projections or of_experts(name, self.names)
        if not projections:
            raise config_error(
                "model-weights",
                self._key,
                str(self._folder),
                error="missing",
                names=" or ".join(names),
            )
        # Fill one requested expert after the other; its projections lie row below row
        experts, rows, columns = part
        each = (shape[1] // len(projections), shape[2])
        whole = torch.empty(tuple(dim.stop - dim.start for dim in part))
        all_rows = slice(0, each[0])
        for own, expert in zip(whole, range(experts.start, experts.stop), strict=True):
            read = []
            for projection in projections:
                stored_name = projection.format(expert)
                read.append(self._read(stored_name, each, (all_rows, columns)))
            own.copy_(torch.cat(read)[rows])
        return whole

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Part,
    ) -> Tensor:
        """Return the slice `part` of the weight stored as `name`.

        `shape`: the expected shape of the whole weight. Raises ConfigError if the stored weight has another shape.
        """
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        stored = self._open[file].get_slice(name)
        stored_shape = list(stored.get_shape())
        if stored_shape != list(shape):
            raise config_error(
                "model-weights",
                self._key,
                str(self._folder),
                error="shape",
                name=name,
                stored=stored_shape,
                shape=list(shape),
            )
        # A rank may have no part of a weight
        sizes = [dim.stop - dim.start for dim in part]
        if not all(sizes):
            return torch.empty(sizes)
        found: Tensor = stored[part]
        return found


def _names_of(name: str) -> tuple[str, ...]:
    """Return the names under which files may store a weight: `name` itself, its name in Mixtral, and an older name."""
    mixtral = name.replace(".mlp.", ".block_sparse_moe.")
    older = name.replace("model.language_model.", "model.")
    older = older.replace("model.visual.", "visual.")
    return name, mixtral, older


def of_experts(name: str, stored: Container[str]) -> tuple[str, ...]:
    """Return the names under which files store the projections that make up the expert weight `name`.

    In these names, `{}` stands for the number of the expert. `stored`: all names in the files. The result is empty if
    `name` is not the weight of experts, or if the files store all experts in one weight.
    """
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
    weights: Iterable[tuple[str, Tensor]],
    stored: Container[str],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) with the names and in the form in which the files of a checkpoint store the weights.

    `weights`: (name, whole weight) as the model has them. `stored`: all names in the files. If the files store experts
    one by one, a weight that the model has for all experts is yielded expert by expert.
    """
    for name, tensor in weights:
        projections = of_experts(name, stored)
        if projections:
            for expert in range(len(tensor)):
                names = (each.format(expert) for each in projections)
                parts = tensor[expert].chunk(len(projections))
                yield from zip(names, parts, strict=True)
                # A part would keep the whole weight alive
                del parts
        else:
            known = [n for n in _names_of(name) if n in stored]
            yield (known[0] if known else name), tensor
        del tensor  # before the next one is gathered


def write_model(
    folder: Path,
    like: Path,
    weights: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, object] | None = None,
    chat: bool = False,
    file_bytes: int = MODEL_FILE_BYTES,
) -> None:
    """Replace `folder` by a complete model folder. Raises OutputError; `folder` is then unchanged.

    `like`: the folder the model came from. Its files are copied, except files with weights. `weights`: (name in a
    checkpoint, whole weight). They are read one by one, and kept in memory until a file of `file_bytes` bytes is full.
    `config`: entries of config.json that get new values; None: none. `chat`: whether the model was trained on chats;
    then the token with which the chat template ends an answer ends answers in generation_config.json too.
    """
    part = folder.with_name(folder.name + ".part")
    try:
        # Everything is written into a folder beside, which replaces `folder` at the end
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        # All files of the model's folder but its weights
        for file in like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, part / file.name)
        # Weight files get provisional names until their number is known
        size = 0
        stored = []
        dtype = torch.float32
        files = _by_file(as_stored(weights, Checkpoint(like).names), file_bytes)
        for number, held in enumerate(files, 1):
            _save(held, part / f"{number}.part")
            stored.append(list(held))
            for tensor in held.values():
                size = size + tensor.nbytes
                dtype = tensor.dtype
        # Final names, index and config.json
        changed = {"dtype": str(dtype).removeprefix("torch."), **(config or {})}
        _complete(part, stored, size, changed)
        if chat:
            _end_answers(part)
        # Swap the folders: the old one is kept until the new one has its name
        old = folder.with_name(folder.name + ".old")
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise OutputError.of(folder, error) from error


def _by_file(
    weights: Iterable[tuple[str, Tensor]],
    file_bytes: int,
) -> Iterator[dict[str, Tensor]]:
    """Yield, for each file to write, name -> copy of the weight on the host.

    A file has at most `file_bytes` bytes, or a single weight that is larger.
    """
    held: dict[str, Tensor] = {}
    for name, tensor in _on_host(weights):
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > file_bytes:
            yield held
            held = {}
        held[name] = tensor
    yield held


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, copy of the weight on the host).

    Each weight is released before the next weight is taken from `weights`, which may gather it.
    """
    for name, tensor in weights:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        del tensor
        yield name, copy


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # The library gives the operating system's error in its text only
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(file)) from error


def _end_answers(folder: Path) -> None:
    """Let the answers of a model end where its chat template ends them: a base model knows its end of text only.

    Other programs stop at the ids of generation_config.json. `folder`: the model's folder, whose file is changed.
    """
    from rlplace.models.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder)
    # A folder without a tokenizer, as of a model that is used with another one's
    except ConfigError:
        return
    known = list(tokenizer.stop_token_ids)
    ids, _ = tokenizer.stops((), chat=True)
    if len(ids) == len(known):
        return
    file = folder / "generation_config.json"
    content: dict[str, object] = {}
    if file.is_file():
        content = read_object(file, "actor.model.path")
    content["eos_token_id"] = list(ids)
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _complete(
    part: Path,
    stored: Sequence[Sequence[str]],
    size: int,
    changed: Mapping[str, object],
) -> None:
    """Give the weight files in the folder `part` their final names; write the index and config.json.

    `stored`: names of the weights in each file. `size`: bytes of all weights. `changed`: entries of config.json that
    get new values.
    """
    count = len(stored)
    named = [SINGLE]
    if count > 1:
        named = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for number, name in enumerate(named, 1):
        (part / f"{number}.part").rename(part / name)
    # With several files, an index says which has which weight
    if count > 1:
        weight_map: dict[str, str] = {}
        for name, weights in zip(named, stored, strict=True):
            weight_map |= dict.fromkeys(weights, name)
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (part / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    # `torch_dtype` is an older name of the key `dtype`
    config = read_object(part / "config.json", "actor.model.path")
    config.pop("torch_dtype", None)
    content = json.dumps({**config, **changed}, indent=2)
    (part / "config.json").write_text(content, encoding="utf-8")


def write_file(path: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the file `path` by a safetensors file. Raises OutputError; the file is then unchanged.

    `weights`: (name, whole weight).
    """
    write_bytes(path, save(dict(_on_host(weights))))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of the file `path` by `content`. Raises OutputError; the file is then unchanged."""
    part = path.with_name(path.name + ".part")
    try:
        # Onto the disk first, then the rename, which replaces the file at once
        with open(part, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError.of(path, error) from error
