"""The losses of the training API, as sums over tokens: a client chooses one by name for each pass.

Letters: N target tokens of a micro-batch, p and q the probabilities of a token by the present weights and by the
policy that sampled it, A its advantage, r = p / q.

::

    cross_entropy          -w log p
    importance_sampling    -r A                                  (REINFORCE with importance weights)
    ppo                    -min(r A, clip(r, low, high) A)       (Schulman et al. 2017, arXiv:1707.06347)
    cispo                  -sg(clip(r, low, high)) A log p       (MiniMax-M1, arXiv:2506.13585)
    dro                    -(A log p - beta / 2 (log p - log q)^2)    (Richemond et al. 2024, arXiv:2405.19107)

sg: no gradient flows through it. Names, inputs and limits (`clip_low_threshold` 0.8, `clip_high_threshold` 1.2,
`beta`) are those of the API's documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rlplace.algo.kl import finite_ratio_log

Input = Literal["weights", "logprobs", "advantages"]
# Loss -> the inputs that it takes for each target token, beside `target_tokens`
INPUTS: Mapping[str, tuple[Input, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
}
# Loss -> its settings with their defaults; None: it has to be given
SETTINGS: Mapping[str, Mapping[str, float | None]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": None},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoss:
    """A loss by its name in INPUTS, with all its settings."""

    name: str
    settings: Mapping[str, float]


def token_losses(
    loss: ServedLoss, logprobs: Tensor, inputs: Mapping[Input, Tensor]
) -> Tensor:
    """Return the loss of each target token, [N].

    `logprobs`: of the target tokens by the present weights, [N]. `inputs`: the arrays of INPUTS, [N] each.
    """
    if loss.name == "cross_entropy":
        return -inputs["weights"] * logprobs
    advantages = inputs["advantages"]
    log_ratio = logprobs - inputs["logprobs"]
    if loss.name == "dro":
        beta = loss.settings["beta"]
        return -(advantages * logprobs - 0.5 * beta * log_ratio.square())
    ratio = finite_ratio_log(log_ratio).exp()
    if loss.name == "importance_sampling":
        return -ratio * advantages
    low = loss.settings["clip_low_threshold"]
    high = loss.settings["clip_high_threshold"]
    clipped = ratio.clamp(low, high)
    if loss.name == "cispo":
        return -clipped.detach() * advantages * logprobs
    return -torch.minimum(ratio * advantages, clipped * advantages)
