"""How a channel in shared memory ends, and what the end of a process does to it. All under the channel's lock."""

from __future__ import annotations

from collections.abc import Iterable

from rlplace.comm.shared.census import awaited_entries
from rlplace.comm.shared.layout import (
    BROKEN,
    BYTES,
    CLOSED,
    CLOSED_BY_CALL,
    E_DATA,
    E_LENGTH,
    E_OWNER,
    E_SLAB,
    E_STATE,
    IN_LINE,
    ITEMS,
    LEFT,
    LEFT_BY_ALL,
    MAX_REASON_BYTES,
    OPEN,
    P_DEAD,
    P_LEFT,
    P_PROCESS,
    P_PRODUCED,
    REASON,
    VERSION,
    W_OWNER,
)
from rlplace.comm.shared.queue import SharedQueue


def advance(queue: SharedQueue, version: int) -> None:
    if version > queue.words[VERSION]:
        queue.words[VERSION] = version
        queue.ring_putter()


def leave(queue: SharedQueue, producer: str) -> None:
    words, spec = queue.words, queue.spec
    participants = queue.participants.named(producer) or [queue.participants.of(producer)]
    if words[participants[0] + P_LEFT]:
        return
    for participant in participants:
        words[participant + P_LEFT] = 1
    words[LEFT] += 1
    if spec.producers is not None and words[LEFT] >= spec.producers and words[CLOSED] == OPEN:
        words[CLOSED] = LEFT_BY_ALL
        queue.ring_everybody()


def close(queue: SharedQueue) -> None:
    words = queue.words
    if words[CLOSED] == OPEN and not words[BROKEN]:
        words[CLOSED] = CLOSED_BY_CALL
        queue.ring_everybody()


def closed_why(queue: SharedQueue) -> str:
    left = queue.words[CLOSED] == LEFT_BY_ALL
    return f"all {queue.spec.producers} producers have left" if left else "it was closed"


def break_(queue: SharedQueue, why: str) -> None:
    """Trusts no list: somebody may have died while changing one."""
    words, data = queue.words, queue.memory.data
    if words[BROKEN]:
        return
    text = why.encode("utf-8", "replace")[:MAX_REASON_BYTES]
    at = (REASON + 1) * 8
    words[REASON] = len(text)
    data[at : at + len(text)] = text
    for entry in queue.memory.layout.entry_records():
        if words[entry + E_STATE] == IN_LINE and words[entry + E_SLAB]:
            at = (entry + E_DATA) * 8
            queue.slabs.release(bytes(data[at : at + words[entry + E_LENGTH]]))
    words[ITEMS] = words[BYTES] = 0
    words[BROKEN] = 1
    queue.ring_everybody()


def broken_why(queue: SharedQueue) -> str:
    at = (REASON + 1) * 8
    return str(queue.memory.data[at : at + queue.words[REASON]], "utf-8", "replace")


def end_of_processes(queue: SharedQueue, dead: Iterable[int], now: float) -> None:
    """These processes have ended: their waits and reservations vanish. Who was counted breaks the channel."""
    words, gone = queue.words, set(dead)
    participants = [p for p in queue.participants.all() if words[p + P_PROCESS] in gone and not words[p + P_DEAD]]
    if not words[BROKEN]:
        _let_go(queue, set(participants), now)
    for participant in participants:
        _end(queue, participant)


def end_of_owner(queue: SharedQueue, owner: str) -> None:
    """`owner`, for whom this process has acted, has ended; what it waited for was withdrawn."""
    _end(queue, queue.participants.of(owner))


def _let_go(queue: SharedQueue, owners: set[int], now: float) -> None:
    words = queue.words
    for waiter in queue.lines.waiters():
        if words[waiter + W_OWNER] in owners:
            queue.depart(waiter, now)
    for entry in list(awaited_entries(queue)):
        if words[entry + E_OWNER] in owners:
            queue.cancel(entry)


def _end(queue: SharedQueue, participant: int) -> None:
    words = queue.words
    words[participant + P_DEAD] = 1
    counted = queue.spec.producers is not None and words[participant + P_PRODUCED]
    if counted and not words[participant + P_LEFT] and words[CLOSED] == OPEN:
        break_(queue, f"{queue.participants.name(participant)} died before it had left")
