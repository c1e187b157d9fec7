"""Load the policy of an off-policy job from a checkpoint, or from the file that a run writes at its end."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import nn

from rlplace.trained import Trained


def load_weights(network: nn.Module, trained: Trained) -> None:
    """Load the weights of a trained policy into `network`.

    Raises OSError, ValueError, KeyError or RuntimeError if they are damaged, or of another network.
    """
    if trained.checkpoint is None:
        network.load_state_dict(load_file(trained.weights))
        return
    # The state of actor rank 0, as own_state writes it
    file = trained.weights / "state_00000.pt"
    state = torch.load(file, map_location="cpu", weights_only=True)
    network.load_state_dict(state["modules"]["policy"])
