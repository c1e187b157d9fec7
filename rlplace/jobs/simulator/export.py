"""Write a simulator policy in a format that other programs can read."""

from __future__ import annotations

import shutil
from pathlib import Path

from rlplace.checkpoints.checkpoint import CONFIG
from rlplace.checkpoints.find import verify
from rlplace.codes import config_error
from rlplace.contract.requests import ExportRequest
from rlplace.jobs.exports import (
    FILES,
    check_component,
    free_place,
    written,
)
from rlplace.trained import POLICY, Trained


def export(trained: Trained, request: ExportRequest) -> None:
    """Write a trained policy to `request.out`, in the format of the name's ending.

    `.onnx`, `.pt` (TorchScript) and `.safetensors` give a file; a name without these endings gives a folder.

    Raises ConfigError, OutputError.
    """
    out = request.out
    found = trained.checkpoint
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
        _write(trained, out, request.key)


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


def _write(trained: Trained, out: Path, key: str) -> None:
    from rlplace.models.policy import policy_of, write_onnx, write_torchscript
    from rlplace.models.saved_state import write_policy

    if out.suffix == ".onnx":
        write_onnx(policy_of(trained, seed=0, key=key), out)
        return
    if out.suffix == ".pt":
        write_torchscript(policy_of(trained, seed=0, key=key), out)
        return
    weights = out
    if out.suffix != ".safetensors":
        weights = out / POLICY
        out.mkdir()
        shutil.copyfile(trained.folder / CONFIG, out / CONFIG)
    if trained.checkpoint is None:
        shutil.copyfile(trained.weights, weights)
    else:
        write_policy(trained.weights, weights)
