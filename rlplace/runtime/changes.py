"""Plan the changes of a running job's placement before the job starts, and find the plan of an iteration.

::

    cluster.changes: [{after: 50, component_placement: {env: 0-7}}]

    iteration   1 ....... 50 │ 51 ....... 400
    placement   that of      │ that of the config, with env on 0-7: planned and proven
                the config   │ as a job with this placement alone

A change holds from the iteration that follows it. So a checkpoint after iteration 50 is resumed with the new placement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.checks import changes as rules
from rlplace.checks.rule import broken
from rlplace.codes import problem
from rlplace.config.blocks.machines import ChangeConfig
from rlplace.config.keys import PLACEMENT
from rlplace.config.read import nested
from rlplace.config.yaml_text import show
from rlplace.errors import (
    ConfigError,
    DoesNotFit,
    Problem,
    ProblemsError,
    Source,
    source_of,
)
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import placed_names

if TYPE_CHECKING:
    from rlplace.runtime.prepare import Prepared

# Prepares a job: takes the composed config and the sources of its values.
Preparing = Callable[[Mapping[str, Any], Mapping[str, Source]], "Prepared"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A change of the placement. `after`: iterations after which it comes. `job`: the job from then on, with its
    plan.
    """

    after: int
    job: Prepared


def plan_changes(
    config: Any,
    plan: Plan,
    mapping: Mapping[str, Any],
    sources: Mapping[str, Source],
    preparing: Preparing,
) -> tuple[PlannedChange, ...]:
    """Return all changes of a job, each planned as a job with its placement alone.

    `config`, `plan`: the job before the first change. `mapping`: its composed config. `sources`: key -> file and line
    of its value. Raises ConfigError or PlacementError for the first change that cannot be planned.
    """
    written: Sequence[ChangeConfig] = config.cluster.changes
    if not written and config.cluster.elastic.mode == "off":
        return ()
    case = rules.Changing(
        changes=written,
        components=plan.placement.components,
        total_iterations=config.runner.total_iterations,
        on_node_loss=config.faults.on_node_loss,
        elastic=config.cluster.elastic,
        lends=bool(plan.schedule.parts),
    )
    wrong = [
        dataclasses.replace(found, source=source_of(found.key, sources))
        for found in broken(rules.RULES, case)
    ]
    if wrong:
        raise ConfigError(wrong)
    mapping = nested(mapping)
    found: list[PlannedChange] = []
    for number, change in enumerate(written):
        before = found[-1].job.plan if found else plan
        cluster = dict(mapping["cluster"])
        cluster[_NAME] = _placement_after(change, before)
        # Without changes, so that each is planned once
        del cluster["changes"]
        moved = {**mapping, "cluster": cluster}
        try:
            job = preparing(moved, _sources_after(change, number, sources))
        except ProblemsError as error:
            refused = [_of_change(each, written, number) for each in error.problems]
            raise type(error)(refused) from error
        if job.plan.placement.canonical() == before.placement.canonical():
            key = f"{rules.KEY}[{number}]"
            nothing = problem(
                "bad-change",
                key,
                show(dict(change.component_placement)),
                error="nothing",
                source=source_of(key, sources),
                after=change.after,
            )
            raise ConfigError([nothing])
        found.append(PlannedChange(after=change.after, job=job))
    return tuple(found)


def plan_request(
    places: Mapping[str, object],
    config: Any,
    plan: Plan,
    mapping: Mapping[str, Any],
    after: int,
    preparing: Preparing,
) -> PlannedChange:
    """Return a change that was requested while the run goes on, planned as a job with its placement alone.

    `places`: component -> its place; all others stay where they are. `config`, `plan`: the job as it runs now.
    `mapping`: the composed config of the run. `after`: number of iterations so far. Raises ConfigError, PlacementError
    or ClusterError if the change cannot be planned, or does not fit into memory.
    """
    change = ChangeConfig(after=after, component_placement=dict(places))
    named = placed_names(places)
    before = plan.placement
    strange = [name for name in named if name not in before.components]
    if strange:
        components = ", ".join(before.components)
        raise ConfigError(
            [
                problem(
                    "unknown-component",
                    f"{PLACEMENT}.{name}",
                    f"{name}: {show(places.get(name, ''))}",
                    error="changed",
                    name=name,
                    components=components,
                )
                for name in strange
            ]
        )
    if config.faults.on_node_loss == "replan":
        raise ConfigError([problem("bad-change", PLACEMENT, error="replan")])
    cluster = dict(mapping["cluster"])
    cluster[_NAME] = _placement_after(change, plan)
    cluster.pop("changes", None)
    job = preparing({**mapping, "cluster": cluster}, {})
    if job.plan.placement.canonical() == before.canonical():
        got = show(dict(places))
        raise ConfigError(
            [problem("bad-change", PLACEMENT, got, error="moves-nothing")]
        )
    if job.not_run:
        raise ConfigError(job.not_run)
    if job.refused:
        raise DoesNotFit(job.all_shortages)
    return PlannedChange(after=after, job=job)


def job_after(job: Prepared, iterations: int) -> Prepared:
    """Return the job with the placement that holds after so many iterations of a run."""
    holds = job
    for change in job.changes:
        if change.after <= iterations:
            holds = change.job
    return holds


def moved(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """Return component -> its places in both plans, for the components that move."""
    old = before.placement
    new = after.placement
    written = old.canonical()
    found = {}
    for name, place in new.canonical().items():
        if place != written.get(name):
            found[name] = (old.spec(name).render(), new.spec(name).render())
    return found


def differing(before: Plan, after: Plan) -> dict[str, tuple[str, str]]:
    """Return component -> what it has in both plans: its places, or whether it is offloaded if no component moves."""
    found = moved(before, after)
    if found:
        return found
    for name, leaves in after.offload.items():
        if before.offload.get(name) is not leaves:
            words = ("resident", "offloaded")
            found[name] = words if leaves else words[::-1]
    return found


_NAME = PLACEMENT.rpartition(".")[2]


def _placement_after(change: ChangeConfig, before: Plan) -> dict[str, object]:
    """Return the block `component_placement` after a change. `before`: the plan before it."""
    given = change.component_placement
    named = placed_names(given)
    places: dict[str, object] = {}
    # In the order of the placement before
    for name, place in before.placement.canonical().items():
        if name in given:
            places[name] = given[name]
        elif name not in named:
            places[name] = place
    # Lines of several components
    return places | dict(given)


def _sources_after(
    change: ChangeConfig, number: int, sources: Mapping[str, Source]
) -> dict[str, Source]:
    """Return the sources of the config of one change: places come from the change.

    `number`: index of the change. `sources`: key -> file and line of the job before the changes.
    """
    found = dict(sources)
    for name in change.component_placement:
        source = source_of(f"{rules.KEY}[{number}].{_NAME}.{name}", sources)
        if source is not None:
            found[f"{PLACEMENT}.{name}"] = source
    return found


def _of_change(wrong: Problem, changes: Sequence[ChangeConfig], number: int) -> Problem:
    """Return a problem of the plan of one change, with the key and the fix that belong to `cluster.changes`.

    `number`: index of the change.
    """
    change = changes[number]
    what = f"after iteration {change.after}: {wrong.what}"
    name = wrong.key.removeprefix(f"{PLACEMENT}.")
    if name == wrong.key or name not in change.component_placement:
        # A value that suits this placement may not suit the one before
        other = f"choose other places: {rules.KEY}[{number}].{_NAME}"
        return dataclasses.replace(wrong, what=what, fix=other)
    key = f"{rules.KEY}[{number}].{_NAME}.{name}"
    fix = wrong.fix
    lead = f"{name}: "
    if fix is not None and fix.startswith(lead) and "\n" not in fix:
        # The whole list, since an override replaces no single item
        place, _, remark = fix.removeprefix(lead).partition(" " * 8)
        written = [
            {"after": each.after, _NAME: dict(each.component_placement)}
            for each in changes
        ]
        written[number] = {
            "after": change.after,
            _NAME: {**change.component_placement, name: place},
        }
        fix = f"changes: {show(written)}"
        if remark:
            fix += " " * 8 + remark
    return dataclasses.replace(wrong, key=key, what=what, fix=fix)
