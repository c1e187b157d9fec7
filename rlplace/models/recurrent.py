"""Networks with a memory: recurrent layers (GRU, LSTM) behind an encoder, and custom modules run step by step.

All have the call of `models.networks`::

    forward(observations, memory [M, S], begins [L, M] = None) -> outputs [L * M, K], values [L * M], memory [M, S]

Where an episode begins, the memory is emptied before the step. Observations of all steps stand one step after the
other; what does not depend on the memory is computed for all steps at once.

Letters: M sequences, L their steps, F features, K outputs, S numbers of the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlplace.config.blocks.policies import MlpConfig
from rlplace.envs.contract import Actions, Spaces
from rlplace.models.mlp import ACTIVATIONS, initialise
from rlplace.models.networks import ImageEncoder, Observed, entries_of, heads

# Features [M, F] and memory -> hidden state [M, H] and memory
_Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class NumberEncoder(nn.Module):
    """An MLP that computes features from all numbers of an observation, joined in one row."""

    def __init__(self, spaces: Spaces, config: MlpConfig) -> None:
        super().__init__()
        # Widths of the layers, from the numbers of an observation on
        widths = (sum(entry.size for entry in spaces.entries), *config.hidden)
        activation = ACTIVATIONS[config.activation]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers.append(nn.Linear(inputs, outputs))
            layers.append(activation())
        self.layers = nn.Sequential(*layers)
        self.features = widths[-1]

    def initialise(self, generator: torch.Generator) -> None:
        """Initialise all weights."""
        linears = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        if linears:
            initialise(linears, math.sqrt(2.0), generator)

    def forward(self, observations: Observed) -> Tensor:
        """Return F features for each of N observations, [N, F]."""
        entries = list(entries_of(observations).values())
        joined = torch.cat([entry.flatten(1) for entry in entries], dim=1)
        found: Tensor = self.layers(joined)
        return found


class RecurrentNetwork(nn.Module):
    """An encoder, a recurrent layer, and the heads of policy and value.

    The layer is a GRU (Cho et al. 2014, arXiv:1406.1078) or an LSTM (Hochreiter and Schmidhuber 1997). The memory of an
    LSTM is its output followed by its cell state. `size`: size of the layer's output.
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
        """Initialise all weights; in the recurrent layer, with an orthogonal matrix for each gate, and zero biases."""
        self.encoder.initialise(generator)
        for name, weight in self.cell.named_parameters():
            for gate in weight.detach().split(self.cell.hidden_size):
                if name.startswith("bias"):
                    nn.init.zeros_(gate)
                else:
                    nn.init.orthogonal_(gate, 1.0, generator)
        initialise([self.policy], 0.01, generator)
        initialise([self.value], 1.0, generator)

    def forward(
        self,
        observations: Observed,
        memory: Tensor,
        begins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs [L * M, K] and values [L * M] of L steps of M sequences, and the memory [M, S] after them.

        `observations`: those of all L steps, one step after the other. `memory` [M, S]: the memory before the first
        step. `begins` [L, M]: true where an episode begins with the step; None: there is one step, and no episode
        begins. K is the number of outputs of the policy, S the size of a memory.
        """
        # The encoder does not depend on the memory: all steps at once
        features = self.encoder(observations)
        held = memory.to(self.value.weight.dtype)
        hidden = []
        for step, inputs in enumerate(features.split(len(memory))):
            # Forget where an episode begins
            if begins is not None:
                held = held.masked_fill(begins[step][:, None], 0.0)
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
    """Runs a custom module of one step, `forward(observations, memory) -> outputs, values, memory`, over sequences.

    The module gets observations and memory in the dtype of its weights.
    """

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(
        self,
        observations: Observed,
        memory: Tensor,
        begins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return outputs [L * M, K] and values [L * M] of L steps of M sequences, and the memory [M, S] after them.

        `observations`: those of all L steps, one step after the other. `memory` [M, S]: the memory before the first
        step. `begins` [L, M]: true where an episode begins with the step; None: there is one step, and no episode
        begins. K is the number of outputs of the policy, S the size of a memory.
        """
        dtype = next((each.dtype for each in self.own.parameters()), memory.dtype)
        memory = memory.to(dtype)
        # Without `begins` there is one step
        if begins is None:
            found: tuple[Tensor, Tensor, Tensor] = self.own(observations, memory)
            return found
        outputs = []
        values = []
        for step, empty in enumerate(begins):
            # Rows of this step; forget where an episode begins
            rows = slice(step * len(memory), (step + 1) * len(memory))
            before = memory.masked_fill(empty[:, None], 0.0)
            output, value, memory = self.own(_of_step(observations, rows), before)
            outputs.append(output)
            values.append(value)
        return torch.cat(outputs), torch.cat(values), memory


def _of_step(observations: Observed, rows: slice) -> Observed:
    """Return the observations of one step: the rows `rows` of every entry of `observations`."""
    if isinstance(observations, Tensor):
        return observations[rows]
    return {name: entry[rows] for name, entry in observations.items()}
