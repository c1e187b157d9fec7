"""Predicted seconds of the off-policy job, from the measured seconds of whole calls: these belong to its sizes.

A call of a component with twice as many ranks takes more than half as long: the number of updates, steps and draws of
a rank stays the same, and only their rows become fewer. Several actor ranks exchange gradients as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rlplace.config.blocks.off_policy import OffPolicyBlocks, OffPolicyConfig
from rlplace.foresight.costs import Cost
from rlplace.foresight.measured import MeasuredModel
from rlplace.foresight.observe import EMULATED
from rlplace.foresight.profile import Profile
from rlplace.foresight.scaling import RankCosts, Scaling, measured_ranks
from rlplace.placement.plan import Plan
from rlplace.report.calls import IterationCalls

_LEARN = "actor.learn/seconds"
# Rows times weights of a network from which on half of an update is spent in its matrix products, on one processor
_HALF = 64 * 2**16
# Of steps and of draws, the share of the seconds that does not depend on the rows of a rank
_FIXED = {"rollout.act/seconds": 0.8, "replay.serve/seconds": 0.5}
# Seconds of a processor that an exchange takes for each of its ranks, if they compute on processors
_EXCHANGE_S = 5e-4
# Count of a profile: 1 if actor ranks compute on processors
_ON_PROCESSORS = "actor/on_processors"


class OffPolicyCosts(RankCosts):
    """The costs of a profile, scaled to numbers of ranks that were not measured."""

    def __init__(
        self, profile: Profile, scaling: Scaling, blocks: OffPolicyBlocks
    ) -> None:
        super().__init__(profile, ("actor",), scaling)
        work = blocks.algorithm.batch_size * _weights(blocks)
        self._fixed = {**_FIXED, _LEARN: _HALF / (_HALF + work)}
        self._exchanges = _exchanges(blocks)

    def fixed_share(self, name: str) -> float:
        return self._fixed.get(name, super().fixed_share(name))

    def _of(self, name: str, size: float) -> Cost:
        found = super()._of(name, size)
        alone = not size or round(1.0 / size) == 1
        if name != _LEARN or alone or measured_ranks(self.profile, name) != (1,):
            return found
        if self._scaling is Scaling.LEAST:
            return found
        exchanged_s = self._exchanges * _EXCHANGE_S / size
        added_s = exchanged_s * self.count(_ON_PROCESSORS, 0.0)
        return found._replace(cpu_s=found.cpu_s + added_s)


class OffPolicyPerformance(MeasuredModel):
    """Predicts other placements of the job. A profile of another algorithm, simulator or size is another job's."""

    def subject(self, config: OffPolicyConfig, component: str) -> str:
        blocks = config.blocks
        algorithm = blocks.algorithm
        simulator = config.env.id or config.env.kind
        steps = algorithm.steps_per_iteration
        updates = f"{algorithm.ratio * steps} updates of {algorithm.batch_size} samples"
        policy = f"policy of {list(blocks.actor.hidden)}"
        if component == "rollout":
            envs = config.env.total_num_envs
            done = "no steps" if algorithm.offline else f"{steps} steps"
            return f"{done} of {envs} x {simulator}, {algorithm.name}, {policy}"
        if component == "replay":
            return f"{updates} of {simulator}, {blocks.replay.sampling}"
        of = blocks.actor
        critics = f"{of.critics} critics of {list(of.widths_of_critics)}"
        return f"{algorithm.name}: {updates} of {simulator}, {policy}, {critics}"

    def stage_counts(
        self,
        config: OffPolicyConfig,
        plan: Plan,
        iteration: IterationCalls,
        waits: Mapping[str, float],
    ) -> Mapping[str, float]:
        on_processors = float(plan.topology.nodes[0].kind == EMULATED)
        turns = super().stage_counts(config, plan, iteration, waits)
        return {**turns, _ON_PROCESSORS: on_processors}

    def costs(
        self,
        config: OffPolicyConfig,
        profile: Profile,
        scaling: Scaling = Scaling.SHARED,
    ) -> OffPolicyCosts:
        return OffPolicyCosts(profile, scaling, config.blocks)


def _weights(blocks: OffPolicyBlocks) -> int:
    """Return the number of weights between the hidden layers of a network that learns."""
    widths = blocks.actor.widths_of_critics
    if blocks.algorithm.name == "dqn":
        widths = blocks.actor.hidden
    return sum(wide * narrow for wide, narrow in itertools.pairwise(widths))


def _exchanges(blocks: OffPolicyBlocks) -> float:
    """Return how often the actor ranks average gradients in an iteration: once for each step of an optimizer."""
    algorithm = blocks.algorithm
    each = {"dqn": 1.0, "iql": 3.0}.get(algorithm.name, 2.0)
    if algorithm.uses("policy_delay"):
        each = 1.0 + 1.0 / algorithm.policy_delay
    if algorithm.draws and algorithm.temperature == "auto":
        each += 1.0
    return each * float(algorithm.ratio * algorithm.steps_per_iteration)
