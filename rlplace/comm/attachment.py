"""How a thread of this process takes part in one channel: its turn at the lock, and how it waits.

::

    run     lock ──▶ mark the change ──▶ one step of the queue machine ──▶ unmark ──▶ unlock ──▶ wake
    wait    run(attempt) ──▶ asleep on a waker, for a tick at most ──▶ run(attempt) ──▶ ... until done or too late

A process that finds a change marked when it has the lock knows that its author died in the middle, and breaks the
channel. Threads of one process and processes of one node differ only in the memory, the lock and the wakers given here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelStats
from rlplace.comm.names import Memory
from rlplace.comm.queue import Get, Payloads, Put, QueueMachine
from rlplace.comm.table import BROKEN, CHANGING, CHECKED, CLOSED, COUNT, ITEMS, K_ITEMS, P_DEAD, P_PROCESS
from rlplace.errors import ChannelError, ChannelTimeout

T = TypeVar("T")

TICK_S = 0.25  # a sleeper looks this often whether a wake was lost with a process that died or stopped
LOOK_S = 1.0  # how often one process of all looks for dead processes
SPIN_S, LEAST_SPIN_S = 100e-6, 5e-6  # longest and shortest look before a sleep
LOCK_PATIENCE_S = 10.0  # least time to wait for the lock: a holder that is only slow must not fail a short deadline


class Lock(Protocol):
    def acquire(self, patience_s: float) -> bool:
        """False when it was not free in time."""
        ...

    def release(self) -> None: ...


class Waker(Protocol):
    """Ends the sleep of one thread. `number` names it in the table and is never 0."""

    number: int

    def wait(self, seconds: float) -> bool:
        """Whether it was woken. A wake meant for an earlier sleeper may end the wait early."""
        ...


class Wakers(Protocol):
    """The wakers of one process."""

    def take(self) -> Waker:
        """One for a thread that is about to wait."""
        ...

    def give_back(self, waker: Waker) -> None: ...

    def wake(self, number: int) -> None: ...

    def pause(self) -> bool:
        """Let others run for a moment; False where a thread should rather sleep at once."""
        ...


class Attachment:
    """Shared by all ends of a process that came from one."""

    def __init__(self, memory: Memory, payloads: Payloads, lock: Lock, wakers: Wakers, process: int) -> None:
        self.memory = memory
        self.spec = memory.spec
        self.queue = QueueMachine(memory, process, payloads)
        self.process = process
        self.lock, self.wakers = lock, wakers
        self._abandoned: list[Put | Get] = []
        self._spin_s = SPIN_S

    # ── one change ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, step: Callable[..., T], *arguments: object, patience_s: float = 0.0) -> T:
        """The step under the lock. Anything but a ChannelError leaves the change marked: the state may be half made."""
        words, queue = self.memory.words, self.queue
        try:
            if not self.lock.acquire(patience_s if patience_s > LOCK_PATIENCE_S else LOCK_PATIENCE_S):
                raise self._locked(patience_s)
        except FileNotFoundError:
            raise channel_errors.broken(self.spec, "this process", "the memory of the job is gone") from None
        try:
            if words[CHANGING]:
                self._break_after(words[CHANGING])
            words[CHANGING] = self.process
            if self._abandoned:
                self._withdraw_abandoned()
            result = step(*arguments)
            words[CHANGING] = 0
            return result
        except ChannelError:
            words[CHANGING] = 0
            raise
        finally:
            wakes = queue.wakes
            if wakes:
                queue.wakes = []
            self.lock.release()
            if wakes:
                for number in {*wakes}:  # tasks of one loop share theirs
                    self.wakers.wake(number)

    def stats(self) -> ChannelStats:
        self.look_for_dead(time.monotonic())
        return self.run(lambda: self.queue.stats(time.monotonic()))  # the time after the lock was acquired

    def look_for_dead(self, now: float) -> None:
        """Let go of what dead processes left in the channel; one process of all looks, once a second."""
        dead = [process for process in self.run(self._suspects, now) if not self.alive(process)]
        if dead:
            self.run(self.queue.end_of_processes, dead, now)

    def alive(self, process: int) -> bool:
        """Whether another process of the channel lives; there is none between threads."""
        return True

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, request: Put | Get, patience_s: float | None) -> None:
        """Until the request is done. Raises why it cannot be; `patience_s` None: at once."""
        step = self.queue.put if isinstance(request, Put) else self.queue.get
        now = time.monotonic()
        if self.run(step, request, 0, now, patience_s=patience_s or 0.0):
            return
        if patience_s is None:
            raise self.run(self.queue.refused, request, now)
        if self._spin(request) and self.run(step, request, 0, time.monotonic()):
            return
        waker = self.wakers.take()
        try:
            self._sleep(step, request, waker, now + patience_s)
        finally:
            if request.waiter:  # interrupted
                self.withdraw(request)
            self.wakers.give_back(waker)

    def _sleep(self, step: Callable[..., bool], request: Put | Get, waker: Waker, deadline: float) -> None:
        now = time.monotonic()
        next_look = now + LOOK_S
        while not self.run(step, request, waker.number, now):
            left = deadline - now
            if left <= 0:
                raise self.run(self.queue.expired, request, time.monotonic())
            woken = waker.wait(min(left, TICK_S))
            now = time.monotonic()
            if not woken and now >= next_look:
                next_look = now + LOOK_S
                self.look_for_dead(now)

    def withdraw(self, request: Put | Get) -> None:
        try:
            self.run(self.queue.withdraw, request, time.monotonic())
        except ChannelTimeout:  # a process holds the lock; the request must not stay in line for ever
            self._abandoned.append(request)

    def _spin(self, request: Put | Get) -> bool:
        """Look for a moment, without the lock, whether what the request waits for comes: that is less than a sleep.

        Where it did not come, the next look is shorter, so that waiting costs nothing where items are rare.
        """
        words, spin_s = self.memory.words, self._spin_s
        self._spin_s = min(SPIN_S, spin_s * 2)
        if spin_s < LEAST_SPIN_S:
            return False
        count = request.key + K_ITEMS + COUNT
        end = time.perf_counter() + spin_s
        while self.wakers.pause():
            if isinstance(request, Put):
                if words[ITEMS] < self.spec.capacity_items:
                    return True
            elif words[count]:
                return True
            if words[BROKEN] or words[CLOSED]:
                return True
            if time.perf_counter() > end:
                break
        self._spin_s = spin_s / 4
        return False

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _suspects(self, now: float) -> set[int]:
        """The processes that use the channel, if none has looked at them lately."""
        words, reals = self.memory.words, self.memory.reals
        if 0 <= now - reals[CHECKED] < 0.9 * LOOK_S:
            return set()
        reals[CHECKED] = now
        others = {words[p + P_PROCESS] for p in self.queue.names.participants() if not words[p + P_DEAD]}
        return others - {self.process}

    def _withdraw_abandoned(self) -> None:
        while self._abandoned:
            self.queue.withdraw(self._abandoned.pop(), time.monotonic())

    def _break_after(self, process: int) -> None:
        self.queue.break_(f"{self._name_of(process)} died or was interrupted in the middle of a change")

    def _locked(self, waited_s: float) -> ChannelTimeout:
        process = self.memory.words[CHANGING]
        holder = self._name_of(process) if process else "a process"
        return channel_errors.locked(self.spec, max(waited_s, LOCK_PATIENCE_S), holder)

    def _name_of(self, process: int) -> str:
        return self.queue.names.of(process) or self.unnamed(process)

    def unnamed(self, process: int) -> str:
        """What to call a process that has put or taken nothing."""
        return "a thread"
