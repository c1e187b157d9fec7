"""Read, check and plan the job of a config, the same for `plan`, `train dry_run=true` and `train`.

Nothing is started, and no GPU is needed. What is wrong is raised, whatever the job is prepared for. What can be planned
and not run is listed in `Prepared.not_run`: a plan shows it, a run refuses it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.cli.checks import check_env, check_plan
from rlplace.config.compose import Composed
from rlplace.config.model_folder import with_folder
from rlplace.config.read import read_config
from rlplace.config.schema import Config, SimulatorEnvConfig
from rlplace.envs import describe
from rlplace.errors import ConfigError, Problem, ProblemsError, Source
from rlplace.placement.counts import explain_counts
from rlplace.placement.memory.case import memory_case
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan, make_plan
from rlplace.placement.show.view import PlanView, view_plan
from rlplace.workers.launch.machines import declared_topology

# Codes of what can be planned and not run: for want of workers, or here, where the data set is not.
PLAN_ONLY = ("plan-only", "no-dataset", "missing-library")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A valid job; its view shows whether it fits."""

    config: Config  # with the keys of its models' config.json
    plan: Plan
    case: MemoryCase
    view: PlanView
    mapping: Mapping[str, Any]  # the config as it was composed
    sources: Mapping[str, Source]
    not_run: tuple[Problem, ...]  # why it can be planned and not run


def prepare(
    mapping: Mapping[str, Any],
    *,
    name: str = "config",
    sources: Mapping[str, Source] | None = None,
    measured: Measurements | None = None,
    simulator: bool = False,
) -> Prepared:
    """Prepare the job of a config given as plain values, such as a YAML file holds.

    `simulator`: build one to count the weights of the policy that learns from it; else they are not counted. Raises
    ConfigError, PlacementError or ClusterError with every problem.
    """
    places = sources or {}
    config = with_folder(read_config(mapping, places), places)
    topology = declared_topology(config.cluster, places)
    problems = check_env(config, places)
    try:
        plan = make_plan(config, topology, places)
    except ProblemsError as error:
        raise type(error)([*error.problems, *_wrong(problems)]) from None
    problems += check_plan(config, plan, places)
    build = simulator and isinstance(config.env, SimulatorEnvConfig) and not problems
    spaces = describe(config.simulator_env) if build else None
    try:
        case = memory_case(plan, config, spaces, measured)
    except ConfigError as error:
        raise ConfigError([*_wrong(problems), *error.problems]) from None
    if wrong := _wrong(problems):
        raise ConfigError(wrong)
    view = view_plan(plan, case, name=name, counts=explain_counts(config, plan.placement))
    return Prepared(
        config=config, plan=plan, case=case, view=view, mapping=mapping, sources=places, not_run=tuple(problems)
    )


def _wrong(problems: Sequence[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.code not in PLAN_ONLY]


def prepare_composed(composed: Composed, measured: Measurements | None = None, *, simulator: bool = False) -> Prepared:
    """Prepare what `compose.with_hydra` returns."""
    name, sources = composed.name, composed.sources
    return prepare(composed.mapping, name=name, sources=sources, measured=measured, simulator=simulator)


def planned_only(problems: Sequence[Problem]) -> str:
    """Explain why a job can be planned and not run."""
    texts = "\n".join(problem.render() for problem in problems)
    return f"\nthis job can be planned, not run:\n{texts}"
