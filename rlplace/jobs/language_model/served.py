"""The job of a training API: clients ask for passes, steps and samples over HTTP, and no data are the job's own.

::

    sync       actor pushes weights ─▶ rollout pulls them
    rollout    env passes on requests for samples ⇄ rollout answers them
    learn      env passes on training requests ⇄ the actor carries them out; policy version + 1

The config, the memory, the checkpoints and the exports are those of the job on language models. The seconds are
predicted from whole calls that were measured, as those of a custom job.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping

from rlplace.checks import names, processes, waste
from rlplace.checks.rule import Rule, broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.config.schema import Config
from rlplace.contract.job import Job
from rlplace.contract.stages import Stage, Work, full, weights
from rlplace.errors import Problem
from rlplace.jobs.language_model.plan import deliveries_of
from rlplace.jobs.language_model.rules import (
    batches,
    engines,
    families,
    parallel,
    sampling,
    served,
    trained,
)
from rlplace.jobs.language_model.rules.case import PlacedTextJob, PlannedJob
from rlplace.jobs.language_model.rules.machine import launch_problems
from rlplace.jobs.language_model.rules.own_engine import own_engine_problems
from rlplace.jobs.language_model.staged import StagedTextJob
from rlplace.jobs.notes import missing_problems
from rlplace.models.folders import existing_folder
from rlplace.models.tied_heads import head_problems
from rlplace.models.unused_layers import layer_problems
from rlplace.placement.channels import ChannelPlan, channel_plan, plan_weights
from rlplace.placement.counts import Count
from rlplace.placement.flow import Delivery
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Needs
from rlplace.report.sinks import Column, Console
from rlplace.report.summary import Measures, Progress
from rlplace.workers.arguments import (
    COMMANDS,
    COMPLETIONS,
    REQUESTS,
    RESULTS,
    WEIGHTS,
)
from rlplace.workers.facts import JobFacts
from rlplace.workers.roles.served import ApiWorker, ServedActor, ServedRollout

_PLACED: tuple[Rule[PlacedTextJob], ...] = (
    *names.RULES,
    *processes.RULES,
    *batches.RULES,
    *served.PLACED,
)
# Subjects of numbers that a training API does not have
_OF_ITERATIONS = ("samples", "steps")
_WARNINGS: tuple[Rule[PlacedTextJob], ...] = (*waste.WARNINGS, *trained.WARNINGS)


class ServedJob(StagedTextJob):
    """The job of `algorithm.name: serve`."""

    config_rules = served.CONFIG
    placed_rules = _PLACED
    placed_warnings = _WARNINGS

    def __init__(self) -> None:
        Job.__init__(
            self,
            name="language_model",
            components={
                "actor": ServedActor,
                "env": ApiWorker,
                "rollout": ServedRollout,
            },
            stages=[
                Stage("sync", weights("actor", to="rollout")),
                Stage(
                    "rollout",
                    full("env").calls("sample"),
                    full("rollout").calls("generate"),
                ),
                Stage(
                    "learn",
                    full("env").calls("train"),
                    full("actor").calls("learn"),
                    trains=True,
                ),
            ],
        )

    # ── its plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def planned_channels(
        self, config: LanguageModelJobConfig, placement: HybridComponentPlacement
    ) -> Iterator[ChannelPlan]:
        return _channels(config, placement)

    def planned_deliveries(
        self, config: LanguageModelJobConfig, placement: HybridComponentPlacement
    ) -> tuple[Delivery, ...]:
        return deliveries_of(config, placement)

    def counts(self, config: LanguageModelJobConfig, plan_: Plan) -> tuple[Count, ...]:
        found = super().counts(config, plan_)
        # Clients say how many samples there are, and when a step is made
        return tuple(each for each in found if each.subject not in _OF_ITERATIONS)

    # ── its checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def environment_problems(self, config: LanguageModelJobConfig) -> Iterator[Problem]:
        folder = existing_folder(config.model)
        if folder is not None:
            yield from layer_problems(folder)
            yield from head_problems(folder)
        if config.rollout.own:
            yield from own_engine_problems(config.rollout)

    def plan_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        yield from broken(served.RULES, config)
        if config.missing:
            yield from missing_problems(config)
            return
        case = PlannedJob(config=config, plan=plan_)
        yield from trained.problems(config)
        yield from broken(engines.OF_MODEL, engines.ServedModel.of(case))
        yield from broken(trained.SYNC, config)
        yield from broken(parallel.RULES, case)
        yield from broken(families.RULES, case)
        yield from broken(engines.RULES, config)
        yield from broken(sampling.RULES, config)

    def launch_problems(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Iterable[Problem]:
        return launch_problems(config, plan_, reads_prompts=False)

    # ── its run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def facts(self, config: Config, plan: Plan) -> JobFacts:
        # The workers of language models send their weights by themselves
        return dataclasses.replace(super().facts(config, plan), syncs=())

    def variables(self, config: LanguageModelJobConfig) -> Collection[str]:
        name = config.serve.api_key_env
        # The worker of the server finds it in its environment
        os.environ.setdefault(name, _made_key())
        return (name,)

    def start_text(self, config: Config) -> str:
        """Return how a client reaches the server. A key that was made is told, one from the environment is not."""
        assert isinstance(config, LanguageModelJobConfig)
        serve = config.serve
        name = serve.api_key_env
        key = f'"${name}"'
        if os.environ.get(name, _made_key()) == _made_key():
            key = _made_key()
        return f"clients    export TINKER_BASE_URL=http://{serve.host}:{serve.port} TINKER_API_KEY={key}"

    def resume_notes(
        self,
        config: LanguageModelJobConfig,
        differences: Mapping[str, tuple[object, object]],
        iteration: int,
    ) -> list[str]:
        """Return how a client reaches the server: a run that is resumed prints no start text."""
        return [f"    {self.start_text(config)}"]

    def work(self, config: LanguageModelJobConfig, needs: Needs) -> Work:
        return dataclasses.replace(Job.work(self, config, needs), collects=False)

    def measures(self, config: LanguageModelJobConfig) -> Measures:
        return Measures(
            score="",
            score_name="",
            steps="requests",
            counts={"tokens_learned": "actor/tokens", "answers": "env/answers"},
        )

    def console(self, config: LanguageModelJobConfig, plan_: Plan) -> Console:
        columns = (
            Column("samples", "env/answers", ",.0f", 9),
            Column("passes", "actor/passes", ",.0f", 8),
            Column("steps", "actor/optimizer_steps", ",.0f", 7),
            Column("failed", "env/training_requests_failed", ",.0f", 8),
            Column("loss sum", "actor/loss_sum", ".4g", 10),
            Column("grad norm", "actor/grad_norm", ".3g", 10),
            Column("sync s", "time/sync_s", ".2f", 8),
            Column("rollout s", "time/rollout_s", ".2f", 10),
            Column("learn s", "time/learn_s", ".2f", 8),
        )
        return Console("requests", columns)

    def evaluates_every(self, config: LanguageModelJobConfig) -> int:
        return 0

    def count(
        self,
        config: LanguageModelJobConfig,
        progress: Progress,
        numbers: dict[str, float],
    ) -> None:
        asked = numbers.get("env/sample_requests", 0)
        trained_ = numbers.get("env/training_requests", 0)
        progress.add(numbers, int(asked + trained_))

    def replaceable(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        return ("rollout",)

    def replaced_by_going_back(
        self, config: LanguageModelJobConfig, plan_: Plan
    ) -> Collection[str]:
        return ()

    def stateful(self, config: LanguageModelJobConfig, plan_: Plan) -> tuple[str, ...]:
        return ("actor",)

    def divided(self) -> Mapping[str, str]:
        return {"actor": "state is sharded over"}


@functools.cache
def _made_key() -> str:
    """Return the key of this process, which its clients need if the environment has none. The client wants its form."""
    return f"tml-{secrets.token_urlsafe(24)}"


def _channels(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[ChannelPlan]:
    """Yield the channels of a run."""
    most = config.algorithm.prompts or 1
    engines_ = placement.world_size("rollout")
    yield channel_plan(
        placement,
        REQUESTS,
        "env",
        "rollout",
        most + engines_,
        f"{most} requests of clients at a time, and the end of the iteration for each rollout rank",
    )
    yield channel_plan(
        placement,
        COMPLETIONS,
        "rollout",
        "env",
        [max(64, 2 * most)],
        "answers, which env takes while more come",
    )
    yield channel_plan(
        placement, COMMANDS, "env", "actor", 2, "one command at a time, and the end"
    )
    yield channel_plan(
        placement, RESULTS, "actor", "env", 2, "the result of one command at a time"
    )
    yield plan_weights(placement, WEIGHTS, "actor", "rollout")
