"""Checks and helpers that the exports of both jobs share: the component and the output path."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.checkpoints.checkpoint import CONFIG, Checkpoint
from rlplace.checkpoints.find import verify
from rlplace.codes import config_error
from rlplace.contract.requests import ExportRequest
from rlplace.errors import ConfigError, OutputError, did_you_mean
from rlplace.trained import POLICY, Trained

if TYPE_CHECKING:
    from rlplace.models.exported import ExportedPolicy

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


def no_adapter(error: str) -> ConfigError:
    """Return the error of an export of LoRA factors that are not there.

    `error`: name of the error, which says why there are none.
    """
    return config_error("bad-option", "--adapter", error=error)


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


def export_policy(
    trained: Trained,
    request: ExportRequest,
    program: Callable[[], ExportedPolicy],
    write_weights: Callable[[Path], None],
) -> None:
    """Write a trained policy of simulators to `request.out`, in the format of the name's ending.

    `.onnx`, `.pt` (TorchScript) and `.safetensors` give a file; a name without these endings gives a folder.

    `program`: builds the policy, whose module returns actions. `write_weights`: writes its weights into a file. Raises
    ConfigError, OutputError.
    """
    out = request.out
    found = trained.checkpoint
    if request.adapter:
        raise no_adapter("adapter-of-simulators")
    if found is None:
        free_place(out, FILES)
        _check_exported(trained, request)
    else:
        check_component(found, request.component)
        if request.average:
            raise config_error("bad-option", "--ema", error="average-of-simulators")
        free_place(out, FILES, number=found.iteration)
        verify(found, request.key)
    with written(out):
        _write(trained, out, program, write_weights)


def _check_exported(trained: Trained, request: ExportRequest) -> None:
    """Raise ConfigError if the request needs weights that an exported policy does not have.

    An exported policy has the actor's weights only, and no weight averages.
    """
    if request.component == "actor" and not request.average:
        return
    option = f"--component {request.component}"
    if request.average:
        option = "--ema"
    raise config_error(
        "bad-option", option, str(trained.folder), error="exported", option=option
    )


def _write(
    trained: Trained,
    out: Path,
    program: Callable[[], ExportedPolicy],
    write_weights: Callable[[Path], None],
) -> None:
    from rlplace.models.exported import write_onnx, write_torchscript

    if out.suffix == ".onnx":
        write_onnx(program(), out)
        return
    if out.suffix == ".pt":
        write_torchscript(program(), out)
        return
    weights = out
    if out.suffix != ".safetensors":
        weights = out / POLICY
        out.mkdir()
        shutil.copyfile(trained.folder / CONFIG, out / CONFIG)
    if trained.checkpoint is None:
        shutil.copyfile(trained.weights, weights)
    else:
        write_weights(weights)
