"""Rules for `cluster.changes`: when the placement changes, and which components move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rlplace.checks.rule import Found, Rule
from rlplace.config.blocks.machines import ChangeConfig, ElasticConfig
from rlplace.config.other_names import COMPONENTS as OTHER_COMPONENTS
from rlplace.config.yaml_text import show
from rlplace.errors import did_you_mean
from rlplace.placement.schedule import placed_names

KEY = "cluster.changes"
ELASTIC = "cluster.elastic"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changing:
    """The changes of a job, as the rules see them.

    `changes`: `cluster.changes`. `components`: the components that the job places. `total_iterations`: the length of
    the run. `on_node_loss`: `faults.on_node_loss`. `elastic`: `cluster.elastic`. `lends`: whether a component lends
    accelerators.
    """

    changes: Sequence[ChangeConfig]
    components: Sequence[str]
    total_iterations: int
    on_node_loss: str
    elastic: ElasticConfig
    lends: bool


def written(
    changes: Sequence[ChangeConfig], number: int, name: str, instead: str
) -> list[dict[str, object]]:
    """Return `cluster.changes` as plain values, with another name of a component in one change.

    `number`: index of the change. `name`: the name that is replaced. `instead`: the new name.
    """
    found: list[dict[str, object]] = []
    for index, change in enumerate(changes):
        places = dict(change.component_placement)
        if index == number:
            places = {
                instead if key == name else key: place for key, place in places.items()
            }
        found.append({"after": change.after, "component_placement": places})
    return found


def _not_rising(case: Changing) -> Iterator[Found]:
    """Yield a finding for each change that does not come after the one before it."""
    before = 0
    for number, change in enumerate(case.changes):
        if change.after <= before:
            yield Found(
                key=f"{KEY}[{number}].after",
                got=str(change.after),
                error="not-rising",
                facts={"before": before, "least": before + 1},
            )
        before = max(before, change.after)


def _too_late(case: Changing) -> Iterator[Found]:
    """Yield a finding for each change that no iteration follows."""
    last = case.total_iterations
    for number, change in enumerate(case.changes):
        if change.after >= last:
            yield Found(
                key=f"{KEY}[{number}].after",
                got=str(change.after),
                error="too-late",
                facts={"last": last, "more": change.after + 1},
            )


def _not_placed(case: Changing) -> Iterator[Found]:
    """Yield a finding for each name in a change that is not a component of the job."""
    for number, change in enumerate(case.changes):
        for name in placed_names(change.component_placement):
            if name in case.components:
                continue
            theirs = OTHER_COMPONENTS.get(name, name)
            near = did_you_mean(theirs, case.components)
            if theirs in case.components:
                near = theirs
            error = "changed"
            fixed = ""
            if near is not None:
                error = "misspelt-changed"
                fixed = show(written(case.changes, number, name, near))
            yield Found(
                key=f"{KEY}[{number}].component_placement.{name}",
                got=f"{name}: {show(change.component_placement.get(name, ''))}",
                error=error,
                facts={
                    "name": name,
                    "near": near,
                    "fixed": fixed,
                    "components": ", ".join(case.components),
                },
            )


def _replanned(case: Changing) -> Iterator[Found]:
    """Yield a finding if the loss of a node would make other plans than those of the changes."""
    if case.changes and case.on_node_loss == "replan":
        yield Found(key=KEY, error="replan")


def _planned_by_hand(case: Changing) -> Iterator[Found]:
    """Yield a finding if the config lists changes, and a search is to choose others."""
    if case.changes and case.elastic.mode != "off":
        mode = case.elastic.mode
        yield Found(key=f"{ELASTIC}.mode", got=f"mode: {mode}", error="changes")


def _lends(case: Changing) -> Iterator[Found]:
    """Yield a finding if the config lends accelerators, and a search is to choose other placements."""
    if case.lends and case.elastic.mode != "off":
        mode = case.elastic.mode
        yield Found(key=f"{ELASTIC}.mode", got=f"mode: {mode}", error="lend")


def _never(case: Changing) -> Iterator[Found]:
    """Yield a finding if the run ends before its first search."""
    elastic = case.elastic
    last = case.total_iterations
    if elastic.mode == "off" or elastic.warmup < last:
        return
    yield Found(
        key=f"{ELASTIC}.warmup",
        got=f"warmup: {elastic.warmup}",
        error="never",
        facts={"last": last, "more": elastic.warmup + 1},
    )


RULES = (
    Rule(code="bad-change", facts=_not_rising),
    Rule(code="bad-change", facts=_too_late),
    Rule(code="unknown-component", facts=_not_placed),
    Rule(code="bad-change", facts=_replanned),
    Rule(code="bad-elastic", facts=_planned_by_hand),
    Rule(code="bad-elastic", facts=_lends),
    Rule(code="bad-elastic", facts=_never),
)
