"""Watch the channels of a job, and report which workers wait for which others when nothing moves.

::

    env rank 0 ── an item of actions ──▶ rollout rank 0 ── credit of observations ──▶ env rank 0      deadlock
    env rank 0 ── an item of actions ──▶ rollout rank 0, which does not wait                          slow
    env rank 0 ── an item of actions ──▶ rollout rank 0, whose process has ended                      dead

A get waits for any producer of the channel, and a put waits for any consumer. Producers and consumers are the workers
that have used the channel so far, with any key. A worker is stuck when all workers that it waits for are stuck or dead.
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
_LOOKS = 4  # times that the channels are read during a stall
_LOOK_S = 5.0  # longest time between two such readings
_END_S = 5.0  # longest wait for a reading that is under way at the end of the watch


def view(channels: Mapping[str, Channel]) -> dict[str, ChannelStats]:
    """Return name -> snapshot of each channel.

    A channel is left out if its `stats` raises an error: no worker waits in it.
    """
    views = {}
    for name, channel in channels.items():
        with contextlib.suppress(ChannelError):
            views[name] = channel.stats()
    return views


class WaitForGraph:
    """Which worker waits for which workers, at one moment, as a graph.

    An edge leads from a waiting worker to a worker that could end its wait. `stuck`: the workers whose waits only dead
    workers or other stuck workers could end.
    """

    def __init__(self, views: Collection[ChannelStats]) -> None:
        self.dead: set[str] = set()
        # Owner -> the workers that could end each of its waits
        self.waits: dict[str, list[tuple[str, ...]]] = {}
        # Workers for which another one waits
        self.awaited: set[str] = set()
        for stats in views:
            self.dead.update(stats.dead)
            for wait in stats.waits:
                could_end = stats.could_end(wait)
                self.waits.setdefault(wait.owner, []).append(could_end)
                self.awaited.update(could_end)
        # Stuck workers: the largest set whose members wait only for members and the dead. Start with all that wait, and
        # remove workers until no further one has a wait that another worker could end.
        self.stuck = set(self.waits)
        before = -1
        while len(self.stuck) != before:
            before = len(self.stuck)
            hopeless = self.stuck | self.dead
            still_stuck: set[str] = set()
            for owner in self.stuck:
                waits = self.waits[owner]
                # Without users on the other side of a channel, one may still come and end the wait
                if all(wait and hopeless.issuperset(wait) for wait in waits):
                    still_stuck.add(owner)
            self.stuck = still_stuck

    def cycle(self) -> tuple[str, ...]:
        """Return the workers of a circle in which each waits for the next; the first worker also stands at the end.

        Return an empty tuple if there is no circle.
        """
        stuck = sorted(self.stuck)
        ahead: dict[str, list[str]] = {}
        for owner in stuck:
            named = [name for wait in self.waits[owner] for name in wait]
            ahead[owner] = [name for name in named if name in self.stuck]
        try:
            # A graph without an order of its nodes has a circle
            graphlib.TopologicalSorter(ahead).prepare()
        except graphlib.CycleError as found:
            # graphlib names each worker behind the one that waits for it
            circle: list[str] = found.args[1][:0:-1]
            first = circle.index(min(circle))
            return (*circle[first:], *circle[: first + 1])
        return ()

    def slow(self) -> list[str]:
        """Return the living workers that do not wait themselves and for which other workers wait."""
        return sorted(self.awaited - set(self.waits) - self.dead)


def report(views: Mapping[str, ChannelStats]) -> str | None:
    """Return a text that says which workers wait for which others, for what, how long, and what the channels hold.

    `views`: snapshots of channels by name. Return None if no worker waits.
    """
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
    """Yield lines that name deadlocked, dead and slow workers."""
    # The circle first, then the workers that wait for it
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
    """Yield a line on all waiting puts of a channel and a line on all waiting gets, if there are any."""
    for wants, wanted in _WANTED.items():
        waits = [wait for wait in stats.waits if wait.wants == wants]
        if not waits:
            continue
        # Each name once, in order
        owners = listed(dict.fromkeys(wait.owner for wait in waits))
        keys = listed(dict.fromkeys(repr(wait.key) for wait in waits if wait.key))
        names: dict[str, None] = {}
        for wait in waits:
            for name in stats.could_end(wait):
                shown = f"{name} (dead)" if name in stats.dead else name
                names[shown] = None
        others = listed(names)
        # One line with the longest wait stands for all
        longest = max(wait.seconds for wait in waits)
        at = f" at key {keys}" if keys else ""
        yield f"{owners}: {longest:.1f} s {wanted}{at}, from {others or 'workers that have not used it yet'}"


class Watchdog:
    """Logs each stall of a job's channels once, from a thread that runs while the context is entered.

    A stall is a channel with waiting workers and without a put or get for `stall_s` seconds, or workers that have
    waited for each other for `stall_s` seconds. The watchdog only reports: it ends no wait.
    """

    def __init__(self, channels: Mapping[str, Channel], *, stall_s: float) -> None:
        self._channels = channels
        self._stall_s = stall_s
        # Channel -> number of puts and gets, and the time since which it is unchanged
        self._moved: dict[str, tuple[int, float]] = {}
        # Channels and workers whose stall was reported
        self._reported: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch,
            name="watchdog",
            daemon=True,
        )

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def look(self, now: float) -> str | None:
        """Read the channels; return the report on new stalls, or None if there are none.

        `now`: present time by `time.monotonic()`; later calls need later times.
        """
        views = view(self._channels)
        # Channels without movement, and workers with long waits
        still: dict[str, float] = {}
        # Worker -> its youngest wait, in seconds
        waited: dict[str, float] = {}
        for name, stats in views.items():
            still[f"channel {name}"] = self._still_s(name, stats, now)
            for wait in stats.waits:
                youngest = waited.get(wait.owner, wait.seconds)
                waited[wait.owner] = min(wait.seconds, youngest)
        stalled = {name for name, seconds in still.items() if seconds >= self._stall_s}
        long = {owner for owner, seconds in waited.items() if seconds >= self._stall_s}
        # The graph of thousands of workers takes a while, so it is made only if needed
        if long:
            stalled |= WaitForGraph(views.values()).stuck & long
        # Report again only after a stall has ended in between
        waiting = {name for name, seconds in still.items() if seconds > 0} | set(waited)
        self._reported &= waiting
        if stalled <= self._reported:
            return None
        # The report names all of these
        self._reported = waiting
        return f"nothing has moved for {self._stall_s:g} s or more where these wait\n{report(views)}"

    def _still_s(
        self,
        name: str,
        stats: ChannelStats,
        now: float,
    ) -> float:
        """Return for how many seconds the channel `name` has had no put or get, as far as earlier readings tell.

        Return 0 if no worker waits. `stats`: the present reading, at time `now`.
        """
        # Compare with the last reading
        before, since = self._moved.get(name, (-1, now))
        moved = stats.puts + stats.gets
        # A movement, or no wait, starts the time anew
        if moved != before or not stats.waits:
            since = now
        self._moved[name] = (moved, since)
        return now - since

    def _watch(self) -> None:
        """Read the channels at regular intervals until the end of the context, and log each report."""
        while not self._over.wait(min(self._stall_s / _LOOKS, _LOOK_S)):
            due = self.look(time.monotonic())
            if due is not None:
                logging.getLogger("rlplace").warning(due)
