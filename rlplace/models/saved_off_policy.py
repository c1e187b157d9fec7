"""The policy of an off-policy job, from a checkpoint or from the file that a run writes at its end."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlplace.models.checkpoint import write_file
from rlplace.trained import Trained


def load_weights(network: nn.Module, trained: Trained) -> None:
    """Load the weights of a trained policy into `network`.

    Raises OSError, ValueError, KeyError or RuntimeError if they are damaged, or of another network.
    """
    if trained.checkpoint is None:
        network.load_state_dict(load_file(trained.weights))
    else:
        network.load_state_dict(_saved(trained.weights))


def write_weights(trained: Trained, out: Path) -> None:
    """Write the weights of a checkpoint's policy to the file `out`, as a run does at its end. Raises OutputError."""
    write_file(out, iter(_saved(trained.weights).items()))


def _saved(folder: Path) -> dict[str, Tensor]:
    """Return the weights in the state of actor rank 0, as own_state writes it into `folder`."""
    file = folder / "state_00000.pt"
    state = torch.load(file, map_location="cpu", weights_only=True)
    weights: dict[str, Tensor] = state["modules"]["policy"]
    return weights
