"""Lower bounds of the work of a job's ranks between two moments at which the loop waits, by the sizes of components.

Each bound is a sum of the laps that the ranks spend in a prediction at least: see the `performance` of each job.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.foresight.costs import Cost, Costs
from rlplace.placement.schedule import Move

_KEPT_COSTS = 1 << 16  # costs of laps that a search does not compute again


class Size(NamedTuple):
    """The size of a component: its number of accelerators and its number of ranks.

    The property `each` is the number of accelerators of one rank, at least 1.
    """

    accelerators: int
    ranks: int

    @property
    def each(self) -> int:
        return max(1, self.accelerators // self.ranks)


class Mode(NamedTuple):
    """Settings of a plan that hold for all components.

    `groups`: number of stage groups of an env rank (shares of its environments that step in turn). `shared`: whether
    env and rollout share processes, rank by rank.
    """

    groups: int
    shared: bool


class Load(NamedTuple):
    """The work of one component between two moments at which the loop waits for all calls.

    `calls`: number of messages to each rank. `longest_s`: seconds of the most loaded rank. `cpu_s`: processor seconds
    of all ranks together.
    `least_s`: processor seconds of the least loaded rank. `meets`: whether all ranks wait for each other at the start
    and at the end.
    """

    ranks: int
    calls: int
    longest_s: float
    cpu_s: float
    least_s: float
    meets: bool = False

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
        """Return a lower bound of the processor seconds that any `ranks` of this component's ranks take together."""
        if ranks == self.ranks:
            return self.cpu_s
        return ranks * self.least_s


Sizes = Mapping[str, Size]
Spread = Mapping[str, Mapping[int, int]]  # component -> node -> number of ranks
Loads = Mapping[str, Load]


class Options(NamedTuple):
    """The loads of a stage, as lower bounds for one or several combinations of its components' sizes.

    `loads`: component -> lower bound of its work. `chain_s`: least seconds of components that wait for each other in
    turn. `wide`: component -> its largest number of accelerators.
    """

    loads: Loads
    chain_s: float
    wide: Mapping[str, int]


class Stages(abc.ABC):
    """Computes lower bounds of the work in each stage of a job.

    `names`: names of the stages, without sub-stages. `scoring`: components that score samples, during rollout or in
    infer. `ahead`: the stage that works ahead of all others and beside them; None: stages follow each other, or the
    work of such a stage is not known. `ahead_share`: of the runs of this stage, for as many iterations as a prediction
    counts, the share that lies within these iterations from begin to end.
    """

    names: tuple[str, ...]
    scoring: tuple[str, ...] = ()
    ahead: str | None = None
    ahead_share: float = 0.0

    def __init__(self, config: Any, costs: Costs) -> None:
        self._config = config
        self._costs = costs
        self._inline = config.cluster.launcher == "inline"
        # Micro-batches are nearly full, so many have the same size
        self._of = functools.lru_cache(maxsize=_KEPT_COSTS)(self._lower_cost)

    @abc.abstractmethod
    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        """Return component -> lower bound of its work in a stage, and the least seconds of the chain.

        The chain is the work of components that wait for each other in turn. Moves (changes of residency) are not
        included. `active`: the components at work. `mode`: settings of the plan. `sizes`: component -> its size.
        """

    @abc.abstractmethod
    def depends(self, stage: str) -> tuple[str, ...]:
        """Return the components for which the size affects the work of a stage."""

    @abc.abstractmethod
    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        """Yield loads of a stage, so that each combination of the given sizes has a load as its lower bound.

        `sizes`: component -> its possible sizes. There may be one `Options` for each combination, or fewer, each of
        which is a lower bound for several combinations.
        """

    def move(self, move: Move, size: Size, *, joins: bool) -> Load:
        """Return the load of one move of a component with this size.

        `joins`: whether the move is sent in one message with other calls, so that it adds no message.
        """
        work = [self._of(f"{move.component}.move_{move.after.word}/rest")] * size.ranks
        if not joins:
            return self._load(move.component, work)
        return Load(
            size.ranks, 0, work[0].seconds, work[0].cpu_s * size.ranks, work[0].cpu_s
        )

    def _lower_cost(self, name: str, size: float = 0.0) -> Cost:
        """Return the lower of the cold and the warm cost of a lap of `size` units of work.

        A lap is cold if other threads have used the processor before it. Seconds on an accelerator count as blocked
        seconds. `name`: `<component>.<method>/<part>`.
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
        """Return the load of one call to every rank of a component, with the cost of receiving the call.

        `work`: the cost of each rank's work.
        """
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
        """Return the least cost of a lap of any size from `low` to `high`. `name`: name of the cost.

        `each`: whether to divide the cost of a lap by its size first, to the cost of one unit.
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
    """Return a cost with the least processor seconds and the least total seconds of `costs`, each taken separately."""
    cpu_s = min(cost.cpu_s for cost in costs)
    return Cost(cpu_s, min(cost.seconds for cost in costs) - cpu_s)
