"""The errors of a channel: which worker waited, for which others, and what the channel held at that moment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Real

from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelError,
    ChannelFull,
    ChannelMisuse,
    ChannelTimeout,
    EndOfStream,
    Problem,
    did_you_mean,
    suggestion,
)

_SHOWN = 8  # names of waiters or keys listed before "and N more"


def put_timeout(spec: ChannelSpec, owner: str, key: str, waited_s: float, stats: ChannelStats) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=place(spec, key),
            what=f"{owner} waited {waited_s:.1f} s for credit",
            why=f"the channel holds {holding(spec, stats)}\n"
            f"it waited for {_peers('consumers', stats.consumers, stats.dead)}\n{_waiters(stats)}",
            fix=_find_out("consumers", stats.consumers, stats.dead),
        )
    )


def get_timeout(spec: ChannelSpec, owner: str, key: str, waited_s: float, stats: ChannelStats) -> ChannelTimeout:
    here = stats.depth_by_key.get(key, 0)
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=place(spec, key),
            what=f"{owner} waited {waited_s:.1f} s for an item",
            why=f"this key holds {here} items; the channel holds {holding(spec, stats)}\n"
            f"it waited for {_peers('producers', stats.producers, stats.dead)}\n{_waiters(stats)}",
            fix=_find_out("producers", stats.producers, stats.dead),
        )
    )


def full(spec: ChannelSpec, owner: str, key: str, stats: ChannelStats) -> ChannelFull:
    return ChannelFull(
        Problem(
            code="channel-full",
            key=place(spec, key),
            what=f"no credit for {owner}",
            why=f"the channel holds {holding(spec, stats)}",
        )
    )


def empty(spec: ChannelSpec, owner: str, key: str, stats: ChannelStats) -> ChannelEmpty:
    return ChannelEmpty(
        Problem(
            code="channel-empty",
            key=place(spec, key),
            what=f"nothing to take for {owner}",
            why=f"the channel holds {holding(spec, stats)}",
        )
    )


def closed(spec: ChannelSpec, owner: str, key: str) -> ChannelClosed:
    return ChannelClosed(
        Problem(code="channel-closed", key=place(spec, key), what=f"{owner} put into a closed channel")
    )


def end_of_stream(spec: ChannelSpec, owner: str, key: str) -> EndOfStream:
    return EndOfStream(
        Problem(
            code="end-of-stream",
            key=place(spec, key),
            what=f"{owner} asked after the last item",
            why="the channel was closed",
        )
    )


def broken(spec: ChannelSpec, owner: str, why: str) -> ChannelBroken:
    return ChannelBroken(
        Problem(code="channel-broken", key=f"channel {spec.name}", what=f"broken for {owner}", why=why)
    )


def silent(spec: ChannelSpec, owner: str, method: str, waited_s: float) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"channel {spec.name}",
            what=f"{owner} waited {waited_s:.1f} s for the channel itself to answer {method}",
            why="the process that holds the channel is starting, overloaded or cut off",
            fix="look at the load of the channel's node, or raise the deadline",
        )
    )


def unknown_key(spec: ChannelSpec, owner: str, key: str) -> ChannelMisuse:
    declared = spec.keys or ()
    near = did_you_mean(key, declared)
    return ChannelMisuse(
        Problem(
            code="unknown-key",
            key=f"channel {spec.name}",
            what=f"{owner} used an undeclared key" + suggestion(near),
            got=repr(key),
            why=f"declared keys: {listed(repr(k) for k in declared)}",
            fix=f"key={near!r}" if near else None,
        )
    )


def check_put(spec: ChannelSpec, owner: str, key: str, weight: float, version: int | None) -> None:
    """Raise ChannelMisuse for arguments that no channel takes, before anything of the channel is touched."""
    check_key(spec, owner, key)
    if not (_is_number(weight) and 0 <= weight < math.inf):
        raise _bad_argument(spec, owner, "weight", weight, "a finite number of at least 0", "weight=1.0")
    if version is not None and not (_is_number(version) and version % 1 == 0 and abs(version) < 1 << 62):
        raise _bad_argument(spec, owner, "version", version, "a whole number, or None", "version=0")


def check_get(spec: ChannelSpec, owner: str, key: str, weight: float | None) -> None:
    """`weight` of a batch; None: one item. Raises as `check_put`."""
    check_key(spec, owner, key)
    if weight is not None and not (_is_number(weight) and 0 < weight < math.inf):
        raise _bad_argument(spec, owner, "weight", weight, "a finite number above 0", "get_batch(1.0)")


def check_timeout(spec: ChannelSpec, owner: str, timeout_s: float) -> None:
    if not (_is_number(timeout_s) and timeout_s < math.inf):
        raise _bad_argument(
            spec, owner, "timeout_s", timeout_s, "a finite number of seconds, or None", "timeout_s=60.0"
        )


def check_key(spec: ChannelSpec, owner: str, key: str) -> None:
    if type(key) is not str:
        raise _bad_argument(spec, owner, "key", key, "a text", f"key={str(key)!r}")


def _is_number(given: object) -> bool:
    kind = type(given)
    return kind is float or kind is int or (kind is not bool and isinstance(given, Real))


def _bad_argument(spec: ChannelSpec, owner: str, name: str, got: object, wanted: str, fix: str) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="bad-argument",
            key=f"channel {spec.name}",
            what=f"{owner} gave a wrong {name}",
            got=repr(got),
            why=f"{name} is {wanted}",
            fix=fix,
        )
    )


def crowded(spec: ChannelSpec, owner: str, what: str) -> ChannelError:
    return ChannelError(
        Problem(
            code="channel-crowded",
            key=f"channel {spec.name}",
            what=f"no place for {owner}",
            why=f"it was made with places for {spec.participants} {what}, and all are taken",
            fix=f"ChannelSpec(..., participants={2 * spec.participants})",
        )
    )


def name_too_long(spec: ChannelSpec, owner: str, name: str, limit_bytes: int) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="name-too-long",
            key=f"channel {spec.name}",
            what=f"{owner[:60]} used a name or key that is too long",
            got=repr(name if len(name) <= 60 else name[:60] + "…"),
            why=f"it may have {limit_bytes} bytes",
            fix="a shorter one",
        )
    )


def locked(spec: ChannelSpec, waited_s: float, holder: str) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=f"channel {spec.name}",
            what=f"this process waited {waited_s:.1f} s for the channel's lock",
            why=f"{holder} is in the middle of a change and does not go on: stopped, or the machine is overloaded",
            fix="let it go on or end it; a dead process holds up no other",
        )
    )


def place(spec: ChannelSpec, key: str) -> str:
    return f"channel {spec.name}, key {key!r}" if key else f"channel {spec.name}"


def holding(spec: ChannelSpec, stats: ChannelStats) -> str:
    """What is in a channel: "3 of 4 items ('0': 3)"."""
    held = f"{stats.depth_items} of {spec.capacity_items} items"
    if stats.depth_by_key and set(stats.depth_by_key) != {""}:
        held += f" ({listed(f'{k!r}: {n}' for k, n in stats.depth_by_key.items())})"
    return held


def listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _waiters(stats: ChannelStats) -> str:
    return (
        f"waiting to put: {listed(stats.waiting_producers) or 'none'}; "
        f"waiting to get: {listed(stats.waiting_consumers) or 'none'}"
    )


def _peers(role: str, seen: Sequence[str], dead: Collection[str]) -> str:
    names = listed(f"{name} (dead)" if name in dead else name for name in seen)
    return f"the {role}, so far {names}" if names else f"{role}, and none has used this channel yet"


def _find_out(role: str, seen: Sequence[str], dead: Collection[str]) -> str:
    gone = [name for name in seen if name in dead]
    if gone:
        return f"find out why {listed(gone)} died"
    return f"find out why the {role} stopped, or raise the deadline if they are really this slow"
