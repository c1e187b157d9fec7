"""Checks of a model's folder from file headers: whether its files are whole, and whether a head has one output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlplace.codes import problem
from rlplace.errors import Problem
from rlplace.json_text import parsed

# Names of a folder's only weight file, and of the index of several files
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Name of the head in sequence classification of transformers
HEAD = "score.weight"
# That name, and those that trainers of value models use
HEADS = (
    HEAD,
    "value_head.weight",
    "v_head.summary.weight",
)
# Samples of a weight that are compared with another weight, and bytes of each
_SAMPLES = 64
_SAMPLE = 1 << 16


def stored_heads(head: str) -> tuple[str, ...]:
    """Return the names under which files may store the head of a reward model.

    `head`: the name of the head in the config. For the default name `score`, return all usual names; for any other
    name, return this name alone.
    """
    named = f"{head}.weight"
    if named == HEAD:
        return HEADS
    return (named,)


def value_head_problem(folder: Path, key: str = "critic.model.path") -> Problem | None:
    """Return the problem of the value model's head in `folder`: it has several outputs or a bias.

    Returns None for a head without these problems. Returns None for a folder without a head, too, because a new head is
    made for it. `key`: the config key that names the folder.
    """
    return _unfit_head(weight_shapes(folder), HEADS, "value-head", key, folder)


def reward_head_problem(folder: Path, key: str, head: str = "score") -> Problem | None:
    """Return the problem of the reward model in `folder`; None if its head has one output and no bias.

    `key`: the config key that names the model, such as reward.math. `head`: the name of the head in the config. Returns
    None for damaged files, too: they raise an error when the weights are read.
    """
    shapes = weight_shapes(folder)
    names = stored_heads(head)
    if any(folder.glob("*.safetensors")) and unread_weights(folder) is not None:
        return None
    # A head that is stored but has several outputs, or a bias
    if not shapes.keys().isdisjoint(names):
        return _unfit_head(shapes, names, "reward-head", f"{key}.model", folder)
    # No head under this name: propose other weights with one row
    like = []
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[0] == 1:
            like.append(name.removesuffix(".weight"))
    like.sort()
    wanted = " or ".join(names)
    if like:
        return problem(
            "reward-head",
            f"{key}.head",
            str(folder),
            error="another-name",
            names=wanted,
            like=", ".join(like),
            first=like[0],
        )
    return problem(
        "reward-head", f"{key}.model", str(folder), error="none", names=wanted
    )


def _unfit_head(
    shapes: dict[str, list[int]],
    names: tuple[str, ...],
    code: str,
    key: str,
    folder: Path,
) -> Problem | None:
    """Return the problem of a head that has several outputs or a bias; None for any other head, or without a head.

    `shapes`: name -> shape of all weights. `names`: names under which the head may be stored. `code`: code of the
    problem, for a value model or a reward model. `key`: the config key that names the folder.
    """
    name = next((n for n in names if n in shapes), None)
    if name is None:
        return None
    bias = name.removesuffix("weight") + "bias"
    rows = shapes[name][0]
    if rows != 1:
        return problem(
            code, key, str(folder), error="classes", where=key, name=name, rows=rows
        )
    if bias in shapes:
        return problem(code, key, str(folder), error="bias", where=key, bias=bias)
    return None


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return name -> shape of all weights in the folder, from the headers of its files.

    The weights of a damaged file are left out: `unread_weights` reports the file, and reading its weights raises an
    error.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= file_shapes(file)
    return shapes


def file_shapes(file: Path) -> dict[str, list[int]]:
    """Return name -> shape of all tensors in a safetensors file, from its header. A damaged file has no tensors."""
    shapes: dict[str, list[int]] = {}
    with contextlib.suppress(OSError, ValueError):
        shapes = {name: of["shape"] for name, of in _header(file).items()}
    return shapes


def weights_differ(folder: Path, one: str, other: str) -> bool:
    """Return whether two weights of the same size in a folder differ, by samples of their bytes.

    Return False if a weight is missing or cannot be read, or if they have other sizes or dtypes.
    """
    found = []
    for name in (one, other):
        for file in sorted(folder.glob("*.safetensors")):
            with contextlib.suppress(OSError, ValueError):
                header = _header(file)
                if name in header:
                    found.append((file, header[name]))
                    break
    if len(found) < 2:
        return False
    (file, of_one), (other_file, of_other) = found
    kinds = [(of["dtype"], of["shape"]) for of in (of_one, of_other)]
    if kinds[0] != kinds[1]:
        return False
    return any(
        left != right
        for left, right in zip(
            _samples(file, of_one), _samples(other_file, of_other), strict=True
        )
    )


def _samples(file: Path, of: dict[str, Any]) -> Iterator[bytes]:
    """Yield bytes of a weight at even distances. `of`: its entry in the header of the file. Raises OSError."""
    first, behind = of["data_offsets"]
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little") + first
        size = behind - first
        step = max(_SAMPLE, size // _SAMPLES)
        for at in range(0, size, step):
            opened.seek(begin + at)
            yield opened.read(min(_SAMPLE, size - at))


def unread_weights(folder: Path) -> str | None:
    """Return why the weights of a folder cannot be read; None if they can be read.

    A file may be missing or damaged, or lack a weight that the index names.
    """
    index = folder / INDEX
    single = folder / SINGLE
    file = index
    # Which file should hold which weight
    try:
        if index.exists():
            content = parsed(index.read_text(encoding="utf-8"))
            named: dict[str, str] = content["weight_map"]
        elif single.exists():
            file = single
            named = dict.fromkeys(_header(single), SINGLE)
        else:
            return f"it has neither {SINGLE} nor {INDEX}"
        # Each file must be there, whole, and have the weights that the index names
        for name in sorted(set(named.values())):
            file = folder / name
            expected = {weight for weight, of in named.items() if of == name}
            missing = expected - _header(file).keys()
            if missing:
                return f"{file} has no {min(missing)}, which {INDEX} names"
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        if isinstance(error, FileNotFoundError):
            return f"{file} is missing"
        return f"{file} cannot be read: {error}"
    return None


def _header(file: Path) -> dict[str, Any]:
    """Return name -> description of the weight (dtype, shape and position), from the header of a safetensors file.

    The file is 8 bytes with the length of the header, the header as JSON, then the weights. Raises OSError; ValueError
    for a file that is damaged or cut short.
    """
    # The header, whose length must fit into the file
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise ValueError(
                "it is a pointer of git-lfs: run `git lfs pull` in its folder"
            )
        if not 0 < length <= size - 8:
            raise ValueError(
                f"it is cut short, at {size:,} bytes, or no safetensors file"
            )
        header = parsed(opened.read(length))
    # The last weight must end where the file ends
    try:
        header.pop("__metadata__", None)
        ends = [of["data_offsets"][1] for of in header.values()]
        whole = 8 + length + max(ends, default=0)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            "its header is damaged, or it is no safetensors file"
        ) from error
    if size != whole:
        raise ValueError(
            f"it has {size:,} bytes of {whole:,}: it is cut short or damaged"
        )
    return header
