"""Custom formulas in place of the shipped ones, as `algorithm.variant` names them.

Letters: T steps, B rows, K truncations, N samples or response tokens of one minibatch or micro-batch (possibly none),
S samples of an iteration, M their response tokens, s sequences.

::

    advantages(steps)                             of an iteration, before they are normalised
        simulators                 Steps      ──▶ advantages, returns [T, B]
        language models, ppo       TokenSteps ──▶ advantages, returns [M]
        language models, others    Outcomes   ──▶ advantages [S]
    policy_loss(logprobs, samples)                [N] ──▶ [N]; samples: StepSamples or TokenSamples
    value_loss(values, old_values, returns)       [N] ──▶ [N]
    metrics(logprobs, samples)                    [N] ──▶ [N] by name; their means are actor/own/<name>
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlplace.algo.losses import (
    Clip,
    PPOSlopes,
    StepSamples,
    clipped_surrogate,
    value_loss,
)
from rlplace.codes import config_error

_KEY = "algorithm.variant"


class Steps(NamedTuple):
    """The simulator steps of an iteration. `final_values` are in the order of `argwhere(truncated)`."""

    rewards: Tensor  # [T, B]
    values: Tensor  # [T, B], of the observations before the actions
    last_values: Tensor  # [B], of the observations after step T - 1
    final_values: Tensor  # [K], of the observations at the cuts
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool


class TokenSteps(NamedTuple):
    """The response tokens of an iteration, sample after sample."""

    rewards: Tensor  # [M]
    values: Tensor  # [M]
    lengths: Tensor  # [S] int64, response tokens of each sample


class TokenSamples(NamedTuple):
    """The response tokens of a micro-batch to learn from, sequence after sequence."""

    logprobs: Tensor  # [N], of the policy before the first step on them
    advantages: Tensor  # [N]
    lengths: Tensor  # [s] int64, response tokens of each sequence


class Variant:
    """Calls the methods of an object that the user wrote, and checks what they return.

    Raises ConfigError where a method returns another shape than it must, or a loss without gradient. Exceptions of the
    methods pass through.
    """

    def __init__(self, name: str, own: object) -> None:
        """`name`: of the variant, as the config has it. `own`: the object of the user."""
        self.name = name
        self._own = own
        # Names of the metrics, once they are known.
        self._measured: tuple[str, ...] | None = None

    def has(self, method: str) -> bool:
        """Return whether the user's object has this method."""
        return hasattr(self._own, method)

    @property
    def differentiates(self) -> bool:
        """Return whether the user's object has a loss or metrics, so that autograd is needed."""
        return any(map(self.has, ("policy_loss", "value_loss", "metrics")))

    def advantages_and_returns(
        self, steps: Steps | TokenSteps
    ) -> tuple[Tensor, Tensor]:
        """Return the user's advantages and returns, both in the shape of `steps.rewards`."""
        found = self._call("advantages", steps)
        shape = tuple(steps.rewards.shape)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise config_error(
                "bad-variant",
                _KEY,
                _shown(found),
                error="pair",
                variant=self.name,
                shape=list(shape),
            )
        advantages = self._shaped("advantages", found[0], shape)
        returns = self._shaped("advantages", found[1], shape)
        dtype = steps.rewards.dtype
        return advantages.to(dtype), returns.to(dtype)

    def advantages(self, outcomes: Any) -> Tensor:
        """Return [S]: the user's advantage of each sample. `outcomes`: the `Outcomes` of an iteration."""
        found = self._call("advantages", outcomes)
        return self._shaped("advantages", found, tuple(outcomes.rewards.shape))

    def policy_loss(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Tensor:
        """Return [N]: the user's policy loss of each sample, differentiable by `logprobs` [N].

        `samples`: the N samples as they were drawn.
        """
        return self._loss("policy_loss", logprobs, samples)

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """Return [N]: the user's value loss of each sample, differentiable by `values`. All arguments are [N]."""
        return self._loss("value_loss", values, old_values, returns)

    @torch.no_grad()
    def metrics(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Mapping[str, Tensor]:
        """Return `own/<name>` -> [N] of each of the user's metrics, in alphabetical order; empty without any.

        `samples`: the N samples as they were drawn. `logprobs`: [N]. The names must be the same at each call, because
        ranks add up their metrics by position.
        """
        if not self.has("metrics"):
            return {}
        found = self._call("metrics", logprobs.detach(), samples)
        if not isinstance(found, Mapping):
            raise config_error(
                "bad-variant", _KEY, _shown(found), error="metrics", variant=self.name
            )
        shape = tuple(logprobs.shape)
        names = tuple(sorted(found))
        if self._measured is None:
            self._measured = names
        if names != self._measured:
            raise config_error(
                "bad-variant",
                _KEY,
                ", ".join(names) or "none",
                error="names",
                variant=self.name,
                before=", ".join(self._measured),
            )
        metrics = {}
        for name in names:
            metric = self._shaped("metrics", found[name], shape)
            metrics[f"own/{name}"] = metric.to(logprobs)
        return metrics

    def _loss(self, method: str, trained: Tensor, *given: Any) -> Tensor:
        """Return the result of a loss method. Raises ConfigError where it has no gradient.

        `trained`: [N], the tensor with respect to which the loss must have a gradient. `given`: the other arguments of
        the method.
        """
        returned = self._call(method, trained, *given)
        loss = self._shaped(method, returned, tuple(trained.shape))
        if not loss.requires_grad:
            raise config_error(
                "bad-variant",
                _KEY,
                _shown(loss),
                error="gradient",
                method=method,
                variant=self.name,
            )
        return loss

    def _call(self, method: str, *given: Any) -> Any:
        return getattr(self._own, method)(*given)

    def _shaped(self, method: str, found: object, shape: tuple[int, ...]) -> Tensor:
        """Return `found`, the result of `method`. Raises ConfigError unless it is a tensor of this shape."""
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            raise config_error(
                "bad-variant",
                _KEY,
                _shown(found),
                error="shape",
                method=method,
                variant=self.name,
                shape=list(shape),
            )
        return found


def _shown(found: object) -> str:
    """Return a text that describes what a method of a variant returned: the shape of a tensor, or else the type."""
    if isinstance(found, Tensor):
        return f"a tensor of shape {list(found.shape)}"
    return type(found).__name__


def ppo_slopes_by_variant(
    variant: Variant,
    logprobs: Tensor,
    values: Tensor,
    entropies: Tensor,
    old: StepSamples,
    clip: Clip,
    *,
    value_clip: float | None,
    value_coef: float,
    count: int,
) -> PPOSlopes:
    """Return the gradients and partial sums of `losses.ppo_slopes`, found by autograd with the losses of a variant.

    If the variant lacks a loss, the shipped loss is used. The partial sums are those of PPO_MEANS, then those of the
    variant's metrics by name. The arguments are those of `losses.ppo_slopes`.
    """
    # The loss and its gradients, also where the caller is in inference mode.
    with torch.inference_mode(mode=False), torch.enable_grad():
        old = StepSamples(*(tensor.clone() for tensor in old))
        trained = logprobs.clone().requires_grad_()
        valued = values.clone().requires_grad_()
        log_ratio = trained - old.logprobs
        policy = clipped_surrogate(log_ratio, old.advantages, clip)
        if variant.has("policy_loss"):
            policy = variant.policy_loss(trained, old)
        if variant.has("value_loss"):
            error = variant.value_loss(valued, old.values, old.returns)
        else:
            error = value_loss(valued, old.values, old.returns, value_clip)
        loss = (policy.sum() + value_coef * error.sum()) / count
        slopes = torch.autograd.grad(loss, (trained, valued))
    # The means, in the order of PPO_MEANS; the KL is the estimate k3.
    moved = log_ratio.detach()
    ratio = moved.exp()
    approx_kl = moved.expm1() - moved
    outside = (ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high)
    parts = (
        policy.detach(),
        error.detach(),
        entropies,
        approx_kl,
        outside.to(ratio.dtype),
        *variant.metrics(trained, old).values(),
    )
    return PPOSlopes(
        logprobs=slopes[0],
        values=slopes[1],
        shares=torch.stack(parts).sum(dim=1).div_(count),
    )
