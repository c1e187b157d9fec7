"""The lists of a channel in shared memory: items by key, those who wait to put, those who wait to get by key.

Plain linked lists over words; nothing here decides who is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlplace.comm.shared.layout import (
    E_KEY,
    E_NEXT,
    E_STATE,
    E_WEIGHT,
    FIRST_PUTTER,
    FREE,
    FREE_ENTRY,
    FREE_WAITER,
    IN_LINE,
    K_DEPTH,
    K_FIRST,
    K_FIRST_GETTER,
    K_GETTERS,
    K_LAST,
    K_LAST_GETTER,
    K_PUTTERS,
    K_WEIGHT,
    LAST_PUTTER,
    NOBODY,
    P_WAITING,
    PUT,
    W_KEY,
    W_KIND,
    W_NEXT,
    W_OWNER,
    W_PREVIOUS,
)
from rlplace.comm.shared.memory import ChannelMemory


class Weighed(NamedTuple):
    """What a batch policy wants to know of an item."""

    weight: float


class WeighedLine:
    """The line of a key, read only as far as the policy looks."""

    def __init__(self, lines: Lines, key: int) -> None:
        self._lines = lines
        self._key = key

    def __iter__(self) -> Iterator[Weighed]:
        reals = self._lines.reals
        return (Weighed(reals[entry + E_WEIGHT]) for entry in self._lines.entries(self._key))

    def __len__(self) -> int:
        return int(self._lines.words[self._key + K_DEPTH])


class Lines:
    """Over the memory of one channel, under its lock."""

    def __init__(self, memory: ChannelMemory) -> None:
        self.words = memory.words
        self.reals = memory.reals
        self._records = memory.layout.waiter_records()

    # ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, entry: int) -> None:
        """The entry stands last in the line of its key."""
        words = self.words
        key = words[entry + E_KEY]
        words[entry + E_STATE] = IN_LINE
        words[entry + E_NEXT] = 0
        last = words[key + K_LAST]
        if last:
            words[last + E_NEXT] = entry
        else:
            words[key + K_FIRST] = entry
        words[key + K_LAST] = entry
        words[key + K_DEPTH] += 1
        self.reals[key + K_WEIGHT] += self.reals[entry + E_WEIGHT]

    def prepend(self, entry: int) -> None:
        words = self.words
        key = words[entry + E_KEY]
        words[entry + E_STATE] = IN_LINE
        words[entry + E_NEXT] = words[key + K_FIRST]
        if not words[key + K_FIRST]:
            words[key + K_LAST] = entry
        words[key + K_FIRST] = entry
        words[key + K_DEPTH] += 1
        self.reals[key + K_WEIGHT] += self.reals[entry + E_WEIGHT]

    def remove(self, key: int, before: int) -> int:
        """Takes out the entry after `before` (0: the first) of the key's line."""
        words = self.words
        link = before + E_NEXT if before else key + K_FIRST
        entry = words[link]
        words[link] = words[entry + E_NEXT]
        if words[key + K_LAST] == entry:
            words[key + K_LAST] = before
        words[key + K_DEPTH] -= 1
        if words[key + K_FIRST]:
            self.reals[key + K_WEIGHT] -= self.reals[entry + E_WEIGHT]
        else:
            self.reals[key + K_WEIGHT] = 0.0  # forgets what rounding has left
        return entry

    def at(self, key: int, index: int) -> int:
        """The entry at `index` of a line that is longer."""
        entry = self.words[key + K_FIRST]
        for _ in range(index):
            entry = self.words[entry + E_NEXT]
        return entry

    def weighed(self, key: int) -> WeighedLine:
        return WeighedLine(self, key)

    def entries(self, key: int) -> Iterator[int]:
        entry = self.words[key + K_FIRST]
        while entry:
            yield entry
            entry = self.words[entry + E_NEXT]

    def new_entry(self) -> int:
        """A free entry; 0 if there is none."""
        entry = self.words[FREE_ENTRY]
        if entry:
            self.words[FREE_ENTRY] = self.words[entry + E_NEXT]
        return entry

    def free_entry(self, entry: int) -> None:
        self.words[entry + E_STATE] = FREE
        self.words[entry + E_NEXT] = self.words[FREE_ENTRY]
        self.words[FREE_ENTRY] = entry

    # ── waiters ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def waiters(self) -> Iterator[int]:
        """Everybody who waits, even where the lines are damaged."""
        return (waiter for waiter in self._records if self.words[waiter + W_KIND] != NOBODY)

    def putters(self) -> Iterator[int]:
        return self._waiters(self.words[FIRST_PUTTER])

    def getters(self, key: int) -> Iterator[int]:
        return self._waiters(self.words[key + K_FIRST_GETTER])

    def _waiters(self, waiter: int) -> Iterator[int]:
        while waiter:
            following = self.words[waiter + W_NEXT]
            yield waiter
            waiter = following

    def new_waiter(self) -> int:
        """A free record; 0 if there is none."""
        waiter = self.words[FREE_WAITER]
        if waiter:
            self.words[FREE_WAITER] = self.words[waiter + W_NEXT]
        return waiter

    def join(self, waiter: int) -> None:
        """The waiter stands last in its line: a putter in the one of all keys, a getter in the one of its key."""
        words = self.words
        key, kind = words[waiter + W_KEY], words[waiter + W_KIND]
        if kind == PUT:
            first, last = FIRST_PUTTER, LAST_PUTTER
        else:
            first, last = key + K_FIRST_GETTER, key + K_LAST_GETTER
        before = words[last]
        words[waiter + W_NEXT], words[waiter + W_PREVIOUS] = 0, before
        words[before + W_NEXT if before else first] = waiter
        words[last] = waiter
        self._count(waiter, kind, key, 1)

    def leave(self, waiter: int) -> None:
        """The waiter is in no line any more, and its record free."""
        words = self.words
        key, kind = words[waiter + W_KEY], words[waiter + W_KIND]
        if kind == PUT:
            first, last = FIRST_PUTTER, LAST_PUTTER
        else:
            first, last = key + K_FIRST_GETTER, key + K_LAST_GETTER
        before, after = words[waiter + W_PREVIOUS], words[waiter + W_NEXT]
        words[before + W_NEXT if before else first] = after
        words[after + W_PREVIOUS if after else last] = before
        self._count(waiter, kind, key, -1)
        words[waiter + W_KIND] = NOBODY
        words[waiter + W_NEXT] = words[FREE_WAITER]
        words[FREE_WAITER] = waiter

    def _count(self, waiter: int, kind: int, key: int, change: int) -> None:
        words = self.words
        if kind == PUT:
            words[key + K_PUTTERS] += change
            return
        words[key + K_GETTERS] += change
        words[words[waiter + W_OWNER] + P_WAITING] += change
