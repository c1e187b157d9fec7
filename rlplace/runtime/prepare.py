"""Read, check and plan the job of a config, in the same way for `plan`, `train dry_run=true` and `train`.

Nothing is started, and no GPU is needed. Errors are raised for all three commands alike. A job that can be planned but
not run has the reasons in `Prepared.not_run`: a plan shows them, a run raises them. Modules that need numpy or torch
are imported inside functions, since a plan is checked without them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplace.checks import unplaced
from rlplace.codes import problem
from rlplace.config.compose import Composed
from rlplace.config.found import value_at
from rlplace.config.from_environment import with_numbers
from rlplace.config.keys import PLACEMENT
from rlplace.config.open_job import OpenConfig
from rlplace.config.schema import Config
from rlplace.config.which_job import TAGS
from rlplace.config.worker_variables import missing_variables, wrong_variables
from rlplace.contract.planning import make_plan
from rlplace.contract.reading import try_job
from rlplace.contract.registry import job_of
from rlplace.envs.registry import (
    missing_library,
)
from rlplace.envs.text.held_out import WARNINGS
from rlplace.envs.text.probe import WARNINGS as OF_REWARDS
from rlplace.errors import (
    ClusterError,
    ConfigError,
    PlacementError,
    Problem,
    ProblemsError,
    Source,
    with_sources,
)
from rlplace.models import template_dates, unused_layers
from rlplace.placement.machines.topology import Topology
from rlplace.placement.memory.ledger import Measurements, MemoryCase
from rlplace.placement.plan import Plan
from rlplace.placement.show.svg import render_svg
from rlplace.placement.show.text import render_diff, render_text
from rlplace.placement.show.view import PlanView, view_plan
from rlplace.report.callbacks import check_callbacks
from rlplace.report.trackers import check_sinks
from rlplace.runtime.changes import PlannedChange, moved, plan_changes
from rlplace.workers.launch.machines import declared_topology

_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set in the processes of `ray job submit`
_JOBS_FOLDERS = "working_dir_files"  # where Ray puts what a job is submitted with
# Blocks that have no influence on the placement.
_NOT_PLACING = (
    "env",
    "rollout",
    "actor",
    "runner",
    "checkpoint",
    "faults",
    "memory",
)
# Codes of problems with which a job can be planned but not run: missing workers, a missing data set, library or module
# of a reward function.
PLAN_ONLY = ("plan-only", "no-dataset", "missing-library", "no-reward-module")
_OF_MODELS = (
    "vllm-missing",
    "no-model-folder",
    "not-a-model",
    "no-tokenizer",
    "missing-key",
)
# Codes of problems of this machine that another machine may not have. A dry run shows them as notes; all other problems
# of a run are errors of a dry run too.
_LACKING = ("plan-only", "missing-library", "env-var-missing", *_OF_MODELS)


# The config of a shipped job, or of a custom job.
AnyConfig = Config | OpenConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Prepared:
    """A valid job with its plan.

    `config`: the config, with the keys of its models' config.json. `case`: the memory of the job. `view`: the plan as
    it is shown, which says whether the job fits into memory. `mapping`: the composed config as plain values. `sources`:
    key -> file and line of its value. `words`: a command line that composes the config; empty if it did not come from
    one. `not_run`: reasons why the job can be planned but not run. `changes`: the changes of the placement, each with
    the job after it.
    """

    config: Any  # of the job's own type, with the keys of its models' config.json
    plan: Plan
    case: MemoryCase
    view: PlanView
    mapping: Mapping[str, Any]  # the composed config
    sources: Mapping[str, Source]
    words: Sequence[str]  # a command line that composes the config, if it came from one
    not_run: tuple[Problem, ...]  # reasons why it can be planned but not run
    changes: tuple[PlannedChange, ...] = ()  # of its placement during the run

    @property
    def text(self) -> str:
        """The whole plan as text, as `dry_run=true` prints it."""
        return render_text(self.view)

    @property
    def picture(self) -> str:
        """The plan as an SVG picture."""
        return render_svg(self.view)

    def __repr__(self) -> str:
        return repr(self.view)

    def _repr_html_(self) -> str:
        """Return the picture of the plan, which a notebook displays."""
        return self.view._repr_html_()

    @property
    def fits(self) -> bool:
        """Whether the job fits into memory, before and after each of its changes."""
        return self.view.fits and all(each.job.view.fits for each in self.changes)

    @property
    def refused(self) -> bool:
        """Whether a run is refused, because the job does not fit into memory and `memory.check` is "refuse"."""
        return not self.fits and self.config.memory.check == "refuse"

    @property
    def all_shortages(self) -> list[Problem]:
        """The memory shortages of the job, and those of the job after each of its changes."""
        found = list(self.view.shortages)
        for change in self.changes:
            for short in change.job.view.shortages:
                what = f"after iteration {change.after}: {short.what}"
                found.append(dataclasses.replace(short, what=what))
        return found

    @property
    def shortages(self) -> str:
        """The memory shortages as text; "" if the job fits. A note is added if the job may run despite a shortage."""
        texts = [problem.render() for problem in self.all_shortages]
        if texts and not self.refused:
            texts.append(
                "memory.check: warn forces the job: it may end where memory does"
            )
        return "\n".join(texts)

    @property
    def changes_short(self) -> str:
        """A line for each change of the placement, with the components that move; "" without changes."""
        lines = []
        before = self.plan
        for change in self.changes:
            after = change.job.plan
            moves = [f"{c} {a} -> {b}" for c, (a, b) in moved(before, after).items()]
            lines.append(f"change after iteration {change.after}: {', '.join(moves)}")
            before = after
        return "\n".join(lines)

    @property
    def changes_text(self) -> str:
        """The changes of the placement as text, each as the difference of two plans; "" without changes."""
        texts = []
        before = self.view
        start = "start"
        for change in self.changes:
            left = dataclasses.replace(before, name=start)
            start = f"after {change.after}"
            right = dataclasses.replace(change.job.view, name=start)
            title = f"change after iteration {change.after}, "
            texts.append(f"{title}{render_diff(left, right)}")
            before = change.job.view
        return "\n\n".join(texts)


def prepare(
    mapping: Mapping[str, Any],
    *,
    name: str = "config",
    sources: Mapping[str, Source] | None = None,
    words: Sequence[str] = (),
    measured: Measurements | None = None,
    simulator: bool = False,
    topology: Topology | None = None,
) -> Prepared:
    """Read, check and plan the job of a config, and return it.

    `mapping`: the config as plain values, such as those of a YAML file. `name`: title of the plan. `sources`: key ->
    file and line of its value. `words`: a command line that composes the config. `measured`: component -> residency ->
    bytes on accelerators that an earlier run measured. `simulator`: whether to create a simulator to count the weights
    of the policy; otherwise they are not counted. `topology`: the machines; None: those that the config declares.
    Raises ConfigError, PlacementError or ClusterError with all problems.
    """
    places = sources or {}
    config, wrong = try_job(mapping, places)
    # Variables of the environment are texts; a number is due in some places
    if wrong and (numbers := with_numbers(mapping, places, wrong)) is not None:
        mapping = numbers
        config, wrong = try_job(mapping, places)
    if config is None or wrong:
        raise ConfigError([*wrong, *_misplaced(mapping, wrong, places)])
    job = job_of(config)
    config = job.completed(config, places)
    if topology is None:
        topology = declared_topology(config.cluster, places)
    found = check_env(config, places)
    can_run = (
        *WARNINGS,
        *OF_REWARDS,
        unplaced.WARNING,
        template_dates.WARNING,
        unused_layers.WARNING,
    )
    problems = [each for each in found if each.code not in can_run]
    warnings = [each for each in found if each.code in can_run]
    try:
        plan = make_plan(config, topology, places)
    except ProblemsError as error:
        raise type(error)([*error.problems, *_errors(problems)]) from None
    # A component with a misspelt name would be told twice before the placement is right
    unread = with_sources(job.unplaced_problems(config, places), places)
    problems += [each for each in unread if each.code not in can_run]
    warnings += [each for each in unread if each.code in can_run]
    plan = dataclasses.replace(plan, warnings=(*plan.warnings, *warnings))
    problems += check_plan(config, plan, places)
    try:
        case = job.memory(config, plan, measured, build=simulator and not problems)
    except ProblemsError as error:
        of_memory = with_sources(error.problems, places)
        raise type(error)([*_errors(problems), *of_memory]) from None
    if wrong := _errors(problems):
        raise ConfigError(wrong)
    view = view_plan(plan, case, name=name, counts=job.counts(config, plan))
    view = dataclasses.replace(
        view, shortages=tuple(with_sources(view.shortages, places))
    )
    mapping = unplaced.without_unread(mapping, warnings)

    def preparing(changed: Mapping[str, Any], at: Mapping[str, Source]) -> Prepared:
        return prepare(
            changed,
            name=name,
            sources=at,
            words=words,
            measured=measured,
            simulator=simulator,
            topology=topology,
        )

    return Prepared(
        config=config,
        plan=plan,
        case=case,
        view=view,
        mapping=mapping,
        sources=places,
        words=words,
        not_run=tuple(problems),
        changes=plan_changes(config, plan, mapping, places, preparing),
    )


def _misplaced(
    mapping: Mapping[str, Any], wrong: Sequence[Problem], sources: Mapping[str, Source]
) -> Iterator[Problem]:
    """Yield the problems of the placement texts in a config that has other errors.

    `wrong`: the other errors. Their keys are removed from a copy of the config, and the placement of the copy is
    planned. Yield nothing if the removal of these keys could itself cause problems of the placement.
    """
    left: dict[str, Any] = copy.deepcopy(dict(mapping))
    for known in wrong:
        key = known.key.partition("[")[0]
        above, _, name = key.rpartition(".")
        apart = (
            key.partition(".")[0] in _NOT_PLACING
            if above
            else "did you mean" not in known.what
        )
        placing = key in TAGS or "cluster." in (known.fix or "")
        block = value_at(left, above) if above else left
        if placing or not apart or not isinstance(block, dict) or name not in block:
            return
        del block[name]
    config, more = try_job(left, sources)
    if config is None or more:
        return
    try:
        make_plan(config, declared_topology(config.cluster, sources), sources)
    except PlacementError as error:
        yield from (
            problem
            for problem in error.problems
            if problem.key.startswith(f"{PLACEMENT}.")
        )
    except (ConfigError, ClusterError):
        return


def _errors(problems: Sequence[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.code not in PLAN_ONLY]


def prepare_composed(
    composed: Composed, measured: Measurements | None = None, *, simulator: bool = False
) -> Prepared:
    """Return the prepared job of a config that `compose.with_hydra` has composed.

    `measured`: component -> residency -> bytes on accelerators that an earlier run measured. `simulator`: whether to
    create a simulator to count the weights of the policy; otherwise they are not counted.
    """
    name = composed.name
    sources = composed.sources
    words = composed.words
    return prepare(
        composed.mapping,
        name=name,
        sources=sources,
        words=words,
        measured=measured,
        simulator=simulator,
    )


def planned_only(problems: Sequence[Problem]) -> str:
    """Return a text that lists the problems because of which a job can be planned but not run."""
    texts = "\n".join(problem.render() for problem in problems)
    return f"\nthis job can be planned, not run:\n{texts}"


# ── what a job needs beside a placement ──────────────────────────────────────────────────────────────────────────────


def check_env(config: AnyConfig, sources: Mapping[str, Source]) -> list[Problem]:
    """Return the problems of the simulators, tasks and custom classes that the config names.

    `sources`: key -> file and line of its value.
    """
    problems = [
        *job_of(config).environment_problems(config),
        *check_sinks(name for name in config.runner.sinks if ":" in name),
        *check_callbacks(config.runner.callbacks),
    ]
    return with_sources(problems, sources)


def check_plan(
    config: AnyConfig, plan: Plan, sources: Mapping[str, Source]
) -> list[Problem]:
    """Return the problems that a run of the plan would have on any machine.

    `sources`: key -> file and line of its value.
    """
    problems = [
        *wrong_variables(config),
        *job_of(config).plan_problems(config, plan),
    ]
    return with_sources(problems, sources)


def missing_libraries(config: AnyConfig) -> list[Problem]:
    """Return one problem that names all libraries which a run needs and which are not installed.

    Return an empty list if all these libraries are installed. They are needed to run a job, not to plan it.
    """
    needed = ["numpy", "torch", "safetensors"]
    # The inline launcher runs threads of one process and needs none of these.
    if config.cluster.launcher == "ray":
        needed += ["ray", "psutil", "zmq"]
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    why = f"there is no module {', '.join(absent)}; a plan needs none: dry_run=true"
    if config.dry_run:
        why = f"there is no module {', '.join(absent)}: what a run checks with them was not checked"
    return list(
        missing_library(
            why, got="a run", extra="run", key="dry_run", of="runs"
        ).problems
    )


def check_launch(
    config: AnyConfig, plan: Plan, sources: Mapping[str, Source]
) -> list[Problem]:
    """Return a problem for each thing that a run needs and this machine lacks, such as a library or a tokenizer.

    In a process that `ray job submit` has started, the result includes problems of the Ray address, and of an output
    folder that Ray deletes after the job. `sources`: key -> file and line of its value.
    """
    problems = check_sinks(name for name in config.runner.sinks if ":" not in name)
    problems += missing_variables(config)
    if _JOB in os.environ and config.cluster.launcher == "ray":
        problems += _job_problems(config)
    problems += job_of(config).launch_problems(config, plan)
    return with_sources(problems, sources)


def check_run(job: Prepared) -> list[Problem]:
    """Return every problem that stops a run of a planned job before its workers start.

    For a dry run, create the objects that a run needs before its workers start, to find their problems; but do not
    create simulators that come with Gymnasium.
    """
    config = job.config
    lacking = [*job.not_run, *missing_libraries(config)] or check_launch(
        config, job.plan, job.sources
    )
    if config.dry_run and not lacking:
        found = job_of(config).dry_run_problems(config, job.plan)
        lacking = with_sources(found, job.sources)
    # A change may use machines that lack something
    for change in job.changes:
        after = change.job
        lacking += check_launch(after.config, after.plan, after.sources)
    return list(dict.fromkeys(lacking))


def refused_dry(problems: Sequence[Problem]) -> list[Problem]:
    """Return those of `problems` that stop a dry run, too.

    The other problems stop only a run: something is lacking on this machine that another machine may have.
    """
    return [problem for problem in problems if problem.code not in _LACKING]


def _job_problems(config: AnyConfig) -> Iterator[Problem]:
    """Yield the problems of a run in a process that `ray job submit` has started.

    The problems are a missing `cluster.ray.address`, and an output folder that Ray deletes after the job.
    """
    if config.cluster.ray.address is None:
        yield problem(
            "inside-a-ray-job",
            "cluster.ray.address",
            "null",
            error="address",
            variable=_JOB,
        )
    folder = Path(config.runner.output_dir).absolute()
    if _JOBS_FOLDERS in folder.parts:
        yield problem(
            "inside-a-ray-job",
            "runner.output_dir",
            str(folder),
            error="folder",
            runs=Path.home() / "runs",
        )
