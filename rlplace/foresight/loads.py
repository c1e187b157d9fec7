"""Lower bounds of the work of a job's ranks between two synchronizations of the loop, by the sizes of components.

These are sums of the laps that the ranks of a prediction spend, at least: see the `performance` of each job.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.foresight.costs import Cost, Costs
from rlplace.placement.schedule import Move


class Size(NamedTuple):
    """The number of accelerators of a component, and its number of ranks. `each`: accelerators of one rank."""

    accelerators: int
    ranks: int

    @property
    def each(self) -> int:
        return max(1, self.accelerators // self.ranks)


class Mode(NamedTuple):
    """Settings of a plan that hold for all components."""

    groups: int  # stage groups
    shared: bool  # whether env and rollout share processes, rank by rank


class Load(NamedTuple):
    """The work of one component between two points at which the loop waits for all calls."""

    ranks: int
    calls: int  # messages to each rank
    longest_s: float  # seconds of the most loaded rank
    cpu_s: float  # processor seconds of all ranks
    least_s: float  # processor seconds of the least loaded rank
    meets: bool = (
        False  # whether all ranks wait for each other at the start and at the end
    )

    def after(self, other: Load) -> Load:
        longest_s, cpu_s, least_s = (
            a + b for a, b in zip(self[2:5], other[2:5], strict=True)
        )
        return Load(
            self.ranks,
            self.calls + other.calls,
            longest_s,
            cpu_s,
            least_s,
            self.meets or other.meets,
        )

    def on(self, ranks: int) -> float:
        """Return a lower bound of the processor seconds that any `ranks` of the component's ranks take together."""
        if ranks == self.ranks:
            return self.cpu_s
        return ranks * self.least_s


Sizes = Mapping[str, Size]
Spread = Mapping[str, Mapping[int, int]]  # component -> node -> number of ranks
Loads = Mapping[str, Load]


class Options(NamedTuple):
    """Loads of a stage that are a lower bound for some of the sizes of its components."""

    loads: Loads
    chain_s: float  # seconds of work of components that wait for each other
    wide: Mapping[str, int]  # component -> its largest number of accelerators


class Stages(abc.ABC):
    """The loads of the stages of a job: lower bounds of their work."""

    names: tuple[str, ...]  # names of the stages, without sub-stages
    scoring: tuple[str, ...] = ()  # components that score, during rollout or in infer

    def __init__(self, config: Any, costs: Costs) -> None:
        self._config = config
        self._costs = costs
        self._inline = config.cluster.launcher == "inline"

    @abc.abstractmethod
    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        """Return component -> its work in a stage, and the seconds of work of components that wait for each other.

        `active`: the components at work. Moves are not included.
        """

    @abc.abstractmethod
    def depends(self, stage: str) -> tuple[str, ...]:
        """Return the components whose sizes affect the work of a stage."""

    @abc.abstractmethod
    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        """Yield loads of a stage that together are a lower bound for each combination of the given sizes.

        `sizes`: component -> the sizes that it may have. A job may yield one option for each combination of sizes, or
        fewer options, each of them a lower bound for several combinations.
        """

    def move(self, move: Move, size: Size, *, joins: bool) -> Load:
        """Return the load of a move of a component. `joins`: whether the move shares a message with other calls."""
        work = [self._of(f"{move.component}.move_{move.after.word}/rest")] * size.ranks
        if not joins:
            return self._load(move.component, work)
        return Load(
            size.ranks, 0, work[0].seconds, work[0].cpu_s * size.ranks, work[0].cpu_s
        )

    def _of(self, name: str, size: float = 0.0) -> Cost:
        """Return the least cost, cold or warm, of a lap of this size.

        Seconds of an accelerator count as blocked seconds. `name`: `<component>.<method>/<part>`.
        """
        call, _, part = name.partition("/")
        names = {self._costs.known(call, part, cold=cold) for cold in (False, True)}
        found = [self._costs.of(each, size) for each in sorted(names)]
        cost = found[0]._replace(
            cpu_s=min(c.cpu_s for c in found), blocked_s=min(c.blocked_s for c in found)
        )
        if cost.on_accelerator:
            return Cost(0.0, cost.seconds)
        return cost

    def _around(self, component: str) -> Cost:
        if self._inline:
            return Cost(0.0)
        return self._of(f"{component}/ray_call")

    def _load(self, component: str, work: Sequence[Cost]) -> Load:
        """Return the load of one call. `work`: the cost of each rank."""
        around = self._around(component)
        longest = max(cost.seconds for cost in work) + around.seconds
        cpu = [cost.cpu_s + around.cpu_s for cost in work]
        return Load(len(work), 1, longest, sum(cpu), min(cpu))

    def _sync(self, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        pushed = self._of("actor.push_weights/rest")
        pulled = self._of("rollout.pull_weights/rest")
        push = self._load("actor", [pushed] * ranks["actor"])
        pull = self._load("rollout", [pulled] * ranks["rollout"])
        return {"actor": push, "rollout": pull}, push.longest_s + pulled.seconds

    def _least(self, name: str, low: float, high: float, *, each: bool = False) -> Cost:
        """Return the least cost of a lap of any size between `low` and `high`. `name`: name of the cost.

        `each`: whether the cost is divided by the size.
        """
        sizes = [
            low,
            high,
            *(size for size in self._costs.sizes(name) if low < size < high),
        ]
        return least_of(
            [self._of(name, size).times(1.0 / size if each else 1.0) for size in sizes]
        )


def least_of(costs: Sequence[Cost]) -> Cost:
    """Return a cost that has the least processor seconds of all `costs`, and the least total seconds of all `costs`."""
    cpu_s = min(cost.cpu_s for cost in costs)
    return Cost(cpu_s, min(cost.seconds for cost in costs) - cpu_s)
