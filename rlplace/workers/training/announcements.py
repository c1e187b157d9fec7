"""How the other ranks of a group wait for rank 0 without sitting in a collective, whose timeout is short and cruel.

::

    rank 0    takes from a channel, for as long as it takes ── announce() ──┐ ┌── collective
    rank 1    await_rank_0() ···· asks the group's store now and then ······┴─┴── collective

A worker whose rank 0 waits for something slow (samples, scores, weights) calls `meet` right before the collective that
hands it on: whatever rank 0 waited for, all ranks then enter that collective within moments of each other.
"""

from __future__ import annotations

import time

from rlplace.errors import ChannelTimeout, Problem
from rlplace.workers.training.ranks import Ranks
from rlplace.workers.worker import WorkerContext, cancelled

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Announcements:
    """One per group and rank; all ranks call `meet` equally often. Nothing of a meeting is left in the store."""

    def __init__(self, ranks: Ranks, context: WorkerContext, timeout_s: float) -> None:
        """`timeout_s`: of a whole stage. Rank 0 has shorter ones for each thing it takes, and errors that say more."""
        self._ranks, self._context, self._timeout_s = ranks, context, timeout_s
        self._met = 0

    def meet(self, what: str) -> None:
        """Rank 0 passes at once; the others once it has. `what` it brings is named in errors.

        Raises ChannelTimeout, ChannelBroken when the run is cancelled meanwhile.
        """
        ranks, number = self._ranks, self._met
        self._met += 1
        if ranks.rank == 0:
            for rank in range(1, ranks.world_size):
                ranks.store.set(_key(number, rank), "1")
        else:
            self._wait(_key(number, ranks.rank), what)
            ranks.store.delete_key(_key(number, ranks.rank))

    def _wait(self, key: str, what: str) -> None:
        # The store's own wait cannot be cancelled; a question costs it about 50 microseconds.
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._ranks.store.check([key]):
            if self._context.cancelled.wait(pause_s):
                raise cancelled(self._context.owner, f"waiting for {what}")
            if time.monotonic() > deadline:
                raise _late(self._context, what, self._timeout_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _key(number: int, rank: int) -> str:
    return f"announcement {number} for rank {rank}"


def _late(context: WorkerContext, what: str, timeout_s: float) -> ChannelTimeout:
    first = f"{context.slot.component} rank 0"
    return ChannelTimeout(
        Problem(
            code="rank-0-late",
            key=context.owner,
            what=f"waited {timeout_s:g} s for {first} to bring {what}",
            why=f"{first} takes it from a channel for all ranks; what it waits for stands in its own error",
            fix="runner.stage_timeout_s=<longer>, or look at what fills that channel",
        )
    )
