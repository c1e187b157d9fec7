"""Lower bounds of the seconds of an iteration under a profile.

A bound is computed as a sum of costs. That is much faster than `predict`, which runs the loop on a logical clock.

Between two moments at which the loop waits for all components, time passes for at least as long as each of these takes:

- the most loaded rank computes and waits, after the driver's first call and before the rank's last answer,
- the processors of a node compute all that is computed on the node,
- the driver sends and takes its messages.

No prediction is below its bound. So a search may leave out every plan with a bound above the best prediction so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import (
    Loads,
    Mode,
    Options,
    Size,
    Sizes,
    Spread,
    Stages,
)
from rlplace.foresight.model import model_of
from rlplace.placement.plan import Plan
from rlplace.placement.schedule import Move, Schedule, base_stage


class Bounds:
    """Computes lower bounds of the seconds of an iteration, for the plans of one search space under one profile."""

    def __init__(self, config: Any, plan: Plan, costs: Costs) -> None:
        """Prepare the bounds. `plan`: any plan of the search space. `costs`: the costs of the profile."""
        model = model_of(config)
        self.stages: Stages = model.stages(config, plan, costs)
        self._sending = model.sending(config)
        self._generating = model.generating
        topology = plan.topology
        inline = config.cluster.launcher == "inline"
        cores = int(costs.profile.machine.get("cores", 1))
        # Processors that the ranks of a node can use at once; inline ranks are threads of one process.
        self._cores = 1 if inline else cores
        self._call_s = costs.of(f"driver/{config.cluster.launcher}_call").cpu_s
        self._nodes = len(topology.nodes)
        self._per_node = max(node.accelerators for node in topology.nodes)
        self._most = topology.num_accelerators
        self._found: dict[tuple[object, ...], float] = {}

    def of_sizes(
        self,
        mode: Mode,
        options: Mapping[str, Sequence[Size]],
        known: Mapping[str, float] | None = None,
    ) -> float:
        """Return a lower bound of the seconds of an iteration, for all plans whose components have sizes in `options`.

        Each component may be on any accelerators. `mode`: settings of these plans. `options`: component -> its possible
        sizes. `known`: stage -> lower bound of its seconds, used in place of the computed bound; None: all are
        computed.
        """
        stages = {s: self.of_stage(s, mode, options) for s in self.stages.names} | dict(
            known or {}
        )
        ahead_s = 0.0
        if self.stages.ahead is not None:
            ahead_s = stages.pop(self.stages.ahead)
        one_by_one_s = sum(stages.values()) + self._scoring(stages, mode, options)
        return self._beside(one_by_one_s, ahead_s)

    def _beside(self, others_s: float, ahead_s: float) -> float:
        """Return a lower bound of the seconds of an iteration with a stage that may work ahead, beside all others.

        `others_s`: lower bound of the seconds of all other stages, one after the other. `ahead_s`: that of the stage.

        Runs of the stage do not overlap, and the work of an iteration ends after its own run of the stage. A run may
        begin before its iteration, but only so many iterations before. So the last runs lie within the iterations that
        a prediction counts.
        """
        return max(others_s, self.stages.ahead_share * ahead_s)

    def _scoring(
        self,
        stages: Mapping[str, float],
        mode: Mode,
        options: Mapping[str, Sequence[Size]],
    ) -> float:
        """Return a lower bound of the seconds by which scorers make an iteration longer than `stages`.

        Scorers are references and rewards; each works either during rollout or in the stage infer. `stages`: stage ->
        lower bound of its seconds without scorers. `options`: component -> its possible sizes.
        """
        # Seconds of scorers that can only work in infer
        late_s = 0.0
        free: list[tuple[float, float]] = []
        generating = sum(
            min(size.accelerators for size in options[c])
            for c in ("env", "rollout")
            if c in options
        )
        for component in self.stages.scoring:
            seconds = [
                self._alone(stage, component, mode, options[component])
                for stage in ("rollout", "infer")
            ]
            if (
                generating + min(size.accelerators for size in options[component])
                > self._most
            ):
                # This scorer shares accelerators with rollout, so it works later.
                late_s = max(late_s, seconds[1])
            else:
                free.append((seconds[0], seconds[1]))
        if not free and not late_s:
            return 0.0

        def added(early: Collection[int]) -> float:
            first_s = max((free[at][0] for at in early), default=0.0)
            then_s = max(
                [late_s, *(free[at][1] for at in range(len(free)) if at not in early)]
            )
            return max(0.0, first_s - stages["rollout"]) + max(
                0.0, then_s - stages.get("infer", 0.0)
            )

        subsets = (
            few
            for n in range(len(free) + 1)
            for few in itertools.combinations(range(len(free)), n)
        )
        return min(added(few) for few in subsets)

    def _alone(
        self, stage: str, component: str, mode: Mode, sizes: Sequence[Size]
    ) -> float:
        """Return a lower bound of the seconds of a stage in which only `component` works.

        `mode`: settings of the plans. `sizes`: the sizes that the component may have; the bound holds for each of them.
        """
        key = (stage, component, mode, tuple(sizes))
        if key not in self._found:
            found = []
            for size in sizes:
                loads, _ = self.stages.loads(
                    stage, (component,), mode, {component: size}
                )
                found.append(
                    self._anywhere(Options(loads, 0.0, {component: size.accelerators}))
                )
            self._found[key] = min(found)
        return self._found[key]

    def of_stage(
        self, stage: str, mode: Mode, sizes: Mapping[str, Sequence[Size]]
    ) -> float:
        """Return a lower bound of the seconds of a stage for all plans with these sizes.

        Moves (changes of residency) are not included. `mode`: settings of these plans.

        `sizes`: component -> the sizes that it may have; the bound holds for each combination of them.
        """
        key = (stage, mode, *(tuple(sizes[c]) for c in self.stages.depends(stage)))
        if key not in self._found:
            self._found[key] = min(
                self._anywhere(found)
                for found in self.stages.options(stage, mode, sizes)
            )
        return self._found[key]

    def _anywhere(self, found: Options) -> float:
        whole_s = (
            sum(load.cpu_s for load in found.loads.values())
            + (_calls(found.loads) - 1) * self._call_s
        )
        # Lowest number of nodes, if all are full
        nodes = {c: -(-found.wide[c] // self._per_node) or 1 for c in found.loads}
        fullest_s = max(
            (load.cpu_s / nodes[c] for c, load in found.loads.items()), default=0.0
        )
        return self._interval(
            found.loads, found.chain_s, max(fullest_s, whole_s / self._nodes)
        )

    def of_iteration(
        self, schedule: Schedule, mode: Mode, sizes: Sizes, spread: Spread
    ) -> float:
        """Return a lower bound of the seconds of an iteration of one plan, with its moves.

        All arguments are as for `of_stages`.
        """
        others_s = sum(self.of_stages(schedule, mode, sizes, spread))
        ahead = self.stages.ahead
        if ahead is None:
            return others_s
        generating = [c for c in self._generating if c in sizes]
        loads, chain_s = self.stages.loads(ahead, generating, mode, sizes)
        return self._beside(others_s, self._placed(loads, chain_s, spread))

    def of_stages(
        self, schedule: Schedule, mode: Mode, sizes: Sizes, spread: Spread
    ) -> list[float]:
        """Return a lower bound of the seconds of each stage of one plan. Moves (changes of residency) are included.

        The work of a stage that runs ahead of all others is not included.

        `schedule`, `mode`: schedule and mode of the plan. `sizes`: component -> its size. `spread`: component -> node
        -> number of the component's ranks on the node.
        """
        found = list[float]()
        # Calls that are sent before the loop waits go in one message.
        joins = not schedule.needs.ahead
        bases = {base_stage(stage): stage for stage in schedule.stages}
        scored = (
            bases.get("infer", "rollout") if "advantages" in self.stages.names else None
        )
        for stage, alone, around in intervals(schedule, self._sending):
            seconds = 0.0
            if alone:
                seconds += self._placed(
                    self._moved({}, alone, sizes, joins), 0.0, spread
                )
            loads: Loads = {}
            chain_s = 0.0
            if base_stage(stage) != self.stages.ahead:
                loads, chain_s = self.stages.loads(
                    base_stage(stage), schedule.active[stage], mode, sizes
                )
            if chain_s and stage == "rollout":
                chain_s += sum(
                    self.stages.move(m, sizes["env"], joins=joins).longest_s
                    for m in around
                    if m.component == "env"
                )
            seconds += self._placed(
                self._moved(loads, around, sizes, joins), chain_s, spread
            )
            if stage == scored:
                seconds += self._placed(
                    self.stages.loads("advantages", ("actor",), mode, sizes)[0],
                    0.0,
                    spread,
                )
            found.append(seconds)
        return found

    def _moved(
        self, loads: Loads, moves: Sequence[Move], sizes: Sizes, joins: bool
    ) -> Loads:
        found = dict(loads)
        for move in moves:
            load = self.stages.move(
                move, sizes[move.component], joins=joins and move.component in found
            )
            found[move.component] = (
                found[move.component].after(load) if move.component in found else load
            )
        return found

    def _placed(self, loads: Loads, chain_s: float, spread: Spread) -> float:
        # Seconds of the driver's calls
        by_node = {0: (_calls(loads) - 1) * self._call_s}
        for component, load in loads.items():
            for node, ranks in spread[component].items():
                by_node[node] = by_node.get(node, 0.0) + load.on(ranks)
        whole_s = (
            sum(load.cpu_s for load in loads.values())
            + (_calls(loads) - 1) * self._call_s
        )
        return self._interval(
            loads, chain_s, max(*by_node.values(), whole_s / self._nodes)
        )

    def _interval(self, loads: Loads, chain_s: float, node_s: float) -> float:
        """Return a lower bound of the seconds from the driver's first call until the last answer.

        `loads`: component -> its work in these calls. `chain_s`: least seconds of components that wait for each other
        in turn. `node_s`: processor seconds of the busiest node.
        """
        if not loads:
            return 0.0
        # A component that waits for all its ranks receives all messages first; all answers come afterwards.
        longest_s = max(
            chain_s,
            *(
                load.longest_s + (load.ranks - 1) * load.meets * self._call_s
                for load in loads.values()
            ),
        )
        return max(
            self._call_s + max(longest_s, node_s / self._cores),
            _calls(loads) * self._call_s,
        )


def intervals(
    schedule: Schedule, sending: Collection[str]
) -> Iterator[tuple[str, Sequence[Move], Sequence[Move]]]:
    """Yield for each stage its name, the moves that end before its work begins, and the moves sent with its work.

    The moves have the order of `Loop`. A component that leaves its accelerators after a stage is offloaded directly
    after its work, in the same message. This is not so in the last stage and in stages that send weights, because other
    ranks may still read the weights. `sending`: the stages that send weights.
    """
    stages = schedule.stages
    for at, stage in enumerate(stages):
        before = stages[at - 1]
        entry = schedule.between(before, stage)
        kept = at == 0 or base_stage(before) in sending or schedule.needs.ahead
        behind = (
            base_stage(stage) not in sending
            and at + 1 < len(stages)
            and not schedule.needs.ahead
        )
        leaving = schedule.between(stage, stages[at + 1]).releases if behind else ()
        yield stage, entry.releases if kept else (), (*entry.acquires, *leaving)


def _calls(loads: Loads) -> int:
    return sum(load.ranks * load.calls for load in loads.values())
