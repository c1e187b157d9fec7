"""The errors of a channel, in the house form: who waited, for whom, and what the channel held at that moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelEmpty,
    ChannelFull,
    ChannelMisuse,
    ChannelTimeout,
    EndOfStream,
    Problem,
    did_you_mean,
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


def admission_timeout(spec: ChannelSpec, owner: str, key: str, waited_s: float, stats: ChannelStats) -> ChannelTimeout:
    return ChannelTimeout(
        Problem(
            code="channel-timeout",
            key=place(spec, key),
            what=f"{owner} waited {waited_s:.1f} s for admission",
            why=f"{_admitting(spec, stats)}; nobody advanced the channel to version {stats.version + 1}\n"
            f"the channel holds {holding(spec, stats)}\n{_waiters(stats)}",
            fix="find out why the policy was not updated, allow a larger max_staleness, or raise the deadline",
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


def not_admitted(spec: ChannelSpec, owner: str, key: str, stats: ChannelStats) -> ChannelFull:
    return ChannelFull(
        Problem(
            code="channel-full", key=place(spec, key), what=f"no admission for {owner}", why=_admitting(spec, stats)
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


def closed(spec: ChannelSpec, owner: str, key: str, why: str) -> ChannelClosed:
    return ChannelClosed(
        Problem(code="channel-closed", key=place(spec, key), what=f"{owner} put into a closed channel", why=why)
    )


def end_of_stream(spec: ChannelSpec, owner: str, key: str, why: str) -> EndOfStream:
    return EndOfStream(
        Problem(code="end-of-stream", key=place(spec, key), what=f"{owner} asked after the last item", why=why)
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
            what=f"{owner} used an undeclared key" + (f", did you mean {near!r}?" if near else ""),
            got=repr(key),
            why=f"declared keys: {listed(repr(k) for k in declared)}",
            fix=f"key={near!r}" if near else None,
        )
    )


def item_too_large(spec: ChannelSpec, owner: str, key: str, size_bytes: int) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="item-too-large",
            key=place(spec, key),
            what=f"{owner} put an item that can never fit",
            got=f"{size_bytes} bytes",
            why=f"the whole channel holds {spec.capacity_bytes} bytes",
            fix=f"capacity_bytes={size_bytes} or more, or smaller items",
        )
    )


def bad_weight(spec: ChannelSpec, owner: str, key: str, weight: float) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="bad-weight",
            key=place(spec, key),
            what=f"{owner} gave a weight that is no amount",
            got=repr(weight),
            why="an item weighs 0 or more, a batch more than 0, both finite",
        )
    )


def inexact(spec: ChannelSpec, owner: str, key: str, weight: float, reachable: Iterable[float]) -> ChannelMisuse:
    return ChannelMisuse(
        Problem(
            code="inexact-batch",
            key=place(spec, key),
            what=f"{owner} asked for a batch of weight {weight:g} exactly",
            why=f"in order, the items sum to {listed(f'{w:g}' for w in reachable)}; nothing was taken",
            fix='policy="at_least", or items whose weights divide the batch',
        )
    )


def place(spec: ChannelSpec, key: str) -> str:
    return f"channel {spec.name}, key {key!r}" if key else f"channel {spec.name}"


def holding(spec: ChannelSpec, stats: ChannelStats) -> str:
    """What is in a channel: "3 of 4 items ('0': 3)"."""
    held = f"{stats.depth_items} of {spec.capacity_items} items"
    if spec.capacity_bytes is not None:
        held += f", {stats.depth_bytes} of {spec.capacity_bytes} bytes"
    if stats.depth_by_key and set(stats.depth_by_key) != {""}:
        held += f" ({listed(f'{k!r}: {n}' for k, n in stats.depth_by_key.items())})"
    return held


def listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def _admitting(spec: ChannelSpec, stats: ChannelStats) -> str:
    assert spec.admission is not None
    limit, stale = spec.admission.limit(stats.version), spec.admission.max_staleness
    return f"policy version {stats.version} admits a summed weight of {limit:g} (max_staleness {stale}); this is more"


def _waiters(stats: ChannelStats) -> str:
    return (
        f"waiting to put: {listed(stats.waiting_producers) or 'nobody'}; "
        f"waiting to get: {listed(stats.waiting_consumers) or 'nobody'}"
    )


def _peers(role: str, seen: Sequence[str], dead: Collection[str]) -> str:
    names = listed(f"{name} (dead)" if name in dead else name for name in seen)
    return f"the {role}, so far {names}" if names else f"{role}, and none has used this channel yet"


def _find_out(role: str, seen: Sequence[str], dead: Collection[str]) -> str:
    gone = [name for name in seen if name in dead]
    if gone:
        return f"find out why {listed(gone)} died"
    return f"find out why the {role} stopped, or raise the deadline if they are really this slow"
