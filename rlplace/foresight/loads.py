"""What the ranks of a job do between two moments at which its loop waits for all, by the sizes of its components.

These are sums of the laps that the ranks of a prediction spend, at least: see the `performance` of each job.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.foresight.costs import Cost, Costs
from rlplace.placement.schedule import Move


class Size(NamedTuple):
    """Of a component: its accelerators, and those of each rank."""

    accelerators: int
    ranks: int

    @property
    def each(self) -> int:
        return max(1, self.accelerators // self.ranks)


class Mode(NamedTuple):
    """What holds for all components."""

    groups: int  # stage groups
    shared: bool  # env and rollout share processes, rank by rank


class Load(NamedTuple):
    """What one component does between two moments at which the loop waits for everybody."""

    ranks: int
    calls: int  # messages to each rank
    longest_s: float  # of its most loaded rank, one after another
    cpu_s: float  # of all ranks
    least_s: float  # of the rank that computes least
    meets: bool = False  # whether all ranks wait for each other when they begin and before they end

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
        """Return the processor time of so many of its ranks, at least."""
        if ranks == self.ranks:
            return self.cpu_s
        return ranks * self.least_s


Sizes = Mapping[str, Size]
Spread = Mapping[str, Mapping[int, int]]  # component -> node -> ranks there
Loads = Mapping[str, Load]


class Options(NamedTuple):
    """Loads of a stage for some of the sizes that its components may have."""

    loads: Loads
    chain_s: float  # of work of several components that wait for each other
    wide: Mapping[str, int]  # component -> its most accelerators


class Stages(abc.ABC):
    """The loads of the stages of a job."""

    names: tuple[str, ...]  # of stages that are no sub-stages
    scoring: tuple[str, ...] = ()  # components that work in rollout, or else in infer

    def __init__(self, config: Any, costs: Costs) -> None:
        self._config = config
        self._costs = costs
        self._inline = config.cluster.launcher == "inline"

    @abc.abstractmethod
    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        """Return what each active component does in a stage, and a chain of work of several, without moves."""

    @abc.abstractmethod
    def depends(self, stage: str) -> tuple[str, ...]:
        """Return the components whose sizes the work of a stage depends on."""

    @abc.abstractmethod
    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        """Return the loads for sizes of which one is taken, or loads that are below those of all of them."""

    def move(self, move: Move, size: Size, *, joins: bool) -> Load:
        """Return what a change of residency takes. `joins`: it goes to the ranks in one message with other calls."""
        work = [self._of(f"{move.component}.move_{move.after.word}/rest")] * size.ranks
        if not joins:
            return self._load(move.component, work)
        return Load(
            size.ranks, 0, work[0].seconds, work[0].cpu_s * size.ranks, work[0].cpu_s
        )

    def _of(self, name: str, size: float = 0.0) -> Cost:
        """Return a cost in which what an accelerator does is no work of processors."""
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
        """Return the load of one call; `work`: of each rank."""
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
        """Return the least cost of any size between two, or of `each` one of what it does."""
        sizes = [
            low,
            high,
            *(size for size in self._costs.sizes(name) if low < size < high),
        ]
        return least_of(
            [self._of(name, size).times(1.0 / size if each else 1.0) for size in sizes]
        )


def least_of(costs: Sequence[Cost]) -> Cost:
    """Return a cost that is above none of these, of processors and in all."""
    cpu_s = min(cost.cpu_s for cost in costs)
    return Cost(cpu_s, min(cost.seconds for cost in costs) - cpu_s)
