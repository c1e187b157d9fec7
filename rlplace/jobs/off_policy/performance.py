"""Predicted seconds of the off-policy job, from the measured seconds of whole calls: these belong to its sizes."""

from __future__ import annotations

from rlplace.config.blocks.off_policy import OffPolicyConfig
from rlplace.foresight.measured import MeasuredModel


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
