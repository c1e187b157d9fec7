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

from rlplace.algo.kl import finite_ratio_log
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
    """The simulator steps of an iteration: T steps of B rows, of which K steps are truncated.

    `rewards`, `terminated`, `truncated`: [T, B]. `values`: [T, B], of the observations before the actions.
    `last_values`: [B], of the observations after the last step.
    `final_values`: [K], of the last observations of truncated episodes, in the order of `argwhere(truncated)`.
    """

    rewards: Tensor
    values: Tensor
    last_values: Tensor
    final_values: Tensor
    terminated: Tensor
    truncated: Tensor


class TokenSteps(NamedTuple):
    """The M response tokens of an iteration's S samples, sample after sample.

    `rewards`, `values`: [M]. `lengths`: [S] int64, number of response tokens of each sample.
    """

    rewards: Tensor
    values: Tensor
    lengths: Tensor


class TokenSamples(NamedTuple):
    """The N response tokens of a micro-batch to learn from, sequence after sequence.

    `logprobs`: [N], of the policy before the first optimizer step on these tokens. `advantages`: [N].
    `lengths`: [s] int64, number of response tokens of each of s sequences.
    """

    logprobs: Tensor
    advantages: Tensor
    lengths: Tensor


class Variant:
    """Calls the methods of a variant, an object by which the user replaces formulas of the algorithm, and checks the
    results.

    Raises ConfigError if a result has a wrong shape, or if a loss has no gradient. Exceptions from the methods are not
    caught.
    """

    def __init__(self, name: str, own: object) -> None:
        """Wrap the user's object `own`. `name`: name of the variant in the config."""
        self.name = name
        self._own = own
        # Names of the metrics, once they are known.
        self._measured: tuple[str, ...] | None = None

    def has(self, method: str) -> bool:
        """Return whether the user's object has the method `method`."""
        return hasattr(self._own, method)

    @property
    def differentiates(self) -> bool:
        """Return whether autograd is needed: the user's object has a loss or metrics."""
        return any(map(self.has, ("policy_loss", "value_loss", "metrics")))

    def advantages_and_returns(
        self, steps: Steps | TokenSteps
    ) -> tuple[Tensor, Tensor]:
        """Return the user's advantages and returns, both with the shape of `steps.rewards`."""
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
        """Return the user's advantage of each of the S samples, [S]. `outcomes`: the `Outcomes` of an iteration."""
        found = self._call("advantages", outcomes)
        return self._shaped("advantages", found, tuple(outcomes.rewards.shape))

    def policy_loss(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Tensor:
        """Return the user's policy loss of each of N samples, [N], with a gradient with respect to `logprobs`.

        `logprobs`: [N], of the present policy. `samples`: the N samples or tokens as they were drawn.
        """
        return self._loss("policy_loss", logprobs, samples)

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """Return the user's value loss of each of N samples, [N], with a gradient with respect to `values`.

        `values`, `old_values`, `returns`: [N]; the old values are from the policy that sampled.
        """
        return self._loss("value_loss", values, old_values, returns)

    @torch.no_grad()
    def metrics(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Mapping[str, Tensor]:
        """Return `own/<name>` -> [N] for each of the user's metrics, in alphabetical order; {} without such metrics.

        `logprobs`: [N], of the present policy. `samples`: the N samples or tokens as they were drawn. The names must be
        the same in each call, because ranks add up their metrics by position.
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
        """Return the result of the user's loss method `method`. Raises ConfigError if it has no gradient.

        `trained`: tensor of one dimension, first argument of the method; the loss must have a gradient with respect to
        it. `given`: further arguments of the method.
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
        """Return `found`, the result of the user's method. Raises ConfigError if it is not a tensor of this shape."""
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
    """Return a text about the result of a user's method, for errors: the shape of a tensor, else the type."""
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
    """Return the gradients of PPO's loss and partial sums of its metrics, with the losses of a variant, by autograd.

    If the variant lacks a loss, the shipped loss is used. The partial sums are first those of PPO_MEANS, then those of
    the variant's metrics. The arguments after `variant` have the same meaning as in `losses.ppo_slopes`: `logprobs`,
    `values`, `entropies`: [N], of the present policy. `old`: the N samples as they were drawn. `count`: number of
    samples over all ranks. `clip`, `value_clip`: bounds for the shipped losses; `value_clip` None: no clip.
    `value_coef`: weight of the value loss.
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
    moved = finite_ratio_log(log_ratio.detach())
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
