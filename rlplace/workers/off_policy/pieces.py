"""The pieces of an iteration: while rollout acts in one piece, the actor makes the updates of the piece before.

::

    rollout   act 0 │ act 1 │ act 2 │ act 3                     piece p acts by the policy after the updates of p - 2
    replay     add 0, draw │ add 1, draw │ add 2, draw │ ...    the updates of p see the steps of all pieces up to p
    actor           update 0 │ update 1 │ update 2 │ update 3

The policy of a piece and the steps of an update depend only on the number of the piece, not on timing. So a run can be
repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rlplace.config.blocks.off_policy import OffPolicyAlgorithmConfig

# How many pieces acting is behind learning
BEHIND = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The pieces of an iteration.

    `count`: number of pieces. `steps`: steps of a piece, of all environments together. `updates`: updates of a piece.
    `learning_starts`: steps before the first update. `acts`: whether environments are stepped.
    """

    count: int
    steps: int
    updates: int
    learning_starts: int
    acts: bool = True

    @classmethod
    def of(cls, algorithm: OffPolicyAlgorithmConfig) -> Pieces:
        steps = int(algorithm.piece_steps)
        return cls(
            count=algorithm.steps_per_iteration // steps,
            steps=steps,
            updates=algorithm.sync_every,
            learning_starts=0 if algorithm.offline else algorithm.learning_starts,
            acts=not algorithm.offline,
        )

    def number(self, iteration: int, piece: int) -> int:
        """Return the number of a piece, counted over all iterations."""
        return iteration * self.count + piece

    def steps_before(self, iteration: int, piece: int) -> int:
        """Return the steps of all environments before a piece, since the run began."""
        return self.number(iteration, piece) * self.steps

    def acts_randomly(self, iteration: int, piece: int) -> bool:
        return self.steps_before(iteration, piece) < self.learning_starts

    def updates_after(self, iteration: int, piece: int) -> int:
        """Return the updates that follow a piece: none before `learning_starts` steps are done."""
        if self.steps_before(iteration, piece + 1) <= self.learning_starts:
            return 0
        return self.updates

    def syncs_before(self, iteration: int, piece: int) -> bool:
        """Return whether rollout gets a policy before this piece: the policy after the updates of piece p - 2.

        The first pieces of an iteration act by the policy of the stage `sync`.
        """
        before = piece - BEHIND
        return before >= 0 and self.updates_after(iteration, before) > 0

    def learning(self, iteration: int) -> Iterator[int]:
        """Yield the pieces of an iteration after which the actor makes updates."""
        for piece in range(self.count):
            if self.updates_after(iteration, piece):
                yield piece

    def sends_policy(self, piece: int) -> bool:
        """Return whether a later piece of the iteration acts by the policy after the updates of this piece."""
        return self.acts and piece + BEHIND < self.count


def rows_of(rank: int, ranks: int, total: int) -> range:
    """Return the environments of a rank, counted over the whole job. `ranks` divides `total`."""
    each = total // ranks
    return range(rank * each, (rank + 1) * each)


def shared_rows(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))
