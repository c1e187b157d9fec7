"""The job of supervised fine-tuning (SFT) of a language model: rows have written answers, and nothing generates.

::

    read     env puts the rows of an iteration as tokens
    learn    the actor updates; policy version + 1

    evaluate: env puts held-out rows, the actor computes their loss; before learn, and after the last iteration

The config, the data, the memory, the checkpoints and the exports are those of the job on language models. The seconds
are predicted from whole calls that were measured, as those of a custom job.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from rlplace.checks import evaluation, names, processes, waste
from rlplace.checks.rule import Rule, broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.schema import Config
from rlplace.contract.job import Job
from rlplace.contract.stages import Call, Stage, Step, Work, full
from rlplace.envs.registry import find_task, make_task, unknown_arguments
from rlplace.envs.text.held_out import held_out_warnings
from rlplace.errors import ConfigError, Problem
from rlplace.jobs.language_model.rules import (
    batches,
    experts,
    families,
    parallel,
    trained,
    unused,
)
from rlplace.jobs.language_model.rules.case import PlacedTextJob, PlannedJob
from rlplace.jobs.language_model.rules.machine import actor_problems
from rlplace.jobs.language_model.rules.positions import position_problems
from rlplace.jobs.language_model.staged import StagedTextJob
from rlplace.jobs.notes import missing_problems
from rlplace.metrics import CUT_ROWS
from rlplace.models.folders import existing_folder
from rlplace.models.template_dates import date_problems
from rlplace.models.tied_heads import head_problems
from rlplace.models.unused_layers import layer_problems
from rlplace.placement.channels import ChannelPlan, channel_plan
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Needs
from rlplace.report.sinks import Column, Console
from rlplace.report.summary import Measures, Progress
from rlplace.workers.arguments import HELD_OUT, SAMPLES
from rlplace.workers.roles.supervised import RowsWorker, SupervisedActor

_LEARN = "learn"
_PLACED: tuple[Rule[PlacedTextJob], ...] = (
    *names.RULES,
    *processes.RULES,
    *batches.RULES,
)
_WARNINGS: tuple[Rule[PlacedTextJob], ...] = (*waste.WARNINGS, *trained.WARNINGS)


class SupervisedJob(StagedTextJob):
    """The job of `algorithm.name: sft`."""

    config_rules = unused.PLACED
    placed_rules = _PLACED
    placed_warnings = _WARNINGS

    def __init__(self) -> None:
        Job.__init__(
            self,
            name="language_model",
            components={"actor": SupervisedActor, "env": RowsWorker},
            stages=[
                Stage("read", full("env").calls("read")),
                Stage(_LEARN, full("actor").calls("learn"), trains=True),
            ],
        )

    # ── its plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def planned_channels(
        self, config: LanguageModelJobConfig, placement: HybridComponentPlacement
    ) -> Iterator[ChannelPlan]:
        return _channels(config, placement)

    # ── its checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def environment_problems(self, config: LanguageModelJobConfig) -> Iterator[Problem]:
        try:
            if config.env.task is not None:
                kind = find_task(config.env.task)
                yield from unknown_arguments(
                    kind,
                    config.env.kwargs,
                    given=("seed", "split"),
                    key="env.kwargs",
                    code="bad-task-kwargs",
                )
        except ConfigError as error:
            yield from error.problems
            return
        folder = existing_folder(config.model)
        if config.missing or folder is None:
            return
        if config.runner.eval_every:
            yield from _held_out_problems(config)
        yield from _columns(config)
        yield from layer_problems(folder)
        yield from head_problems(folder)
        if config.env.chat:
            yield from date_problems(folder, config.env.template)

    def plan_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        yield from broken(unused.RULES, config)
        if config.missing:
            yield from missing_problems(config)
            return
        case = PlannedJob(config=config, plan=plan_)
        yield from broken(parallel.ENV, case)
        yield from trained.problems(config)
        components = plan_.placement.components
        yield from position_problems(config, components, generates=False)
        yield from broken(parallel.RULES, case)
        yield from broken(experts.RULES, case)
        yield from broken(families.RULES, case)
        yield from broken(evaluation.RULES, config)

    def launch_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        return actor_problems(config, _row_problems)

    # ── its run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def through_host(self, config: Config, plan_: Plan) -> list[str]:
        return []

    def work(self, config: LanguageModelJobConfig, needs: Needs) -> Work:
        work = Job.work(self, config, needs)
        calls = (
            Call(component="env", method="evaluate"),
            Call(component="actor", method="evaluate"),
        )
        return dataclasses.replace(
            work,
            evaluation=Step(name="evaluate", calls=calls),
            evaluated_in=_LEARN,
            collects=False,
        )

    def measures(self, config: LanguageModelJobConfig) -> Measures:
        return Measures(
            score="actor/token_accuracy",
            score_name="accuracy",
            evaluated="eval/accuracy",
            steps="rows",
            counts={
                "samples": "actor/samples",
                "tokens_learned": "actor/tokens_learned",
            },
            signs=("no-gradient",),
            learned=("actor/loss", "eval/loss", "actor/entropy", "actor/grad_norm"),
        )

    def console(self, config: LanguageModelJobConfig, plan_: Plan) -> Console:
        columns = [
            Column("loss", "actor/loss", ".4f", 9),
            Column("right tokens", "actor/token_accuracy", ".1%", 13),
        ]
        if config.runner.eval_every:
            columns.append(Column("held-out loss", "eval/loss", ".4f", 14))
            columns.append(Column("right rows", "eval/accuracy", ".1%", 11))
        columns += [
            Column("grad norm", "actor/grad_norm", ".3g", 10),
            Column("lr", "actor/lr", ".2e", 9),
            Column("tokens/s", "actor/tokens_per_s", ",.0f", 9),
            Column("learn s", "time/learn_s", ".2f", 8),
        ]
        return Console("rows", tuple(columns))

    def count(
        self,
        config: LanguageModelJobConfig,
        progress: Progress,
        numbers: dict[str, float],
    ) -> None:
        progress.add(numbers, int(numbers.get("actor/samples", 0)))

    def remarks(
        self, numbers: Mapping[str, float], notes: Mapping[str, Iterable[str]]
    ) -> list[str]:
        found = super().remarks(numbers, {k: list(v) for k, v in notes.items()})
        for name, lines in notes.items():
            if name.rpartition("/")[2] == CUT_ROWS:
                found += lines
        return found

    def replaceable(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        return ("env",)

    def replaced_by_going_back(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        return ()

    def stateful(self, config: LanguageModelJobConfig, plan_: Plan) -> tuple[str, ...]:
        return ("actor",)


def _channels(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[ChannelPlan]:
    """Yield the channels of a run: rows to learn, of a whole iteration, and held-out rows, which may wait for room."""
    yield channel_plan(
        placement,
        SAMPLES,
        "env",
        "actor",
        config.algorithm.prompts or 1,
        "all rows of an iteration wait there for learn",
    )
    ends = placement.world_size("env")
    yield channel_plan(
        placement,
        HELD_OUT,
        "env",
        "actor",
        config.runner.usual_eval_prompts + ends,
        "held-out rows, which the actor takes while env reads more, and the end of each env rank",
    )


def _row_problems(config: LanguageModelJobConfig, folder: Path) -> Iterable[Problem]:
    """Return the problems of the rows that can be checked before a run. `folder`: of the model."""
    # Imported here: a plan reads no rows
    from rlplace.workers.roles.answered_rows import check_rows

    return check_rows(config, folder)


def _columns(config: LanguageModelJobConfig) -> Iterator[Problem]:
    """Yield warnings about columns of a data set that belong to the prompt. Other checks report a wrong task."""
    from rlplace.envs.text.probe import column_warnings, reader

    with contextlib.suppress(ConfigError):
        task = make_task(config.env, seed=config.runner.seed, split="train")
        yield from column_warnings(task, reader(None, config.env.system))


def _held_out_problems(config: LanguageModelJobConfig) -> Iterator[Problem]:
    """Yield warnings about held-out rows that are learned as well, and the problems of the task that has the rows."""
    from rlplace.workers.roles.prompts import rendered_by

    env = config.env
    folder = existing_folder(config.model)
    assert folder is not None, "the caller has found it"
    try:
        train = make_task(env, seed=config.runner.seed, split="train")
        held_out = make_task(env, seed=env.eval_seed, split="held_out")
    except ConfigError as error:
        yield from error.problems
        return
    asked = config.runner.eval_prompts
    yield from held_out_warnings(train, held_out, asked, rendered_by(config, folder))
