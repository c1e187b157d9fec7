"""Watch the channels of a job, and report which workers wait for which when nothing moves.

::

    env rank 0 ── an item of actions ──▶ rollout rank 0 ── credit of observations ──▶ env rank 0      deadlock
    env rank 0 ── an item of actions ──▶ rollout rank 0, which does not wait                          slow
    env rank 0 ── an item of actions ──▶ rollout rank 0, whose process has ended                      dead

A get waits for any of the channel's producers, a put for any of its consumers: those that were seen so far, over all
keys. A worker is stuck when all that it waits for are stuck or dead.
"""

from __future__ import annotations

import contextlib
import graphlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping

from rlplace.comm.channel import Channel, ChannelStats
from rlplace.comm.channel_errors import holding, listed
from rlplace.errors import ChannelError

_WANTED = {"credit": "for credit", "item": "for an item"}
_LOOKS = 4  # at the channels in the time of a stall
_LOOK_S = 5.0  # at least this often
_END_S = 5.0  # how long a look may take that the end of the watch finds under way


def view(channels: Mapping[str, Channel]) -> dict[str, ChannelStats]:
    """A moment of each channel; one that is gone has no waiters and is left out."""
    views = {}
    for name, channel in channels.items():
        with contextlib.suppress(ChannelError):
            views[name] = channel.stats()
    return views


class WaitForGraph:
    """The waits of a moment: an owner's edges lead to the workers that could end them."""

    def __init__(self, views: Collection[ChannelStats]) -> None:
        self.dead = {name for stats in views for name in stats.dead}
        # Owner -> the workers that could end each of its waits
        self.waits: dict[str, list[tuple[str, ...]]] = {}
        for stats in views:
            for wait in stats.waits:
                self.waits.setdefault(wait.owner, []).append(stats.could_end(wait))
        self.awaited = {
            name for waits in self.waits.values() for wait in waits for name in wait
        }
        # Workers without a wait that can end: the largest set whose members wait only for each other and the dead.
        self.stuck = set(self.waits)
        before = -1
        while len(self.stuck) != before:
            before = len(self.stuck)
            hopeless = self.stuck | self.dead
            self.stuck = {
                owner
                for owner in self.stuck
                if all(w and hopeless.issuperset(w) for w in self.waits[owner])
            }

    def cycle(self) -> tuple[str, ...]:
        """Workers that wait for each other in a circle, the first again at the end; empty if they wait for the dead."""
        stuck = sorted(self.stuck)
        ahead = {
            owner: [
                name
                for wait in self.waits[owner]
                for name in wait
                if name in self.stuck
            ]
            for owner in stuck
        }
        try:
            graphlib.TopologicalSorter(ahead).prepare()
        except graphlib.CycleError as found:
            # It names each behind the one that waits for it
            circle: list[str] = found.args[1][:0:-1]
            first = circle.index(min(circle))
            return (*circle[first:], *circle[: first + 1])
        return ()

    def slow(self) -> list[str]:
        """Living workers that others wait for and that do not wait themselves."""
        return sorted(self.awaited - set(self.waits) - self.dead)


def report(views: Mapping[str, ChannelStats]) -> str | None:
    """Which workers wait for which, for what and how long, and what the channels hold; None if none waits."""
    graph = WaitForGraph(views.values())
    if not graph.waits:
        return None
    lines = list(_verdict(graph))
    for name, stats in views.items():
        if stats.waits:
            lines.append(
                f"channel {name}: {holding(stats)}, {stats.puts} put and {stats.gets} taken so far"
            )
            lines += [f"    {line}" for line in _waits(stats)]
    return "\n".join(lines)


def _verdict(graph: WaitForGraph) -> Iterator[str]:
    cycle = graph.cycle()
    if cycle:
        yield f"deadlock: {' -> '.join(cycle)}"
        behind = sorted(graph.stuck - set(cycle))
        if behind:
            yield f"behind it: {listed(behind)}"
    if graph.awaited & graph.dead:
        yield f"dead: {listed(sorted(graph.awaited & graph.dead))}"
    if not graph.stuck and graph.slow():
        yield f"slow, busy or gone: {listed(graph.slow())}; others wait for them, and they wait for none here"


def _waits(stats: ChannelStats) -> Iterator[str]:
    """A line for each kind of wait in a channel: thousands of ranks make two lines."""
    for wants, wanted in _WANTED.items():
        waits = [wait for wait in stats.waits if wait.wants == wants]
        if not waits:
            continue
        owners = listed(dict.fromkeys(wait.owner for wait in waits))
        keys = listed(dict.fromkeys(repr(wait.key) for wait in waits if wait.key))
        names = dict.fromkeys(name for wait in waits for name in stats.could_end(wait))
        others = listed(
            f"{name} (dead)" if name in stats.dead else name for name in names
        )
        longest = max(wait.seconds for wait in waits)
        at = f" at key {keys}" if keys else ""
        yield f"{owners}: {longest:.1f} s {wanted}{at}, from {others or 'workers that have not used it yet'}"


class Watchdog:
    """Report each stall once: a channel with a wait where nothing was put or taken for `stall_s`, or workers that have
    waited for each other as long. Looks from a thread of its own while it is entered; it stops nothing.
    """

    def __init__(self, channels: Mapping[str, Channel], *, stall_s: float) -> None:
        self._channels = channels
        self._stall_s = stall_s
        # Channel -> puts and gets, and since when there are no more
        self._moved: dict[str, tuple[int, float]] = {}
        self._reported: set[str] = set()  # channels and workers
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def look(self, now: float) -> str | None:
        """The report that is due at `now`, if any. Called with growing times."""
        views = view(self._channels)
        still = {
            f"channel {name}": self._still_s(name, stats, now)
            for name, stats in views.items()
        }
        waited: dict[str, float] = {}  # owner -> its youngest wait
        for wait in (wait for stats in views.values() for wait in stats.waits):
            waited[wait.owner] = min(wait.seconds, waited.get(wait.owner, wait.seconds))
        stalled = {name for name, seconds in still.items() if seconds >= self._stall_s}
        long = {owner for owner, seconds in waited.items() if seconds >= self._stall_s}
        if long:  # only then: the graph of thousands of workers takes a while
            stalled |= WaitForGraph(views.values()).stuck & long
        waiting = {name for name, seconds in still.items() if seconds > 0} | set(waited)
        self._reported &= waiting
        if stalled <= self._reported:
            return None
        self._reported = waiting  # the report names all of them
        return f"nothing has moved for {self._stall_s:g} s or more where these wait\n{report(views)}"

    def _still_s(self, name: str, stats: ChannelStats, now: float) -> float:
        """For how long there were waits in a channel, as far as looks tell, without anything put or taken."""
        before, since = self._moved.get(name, (-1, now))
        moved = stats.puts + stats.gets
        if moved != before or not stats.waits:
            since = now
        self._moved[name] = (moved, since)
        return now - since

    def _watch(self) -> None:
        while not self._over.wait(min(self._stall_s / _LOOKS, _LOOK_S)):
            due = self.look(time.monotonic())
            if due is not None:
                logging.getLogger("rlplace").warning(due)
