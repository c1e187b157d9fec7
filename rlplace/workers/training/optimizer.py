"""Optimizer steps of one model over its ranks: AdamW on accelerator or host, learning rate, clipping, moving
average.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlplace.codes import problem
from rlplace.config.blocks.engine import OnPoison
from rlplace.config.blocks.training import OptimizerConfig
from rlplace.errors import DivergedError
from rlplace.metrics import Metrics
from rlplace.workers.training.moments import ByteMoments, FloatMoments, Moments, Where
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedModel

_LOG = logging.getLogger(__name__)
_MOST_SKIPPED = 10  # non-finite steps in a row; more of them mean damaged weights or unusable rewards

# Means over one optimizer step by name; the same on every rank
Numbers = Mapping[str, float]


def learning_rate(config: OptimizerConfig, steps_made: int, progress: float) -> float:
    """Return the learning rate of the next optimizer step.

    `steps_made`: number of optimizer steps so far, for the warm-up. `progress`: share of the run's iterations that are
    over, from 0 to 1, for the decay.
    """
    # Linear warm-up over optimizer steps
    warmup = 1.0
    if config.warmup_steps:
        warmup = min(1.0, (steps_made + 1) / config.warmup_steps)
    return config.lr * warmup * config.remaining(progress)


class Adam:
    """AdamW for this rank's shards of the trained parameters.

    It changes the shards in place, or float32 copies of the shards, which are rounded to the shards after each step.
    There are copies with `kind: adamw_master` (on the accelerator) and with `on_host` (on the host). The moments are in
    the same place as the copies. The constructor allocates all memory, so its size is known from the start.
    """

    def __init__(self, shards: Sequence[Tensor], config: OptimizerConfig) -> None:
        """Allocate the moments, and the float32 copies if the config asks for them.

        `shards`: the trained parameters of this rank, as plain tensors, which the model never replaces. A shard may be
        empty.
        """
        self._shards = tuple(shards)
        self._on_host = config.on_host
        self._copied = config.on_host or config.kind == "adamw_master"
        # The tensors to step: the shards themselves, or float32 copies
        stepped = [shard.detach() for shard in shards]
        if self._copied:
            copies = []
            for shard in stepped:
                device = "cpu" if config.on_host else shard.device
                copies.append(shard.to(device, torch.float32, copy=True))
            stepped = copies
        # Pinned memory copies to the GPU without blocking
        if config.on_host and any(shard.is_cuda for shard in shards):
            stepped = [master.pin_memory() for master in stepped]
        # The shards, or the copies
        self.stepped: Sequence[Tensor] = stepped
        make = ByteMoments if config.kind == "adamw_8bit" else FloatMoments
        self.moments: Moments = make(stepped, config)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Make one optimizer step on the shards.

        `gradients`: gradient of each shard, in their order; they may be overwritten. `lr`: learning rate.
        """
        # Move each gradient to the device and dtype of the tensor that is stepped
        fitting = [
            g.to(device=t.device, dtype=t.dtype)
            for g, t in zip(gradients, self.stepped, strict=True)
        ]
        self.moments.step(self.stepped, fitting, lr)
        self.follow(lambda tensor: tensor)

    @torch.no_grad()
    def follow(self, where: Where) -> None:
        """Round the float32 copies to the shards' dtypes and write them into the shards. Without copies, do nothing.

        `where`: called with a tensor, returns the tensor that has its data now: itself, or while it is offloaded, its
        copy on the host.
        """
        if self._copied:
            for shard, master in zip(self._shards, self.stepped, strict=True):
                where(shard).copy_(where(master), non_blocking=True)

    def tensors(self, *, on_host: bool = False) -> list[Tensor]:
        """Return the tensors of the optimizer that are in one place: the moments, and the float32 copies if there are
        any.

        `on_host`: whether to return the tensors on the host instead of those on the accelerator. The optimizer has all
        of its tensors in one place, so the list for the other place is empty.
        """
        if on_host != self._on_host:
            return []
        return [*self.moments.tensors(), *(self.stepped if self._copied else ())]

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in self.tensors(on_host=True))


class MovingAverage:
    """Moving average of the weights: a = decay * a + (1 - decay) * w (Polyak and Juditsky 1992, exponential weights).

    Owns the averages of this rank's shards, as float32 tensors on the host.
    """

    def __init__(self, shards: Sequence[Tensor], decay: float) -> None:
        """Start the averages with the present weights.

        `shards`: the trained parameters, which must be on the accelerator now, and which the model never replaces.
        `decay`: weight of the old average in each update.
        """
        self._shards = tuple(shards)
        self._decay = decay
        self.averages = [
            shard.detach().to("cpu", torch.float32, copy=True) for shard in self._shards
        ]

    @property
    def host_bytes(self) -> int:
        return sum(average.nbytes for average in self.averages)

    @torch.no_grad()
    def update(self) -> None:
        for average, shard in zip(self.averages, self._shards, strict=True):
            average.lerp_(shard.to("cpu", torch.float32), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context manager that replaces the weights by their averages during its `with` block, to save the
        averages.
        """
        kept = [shard.detach().to("cpu", copy=True) for shard in self._shards]
        try:
            self._write(self.averages)
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for shard, value in zip(self._shards, values, strict=True):
            shard.copy_(value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of the optimizer steps of one iteration. All fields except `metrics` are equal on every rank.

    `mean`: means over the evaluated steps, by name; None if there was nothing to learn. `steps`: number of steps made.
    `lr`: learning rate of the last step. `tokens`: tokens that went through the model on all ranks, with prompts, in
    all epochs. `skipped`: one line of text for each skipped step. `imbalance`: time lost by unequal ranks in the worst
    step; 0.1: the step takes a tenth longer than with equally many tokens on each rank.
    """

    # Means over the evaluated steps; None if there was nothing to learn
    mean: Numbers | None
    # Optimizer steps made
    steps: int
    # Learning rate of the last step
    lr: float
    # Tokens through the model over all ranks, with prompts, counted in each epoch
    tokens: int = 0
    # A line for each non-finite step that was skipped
    skipped: tuple[str, ...] = ()
    # Time lost by unequal ranks in the worst step: 0.1 is a tenth longer than with equally many tokens on each rank
    imbalance: float = 0.0
    # Further metrics, of this rank
    metrics: Metrics = dataclasses.field(default_factory=dict)


def mean_of(steps: Sequence[Numbers]) -> Numbers | None:
    """Return the mean of each number over all `steps`, by name; None if `steps` is empty."""
    if not steps:
        return None
    means: dict[str, float] = {}
    for name in steps[0]:
        total = sum(step[name] for step in steps)
        means[name] = total / len(steps)
    return means


class Trainer:
    """Makes the optimizer steps of one model.

    Owns the optimizer, the moving average and the number of steps made. It uses the model, but does not own it.
    """

    def __init__(
        self,
        model: TrainedModel,
        config: OptimizerConfig,
        ranks: Ranks,
        *,
        iterations: int,
        component: str,
        ema_decay: float | None = None,
        on_poison: OnPoison = "stop",
    ) -> None:
        """Create the optimizer, and the moving average if there is one.

        `iterations`: number of iterations of the run. `component`: name of the trained component, for errors.
        `ema_decay`: decay of the moving average of the weights; None: keep no average. `on_poison`: what to do with a
        step that has non-finite numbers: "skip" or "stop".
        """
        self._model = model
        self._config = config
        self._ranks = ranks
        self._iterations = iterations
        self._component = component
        # The learning rate depends on it
        self.steps_made = 0
        self._may_skip = _MOST_SKIPPED if on_poison == "skip" else 0
        # non-finite steps in a row
        self._skipped = 0
        # A line for each step that was skipped since the last `take_skipped`
        self._notes: list[str] = []
        self.optimizer = Adam(model.trained_shards(), config)
        self.average: MovingAverage | None = None
        if ema_decay is not None:
            self.average = MovingAverage(model.trained_shards(), ema_decay)

    def configure(self, config: OptimizerConfig) -> None:
        """Make the next steps with the numbers of `config`. Its kind and place have to be those of the first config."""
        self._config = config
        self.optimizer.moments.config = config

    @property
    def host_bytes(self) -> int:
        """Bytes of optimizer and moving average that are always on the host, even if the component is not offloaded."""
        if self.average is None:
            return self.optimizer.host_bytes
        return self.optimizer.host_bytes + self.average.host_bytes

    def learning_rate(self, iteration: int) -> float:
        return learning_rate(
            self._config,
            self.steps_made,
            iteration / self._iterations,
        )

    def sum_over_ranks(
        self,
        names: Sequence[str],
        shares: Tensor,
        iteration: int,
    ) -> Numbers | None:
        """Return the sums of `shares` over ranks, and the norm of the whole gradient before clipping, by name. A
        collective.

        If one of these numbers is not finite, all ranks drop the gradients and return None, so that the step is
        skipped. If the config does not skip such steps, or too many in a row were skipped, all ranks raise
        DivergedError.

        `shares`: this rank's parts of the step's means, [k]. `names`: their names.
        """
        summed = self._model.sum_shares(shares).tolist()
        numbers = dict(zip((*names, "grad_norm"), summed, strict=True))
        if math.isfinite(sum(numbers.values())):
            self._skipped = 0
            return numbers
        # Name the ranks that brought the non-finite number
        where = self._ranks_at_fault(shares)
        error = self._diverged(numbers, where, iteration)
        self._skipped += 1
        # Skipping: log once, note it for the report, drop the gradients
        if self._skipped > self._may_skip:
            raise error
        if self._ranks.rank == 0:
            _LOG.warning(
                "skipped, %d in a row: %s: %s",
                self._skipped,
                error.problem.what,
                error.problem.got,
            )
        row = f", {self._skipped} in a row" if self._skipped > 1 else ""
        self._notes.append(
            f"{self._component}: optimizer step {self.steps_made} of the run{row}: {where}"
        )
        self._model.end_step()
        return None

    def take_skipped(self) -> tuple[str, ...]:
        """Return one line of text for each step that was skipped since the last call of this method."""
        notes = tuple(self._notes)
        self._notes = []
        return notes

    def _ranks_at_fault(self, shares: Tensor) -> str:
        """Return a text that names the ranks with a non-finite loss; if all losses are finite, those with a non-finite
        gradient.

        A collective. `shares`: this rank's parts of the step's means.
        """
        # Row 0: loss, row 1: gradient; a column per rank, 1.0 for a non-finite one
        faults = torch.zeros(2, self._ranks.world_size, device=shares.device)
        for row, tensors in enumerate(([shares], self._model.own_gradients())):
            finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
            faults[row, self._ranks.rank] = 0.0 if finite else 1.0
        loss, gradient = self._ranks.sum(faults.flatten()).view(2, -1).tolist()
        what, by_rank = ("loss", loss) if any(loss) else ("gradient", gradient)
        ranks = [str(rank) for rank, fault in enumerate(by_rank) if fault]
        # Finite parts can still overflow when they are summed
        named = ", ".join(ranks) or "none: the sum of all"
        return f"{what} of rank {named}"

    def _diverged(
        self,
        numbers: Numbers,
        where: str,
        iteration: int,
    ) -> DivergedError:
        repeated = f", {self._skipped} times in a row before" if self._skipped else ""
        listed = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        return DivergedError(
            problem(
                "diverged",
                f"{self._component} rank {self._ranks.rank}",
                f"{listed}     (step {self.steps_made} of the run{repeated}; {where})",
                iteration=iteration + 1,
                component=self._component,
            )
        )

    @torch.no_grad()
    def step(self, gradient_norm: float, lr: float) -> None:
        """Clip the gradients to the norm `max_grad_norm`, make one optimizer step, and drop the gradients.

        Clipping is algorithm 1 of Pascanu et al. 2013. `gradient_norm`: norm of the whole gradient over all ranks, from
        `sum_over_ranks`. `lr`: learning rate.
        """
        gradients = self._model.gradients()
        if gradient_norm > self._config.max_grad_norm:
            torch._foreach_mul_(gradients, self._config.max_grad_norm / gradient_norm)
        self.optimizer.step(gradients, lr)
        self._model.end_step()
        self.steps_made += 1
        if self.average is not None:
            self.average.update()
