"""The least seconds that an iteration can take under a profile: sums, where `predict` runs the loop on a clock.

Between two moments at which the loop waits for everybody, time passes for at least as long as

- the most loaded rank computes and waits, after the driver's first call and before its last answer,
- a node's processors need for all that is computed there,
- the driver needs for its calls.

No prediction is below the bound, so a search may leave out every plan whose bound is above what it has found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rlplace.config.schema import Config
from rlplace.foresight.costs import Cost, Costs
from rlplace.placement.flow import block_edges
from rlplace.placement.machines.topology import Topology
from rlplace.placement.schedule import Move, Schedule, base_stage


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
    calls: int  # of each rank
    longest_s: float  # of its most loaded rank, one after another
    cpu_s: float  # of all ranks
    least_s: float  # of the rank that computes least

    def after(self, other: Load) -> Load:
        longest_s, cpu_s, least_s = (a + b for a, b in zip(self[2:], other[2:], strict=True))
        return Load(self.ranks, self.calls + other.calls, longest_s, cpu_s, least_s)

    def on(self, ranks: int) -> float:
        """Return the processor time of so many of its ranks, at least."""
        return self.cpu_s if ranks == self.ranks else ranks * self.least_s


Sizes = Mapping[str, Size]
Spread = Mapping[str, Mapping[int, int]]  # component -> node -> ranks there
Loads = Mapping[str, Load]


class Stages:
    """The loads of the stages of a job with simulators, by the sizes of its components."""

    # Stage -> the components whose sizes its work depends on.
    depends: Mapping[str, tuple[str, ...]] = {
        "sync": ("actor", "rollout"),
        "rollout": ("env", "rollout"),
        "learn": ("actor", "env"),
    }

    def __init__(self, config: Config, costs: Costs) -> None:
        self._config, self._costs = config, costs
        self._inline = config.cluster.launcher == "inline"
        self._found: dict[tuple[object, ...], tuple[Loads, float]] = {}

    def loads(self, stage: str, mode: Mode, sizes: Sizes) -> tuple[Loads, float]:
        """Return what each component does in a stage, and a chain of work of several, without moves."""
        key = (stage, mode, *(sizes[c] for c in self.depends[stage]))
        if key not in self._found:
            ranks = {c: sizes[c].ranks for c in self.depends[stage]}
            match stage:
                case "sync":
                    self._found[key] = self._sync(ranks)
                case "rollout":
                    self._found[key] = self._rollout(mode, ranks)
                case _:
                    self._found[key] = self._learn(ranks)
        return self._found[key]

    def move(self, move: Move, size: Size) -> Load:
        """Return what a change of residency takes."""
        return self._load(move.component, [self._of(f"{move.component}.move_{move.after.word}/rest")] * size.ranks)

    def _of(self, name: str, size: float = 0.0) -> Cost:
        """Return a cost in which what an accelerator does is no work of processors."""
        cost = self._costs.of(name, size)
        return Cost(0.0, cost.cpu_s + cost.blocked_s) if cost.on_accelerator else cost

    def _around(self, component: str) -> Cost:
        return Cost(0.0) if self._inline else self._of(f"{component}/ray_call")

    def _load(self, component: str, work: Sequence[Cost]) -> Load:
        """Return the load of one call; `work`: of each rank."""
        around = self._around(component)
        longest = max(cost.cpu_s + cost.blocked_s for cost in work) + around.cpu_s + around.blocked_s
        cpu = [cost.cpu_s + around.cpu_s for cost in work]
        return Load(len(work), 1, longest, sum(cpu), min(cpu))

    def _sync(self, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        pushed, pulled = self._of("actor.push_weights/rest"), self._of("rollout.pull_weights/rest")
        push = self._load("actor", [pushed] * ranks["actor"])
        pull = self._load("rollout", [pulled] * ranks["rollout"])
        return {"actor": push, "rollout": pull}, push.longest_s + pulled.cpu_s + pulled.blocked_s

    def _rollout(self, mode: Mode, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        """Return env and rollout, and the steps of one stage group of a rank, which wait for each other."""
        config, run, generate = self._config, "env.run/", "rollout.generate/"
        of, steps = self._of, config.algorithm.rollout_steps
        envs, engines = ranks["env"], ranks["rollout"]
        rows = config.simulator_env.total_num_envs // mode.groups
        laps = steps * mode.groups
        if mode.shared:
            each = rows // envs
            decided, waited = of(generate + "policy", each), of(run + "direct_wait")
            more_s = max(0.0, waited.cpu_s - self._costs.of(generate + "policy", each).cpu_s)
            step = _sum(decided, Cost(more_s, waited.blocked_s))
            work = _sum(_sum(of(run + "sim", each), step).times(laps), of(run + "rest"))
            return {
                "env": self._load("env", [work] * envs),
                "rollout": self._load("rollout", [Cost(0.0)] * engines),
            }, 0.0
        sent: list[list[int]] = [[] for _ in range(envs)]
        received: list[list[int]] = [[] for _ in range(engines)]
        for source, target, share in _shares(rows, envs, engines):
            sent[source].append(share)
            received[target].append(share)
        merges, put, wait = config.torch_rollout.merge_requests, of(run + "put"), of(run + "wait")
        around_answer = _sum(of(generate + "wait"), of(generate + "put"))

        def policy(shares: Sequence[int]) -> Cost:
            """Return what the answers of one step and group take at least."""
            if merges:
                return self._least(generate + "policy", min(shares), mode.groups * sum(shares)).times(1 / mode.groups)
            costs = [of(generate + "policy", share) for share in shares]
            return Cost(sum(c.cpu_s for c in costs), sum(c.blocked_s for c in costs))

        simulated, chain_s = list[Cost](), 0.0
        for shares in sent:
            sim = of(run + "sim", sum(shares))
            talk = _sum(put, wait).times(len(shares))
            simulated.append(_sum(_sum(sim, talk).times(laps), of(run + "rest")))
            answer = self._least(generate + "policy", shares[-1], rows) if merges else policy(shares[-1:])
            step = _sum(_sum(put.times(len(shares)), _sum(around_answer, answer)), _sum(wait, sim))
            chain_s = max(chain_s, steps * (step.cpu_s + step.blocked_s))
        rest, around = of(generate + "rest"), self._around("env")
        decided_in = [_sum(_sum(policy(s), around_answer.times(len(s))).times(laps), rest) for s in received]
        ends = _sum(of(run + "rest"), around)
        loads = {"env": self._load("env", simulated), "rollout": self._load("rollout", decided_in)}
        return loads, chain_s + ends.cpu_s + ends.blocked_s

    def _learn(self, ranks: Mapping[str, int]) -> tuple[Loads, float]:
        algorithm, of, learn = self._config.algorithm, self._of, "actor.learn/"
        actors, planned = ranks["actor"], algorithm.epochs * algorithm.num_minibatches
        steps = round(planned * self._costs.count(learn + "steps_share", 1.0))
        rows, shares = [0] * actors, [0] * actors
        for _, target, share in _shares(self._config.simulator_env.total_num_envs, ranks["env"], actors):
            rows[target] += share
            shares[target] += 1
        exchange, work = of(learn + "exchange", actors), list[Cost]()
        for count, received in zip(rows, shares, strict=True):
            samples = algorithm.rollout_steps * count
            minibatch = of(learn + "minibatch", samples / algorithm.num_minibatches)
            step = _sum(_sum(minibatch, exchange), of(learn + "step")).times(steps)
            once = _sum(_sum(of(learn + "estimate", samples), exchange), of(learn + "rest"))
            work.append(_sum(_sum(step, once), of(learn + "wait").times(received)))
        return {"actor": self._load("actor", work)}, 0.0

    def _least(self, name: str, low: float, high: float) -> Cost:
        """Return the least cost of any size between two: costs are lines between measured points."""
        curve = self._costs.profile.costs.get(name)
        inside = [p.size for p in curve.points if low < p.size < high] if curve else []
        # Points that are near each other are one, whose size lies between theirs.
        found = [self._of(name, size) for size in (low, high, *inside)]
        return Cost(0.9 * min(c.cpu_s for c in found), 0.9 * min(c.blocked_s for c in found))


class Bounds:
    """Least seconds of iterations under a profile."""

    def __init__(self, config: Config, topology: Topology, costs: Costs) -> None:
        self.stages = Stages(config, costs)
        inline, cores = config.cluster.launcher == "inline", int(costs.profile.machine.get("cores", 1))
        self._cores = 1 if inline else cores  # that a node's ranks can use at once: inline all are one process
        self._call_s = costs.of(f"driver/{config.cluster.launcher}_call").cpu_s
        self._nodes = len(topology.nodes)
        self._per_node = max(node.accelerators for node in topology.nodes)
        self._found: dict[tuple[object, ...], float] = {}

    def of_sizes(self, mode: Mode, options: Mapping[str, Sequence[Size]]) -> float:
        """Return a bound for all plans in which each component has one of these sizes, wherever it is."""
        return sum(self._of_stage(stage, mode, options) for stage in self.stages.depends)

    def _of_stage(self, stage: str, mode: Mode, options: Mapping[str, Sequence[Size]]) -> float:
        components = self.stages.depends[stage]
        key = (stage, mode, *(tuple(options[c]) for c in components))
        if key not in self._found:
            self._found[key] = min(
                self._anywhere(stage, mode, dict(zip(components, sizes, strict=True)))
                for sizes in itertools.product(*(options[c] for c in components))
                if not (mode.shared and stage == "rollout" and sizes[0] != sizes[1])
            )
        return self._found[key]

    def _anywhere(self, stage: str, mode: Mode, sizes: Sizes) -> float:
        loads, chain_s = self.stages.loads(stage, mode, sizes)
        whole_s = sum(load.cpu_s for load in loads.values()) + (_calls(loads) - 1) * self._call_s
        nodes = {c: -(-sizes[c].accelerators // self._per_node) or 1 for c in loads}  # at most, where they are full
        fullest_s = max(load.cpu_s / nodes[c] for c, load in loads.items())
        return self._interval(loads, chain_s, max(fullest_s, whole_s / self._nodes))

    def of_plan(self, schedule: Schedule, mode: Mode, sizes: Sizes, spread: Spread) -> float:
        """Return a bound for one plan, with its moves. `spread`: its ranks by node."""
        seconds = 0.0
        for stage, alone, around in intervals(schedule):
            if alone:
                seconds += self._placed(self._moved({}, alone, sizes), 0.0, spread)
            loads, chain_s = self.stages.loads(base_stage(stage), mode, sizes)
            if chain_s and stage == "rollout":
                chain_s += sum(self.stages.move(m, sizes["env"]).longest_s for m in around if m.component == "env")
            seconds += self._placed(self._moved(loads, around, sizes), chain_s, spread)
        return seconds

    def _moved(self, loads: Loads, moves: Sequence[Move], sizes: Sizes) -> Loads:
        found = dict(loads)
        for move in moves:
            load = self.stages.move(move, sizes[move.component])
            found[move.component] = found[move.component].after(load) if move.component in found else load
        return found

    def _placed(self, loads: Loads, chain_s: float, spread: Spread) -> float:
        by_node = {0: (_calls(loads) - 1) * self._call_s}  # of the driver
        for component, load in loads.items():
            for node, ranks in spread[component].items():
                by_node[node] = by_node.get(node, 0.0) + load.on(ranks)
        return self._interval(loads, chain_s, max(by_node.values()))

    def _interval(self, loads: Loads, chain_s: float, node_s: float) -> float:
        """Bound the seconds in which these calls are made; `node_s`: computed on one node meanwhile."""
        longest_s = max(chain_s, *(load.longest_s for load in loads.values()))
        return max(self._call_s + max(longest_s, node_s / self._cores), _calls(loads) * self._call_s)


def intervals(schedule: Schedule) -> Iterator[tuple[str, Sequence[Move], Sequence[Move]]]:
    """Return the stages, each with the moves that the loop awaits before it and those that go with its work.

    As `Loop` makes them: what leaves after a stage is asked for behind its work, but for sync and the last stage.
    """
    stages = schedule.stages
    for at, stage in enumerate(stages):
        before = stages[at - 1]
        entry = schedule.between(before, stage)
        kept = at == 0 or base_stage(before) == "sync"
        behind = base_stage(stage) != "sync" and at + 1 < len(stages)
        leaving = schedule.between(stage, stages[at + 1]).releases if behind else ()
        yield stage, entry.releases if kept else (), (*entry.acquires, *leaving)


def _calls(loads: Loads) -> int:
    return sum(load.ranks * load.calls for load in loads.values())


def _sum(one: Cost, other: Cost) -> Cost:
    return Cost(one.cpu_s + other.cpu_s, one.blocked_s + other.blocked_s)


def _shares(rows: int, sources: int, targets: int) -> Iterator[tuple[int, int, int]]:
    """Return source rank, target rank and rows of every share, as `scatter_rows` cuts them."""
    blocks = [block_edges(rows, ranks) for ranks in (sources, targets)]
    at = [0, 0]
    for start, stop in itertools.pairwise(sorted({*blocks[0], *blocks[1]})):
        at = [rank + (block[rank + 1] <= start) for rank, block in zip(at, blocks, strict=True)]
        yield at[0], at[1], stop - start
