"""Blocks that every job has, also one of the user's own: memory proof, run, checkpoints and faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlplace.config.fields import knob, lm_knob, simulator_knob
from rlplace.config.own import OwnName

OnPoison = Literal["stop", "skip"]
OnError = Literal["stop", "skip", "retry"]
SinkName = Literal[
    "console", "jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"
]

# Larger numbers are typing mistakes.
MOST_SAMPLES = 10**4
# Held-out prompts of an evaluation if a task has no end
ENDLESS_HELD_OUT = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallbackConfig:
    """A custom class that is called between iterations and when a run ends.

    `kwargs`: keyword arguments of the class, after the run's folder and config.
    """

    name: OwnName = knob("package.module:Class with on_iteration, on_end or both")
    kwargs: Mapping[str, object] = knob(
        "arguments of the class, after the run folder and the config", dict
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How the memory proof counts, and what follows if a job does not fit."""

    check: Literal["refuse", "warn"] = knob(
        "what happens to a job that does not fit: error, or a warning and a run",
        "refuse",
    )
    reserve: int | float | Literal["auto"] = knob(
        "memory of each accelerator that stays free: 4 %, or 2GiB; auto: 4 % of a GPU, 0 of an emulated one",
        "auto",
        unit="share or bytes",
    )
    verify: Literal["warn", "stop"] = knob(
        "if an accelerator holds more after a move than planned plus the reserve: warn, or end the run",
        "warn",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """When a run ends, where its files go, and the longest time of each operation."""

    total_iterations: int = knob("number of iterations of the run", 100, minimum=1)
    stop_at_return: float | None = knob(
        "stop earlier once the mean return or reward reaches this", None
    )
    stop_at_eval: float | None = knob(
        "stop earlier once an evaluation has this mean reward or return", None
    )
    eval_patience: int = knob(
        "stop earlier after this number of evaluations without a better result; 0: never",
        0,
        minimum=0,
    )
    eval_every: int = knob(
        "iterations between evaluations: held-out prompts, or whole episodes; 0: none",
        0,
        minimum=0,
    )
    eval_episodes: int = simulator_knob(
        "whole episodes of one evaluation, played by the likeliest actions",
        20,
        minimum=1,
    )
    eval_prompts: int | None = lm_knob(
        "held-out prompts of a pass, equal in all passes; null: all, of a task without end 32",
        None,
        minimum=1,
    )
    eval_samples: int = lm_knob(
        "answers to each of them: 1, greedily; or more, drawn as in training",
        1,
        minimum=1,
        maximum=MOST_SAMPLES,
    )
    eval_temperature: float | None = lm_knob(
        "draw them, also one, at this temperature; 0: greedily; null: as eval_samples says",
        None,
        minimum=0,
    )
    eval_top_p: float | None = lm_knob(
        "draw them from the likeliest tokens that together have this probability; null: as rollout.top_p",
        None,
        above=0,
        maximum=1,
        unit="share",
    )
    samples: int = lm_knob(
        "samples of each iteration that are kept as text to be read; 0: none",
        4,
        minimum=0,
    )
    seed: int = knob(
        "seed of everything random; engines have rollout.seed", 0, minimum=0
    )
    output_dir: str = knob(
        "folder in which each run creates a folder of its own", "runs"
    )
    sinks: tuple[SinkName | OwnName, ...] = knob(
        "loggers of metrics; your own logger: package.module:Name",
        ("console", "jsonl", "tensorboard"),
    )
    callbacks: tuple[CallbackConfig, ...] = knob(
        "called after each iteration, and when the run ends", ()
    )
    stage_timeout_s: float = knob(
        "longest time one stage may take", 3600.0, above=0, simulator=600.0
    )
    channel_timeout_s: float = knob(
        "longest wait for one item of a channel", 1800.0, above=0, simulator=120.0
    )
    watchdog_s: float = knob(
        "if nothing happens for these seconds, report which component waits for which; 0: never",
        300.0,
        minimum=0,
        simulator=30.0,
    )
    requeue_exit_code: int | None = knob(
        "exit code after a signal of a scheduler, if there is a checkpoint; null: 128 + signal",
        None,
        minimum=1,
        maximum=255,
    )

    @property
    def usual_eval_prompts(self) -> int:
        """The number of held-out prompts of a pass as far as the config tells it; a data set may have more or fewer."""
        return self.eval_prompts or ENDLESS_HELD_OUT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What checkpoints contain and when they are written, for `resume`."""

    every: int = knob(
        "iterations between two checkpoints; 0: none but the last", 10, minimum=0
    )
    keep_last: int = knob("number of newest checkpoints that are kept", 2, minimum=1)
    keep_best: int = knob(
        "number of best checkpoints that are also kept: by evaluation, or else by return or reward",
        0,
        minimum=0,
    )
    on_signal: bool = knob(
        "save one more when a signal such as Ctrl-C or SIGTERM stops the run", True
    )
    grace_s: float = knob(
        "seconds from this signal to the end of the run, which finishes the iteration and saves",
        30.0,
        above=0,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """How a run reacts to failures."""

    on_poison: OnPoison = knob(
        "reaction to an observation, reward, loss or gradient that is not finite: end the run, or leave it out",
        "stop",
    )
    on_error: OnError = lm_knob(
        "reward, reply, fact or endpoint that fails: stop the run; skip the episode; or retry, twice more, then skip",
        "stop",
    )
    error_budget: int = lm_knob(
        "most episodes of a rank and iteration that are so skipped", 16, minimum=0
    )
    restarts: int = knob(
        "most recoveries from lost workers and nodes per hour; 0: the first failure ends the run",
        6,
        minimum=0,
    )
    on_node_loss: Literal["fail", "wait", "replan"] = knob(
        "end the run; wait for another machine; or plan for the remaining machines; both resume from a checkpoint",
        "fail",
    )
    node_wait_s: float = knob(
        "seconds to wait for another machine in place of a lost one", 600.0, minimum=0
    )
    heartbeat_s: float = knob(
        "replace a busy worker that gives no sign of life for these seconds; 0: never",
        60.0,
        minimum=0,
    )
