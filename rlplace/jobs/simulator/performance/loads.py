"""Lower bounds of the work of a simulator job's ranks between two synchronizations of the loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.foresight.costs import Cost, Costs
from rlplace.foresight.loads import Loads, Mode, Options, Size, Sizes, Stages
from rlplace.placement.flow import block_edges


class SimulatorStages(Stages):
    """Lower bounds of the work of each component in each stage of a simulator job.

    `_depends`: stage -> the components with sizes that affect the work in the stage.
    """

    names = ("sync", "rollout", "learn")
    _config: SimulatorJobConfig
    _depends: Mapping[str, tuple[str, ...]] = {
        "sync": ("actor", "rollout"),
        "rollout": ("env", "rollout"),
        "learn": ("actor", "env"),
    }

    def __init__(self, config: SimulatorJobConfig, costs: Costs) -> None:
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
        """Return the loads of env and rollout, and the seconds of their longest chain of dependent work.

        The chain is all steps of a stage group, one after the other: put observations, decide, put actions, step the
        simulators. Env and rollout wait for each other in it. `ranks`: component -> number of ranks.
        """
        config = self._config
        run = "env.run/"
        generate = "rollout.generate/"
        of = self._of
        steps = config.algorithm.rollout_steps
        envs = ranks["env"]
        engines = ranks["rollout"]
        rows = config.env.total_num_envs // mode.groups
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
        merges = config.rollout.merge_requests
        put = of(run + "put")
        wait = of(run + "wait")
        around_answer = of(generate + "wait").plus(of(generate + "put"))

        def policy(shares: Sequence[int]) -> Cost:
            """Return the least cost of a rollout rank's decisions for one step of one stage group.

            `shares`: the number of rows in each request that the rank gets.
            """
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
            self._config.env.total_num_envs, ranks["env"], actors
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


def shares_of(rows: int, sources: int, targets: int) -> Iterator[tuple[int, int, int]]:
    """Yield (source rank, target rank, number of rows) for each transfer between two components.

    The rows (environments) are cut into even, contiguous blocks, one for each of `sources` source ranks, and in the
    same way for `targets` target ranks. A transfer carries the rows that a source block and a target block have in
    common.
    """
    blocks = [block_edges(rows, ranks) for ranks in (sources, targets)]
    at = [0, 0]
    for start, stop in itertools.pairwise(sorted({*blocks[0], *blocks[1]})):
        at = [
            rank + (block[rank + 1] <= start)
            for rank, block in zip(at, blocks, strict=True)
        ]
        yield at[0], at[1], stop - start
