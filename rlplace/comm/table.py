"""The meaning of each word of a channel's state: the only place that knows the layout.

::

    header │ reason │ participants │ keys │ waiters │ entries (record + room for a small item)

All state is 8-byte words, read as integers or, where a name below says so, as reals. A pointer is the index of a
record's first word; 0 points at nothing. Records have fixed places, so nothing is ever allocated: the table is
bounded by the channel's spec. Between threads it is a bytearray, between processes a mapped file. Only the holder of
the channel's lock writes. Two readers do without the lock: a request that is about to wait looks at counts and
endings for a moment, and statistics name the process that holds the lock.
"""

from __future__ import annotations

import mmap

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelSpec

# ── header ───────────────────────────────────────────────────────────────────────────────────────────────────────────
LOCK = 0  # eight words, between processes
(
    SPEC_BYTES,  # of the pickled spec at the end of the file
    CHANGING,  # process in the middle of a change; 0: the state is consistent
    BROKEN,  # 1 once broken
    CLOSED,  # 1 once closed
    ITEMS,  # credit in use: items in lines and reservations
    HIGH_ITEMS,
    PUTS,
    GETS,
    BYTES,  # of items that were placed in shared memory
    PRODUCER_WAIT,  # real, seconds
    CONSUMER_WAIT,  # real, seconds
    FREE_ENTRY,  # freed records, last freed first, so that the memory in use stays small and cached
    ENTRIES_USED,  # records that were ever in use
    FREE_WAITER,
    WAITERS_USED,
    PUTTERS,  # line of waiting puts over all keys: first, last, count
    _PUTTERS_LAST,
    _PUTTERS_COUNT,
    UNCONFIRMED,  # items taken for clients on other nodes that may come back
    PARTICIPANTS,  # records in use
    KEYS,  # records in use
    NEWEST_VERSION,  # 0 if no version was given so far
    STALENESS_MAX,
    CHECKED,  # real: when a process last looked for dead processes
    EPOCH,  # number of resets: requests of an earlier epoch are lost
    REASON,  # bytes, then text: why the channel is broken
) = range(8, 34)
FIRST, LAST, COUNT = range(3)  # words of a line
LINE_WORDS = 3
NO_VERSION = -1
MAX_REASON_BYTES = 2048
_FIRST_RECORD = REASON + 1 + MAX_REASON_BYTES // 8

# ── a name under which a process puts or gets, and a key ─────────────────────────────────────────────────────────────
_LENGTH = 0  # bytes of the name
PROCESS = 1  # 0 for a key
P_PRODUCED, P_CONSUMED, P_DEAD, P_UNCONFIRMED = range(2, 6)
P_PUTS, P_GETS = range(6, 8)  # items that it put and took since the last reset
K_RESERVED = 2  # puts whose item is still to come
K_ITEMS = 3  # line of entries
K_GETTERS = 6  # line of waiting gets
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
    W_WOKEN,  # real, seconds: when it was woken, until it tries again; 0: it was not woken
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
    E_LENGTH,  # bytes of the item if it lies in this record
    E_SEGMENT,  # address of its segment in shared memory; 0: it lies in this record
    E_DATA,
) = range(9)
FREE, IN_LINE, AWAITED = range(3)
SPARE_ENTRIES = 16  # beyond the capacity, for items that were taken and come back
_INLINE_BYTES = (512, 16 << 10)  # least and most room for a small item in its entry
_INLINE_BUDGET = 16 << 20  # between these limits, the room of all entries together


class Table:
    """A channel's memory as integers (`words`), floats (`reals`) and bytes (`data`), and the positions of its records.

    The memory of a new channel is all zeros.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        memory: bytearray | mmap.mmap | None = None,
        *,
        inline: bool = True,
    ) -> None:
        """Compute the positions of all records, and make views of the memory.

        `memory`: the channel's memory, of `size_bytes` bytes; None: only compute the sizes. `inline`: whether small
        items are stored in their entries.
        """
        self.spec = spec
        # Room for a small item in each entry: the budget's share, within limits, in whole cache lines
        self.inline_bytes = 0
        if inline:
            least, most = _INLINE_BYTES
            share = _INLINE_BUDGET // spec.capacity_items
            self.inline_bytes = min(max(share, least), most) // 64 * 64
        # Places for undeclared keys
        self.key_count = spec.participants
        if spec.keys is not None:
            self.key_count = max(len(spec.keys), 1)
        # First words of the records
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
        """Release the views of the memory. Any later access raises ValueError."""
        for view in (self.words, self.reals, self.data):
            view.release()


class Names:
    """The workers that use a channel (`keys` False) or the channel's keys (`keys` True), as named records in the table.

    Records are only added, never removed. Methods are called under the channel's lock.
    """

    def __init__(self, table: Table, *, keys: bool) -> None:
        self._table = table
        # Word with the number of records in use, first record, most records, and the noun for errors
        if keys:
            self._used = KEYS
            self._first = table.keys
            self._most = table.key_count
            self._kind = "keys"
        else:
            self._used = PARTICIPANTS
            self._first = _FIRST_RECORD
            self._most = table.spec.participants
            self._kind = "names"
        # Name by record, for the records that this process has read
        self._names: dict[int, str] = {}
        # Record by name and process
        self._records: dict[tuple[str, int], int] = {}

    def all(self) -> dict[int, str]:
        """Return record -> name, for all records, in the order in which the records were added."""
        table = self._table
        words = self._table.words
        # Read the records that were added since the last call
        first = self._first + len(self._names) * _NAMED_WORDS
        end = self._first + words[self._used] * _NAMED_WORDS
        for record in range(first, end, _NAMED_WORDS):
            at = 8 * (record + _NAME)
            encoded = table.data[at : at + words[record + _LENGTH]]
            name = str(encoded, "utf-8", "surrogatepass")
            self._names[record] = name
            self._records[name, words[record + PROCESS]] = record
        return self._names

    def find(
        self,
        name: str,
        owner: str,
        process: int = 0,
    ) -> int:
        """Return the record of `name`; add a record if `name` has none.

        `owner`: name of the calling worker, for errors. `process`: number of the process of a worker; 0 for a key.
        Raise ChannelMisuse if the name is too long, ChannelError if all records are in use.
        """
        # In this process's memory, then in the table, then among the dead
        found = self._records.get((name, process))
        if found is None:
            self.all()
            found = self._records.get((name, process))
        if found is None:
            found = self._left_by_dead(name, process)
        if found is None:
            table = self._table
            encoded = name.encode("utf-8", "surrogatepass")
            # Append a record
            if len(encoded) > MAX_NAME_BYTES:
                raise channel_errors.name_too_long(
                    table.spec,
                    owner,
                    name,
                    MAX_NAME_BYTES,
                )
            if table.words[self._used] == self._most:
                raise channel_errors.crowded(table.spec, owner, self._kind)
            found = self._first + table.words[self._used] * _NAMED_WORDS
            table.words[found + _LENGTH] = len(encoded)
            table.words[found + PROCESS] = process
            at = 8 * (found + _NAME)
            table.data[at : at + len(encoded)] = encoded
            table.words[self._used] += 1
            self.all()
        return found

    def _left_by_dead(self, name: str, process: int) -> int | None:
        """Give the record `name` of a dead process to the process with the number `process`, and return the record.

        Return None if no dead process has a record `name`.
        """
        words = self._table.words
        found = None
        for record, known in self._names.items():
            if process and known == name and words[record + P_DEAD]:
                found = record
                break
        if found is not None:
            words[found + PROCESS] = process
            self._records[name, process] = found
        return found
