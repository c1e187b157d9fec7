"""The cost of a lap (one measured unit of work) of any size, from the points of a profile; records missing costs."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rlplace.foresight.profile import ACCELERATOR, ASSUMED, COLD, Point, Profile, mean

_T = TypeVar("_T")

# Share of a lap's seconds that does not depend on its size; used where only one size was measured. A policy with small
# batches is bound by call overhead, a simulator steps one environment after another.
_FIXED = {
    "sim": 0.1,
    "policy": 0.8,
    "minibatch": 0.5,
    "estimate": 0.5,
    "prefill": 0.5,
    "decode": 0.8,
    "micro_batch": 0.2,
    "sharded_micro_batch": 0.4,
    "score": 0.2,
    "sharded_score": 0.4,
    "infer": 0.2,
    "seconds": 0.0,
}
_FIXED_ELSE = 1.0
_SHARE = 0.02
# relative deviation, over iterations or from the line, above which a cost is called noisy
_NOISY = 0.35
_POINTS = "points of costs"  # what all costs of a profile share
_JOINED = ("/exchange", ".learn/rest")  # costs whose size is the number of ranks
# ratio below which two sizes count as one point: minibatches of a rank differ by chance
_NEAR = 1.2


class Cost(NamedTuple):
    """The seconds of one lap: one run of a measured part of a call, such as one decoding step.

    `cpu_s`: seconds on a processor, or on the rank's accelerator if `on_accelerator` is set. `blocked_s`: further
    seconds in which the lap waits and uses neither.
    """

    cpu_s: float
    blocked_s: float = 0.0
    on_accelerator: bool = False

    @property
    def seconds(self) -> float:
        return self.cpu_s + self.blocked_s

    def times(self, count: float) -> Cost:
        return self._replace(cpu_s=self.cpu_s * count, blocked_s=self.blocked_s * count)

    def plus(self, *others: Cost) -> Cost:
        """Return the sum of this cost and all `others`: the cost of their work, one after the other."""
        costs = (self, *others)
        return Cost(
            sum(cost.cpu_s for cost in costs), sum(cost.blocked_s for cost in costs)
        )


NOTHING = Cost(0.0)


class Costs:
    """Gives costs of a profile: the seconds of one lap (one run of a measured part of a call) with any size of work.

    It also records which costs were asked for, and which of them the profile lacks.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        # Missing costs -> a size that was asked for
        self.missing: dict[str, float] = {}
        # Costs asked for outside of the measured sizes -> such a size
        self.stretched: dict[str, float] = {}
        # Costs that are assumed, not measured
        self.assumed: set[str] = set()
        # Call whose scaling with ranks is assumed -> ranks it was measured with, and ranks it was asked for
        self.scaled: dict[str, tuple[Sequence[int], int]] = {}
        # Whether a cost could be any number of seconds
        self.unbounded = False
        # Cost -> total processor seconds that were asked for
        self.spent: dict[str, float] = defaultdict(float)
        self._found: dict[tuple[str, float], Cost] = {}
        # (component, possible names) -> name of the cost
        self._first: dict[tuple[str, tuple[str, ...]], str] = {}
        # (call, part, whether it is cold) -> name of the cost
        self._names: dict[tuple[str, str, bool], str] = {}
        if _POINTS not in profile.computed:
            profile.computed[_POINTS] = {
                name: gathered(curve.points) for name, curve in profile.costs.items()
            }
        self._points: Mapping[str, Sequence[Point]] = profile.computed[_POINTS]

    def known(self, call: str, part: str, *, cold: bool) -> str:
        """Return the name of the cost for a part of a call: of the cold cost if `cold` is set, else of the warm cost.

        A lap is cold if other threads have used the processor before it. If the profile has only one of the two costs,
        return its name. `call`: `<component>.<method>`. `part`: name of the part.
        """
        key = (call, part, cold)
        if (name := self._names.get(key)) is None:
            names = (f"{call}/{COLD}{part}", f"{call}/{part}")
            ordered = names if cold else names[::-1]
            measured = (name for name in ordered if name in self._points)
            name = self._names[key] = next(measured, names[1])
        return name

    def first_known(self, component: str, names: tuple[str, ...]) -> str:
        """Return the first of several costs of a component that the profile has; if it has none, the first one.

        `names`: possible costs as `<method>/<part>`.
        """
        key = (component, names)
        if (found := self._first.get(key)) is None:
            whole = [f"{component}.{name}" for name in names]
            measured = (name for name in whole if name in self.profile.costs)
            found = self._first[key] = next(measured, whole[0])
        return found

    def of(self, name: str, size: float = 0.0, *, laps: float = 1.0) -> Cost:
        """Return the cost of `laps` laps of `size` units of work each; zero if the profile does not have the cost.

        `name`: name of the cost, `<component>.<method>/<part>`.
        """
        key = (name, size)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = self._of(name, size)
        self.spent[name] += found.cpu_s * laps
        if laps == 1.0:
            return found
        return found.times(laps)

    def once(self, key: object, compute: Callable[[Costs], _T]) -> _T:
        """Return what `compute` returns for the costs of this profile. All predictions of the profile share the result.

        Costs that `compute` has asked for count as asked for here, also if another prediction has computed the result.
        `key`: everything else on which the result depends.
        """
        known = self.profile.computed
        if key not in known:
            asked = Costs(self.profile)
            known[key] = compute(asked), asked
        result: _T
        result, asked = known[key]
        for name, seconds in asked.spent.items():
            self.spent[name] += seconds
        for mine, theirs in (
            (self.missing, asked.missing),
            (self.stretched, asked.stretched),
        ):
            for name, size in theirs.items():
                mine.setdefault(name, size)
        self.assumed |= asked.assumed
        return result

    @property
    def spread(self) -> float:
        """The relative standard deviation over iterations of the measured costs that were asked for.

        It is an average over these costs, weighted by their processor seconds.
        """
        whole = sum(self.spent.values())
        if whole:
            return (
                sum(
                    seconds * self._spread(name) for name, seconds in self.spent.items()
                )
                / whole
            )
        return 0.0

    @property
    def noisy(self) -> list[str]:
        """Texts that name important costs with a large deviation, over iterations or from the fitted line."""
        whole = sum(self.spent.values())
        found = [
            name for name, seconds in self.spent.items() if seconds > _SHARE * whole
        ]
        off = {name: max(self._spread(name), self._bent(name)) for name in found}
        return [
            f"{name} by {off[name]:.0%}"
            for name in sorted(found, key=off.__getitem__, reverse=True)
            if off[name] > _NOISY
        ]

    def _bent(self, name: str) -> float:
        """Return the largest relative deviation of the measured points of the cost `name` from the line fitted to them.

        Return 0 for a cost with a number of ranks as its size.
        """
        sized = [point for point in self._points.get(name, ()) if point.size > 0.0]
        if name.endswith(_JOINED):
            return 0.0
        return fit_error(sized)

    def _spread(self, name: str) -> float:
        points = self._points.get(name, ())
        laps = sum(point.laps for point in points)
        if laps:
            return sum(point.spread * point.laps for point in points) / laps
        return 0.0

    def sizes(self, name: str) -> list[float]:
        """Return the sizes at which the cost `name` was measured, and sizes just below and just above each of them.

        Between these sizes, the cost is linear in the size. At these sizes, its slope can change and the cost can jump.
        """
        return [
            point.size * off
            for point in self._points.get(name, ())
            for off in (1 - 1e-6, 1.0, 1 + 1e-6)
        ]

    def count(self, name: str, default: float) -> float:
        return self.profile.counts.get(name, default)

    def fixed_share(self, name: str) -> float:
        """Return the share of a cost that does not depend on its size; it counts if only one size was measured."""
        return _FIXED.get(name.rpartition("/")[2], _FIXED_ELSE)

    def _of(self, name: str, size: float) -> Cost:
        points = self._points.get(name, ())
        # A single rank does not wait for others, so it is not on the line.
        if name.endswith(_JOINED):
            points = (
                tuple(point for point in points if (point.size > 1.0) == (size > 1.0))
                or points
            )
        if not points:
            self.missing.setdefault(name, size)
            return NOTHING
        if self.profile.costs[name].source == ASSUMED:
            self.assumed.add(name)
        if not points[0].size * 0.99 <= size <= points[-1].size * 1.01 and size:
            self.stretched.setdefault(name, size)
        cpu = [(p.size, p.cpu_s, p.laps) for p in points]
        fixed = self.fixed_share(name)
        blocked = [(p.size, p.blocked_s, p.laps) for p in points]
        there = self.profile.costs[name].on == ACCELERATOR
        return Cost(_at(cpu, size, fixed), _at(blocked, size, fixed), there)


def gathered(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points in the order of their sizes. Neighbouring points with nearly equal sizes are merged.

    Sizes are nearly equal if they are within 20 % of each other. The merged point is the mean of its points, weighted
    by their numbers of laps.
    """
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda p: p.size):
        if groups and point.size <= groups[-1][0].size * _NEAR:
            groups[-1].append(point)
        else:
            groups.append([point])
    return tuple(functools.reduce(mean, group) for group in groups)


def _at(
    points: Sequence[tuple[float, float, float]], size: float, fixed: float
) -> float:
    """Return the value of a cost at `size`: interpolated between two points; outside of all points, on the fitted line.

    `points`: (size, value, weight) of each point. `fixed`: used if there is only one point: the share of its value that
    does not depend on the size.
    """
    if len(points) == 1:
        at, value, _ = points[0]
        if at and size:
            return value * (fixed + (1.0 - fixed) * size / at)
        return value
    for (left, low, _), (right, high, _) in itertools.pairwise(points):
        if left <= size <= right:
            if right > left:
                return low + (high - low) * (size - left) / (right - left)
            return (low + high) / 2
    base, slope = fit(points)
    return max(0.0, base + slope * size)


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return intercept and slope, both at least 0, of the line with the least sum of squared relative errors.

    `points`: (size, value, weight) of each point. The weights are ignored.
    """
    sums = [0.0] * 5
    for x, y, _ in points:
        weight = 1.0 / max(y, 1e-12) ** 2
        for at, value in enumerate((1.0, x, y, x * x, x * y)):
            sums[at] += weight * value
    n, sx, sy, sxx, sxy = sums
    spread = n * sxx - sx * sx
    slope = (n * sxy - sx * sy) / spread if spread > 0.0 else 0.0
    base = (sy - slope * sx) / n
    if slope < 0.0:
        return sy / n, 0.0
    if base >= 0.0:
        return (base, slope)
    return (0.0, sxy / sxx)


def fit_error(points: Sequence[Point]) -> float:
    """Return the largest relative deviation of a point's processor seconds from the line fitted to all points.

    Return 0 for fewer than 3 points.
    """
    values = [(p.size, p.cpu_s, p.laps) for p in points]
    if len(values) < 3:
        return 0.0
    base, slope = fit(values)
    return max(abs(base + slope * x - y) / y for x, y, _ in values if y > 0.0)
