"""What each word of a channel's file means: the one place that knows where state lies in shared memory.

::

    header │ reasons │ buckets │ participants │ keys │ waiters │ entries (record + room for a small item) │ spec

All state is 8-byte words, read as integers or, where a name below says so, as reals. A pointer is the index of a
record's first word; 0 points at nothing. Records have fixed places, so nothing is ever allocated: a channel's memory is
bounded by its capacity. Only the holder of the channel's lock reads or writes, except for W_RUNG, which a waiter reads.
"""

from __future__ import annotations

import dataclasses

from rlplace.comm.channel import ChannelSpec

MAGIC_NUMBER = 0x726C706C61636502  # the last byte is the version of this layout

# ── header ───────────────────────────────────────────────────────────────────────────────────────────────────────────
(
    MAGIC,
    SPEC_AT,  # byte
    SPEC_BYTES,
    CHANGING,  # process word of who is in the middle of a change; 0: the state is whole
    BROKEN,  # 1 once broken
    CLOSED,  # OPEN, LEFT_BY_ALL or CLOSED_BY_CALL
    ITEMS,  # credit in use: items in lines and reservations
    BYTES,
    HIGH_ITEMS,
    HIGH_BYTES,
    PUTS,
    GETS,
    PRODUCER_WAIT,  # real, seconds
    CONSUMER_WAIT,  # real, seconds
    FREE_ENTRY,  # lists of free records, last freed first: the memory in use stays small and warm
    FREE_WAITER,
    FIRST_PUTTER,  # one line over all keys
    LAST_PUTTER,
    RESERVED,  # entries whose item is still to come
    PARTICIPANTS,  # records in use
    LEFT,  # different names that have left
    APPEARANCES,  # counts first puts and first gets: the order of appearance
    KEY_SERIALS,
    KEYS_USED,  # records that were ever in use
    KEY_HAND,  # record at which the search for an idle key goes on
    VERSION,
    ADMITTED,  # real: summed weight of all that was ever granted credit
    STALENESS_MAX,
    CHECKED,  # real: when somebody last looked for dead processes
    HEADER_WORDS,
) = range(30)

OPEN, LEFT_BY_ALL, CLOSED_BY_CALL = range(3)

# ── a name under which a process puts or gets ────────────────────────────────────────────────────────────────────────
(
    P_PROCESS,
    P_LENGTH,  # bytes of the name
    P_PRODUCED,  # APPEARANCES at the first put; 0: never put
    P_CONSUMED,
    P_LEFT,
    P_DEAD,
    P_TAKEN,  # real: weight taken
    P_WAITING,  # gets of this participant that wait
    P_NAME,
) = range(9)

# ── a key and its two lines ──────────────────────────────────────────────────────────────────────────────────────────
(
    K_SERIAL,  # new whenever the record is given to another key; 0: never used
    K_NEXT,  # in its bucket
    K_BUCKET,
    K_LENGTH,  # bytes of the key
    K_FIRST,  # entries, oldest first
    K_LAST,
    K_DEPTH,
    K_WEIGHT,  # real: summed weight of the line, up to rounding
    K_FIRST_GETTER,
    K_LAST_GETTER,
    K_GETTERS,
    K_PUTTERS,  # waiting to put
    K_RESERVED,  # have credit, the item is still to come
    K_NAME,
) = range(14)

# ── somebody who waits ───────────────────────────────────────────────────────────────────────────────────────────────
(
    W_NEXT,
    W_PREVIOUS,
    W_KIND,
    W_OWNER,  # participant
    W_KEY,
    W_SINCE,  # real, seconds
    W_WEIGHT,  # real: of the item, or of the batch that is wanted
    W_SIZE,  # bytes of the item
    W_BELL,
    W_RUNG,  # 1: the bell was rung and the waiter has not looked since
    WAITER_WORDS,
) = range(11)

NOBODY, PUT, GET, AT_MOST, AT_LEAST, EXACT = range(6)

# ── an item ──────────────────────────────────────────────────────────────────────────────────────────────────────────
(
    E_NEXT,
    E_STATE,
    E_KEY,
    E_OWNER,  # participant that put it
    E_WEIGHT,  # real
    E_SIZE,  # bytes of credit
    E_VERSION,  # NO_VERSION: none was given
    E_LENGTH,  # bytes here
    E_SLAB,  # 1: what lies here is the address of a slab
    E_DATA,
) = range(10)

FREE, IN_LINE, AWAITED = range(3)
NO_VERSION = -(2**63)

MAX_NAME_BYTES = 256  # of a key or a participant, in UTF-8
MAX_REASON_BYTES = 2048
_NAME_WORDS = MAX_NAME_BYTES // 8
PARTICIPANT_WORDS = P_NAME + _NAME_WORDS
KEY_WORDS = K_NAME + _NAME_WORDS

REASON = HEADER_WORDS  # length, then text: why the channel is broken

SPARE_ENTRIES = 16  # beyond the capacity: for items that were taken and came back
_INLINE_BYTES = (512, 16 << 10)  # least and most room for a small item
_INLINE_BUDGET = 16 << 20  # between these, what all entries together may take


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the tables of one channel begin, in words, and how many records they have."""

    buckets: int
    bucket_count: int  # a power of two
    participants: int
    keys: int
    key_count: int
    waiters: int
    waiter_count: int
    entries: int
    entry_count: int
    inline_bytes: int  # room for an item in its entry
    words: int

    @property
    def entry_words(self) -> int:
        return E_DATA + self.inline_bytes // 8

    def waiter_records(self) -> range:
        return range(self.waiters, self.waiters + self.waiter_count * WAITER_WORDS, WAITER_WORDS)

    def entry_records(self) -> range:
        return range(self.entries, self.entries + self.entry_count * self.entry_words, self.entry_words)

    @classmethod
    def of(cls, spec: ChannelSpec) -> Layout:
        # A key is in use while it has an item, a reservation or a waiter: with this many, one is always idle.
        key_count = spec.capacity_items + spec.participants + 1 if spec.keys is None else max(len(spec.keys), 1)
        bucket_count = 1 << (key_count - 1).bit_length()
        least, most = _INLINE_BYTES
        inline_bytes = min(max(_INLINE_BUDGET // spec.capacity_items, least), most) // 64 * 64
        entry_count = spec.capacity_items + SPARE_ENTRIES
        buckets = REASON + 1 + MAX_REASON_BYTES // 8
        participants = buckets + bucket_count
        keys = participants + spec.participants * PARTICIPANT_WORDS
        waiters = keys + key_count * KEY_WORDS
        entries = waiters + spec.participants * WAITER_WORDS
        return cls(
            buckets=buckets,
            bucket_count=bucket_count,
            participants=participants,
            keys=keys,
            key_count=key_count,
            waiters=waiters,
            waiter_count=spec.participants,
            entries=entries,
            entry_count=entry_count,
            inline_bytes=inline_bytes,
            words=entries + entry_count * (E_DATA + inline_bytes // 8),
        )
