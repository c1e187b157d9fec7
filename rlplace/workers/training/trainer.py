"""Optimizer steps of one model over its ranks: metrics and gradient norm in one collective, gradient clipping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlplace.config import OptimizerConfig
from rlplace.errors import DivergedError, Problem
from rlplace.metrics import Metrics
from rlplace.workers.training.optimizer import Adam, MovingAverage, learning_rate
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedModel

Numbers = Mapping[str, float]  # of one optimizer step over all ranks, by name; the same on each of them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The optimizer steps of one iteration; but for `metrics` the same on every rank."""

    mean: Numbers | None  # over the steps evaluated; None where there was nothing to learn
    steps: int  # optimizer steps made
    lr: float  # of the last step
    tokens: int = 0  # that went through the model over all ranks, prompts included, in each epoch anew
    imbalance: float = 0.0  # share of the slowest step's time that was lost to waiting for its slowest rank
    metrics: Metrics = dataclasses.field(default_factory=dict)  # what else is to be reported


class Trainer:
    """Owns the count of steps, which the learning rate depends on; borrows model, optimizer and average."""

    def __init__(
        self,
        model: TrainedModel,
        optimizer: Adam,
        config: OptimizerConfig,
        ranks: Ranks,
        *,
        iterations: int,
        owner: str,
        rate_key: str,
        average: MovingAverage | None = None,
    ) -> None:
        """`iterations`: of the whole run. `owner` and `rate_key`, the key of the learning rate, are named in errors."""
        self._model, self._optimizer, self._config, self._ranks = model, optimizer, config, ranks
        self._iterations, self._owner, self._rate_key, self._average = iterations, owner, rate_key, average
        self._steps_made = 0

    def learning_rate(self, iteration: int) -> float:
        """Return the rate of the next step."""
        return learning_rate(self._config, self._steps_made, iteration / self._iterations)

    def sum_over_ranks(self, names: Sequence[str], shares: Tensor, iteration: int) -> Numbers:
        """Sum this rank's `shares` of the means called `names` over ranks, with the gradient norm before clipping.

        A collective. Raises DivergedError for a number that is not finite.
        """
        *means, squared_norm = self._ranks.sum(torch.cat([shares, self._model.squared_gradient()])).tolist()
        numbers = dict(zip((*names, "grad_norm"), (*means, math.sqrt(squared_norm)), strict=True))
        if not math.isfinite(sum(numbers.values())):
            raise diverged(self._owner, numbers, iteration=iteration, rate=self._rate_key)
        return numbers

    @torch.no_grad()
    def step(self, gradient_norm: float, lr: float) -> None:
        """Clip the gradients to the global norm `max_grad_norm` (Pascanu et al. 2013, algorithm 1), step, drop them.

        Not `clip_grad_norm_`: on sharded gradients that is several collectives of its own, while the norm can share one
        with the other numbers of a step.
        """
        gradients = self._model.gradients()
        if gradient_norm > self._config.max_grad_norm:
            torch._foreach_mul_(gradients, self._config.max_grad_norm / gradient_norm)
        self._optimizer.step(gradients, lr)
        self._model.drop_gathered()
        self._steps_made += 1
        if self._average is not None:
            self._average.update()


def mean_of(steps: Sequence[Numbers]) -> Numbers | None:
    """Return the mean over steps by name; None of none."""
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} if steps else None


def diverged(
    owner: str, numbers: Mapping[str, float], *, iteration: int, rate: str = "actor.optimizer.lr"
) -> DivergedError:
    """`rate`: key of the learning rate."""
    shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
    return DivergedError(
        Problem(
            code="diverged",
            key=owner,
            what=f"the update of iteration {iteration} is not a finite number",
            got=shown,
            why="a reward or observation was not finite, or the policy left the range of its numbers",
            fix=f"{rate}=<smaller>, or look for nan in what the simulator returns",
        )
    )
