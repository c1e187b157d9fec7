"""What each word of a channel's state means: the one place that knows where state lies.

::

    header │ reason │ participants │ keys │ waiters │ entries (record + room for a small item)

All state is 8-byte words, read as integers or, where a name below says so, as reals. A pointer is the index of a
record's first word; 0 points at nothing. Records have fixed places, so nothing is ever allocated: the table is bounded
by the channel's spec. Between threads it is a bytearray, between processes a mapped file. Only the holder of the
channel's lock writes; without the lock, a request that is about to wait looks at counts and endings for a moment, and
statistics name the process that keeps the lock.
"""

from __future__ import annotations

import mmap

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelSpec

# ── header ───────────────────────────────────────────────────────────────────────────────────────────────────────────
LOCK = 0  # eight words, between processes
(
    SPEC_BYTES,  # of the pickled spec at the end of the file
    CHANGING,  # process in the middle of a change; 0: the state is whole
    BROKEN,  # 1 once broken
    CLOSED,  # 1 once closed
    ITEMS,  # credit in use: items in lines and reservations
    HIGH_ITEMS,
    PUTS,
    GETS,
    BYTES,  # of items that were placed in shared memory
    PRODUCER_WAIT,  # real, seconds
    CONSUMER_WAIT,  # real, seconds
    FREE_ENTRY,  # freed records, last freed first: the memory in use stays small and warm
    ENTRIES_USED,  # records that were ever in use
    FREE_WAITER,
    WAITERS_USED,
    PUTTERS,  # line of waiting puts over all keys: first, last, count
    _PUTTERS_LAST,
    _PUTTERS_COUNT,
    UNCONFIRMED,  # items that were taken for clients on other nodes and may come back
    PARTICIPANTS,  # records in use
    KEYS,  # records in use
    NEWEST_VERSION,  # 0 if none was given so far
    STALENESS_MAX,
    CHECKED,  # real: when a process last looked for dead processes
    EPOCH,  # how often the channel was reset: what was granted before counts no more
    REASON,  # bytes, then text: why the channel is broken
) = range(8, 34)
FIRST, LAST, COUNT = range(3)  # words of a line
LINE_WORDS = 3
NO_VERSION = -1
MAX_REASON_BYTES = 2048
_FIRST_RECORD = REASON + 1 + MAX_REASON_BYTES // 8

# ── a name under which a process puts or gets, and a key ─────────────────────────────────────────────────────────────
_LENGTH = 0
PROCESS = 1  # bytes of the name; PROCESS: 0 for a key
P_PRODUCED, P_CONSUMED, P_DEAD, P_UNCONFIRMED = range(2, 6)
K_RESERVED = 2
K_ITEMS = 3
K_GETTERS = 6  # puts whose item is still to come; lines of entries and of waiting gets
_NAME = 9
MAX_NAME_BYTES = 256  # in UTF-8
_NAMED_WORDS = _NAME + MAX_NAME_BYTES // 8

# ── a put or get that waits ──────────────────────────────────────────────────────────────────────────────────────────
(
    W_NEXT,
    W_PREVIOUS,
    W_LINE,  # PUTTERS, or the line of getters of a key; 0: the record is free
    W_OWNER,  # participant
    W_KEY,
    W_SINCE,  # real, seconds
    W_WAKER,
    W_WOKEN,  # real, seconds: when it was woken and has not looked since; 0: it was not
    WAITER_WORDS,
) = range(9)

# ── an item ──────────────────────────────────────────────────────────────────────────────────────────────────────────
(
    E_NEXT,
    E_STATE,
    E_KEY,
    E_OWNER,  # participant that put it
    E_WEIGHT,  # real
    E_VERSION,  # NO_VERSION: none was given
    E_LENGTH,  # bytes of the item here
    E_SEGMENT,  # where in shared memory it lies instead; 0: here
    E_DATA,
) = range(9)
FREE, IN_LINE, AWAITED = range(3)
SPARE_ENTRIES = 16  # beyond the capacity: for items that were taken and came back
_INLINE_BYTES = (512, 16 << 10)  # least and most room for a small item
_INLINE_BUDGET = 16 << 20  # between these, what all entries together may take


class Table:
    """The memory of a channel as integers, reals and bytes, and where its records begin, in words. New: only zeros."""

    def __init__(
        self,
        spec: ChannelSpec,
        memory: bytearray | mmap.mmap | None = None,
        *,
        inline: bool = True,
    ) -> None:
        """`inline`: whether small items lie in their entries. `memory` None: only the sizes are asked for."""
        self.spec = spec
        least, most = _INLINE_BYTES
        self.inline_bytes = (
            min(max(_INLINE_BUDGET // spec.capacity_items, least), most) // 64 * 64
            if inline
            else 0
        )
        self.key_count = (
            spec.participants if spec.keys is None else max(len(spec.keys), 1)
        )
        self.keys = _FIRST_RECORD + spec.participants * _NAMED_WORDS
        self.waiters = self.keys + self.key_count * _NAMED_WORDS
        self.entries = self.waiters + spec.participants * WAITER_WORDS
        self.entry_count = spec.capacity_items + SPARE_ENTRIES
        self.entry_words = E_DATA + self.inline_bytes // 8
        self.size_bytes = 8 * (self.entries + self.entry_count * self.entry_words)
        self.data = memoryview(b"" if memory is None else memory)
        self.words = self.data.cast("q")
        self.reals: memoryview[float] = self.data.cast("d")

    def release(self) -> None:
        """Let go of the memory. Any later access is a ValueError."""
        for view in (self.words, self.reals, self.data):
            view.release()


class Names:
    """The participants of a channel, or its keys: named records that are only added, under the channel's lock."""

    def __init__(self, table: Table, *, keys: bool) -> None:
        self._table = table
        self._used, self._first = (
            (KEYS, table.keys) if keys else (PARTICIPANTS, _FIRST_RECORD)
        )
        self._most, self._kind = (
            (table.key_count, "keys") if keys else (table.spec.participants, "names")
        )
        self._names: dict[int, str] = {}  # by record, as far as they were read
        self._records: dict[tuple[str, int], int] = {}  # by name and process

    def all(self) -> dict[int, str]:
        """Every record and its name, in the order in which they came."""
        table = self._table
        words = self._table.words
        first = self._first + len(self._names) * _NAMED_WORDS
        for record in range(
            first, self._first + words[self._used] * _NAMED_WORDS, _NAMED_WORDS
        ):
            at = 8 * (record + _NAME)
            name = str(
                table.data[at : at + words[record + _LENGTH]], "utf-8", "surrogatepass"
            )
            self._names[record] = name
            self._records[name, words[record + PROCESS]] = record
        return self._names

    def find(self, name: str, owner: str, process: int = 0) -> int:
        """The record of this name, and of this process for a participant; a new one if need be. `owner`: for errors."""
        found = self._records.get((name, process))
        if found is None:
            self.all()
            found = self._records.get((name, process))
        if found is None:
            found = self._left_by_dead(name, process)
        if found is None:
            table = self._table
            encoded = name.encode("utf-8", "surrogatepass")
            if len(encoded) > MAX_NAME_BYTES:
                raise channel_errors.name_too_long(
                    table.spec, owner, name, MAX_NAME_BYTES
                )
            if table.words[self._used] == self._most:
                raise channel_errors.crowded(table.spec, owner, self._kind)
            found = self._first + table.words[self._used] * _NAMED_WORDS
            table.words[found + _LENGTH] = len(encoded)
            table.words[found + PROCESS] = process
            table.data[8 * (found + _NAME) : 8 * (found + _NAME) + len(encoded)] = (
                encoded
            )
            table.words[self._used] += 1
            self.all()
        return found

    def _left_by_dead(self, name: str, process: int) -> int | None:
        """Give the record that a dead process had under this name to `process`, if there is one."""
        words = self._table.words
        named = (
            record for record, known in self._names.items() if known == name and process
        )
        found = next((record for record in named if words[record + P_DEAD]), None)
        if found is not None:
            words[found + PROCESS] = process
            self._records[name, process] = found
        return found
