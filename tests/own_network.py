"""A network as users write one, for `actor.model: {kind: module, name: tests.own_network:Own}`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlplace.envs.contract import DiscreteActions, Spaces


class Own(nn.Module):
    """Adds up what is learned of each entry of the observations; one parameter is never used, one and a
    buffer are single numbers.
    """

    def __init__(self, spaces: Spaces, width: int = 16) -> None:
        super().__init__()
        actions: Any = spaces.actions
        outputs = (
            actions.n if isinstance(actions, DiscreteActions) else len(actions.low)
        )
        self.entries = nn.ModuleList(
            nn.Linear(entry.size, width) for entry in spaces.entries
        )
        self.head = nn.Linear(width, outputs + 1)
        self.unused = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(
        self, observations: Tensor | dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        given = (
            [observations]
            if isinstance(observations, Tensor)
            else list(observations.values())
        )
        dtype = self.head.weight.dtype
        found = [
            layer(each.flatten(1).to(dtype))
            for layer, each in zip(self.entries, given, strict=True)
        ]
        outputs: Tensor = self.head(torch.tanh(torch.stack(found).sum(dim=0)))
        return outputs[:, 1:] * self.scale, outputs[:, 0]


class Remembers(Own):
    """Adds what it is shown to what it remembers."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.put, self.get = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, observations: Any, memory: Tensor) -> Any:
        dtype = self.head.weight.dtype
        given = (
            [observations]
            if isinstance(observations, Tensor)
            else list(observations.values())
        )
        found = [
            layer(each.flatten(1).to(dtype))
            for layer, each in zip(self.entries, given, strict=True)
        ]
        memory = torch.tanh(
            memory.to(dtype) + self.put(torch.tanh(torch.stack(found).sum(dim=0)))
        )
        outputs = self.head(self.get(memory))
        return outputs[:, 1:] * self.scale, outputs[:, 0], memory


class Wrong(Own):
    """Returns no values."""

    def forward(self, observations: Any) -> Any:
        return super().forward(observations)[0]


class Frozen(Own):
    """Has a parameter that is not to be trained."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.head.bias.requires_grad_(False)


class Constant(Own):
    """Returns values that no parameter changes."""

    def forward(self, observations: Any) -> Any:
        outputs, values = super().forward(observations)
        return outputs, torch.zeros_like(values)
