"""The channels of a run that trains a language model: requests and completions, whole groups of samples, weights.

::

    env ── requests ──▶ any rollout rank with room        env ── samples: whole groups ──▶ actor rank 0
        ◀── completions, by env rank ── rollout           actor ── weights, by rollout rank ──▶ rollout
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array

from rlplace.placement.channels import ChannelPlan, plan_weights
from rlplace.placement.hybrid import HybridComponentPlacement
from rlplace.placement.routes import block_edges
from rlplace.placement.spec import Homes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """Of one iteration, in prompts and answers."""

    prompts: int
    samples_per_prompt: int
    turns: int = 1  # most answers of one episode
    held_out: int = 0  # prompts of one evaluation, each answered once; 0: there are none

    @property
    def requests(self) -> int:
        """Most that can wait at once: a prompt is asked for all its samples, a later turn for each by itself."""
        asked = self.prompts * (self.samples_per_prompt if self.turns > 1 else 1)
        return max(asked, self.held_out)


def plan_text_channels(placement: HybridComponentPlacement, sizes: TextSizes) -> tuple[ChannelPlan, ...]:
    """Each is large enough for all that can be under way at once, so no rank waits for room in it."""
    envs, engines = placement.homes("env"), placement.homes("rollout")
    ranks, ends = len(envs.node), len(engines.node)
    answers = [
        max(own * sizes.samples_per_prompt, held)
        for own, held in zip(_blocks(sizes.prompts, ranks), _blocks(sizes.held_out, ranks), strict=True)
    ]
    answers[0] += ranks
    turns = f", up to {sizes.samples_per_prompt} of each in later turns" if sizes.turns > 1 else ""
    return (
        ChannelPlan(
            name="requests",
            source="env",
            target="rollout",
            keys=("",),
            why=f"{sizes.requests // (sizes.samples_per_prompt if turns else 1)} prompts{turns}, "
            f"and the end of the iteration for {ends} rollout rank{'s' * (ends > 1)}",
            targets=_first(engines),
            waiting=array("l", [sizes.requests + ends]),
            inside=bytes(1),
        ),
        ChannelPlan(
            name="completions",
            source="rollout",
            target="env",
            keys=tuple(map(str, range(ranks))),
            why="every answer of an env rank's prompts, and rank 0 hears when each rank is done",
            targets=envs,
            waiting=array("l", answers),
            inside=bytes(ranks),
        ),
        ChannelPlan(
            name="samples",
            source="env",
            target="actor",
            keys=("",),
            why="all groups of an iteration wait there for learn",
            targets=_first(placement.homes("actor")),
            waiting=array("l", [sizes.prompts]),
            inside=bytes(1),
        ),
        plan_weights(placement),
    )


def _first(homes: Homes) -> Homes:
    """Where rank 0 lives, and with it a key that any rank may take from."""
    return Homes(node=homes.node[:1], first=homes.first[:1], count=homes.count[:1])


def _blocks(rows: int, ranks: int) -> list[int]:
    edges = block_edges(rows, ranks)
    return [stop - start for start, stop in itertools.pairwise(edges)]
