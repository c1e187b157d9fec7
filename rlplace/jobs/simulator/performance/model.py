"""The performance model of the simulator job."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rlplace.codes import config_error
from rlplace.config.blocks.policies import MlpConfig, PolicyConfig
from rlplace.config.blocks.simulator import SimulatorJobConfig
from rlplace.foresight.costs import Costs
from rlplace.foresight.loads import Mode, Size, Stages
from rlplace.foresight.measure import Variant
from rlplace.foresight.model import PerformanceModel
from rlplace.foresight.profile import COLD, Profile
from rlplace.foresight.ranks import Rank, Site
from rlplace.foresight.space import Space
from rlplace.jobs.simulator.performance.loads import SimulatorStages
from rlplace.jobs.simulator.performance.ranks import (
    EnvRank,
    PolicyActorRank,
    RolloutRank,
)
from rlplace.placement.memory.ledger import MemoryCase
from rlplace.placement.plan import Plan
from rlplace.report.calls import RankCall
from rlplace.stopwatch import Part

GROUPS = (1, 2, 4)  # numbers of stage groups that a search tries
_STEPS_SHARE = "actor.learn/steps_share"
# Short parts, by call, that take longer after other threads have used the processor
_CHILLED = {
    ("env", "run"): ("sim", "wait", "put"),
    ("rollout", "generate"): ("policy", "wait", "put"),
}
# Communication costs: within one process, and through channels
_DIRECT = ("env.run/direct_wait", "env.run/direct_put")
_CHANNELS = (
    "env.run/wait",
    "env.run/put",
    "rollout.generate/wait",
    "rollout.generate/put",
)


class SimulatorPerformance(PerformanceModel):
    """The performance model of PPO on simulators.

    Env and rollout exchange data in every step; the actor learns from whole trajectories.
    """

    pair = ("env", "rollout")

    # ── what a run measures ──────────────────────────────────────────────────────────────────────────────────────────

    def subject(self, config: SimulatorJobConfig, component: str) -> str:
        if component == "env":
            return _simulator(config)
        model = config.actor.model
        if isinstance(model, MlpConfig) and not model.remembered:
            return f"mlp {'x'.join(map(str, model.hidden))} {model.activation}"
        if isinstance(model, PolicyConfig):
            return ", ".join(str(value) for value in dataclasses.astuple(model))
        return type(config.actor).__name__

    def counts(
        self, config: SimulatorJobConfig, parts: Mapping[str, Sequence[Part]]
    ) -> Mapping[str, float]:
        """Return the measured share of the planned optimizer steps: `target_kl` may end learning before the last step.

        The result is empty if the config has no `target_kl`, or if no steps were measured. `parts`: cost name -> its
        measured parts.
        """
        algorithm = config.algorithm
        steps = [part.laps for part in parts.get("actor.learn/step", ())]
        if algorithm.target_kl is None or not steps:
            return {}
        planned = algorithm.epochs * algorithm.num_minibatches
        return {_STEPS_SHARE: statistics.fmean(steps) / planned}

    def own_parts(self, plan: Plan, call: RankCall) -> Collection[str] | None:
        if _is(call, "rollout", "generate") and plan.row_routes.direct:
            # The policy computes in env's thread.
            return ("policy",)
        return None

    def part_name(self, plan: Plan, call: RankCall, part: Part) -> str:
        talks = part.name in ("wait", "put")
        if talks and _is(call, "env", "run") and plan.row_routes.direct:
            return f"direct_{part.name}"
        chilled = _CHILLED.get((call.slot.component, call.name), ())
        if part.cold and part.name in chilled:
            return f"{COLD}{part.name}"
        return part.name

    def rest_size(self, plan: Plan, call: RankCall) -> float:
        if call.name == "learn":
            return plan.placement.world_size(call.slot.component)
        stepped = [part for part in call.record.parts if part.name == "sim"]
        return sum(part.size * part.laps for part in stepped)

    # ── how ranks spend seconds ──────────────────────────────────────────────────────────────────────────────────────

    def ranks(self, config: SimulatorJobConfig, plan: Plan) -> Mapping[str, type[Rank]]:
        return {"actor": PolicyActorRank, "env": EnvRank, "rollout": RolloutRank}

    def site(
        self, config: SimulatorJobConfig, plan: Plan, costs: Costs, cores: int
    ) -> Site:
        return Site(config, plan, costs, cores)

    def published_profile(
        self, config: SimulatorJobConfig, plan: Plan, case: MemoryCase
    ) -> Profile:
        raise config_error("nothing-published", "profile", error="simulators")

    # ── the plans that a search chooses among ────────────────────────────────────────────────────────────────────────

    def mode(self, plan: Plan) -> Mode:
        return Mode(plan.stage_groups, plan.row_routes.direct)

    def modes(self, space: Space) -> tuple[Mode, ...]:
        free = {*space.free}
        shared = (False, True) if free.issuperset(self.pair) else (space.now.shared,)
        groups = GROUPS if "rollout" in free else (space.now.groups,)
        found = (Mode(g, s) for g, s in itertools.product(groups, shared))
        return tuple(dict.fromkeys([space.now, *found]))

    def mode_changes(self, mode: Mode, now: Mode) -> Mapping[str, Any]:
        if mode.groups == now.groups:
            return {}
        return {"rollout.pipeline_stage_num": mode.groups}

    def sizes(self, space: Space, mode: Mode) -> dict[str, tuple[Size, ...]]:
        """Return component -> the sizes that a search tries: numbers of ranks that divide the rows evenly.

        Each rank has one accelerator. A component that the search may not change has its present size only. If the
        mode's number of stage groups is impossible, the sequences of sizes are empty.
        """
        config: SimulatorJobConfig = space.config
        rows = config.env.total_num_envs
        found: dict[str, tuple[Size, ...]] = {}
        for component in space.plan.placement.components:
            now = space.size_now(component)
            if component not in space.free:
                found[component] = (now,)
                continue
            whole = rows if component == "actor" else rows // mode.groups
            fitting = [n for n in space.lengths if whole % n == 0]
            if mode == space.now and now.accelerators <= space.most:
                fitting.append(now.accelerators)
            found[component] = tuple(Size(n, n) for n in sorted({*fitting}))
        if rows % mode.groups:
            return dict.fromkeys(found, ())
        if rows % (mode.groups * min(size.ranks for size in found["env"])):
            return dict.fromkeys(found, ())
        return found

    def stages(self, config: SimulatorJobConfig, plan: Plan, costs: Costs) -> Stages:
        return SimulatorStages(config, costs)

    def special_costs(self, mode: Mode) -> tuple[str, ...]:
        return _DIRECT if mode.shared else _CHANNELS

    def beside(self, stage: str) -> tuple[str, ...]:
        # The number of env ranks determines how trajectories are split for the actor.
        return ("env",) if stage == "learn" else ()

    # ── what else is measured for a profile ──────────────────────────────────────────────────────────────────────────

    def more_variants(self, mapping: Mapping[str, Any]) -> Iterator[Variant]:
        groups = mapping.get("rollout", {}).get("pipeline_stage_num", 1)
        other = 1 if groups > 1 else 2
        changed = copy.deepcopy(dict(mapping))
        changed["rollout"]["pipeline_stage_num"] = other
        yield Variant(name=f"{other} stage groups", mapping=changed)


def _is(call: RankCall, component: str, method: str) -> bool:
    return call.slot.component == component and call.name == method


def _simulator(config: SimulatorJobConfig) -> str:
    """Return a text with the simulator's name and all settings that affect the seconds of a step."""
    env = config.env
    words = [env.kind, env.id or "", *_given(env.kwargs)]
    for wrapper in env.wrappers:
        words += [wrapper.name, *_given(wrapper.kwargs)]
    chunk = config.rollout.action_chunk
    if chunk > 1:
        words.append(f"in chunks of {chunk}")
    return " ".join(words)


def _given(kwargs: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(kwargs.items())]
