"""What the seconds of a plan's stages depend on. Stages with equal keys take equally long, also in different plans.

Between two stages the loop waits for everybody. A stage then takes what its own calls and moves take, so an iteration
is a sum of stages, and each has to be predicted once::

    actor 0-7, rollout 0-3, reward 4-7 ──▶ sync │ rollout │ infer │ learn
    actor 0-3, rollout 0-3, reward 4-7 ──▶ sync'│ rollout │ infer'│ learn'      rollout is known, three are not

Where a node has a processor for everyone at work there, it does not matter who is on which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlplace.foresight.bounds import intervals
from rlplace.foresight.predict import Prediction
from rlplace.foresight.profile import ACCELERATOR, Profile
from rlplace.foresight.space import Layout, Space
from rlplace.placement.schedule import Move, Residency, Schedule, base_stage

_Moves = tuple[tuple[str, Residency], ...]
_Nodes = Sequence[tuple[int, int]]  # (node, number of ranks there)
_NEAR = 1e-9  # relative tolerance of sums of the same numbers in another order


class StageKey(NamedTuple):
    """Everything on which the seconds of a stage depend, for a given profile."""

    stage: str
    scored: bool  # whether advantages are computed at its end
    mode: object
    active: tuple[str, ...]
    before: _Moves  # moves that are awaited before the stage
    beside: _Moves  # moves sent in the same messages as the work
    # Component -> number of ranks, by node where that matters
    ranks: tuple[object, ...]
    together: tuple[object, ...]  # components that share accelerators
    # Key of the rollout stage, where the order in which groups were completed matters
    after: StageKey | None = None


class _Part(NamedTuple):
    """What the schedule of a plan says about one stage."""

    stage: str
    scored: bool
    active: tuple[str, ...]
    before: _Moves
    beside: _Moves
    there: tuple[str, ...]  # components that work or move
    begun: bool  # whether the actor has started to learn during rollout


class Alike:
    """Computes the keys of stages for plans of one search space. Stages with equal keys take equally long."""

    def __init__(self, space: Space, profile: Profile) -> None:
        self._space = space
        self._on_accelerators = any(
            curve.on == ACCELERATOR for curve in profile.costs.values()
        )
        self._sending = space.model.sending(space.config)
        inline = space.config.cluster.launcher == "inline"
        cores = int(profile.machine.get("cores", 1))
        # Largest number of processes on a node for which each has a processor
        self._room = 0 if inline else cores
        # By id of the schedule
        self._parts: dict[int, tuple[Schedule, list[_Part]]] = {}

    def keys(self, layout: Layout, schedule: Schedule) -> tuple[object, ...]:
        """Return a key for each stage of a plan.

        If generation runs ahead of learning, return one key for the whole iteration.
        """
        if schedule.needs.ahead:
            return (self._whole(layout, schedule),)
        spread = {
            c: tuple(sorted(there.items()))
            for c, there in self._space.spread(layout).items()
        }
        found = list[StageKey]()
        for part in self._parts_of(schedule):
            there = part.there
            alone = (
                self._have_room([spread[c] for c in there]) and not layout.mode.shared
            )
            groups = [part.active, [component for component, _ in part.before]]
            ordered = self._ordered(part, spread)
            found.append(
                StageKey(
                    stage=part.stage,
                    scored=part.scored,
                    mode=layout.mode,
                    active=part.active,
                    before=part.before,
                    beside=part.beside,
                    ranks=tuple(
                        (c, sum(n for _, n in spread[c]) if alone else spread[c])
                        for c in there
                    ),
                    together=self._space.at_once(layout, groups)
                    if self._on_accelerators
                    else (),
                    after=next(key for key in found if key.stage == "rollout")
                    if ordered
                    else None,
                )
            )
        return tuple(found)

    def _parts_of(self, schedule: Schedule) -> list[_Part]:
        """Return what a schedule says about each of its stages."""
        if id(schedule) not in self._parts:
            bases = {base_stage(stage): stage for stage in schedule.stages}
            base = self._space.model.scored_in(bases)
            scored = None if base is None else bases[base]
            actives = schedule.active
            parts = list[_Part]()
            for stage, before, beside in intervals(schedule, self._sending):
                there = {
                    *actives[stage],
                    *(move.component for move in (*before, *beside)),
                }
                if stage == scored:
                    there.add("actor")
                there.update(self._space.model.beside(stage))
                parts.append(
                    _Part(
                        stage=base_stage(stage),
                        scored=stage == scored,
                        active=actives[stage],
                        before=_named(before),
                        beside=_named(beside),
                        there=tuple(sorted(there)),
                        begun="actor" in actives.get("rollout", ()),
                    )
                )
            self._parts[id(schedule)] = schedule, parts
        return self._parts[id(schedule)][1]

    def _ordered(self, part: _Part, spread: Mapping[str, _Nodes]) -> bool:
        """Return whether the work of a stage depends on the order in which rollout completes groups.

        `spread`: component -> (node, number of its ranks on the node) pairs.
        """
        ranks = {c: sum(ranks for _, ranks in spread[c]) for c in part.active}
        space = self._space
        return space.model.ordered(space.config, part.stage, ranks, part.begun)

    def _whole(self, layout: Layout, schedule: Schedule) -> object:
        held = tuple(
            (stage, tuple(sorted(row.items())))
            for stage, row in schedule.residency.items()
        )
        spread = self._space.spread(layout).items()
        ranks = tuple(
            sorted(
                (component, tuple(sorted(there.items()))) for component, there in spread
            )
        )
        active = tuple(
            (stage, tuple(components)) for stage, components in schedule.active.items()
        )
        at_once = (
            self._space.at_once(layout, [tuple(layout.sizes)])
            if self._on_accelerators
            else ()
        )
        return layout.mode, held, active, ranks, at_once

    def _have_room(self, spread: Sequence[_Nodes]) -> bool:
        # node 0 also runs the driver
        at_work = Counter({0: 1})
        for nodes in spread:
            for node, ranks in nodes:
                at_work[node] += ranks
        return max(at_work.values()) <= self._room


def _named(moves: Sequence[Move]) -> _Moves:
    return tuple((move.component, move.after) for move in moves)


def seconds_of(prediction: Prediction, keys: Sequence[object]) -> dict[object, float]:
    """Return key -> predicted seconds of the stage.

    `keys`: the keys of the stages, or one key for the whole iteration.
    """
    if len(keys) == 1:
        return {keys[0]: prediction.seconds}
    # The first iteration differs: everything starts offloaded.
    counted = prediction.iterations[1:]
    found = [
        sum(one.stages[at].ended_s - one.stages[at].began_s for one in counted)
        for at in range(len(keys))
    ]
    seconds = [each / len(counted) for each in found]
    assert abs(sum(seconds) - prediction.seconds) <= _NEAR * prediction.seconds, (
        "an iteration is the sum of its stages"
    )
    return dict(zip(keys, seconds, strict=True))
