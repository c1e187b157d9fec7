"""Checks of a model's folder without reading its weights: that its files are whole, and heads that give one number."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from rlplace.errors import Problem

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # one file of weights, or where each weight is
HEAD = "score.weight"  # as transformers' sequence classification has it
# And as trainers of value models call it
HEADS = (
    HEAD,
    "value_head.weight",
    "v_head.summary.weight",
)


def stored_heads(head: str) -> tuple[str, ...]:
    """Return the names that a reward model's head may have in its files: the usual ones, or the configured one."""
    named = f"{head}.weight"
    if named == HEAD:
        return HEADS
    return (named,)


def value_head_problem(folder: Path, key: str = "critic.model.path") -> Problem | None:
    """Check the head of a value model; None where it fits, or where the folder has none: then a new one is made."""
    why = _unfit_head(weight_shapes(folder), HEADS, "value")
    what = "its head does not give the value of a state"
    fix = f"{key}: <a folder with one label (num_labels=1), or of a causal model: its head starts anew>"
    if why is None:
        return None
    return Problem(
        code="value-head", key=key, what=what, got=str(folder), why=why, fix=fix
    )


def reward_head_problem(folder: Path, key: str, head: str = "score") -> Problem | None:
    """Check the reward model in `folder` that `key`, such as reward.math, names; None where it ends in one number.

    None, too, where its files are not whole, which is an error of another kind.
    """
    shapes = weight_shapes(folder)
    names = stored_heads(head)
    if any(folder.glob("*.safetensors")) and unread_weights(folder) is not None:
        return None
    why = _unfit_head(shapes, names, "score")
    named = "model"
    fix = "model: {path: <a folder of sequence classification with one label, num_labels=1>}"
    if shapes.keys().isdisjoint(names):
        why = f"its files have no weight {' or '.join(names)}"
        like = sorted(
            n.removesuffix(".weight")
            for n, shape in shapes.items()
            if len(shape) == 2 and shape[0] == 1
        )
        if like:
            why += f"; {', '.join(like)} would give one number"
            named = "head"
            fix = f"head: {like[0]}"
    what = "this is no reward model"
    if why is None:
        return None
    return Problem(
        code="reward-head",
        key=f"{key}.{named}",
        what=what,
        got=str(folder),
        why=why,
        fix=fix,
    )


def _unfit_head(
    shapes: dict[str, list[int]], names: tuple[str, ...], what: str
) -> str | None:
    """Return why the head under one of `names` does not give one number, a `what`; None where it does or is absent."""
    name = next((n for n in names if n in shapes), None)
    if name is None:
        return None
    bias = name.removesuffix("weight") + "bias"
    rows = shapes[name][0]
    if rows != 1:
        return f"{name} has {rows} rows: it tells {rows} classes apart, and a {what} is one number"
    if bias in shapes:
        return f"{bias} would be left out: the head of a {what} model here is a weight alone"
    return None


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of all weights in the folder, from the headers of its files.

    A file that is not whole gives none: `unread_weights` says so, and reading its weights raises the error.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError):
            shapes |= {name: of["shape"] for name, of in _header(file).items()}
    return shapes


def unread_weights(folder: Path) -> str | None:
    """Return why the weights cannot be read: a file is missing, damaged or cut short, or not what the index says."""
    index = folder / INDEX
    single = folder / SINGLE
    file = index
    try:
        if index.exists():
            named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))[
                "weight_map"
            ]
        elif single.exists():
            file = single
            named = dict.fromkeys(_header(single), SINGLE)
        else:
            return f"it has neither {SINGLE} nor {INDEX}"
        for name in sorted(set(named.values())):
            file = folder / name
            missing = {weight for weight, of in named.items() if of == name} - _header(
                file
            ).keys()
            if missing:
                return f"{file} has no {min(missing)}, which {INDEX} names"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, FileNotFoundError):
            return f"{file} is missing"
        return f"{file} cannot be read: {error}"
    return None


def _header(file: Path) -> dict[str, Any]:
    """Return what a safetensors file says of each weight: 8 bytes of length, then JSON, then the weights.

    Raises OSError; ValueError for a file that is not whole.
    """
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
        header = json.loads(opened.read(length))
    try:
        header.pop("__metadata__", None)
        whole = (
            8
            + length
            + max((of["data_offsets"][1] for of in header.values()), default=0)
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            "its header is damaged, or it is no safetensors file"
        ) from error
    if size != whole:
        raise ValueError(
            f"it has {size:,} bytes of {whole:,}: it is cut short or damaged"
        )
    return header
