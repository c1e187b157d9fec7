"""What the ranks of a job do between two moments at which its loop waits for all, by the sizes of its components.

These are sums of the laps that the ranks of a prediction spend, at least: see `simulators`, `text` and `learners`.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.config.schema import Config
from rlplace.foresight.costs import Cost, Costs
from rlplace.placement.flow import block_edges
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

    def __init__(self, config: Config, costs: Costs) -> None:
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


class SimulatorStages(Stages):
    """Of a job with simulators."""

    names = ("sync", "rollout", "learn")
    _depends: Mapping[str, tuple[str, ...]] = {
        "sync": ("actor", "rollout"),
        "rollout": ("env", "rollout"),
        "learn": ("actor", "env"),
    }

    def __init__(self, config: Config, costs: Costs) -> None:
        super().__init__(config, costs)
        self._found: dict[tuple[object, ...], tuple[Loads, float]] = {}

    def loads(
        self, stage: str, active: Sequence[str], mode: Mode, sizes: Sizes
    ) -> tuple[Loads, float]:
        key = (stage, mode, *(sizes[c] for c in self._depends[stage]))
        if key not in self._found:
            ranks = {c: sizes[c].ranks for c in self._depends[stage]}
            match stage:
                case "sync":
                    self._found[key] = self._sync(ranks)
                case "rollout":
                    self._found[key] = self._rollout(mode, ranks)
                case _:
                    self._found[key] = self._learn(ranks)
        return self._found[key]

    def depends(self, stage: str) -> tuple[str, ...]:
        return self._depends[stage]

    def options(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> Iterator[Options]:
        components = self._depends[stage]
        for chosen in itertools.product(*(sizes[c] for c in components)):
            if not (mode.shared and stage == "rollout" and chosen[0] != chosen[1]):
                one = dict(zip(components, chosen, strict=True))
                yield Options(
                    *self.loads(stage, (), mode, one),
                    {c: size.accelerators for c, size in one.items()},
                )

    def _rollout(self, mode: Mode, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        """Return env and rollout, and the steps of one stage group of a rank, which wait for each other."""
        config = self._config
        run = "env.run/"
        generate = "rollout.generate/"
        of = self._of
        steps = config.algorithm.rollout_steps
        envs = ranks["env"]
        engines = ranks["rollout"]
        rows = config.simulator_env.total_num_envs // mode.groups
        laps = steps * mode.groups
        if mode.shared:
            each = rows // envs
            decided = of(generate + "policy", each)
            waited = of(run + "direct_wait")
            alone = self._costs.known("rollout.generate", "policy", cold=False)
            more_s = max(0.0, waited.cpu_s - self._costs.of(alone, each).cpu_s)
            step = of(run + "sim", each).plus(decided, Cost(more_s, waited.blocked_s))
            work = step.times(laps).plus(of(run + "rest", each * laps))
            return {
                "env": self._load("env", [work] * envs),
                "rollout": self._load("rollout", [Cost(0.0)] * engines),
            }, 0.0
        sent: list[list[int]] = [[] for _ in range(envs)]
        received: list[list[int]] = [[] for _ in range(engines)]
        for source, target, share in shares_of(rows, envs, engines):
            sent[source].append(share)
            received[target].append(share)
        merges = config.torch_rollout.merge_requests
        put = of(run + "put")
        wait = of(run + "wait")
        around_answer = of(generate + "wait").plus(of(generate + "put"))

        def policy(shares: Sequence[int]) -> Cost:
            """Return what the answers of one step and group take at least."""
            if merges:
                return self._least(
                    generate + "policy", min(shares), mode.groups * sum(shares)
                ).times(1 / mode.groups)
            return Cost(0.0).plus(*(of(generate + "policy", share) for share in shares))

        simulated = list[Cost]()
        chain_s = 0.0
        for shares in sent:
            sim = of(run + "sim", sum(shares))
            rest = of(run + "rest", sum(shares) * laps)
            talk = put.plus(wait).times(len(shares))
            simulated.append(sim.plus(talk).times(laps).plus(rest))
            answer = (
                self._least(generate + "policy", shares[-1], rows)
                if merges
                else policy(shares[-1:])
            )
            step = put.times(len(shares)).plus(around_answer, answer, wait, sim)
            chain_s = max(
                chain_s, step.times(steps).plus(rest, self._around("env")).seconds
            )
        rest = of(generate + "rest")
        decided_in = [
            policy(s).plus(around_answer.times(len(s))).times(laps).plus(rest)
            for s in received
        ]
        return {
            "env": self._load("env", simulated),
            "rollout": self._load("rollout", decided_in),
        }, chain_s

    def _learn(self, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        algorithm = self._config.algorithm
        of = self._of
        learn = "actor.learn/"
        actors = ranks["actor"]
        planned = algorithm.epochs * algorithm.num_minibatches
        steps = round(planned * self._costs.count(learn + "steps_share", 1.0))
        rows = [0] * actors
        shares = [0] * actors
        for _, target, share in shares_of(
            self._config.simulator_env.total_num_envs, ranks["env"], actors
        ):
            rows[target] += share
            shares[target] += 1
        exchange = of(learn + "exchange", actors)
        work = list[Cost]()
        for count, received in zip(rows, shares, strict=True):
            samples = algorithm.rollout_steps * count
            minibatch = of(learn + "minibatch", samples / algorithm.num_minibatches)
            once = of(learn + "estimate", samples).plus(
                exchange, of(learn + "rest", actors)
            )
            step = minibatch.plus(exchange, of(learn + "step"))
            work.append(
                step.times(steps).plus(once, of(learn + "wait").times(received))
            )
        return {"actor": self._load("actor", work)}, 0.0


def least_of(costs: Sequence[Cost]) -> Cost:
    """Return a cost that is above none of these, of processors and in all."""
    cpu_s = min(cost.cpu_s for cost in costs)
    return Cost(cpu_s, min(cost.seconds for cost in costs) - cpu_s)


def shares_of(rows: int, sources: int, targets: int) -> Iterator[tuple[int, int, int]]:
    """Return source rank, target rank and rows of every share, as `scatter_rows` cuts them."""
    blocks = [block_edges(rows, ranks) for ranks in (sources, targets)]
    at = [0, 0]
    for start, stop in itertools.pairwise(sorted({*blocks[0], *blocks[1]})):
        at = [
            rank + (block[rank + 1] <= start)
            for rank, block in zip(at, blocks, strict=True)
        ]
        yield at[0], at[1], stop - start
