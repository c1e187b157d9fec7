"""Watches the channels of a job from outside and says who waits for whom when nothing moves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from rlplace.comm.channel import Channel
from rlplace.comm.waiting import ChannelView, WaitForGraph, report, view

_LOOKS = 4  # at the channels in the time of a stall
_LOOK_S = 5.0  # at least this often
_END_S = 5.0  # how long a look may take that the end of the watch finds under way


class Watchdog:
    """Says each stall once: a channel where somebody waits and nothing was put or taken for `stall_s`, or workers that
    have waited for each other as long. Looks from a thread of its own while it is entered; it stops nothing.
    """

    def __init__(
        self, channels: Mapping[str, Channel], *, stall_s: float, say: Callable[[str], None] | None = None
    ) -> None:
        if not stall_s > 0:
            raise ValueError(f"stall_s must be above 0, got {stall_s}")
        self._channels = channels
        self._stall_s = stall_s
        self._say = say or logging.getLogger("rlplace").warning
        self._moved: dict[str, tuple[int, float]] = {}  # channel -> puts and gets, and since when there are no more
        self._said: set[str] = set()  # channels and workers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(_END_S)

    def look(self, now: float) -> str | None:
        """What is to be said at `now`, if anything. Called with growing times."""
        views = view(self._channels)
        still = {f"channel {name}": self._still_s(name, v, now) for name, v in views.items()}
        waited: dict[str, float] = {}  # owner -> its youngest wait
        for wait in (wait for v in views.values() for wait in v.stats.waits):
            waited[wait.owner] = min(wait.seconds, waited.get(wait.owner, wait.seconds))
        stalled = {name for name, seconds in still.items() if seconds >= self._stall_s}
        long = {owner for owner, seconds in waited.items() if seconds >= self._stall_s}
        if long:  # only then: the graph of thousands of workers takes a while
            stalled |= WaitForGraph(views.values()).stuck & long
        waiting = {name for name, seconds in still.items() if seconds > 0} | set(waited)
        self._said &= waiting
        if stalled <= self._said:
            return None
        self._said = waiting  # the report names all of them
        return f"nothing has moved for {self._stall_s:g} s or more where these wait\n{report(views)}"

    def _still_s(self, name: str, v: ChannelView, now: float) -> float:
        """For how long somebody has waited in a channel, as far as looks tell, without anything put or taken."""
        moved, since = self._moved.get(name, (-1, now))
        if moved != v.moved or not v.stats.waits:
            since = now
        self._moved[name] = (v.moved, since)
        return now - since

    def _watch(self) -> None:
        while not self._over.wait(min(self._stall_s / _LOOKS, _LOOK_S)):
            said = self.look(time.monotonic())
            if said is not None:
                self._say(said)
