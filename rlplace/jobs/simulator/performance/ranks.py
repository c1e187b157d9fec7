"""Simulated ranks of a simulator job: env, rollout and the PPO actor."""

from __future__ import annotations

from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.foresight.costs import Cost
from rlplace.foresight.ranks import Body, Rank, Site
from rlplace.metrics import Metric
from rlplace.placement.flow import Share
from rlplace.placement.language.slots import Slot
from rlplace.stopwatch import Stopwatch


class SimulatorRank(Rank):
    """Base of the simulated ranks of env, rollout and actor. `job`: the config of the job."""

    job: SimulatorJobConfig

    @property
    def steps(self) -> int:
        return self.job.algorithm.rollout_steps

    @property
    def stage_groups(self) -> int:
        return self.job.rollout.pipeline_stage_num

    def __init__(self, site: Site, slot: Slot) -> None:
        super().__init__(site, slot)
        # Cached, because checking all routes takes long
        self.direct = "observations" not in site.channels


class EnvRank(SimulatorRank):
    """Simulates `VectorEnvWorker.run`."""

    def run(self, iteration: int) -> Body:
        watch = self.watch("sim", "wait", "put")
        shares = self.plan.row_routes.observations.sends(self.slot.rank)
        rows = sum(share.stop - share.start for share in shares)
        for group in range(0 if self.direct else self.stage_groups):
            yield from self._ask(shares, group)
        watch.lap("put")
        for step in range(self.steps):
            for group in range(self.stage_groups):
                yield from self._answer(shares, group, rows)
                watch.lap("wait")
                yield from self.lap("run", "sim", rows)
                watch.lap("sim")
                if step + 1 < self.steps:
                    yield from (
                        self.lap("run", "direct_put")
                        if self.direct
                        else self._ask(shares, group)
                    )
                    watch.lap("put")
        stepped = rows * self.steps * self.stage_groups
        yield from self.lap("run", "rest", stepped)
        if self.direct:
            decided = self._decision(rows).times(self.steps * self.stage_groups)
            yield from self.site.lent(self.slot.rank).put(decided.cpu_s)
        yield from self.lap("run", "direct_put" if self.direct else "put", stepped)
        for share in self.plan.row_routes.trajectories.sends(self.slot.rank):
            yield from self.site.channels["trajectories"].put(share, str(share.target))
        watch.lap("put")
        return watch.metrics("env")

    def _decision(self, rows: int) -> Cost:
        """Return the cost of the policy's decision for `rows` rows, if it is computed in this env rank's thread."""
        return self.costs.of(
            self.costs.known("rollout.generate", "policy", cold=False), rows
        )

    def _ask(self, shares: tuple[Share, ...], group: int) -> Body:
        for share in shares:
            yield from self.lap("run", "put")
            size = share.stop - share.start
            yield from self.site.channels["observations"].put(
                (self.slot.rank, group, size), str(share.target)
            )

    def _answer(self, shares: tuple[Share, ...], group: int, rows: int) -> Body:
        # The decision runs in this thread; its seconds are part of this wait.
        if self.direct:
            decided = self._decision(rows)
            waited = self.costs.of("env.run/direct_wait")
            yield from self.lasting(decided)
            yield from self.lasting(
                waited._replace(cpu_s=max(0.0, waited.cpu_s - decided.cpu_s))
            )
            return
        for _ in shares:
            yield from self.site.channels["actions"].get(f"{self.slot.rank}/{group}")
            yield from self.lap("run", "wait")


class RolloutRank(SimulatorRank):
    """Simulates `VectorRolloutWorker.generate`."""

    def generate(self, iteration: int) -> Body:
        watch = self.watch("policy", "wait", "put")
        if self.direct:
            watch.seconds["policy"] = yield from self.site.lent(self.slot.rank).get()
            return watch.metrics("rollout")
        due = sum(
            s.stop - s.start
            for s in self.plan.row_routes.observations.receives(self.slot.rank)
        )
        due *= self.steps * self.stage_groups
        observations = self.site.channels["observations"]
        key = str(self.slot.rank)
        while due:
            arrived = [(yield from observations.get(key))]
            while (
                self.job.rollout.merge_requests
                and (more := observations.get_nowait(key)) is not None
            ):
                arrived.append(more)
            for _ in arrived:
                yield from self.lap("generate", "wait")
            watch.lap("wait")
            rows = sum(size for _, _, size in arrived)
            yield from self.lap("generate", "policy", rows)
            watch.lap("policy")
            for env, group, size in arrived:
                yield from self.lap("generate", "put")
                yield from self.site.channels["actions"].put(size, f"{env}/{group}")
            watch.lap("put")
            due -= rows
        yield from self.lap("generate", "rest")
        return watch.metrics("rollout")


class PolicyActorRank(SimulatorRank):
    """Simulates `PolicyActor.learn`. The ranks wait for each other in every minibatch."""

    def learn(self, iteration: int, version: int) -> Body:
        watch, inner = self.watch("wait", "learn"), self.watch()
        route = self.plan.row_routes.trajectories
        algorithm = self.job.algorithm
        shares = route.receives(self.slot.rank)
        for _ in shares:
            yield from self.site.channels["trajectories"].get(str(self.slot.rank))
            yield from self.lap("learn", "wait")
        watch.lap("wait")
        samples = self.steps * sum(share.stop - share.start for share in shares)
        yield from self.lap("learn", "estimate", samples)
        inner.lap("estimate")
        yield from self._exchange(inner)
        planned = algorithm.epochs * algorithm.num_minibatches
        for _ in range(
            round(planned * self.costs.count("actor.learn/steps_share", 1.0))
        ):
            yield from self.lap(
                "learn", "minibatch", samples / algorithm.num_minibatches
            )
            inner.lap("minibatch")
            yield from self._exchange(inner)
            yield from self.lap("learn", "step")
            inner.lap("step")
        yield from self.lap("learn", "rest", self.plan.placement.world_size("actor"))
        watch.lap("learn")
        return {**watch.metrics("actor"), "actor/samples": Metric(samples, "sum")}

    def _exchange(self, watch: Stopwatch) -> Body:
        yield from self.lap(
            "learn", "exchange", self.plan.placement.world_size("actor")
        )
        yield from self.site.barrier("actor").meet()
        watch.lap("exchange")
