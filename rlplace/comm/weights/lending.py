"""Buckets lent on one accelerator: the host's memory, read by its guests, at most two at a time.

::

    host rank      lends bucket 5 ─▶ a note to each guest      after bucket 4 was taken by all of them
    guest ranks    read the note, copy from the host's memory, let go, note that it is taken
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Sequence

from torch import Tensor

from rlplace.comm.device import LentTensor, lend
from rlplace.comm.weights.meeting import Meeting

_OUT = 2  # buckets: one is filled while the other is copied


class Lender:
    """The host's side of one push. `guests` and `me`: names of members."""

    def __init__(self, meeting: Meeting, guests: Sequence[str], *, deadline_s: float) -> None:
        self._meeting = meeting
        self._guests = guests
        self._deadline_s = deadline_s
        self._out: collections.deque[tuple[int, Tensor]] = collections.deque()
        self._next = 0

    def lend(self, bucket: Tensor) -> None:
        """Keeps it until every guest has taken it."""
        for guest in self._guests:  # once for each: torch counts who has opened what was lent
            self._tell(guest, lend(bucket))
        if self._guests:
            self._out.append((self._next, bucket))
            self._next += 1
            while len(self._out) >= _OUT:
                self._take_back()

    def finish(self) -> None:
        """Every guest has taken every bucket. ChannelTimeout names one that has not."""
        while self._out:
            self._take_back()

    def break_off(self, why: str) -> None:
        """Tells guests who wait for the next bucket that there is none."""
        for guest in self._guests:
            self._tell(guest, why)

    def _tell(self, guest: str, what: LentTensor | str) -> None:
        self._meeting.note(_lent(self._next, guest), pickle.dumps(what))

    def _take_back(self) -> None:
        index, _ = self._out[0]
        for guest in self._guests:
            self._meeting.read(_taken(index, guest), guest, deadline_s=self._deadline_s)
        self._out.popleft()


class Borrower:
    """A guest's side of one push."""

    def __init__(self, meeting: Meeting, host: str, *, deadline_s: float) -> None:
        self._meeting = meeting
        self._host = host
        self._deadline_s = deadline_s
        self._next = 0

    def borrow(self) -> Tensor:
        """The next bucket, in the host's memory; let go of it before `give_back`. RuntimeError if there is none."""
        note = self._meeting.read(_lent(self._next, self._meeting.me), self._host, deadline_s=self._deadline_s)
        lent: LentTensor | str = pickle.loads(note)
        if isinstance(lent, str):
            raise RuntimeError(f"{self._host} broke off: {lent}")
        return lent.open()

    def give_back(self) -> None:
        """What was read of the bucket must have been read: the host changes it."""
        self._meeting.note(_taken(self._next, self._meeting.me), b"")
        self._next += 1


def _lent(index: int, guest: str) -> str:
    return f"bucket {index} for {guest}"


def _taken(index: int, guest: str) -> str:
    return f"bucket {index} taken by {guest}"
