"""Optimizer steps of one model over its ranks: AdamW on accelerator or host, learning rate, clipping, the average."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlplace.config.schema import OnPoison, OptimizerConfig
from rlplace.errors import DivergedError
from rlplace.metrics import Metrics
from rlplace.workers.training.moments import ByteMoments, FloatMoments, Moments, Where
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.training.trained_model import TrainedModel

_LOG = logging.getLogger(__name__)
_MOST_SKIPPED = 10  # steps in a row that are not finite: the weights themselves are damaged, or all that is learned

# Of one optimizer step over all ranks, by name; the same on each of them
Numbers = Mapping[str, float]


def learning_rate(config: OptimizerConfig, steps_made: int, progress: float) -> float:
    """Return the rate of the next step; `progress` is the share of iterations that are over."""
    warmth = (
        min(1.0, (steps_made + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    )
    left = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    least = config.min_lr_ratio
    return (
        config.lr * warmth * (least + (1.0 - least) * max(0.0, left[config.schedule]))
    )


class Adam:
    """Step the shards in place, or float32 copies of them that are rounded to the shards after each step.

    Owns the copies, on accelerator (`kind: adamw_master`) or host (`on_host`), and the moments beside them, which are
    made at once so that their size is known.
    """

    def __init__(self, shards: Sequence[Tensor], config: OptimizerConfig) -> None:
        """`shards`: what is trained, plain tensors that stay where they are; each may be empty."""
        self._shards = tuple(shards)
        self._on_host = config.on_host
        self._copied = config.on_host or config.kind == "adamw_master"
        stepped = [shard.detach() for shard in shards]
        if self._copied:
            stepped = [
                s.to("cpu" if config.on_host else s.device, torch.float32, copy=True)
                for s in stepped
            ]
        if config.on_host and any(shard.is_cuda for shard in shards):
            stepped = [master.pin_memory() for master in stepped]
        self.stepped: Sequence[Tensor] = stepped  # the shards, or the copies
        make = ByteMoments if config.kind == "adamw_8bit" else FloatMoments
        self.moments: Moments = make(stepped, config)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """`gradients` are in the order of the shards; they may be changed."""
        fitting = [
            g.to(device=t.device, dtype=t.dtype)
            for g, t in zip(gradients, self.stepped, strict=True)
        ]
        self.moments.step(self.stepped, fitting, lr)
        self.follow(lambda tensor: tensor)

    @torch.no_grad()
    def follow(self, where: Where) -> None:
        """Round the copies, if any, to the shards."""
        if self._copied:
            for shard, master in zip(self._shards, self.stepped, strict=True):
                where(shard).copy_(where(master), non_blocking=True)

    def tensors(self, *, on_host: bool = False) -> list[Tensor]:
        """Return what it holds beside the shards, on the accelerator or the host."""
        if on_host != self._on_host:
            return []
        return [*self.moments.tensors(), *(self.stepped if self._copied else ())]

    @property
    def host_bytes(self) -> int:
        return sum(value.nbytes for value in self.tensors(on_host=True))


class MovingAverage:
    """Average the weights over steps: a = decay * a + (1 - decay) * w (Polyak and Juditsky 1992, exponential weights).

    Owns this rank's part of it: float32, on the host.
    """

    def __init__(self, shards: Sequence[Tensor], decay: float) -> None:
        """`shards`: what is trained, on the accelerator now; they stay the same tensors."""
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
        """Replace the shards by the averages until the end of the block."""
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
    """The optimizer steps of one iteration; but for `metrics` the same on every rank."""

    # Over the steps evaluated; None where there was nothing to learn
    mean: Numbers | None
    steps: int  # optimizer steps made
    lr: float  # of the last step
    tokens: int = 0  # that went through the model over all ranks, prompts included, in each epoch anew
    # Further steps, which were not finite, the same on every rank
    skipped: tuple[str, ...] = ()
    imbalance: float = 0.0  # share of the slowest step's time that was lost to waiting for its slowest rank
    # What else is to be reported
    metrics: Metrics = dataclasses.field(default_factory=dict)


def mean_of(steps: Sequence[Numbers]) -> Numbers | None:
    """Return the mean over steps by name; None of none."""
    if steps:
        return {
            name: sum(step[name] for step in steps) / len(steps) for name in steps[0]
        }
    return None


class Trainer:
    """Owns optimizer and average, and the count of steps, which the learning rate depends on; borrows the model."""

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
        """`iterations`: of the whole run. `component`: that trains, for errors. `ema_decay` None: keep no average."""
        self._model = model
        self._config = config
        self._ranks = ranks
        self._iterations = iterations
        self._component = component
        self.steps_made = 0
        self._may_skip = _MOST_SKIPPED if on_poison == "skip" else 0
        self._skipped = 0  # in a row
        self._notes: list[str] = []  # of steps that were skipped since `take_skipped`
        self.optimizer = Adam(model.trained_shards(), config)
        self.average = (
            None
            if ema_decay is None
            else MovingAverage(model.trained_shards(), ema_decay)
        )

    @property
    def host_bytes(self) -> int:
        """Bytes that are always on the host."""
        return self.optimizer.host_bytes + (
            self.average.host_bytes if self.average else 0
        )

    def learning_rate(self, iteration: int) -> float:
        return learning_rate(
            self._config, self.steps_made, iteration / self._iterations
        )

    def sum_over_ranks(
        self, names: Sequence[str], shares: Tensor, iteration: int
    ) -> Numbers | None:
        """Sum this rank's `shares` of means over ranks, by `names`, with the gradient norm before clipping.

        A collective. For a number that is not finite, on all ranks: None where that is skipped, with the gradients
        dropped, so that there is nothing to step by; else, and after so many of these in a row, DivergedError.
        """
        numbers = dict(
            zip(
                (*names, "grad_norm"),
                self._model.sum_shares(shares).tolist(),
                strict=True,
            )
        )
        if math.isfinite(sum(numbers.values())):
            self._skipped = 0
            return numbers
        where = self._ranks_at_fault(shares)
        error = self._diverged(numbers, where, iteration)
        self._skipped += 1
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
        """Return a line for each step that was skipped since the last call."""
        notes = tuple(self._notes)
        self._notes = []
        return notes

    def _ranks_at_fault(self, shares: Tensor) -> str:
        """Name the ranks whose share of the loss is not finite, or of the gradient alone. A collective."""
        faults = torch.zeros(2, self._ranks.world_size, device=shares.device)
        for at, tensors in enumerate(([shares], self._model.own_gradients())):
            faults[at, self._ranks.rank] = float(
                not all(bool(tensor.isfinite().all()) for tensor in tensors)
            )
        loss, gradient = self._ranks.sum(faults.flatten()).view(2, -1).tolist()
        what, by_rank = ("loss", loss) if any(loss) else ("gradient", gradient)
        ranks = [str(rank) for rank, fault in enumerate(by_rank) if fault]
        return f"{what} of rank {', '.join(ranks) or 'none: the sum of all'}"

    def _diverged(self, numbers: Numbers, where: str, iteration: int) -> DivergedError:
        again = f", {self._skipped} times in a row before" if self._skipped else ""
        return DivergedError.about(
            "diverged",
            f"{self._component} rank {self._ranks.rank}",
            f"the update of iteration {iteration} is not a finite number",
            got=f"{', '.join(f'{name} {value:g}' for name, value in numbers.items())}"
            f"     (step {self.steps_made} of the run{again}; {where})",
            why="a reward or observation is too large, or the policy left the range of its numbers",
            fix=f"{self._component}.optimizer.lr=<smaller>; or faults.on_poison=skip, where it is a step in thousands",
        )

    @torch.no_grad()
    def step(self, gradient_norm: float, lr: float) -> None:
        """Clip the gradients to the global norm `max_grad_norm` (Pascanu et al. 2013, algorithm 1), step, drop them.

        `clip_grad_norm_` would be several collectives of its own; here the norm shares one with the other numbers.
        """
        gradients = self._model.gradients()
        if gradient_norm > self._config.max_grad_norm:
            torch._foreach_mul_(gradients, self._config.max_grad_norm / gradient_norm)
        self.optimizer.step(gradients, lr)
        self._model.end_step()
        self.steps_made += 1
        if self.average is not None:
            self.average.update()
