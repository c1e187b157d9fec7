"""A logical clock, with processes that compute, sleep, wait for each other and exchange items.

A process is a generator. It yields what it waits for, and goes on when the clock is there::

    def rank(world):
        yield Work(cores, "pid 7", 0.002)        two milliseconds of a processor, longer where others want it too
        yield Sleep(0.1)
        item = yield from channel.get("0")

Processors are given first come, first served, and change hands where others wait: laps shorter than a turn run without
a break, as they do under Linux, so ranks that answer each other find the same order as there. Where more want one than
there are, they are not at work all the time: one that runs dry does not find at once what waits for another.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Hashable
from functools import partial
from typing import Any, NamedTuple

Process = Generator[Any, Any, None]  # yields Work, Sleep or Event
_LEAST_S = 1e-9  # shorter work counts as done
TURN_S = 0.0014  # base time slice of the Linux 6 scheduler on two processors
WANTED = 0.95  # busy share of processors when more processes want one than there are, as measured on Linux
_MOST_TURNS = 64  # most turns of one piece of work; long work gets longer turns


class Work(NamedTuple):
    """A request of a simulated thread: to compute for `seconds` on one processor of `cores`.

    `process`: the process of the thread. Of each process, one thread computes at a time.
    """

    cores: Cores
    process: Hashable
    seconds: float


class Sleep(NamedTuple):
    """A request of a simulated process: to go on after `seconds`, whatever other processes do."""

    seconds: float


class Event:
    """Something that happens once. Processes wait for it; afterwards, a process that waits goes on at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.happened = False
        self._waiting: list[Process] = []

    def set(self) -> None:
        self.happened = True
        for process in self._waiting:
            self._world.resume(process)
        self._waiting.clear()

    def wait(self, process: Process) -> None:
        if self.happened:
            self._world.resume(process)
        else:
            self._waiting.append(process)


class World:
    """Owns the logical clock and the pending actions.

    Actions at the same time run in the order in which they were requested.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        # A heap of (time, number, action)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ready: deque[Process] = deque()

    def spawn(self, process: Process) -> None:
        """Start a new process, after all processes that are ready."""
        self._ready.append(process)

    def resume(self, process: Process) -> None:
        """Let a process go on, after all processes that are ready."""
        self._ready.append(process)

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Call `act` when the clock reaches `when`, in seconds."""
        heapq.heappush(self._due, (when, next(self._order), act))

    def run(self, over: Callable[[], bool], until: float = float("inf")) -> bool:
        """Run actions until `over()` returns True, and return True. `over` is called after each action.

        Return False if no action is left, or if the next action is later than `until`, in seconds; in the second case
        the clock stands at `until`.
        """
        while True:
            while self._ready:
                self._step(self._ready.popleft())
            if over():
                return True
            if not self._due or self._due[0][0] > until:
                self.now = max(self.now, until) if self._due else self.now
                return False
            when, _, act = heapq.heappop(self._due)
            self.now = max(self.now, when)
            act()

    def _step(self, process: Process) -> None:
        try:
            wish = next(process)
        except StopIteration:
            return
        match wish:
            case Work():
                wish.cores.add(process, wish.process, wish.seconds)
            case Sleep():
                self.at(self.now + wish.seconds, lambda: self.resume(process))
            case Event():
                wish.wait(process)
            case _:
                raise AssertionError(
                    f"a process yields Work, Sleep or Event, not {wish!r}"
                )


class _Thread:
    """A thread that computes, or waits for a processor. `process`: its process."""

    __slots__ = (
        "began",
        "ending",
        "left_s",
        "process",
        "rate",
        "since",
        "thread",
        "turn",
        "turn_s",
    )

    def __init__(self, thread: Process, process: Hashable, seconds: float) -> None:
        self.thread = thread
        self.process = process
        self.left_s = seconds
        self.turn_s = max(TURN_S, seconds / _MOST_TURNS)
        # When its turn began, and when the work in it was last updated
        self.began = self.since = 0.0
        # Seconds of work per second
        self.rate = 1.0
        # Number of the turn; outdated ends of turns are ignored
        self.turn = 0
        # Whether the end of its turn is scheduled, because others wait
        self.ending = False


class Cores:
    """The processors of a node, or a device that serves several threads: first come, first served, in turns.

    A thread keeps its processor until its work is done, or for one turn if other threads wait. Of each process, one
    thread computes at a time, as with Python's interpreter lock.
    """

    def __init__(self, world: World, count: int, wanted: float = 1.0) -> None:
        """`count`: number of processors.

        `wanted`: the share of time that each processor is busy if there are more waiting processes than processors.
        """
        self._world = world
        self._free = count
        self._rate = wanted if count > 1 else 1.0
        self._waiting: deque[_Thread] = deque()
        self._running: dict[Hashable, _Thread] = {}
        # Sum over all processors
        self.busy_s = 0.0

    def add(self, thread: Process, process: Hashable, seconds: float) -> None:
        """Compute for `seconds`, then let the thread go on. `process`: the process of the thread."""
        if seconds < _LEAST_S:
            self._world.resume(thread)
            return
        held = self._running.get(process)
        if held is None or held.thread is not thread:
            self._waiting.append(_Thread(thread, process, seconds))
        elif self._waiting and self._world.now >= held.began + held.turn_s:
            self._free_from(held)
            self._waiting.append(_Thread(thread, process, seconds))
        else:
            self._compute(held, seconds)
        self._begin()

    def _compute(self, thread: _Thread, seconds: float) -> None:
        thread.left_s = seconds
        thread.since = self._world.now
        thread.turn = thread.turn + 1
        thread.ending = False
        thread.rate = (
            self._rate
            if any(t.process not in self._running for t in self._waiting)
            else 1.0
        )
        self._world.at(
            self._world.now + seconds / thread.rate,
            partial(self._end, thread, thread.turn),
        )

    def _free_from(self, thread: _Thread) -> None:
        del self._running[thread.process]
        self._free += 1

    def _begin(self) -> None:
        """Give free processors to waiting threads. If threads still wait, end the turns of running threads in time."""
        while self._free and (
            chosen := next(
                (t for t in self._waiting if t.process not in self._running), None
            )
        ):
            self._waiting.remove(chosen)
            self._free -= 1
            self._running[chosen.process] = chosen
            chosen.began = self._world.now
            self._compute(chosen, chosen.left_s)
        if self._waiting:
            for thread in self._running.values():
                ends = max(self._world.now, thread.began + thread.turn_s)
                if (
                    not thread.ending
                    and ends < thread.since + thread.left_s / thread.rate
                ):
                    thread.ending = True
                    self._world.at(ends, partial(self._end, thread, thread.turn))

    def _end(self, thread: _Thread, turn: int) -> None:
        """End the turn with this number: the thread's work is done, or other threads wait for its processor."""
        if thread.turn != turn or self._running.get(thread.process) is not thread:
            return
        done_s = (self._world.now - thread.since) * thread.rate
        left_s = thread.left_s - done_s
        self.busy_s += done_s
        if left_s > _LEAST_S and not self._waiting:
            self._compute(thread, left_s)
            return
        thread.left_s = left_s
        thread.turn = thread.turn + 1
        if left_s > _LEAST_S:
            self._free_from(thread)
            self._waiting.append(thread)
            self._begin()
        else:  # it keeps its processor if it has more to do now
            self._world.resume(thread.thread)
            self._world.at(self._world.now, partial(self._release, thread, thread.turn))

    def _release(self, thread: _Thread, turn: int) -> None:
        if thread.turn == turn and self._running.get(thread.process) is thread:
            self._free_from(thread)
            self._begin()


class Barrier:
    """A point at which `parties` processes wait for each other. It can be used again and again."""

    def __init__(self, world: World, parties: int) -> None:
        self._world = world
        self._parties = parties
        self._here = 0
        self._all = Event(world)

    def meet(self) -> Generator[Event, None, None]:
        """Wait until all parties are at the barrier."""
        self._here += 1
        if self._here == self._parties:
            every = self._all
            self._here = 0
            self._all = Event(self._world)
            every.set()
            return
        yield self._all


class Channel:
    """A queue with keys that holds at most `capacity` items.

    Items of a key are taken in the order in which they were put.
    """

    def __init__(self, world: World, capacity: int) -> None:
        self._world = world
        self._capacity = capacity
        self._items: dict[str, deque[Any]] = {}
        self._takers: dict[str, deque[Event]] = {}
        self._putters: deque[Event] = deque()
        # Number of items now, and the largest so far
        self._held = self.most = 0

    def put(self, item: Any, key: str = "") -> Generator[Event, None, None]:
        """Wait until there is room, then put the item."""
        while self.full:
            self._putters.append(room := Event(self._world))
            yield room
        self._held += 1
        self.most = max(self.most, self._held)
        self._items.setdefault(key, deque()).append(item)
        if takers := self._takers.get(key):
            takers.popleft().set()

    def get(self, key: str = "") -> Generator[Event, None, Any]:
        """Wait until there is an item with this key, take it, and return it."""
        items = self._items.setdefault(key, deque())
        while not items:
            self._takers.setdefault(key, deque()).append(there := Event(self._world))
            yield there
        return self._take(items)

    def get_nowait(self, key: str = "") -> Any:
        """Take an item with this key and return it; return None if there is none."""
        items = self._items.get(key)
        if items:
            return self._take(items)
        return None

    @property
    def full(self) -> bool:
        return self._held >= self._capacity

    def _take(self, items: deque[Any]) -> Any:
        self._held -= 1
        if self._putters:
            self._putters.popleft().set()
        return items.popleft()
