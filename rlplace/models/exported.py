"""Policies of simulators as programs for others: TorchScript and ONNX.

Letters: N observations, O observation shape, A action shape.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.codes import config_error
from rlplace.envs.contract import Spaces
from rlplace.envs.registry import needs
from rlplace.errors import ConfigError
from rlplace.models.checkpoint import write_bytes

# Argument of the command that exports
_OUT = "OUT"


class ExportedPolicy(nn.Module):
    """A policy whose `forward` takes observations [N, *O] and returns its best actions [N, *A], as simulators do.

    `spaces`: of the simulator. `remembered`: numbers that the policy keeps from one observation to the next.
    """

    spaces: Spaces
    remembered: int = 0


def write_torchscript(policy: ExportedPolicy, out: Path) -> None:
    """Write a TorchScript file for `torch.jit.load`. Its module returns the most probable actions for N observations.

    `out`: the file. Raises OutputError; ConfigError if the network cannot be traced.
    """
    content = io.BytesIO()
    with _tracing(out):
        torch.jit.save(_traced(policy, out), content)
    write_bytes(out, content.getvalue())


def write_onnx(policy: ExportedPolicy, out: Path) -> None:
    """Write an ONNX file with input `observations` and output `actions`: the most probable actions for N observations.

    `out`: the file. Raises OSError; ConfigError if the network cannot be traced or onnx is missing.
    """
    with needs("onnx", got=str(out), extra="onnx", key=_OUT, of="the format"):
        import onnx  # noqa: F401  # torch needs it for writing
    names = ["observations", "actions"]
    # Into a file beside, which is renamed once it is complete
    part = out.with_name(out.name + ".part")
    options: dict[str, Any] = {
        "input_names": names[:1],
        "output_names": names[1:],
        "dynamo": False,
    }
    with _tracing(out):
        # The check of `_traced`: the network behaves alike for other batches
        _traced(policy, out)
        torch.onnx.export(
            policy,
            (_example(policy),),
            part,
            dynamic_axes={n: {0: "N"} for n in names},
            **options,
        )
    part.replace(out)


@contextmanager
def _tracing(out: Path) -> Iterator[None]:
    """Return a context manager for tracing: it silences warnings, and raises ConfigError if tracing fails.

    `out`: the file to write, for errors.
    """
    with warnings.catch_warnings():
        # Tracing warns of each Python branch, and ONNX of older formats
        warnings.simplefilter("ignore")
        try:
            yield
        except (RuntimeError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _not_traced(out, "raised", reason) from error


def _traced(policy: ExportedPolicy, out: Path) -> torch.jit.ScriptModule:
    """Return the policy as a traced module.

    `out`: the file to write, for errors. Raises ConfigError if the traced module gives other actions than the policy
    for a second batch, or if the policy has a memory or reads texts.
    """
    if policy.remembered:
        raise _not_traced(out, "memory")
    if policy.spaces.texts:
        raise _not_traced(out, "texts")
    traced: torch.jit.ScriptModule = torch.jit.trace(
        policy,
        _example(policy),
        check_trace=False,
    )
    # A trace has the branches of one batch: compare with random observations
    other = torch.randint(0, 255, (3, *policy.spaces.observation_shape)).to(
        _example(policy).dtype
    )
    if not torch.allclose(traced(other), policy(other), atol=1e-5):
        raise _not_traced(out, "branches")
    return traced


def _not_traced(out: Path, error: str, reason: str = "") -> ConfigError:
    """Return the error for a policy that cannot be written as TorchScript or ONNX.

    `error`: the name of the cause, which selects the text of the error. `reason`: the text of an exception.
    """
    folder = out.with_suffix("")
    return config_error(
        "not-traceable", _OUT, str(out), error=error, folder=folder, reason=reason
    )


def _example(policy: ExportedPolicy) -> Tensor:
    """Return two observations of zeros, the input for a trace."""
    spaces = policy.spaces
    return torch.zeros(
        (2, *spaces.observation_shape),
        dtype=getattr(torch, spaces.observation_dtype),
    )
