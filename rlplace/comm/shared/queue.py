"""The state of one channel in shared memory: who is served when. ChannelQueue, without anybody who hands over.

::

    put ──▶ credit? ──▶ entry linked into the line of its key ── rings ──▶ getter at its place in the key's line
              │ no                                                              │ woken, looks again under the lock
              ▼                                                                 ▼
            putters wait in one line; the first looks again when rung ◀── rings ── entry freed, credit is back

An item stays in its line until a getter takes it, so nothing is lost with a process that dies while it waits. The
getter at place i of a key's line may take the item at place i, whether those before it have woken or not. Whoever
changes something rings those who can go on now; who is rung looks again, and stays if another was quicker.
"""

from __future__ import annotations

from rlplace.comm.shared.layout import (
    ADMITTED,
    AT_MOST,
    AWAITED,
    BYTES,
    CLOSED,
    CONSUMER_WAIT,
    E_DATA,
    E_KEY,
    E_LENGTH,
    E_OWNER,
    E_SIZE,
    E_SLAB,
    E_STATE,
    E_VERSION,
    E_WEIGHT,
    FIRST_PUTTER,
    GET,
    GETS,
    HIGH_BYTES,
    HIGH_ITEMS,
    ITEMS,
    K_DEPTH,
    K_FIRST_GETTER,
    K_GETTERS,
    K_PUTTERS,
    K_RESERVED,
    K_WEIGHT,
    NO_VERSION,
    OPEN,
    P_TAKEN,
    P_WAITING,
    PRODUCER_WAIT,
    PUT,
    PUTS,
    RESERVED,
    STALENESS_MAX,
    VERSION,
    W_BELL,
    W_KEY,
    W_KIND,
    W_OWNER,
    W_RUNG,
    W_SINCE,
    W_SIZE,
    W_WEIGHT,
)
from rlplace.comm.shared.lines import Lines
from rlplace.comm.shared.memory import ChannelMemory
from rlplace.comm.shared.names import Keys, Participants
from rlplace.comm.shared.payload import Slabs
from rlplace.comm.tickets import reaches

_NEARLY = 1 - 1e-6  # a line's running weight is rounded: a batch is looked at a little early rather than too late


class SharedQueue:
    """Every method runs under the channel's lock and leaves in `rings` the bells that are to be rung after it."""

    def __init__(self, memory: ChannelMemory, process: int, slabs: Slabs) -> None:
        self.spec = memory.spec
        self.slabs = slabs
        self.declared = None if memory.spec.keys is None else frozenset(memory.spec.keys)
        self.memory = memory
        self.words, self.reals = memory.words, memory.reals
        self.lines = Lines(memory)
        self.keys = Keys(memory)
        self.participants = Participants(memory, process)
        self.rings: list[int] = []
        self._capacity_items, self._capacity_bytes = memory.spec.capacity_items, memory.spec.capacity_bytes
        self._admission = memory.spec.admission
        self._least_loaded = memory.spec.serving == "least_loaded"

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, owner: int, key: int, size: int, weight: float, version: int, waiter: int) -> int:
        """Credit, as an entry that awaits its item; 0 where it is not there yet. `waiter`: 0 for who came just now."""
        words = self.words
        if words[FIRST_PUTTER] != waiter or self.lacks(size, weight) is not None:
            return 0
        self.reals[ADMITTED] += weight
        return self._hold(owner, key, size, weight, version)

    def _hold(self, owner: int, key: int, size: int, weight: float, version: int) -> int:
        words = self.words
        entry = self.lines.new_entry()
        if not entry:  # only where more was given back than there is room to spare
            return 0
        items = words[ITEMS] = words[ITEMS] + 1
        if items > words[HIGH_ITEMS]:
            words[HIGH_ITEMS] = items
        in_use = words[BYTES] = words[BYTES] + size
        if in_use > words[HIGH_BYTES]:
            words[HIGH_BYTES] = in_use
        words[entry + E_STATE] = AWAITED
        words[entry + E_KEY] = key
        words[entry + E_OWNER] = owner
        words[entry + E_SIZE] = size
        words[entry + E_VERSION] = version
        self.reals[entry + E_WEIGHT] = weight
        return entry

    def lacks(self, size: int, weight: float) -> str | None:
        """What keeps a put out if nobody waits before it: "admission" or "credit"."""
        admission, words = self._admission, self.words
        if admission is not None and not reaches(admission.limit(words[VERSION]), self.reals[ADMITTED] + weight):
            return "admission"
        if words[ITEMS] >= self._capacity_items:
            return "credit"
        if self._capacity_bytes is not None and words[BYTES] + size > self._capacity_bytes:
            return "credit"
        return None

    def fill(self, entry: int, data: bytes, slab: int) -> None:
        """The item of an admitted entry is here: it stands last in its line."""
        words = self.words
        self._write(entry, data, slab)
        self.lines.append(entry)
        if slab:
            self.slabs.lend(data)
        words[PUTS] += 1
        key = words[entry + E_KEY]
        if words[key + K_FIRST_GETTER]:
            self.ring_getters(key)

    def reserve(self, entry: int) -> None:
        """The item of an admitted entry follows in a later change, under the same lock."""
        words = self.words
        words[RESERVED] += 1
        words[words[entry + E_KEY] + K_RESERVED] += 1

    def end_reservation(self, entry: int) -> None:
        words = self.words
        words[RESERVED] -= 1
        words[words[entry + E_KEY] + K_RESERVED] -= 1

    def cancel(self, entry: int) -> None:
        """The item of a reservation will never come."""
        key = self.words[entry + E_KEY]
        self.end_reservation(entry)
        self.reals[ADMITTED] -= self.reals[entry + E_WEIGHT]
        self._free(entry)
        self.ring_putter()
        self.ring_getters(key)

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def place_of(self, key: int, waiter: int, batch: bool) -> int | None:
        """How many items of the line are spoken for by those before; None where their number is not known yet."""
        words = self.words
        if not words[key + K_GETTERS]:
            return 0
        if self._least_loaded:
            return 0 if waiter == self._next_getter(key) else None
        place = 0
        for other in self.lines.getters(key):
            if other == waiter:
                break
            if words[other + W_KIND] != GET:
                return None
            place += 1
        return None if batch and place else place

    def ended(self, key: int) -> bool:
        """Nothing will follow in this key: closed, and nobody holds or waits for credit for it."""
        words = self.words
        return words[CLOSED] != OPEN and not words[key + K_PUTTERS] and not words[key + K_RESERVED]

    def take(self, owner: int, key: int, place: int, count: int) -> list[int]:
        """Takes `count` entries out of the line from `place` on. The caller copies them and calls `free`."""
        words, reals = self.words, self.reals
        before = self.lines.at(key, place - 1) if place else 0
        taken = [self.lines.remove(key, before) for _ in range(count)]
        words[GETS] += count
        for entry in taken:
            reals[owner + P_TAKEN] += reals[entry + E_WEIGHT]
            version = words[entry + E_VERSION]
            if version != NO_VERSION and words[VERSION] - version > words[STALENESS_MAX]:
                words[STALENESS_MAX] = words[VERSION] - version
        return taken

    def free(self, owner: int, key: int, taken: list[int]) -> None:
        """The taken entries were copied; their credit is back."""
        words = self.words
        for entry in taken:
            self._free(entry)
        if words[FIRST_PUTTER]:
            self.ring_putter()
        if self._least_loaded and words[owner + P_WAITING]:
            self.ring_all_getters()  # the owner may have lost its turn at another key
        elif words[key + K_FIRST_GETTER]:
            self.ring_getters(key)

    def give_back(self, owner: int, key: int, size: int, weight: float, version: int, data: bytes, slab: int) -> bool:
        """What `owner` took stands first in its line again, even above the capacity; False where no entry is left."""
        entry = self._hold(owner, key, size, weight, version)
        if entry:
            self._write(entry, data, slab)
            self.lines.prepend(entry)
            if slab:
                self.slabs.lend(data)
            self.words[GETS] -= 1
            self.reals[owner + P_TAKEN] -= weight
        return entry != 0

    def _write(self, entry: int, data: bytes, slab: int) -> None:
        at = (entry + E_DATA) * 8
        self.memory.data[at : at + len(data)] = data
        self.words[entry + E_LENGTH] = len(data)
        self.words[entry + E_SLAB] = slab

    def _free(self, entry: int) -> None:
        words = self.words
        words[ITEMS] -= 1
        words[BYTES] -= words[entry + E_SIZE]
        self.lines.free_entry(entry)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def join(self, kind: int, owner: int, key: int, size: int, weight: float, bell: int, now: float) -> int:
        """A waiter in its line; 0 where there is no place for more."""
        words, reals = self.words, self.reals
        waiter = self.lines.new_waiter()
        if waiter:
            words[waiter + W_KIND] = kind
            words[waiter + W_OWNER] = owner
            words[waiter + W_KEY] = key
            words[waiter + W_SIZE] = size
            words[waiter + W_BELL] = bell
            words[waiter + W_RUNG] = 0
            reals[waiter + W_WEIGHT] = weight
            reals[waiter + W_SINCE] = now
            self.lines.join(waiter)
        return waiter

    def depart(self, waiter: int, now: float) -> None:
        """The waiter was served or gave up: out of its line. Those behind may go on."""
        words, reals = self.words, self.reals
        putter, key = words[waiter + W_KIND] == PUT, words[waiter + W_KEY]
        reals[PRODUCER_WAIT if putter else CONSUMER_WAIT] += now - reals[waiter + W_SINCE]
        self.lines.leave(waiter)
        if putter:
            self.ring_putter()
        self.ring_getters(key)

    # ── ringing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ring_putter(self) -> None:
        words = self.words
        waiter = words[FIRST_PUTTER]
        if waiter and self.lacks(words[waiter + W_SIZE], self.reals[waiter + W_WEIGHT]) is None:
            self.ring(waiter)

    def ring_getters(self, key: int) -> None:
        """Rings those of the key who can go on: by place, or the one whose turn it is; at the end, everybody."""
        words = self.words
        waiter, depth = words[key + K_FIRST_GETTER], words[key + K_DEPTH]
        if not waiter:
            return
        if not depth:
            if self.ended(key):
                for waiter in self.lines.getters(key):
                    self.ring(waiter)
        elif self._least_loaded:
            waiter = self._next_getter(key)
            if self._enough(key, waiter):
                self.ring(waiter)
        else:
            for place, waiter in enumerate(self.lines.getters(key)):
                if place == depth:
                    return
                if words[waiter + W_KIND] != GET:  # those behind it cannot know how much it will take
                    if place == 0 and self._enough(key, waiter):
                        self.ring(waiter)
                    return
                self.ring(waiter)

    def ring(self, waiter: int) -> None:
        words = self.words
        if not words[waiter + W_RUNG]:
            words[waiter + W_RUNG] = 1
            self.rings.append(words[waiter + W_BELL])

    def ring_everybody(self) -> None:
        """Also where the lines may be damaged."""
        words = self.words
        for waiter in self.lines.waiters():
            words[waiter + W_RUNG] = 1
            self.rings.append(words[waiter + W_BELL])

    def ring_all_getters(self) -> None:
        for key in self.keys.all():
            if self.words[key + K_FIRST_GETTER]:
                self.ring_getters(key)

    def _enough(self, key: int, waiter: int) -> bool:
        """Whether the line, which is not empty, may satisfy a getter at its head."""
        if self.words[waiter + W_KIND] <= AT_MOST or self.ended(key):
            return True
        return self.reals[key + K_WEIGHT] >= self.reals[waiter + W_WEIGHT] * _NEARLY

    def _next_getter(self, key: int) -> int:
        """With least_loaded, whose turn it is of those that wait at the key."""
        words, reals = self.words, self.reals
        return min(self.lines.getters(key), key=lambda waiter: reals[words[waiter + W_OWNER] + P_TAKEN])
