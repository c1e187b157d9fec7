"""Formulas of the user's own in place of the shipped ones, as `algorithm.variant` names them.

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
from rlplace.errors import ConfigError


class Steps(NamedTuple):
    """What simulators gave in an iteration; `final_values` are in the order of `argwhere(truncated)`."""

    rewards: Tensor  # [T, B]
    values: Tensor  # [T, B], of the observations that were acted on
    last_values: Tensor  # [B], of the observations after step T - 1
    final_values: Tensor  # [K], of the observations at the cuts
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool


class TokenSteps(NamedTuple):
    """Response tokens of an iteration, sample after sample."""

    rewards: Tensor  # [M]
    values: Tensor  # [M]
    lengths: Tensor  # [S] int64, response tokens of each sample


class TokenSamples(NamedTuple):
    """Response tokens to learn from, sequence after sequence."""

    logprobs: Tensor  # [N], of the policy before the first step on them
    advantages: Tensor  # [N]
    lengths: Tensor  # [s] int64, response tokens of each sequence


class Variant:
    """Calls the methods that the user's object has. Raises ConfigError where one returns another shape, or no gradient.

    What they raise themselves passes through.
    """

    def __init__(self, name: str, own: object) -> None:
        self.name = name
        self._own = own
        self._measured: tuple[str, ...] | None = (
            None  # the names of its metrics, once they are known
        )

    def has(self, method: str) -> bool:
        return hasattr(self._own, method)

    @property
    def differentiates(self) -> bool:
        """Whether a loss, or a metric, is its own."""
        return any(map(self.has, ("policy_loss", "value_loss", "metrics")))

    def advantages_and_returns(
        self, steps: Steps | TokenSteps
    ) -> tuple[Tensor, Tensor]:
        """Return both in the shape of `steps.rewards`."""
        found = self._call("advantages", steps)
        shape = tuple(steps.rewards.shape)
        if not isinstance(found, (tuple, list)) or len(found) != len(
            ("advantages", "returns")
        ):
            raise self._wrong(
                "advantages", found, f"advantages and returns, {list(shape)} each"
            )
        advantages, returns = (
            self._shaped("advantages", each, shape).to(steps.rewards.dtype)
            for each in found
        )
        return advantages, returns

    def advantages(self, outcomes: Any) -> Tensor:
        """Return [S] of `Outcomes`."""
        return self._shaped(
            "advantages",
            self._call("advantages", outcomes),
            tuple(outcomes.rewards.shape),
        )

    def policy_loss(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Tensor:
        return self._loss("policy_loss", logprobs, samples)

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return self._loss("value_loss", values, old_values, returns)

    @torch.no_grad()
    def metrics(
        self, logprobs: Tensor, samples: StepSamples | TokenSamples
    ) -> Mapping[str, Tensor]:
        """Return [N] of each, by name in alphabetical order, always the same names; none where it has no such method.

        Ranks add up their metrics by place.
        """
        if not self.has("metrics"):
            return {}
        found = self._call("metrics", logprobs.detach(), samples)
        if not isinstance(found, Mapping):
            raise self._wrong("metrics", found, "a dict of tensors by name")
        shape = tuple(logprobs.shape)
        names = tuple(sorted(found))
        self._measured = names if self._measured is None else self._measured
        if names != self._measured:
            wanted = f"metrics of the same names each time, first {', '.join(self._measured)}"
            raise self._wrong("metrics", found, wanted, got=", ".join(names) or "none")
        return {
            f"own/{name}": self._shaped("metrics", found[name], shape).to(logprobs)
            for name in names
        }

    def _loss(self, method: str, trained: Tensor, *given: Any) -> Tensor:
        found = self._shaped(
            method, self._call(method, trained, *given), tuple(trained.shape)
        )
        if not found.requires_grad:
            raise self._wrong(
                method,
                found,
                "a loss that depends on its first argument, without detach or no_grad",
            )
        return found

    def _call(self, method: str, *given: Any) -> Any:
        return getattr(self._own, method)(*given)

    def _shaped(self, method: str, found: object, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(found, Tensor) or tuple(found.shape) != shape:
            raise self._wrong(
                method,
                found,
                f"a tensor of shape {list(shape)}: a number for each sample, not their mean",
            )
        return found

    def _wrong(
        self, method: str, found: object, wanted: str, got: str | None = None
    ) -> ConfigError:
        if got is None:
            got = (
                f"a tensor of shape {list(found.shape)}"
                if isinstance(found, Tensor)
                else type(found).__name__
            )
        what = f"{method} of {self.name} does not return what is learned from"
        fix = f"return {wanted}"
        return ConfigError.of(
            "bad-variant", "algorithm.variant", what, got, f"it is to be {wanted}", fix
        )


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
    """Differentiate as `losses.ppo_slopes` by autograd; what the variant lacks is as it is there.

    Shares are those of PPO_MEANS, then of the variant's metrics by name.
    """
    with torch.inference_mode(mode=False), torch.enable_grad():
        old = StepSamples(*(tensor.clone() for tensor in old))
        trained = logprobs.clone().requires_grad_()
        valued = values.clone().requires_grad_()
        log_ratio = trained - old.logprobs
        own = variant.has
        shipped = clipped_surrogate(log_ratio, old.advantages, clip)
        policy = variant.policy_loss(trained, old) if own("policy_loss") else shipped
        if own("value_loss"):
            error = variant.value_loss(valued, old.values, old.returns)
        else:
            error = value_loss(valued, old.values, old.returns, value_clip)
        loss = (policy.sum() + value_coef * error.sum()) / count
        slopes = torch.autograd.grad(loss, (trained, valued))
    ratio = log_ratio.detach().exp()
    moved = log_ratio.detach()
    outside = (ratio < 1.0 - clip.low) | (ratio > 1.0 + clip.high)
    more = variant.metrics(trained, old)
    parts = (
        policy.detach(),
        error.detach(),
        entropies,
        moved.expm1() - moved,
        outside.to(ratio.dtype),
        *more.values(),
    )
    return PPOSlopes(
        logprobs=slopes[0],
        values=slopes[1],
        shares=torch.stack(parts).sum(dim=1).div_(count),
    )
