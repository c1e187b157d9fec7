"""What each word of a channel's state means: the one place that knows where state lies.

::

    header │ reason │ participants │ keys │ waiters │ entries (record + room for a small item)

All state is 8-byte words, read as integers or, where a name below says so, as reals. A pointer is the index of a
record's first word; 0 points at nothing. Records have fixed places, so nothing is ever allocated: the table is bounded
by the channel's spec. Between threads it is a bytearray, between processes a mapped file. Only the holder of the
channel's lock reads or writes, except that a waiter looks at the counts of its line before it sleeps.
"""

from __future__ import annotations

import dataclasses

from rlplace.comm.channel import ChannelSpec

MAGIC_NUMBER = 0x726C706C61636503  # the last byte is the version of this layout

# ── header ───────────────────────────────────────────────────────────────────────────────────────────────────────────
(
    MAGIC,
    SPEC_AT,  # byte
    SPEC_BYTES,
    CHANGING,  # process in the middle of a change; 0: the state is whole
    BROKEN,  # 1 once broken
    CLOSED,  # 1 once closed
    ITEMS,  # credit in use: items in lines and reservations
    HIGH_ITEMS,
    PUTS,
    GETS,
    PRODUCER_WAIT,  # real, seconds
    CONSUMER_WAIT,  # real, seconds
    FREE_ENTRY,  # freed records, last freed first: the memory in use stays small and warm
    ENTRIES_USED,  # records that were ever in use
    FREE_WAITER,
    WAITERS_USED,
    PUTTERS,  # line of waiting puts over all keys: first, last, count
    _PUTTERS_LAST,
    _PUTTERS_COUNT,
    RESERVED,  # entries whose item is still to come
    PARTICIPANTS,  # records in use
    KEYS,  # records in use
    NEWEST_VERSION,  # NO_VERSION: none was given so far
    STALENESS_MAX,
    CHECKED,  # real: when a process last looked for dead processes
    HEADER_WORDS,
) = range(26)

FIRST, LAST, COUNT = range(3)  # words of a line

# ── a name under which a process puts or gets ────────────────────────────────────────────────────────────────────────
P_PROCESS, P_LENGTH, P_PRODUCED, P_CONSUMED, P_DEAD, P_NAME = range(6)  # P_LENGTH: bytes of the name

# ── a key with its line of entries and its line of waiting gets ──────────────────────────────────────────────────────
K_LENGTH, K_RESERVED, K_ITEMS, K_GETTERS, K_NAME = 0, 1, 2, 5, 8

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

    participants: int
    keys: int
    key_count: int
    waiters: int
    entries: int
    entry_count: int
    inline_bytes: int  # room for an item in its entry
    words: int

    @property
    def entry_words(self) -> int:
        return E_DATA + self.inline_bytes // 8

    @classmethod
    def of(cls, spec: ChannelSpec, *, inline: bool = True) -> Layout:
        """`inline`: whether small items lie in their entries."""
        key_count = spec.participants if spec.keys is None else max(len(spec.keys), 1)
        least, most = _INLINE_BYTES
        inline_bytes = min(max(_INLINE_BUDGET // spec.capacity_items, least), most) // 64 * 64 if inline else 0
        entry_count = spec.capacity_items + SPARE_ENTRIES
        participants = REASON + 1 + MAX_REASON_BYTES // 8
        keys = participants + spec.participants * PARTICIPANT_WORDS
        waiters = keys + key_count * KEY_WORDS
        entries = waiters + spec.participants * WAITER_WORDS
        return cls(
            participants=participants,
            keys=keys,
            key_count=key_count,
            waiters=waiters,
            entries=entries,
            entry_count=entry_count,
            inline_bytes=inline_bytes,
            words=entries + entry_count * (E_DATA + inline_bytes // 8),
        )
