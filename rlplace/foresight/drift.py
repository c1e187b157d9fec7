"""One profile of a run whose work changes: the latest measurements, and older ones of other sizes, brought up to date.

::

    measured at iteration 10, env on 2 ranks     0.60 s a call
    measured at iteration 30, env on 4 ranks     0.30 s
    measured at iteration 90, env on 4 ranks     0.45 s   1.5 times as much
    so at iteration 90,       env on 2 ranks     0.90 s   not measured there, but grown with the work
"""

from __future__ import annotations

import dataclasses
import math

from rlplace.foresight.profile import Curve, Point, Profile

_SAME = 0.06  # sizes of a profile have two digits


def carried(known: Profile | None, recent: Profile) -> Profile:
    """Return the recent profile, with costs that only an earlier profile has.

    If both profiles measured a cost at the same size, its points at other sizes are multiplied by the ratio of both.
    `known`: the result of the last call; None: there is none.
    """
    if known is None:
        return recent
    costs = dict(known.costs)
    for name, curve in recent.costs.items():
        old = costs.get(name)
        if old is None or (old.source, old.on) != (curve.source, curve.on):
            costs[name] = curve
        else:
            costs[name] = _carried(old, curve)
    return Profile(
        machine=recent.machine,
        versions=recent.versions,
        subjects={**known.subjects, **recent.subjects},
        costs=costs,
        counts={**known.counts, **recent.counts},
        samples={**known.samples, **recent.samples},
    )


def _carried(old: Curve, recent: Curve) -> Curve:
    others = list(old.points)
    before_s = now_s = 0.0
    for point in recent.points:
        for same in [each for each in others if _same(each, point)]:
            before_s += _seconds(same)
            now_s += _seconds(point)
            others.remove(same)
    ratio = 1.0
    if before_s and now_s:
        ratio = now_s / before_s
    points = [*recent.points, *(_times(point, ratio) for point in others)]
    return dataclasses.replace(
        recent, points=tuple(sorted(points, key=lambda point: point.size))
    )


def _same(one: Point, other: Point) -> bool:
    return math.isclose(one.size, other.size, rel_tol=_SAME)


def _seconds(point: Point) -> float:
    return point.cpu_s + point.blocked_s


def _times(point: Point, factor: float) -> Point:
    return dataclasses.replace(
        point,
        cpu_s=point.cpu_s * factor,
        least_cpu_s=point.least_cpu_s * factor,
        blocked_s=point.blocked_s * factor,
    )
