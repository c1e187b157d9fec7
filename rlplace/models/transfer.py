"""Begin a simulator policy with the weights of another one, where both have the same layers.

A layer is all tensors with the same name up to the last dot, such as `policy.0.weight` and `policy.0.bias`. It is taken
over as a whole, or begins anew: another action space changes the last layer of the policy, another observation space
changes the first layers and the normalisation of observations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor, nn

from rlplace.models.policy import shaped, weights_of
from rlplace.trained import Trained


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The weights that a new policy takes over from a trained policy.

    `taken`: names of the layers that take over weights. `anew`: names of the layers that keep their initial weights.
    `weights`: name -> weight, for all tensors of the layers in `taken`.
    """

    taken: tuple[str, ...]
    anew: tuple[str, ...]
    weights: Mapping[str, Tensor]


def transfer_of(network: nn.Module, trained: Trained, key: str) -> Transfer:
    """Return what `network` can take over from a trained policy. The network is not changed.

    `key`: the config key that names the policy, for errors. Raises ConfigError if the weights cannot be read.
    """
    stored = weights_of(trained, key)
    layers: dict[str, list[str]] = {}
    wanted = network.state_dict()
    for name in wanted:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    taken: list[str] = []
    anew: list[str] = []
    weights: dict[str, Tensor] = {}
    for layer, names in layers.items():
        fitting: dict[str, Tensor] = {}
        for name in names:
            tensor = stored.get(name)
            if tensor is not None:
                tensor = shaped(tensor, wanted[name])
                if tensor.shape == wanted[name].shape:
                    fitting[name] = tensor
        if len(fitting) == len(names):
            taken.append(layer)
            weights |= fitting
        else:
            anew.append(layer)
    return Transfer(taken=tuple(taken), anew=tuple(anew), weights=weights)


def take_over(network: nn.Module, trained: Trained, key: str) -> None:
    """Load into `network` the weights of a trained policy, for all layers that both have in the same shape.

    `key`: the config key that names the policy, for errors.
    """
    transfer = transfer_of(network, trained, key)
    network.load_state_dict(dict(transfer.weights), strict=False)
