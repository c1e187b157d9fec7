"""What every worker of the off-policy job gets as its config."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlplace.comm.channel import Channel
from rlplace.config.blocks.off_policy import OffPolicyBlocks
from rlplace.envs.contract import Spaces
from rlplace.workers.off_policy.pieces import Pieces, rows_of

TRANSITIONS = "transitions"
BATCHES = "batches"
PRIORITIES = "priorities"
POLICY = "policy"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyArguments:
    """The config of the job, the spaces of its simulator, and the number of ranks of each component.

    `seed`: seed of everything random. `eval_episodes`: episodes of an evaluation.
    """

    blocks: OffPolicyBlocks
    spaces: Spaces
    ranks: dict[str, int]
    seed: int
    eval_episodes: int

    @property
    def pieces(self) -> Pieces:
        return Pieces.of(self.blocks.algorithm)

    def rows(self, component: str, rank: int) -> range:
        """Return the environments of a rank of rollout or replay, counted over the whole job."""
        total = self.blocks.env.total_num_envs
        return rows_of(rank, self.ranks[component], total)

    @property
    def batch_of_each(self) -> int:
        """Samples of an update that one replay rank draws for one actor rank."""
        ranks = self.ranks["replay"] * self.ranks["actor"]
        return self.blocks.algorithm.batch_size // ranks


class Arrivals:
    """Items of a channel by their keys. The ranks that put them may be a piece ahead of each other."""

    def __init__(self) -> None:
        self._early: dict[tuple[int, int], Any] = {}

    def take(
        self, channel: Channel, rank: int, wanted: Sequence[tuple[int, int]]
    ) -> list[Any]:
        """Wait until all `wanted` keys have arrived; return their values. An item of the channel is (key, value)."""
        while not all(key in self._early for key in wanted):
            key, value = channel.get(key=str(rank))
            self._early[key] = value
        return [self._early.pop(key) for key in wanted]
