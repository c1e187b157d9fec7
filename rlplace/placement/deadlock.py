"""A proof, before anything runs, that no channel can stop a stage for good.

A component puts into its channels and takes from others, stage after stage. It stops for good when what it waits for
can only come from someone who waits for it: for room in a channel that is read too late, or for an item nobody has
reason to send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rlplace.errors import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One channel as the stages see it."""

    channel: str
    source: str
    target: str
    put_in: str  # the stage in which the source puts
    taken_in: str  # the stage in which the target takes
    items: int  # most that can be under way: per iteration, or before the source waits for an answer
    capacity: int
    after: tuple[str, ...] = ()  # channels the source takes from before it puts its first item here


def check_flows(flows: Sequence[Flow], stages: Sequence[str], working: Mapping[str, Iterable[str]]) -> list[Problem]:
    """Everything that would stop a stage for good. `working` says which components run in each stage."""
    problems: list[Problem] = []
    order = {stage: i for i, stage in enumerate(stages)}
    for flow in flows:
        problems += _idle_ends(flow, working)
        if order[flow.taken_in] < order[flow.put_in]:
            why = f"an iteration runs {', '.join(stages)}; in the first one nothing was put before {flow.taken_in}"
            fix = f"take {flow.channel} in stage {flow.put_in} or later"
            problems.append(
                _problem("channel-starves", flow, f"{flow.target} takes before {flow.source} puts", why, fix)
            )
        elif flow.capacity < flow.items:
            problems.append(_too_small(flow))
    return problems + _circles(flows)


def _idle_ends(flow: Flow, working: Mapping[str, Iterable[str]]) -> list[Problem]:
    problems = []
    for component, stage, verb in ((flow.source, flow.put_in, "puts"), (flow.target, flow.taken_in, "takes")):
        if component not in working[stage]:
            why = f"components at work in stage {stage}: " + (", ".join(working[stage]) or "none")
            fix = f"let {component} work in stage {stage}"
            what = f"{component} {verb} in stage {stage}, where it does not work"
            problems.append(_problem("channel-without-end", flow, what, why, fix))
    return problems


def _too_small(flow: Flow) -> Problem:
    if flow.put_in == flow.taken_in:
        why = f"{flow.source} puts {flow.items} before it waits for an answer, and {flow.target} may wait for it"
    else:
        why = f"all {flow.items} of stage {flow.put_in} wait there until stage {flow.taken_in}"
    what = f"holds {flow.capacity} items, {flow.items} can be under way"
    return _problem("channel-too-small", flow, what, why, f"capacity_items: {flow.items}")


def _circles(flows: Sequence[Flow]) -> list[Problem]:
    """Channels whose first item each needs an item of the next, round to the first: nobody begins."""
    waits = {flow.channel: flow for flow in flows}
    problems: list[Problem] = []
    done: set[str] = set()
    for flow in flows:
        trail: list[str] = []
        todo = [(flow.channel, 0)]
        while todo:
            name, depth = todo.pop()
            del trail[depth:]
            if name in trail:
                circle = trail[trail.index(name) :]
                what = "nobody puts the first item: " + " waits for ".join([*circle, name])
                why = "each of these channels gets its first item only after the next one has had one"
                problems.append(_problem("channels-in-a-circle", waits[name], what, why, "let one of them begin"))
                return problems
            if name not in done and name in waits:
                trail.append(name)
                todo += [(before, depth + 1) for before in waits[name].after]
        done.update(trail)
    return problems


def _problem(code: str, flow: Flow, what: str, why: str, fix: str) -> Problem:
    return Problem(
        code=code,
        key=f"channel {flow.channel}",
        what=what,
        got=f"{flow.channel}: {flow.source} -> {flow.target}, {flow.capacity} items",
        why=why,
        fix=fix,
    )
