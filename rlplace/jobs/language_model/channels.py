"""The channels of a job on language models, and how many items each holds.

::

    env ── requests ──▶ any rollout rank with room        env ── samples: whole groups ──▶ actor rank 0
        ◀── completions, by env rank ── rollout           actor ── weights, by rollout rank ──▶ rollout

    and for each critic, reference, teacher or reward, called scorer here:
    env ── samples.scorer: the same groups ──▶ scorer     scorer ── scores.scorer ──▶ actor rank 0
    actor ── returns: of whole groups ──▶ critic          actor ── weights.reference ──▶ reference, if refreshed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from rlplace.config.blocks.language_model import LanguageModelJobConfig
from rlplace.placement.channels import (
    ChannelPlan,
    asked_at_once,
    channel_plan,
    plan_weights,
)
from rlplace.placement.flow import block_edges
from rlplace.placement.language.hybrid import HybridComponentPlacement
from rlplace.placement.language.spec import role_of
from rlplace.units import counted
from rlplace.workers.arguments import SCORERS


def plan_channels(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> tuple[ChannelPlan, ...]:
    """Return the channels of a run. Each is large enough for all items that can be under way at once."""
    return (*_text_channels(config, placement), *_scorer_channels(config, placement))


def _text_channels(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[ChannelPlan]:
    """Yield the channels of a job on language models, except those of scorers.

    Scorers are the critic, reference and reward components.

    Each channel has room for a whole iteration or evaluation, so that no rank waits, except the channel that carries
    weights.
    """
    algorithm = config.algorithm
    runner = config.runner
    each = algorithm.samples_per_prompt
    prompts = algorithm.prompts or 0
    held_out = 0
    if runner.eval_every:
        # More held-out prompts wait until there is room.
        held_out = runner.usual_eval_prompts
    # The first turn of a prompt asks for all its samples in one request; each later turn asks for one sample.
    turns = config.env.max_turns > 1
    at_once = asked_at_once(prompts, algorithm.short_rounds)
    requests = max(at_once * (each if turns else 1), held_out)
    envs = placement.world_size("env")
    engines = placement.world_size("rollout")
    owned, tested = (
        itertools.pairwise(block_edges(rows, envs)) for rows in (prompts, held_out)
    )
    drawn = runner.eval_samples
    # Most answers per env rank: of one training iteration, or of one evaluation on held-out prompts.
    answers = [
        max(asked_at_once(b - a, algorithm.short_rounds) * each, (d - c) * drawn)
        for (a, b), (c, d) in zip(owned, tested, strict=True)
    ]
    # Besides the answers, env rank 0 receives one message from each env rank when that rank is done.
    answers[0] += envs
    later = f", up to {each} of each in later turns" if turns else ""
    asked = f"{requests // (each if turns else 1)} prompts{later}"
    ends = f"the end of the iteration for {counted(engines, 'rollout rank')}"
    yield channel_plan(
        placement,
        "requests",
        "env",
        "rollout",
        requests + engines,
        f"{asked}, and {ends}",
    )
    answered = (
        "every answer of an env rank's prompts, and rank 0 hears when each rank is done"
    )
    yield channel_plan(placement, "completions", "rollout", "env", answers, answered)
    ahead = (
        f", and those of {algorithm.max_staleness} more"
        if algorithm.max_staleness
        else ""
    )
    kept = "all groups of an iteration wait there for learn"
    groups = prompts * (1 + algorithm.max_staleness)
    yield channel_plan(placement, "samples", "env", "actor", groups, kept + ahead)
    yield plan_weights(placement, "weights", "actor", "rollout")


def _scorer_channels(
    config: LanguageModelJobConfig, placement: HybridComponentPlacement
) -> Iterator[ChannelPlan]:
    """Yield the channels to and from scorers (critic, reference, reward), in a job on language models.

    Each channel has room for whole iterations, except the channel that carries weights.
    """
    groups = (config.algorithm.prompts or 0) * (1 + config.algorithm.max_staleness)
    samples = groups * config.algorithm.samples_per_prompt
    for scorer in scorers_of(placement.components):
        yield channel_plan(
            placement,
            f"samples.{scorer}",
            "env",
            scorer,
            groups,
            "all groups of an iteration",
        )
        yield channel_plan(
            placement,
            f"scores.{scorer}",
            scorer,
            "actor",
            samples,
            "a score of each sample, at most",
        )
    if "critic" in placement.components:
        yield channel_plan(
            placement, "returns", "actor", "critic", groups, "those of all groups"
        )
    if config.reference.refresh_every and "reference" in placement.components:
        yield plan_weights(placement, "weights.reference", "actor", "reference")


def scorers_of(components: Iterable[str]) -> tuple[str, ...]:
    """Return the scorers among `components`: critic, reference, teacher and rewards, which evaluate each sample."""
    return tuple(c for c in components if role_of(c) in SCORERS)
