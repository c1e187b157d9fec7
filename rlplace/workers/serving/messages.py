"""Messages between the server of the training API, the actor and the engines.

::

    server ── Command ──▶ actor rank 0 ── Result ──▶ server          one command after the other
    server ── ServedRequest ──▶ rollout ── Completion, or PromptScores ──▶ server
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.algo.served_losses import Input, ServedLoss
from rlplace.config.blocks.training import OptimizerConfig
from rlplace.tokens import Request, Tokens

# ── to the actor ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of a pass: `tokens` [N + 1], of which all but the first are targets. `inputs`: of the loss, [N]."""

    tokens: Tokens
    inputs: Mapping[Input, NDArray[np.float32]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Compute log-probabilities and the loss of `data`; with `backward`, add its gradients to those of the model."""

    data: Sequence[Datum]
    loss: ServedLoss
    backward: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Make an optimizer step of AdamW with the gradients so far. `max_grad_norm`: infinite: nothing is clipped."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float

    def over(self, config: OptimizerConfig) -> OptimizerConfig:
        """Return a copy of `config` with the numbers of this step."""
        return dataclasses.replace(config, **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Save trained weights and optimizer state in a folder."""

    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Load what SaveState has saved. `optimizer`: whether to load its moments; else they start anew."""

    folder: str
    optimizer: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveModel:
    """Save the whole weights as the Hugging Face folder `model` in a folder, from which engines load them."""

    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Keep the gradients of the model `before`, and continue with those of the model `after`. "": no model.

    `dropped`: models whose gradients are no longer needed.
    """

    before: str
    after: str
    dropped: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndOfTurn:
    """No more commands come in this iteration."""


Command = (
    Pass | OptimizerStep | SaveState | LoadState | SaveModel | Exchange | EndOfTurn
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command gave. `failure`: why it failed; "" if it did not. `steps_made`: optimizer steps of the model.

    `logprobs`: of each datum of a pass, [N]. `metrics`: name -> number, for the client.
    """

    failure: str = ""
    steps_made: int = 0
    logprobs: Sequence[NDArray[np.float32]] = ()
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


# ── to the engines ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """A request for answers by certain weights.

    `folder`: Hugging Face folder of the weights. `synced`: whether the last sync has brought equal ones. `scores`:
    whether the log-probabilities of the prompt are asked as well.
    """

    request: Request
    folder: str
    synced: bool = False
    scores: bool = False

    @property
    def iteration(self) -> int:
        return self.request.iteration

    @property
    def weight(self) -> int:
        return self.request.weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """The log-probabilities of the prompt of request `group`, of all its tokens but the first, [P - 1]."""

    group: int
    logprobs: Sequence[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NotSampled:
    """A request that an engine could not take. `why`: the reason."""

    group: int
    why: str
