"""Who waits for whom over all channels of a job, and whether it can end by itself.

::

    env rank 0 ── an item of actions ──▶ rollout rank 0 ── credit of observations ──▶ env rank 0      deadlock
    env rank 0 ── an item of actions ──▶ rollout rank 0, which waits for nobody                       slow
    env rank 0 ── an item of actions ──▶ rollout rank 0, whose process has ended                      dead

A get waits for any of the channel's producers, a put for any of its consumers: those that were seen so far, over all
keys. A worker is stuck when all that it waits for are stuck or dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats, Wait
from rlplace.comm.channel_errors import holding, listed
from rlplace.errors import ChannelError

_WANTED = {"item": "for an item", "credit": "for credit"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelView:
    """One channel as it was seen at a moment."""

    spec: ChannelSpec
    stats: ChannelStats

    @property
    def moved(self) -> int:
        return self.stats.puts + self.stats.gets

    def wakers(self, wait: Wait) -> tuple[str, ...]:
        """Who could end `wait`, as far as is known."""
        seen = self.stats.producers if wait.wants == "item" else self.stats.consumers
        return tuple(name for name in seen if name != wait.owner)


def view(channels: Mapping[str, Channel]) -> dict[str, ChannelView]:
    """A moment of each channel; one that is gone has no waiters and is left out."""
    views = {}
    for name, channel in channels.items():
        with contextlib.suppress(ChannelError):
            views[name] = ChannelView(spec=channel.spec, stats=channel.stats())
    return views


class WaitForGraph:
    """The waits of a moment: an owner's edges lead to those who could end them."""

    def __init__(self, views: Collection[ChannelView]) -> None:
        self.dead = {name for v in views for name in v.stats.dead}
        self.waits: dict[str, list[tuple[str, ...]]] = {}  # owner -> the wakers of each of its waits
        for v in views:
            for wait in v.stats.waits:
                self.waits.setdefault(wait.owner, []).append(v.wakers(wait))
        self.stuck = self._stuck()

    def _stuck(self) -> set[str]:
        """Those none of whose waits can end: the largest set whose members wait only for each other and the dead."""
        stuck, before = set(self.waits), -1
        while len(stuck) != before:
            before, hopeless = len(stuck), stuck | self.dead
            stuck = {owner for owner in stuck if all(h and hopeless.issuperset(h) for h in self.waits[owner])}
        return stuck

    def cycle(self) -> tuple[str, ...]:
        """Some who wait for each other in a circle, the first again at the end; empty where the stuck wait for the
        dead."""
        ahead = {owner: [h for each in self.waits[owner] for h in each if h in self.stuck] for owner in self.stuck}
        ends = {owner for owner in ahead if not ahead[owner]}
        while ends:
            ahead = {
                owner: [h for h in wakers if h not in ends] for owner, wakers in ahead.items() if owner not in ends
            }
            ends = {owner for owner in ahead if not ahead[owner]}
        if not ahead:
            return ()
        path = [min(ahead)]
        while path[-1] not in path[:-1]:
            path.append(min(ahead[path[-1]]))
        return tuple(path[path.index(path[-1]) :])

    def awaited(self) -> list[str]:
        """Those whom others wait for while they themselves wait for nobody, nor are dead."""
        wakers = {h for each in self.waits.values() for wait in each for h in wait}
        return sorted(wakers - set(self.waits) - self.dead)


def report(views: Mapping[str, ChannelView]) -> str | None:
    """Who waits for whom, for what and how long, and what the channels hold; None where nobody waits."""
    graph = WaitForGraph(views.values())
    if not graph.waits:
        return None
    lines = list(_verdict(graph))
    for name, v in views.items():
        if v.stats.waits:
            lines.append(
                f"channel {name}: {holding(v.spec, v.stats)}, {v.stats.puts} put and {v.stats.gets} taken so far"
            )
            lines += [f"    {line}" for line in _waits(v)]
    return "\n".join(lines)


def _verdict(graph: WaitForGraph) -> Iterator[str]:
    cycle = graph.cycle()
    if cycle:
        yield f"deadlock: {' -> '.join(cycle)}"
        behind = sorted(graph.stuck - set(cycle))
        if behind:
            yield f"behind it: {listed(behind)}"
    awaited_dead = sorted({h for each in graph.waits.values() for wait in each for h in wait} & graph.dead)
    if awaited_dead:
        yield f"dead: {listed(awaited_dead)}"
    if not graph.stuck and graph.awaited():
        yield f"slow, busy or gone: {listed(graph.awaited())}; waited for, and waiting for nobody here"


def _waits(v: ChannelView) -> Iterator[str]:
    """A line for each kind of wait in a channel: thousands of ranks make three lines at most."""
    kinds: dict[str, list[Wait]] = {}
    for wait in v.stats.waits:
        kinds.setdefault(wait.wants, []).append(wait)
    for wants, waits in kinds.items():
        owners = list(dict.fromkeys(wait.owner for wait in waits))
        keys = list(dict.fromkeys(repr(wait.key) for wait in waits if wait.key))
        wakers = list(dict.fromkeys(h for wait in waits for h in v.wakers(wait)))
        at = f" at key {listed(keys)}" if keys else ""
        yield (
            f"{listed(owners)}: {max(wait.seconds for wait in waits):.1f} s {_WANTED[wants]}{at}, "
            f"from {_named(wakers, v.stats)}"
        )


def _named(wakers: Sequence[str], stats: ChannelStats) -> str:
    return listed(f"{name} (dead)" if name in stats.dead else name for name in wakers) or "whoever has not come yet"
