"""From a composed config to its plan and the report on it, for every kind of job; starts nothing, needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplace.config import SimulatorEnvConfig, read_config
from rlplace.config.compose import Composed
from rlplace.errors import ConfigError, Problem, Source
from rlplace.model_folder import with_folder
from rlplace.placement.counts import Count, explain_counts
from rlplace.placement.llm import llm_memory_case, make_llm_layout
from rlplace.placement.memory import Measurements, PolicySpaces, memory_case, read_measurements
from rlplace.placement.plan import make_plan
from rlplace.placement.show.diff import render_diff
from rlplace.placement.show.explain import explain_accelerator, explain_component, explain_pair
from rlplace.placement.show.html import render_html
from rlplace.placement.show.json import render_json
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_text
from rlplace.placement.show.view import PlanView, view_plan
from rlplace.placement.transfers import AnyPlan
from rlplace.workers.machines import declared_topology

__all__ = [
    "PlanView",
    "explain_accelerator",
    "explain_component",
    "explain_pair",
    "measurements",
    "render_diff",
    "render_html",
    "render_json",
    "render_svg",
    "render_text",
    "report_on",
    "report_on_composed",
]


def report_on(
    mapping: Mapping[str, Any],
    *,
    name: str = "config",
    sources: Mapping[str, Source] | None = None,
    measured: Measurements | None = None,
    describe: Callable[[SimulatorEnvConfig], PolicySpaces] | None = None,
) -> PlanView:
    """The report on a config given as plain values, such as a YAML file holds.

    `describe` builds a simulator to say what it shows and takes (`rlplace.envs.describe`); without it, the weights of
    a policy that learns from a simulator are not counted. Raises ConfigError, PlacementError or ClusterError; that
    something does not fit is no error here: `report.fits`.
    """
    places = sources or {}
    plan: AnyPlan
    counts: tuple[Count, ...] = ()
    config = read_config(mapping, places)
    if config.kind == "causal_lm":
        config = with_folder(config, places)
        plan = make_llm_layout(config, declared_topology(config.cluster, places), places)
        case = llm_memory_case(plan, config, measured)
        counts = explain_counts(config, plan.placement)
    else:
        plan = make_plan(config, declared_topology(config.cluster, places), sources=places)
        case = memory_case(plan, config, describe(config.simulator_env) if describe is not None else None, measured)
    return view_plan(plan, case, name=name, counts=counts)


def report_on_composed(
    composed: Composed,
    measured: Measurements | None = None,
    describe: Callable[[SimulatorEnvConfig], PolicySpaces] | None = None,
) -> PlanView:
    """The same for what `compose.with_hydra` returns."""
    return report_on(
        composed.mapping, name=composed.name, sources=composed.sources, measured=measured, describe=describe
    )


def measurements(file: str) -> Measurements:
    """What an earlier run measured, from its `memory.json`. Raises ConfigError."""
    try:
        record = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        fix = "--measured <folder of a run>/memory.json"
        raise ConfigError(
            [Problem(code="not-measurements", key="--measured", what="cannot be read", got=file, why=why, fix=fix)]
        ) from error
    return read_measurements(record, key=file)
