"""All rules of a planned job on language models, in the order in which their problems are shown."""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.checks import evaluation
from rlplace.checks.rule import broken
from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.errors import Problem
from rlplace.jobs.language_model.rules import (
    engines,
    experts,
    families,
    images,
    parallel,
    sampling,
    scorers,
    signal,
    trained,
)
from rlplace.jobs.language_model.rules.case import PlannedJob
from rlplace.jobs.language_model.rules.positions import position_problems
from rlplace.jobs.notes import missing_problems
from rlplace.placement.plan import Plan


def plan_problems(config: LanguageModelJobConfig, plan: Plan) -> Iterator[Problem]:
    """Yield the problems for which a run of the plan would fail on any machine."""
    if not config.runs:
        yield from missing_problems(config)
        return
    case = PlannedJob(config=config, plan=plan)
    yield from broken(parallel.ENV, case)
    yield from trained.problems(config)
    yield from scorers.problems(config, plan.placement.components)
    yield from position_problems(config, plan.placement.components, generates=True)
    yield from broken(engines.OF_MODEL, engines.ServedModel.of(case))
    yield from broken(trained.SYNC, config)
    yield from broken(engines.PLANNED, case)
    yield from broken(experts.RULES, case)
    yield from broken(parallel.RULES, case)
    yield from broken(families.RULES, case)
    yield from broken(images.RULES, case)
    yield from broken(engines.RULES, config)
    yield from broken(sampling.RULES, config)
    yield from broken(signal.RULES, config)
    yield from broken(evaluation.RULES, config)
