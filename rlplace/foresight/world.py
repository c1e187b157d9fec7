"""A logical clock, with simulated processes that compute, sleep, wait for each other and exchange items.

A process is a generator. It yields a request and continues when the request is fulfilled on the clock::

    def rank(world):
        yield Work(cores, "pid 7", 0.002)        two milliseconds of a processor, longer where others want it too
        yield Sleep(0.1)
        item = yield from channel.get("0")

Processors serve threads in the order of arrival, and in turns while other threads wait. A lap that is shorter than a
turn is not interrupted, as under Linux; so ranks that answer each other run in the same order as in a real run. If
there are more threads than processors, the processors are not busy all the time: a free processor does not find a
waiting thread at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from typing import Any, NamedTuple

Process = Generator[Any, Any, None]  # yields Work, Sleep or Event
_LEAST_S = 1e-9  # shorter work counts as done
TURN_S = 0.0014  # base time slice of the Linux 6 scheduler on two processors
WANTED = 0.95  # busy share of processors when more processes want one than there are, as measured on Linux
_MOST_TURNS = 64  # most turns of one piece of work; long work gets longer turns


class Work(NamedTuple):
    """A request that a simulated thread yields: to compute for `seconds` on one of the processors `cores`.

    `process`: the process to which the thread belongs. Only one thread of a process computes at a time.
    """

    cores: Cores
    process: Hashable
    seconds: float

    def begin(self, world: World, thread: Process) -> None:
        self.cores.add(thread, self.process, self.seconds)


class Sleep(NamedTuple):
    """A request that a simulated process yields: to continue after `seconds`. Sleeping needs no processor."""

    seconds: float

    def begin(self, world: World, process: Process) -> None:
        world.at(world.now + self.seconds, world.resume, process)


class Event:
    """An event that happens once. Processes that wait for it continue when it happens; after that, none has to wait."""

    __slots__ = ("_waiting", "_world", "happened")

    def __init__(self, world: World) -> None:
        self._world = world
        self.happened = False
        self._waiting: list[Process] = []

    def set(self) -> None:
        self.happened = True
        for process in self._waiting:
            self._world.resume(process)
        self._waiting.clear()

    def begin(self, world: World, process: Process) -> None:
        """Let `process` wait for the event."""
        if self.happened:
            world.resume(process)
        else:
            self._waiting.append(process)


class World:
    """Owns the logical clock and the actions that are due at later times.

    Actions that are due at the same time run in the order in which they were added. `resume`: takes a waiting process
    and lets it continue, after all processes that can run already.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._processes: list[Process] = []
        # A heap of (time, number, action, its arguments)
        self._due: list[
            tuple[float, int, Callable[..., object], tuple[object, ...]]
        ] = []
        self._ready: deque[Process] = deque()
        # A method of the queue itself: simulations call it more often than any other
        self.resume = self._ready.append

    def spawn(self, process: Process) -> None:
        """Start a new process. It runs after all processes that can run already."""
        self._processes.append(process)
        self._ready.append(process)

    def close(self) -> None:
        """Close the generators of all simulated processes, so that the garbage collector need not close them."""
        for process in self._processes:
            process.close()

    def at(self, when: float, act: Callable[..., object], *arguments: object) -> None:
        """Call `act` with `arguments` when the clock reaches `when`, in seconds."""
        heapq.heappush(self._due, (when, next(self._order), act, arguments))

    def run(self, over: Callable[[], bool], until: float = float("inf")) -> bool:
        """Run actions in the order of their times until `over()` returns True, and return True.

        `over` is called after each action. Return False if no action is left, or if the next action is later than
        `until` seconds; in the second case, the clock is set to `until`.
        """
        ready = self._ready
        due = self._due
        while True:
            while ready:
                process = ready.popleft()
                wish = next(process, None)
                if wish is not None:
                    wish.begin(self, process)
            if over():
                return True
            if not due or due[0][0] > until:
                self.now = max(self.now, until) if due else self.now
                return False
            when, _, act, arguments = heapq.heappop(due)
            if when > self.now:
                self.now = when
            act(*arguments)


class _Thread:
    """A thread that computes or waits for a processor. `process`: the process to which it belongs."""

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

    @property
    def turns_left(self) -> int:
        """The number of turns that its work takes, if others wait."""
        return math.ceil((self.left_s - _LEAST_S) / self.turn_s)


class _Skipped(NamedTuple):
    """Turns of two threads on one processor that are not simulated one by one. `began`: when the first of them began.

    `first`, `second`: the threads, in the order of their turns. `cycles`: number of skipped turns of each thread.
    """

    began: float
    first: _Thread
    second: _Thread
    cycles: int

    @property
    def cycle_s(self) -> float:
        return self.first.turn_s + self.second.turn_s


class Cores:
    """The processors of a node, or an accelerator; threads are served in the order of their arrival, and take turns.

    A thread keeps its processor until its work is done, or for one turn if other threads wait. Only one thread of a
    process computes at a time, as with Python's interpreter lock. If two threads take turns on a single processor,
    their turns are skipped until one of them has its last turn, or until another thread comes.
    """

    def __init__(self, world: World, count: int, wanted: float = 1.0) -> None:
        """Create `count` free processors.

        `wanted`: with more processes than processors, the share of the time in which a processor computes, 0 to 1.
        """
        self._world = world
        self._free = count
        # Processes that have a processor to themselves
        self._own: set[Hashable] = set()
        self._rate = wanted if count > 1 else 1.0
        self._waiting: deque[_Thread] = deque()
        self._running: dict[Hashable, _Thread] = {}
        # Threads whose work is done, with its time; each keeps its processor until the clock goes on
        self._done: list[tuple[float, _Thread, int]] = []
        self._single = count == 1
        self._skipped: _Skipped | None = None
        # Sum over all processors
        self.busy_s = 0.0

    def give(self, processes: Collection[Hashable]) -> None:
        """Give a processor to each of these processes. Each has one thread, which never waits for its processor.

        There has to be at least one processor for each process, and one more for other processes.
        """
        assert len(processes) < self._free, "a processor is left for other processes"
        self._own.update(processes)
        self._free -= len(self._own)

    def owned_by(self, process: Hashable) -> bool:
        """Return whether `process` has a processor to itself."""
        return process in self._own

    def add(self, thread: Process, process: Hashable, seconds: float) -> None:
        """Let `thread` compute for `seconds`, then continue. `process`: the process to which it belongs."""
        if seconds < _LEAST_S:
            self._world.resume(thread)
            return
        if process in self._own:
            self.busy_s += seconds
            self._world.at(self._world.now + seconds, self._world.resume, thread)
            return
        if self._skipped is not None:
            skipped = self._skipped
            elapsed_s = self._world.now - skipped.began
            self._continue(skipped, int(elapsed_s / skipped.cycle_s))
        if self._done:
            self._release_done()
        held = self._running.get(process)
        if held is None and self._free and not self._waiting:
            self._start(_Thread(thread, process, seconds))
            return
        if held is None or held.thread is not thread:
            self._waiting.append(_Thread(thread, process, seconds))
        elif self._waiting and self._world.now >= held.began + held.turn_s:
            self._free_from(held)
            self._waiting.append(_Thread(thread, process, seconds))
        else:
            self._compute(held, seconds)
        if self._waiting:
            self._begin()

    def _compute(self, thread: _Thread, seconds: float) -> None:
        thread.left_s = seconds
        thread.since = self._world.now
        thread.turn = thread.turn + 1
        thread.ending = False
        thread.rate = 1.0
        if (
            self._waiting
            and self._rate < 1.0
            and any(t.process not in self._running for t in self._waiting)
        ):
            thread.rate = self._rate
        ends = self._world.now + seconds / thread.rate
        if self._waiting:
            turn_ends = max(self._world.now, thread.began + thread.turn_s)
            # At the end of the turn, the rest of the work begins anew.
            if turn_ends < ends:
                thread.ending = True
                ends = turn_ends
        self._world.at(ends, self._end, thread, thread.turn)

    def _free_from(self, thread: _Thread) -> None:
        del self._running[thread.process]
        self._free += 1

    def _start(self, thread: _Thread) -> None:
        """Give a free processor to a thread."""
        self._free -= 1
        self._running[thread.process] = thread
        thread.began = self._world.now
        self._compute(thread, thread.left_s)

    def _begin(self) -> None:
        """Give free processors to waiting threads. If threads still wait, limit the turns of the running threads."""
        while self._free:
            chosen = self._first_waiting()
            if chosen is None:
                break
            self._waiting.remove(chosen)
            self._start(chosen)
        if self._waiting:
            for thread in self._running.values():
                ends = max(self._world.now, thread.began + thread.turn_s)
                if (
                    not thread.ending
                    and ends < thread.since + thread.left_s / thread.rate
                ):
                    thread.ending = True
                    self._world.at(ends, self._end, thread, thread.turn)

    def _first_waiting(self) -> _Thread | None:
        """Return the first waiting thread whose process does not compute; None if there is no such thread."""
        for thread in self._waiting:
            if thread.process not in self._running:
                return thread
        return None

    def _end(self, thread: _Thread, turn: int) -> None:
        """End turn number `turn` of a thread, because its work is done or because other threads wait."""
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
            if self._single and len(self._waiting) == 1:
                self._skip_turns()
            return
        # It keeps its processor if it has more to do now.
        self._world.resume(thread.thread)
        if self._waiting:
            self._world.at(self._world.now, self._release, thread, thread.turn)
        else:
            self._done.append((self._world.now, thread, thread.turn))

    def _skip_turns(self) -> None:
        """Skip the turns of two threads up to the last turn of one of them. The turn of the first has just begun."""
        (first,) = self._running.values()
        (second,) = self._waiting
        cycles = min(first.turns_left, second.turns_left) - 1
        if cycles > 0:
            # The end of the turn that has begun is outdated
            first.turn += 1
            skipped = _Skipped(self._world.now, first, second, cycles)
            self._skipped = skipped
            over_s = skipped.began + cycles * skipped.cycle_s
            self._world.at(over_s, self._continue, skipped, cycles)

    def _continue(self, skipped: _Skipped, cycles: int) -> None:
        """Continue with the turn that two threads have reached. `cycles`: number of turns that each has ended."""
        if self._skipped is not skipped:
            return
        self._skipped = None
        thread = skipped.first
        other = skipped.second
        began = skipped.began + cycles * skipped.cycle_s
        thread.left_s -= cycles * thread.turn_s
        other.left_s -= cycles * other.turn_s
        self.busy_s += cycles * skipped.cycle_s
        if cycles < skipped.cycles and self._world.now >= began + thread.turn_s:
            # The first has ended one more turn, so it is the turn of the second
            began += thread.turn_s
            thread.left_s -= thread.turn_s
            self.busy_s += thread.turn_s
            del self._running[thread.process]
            self._waiting[0] = thread
            self._running[other.process] = thread = other
        thread.began = thread.since = began
        thread.turn += 1
        thread.ending = thread.turn_s < thread.left_s
        ends = max(self._world.now, began + min(thread.turn_s, thread.left_s))
        self._world.at(ends, self._end, thread, thread.turn)

    def _release_done(self) -> None:
        """Release the processors of threads whose work is done: now, or when the clock goes on."""
        now = self._world.now
        for when, thread, turn in self._done:
            if when == now:
                self._world.at(now, self._release, thread, turn)
            elif thread.turn == turn and self._running.get(thread.process) is thread:
                self._free_from(thread)
        self._done.clear()

    def _release(self, thread: _Thread, turn: int) -> None:
        if thread.turn == turn and self._running.get(thread.process) is thread:
            self._free_from(thread)
            self._begin()


class Barrier:
    """A barrier for `parties` simulated processes: each waits until all have come. It can be used repeatedly."""

    def __init__(self, world: World, parties: int) -> None:
        self._world = world
        self._parties = parties
        self._here = 0
        self._all = Event(world)

    def meet(self) -> Generator[Event, None, None]:
        """Wait until all parties have come to the barrier. This is a generator: it yields the event to wait for."""
        self._here += 1
        if self._here == self._parties:
            every = self._all
            self._here = 0
            self._all = Event(self._world)
            every.set()
            return
        yield self._all


class Channel:
    """A simulated queue with keys. It holds at most `capacity` items.

    The items of each key are taken in the order in which they were put.
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
        """Put an item; a generator that waits until there is room."""
        while self.full:
            self._putters.append(room := Event(self._world))
            yield room
        self._held += 1
        self.most = max(self.most, self._held)
        self._items.setdefault(key, deque()).append(item)
        if takers := self._takers.get(key):
            takers.popleft().set()

    def get(self, key: str = "") -> Generator[Event, None, Any]:
        """Take the first item with this key and return it; a generator that waits until there is one."""
        items = self._items.setdefault(key, deque())
        while not items:
            self._takers.setdefault(key, deque()).append(there := Event(self._world))
            yield there
        return self._take(items)

    def get_nowait(self, key: str = "") -> Any:
        """Take the first item with this key and return it; None if there is no such item."""
        items = self._items.get(key)
        if items:
            return self._take(items)
        return None

    def put_all(self, items: Sequence[Any], key: str = "") -> None:
        """Put several items, for which there has to be room."""
        assert self._held + len(items) <= self._capacity, "there is room"
        self._held += len(items)
        self.most = max(self.most, self._held)
        self._items.setdefault(key, deque()).extend(items)
        takers = self._takers.get(key, ())
        for _ in range(min(len(takers), len(items))):
            self._takers[key].popleft().set()

    def take_all(self, count: int, key: str = "") -> list[Any]:
        """Take the first `count` items with this key and return them; an empty list if there are fewer."""
        items = self._items.get(key, ())
        if len(items) < count:
            return []
        return [self.get_nowait(key) for _ in range(count)]

    @property
    def full(self) -> bool:
        return self._held >= self._capacity

    def _take(self, items: deque[Any]) -> Any:
        self._held -= 1
        if self._putters:
            self._putters.popleft().set()
        return items.popleft()
