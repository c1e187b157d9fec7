"""How the seconds of a call depend on the number of ranks, for numbers of ranks that were not measured.

::

    measured with 2 ranks: 0.6 s    work is shared    each rank does the same    all is an exchange between ranks
    with 4 ranks                    0.3 s             0.6 s                      1.2 s
    with 1 rank                     1.2 s             0.6 s                      0 s, since nothing is exchanged

A prediction assumes that ranks share the work. The least and the most seconds of its range follow from the other two
assumptions. An exchange is assumed only for worker classes with ranks that join a process group. A measurement with 1
rank says nothing about an exchange between more ranks: then the range has no upper end.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence

from rlplace.foresight.costs import NOTHING, Cost, Costs
from rlplace.foresight.profile import Profile

PART = "/seconds"  # end of the names of costs whose size is 1 / ranks
_SAME = 0.06  # sizes of a profile have two digits


class Scaling(enum.Enum):
    """The assumption about the cost of a call with a number of ranks that was not measured.

    SHARED: ranks share the work; used for predictions. LEAST, MOST: the least or the greatest of all possible costs;
    used for the range of a prediction.
    """

    SHARED = "shared"
    LEAST = "least"
    MOST = "most"


class RankCosts(Costs):
    """The costs of a custom job. A call with an assumed cost at some number of ranks is recorded in `scaled`."""

    def __init__(
        self,
        profile: Profile,
        exchanging: Collection[str] = (),
        scaling: Scaling = Scaling.SHARED,
    ) -> None:
        """Give the costs of `profile`.

        `exchanging`: components with ranks that join a process group. `scaling`: which cost to assume for a number of
        ranks that was not measured.
        """
        super().__init__(profile)
        self._exchanging = exchanging
        self._scaling = scaling

    def _of(self, name: str, size: float) -> Cost:
        shared = super()._of(name, size)
        if not size or not name.endswith(PART) or name in self.missing:
            return shared
        measured = measured_ranks(self.profile, name)
        ranks = round(1.0 / size)
        if is_measured(measured, ranks):
            return shared
        # The scaling is told; the size is no further thing to tell.
        self.stretched.pop(name, None)
        call = name.removesuffix(PART)
        self.scaled[call] = (measured, ranks)
        if self._scaling is Scaling.SHARED:
            return shared
        ends = self._ends(name, measured, ranks, shared)
        if self._scaling is Scaling.LEAST:
            return min(ends, key=_seconds)
        return max(ends, key=_seconds)

    def _ends(
        self, name: str, measured: Sequence[int], ranks: int, shared: Cost
    ) -> list[Cost]:
        """Return the possible costs of a call with `ranks` ranks, a number that was not measured.

        `name`: name of the cost. `measured`: the numbers of ranks that were measured. `shared`: the cost if ranks share
        the work. If `ranks` is between two measured numbers, the possible costs are `shared` and the costs at these two
        numbers. Else there is one cost for each assumption in the module's docstring.
        """
        fewer = [each for each in measured if each < ranks]
        more = [each for each in measured if each > ranks]
        if fewer and more:
            beside = (max(fewer), min(more))
            return [shared, *(super(RankCosts, self)._of(name, 1 / n) for n in beside)]
        nearest = max(fewer) if fewer else min(more)
        same = super()._of(name, 1.0 / nearest)
        # A cost may have a fixed share, which is an assumption too
        ends = [shared, same, same.times(nearest / ranks)]
        if name.partition(".")[0] not in self._exchanging:
            return ends
        # A single rank exchanges nothing.
        if ranks == 1:
            return [*ends, NOTHING]
        if nearest == 1:
            self.unbounded = True
            return ends
        return [*ends, same.times(ranks / nearest)]


def _seconds(cost: Cost) -> float:
    return cost.seconds


def measured_ranks(profile: Profile, name: str) -> tuple[int, ...]:
    """Return the numbers of ranks at which the cost `name` was measured."""
    curve = profile.costs.get(name)
    if curve is None:
        return ()
    counts = {round(1.0 / point.size) for point in curve.points if point.size}
    return tuple(sorted(counts))


def is_measured(measured: Collection[int], ranks: int) -> bool:
    """Return whether `ranks` is one of the measured numbers. They are compared with a tolerance of 6 %.

    The tolerance is needed because a profile stores 1 / ranks with two digits.
    """
    return any(math.isclose(ranks, each, rel_tol=_SAME) for each in measured)


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers as text, such as "1, 2 and 4"."""
    texts = [str(each) for each in ranks]
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
