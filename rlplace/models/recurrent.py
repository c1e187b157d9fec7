"""Networks with a memory: recurrent layers (GRU, LSTM) behind an encoder, and modules of the user's own, step by step.

All are called as `models.networks` says::

    forward(observations, memory [M, S], begins [L, M] = None) -> outputs [L * M, K], values [L * M], memory [M, S]

Where an episode begins, the memory is emptied before the step. Observations are those of all steps, one step after the
other; what does not depend on the memory is computed for all of them at once.

Letters: M sequences, L their steps, F features, K outputs, S numbers of the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlplace.config.policies import MlpConfig
from rlplace.envs.contract import Actions, Spaces
from rlplace.models.mlp import ACTIVATIONS, initialise
from rlplace.models.networks import ImageEncoder, Observed, heads

# Features [M, F], memory -> hidden [M, H], memory
_Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class NumberEncoder(nn.Module):
    """Layers over all numbers of an observation in a row."""

    def __init__(self, spaces: Spaces, config: MlpConfig) -> None:
        super().__init__()
        widths = (sum(entry.size for entry in spaces.entries), *config.hidden)
        layers = [
            (nn.Linear(*pair), ACTIVATIONS[config.activation]())
            for pair in itertools.pairwise(widths)
        ]
        self.layers = nn.Sequential(*itertools.chain(*layers))
        self.features = widths[-1]

    def initialise(self, generator: torch.Generator) -> None:
        """Make the first weights."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        if linears:
            initialise(linears, math.sqrt(2.0), generator)

    def forward(self, observations: Observed) -> Tensor:
        entries = (
            [observations]
            if isinstance(observations, Tensor)
            else list(observations.values())
        )
        found: Tensor = self.layers(
            torch.cat([entry.flatten(1) for entry in entries], dim=1)
        )
        return found


class RecurrentNetwork(nn.Module):
    """An encoder, a GRU (Cho et al. 2014, arXiv:1406.1078) or LSTM (Hochreiter and Schmidhuber 1997), and both heads.

    The memory of an LSTM is its output followed by its cell.
    """

    def __init__(
        self,
        encoder: NumberEncoder | ImageEncoder,
        actions: Actions,
        *,
        lstm: bool,
        size: int,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._lstm = lstm
        self.cell = (nn.LSTMCell if lstm else nn.GRUCell)(encoder.features, size)
        self.policy, self.value = heads(size, actions)

    def initialise(self, generator: torch.Generator) -> None:
        """Make the first weights: orthogonal ones, in the cell for each gate."""
        self.encoder.initialise(generator)
        for name, weight in self.cell.named_parameters():
            for gate in weight.detach().split(self.cell.hidden_size):
                nn.init.zeros_(gate) if name.startswith(
                    "bias"
                ) else nn.init.orthogonal_(gate, 1.0, generator)
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(
        self, observations: Observed, memory: Tensor, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        features = self.encoder(observations)
        held = memory.to(self.value.weight.dtype)
        hidden = []
        for step, inputs in enumerate(features.split(len(memory))):
            held = (
                held if begins is None else held.masked_fill(begins[step][:, None], 0.0)
            )
            if self._lstm:
                pair = self.cell(inputs, held.chunk(2, dim=1))
                output = pair[0]
                held = torch.cat(pair, dim=1)
            else:
                output = held = self.cell(inputs, held)
            hidden.append(output)
        joined = torch.cat(hidden)
        return self.policy(joined), self.value(joined)[:, 0], held


class StepByStep(nn.Module):
    """A module of the user's own: `forward(observations, memory) -> outputs, values, memory` is one step.

    It is given its memory in the dtype of its weights, as observations are.
    """

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(
        self, observations: Observed, memory: Tensor, begins: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        memory = memory.to(
            next((each.dtype for each in self.own.parameters()), memory.dtype)
        )
        if begins is None:
            found: tuple[Tensor, Tensor, Tensor] = self.own(observations, memory)
            return found
        outputs = []
        values = []
        for step, empty in enumerate(begins):
            here = slice(step * len(memory), (step + 1) * len(memory))
            output, value, memory = self.own(
                _of_step(observations, here), memory.masked_fill(empty[:, None], 0.0)
            )
            outputs.append(output)
            values.append(value)
        return torch.cat(outputs), torch.cat(values), memory


def _of_step(observations: Observed, rows: slice) -> Observed:
    if isinstance(observations, Tensor):
        return observations[rows]
    return {name: entry[rows] for name, entry in observations.items()}
