"""Variants of algorithms as users write them, for `algorithm.variant: {name: tests.own_variant:Same}`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlplace.algo.advantages import gae, token_gae
from rlplace.algo.losses import Clip, clipped_surrogate, value_loss
from rlplace.algo.variants import Steps
from rlplace.config.blocks.training import AlgorithmConfig


class Same:
    """Has the shipped formulas, written as a user would."""

    def __init__(self, algorithm: AlgorithmConfig, doubled: bool = False) -> None:
        self._algorithm, self._doubled = algorithm, doubled

    def policy_loss(self, logprobs: Tensor, samples: Any) -> Tensor:
        clip = Clip(low=self._algorithm.clip_ratio_low, high=self._algorithm.clip_high)
        return clipped_surrogate(
            logprobs - samples.logprobs, samples.advantages, clip
        ) * (1 + self._doubled)

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return value_loss(values, old_values, returns, self._algorithm.value_clip)

    def metrics(self, logprobs: Tensor, samples: Any) -> dict[str, Tensor]:
        return {"ratio": (logprobs - samples.logprobs).exp()}


class SameEstimates(Same):
    """Estimates by GAE too."""

    def advantages(self, steps: Any) -> tuple[Tensor, Tensor]:
        gamma, gae_lambda = self._algorithm.gamma, self._algorithm.gae_lambda
        if isinstance(steps, Steps):
            return gae(**steps._asdict(), gamma=gamma, gae_lambda=gae_lambda)
        return token_gae(*steps, gamma=gamma, gae_lambda=gae_lambda)


class Rewards:
    """Takes rewards for advantages, of groups."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        pass

    def advantages(self, outcomes: Any) -> Tensor:
        rewards: Tensor = outcomes.rewards
        return rewards


class Wrong(Rewards):
    """Each method returns what it must not."""

    def advantages(self, outcomes: Any) -> Any:
        return outcomes.rewards.mean()

    def policy_loss(self, logprobs: Tensor, samples: Any) -> Tensor:
        return (logprobs - samples.logprobs).mean()

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        return (values.detach() - returns).square()

    def metrics(self, logprobs: Tensor, samples: Any) -> Any:
        return logprobs


class Misspelt:
    """Would change nothing."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        pass

    def policy_los(self, logprobs: Tensor, samples: Any) -> Tensor:
        return logprobs
