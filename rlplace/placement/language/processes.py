"""`process: shared`: components at one place, rank by rank, that live in the same processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from rlplace.errors import Problem, Source
from rlplace.placement.language.spec import ComponentSpec, Homes, role_of
from rlplace.placement.language.written import Written, write_down
from rlplace.placement.show.columns import clipped

# Their ranks meet in a process group of their own, and a process joins only one.
_MEETING = ("actor", "critic", "reference", "reward")


def join_processes(
    specs: Mapping[str, ComponentSpec], marked: Sequence[str], sources: Mapping[str, Source], *, complete: bool
) -> tuple[dict[str, ComponentSpec], list[Problem]]:
    """The marked components with whom they share their processes, and the problems of those that cannot.

    Not `complete`: some lines could not be read, so whoever seems alone may not be.
    """
    problems = [_meets(specs[name], specs, sources) for name in marked if role_of(name) in _MEETING]
    if problems or not complete:
        return {}, problems
    if len(marked) == 1:
        return {}, [_alone(specs[marked[0]], specs, sources)]
    groups = _groups(specs, marked)
    single = [group[0] for group in groups if len(group) == 1]
    for name in single[1:] or single:  # of two that are apart, the first is where it is and the second is told
        partner = next(other for other in marked if other != name)
        problems.append(_apart(specs[name], specs[partner], sources))
    shared = {name: "+".join(group) for group in groups for name in group if len(group) > 1}
    return {name: dataclasses.replace(specs[name], process=process) for name, process in shared.items()}, problems


def _groups(specs: Mapping[str, ComponentSpec], marked: Sequence[str]) -> list[list[str]]:
    """Components whose ranks have the same accelerators, one by one; on no accelerators, the same nodes."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in marked:
        homes = Homes.of(specs[name])
        place = (specs[name].node_group, *(column.tobytes() for column in (homes.node, homes.first, homes.count)))
        groups.setdefault(place, []).append(name)
    return list(groups.values())


def _meets(spec: ComponentSpec, specs: Mapping[str, ComponentSpec], sources: Mapping[str, Source]) -> Problem:
    others = [c for c in specs if role_of(c) not in _MEETING]
    why = f"the {spec.name} ranks meet in a process group of their own, and a process can join only one"
    fix = "process: own" + (f"        (those that may share: {', '.join(others)})" if others else "")
    return _written(spec, sources).whole("process-of-its-own", f"{spec.name} cannot share its processes", why, fix)


def _alone(spec: ComponentSpec, specs: Mapping[str, ComponentSpec], sources: Mapping[str, Source]) -> Problem:
    other = next((c for c in specs if c != spec.name and role_of(c) not in _MEETING), None)
    what = f"{spec.name} has nobody to share its processes with"
    why = "a process is shared by components that both say so and are at the same place"
    fix = "process: own" + (f"        (or: {other}: {{same_as: {spec.name}, process: shared}})" if other else "")
    return _written(spec, sources).whole("process-alone", what, why, fix)


def _apart(spec: ComponentSpec, partner: ComponentSpec, sources: Mapping[str, Source]) -> Problem:
    what = f"{spec.name} and {partner.name} are at different places"
    places = ", ".join(f"{s.name} is {clipped(s.render(), 60)}" for s in (spec, partner))
    why = f"rank by rank they need the same accelerators of one node group: {places}"
    fix = f"{spec.name}: {{same_as: {partner.name}, process: shared}}"
    return _written(spec, sources).whole("process-apart", what, why, fix)


def _written(spec: ComponentSpec, sources: Mapping[str, Source]) -> Written:
    return write_down(spec.key, "process", "shared", sources)
