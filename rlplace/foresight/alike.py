"""Keys for the stages of plans. Stages with equal keys take equally long, also in different plans.

Between two stages the loop waits for all components. So the seconds of a stage depend only on its own calls and moves.
An iteration is the sum of its stages, and each stage has to be predicted only once::

    actor 0-7, rollout 0-3, reward 4-7 ──▶ sync │ rollout │ infer │ learn
    actor 0-3, rollout 0-3, reward 4-7 ──▶ sync'│ rollout │ infer'│ learn'      rollout is known, three are not

If each rank at work on a node has a processor to itself, it does not matter on which node a rank is.
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
    """Everything on which the seconds of a stage depend, for a given profile.

    `scored`: whether advantages are computed at the end of the stage. `mode`: the plan's settings for all components.
    `active`: the components that work in the stage. `before`: the moves (changes of residency) that end before the work
    begins. `beside`: the moves that are sent in one message with the work. `ranks`: (component, number of ranks) pairs;
    if ranks have to share processors, the ranks are counted by node. `together`: (component, component, distance of
    their first accelerators) for components that share accelerators. `after`: key of the rollout stage; None if the
    order in which rollout completes groups does not matter.
    """

    stage: str
    scored: bool
    mode: object
    active: tuple[str, ...]
    before: _Moves
    beside: _Moves
    ranks: tuple[object, ...]
    together: tuple[object, ...]
    after: StageKey | None = None


class _Part(NamedTuple):
    """The properties of one stage that follow from a plan's schedule.

    `scored`: whether advantages are computed at the end of the stage. `active`: the components that work in the stage.
    `before`: the moves that end before the work begins. `beside`: the moves that are sent in one message with the work.
    `there`: the components that work, move, or affect the stage. `begun`: whether the actor begins to learn in rollout.
    """

    stage: str
    scored: bool
    active: tuple[str, ...]
    before: _Moves
    beside: _Moves
    there: tuple[str, ...]
    begun: bool


class Alike:
    """Computes keys for the stages of all plans in one search space. Stages with equal keys take equally long."""

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
        """Return a key for each stage of a plan. Stages with equal keys take equally long.

        If generation runs ahead of learning, stages overlap; then return one key for the whole iteration. `layout`,
        `schedule`: layout and schedule of the plan.
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
        """Return one `_Part` for each stage of a schedule."""
        if id(schedule) not in self._parts:
            bases = {base_stage(stage): stage for stage in schedule.stages}
            base = self._space.model.scored_in(self._space.config, bases)
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

        A group is the samples of one prompt. `part`: the stage. `spread`: component -> (node, number of the component's
        ranks on the node) pairs.
        """
        ranks = {c: sum(ranks for _, ranks in spread[c]) for c in part.active}
        space = self._space
        return space.model.ordered(space.config, part.stage, ranks, part.begun)

    def _whole(self, layout: Layout, schedule: Schedule) -> object:
        held = tuple(
            (stage, tuple(sorted(row.items())))
            for stage, row in schedule.residency.items()
        )
        spread = {
            c: tuple(sorted(there.items()))
            for c, there in self._space.spread(layout).items()
        }
        alone = self._have_room([*spread.values()]) and not layout.mode.shared
        ranks = tuple(
            (c, sum(n for _, n in spread[c]) if alone else spread[c])
            for c in sorted(spread)
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
    """Return stage key -> predicted seconds of the stage.

    `keys`: the keys of the predicted plan's stages, in order; or a single key, for the whole iteration.
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
