"""What each stage needs, which components run at once or in turn, what is resident when, and the moves between stages.

Needs of the algorithm x shared accelerators x enable_offload -> residency per stage -> moves between stages:
docs/architecture.md shows them for simulators.

An algorithm with frozen models and a critic declares stages whose components do not depend on each other::

               actor     critic   rollout   env, agents   reference, rewards
    sync       weights            weights                 weights, of a reference that is refreshed
    rollout     full*             full      full          full, if no other component uses their accelerators
    infer      weights   full                             full
    learn      full      full
                * with accumulate_early: gradients of whole groups, if no other component uses its accelerators

Such a stage is split where components that share accelerators have to run in turn::

    declared        placement and enable_offload                           becomes
    infer           reference 0-3, reward 4-7, critic 0-7; all leave       infer 1: reference, reward    infer 2: critic
    learn           critic 0-7, actor 0-7; both leave                      learn 1: critic               learn 2: actor
    learn           critic 0-3, actor 4-7                                  learn: critic, actor
    infer           reference 4-7, unused in rollout                       it runs in rollout already
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Protocol

from rlplace.codes import Reason, problem
from rlplace.errors import Problem
from rlplace.placement.language.lend import (
    PartOfRanks,
    Residents,
    lent_part,
    whole_component,
)
from rlplace.placement.language.spec import role_of
from rlplace.units import counted


class Sharing(Protocol):
    """The part of a placement that a schedule depends on: the components, and which of them share accelerators."""

    @property
    def components(self) -> tuple[str, ...]: ...

    def shared(self, a: str, b: str) -> object:
        """Return the accelerators that both components use; a false value if there are none."""

    def sharers(self, component: str) -> list[str]:
        """Return the other components that use at least one accelerator of `component`."""


class Residency(enum.IntEnum):
    """The part of a component's state that is on its accelerators: nothing, its weights, or all of its state."""

    OFF = 0
    WEIGHTS = 1
    FULL = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The least residency of each component in each stage, as the algorithm requires it.

    `stages`: in the order in which they run. `residency`: stage -> component -> least residency; a component is active
    in the stages that have it. `divisible`: stages whose components do not depend on each other, so that they may be
    split. `early`: component -> an earlier stage in which its work may start. `ahead`: policy versions that rollout may
    run ahead of learning; above 0, rollout continues during every stage. `shared`: whether other runs use the same
    accelerators in turns. `lent`: the parts of components that are on lent accelerators; such a part works in the
    stages that name it, and never ahead.
    """

    stages: tuple[str, ...]
    # Stage -> component -> least residency
    residency: Mapping[str, Mapping[str, Residency]]
    # Stages whose components do not depend on each other; `split_stages` may split them.
    divisible: tuple[str, ...] = ()
    # Component -> an earlier stage in which its work may start.
    early: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # weight versions that rollout may run ahead of learning; above 0, rollout continues during every stage
    ahead: int = 0
    # Other runs use the accelerators in turns: whatever may leave them does, in stages in which it does not work.
    shared: bool = False
    # Parts of components on lent accelerators, such as "rollout (lent)"
    lent: tuple[str, ...] = ()

    def with_lent(self, components: Iterable[str]) -> Needs:
        """Return the needs with a further part for each of `components`, which is on accelerators that others lend.

        The part needs in each stage what its component needs there.
        """
        lent = tuple(lent_part(component) for component in components)
        if not lent:
            return self
        residency: dict[str, Mapping[str, Residency]] = {}
        for stage, row in self.residency.items():
            parts = {
                p: row[whole_component(p)] for p in lent if whole_component(p) in row
            }
            residency[stage] = {**row, **parts}
        return dataclasses.replace(self, residency=residency, lent=lent)

    @property
    def components(self) -> tuple[str, ...]:
        """All components of the algorithm, in the order in which the stages name them for the first time."""
        return tuple(
            dict.fromkeys(c for stage in self.stages for c in self.residency[stage])
        )

    def of(self, stage: str, component: str) -> Residency:
        """Return the least residency of a component in a stage; OFF if the component does not work in the stage."""
        found = (
            self.residency[s][component] for s in self.active_stages(stage, component)
        )
        return max(found, default=Residency.OFF)

    def active_stages(self, stage: str, component: str) -> tuple[str, ...]:
        """Return the stages whose work a component does while `stage` runs; () if the component does nothing.

        If rollout runs ahead of learning (`ahead` above 0), the stage "rollout" runs during every other stage. A
        component may then work for both stages at once.
        """
        if not self.ahead or component in self.lent:
            at_once = {stage: None}
        else:
            at_once = dict.fromkeys(("rollout", stage))
        return tuple(s for s in at_once if component in self.residency[s])

    def peak(self, component: str) -> Residency:
        """Return the highest residency that a component needs in any stage."""
        return max(self.of(stage, component) for stage in self.stages)


# Roles; a name such as reward.math is one more component of the role before its dot.
REQUIRED = ("actor", "rollout")
OPTIONAL = ("critic", "reference", "teacher", "reward", "env", "agent")
# Roles whose models are frozen: their scores do not depend on learning, so such a component may start early.
FROZEN = ("reference", "teacher", "reward")
# Stages in the order in which they run. In each, components are in the order of their turns.
_TEXT = {
    "sync": {
        "actor": Residency.WEIGHTS,
        "rollout": Residency.WEIGHTS,
        "reference": Residency.WEIGHTS,
    },
    "rollout": {
        "env": Residency.FULL,
        "rollout": Residency.FULL,
        "agent": Residency.FULL,
    },
    "infer": {
        "reference": Residency.FULL,
        "teacher": Residency.FULL,
        "reward": Residency.FULL,
        "actor": Residency.WEIGHTS,  # log-probabilities under the weights that are about to learn
        # Weights would suffice here, but learn needs the rest in the same place. It is last here and first in learn, so
        # it moves once.
        "critic": Residency.FULL,
    },
    "learn": {"critic": Residency.FULL, "actor": Residency.FULL},
}


def text_needs(
    names: Iterable[str],
    *,
    actor_infers: bool | None = None,
    refreshed: bool = False,
    accumulates: bool = False,
) -> Needs:
    """Return the needs of a job on language models with the components `names`; actor and rollout are always included.

    `actor_infers`: whether the actor computes log-probabilities before it learns; None: it does if another component
    scores the samples. `refreshed`: whether the reference loads the actor's weights every few iterations.
    `accumulates`: whether the actor starts to learn during rollout. Names without a known role are ignored; other
    checks report them.
    """
    known = [n for n in names if role_of(n) in (*REQUIRED, *OPTIONAL)]
    components = tuple(dict.fromkeys((*REQUIRED, *known)))
    if actor_infers is None:
        actor_infers = any(
            role_of(c) in _TEXT["infer"] for c in components if c != "actor"
        )
    absent = {
        *(() if refreshed else [("sync", "reference")]),
        *(() if actor_infers else [("infer", "actor")]),
    }
    residency = {
        stage: {
            c: need
            for role, need in row.items()
            if (stage, role) not in absent
            for c in components
            if role_of(c) == role
        }
        for stage, row in _TEXT.items()
    }
    early = (*FROZEN, "actor") if accumulates else FROZEN
    if not residency["infer"]:
        del residency["infer"]
    return Needs(
        stages=tuple(residency),
        residency=residency,
        divisible=tuple(stage for stage in ("infer", "learn") if stage in residency),
        early={
            c: "rollout" for role in early for c in components if role_of(c) == role
        },
    )


def placed_names(block: Mapping[str, object]) -> list[str]:
    """Return the component names in a placement block.

    A block with a preset stands for actor, critic, reference, reward and rollout, and for its keys with a dot, such as
    `reward.math`.
    """
    if "preset" in block:
        return [
            "actor",
            "critic",
            "reference",
            "reward",
            "rollout",
            *(k for k in block if "." in k),
        ]
    return [name.strip() for leaf in block for name in str(leaf).split(",")]


def apart(needs: Needs) -> str:
    """Return, in words, how many policy versions rollout may be ahead of learning: "at most 2 versions apart"."""
    return f"at most {counted(needs.ahead, 'version')} apart"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of residency of one component, from `before` to `after`, such as from full to off."""

    component: str
    before: Residency
    after: Residency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """All changes of residency on entry to a stage. All releases finish before the first acquire begins."""

    stage: str
    releases: tuple[Move, ...]
    acquires: tuple[Move, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The residency of each component in each stage, and the moves between stages.

    `needs`: needs of the algorithm, by these stages. `residency`: stage -> component -> its residency. `first`: the
    moves into the first stage at the start, when every component is off. `entries`: stage -> the moves on entry from
    the stage before it; the stage before the first stage is the last stage.

    A component with ranks on lent accelerators has two entries in each row of `residency`: its own ranks by its name,
    and the other ranks by the name of `lent_part`. `parts`: such a name -> the component and its ranks.
    """

    stages: tuple[str, ...]
    needs: Needs  # needs of the algorithm, in these stages
    # Stage -> component -> residency held in that stage.
    residency: Mapping[str, Mapping[str, Residency]]
    first: Transition  # into the first stage, from everything off
    # For display and counts: stage -> transition from the stage before it; the first stage follows the last.
    entries: Mapping[str, Transition]
    # Name in `residency` -> its ranks, for components of which a part is on lent accelerators.
    parts: Mapping[str, PartOfRanks] = dataclasses.field(default_factory=dict)

    def between(self, before: str, after: str) -> Transition:
        """Return the moves from stage `before` directly to stage `after`. The two need not be neighbours."""
        return _transition(after, self.residency[before], self.residency[after])

    @property
    def active(self) -> Mapping[str, tuple[str, ...]]:
        """Stage -> the components that work in that stage. They work at the same time.

        A component on lent accelerators is named once.
        """
        needed = self.needs.residency
        lent = self.needs.lent
        return {
            stage: tuple(c for c in needed[stage] if c in row and c not in lent)
            for stage, row in self.residency.items()
        }

    def accelerators(
        self, of: Mapping[str, Iterable[int]]
    ) -> dict[str, frozenset[int]]:
        """Return stage -> the accelerators of the components that work in that stage. `of`: component -> its
        accelerators.
        """
        return {
            stage: frozenset().union(*(of[component] for component in working))
            for stage, working in self.active.items()
        }

    def parts_of(self, component: str) -> tuple[str, ...]:
        """Return the names of a component's parts in `residency`: its own name, and that of a part that is lent."""
        lent = lent_part(component)
        if lent in self.parts:
            return (component, lent)
        return (component,)


def schedule_of(
    placement: Sharing,
    needs: Needs,
    offload: Mapping[str, bool],
    parts: Mapping[str, PartOfRanks] | None = None,
) -> Schedule:
    """Return the residency of each component in each stage, and the moves between stages.

    `offload`: component -> whether it may release accelerators. A component that may, and that shares accelerators with
    a component of another stage or with another run, has in each stage only the residency that it needs. All other
    components stay full in all stages; `find_clashes` reports the components that are not allowed to stay. `parts`: of
    components of which a part is on lent accelerators; `placement`, `needs` and `offload` name such parts like
    components.
    """
    active = split_stages(needs, placement, offload)
    falling = {
        c
        for c in placement.components
        if offload[c] and (needs.shared or makes_room(placement, active, c))
    }
    residency = {
        stage: {
            c: active.of(stage, c) if c in falling else Residency.FULL
            for c in placement.components
        }
        for stage in active.stages
    }
    first = active.stages[0]
    last = active.stages[-1]
    return Schedule(
        stages=active.stages,
        needs=active,
        residency=residency,
        parts=parts or {},
        first=_transition(
            first, dict.fromkeys(placement.components, Residency.OFF), residency[first]
        ),
        entries={
            stage: _transition(stage, residency[before], residency[stage])
            for before, stage in zip(
                (last, *active.stages), active.stages, strict=False
            )
        },
    )


def offload_of_parts(
    residents: Residents, offload: Mapping[str, bool]
) -> dict[str, bool]:
    """Return part of a component -> whether it may release accelerators: what is true of its component.

    `offload`: component -> whether it may release accelerators; False if it is missing.
    """
    return {
        part: offload.get(whole_component(part), False) for part in residents.components
    }


def find_clashes(
    placement: Sharing,
    needs: Needs,
    offload: Mapping[str, bool],
    allow_resident: Collection[str],
    blocks: Mapping[str, str],
) -> Iterator[Problem]:
    """Yield a problem for each component without offload that stays on accelerators which another component needs.

    Two components are allowed to stay if some stage needs both at their peak, since they must fit together anyway.
    `needs`: the needs, split into sub-stages. `offload`: component, or part of it -> whether it may release
    accelerators. `allow_resident`: components that may always stay. `blocks`: component -> key of its config block, if
    the key is not its name.
    """
    for component in placement.components:
        if offload[component] or whole_component(component) in allow_resident:
            continue
        hindered = [
            o
            for o in placement.sharers(component)
            if not _meet_in_full(needs, component, o)
        ]
        if not hindered:
            continue
        reasons: list[Reason] = []
        for other in hindered:
            stages = [
                s for s in needs.stages if _in_the_way(needs, s, component, other)
            ]
            name = "stages"
            if len(stages) == 1:
                name = "stage"
            shared = placement.shared(component, other)
            there = " and ".join(stages)
            reasons.append(
                Reason(name, {"stages": there, "other": other, "shared": shared})
            )
        error = "several"
        if len(hindered) == 1:
            error = "one"
        whole = whole_component(component)
        block = blocks.get(whole, whole)
        yield problem(
            "residents-clash",
            f"{block}.enable_offload",
            "enable_offload: false",
            error=error,
            reasons=reasons,
            component=whole,
            others=" and ".join(hindered),
            block=block,
        )


def makes_room(placement: Sharing, needs: Needs, component: str) -> bool:
    """Return whether this component could release memory on accelerators on which another component works.

    It can release memory in a stage in which it needs less than its peak.
    """
    others = placement.sharers(component)
    return any(
        _in_the_way(needs, stage, component, other)
        for other in others
        for stage in needs.stages
    )


def _in_the_way(needs: Needs, stage: str, component: str, other: str) -> bool:
    """Return whether `other` is active in `stage` while `component` needs less than its peak there."""
    return needs.of(stage, other) > Residency.OFF and needs.of(
        stage, component
    ) < needs.peak(component)


def _meet_in_full(needs: Needs, a: str, b: str) -> bool:
    return any(
        needs.of(s, a) == needs.peak(a) and needs.of(s, b) == needs.peak(b)
        for s in needs.stages
    )


def _transition(
    stage: str, before: Mapping[str, Residency], after: Mapping[str, Residency]
) -> Transition:
    moves = [
        Move(component=c, before=before[c], after=after[c])
        for c in after
        if before[c] != after[c]
    ]
    return Transition(
        stage=stage,
        releases=tuple(m for m in moves if m.after < m.before),
        acquires=tuple(m for m in moves if m.after > m.before),
    )


def split_stages(
    needs: Needs, placement: Sharing, offload: Mapping[str, bool]
) -> Needs:
    """Return the needs with each divisible stage split, so that components that share accelerators run in turn.

    `offload`: component -> whether it may release accelerators. Two components that share accelerators run one after
    the other if both have offload; a component without offload would save no memory by waiting. A component moves to an
    earlier stage (`needs.early`) only if no other component uses its accelerators in that stage; if rollout runs ahead
    of learning, only if no other component uses them in any stage. A frozen component that has moved is removed from
    its later stages. Stages without components are dropped.
    """

    def share(
        a: str, b: str
    ) -> bool:  # a component that could not be placed shares nothing
        return {a, b} <= {*placement.components} and bool(placement.shared(a, b))

    # Early starts: add the component to the earlier stage if its accelerators are free there.
    rows = {stage: dict(needs.residency[stage]) for stage in needs.stages}
    for component, stage in needs.early.items():
        busy = (
            [c for row in rows.values() for c in row if c != component]
            if needs.ahead
            else rows[stage]
        )
        if component in placement.components and not any(
            share(component, other) for other in busy
        ):
            later = [rows[name] for name in needs.divisible if component in rows[name]]
            rows[stage][component] = max(row[component] for row in later)
            # A frozen component has nothing left to do in its later stages. A learning component still ends there.
            for row in later if role_of(component) in FROZEN else ():
                del row[component]
    # Turns: put each component into the first sub-stage where it collides with no other, else open a new one.
    residency: dict[str, Mapping[str, Residency]] = {}
    for stage, row in rows.items():
        if stage not in needs.divisible:
            residency[stage] = row
            continue
        leaving = {c for c in row if offload.get(c, False)}
        # Sub-stages of this stage, in the order in which they run.
        parts: list[dict[str, Residency]] = []
        for component, need in row.items():
            for part in parts:
                if component not in leaving or not any(
                    c in leaving and share(component, c) for c in part
                ):
                    part[component] = need
                    break
            else:
                parts.append({component: need})
        numbered = len(parts) > 1
        residency |= {
            f"{stage} {number}" if numbered else stage: part
            for number, part in enumerate(parts, 1)
        }
    return dataclasses.replace(
        needs, stages=tuple(residency), residency=residency, divisible=(), early={}
    )


def setup_order(
    accelerators: Mapping[str, Collection[int]],
) -> dict[str, tuple[str, ...]]:
    """Return component -> the components that must be set up before it.

    `accelerators`: component -> its accelerators. Only components that share accelerators wait for each other. Engines
    come first: they measure free memory at start, and vLLM refuses to start if another process frees memory at that
    time. Then all other components load and offload one after the other, so that no two of them are on the same
    accelerators at once.
    """
    order = sorted(accelerators, key=lambda component: role_of(component) != "rollout")
    return {
        component: tuple(
            o
            for o in order[:at]
            if not set(accelerators[o]).isdisjoint(accelerators[component])
        )
        for at, component in enumerate(order)
    }


def base_stage(stage: str) -> str:
    """Return the stage to which a sub-stage belongs: `infer` for `infer 2`. Any other stage is returned as it is."""
    return stage.partition(" ")[0]
