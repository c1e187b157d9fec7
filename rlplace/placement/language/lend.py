"""Accelerators that a component lends to another while it waits: `cluster.lend: {actor: rollout}`.

::

    component_placement: {actor: 0-3, rollout: 4-7}            ranks of rollout     residency
    lend: {actor: rollout}                          rollout           0-3 on 4-7    as without lending
                                                    rollout (lent)    4-7 on 0-3    only while rollout works

The borrowing component gets further ranks on the accelerators of the lender, behind its own ranks. They are ranks like
all others: they get requests, weights and channels in the same way. Only their residency differs, so they are a part of
the component with a name of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlplace.codes import problem
from rlplace.config.yaml_text import show
from rlplace.errors import Problem, did_you_mean
from rlplace.placement.language.spec import ComponentSpec, Segment, Spread, role_of
from rlplace.placement.machines.topology import Ranges

KEY = "cluster.lend"
# Roles that work while the borrower does, so their accelerators are in use.
_AT_WORK = ("rollout", "env", "agent")
_LENT = " (lent)"


def lent_part(component: str) -> str:
    """Return the name of the part of a component that is on lent accelerators, such as "rollout (lent)"."""
    return component + _LENT


def whole_component(part: str) -> str:
    """Return the component to which a part belongs: "rollout" for "rollout (lent)". A component is its own part."""
    return part.removesuffix(_LENT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartOfRanks:
    """Some ranks of a component, which have a residency of their own."""

    component: str
    ranks: range


class Residents:
    """The parts of components that have a residency of their own. A schedule treats each of them like a component.

    A component is one part, unless others lend it accelerators: then its ranks there are a second part. `components`:
    the names of all parts, in the order of the components. `parts`: name -> its ranks, for components of two parts.
    """

    def __init__(self, specs: Mapping[str, ComponentSpec]) -> None:
        self._accelerators: dict[str, Ranges] = {}
        self.parts: dict[str, PartOfRanks] = {}
        for name, spec in specs.items():
            self._accelerators[name] = spec.own_accelerators
            if not spec.lent_ranks:
                continue
            lent = lent_part(name)
            self._accelerators[lent] = spec.lent_accelerators
            behind = range(spec.own_ranks.stop, spec.world_size)
            self.parts[name] = PartOfRanks(component=name, ranks=spec.own_ranks)
            self.parts[lent] = PartOfRanks(component=name, ranks=behind)

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self._accelerators)

    @property
    def borrowers(self) -> tuple[str, ...]:
        """The components that others lend accelerators."""
        return tuple(dict.fromkeys(part.component for part in self.parts.values()))

    def accelerators(self, part: str) -> Ranges:
        return self._accelerators[part]

    def shared(self, a: str, b: str) -> Ranges:
        """Return the accelerators that both parts use."""
        return self._accelerators[a] & self._accelerators[b]

    def sharers(self, part: str) -> list[str]:
        """Return the other parts that use at least one accelerator of `part`."""
        others = [name for name in self._accelerators if name != part]
        return [name for name in others if self.shared(name, part)]

    def part_of(self, component: str, rank: int) -> str:
        """Return the name of the part to which a rank of a component belongs."""
        own = self.parts.get(component)
        if own is None or rank in own.ranks:
            return component
        return lent_part(component)


def lend_accelerators(
    specs: Mapping[str, ComponentSpec], lend: Mapping[str, object]
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """Return the specs with further ranks on lent accelerators, and the problems of `cluster.lend`.

    `specs`: component -> spec, of all components. `lend`: component -> the component to which it lends its
    accelerators; None: to none. Accelerators that the borrower has already, or that several components lend, count
    once.
    """
    extended = dict(specs)
    problems: list[Problem] = []
    for lender, borrower in _pairs(lend):
        wrong = _pair_problem(specs, lend, lender, borrower)
        if wrong is None:
            found, wrong = _extended(extended[borrower], specs[lender], lend)
            extended[borrower] = found
        if wrong is not None:
            problems.append(wrong)
    if problems:
        return dict(specs), problems
    return extended, []


def _pairs(lend: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (lender, borrower) for each entry of `cluster.lend` that is not null."""
    for lender, borrower in lend.items():
        if borrower is not None:
            yield lender, str(borrower)


def _pair_problem(
    specs: Mapping[str, ComponentSpec],
    lend: Mapping[str, object],
    lender: str,
    borrower: str,
) -> Problem | None:
    """Return what is wrong with one entry of `cluster.lend` whatever the accelerators are; None if nothing is."""
    for name in (lender, borrower):
        if name not in specs:
            near = did_you_mean(name, specs)
            placed = ", ".join(specs)
            if not near:
                return problem(
                    "unknown-component",
                    KEY,
                    _got(lend),
                    error="lent",
                    name=name,
                    placed=placed,
                )
            renamed = {}
            for key, value in lend.items():
                renamed[near if key == name else key] = near if value == name else value
            return problem(
                "unknown-component",
                KEY,
                _got(lend),
                error="misspelt-lent",
                name=name,
                near=near,
                placed=placed,
                fixed=show(renamed),
            )
    if role_of(lender) in _AT_WORK:
        return _cannot_lend("at-work", lend, lender, borrower)
    if specs[borrower].process:
        return _cannot_lend("shared-process", lend, lender, borrower)
    return None


def wrong_borrowers(
    lend: Mapping[str, object], components: Collection[str], borrowers: Collection[str]
) -> Iterator[Problem]:
    """Yield a problem for each entry of `cluster.lend` whose borrower cannot work on lent accelerators.

    `components`: those of the job; another name is left to `lend_accelerators`. `borrowers`: the roles of the job that
    can borrow.
    """
    for lender, borrower in _pairs(lend):
        if borrower in components and role_of(borrower) not in borrowers:
            yield _cannot_lend("borrower", lend, lender, borrower)


def _extended(
    spec: ComponentSpec, lender: ComponentSpec, lend: Mapping[str, object]
) -> tuple[ComponentSpec, Problem | None]:
    """Return the spec of a borrower with ranks on the accelerators of `lender`, and a problem; None if there is none.

    The new ranks have as many accelerators each as the borrower's own ranks, and each of them is on one node.
    """
    each = max((s.accelerators_per_rank for s in spec.segments), default=1)
    pool = spec.pool
    if not spec.accelerators or not pool.holds_accelerators:
        return spec, _cannot_lend("without", lend, lender.name, spec.name)
    free = lender.accelerators - spec.accelerators
    if not free:
        if lender.accelerators and lender.accelerators & spec.lent_accelerators:
            # Another lender has the same accelerators.
            return spec, None
        return spec, _cannot_lend("nothing", lend, lender.name, spec.name)
    here = pool.inside(free)
    if len(here) < len(free):
        return spec, _cannot_lend("node-group", lend, lender.name, spec.name)
    uneven = [p for p in here.pieces if len(p) % each or pool.cut(p, each) is not None]
    if uneven:
        facts: dict[str, object] = {"each": each, "free": free}
        return spec, _cannot_lend("uneven", lend, lender.name, spec.name, facts)
    added: list[Segment] = []
    for segment in Spread(each=each).over(here.pieces):
        added.append(segment.moved(0, spec.world_size))
    ranks = sum(len(segment.ranks) for segment in added)
    extended = dataclasses.replace(
        spec,
        written=(*spec.written, *added),
        lent_ranks=spec.lent_ranks + ranks,
        lenders=(*spec.lenders, lender.name),
    )
    return extended, None


def _cannot_lend(
    error: str,
    lend: Mapping[str, object],
    lender: str,
    borrower: str,
    facts: Mapping[str, object] | None = None,
) -> Problem:
    """Return the problem of one entry of `cluster.lend`. Its fix leaves this entry out.

    `error`: name of its texts. `facts`: further values of the placeholders in them.
    """
    named = {"lender": lender, "borrower": borrower}
    of_error: dict[str, Any] = {**named, **(facts or {})}
    return problem("cannot-lend", KEY, _got(lend), error=error, **of_error)


def _got(lend: Mapping[str, object]) -> str:
    return f"lend: {show(dict(lend))}"
