"""The errors of a channel: which worker waited, for which others, and what the channel held then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

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
    suggestion,
)

if TYPE_CHECKING:
    from rlplace.comm.channel import ChannelSpec, ChannelStats

_SHOWN = 8  # names of waiters or keys before "and N more"
_SHOWN_CHARACTERS = 60  # of a name that is too long
E = TypeVar("E", bound=ChannelError)


def _error(
    kind: type[E],
    code: str,
    spec: ChannelSpec,
    what: str,
    *,
    key: str = "",
    **fields: str | None,
) -> E:
    """Return an error about a channel, and a key of it if one is given."""
    where = f"channel {spec.name}, key {key!r}" if key else f"channel {spec.name}"
    return kind.about(code, where, what, **fields)


def late(
    spec: ChannelSpec,
    owner: str,
    key: str,
    waited_s: float,
    stats: ChannelStats,
    *,
    puts: bool,
) -> ChannelTimeout:
    """Return the error of a put or get whose deadline has passed."""
    if puts:
        wanted = "credit"
        act = "get from"
        role = "consumers"
        seen = stats.consumers
        here = ""
        component = spec.target
    else:
        wanted = "an item"
        act = "put into"
        role = "producers"
        seen = stats.producers
        component = spec.source
        here = f"this key holds {stats.depth_by_key.get(key, 0)} items; "
    # The workers that could have ended the wait
    names = listed(f"{name} (dead)" if name in stats.dead else name for name in seen)
    if names:
        peers = f"the {role}, so far {names}"
    elif component:
        peers = f"{component}, and none of its ranks has used this channel yet"
    else:
        peers = f"{role}, and none has used this channel yet"
    why = (
        f"{here}the channel holds {holding(stats)}\nit waited for {peers}\n"
        f"waiting to put: {listed(stats.waiting_producers) or 'none'}; "
        f"waiting to get: {listed(stats.waiting_consumers) or 'none'}"
    )
    gone = [name for name in seen if name in stats.dead]
    fix = f"find out why the {role} stopped, or raise the deadline if they are really this slow"
    if gone:
        fix = f"find out why {listed(gone)} died"
    elif component and not names:
        fix = f"let a method of {component} that runs meanwhile {act} {spec.name!r}"
    what = f"{owner} waited {waited_s:.1f} s for {wanted}"
    return _error(
        ChannelTimeout,
        "channel-timeout",
        spec,
        what,
        key=key,
        why=why,
        fix=fix,
    )


def refused(
    spec: ChannelSpec,
    owner: str,
    key: str,
    stats: ChannelStats,
    *,
    puts: bool,
) -> ChannelFull | ChannelEmpty:
    """Return the error of a put or get that does not wait and found no credit or no item."""
    held = f"the channel holds {holding(stats)}"
    if puts:
        return _error(
            ChannelFull,
            "channel-full",
            spec,
            f"no credit for {owner}",
            key=key,
            why=held,
        )
    return _error(
        ChannelEmpty,
        "channel-empty",
        spec,
        f"nothing to take for {owner}",
        key=key,
        why=held,
    )


def closed(spec: ChannelSpec, owner: str, key: str) -> ChannelClosed:
    """Return the error of a put into a closed channel."""
    return _error(
        ChannelClosed,
        "channel-closed",
        spec,
        f"{owner} put into a closed channel",
        key=key,
    )


def end_of_stream(spec: ChannelSpec, owner: str, key: str) -> EndOfStream:
    """Return the error of a get after the last item of a closed channel."""
    what = f"{owner} asked after the last item"
    why = "the channel was closed"
    return _error(EndOfStream, "end-of-stream", spec, what, key=key, why=why)


def broken(spec: ChannelSpec, owner: str, why: str) -> ChannelBroken:
    """Return the error of a call on a broken channel."""
    return _error(ChannelBroken, "channel-broken", spec, f"broken for {owner}", why=why)


def silent(
    spec: ChannelSpec,
    owner: str,
    method: str,
    waited_s: float,
) -> ChannelTimeout:
    """Return the error of a call that the channel's process has not answered."""
    what = f"{owner} waited {waited_s:.1f} s for the channel itself to answer {method}"
    why = "the process that holds the channel is starting, overloaded or cut off"
    fix = "look at the load of the channel's node, or raise the deadline"
    return _error(ChannelTimeout, "channel-timeout", spec, what, why=why, fix=fix)


def locked(spec: ChannelSpec, waited_s: float, holder: str) -> ChannelTimeout:
    """Return the error of a lock that another process does not release."""
    what = f"this process waited {waited_s:.1f} s for the channel's lock"
    why = f"{holder} is in the middle of a change and does not go on: stopped, or the machine is overloaded"
    fix = "let it go on or end it; a dead process holds up no other"
    return _error(ChannelTimeout, "channel-timeout", spec, what, why=why, fix=fix)


def unknown_key(spec: ChannelSpec, owner: str, key: str) -> ChannelMisuse:
    """Return the error of a key that the channel's spec does not declare."""
    declared = spec.keys or ()
    # The declared key that was probably meant
    near = did_you_mean(key, declared)
    what = f"{owner} used an undeclared key" + suggestion(near)
    why = f"declared keys: {listed(repr(k) for k in declared)}"
    fix = f"key={near!r}" if near else None
    return _error(
        ChannelMisuse,
        "unknown-key",
        spec,
        what,
        got=repr(key),
        why=why,
        fix=fix,
    )


def crowded(spec: ChannelSpec, owner: str, what: str) -> ChannelError:
    """Return the error of a channel whose places for `what` are all taken."""
    why = f"it was made with places for {spec.participants} {what}, and all are taken"
    fix = f"ChannelSpec(..., participants={2 * spec.participants})"
    return _error(
        ChannelError,
        "channel-crowded",
        spec,
        f"no place for {owner}",
        why=why,
        fix=fix,
    )


def name_too_long(
    spec: ChannelSpec,
    owner: str,
    name: str,
    limit_bytes: int,
) -> ChannelMisuse:
    """Return the error of a name or key with too many bytes."""
    what = f"{owner[:_SHOWN_CHARACTERS]} used a name or key that is too long"
    shown = name
    if len(name) > _SHOWN_CHARACTERS:
        shown = name[:_SHOWN_CHARACTERS] + "…"
    got = repr(shown)
    why = f"it may have {limit_bytes} bytes"
    return _error(
        ChannelMisuse,
        "name-too-long",
        spec,
        what,
        got=got,
        why=why,
        fix="a shorter one",
    )


def bad_argument(
    spec: ChannelSpec,
    owner: str,
    name: str,
    got: object,
    wanted: str,
    fix: str,
) -> ChannelMisuse:
    """Return the error of a wrong argument. `wanted`: what it should be."""
    what = f"{owner} gave a wrong {name}"
    why = f"{name} is {wanted}"
    return _error(
        ChannelMisuse,
        "bad-argument",
        spec,
        what,
        got=repr(got),
        why=why,
        fix=fix,
    )


def holding(stats: ChannelStats) -> str:
    """Return a text about the contents of a channel, such as "3 of 4 items ('0': 3)"."""
    held = f"{stats.depth_items} of {stats.capacity_items} items"
    if stats.depth_by_key and set(stats.depth_by_key) != {""}:
        held += f" ({listed(f'{k!r}: {n}' for k, n in stats.depth_by_key.items())})"
    return held


def listed(names: Iterable[str]) -> str:
    """Return the first names with commas between, and how many more there are."""
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
