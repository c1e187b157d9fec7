"""What a channel in shared memory holds at a moment, as ChannelStats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rlplace.comm.channel import ChannelStats, Wait
from rlplace.comm.shared.layout import (
    AWAITED,
    BROKEN,
    BYTES,
    CONSUMER_WAIT,
    E_KEY,
    E_STATE,
    E_VERSION,
    GETS,
    HIGH_BYTES,
    HIGH_ITEMS,
    ITEMS,
    K_DEPTH,
    K_FIRST_GETTER,
    K_RESERVED,
    NO_VERSION,
    P_CONSUMED,
    P_DEAD,
    P_PRODUCED,
    PRODUCER_WAIT,
    PUT,
    PUTS,
    RESERVED,
    STALENESS_MAX,
    VERSION,
    W_KEY,
    W_KIND,
    W_OWNER,
    W_SINCE,
    W_SIZE,
    W_WEIGHT,
)
from rlplace.comm.shared.queue import SharedQueue


def stats(queue: SharedQueue, now: float, *, without: int = 0) -> ChannelStats:
    """Under the lock. Leaves out the waiter `without`, which is about to give up."""
    words, reals = queue.words, queue.reals
    broken = words[BROKEN]
    waiters = [] if broken else [w for w in _waiters(queue) if w != without]
    keys = [] if broken else [k for k in queue.keys.all() if words[k + K_DEPTH] or words[k + K_RESERVED]]
    waited = {True: reals[PRODUCER_WAIT], False: reals[CONSUMER_WAIT]}
    for waiter in waiters:
        waited[words[waiter + W_KIND] == PUT] += now - reals[waiter + W_SINCE]
    return ChannelStats(
        depth_items=words[ITEMS],
        depth_bytes=words[BYTES],
        high_water_items=words[HIGH_ITEMS],
        high_water_bytes=words[HIGH_BYTES],
        puts=words[PUTS],
        gets=words[GETS],
        producer_wait_s=waited[True],
        consumer_wait_s=waited[False],
        waits=tuple(_wait(queue, waiter, now) for waiter in waiters),
        depth_by_key={queue.keys.name(k): words[k + K_DEPTH] + words[k + K_RESERVED] for k in keys},
        producers=_in_order(queue, P_PRODUCED),
        consumers=_in_order(queue, P_CONSUMED),
        dead=_dead(queue),
        version=words[VERSION],
        oldest_version=min(_versions(queue, keys), default=None),
        staleness_max=words[STALENESS_MAX],
    )


def awaited_entries(queue: SharedQueue) -> Iterator[int]:
    """The reservations: entries whose item is still to come."""
    words = queue.words
    if words[RESERVED]:
        yield from (e for e in queue.memory.layout.entry_records() if words[e + E_STATE] == AWAITED)


def _waiters(queue: SharedQueue) -> Iterator[int]:
    yield from queue.lines.putters()
    for key in queue.keys.all():
        if queue.words[key + K_FIRST_GETTER]:
            yield from queue.lines.getters(key)


def _wait(queue: SharedQueue, waiter: int, now: float) -> Wait:
    words, reals = queue.words, queue.reals
    wants: Literal["credit", "admission", "item"] = "item"
    if words[waiter + W_KIND] == PUT:
        lacks = queue.lacks(words[waiter + W_SIZE], reals[waiter + W_WEIGHT])
        wants = "admission" if lacks == "admission" else "credit"
    return Wait(
        owner=queue.participants.name(words[waiter + W_OWNER]),
        key=queue.keys.name(words[waiter + W_KEY]),
        wants=wants,
        seconds=max(0.0, now - reals[waiter + W_SINCE]),  # the clock was read before the lock was had
    )


def _versions(queue: SharedQueue, keys: list[int]) -> Iterator[int]:
    words = queue.words
    wanted = set(keys)
    for key in keys:
        yield from (words[e + E_VERSION] for e in queue.lines.entries(key) if words[e + E_VERSION] != NO_VERSION)
    for entry in awaited_entries(queue):
        if words[entry + E_KEY] in wanted and words[entry + E_VERSION] != NO_VERSION:
            yield words[entry + E_VERSION]


def _in_order(queue: SharedQueue, side: int) -> tuple[str, ...]:
    """The names that put or got, each once, in order of appearance."""
    words = queue.words
    appeared = sorted((words[p + side], name) for p, name in queue.participants.all().items() if words[p + side])
    return tuple(dict.fromkeys(name for _, name in appeared))


def _dead(queue: SharedQueue) -> tuple[str, ...]:
    """The names that nobody living bears."""
    words, participants = queue.words, queue.participants.all()
    living = {name for p, name in participants.items() if not words[p + P_DEAD]}
    return tuple(dict.fromkeys(n for p, n in participants.items() if words[p + P_DEAD] and n not in living))
