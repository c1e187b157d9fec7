"""The errors of a channel: which worker waited, for which other workers, and what was in the channel at that time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlplace.codes import problem
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelMisuse,
    ChannelTimeout,
    EndOfStream,
    did_you_mean,
)
from rlplace.units import clipped

if TYPE_CHECKING:
    from rlplace.comm.channel import ChannelSpec, ChannelStats

_SHOWN = 8  # names of waiters or keys before "and N more"
# Name of the error of a get -> that of a put
_OF_PUTS = {
    "dead": "put-dead",
    "seen": "put-seen",
    "unused": "put-unused",
    "unknown": "put-unknown",
}
_SHOWN_CHARACTERS = 60  # of a name that is too long


def _place(spec: ChannelSpec, key: str = "") -> str:
    """Return a text that names the channel of `spec`, and also `key` if it is not ""."""
    if key:
        return f"channel {spec.name}, key {key!r}"
    return f"channel {spec.name}"


def late(
    spec: ChannelSpec,
    owner: str,
    key: str,
    waited_s: float,
    stats: ChannelStats,
    *,
    puts: bool,
) -> ChannelTimeout:
    """Return the error for a put or get whose deadline has passed.

    `owner`: name of the waiting worker. `key`: key of the put or get. `waited_s`: seconds that the worker has waited.
    `stats`: snapshot of the channel at the deadline. `puts`: True for a put, False for a get.
    """
    # The workers that could have ended the wait
    seen = stats.producers
    component = spec.source
    if puts:
        seen = stats.consumers
        component = spec.target
    names = [f"{name} (dead)" if name in stats.dead else name for name in seen]
    gone = [name for name in seen if name in stats.dead]
    # The ranks that a plan names for it, whether they have used the channel or not
    awaited = "the producers"
    if component:
        awaited = f"ranks of {component}"
    elif puts:
        awaited = "the consumers"
    # What is known of them
    error = "unknown"
    if gone:
        error = "dead"
    elif names:
        error = "seen"
    elif component:
        error = "unused"
    if puts:
        error = _OF_PUTS[error]
    late_one = problem(
        "channel-timeout",
        _place(spec, key),
        error=error,
        owner=owner,
        waited_s=waited_s,
        items=stats.depth_by_key.get(key, 0),
        holding=holding(stats),
        by=_by_worker(stats),
        awaited=awaited,
        names=listed(names),
        component=component,
        channel=spec.name,
        gone=listed(gone),
        putting=listed(stats.waiting_producers) or "none",
        getting=listed(stats.waiting_consumers) or "none",
    )
    return ChannelTimeout(late_one)


def refused(
    spec: ChannelSpec,
    owner: str,
    key: str,
    stats: ChannelStats,
    *,
    puts: bool,
) -> ChannelFull | ChannelEmpty:
    """Return the error for a call that must not wait: a put without free room, or a get without an item.

    `owner`: name of the calling worker. `stats`: snapshot of the channel at the call. `puts`: True for a put, False for
    a get.
    """
    place = _place(spec, key)
    held = holding(stats)
    if puts:
        return ChannelFull(problem("channel-full", place, owner=owner, holding=held))
    return ChannelEmpty(problem("channel-empty", place, owner=owner, holding=held))


def closed(spec: ChannelSpec, owner: str, key: str) -> ChannelClosed:
    """Return the error for a put of worker `owner` into a closed channel."""
    return ChannelClosed(problem("channel-closed", _place(spec, key), owner=owner))


def end_of_stream(spec: ChannelSpec, owner: str, key: str) -> EndOfStream:
    """Return the error for a get of worker `owner` after the last item of a closed channel."""
    return EndOfStream(problem("end-of-stream", _place(spec, key), owner=owner))


def broken(spec: ChannelSpec, owner: str, why: str) -> ChannelBroken:
    """Return the error for a call of worker `owner` on a broken channel. `why`: the reason of the break."""
    broken_one = problem(
        "channel-broken", _place(spec), error="channel", owner=owner, reason=why
    )
    return ChannelBroken(broken_one)


def silent(
    spec: ChannelSpec,
    owner: str,
    method: str,
    waited_s: float,
) -> ChannelTimeout:
    """Return the error for a call that the channel server has not answered for `waited_s` seconds.

    `owner`: name of the calling worker. `method`: the called method.
    """
    unanswered = problem(
        "channel-timeout",
        _place(spec),
        error="silent",
        owner=owner,
        waited_s=waited_s,
        method=method,
    )
    return ChannelTimeout(unanswered)


def locked(spec: ChannelSpec, waited_s: float, holder: str) -> ChannelTimeout:
    """Return the error for a channel's lock that the process `holder` has not released for `waited_s` seconds."""
    held = problem(
        "channel-timeout",
        _place(spec),
        error="locked",
        waited_s=waited_s,
        holder=holder,
    )
    return ChannelTimeout(held)


def unknown_key(spec: ChannelSpec, owner: str, key: str) -> ChannelMisuse:
    """Return the error for a key that the channel's spec does not declare. `owner`: the worker that used the key."""
    declared = spec.keys or ()
    # The declared key that was probably meant
    near = did_you_mean(key, declared)
    error = "undeclared"
    if near:
        error = "misspelt"
    unknown = problem(
        "unknown-key",
        _place(spec),
        repr(key),
        error=error,
        owner=owner,
        near=near,
        declared=listed(repr(k) for k in declared),
    )
    return ChannelMisuse(unknown)


def crowded(spec: ChannelSpec, owner: str, what: str) -> ChannelError:
    """Return the error for a channel whose table has no room for one more key, name or waiting call.

    `owner`: name of the calling worker. `what`: the full part of the table: "keys", "names" or "waiters".
    """
    full = problem(
        "channel-crowded",
        _place(spec),
        owner=owner,
        places=spec.participants,
        things=what,
        double=2 * spec.participants,
    )
    return ChannelError(full)


def name_too_long(
    spec: ChannelSpec,
    owner: str,
    name: str,
    limit_bytes: int,
) -> ChannelMisuse:
    """Return the error for a worker's name or a key with more than `limit_bytes` bytes. `owner`: the calling worker."""
    shown = clipped(name, _SHOWN_CHARACTERS, "…")
    long = problem(
        "name-too-long",
        _place(spec),
        repr(shown),
        owner=clipped(owner, _SHOWN_CHARACTERS, "…"),
        limit=limit_bytes,
    )
    return ChannelMisuse(long)


def bad_argument(
    spec: ChannelSpec, owner: str, name: str, got: object
) -> ChannelMisuse:
    """Return the error for a wrong argument.

    `owner`: name of the calling worker. `name`: name of the argument. `got`: value of the argument.
    """
    wrong = problem(
        "bad-argument",
        _place(spec),
        repr(got),
        error=name,
        owner=owner,
        text=repr(str(got)),
    )
    return ChannelMisuse(wrong)


def holding(stats: ChannelStats) -> str:
    """Return a text about the contents of a channel, such as "3 of 4 items ('0': 3)".

    `stats`: snapshot of the channel.
    """
    held = f"{stats.depth_items} of {stats.capacity_items} items"
    if stats.depth_by_key and set(stats.depth_by_key) != {""}:
        held += f" ({listed(f'{k!r}: {n}' for k, n in stats.depth_by_key.items())})"
    return held


def _by_worker(stats: ChannelStats) -> str:
    """Return a text that says how many items each worker has put, and how many each has taken."""
    texts = []
    for done, counts in (("put", stats.put_by), ("taken", stats.taken_by)):
        found = [f"{count:,} by {name}" for name, count in counts.items()]
        texts.append(f"{done} so far: {listed(found) or 'none'}")
    return "; ".join(texts)


def listed(names: Iterable[str]) -> str:
    """Return a text with the first `_SHOWN` names, separated by commas, and the number of further names."""
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
