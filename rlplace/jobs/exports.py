"""Checks and helpers that the exports of both jobs share: the component and the output path."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlplace.checkpoints.checkpoint import Checkpoint
from rlplace.codes import config_error
from rlplace.errors import OutputError, did_you_mean

FILES = (".pt", ".onnx", ".safetensors")  # of simulator policies
_OTHER_FILES = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".h5",
    ".json",
    ".npz",
    ".pb",
    ".pkl",
    ".tflite",
    ".yaml",
    ".zip",
)
_TRAINED = ("actor", "critic")
_ELSEWHERE = "OUT=<a place with free space that you may write to>"


def check_component(checkpoint: Checkpoint, component: str) -> None:
    """Raise ConfigError if a checkpoint has no weights of a component."""
    there = [name for name in _TRAINED if name in checkpoint.ranks]
    if component in there:
        return
    near = did_you_mean(component, there)
    raise config_error(
        "bad-option",
        "--component",
        component,
        error="without-weights",
        there=", ".join(there),
        near=near or _TRAINED[0],
    )


def free_place(out: Path, files: Sequence[str], *, number: int = 2) -> None:
    """Raise ConfigError if `out` exists, has no file name, or has the ending of a file format that is not allowed.

    `files`: the allowed endings; empty if `out` has to be a folder. If `out` exists, the error proposes the name
    `<stem>_<n>` with the first free n from `number` on.
    """
    near = did_you_mean(out.suffix[1:], [end[1:] for end in files])
    if (
        not out.exists()
        and out.suffix not in files
        and (near or out.suffix in (*FILES, *_OTHER_FILES))
    ):
        error = "no-file"
        if files:
            error = "kind-of-file"
        end = ""
        if near:
            end = f".{near}"
        raise config_error(
            "bad-option",
            "OUT",
            str(out),
            error=error,
            files=", ".join(files),
            other=out.with_suffix(end),
        )
    if not out.name:
        raise config_error("bad-option", "OUT", str(out), error="no-name")
    if out.exists():
        others = (
            out.with_name(f"{out.stem}_{n}{out.suffix}")
            for n in itertools.count(number)
        )
        free = next(other for other in others if not other.exists())
        raise config_error("bad-option", "OUT", str(out), error="exists", free=free)


@contextlib.contextmanager
def written(out: Path) -> Iterator[None]:
    """Context manager: make the parent folder of `out`, then run the `with` block, which has to write `out`.

    Raises OutputError with the key `OUT` if the folder cannot be made or `out` cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError.of(out, error, "OUT", "a place") from error
    except OutputError as error:
        raise OutputError(
            dataclasses.replace(error.problem, key="OUT", fix=_ELSEWHERE)
        ) from error
