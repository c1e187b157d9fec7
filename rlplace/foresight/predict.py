"""Predict the seconds of an iteration from a plan and a profile: the real loop runs over ranks that spend predicted
time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rlplace.contract.registry import job_of
from rlplace.execution.loop import Loop
from rlplace.execution.memory_monitor import MemoryMonitor
from rlplace.execution.overlap import loop_of
from rlplace.foresight.collector import paused_collector
from rlplace.foresight.costs import Costs
from rlplace.foresight.model import counted_iterations, model_of
from rlplace.foresight.profile import Profile
from rlplace.foresight.ranks import Site, make_groups
from rlplace.foresight.scaling import Scaling
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted seconds of a plan, from iterations that were run on a logical clock.

    `numbers`: metric -> predicted seconds, with the names of a run's metrics. `active`: stage -> the components that
    work in it. `iterations`: the calls of the simulated iterations, for a picture; empty in a search. `queues`: channel
    -> the largest number of items in it; empty in a search. `processors`: node -> share of time in which its processors
    were busy.
    `costs`: the object that gave the costs; it has recorded which of them were missing or assumed. `least_s`, `most_s`:
    least and most seconds of an iteration under all assumptions about scaling with the number of ranks; None if nothing
    is assumed. `most_s` is infinite if the seconds have no upper bound. `brief`: the prediction has the seconds of the
    iteration alone, as a sum of stages that other predictions have shown.
    """

    numbers: Mapping[str, float]
    active: Mapping[str, Sequence[str]]
    iterations: Sequence[IterationCalls]
    queues: Mapping[str, int]
    processors: Mapping[int, float]
    costs: Costs
    least_s: float | None = None
    most_s: float | None = None
    brief: bool = False

    @property
    def seconds(self) -> float:
        return self.numbers["time/iteration_s"]


def can_predict(config: Any) -> bool:
    """Return whether the config's job can be predicted: whether there is a model of its ranks' behaviour."""
    return model_of(config).can_predict(config)


def open_loop(
    config: Any,
    plan: Plan,
    case: MemoryCase,
    costs: Costs,
    *,
    cores: int,
    iterations: int,
) -> tuple[Site, Loop]:
    """Return the state that a plan's simulated ranks share, and the real loop, which calls these ranks.

    `cores`: number of processors of each node. `iterations`: number of iterations that the loop is made for.
    """
    model = model_of(config)
    site = model.site(config, plan, costs, cores)
    groups = make_groups(site, model.ranks(config, plan))
    runner = dataclasses.replace(
        config.runner, total_iterations=iterations, stage_timeout_s=math.inf
    )
    work = job_of(config).work(config, plan.needs)
    loop = loop_of(plan.schedule)(
        plan.schedule, groups, MemoryMonitor(case), runner, work, clock=site.clock
    )
    return site, loop


def predict(
    config: Any,
    plan: Plan,
    case: MemoryCase,
    profile: Profile,
    *,
    ranged: bool = False,
    queues: bool = True,
) -> Prediction:
    """Return the predicted seconds of a plan: run iterations on a logical clock, with the costs of `profile`.

    `case`: inputs of the plan's memory calculation. `ranged`: whether to predict the least and the most seconds as
    well. They differ if the profile lacks costs for a number of ranks, so that costs have to be assumed. `queues`:
    whether to count the items in channels. If not, items may be put later if that changes no seconds.
    """
    model = model_of(config)
    found = _predict(config, plan, case, model.costs(config, profile), queues=queues)
    if not ranged or not found.costs.scaled:
        return found
    ends = {}
    for scaling in (Scaling.LEAST, Scaling.MOST):
        costs = model.costs(config, profile, scaling)
        ends[scaling] = _predict(config, plan, case, costs)
    least = ends[Scaling.LEAST]
    most = ends[Scaling.MOST]
    most_s = math.inf if most.costs.unbounded else most.seconds
    return dataclasses.replace(
        found,
        least_s=min(found.seconds, least.seconds),
        most_s=max(found.seconds, most_s),
    )


def predict_stages(
    config: Any,
    plan: Plan,
    case: MemoryCase,
    profile: Profile,
    stages: Collection[str],
) -> tuple[Mapping[str, float], Costs] | None:
    """Return the predicted seconds of some stages of a plan, and the costs that they took. Only they are simulated.

    The seconds are those of `predict`, except for rounding errors. Return None if the stages of this plan cannot be
    simulated without the others. `case`, `profile`: as for `predict`.
    """
    with paused_collector():
        return _predict_stages(config, plan, case, profile, stages)


def _predict_stages(
    config: Any,
    plan: Plan,
    case: MemoryCase,
    profile: Profile,
    stages: Collection[str],
) -> tuple[Mapping[str, float], Costs] | None:
    costs = model_of(config).costs(config, profile)
    site, loop = _opened(config, plan, case, costs)
    if not site.separable or plan.schedule.needs.ahead:
        return None
    site.measured = False
    every = frozenset(plan.schedule.stages)
    others = every - {*stages}

    def omits(stage: str, iteration: int) -> bool:
        # The first iteration is not counted.
        omitted = every
        if iteration == 1:
            omitted = others
        elif iteration > 1:
            omitted = others | {*site.steady}
        site.before(stage, iteration, omitted)
        return stage in omitted

    loop.omits = omits
    counted = counted_iterations(config, plan.schedule.needs.ahead)
    for index in range(counted.stop):
        loop.iteration(index)
    site.world.close()
    return _stages_of(loop.log.iterations, stages), costs


def _stages_of(
    iterations: Iterable[IterationCalls], stages: Collection[str]
) -> dict[str, float]:
    """Return stage -> its mean seconds, with its moves."""
    seconds: dict[str, list[float]] = {stage: [] for stage in stages}
    for iteration in iterations:
        for one in iteration.stages:
            if one.stage in seconds:
                seconds[one.stage].append(one.ended_s - one.began_s)
    return {stage: statistics.fmean(each) for stage, each in seconds.items()}


def _opened(
    config: Any, plan: Plan, case: MemoryCase, costs: Costs
) -> tuple[Site, Loop]:
    ahead = plan.schedule.needs.ahead
    counted = counted_iterations(config, ahead)
    return open_loop(
        config,
        plan,
        case,
        costs,
        cores=int(costs.profile.machine.get("cores", 1)),
        iterations=counted.stop + ahead + 1,
    )


def _predict(
    config: Any, plan: Plan, case: MemoryCase, costs: Costs, *, queues: bool = True
) -> Prediction:
    with paused_collector():
        return _simulated(config, plan, case, costs, queues=queues)


def _simulated(
    config: Any, plan: Plan, case: MemoryCase, costs: Costs, *, queues: bool
) -> Prediction:
    cores = int(costs.profile.machine.get("cores", 1))
    site, loop = _opened(config, plan, case, costs)
    site.counts_items = queues
    counted = counted_iterations(config, plan.schedule.needs.ahead)
    iterations = [loop.iteration(index) for index in range(counted.stop)]
    site.world.close()
    found = iterations[counted.start :]
    names = dict.fromkeys(name for numbers in found for name in numbers)
    return Prediction(
        numbers={
            name: statistics.fmean(numbers.get(name, 0.0) for numbers in found)
            for name in names
        },
        active=plan.schedule.active,
        iterations=tuple(loop.log.iterations),
        processors={
            node: at_work.busy_s / (cores * site.world.now) if site.world.now else 0.0
            for node, at_work in site.cores.items()
        },
        queues={name: channel.most for name, channel in site.channels.items()}
        if queues
        else {},
        costs=costs,
    )
