"""An end of a channel between threads or processes: acquires the lock for each operation, and waits if necessary.

::

    run       lock ──▶ mark the change ──▶ one step of the queue machine ──▶ unmark ──▶ unlock ──▶ wake
    attempt   run(step) ──▶ asleep on a waker, for a tick at most ──▶ run(step) ──▶ ... until done or too late

A process that finds a change marked when it has the lock knows that its author died in the middle, and breaks the
channel. Threads of one process and processes of one node differ only in the memory, the lock and the store of items
that an end is given.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from rlplace.comm import channel_errors, processes
from rlplace.comm.channel import Channel, ChannelSpec, ChannelStats
from rlplace.comm.processes import Waker, Wakers
from rlplace.comm.queue import Get, Put, QueueMachine, Store
from rlplace.comm.table import (
    BROKEN,
    CHANGING,
    CHECKED,
    CLOSED,
    COUNT,
    ITEMS,
    K_ITEMS,
    P_DEAD,
    PROCESS,
    Table,
)
from rlplace.errors import ChannelError, ChannelTimeout

T = TypeVar("T")
Step = Callable[..., bool]  # QueueMachine.put or .get

TICK_S = 0.25  # longest sleep: the wake may have been lost with a process that died or stopped
LOOK_S = 1.0  # how often one process of all looks for dead processes
SPIN_S = 100e-6  # longest poll before a sleep
LEAST_SPIN_S = 5e-6  # shortest poll before a sleep
LOCK_PATIENCE_S = 10.0  # least time to wait for the lock: a holder that is only slow must not fail a short deadline


class Lock(Protocol):
    """A lock of a channel: threading.Lock between threads, SharedLock between processes."""

    def acquire(self, *, timeout: float) -> bool: ...

    def release(self) -> None: ...


class Attachment:
    """What all ends of a channel in one process share: its table (the state in memory), the items' memory, the lock,
    and the wakers (sockets on which waiting calls sleep).

    A forked child process gets wakers of its own, and uses the channel under its own process number.
    """

    def __init__(self, table: Table, store: Store, lock: Lock, *, spins: bool) -> None:
        """Make an attachment to a channel.

        `table`: state of the channel. `store`: memory of the channel's items. `lock`: guards table and store. `spins`:
        whether a request polls for a moment before it sleeps. Polling keeps other threads of the process from running.
        """
        self.table = table
        self.spec = table.spec
        self.store = store
        self.lock = lock
        self._spin_s = SPIN_S if spins else 0.0
        self.enter_process()
        processes.in_forks(self.enter_process)

    def enter_process(self) -> None:
        self.process = processes.this_process()
        self.wakers = Wakers()
        self.queue = QueueMachine(self.table, self.process, self.store)
        # Monotonic time from which a call that has waited looks for dead processes. It is kept from call to call: calls
        # with short deadlines look too.
        self._next_look_s = time.monotonic() + LOOK_S
        # Steps of `undo` that are still to come
        self._late: list[Callable[[], object]] = []

    def run(
        self, step: Callable[..., T], *arguments: object, patience_s: float = 0.0
    ) -> T:
        """Run `step(*arguments)` under the lock and return its result; then wake the waiting calls that the step has
        listed in `queue.wakes`.

        `patience_s`: the most seconds to wait for the lock, at least `LOCK_PATIENCE_S`. Raise ChannelTimeout if the
        lock stays taken. If the step raises an error that is not a ChannelError, the change of the channel's state
        stays marked as unfinished, and the next holder of the lock breaks the channel.
        """
        words = self.table.words
        queue = self.queue
        if not self.lock.acquire(
            timeout=patience_s if patience_s > LOCK_PATIENCE_S else LOCK_PATIENCE_S
        ):
            holder = words[CHANGING]
            name = self._name_of(holder) if holder else "a process"
            raise channel_errors.locked(
                self.spec, max(patience_s, LOCK_PATIENCE_S), name
            )
        try:
            if words[CHANGING]:
                queue.break_(
                    f"{self._name_of(words[CHANGING])} died or was interrupted in the middle of a change"
                )
            words[CHANGING] = self.process
            while self._late:
                with contextlib.suppress(ChannelError):
                    self._late.pop(0)()
            result = step(*arguments)
            words[CHANGING] = 0
            return result
        except ChannelError:
            words[CHANGING] = 0
            raise
        finally:
            wakes, queue.wakes = queue.wakes, []
            self.lock.release()
            for number in wakes:
                self.wakers.wake(number)

    def undo(self, step: Callable[..., object], *arguments: object) -> None:
        """Run `step(*arguments)` under the lock.

        If the lock cannot be acquired, run the step later: before the next step that gets the lock.
        """
        try:
            self.run(step, *arguments)
        except ChannelTimeout:
            self._late.append(lambda: step(*arguments))

    def look_for_dead(self, now: float) -> None:
        """Find the dead processes that use the channel, and remove their waits and reservations from the channel.

        `now`: present time by `time.monotonic()`. Do nothing if any process has looked within the last second.
        """
        dead = [
            other
            for other in self.run(self._suspects, now)
            if not processes.alive(other)
        ]
        if dead:
            self.run(self.queue.end_of_processes, dead, now)

    def _look_if_due(self, now: float) -> bool:
        """Call `look_for_dead` if the last call of this process was `LOOK_S` seconds ago; return whether it was called.

        `now`: present time by `time.monotonic()`.
        """
        if now < self._next_look_s:
            return False
        self._next_look_s = now + LOOK_S
        self.look_for_dead(now)
        return True

    def _suspects(self, now: float) -> set[int]:
        """Return the numbers of the processes that `look_for_dead` has to check: all others that use the channel.

        Return an empty set if a process has checked a short time ago. `now`: present time by `time.monotonic()`.
        """
        reals = self.table.reals
        if 0 <= now - reals[CHECKED] < 0.9 * LOOK_S:
            return set()
        reals[CHECKED] = now
        return self.others()

    def others(self) -> set[int]:
        """Return the numbers of the other processes that use the channel and are not known to be dead.

        Call this under the lock.
        """
        words = self.table.words
        return {
            words[p + PROCESS]
            for p in self.queue.participants.all()
            if not words[p + P_DEAD]
        } - {self.process}

    def _name_of(self, other: int) -> str:
        """Return a text that names a process in errors: the names of its workers that use the channel, or else its pid.

        `other`: number of the process.
        """
        words = self.table.words
        names = self.queue.participants.all()
        users = [name for p, name in names.items() if words[p + PROCESS] == other]
        return ", ".join(users) or f"process {processes.pid_of(other)}"

    def attempt(self, step: Step, request: Put | Get, patience_s: float | None) -> None:
        """Try to serve a put or get until it is done, and sleep between the tries.

        `step`: `put` or `get` of the QueueMachine, which tries once to serve the request. `patience_s`: the most
        seconds to wait; None: try once without waiting. Raise the error that says why the request was not served.
        """
        now = time.monotonic()
        if self.run(step, request, 0, now, patience_s=patience_s or 0.0):
            return
        if patience_s is None:
            if self._look_if_due(now) and self.run(step, request, 0, now):
                return
            raise self.run(self.queue.refused, request, now)
        if self._spin(request) and self.run(step, request, 0, time.monotonic()):
            return
        with self._waker_of(request) as waker:
            for seconds in self._attempts(
                step, request, waker.number, now + patience_s
            ):
                waker.wait(seconds)

    async def attempt_async(
        self, step: Step, request: Put | Get, patience_s: float | None
    ) -> None:
        """Try to serve a put or get until it is done, in an asyncio task of a channel server.

        `step`: `put` or `get` of the QueueMachine, which tries once to serve the request. `patience_s`: the most
        seconds to wait; None: try once without waiting. Raise the error that says why the request was not served. If
        the task is cancelled, the request takes nothing.
        """
        if patience_s is None:
            self.attempt(step, request, None)
            return
        with self._waker_of(request) as waker:
            for seconds in self._attempts(
                step, request, waker.number, time.monotonic() + patience_s
            ):
                await waker.sleep(seconds)

    @contextlib.contextmanager
    def _waker_of(self, request: Put | Get) -> Iterator[Waker]:
        waker = self.wakers.take()
        try:
            yield waker
        finally:
            # Interrupted
            if request.waiter:
                self.undo(self.queue.withdraw, request, time.monotonic())
            self.wakers.give_back(waker)

    def _attempts(
        self, step: Step, request: Put | Get, waker: int, deadline: float
    ) -> Iterator[float]:
        """Try to serve a put or get until it is done; before each further try, yield the most seconds to sleep.

        `step`: `put` or `get` of the QueueMachine, which tries once to serve the request. `waker`: number of the waker
        that ends the sleep early. `deadline`: time by `time.monotonic()` after which the error of the request is
        raised.
        """
        now = time.monotonic()
        while not self.run(step, request, waker, now):
            if now >= deadline:
                if self._look_if_due(now) and self.run(step, request, waker, now):
                    return
                raise self.run(self.queue.expired, request, now)
            yield min(deadline - now, TICK_S)
            now = time.monotonic()
            self._look_if_due(now)

    def _spin(self, request: Put | Get) -> bool:
        """Poll for a moment, without the lock, for the free room or the item that a request needs; return whether to
        try again now.

        After a poll without success the next poll is shorter, so that waiting costs little if items are rare.
        """
        words = self.table.words
        spin_s = self._spin_s
        self._spin_s = min(SPIN_S, spin_s * 2)
        if spin_s < LEAST_SPIN_S:
            return False
        count = request.key + K_ITEMS + COUNT
        end = time.perf_counter() + spin_s
        while time.perf_counter() < end:
            os.sched_yield()
            if (
                words[ITEMS] < self.spec.capacity_items
                if isinstance(request, Put)
                else words[count]
            ):
                return True
            if words[BROKEN] or words[CLOSED]:
                return True
        self._spin_s = spin_s / 4
        return False


class QueueEnd(Channel):
    """An end of a channel whose state is in memory and is changed by a QueueMachine.

    All ends of the channel in one process share one attachment.
    """

    def __init__(self, attachment: Attachment) -> None:
        super().__init__(attachment.spec)
        self._attachment = attachment

    def close(self) -> None:
        self._attachment.run(self._attachment.queue.close)

    def break_(self, why: str) -> None:
        self._attachment.run(self._attachment.queue.break_, why)

    def reset(self) -> None:
        attachment = self._attachment
        attachment.run(attachment.queue.reset)
        dead = [
            other
            for other in attachment.run(attachment.others)
            if not processes.alive(other)
        ]
        attachment.run(attachment.queue.end_of_processes, dead, time.monotonic())
        attachment.run(attachment.queue.forget_dead_users)

    def stats(self) -> ChannelStats:
        attachment = self._attachment
        attachment.look_for_dead(time.monotonic())
        # The time after the lock was acquired
        return attachment.run(lambda: attachment.queue.stats(time.monotonic()))


class LocalChannel(QueueEnd):
    """A channel between threads of one process. Items pass by reference: do not change an item after its `put`."""

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(
            Attachment(local_table(spec), References(), threading.Lock(), spins=False)
        )

    def _put(
        self,
        item: Any,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        put = Put(self.owner, key, weight, version, (item,))
        self._attachment.attempt(self._attachment.queue.put, put, patience_s)

    def _get(
        self, limit: float | None, key: str, patience_s: float | None
    ) -> list[Any]:
        get = Get(self.owner, key, limit)
        self._attachment.attempt(self._attachment.queue.get, get, patience_s)
        return [item for (item,), _, _ in get.taken]


def local_table(spec: ChannelSpec) -> Table:
    return Table(spec, bytearray(Table(spec, inline=False).size_bytes), inline=False)


class References:
    """Store of the items of a LocalChannel: entry (index of a record in the table) -> reference to the item."""

    def __init__(self) -> None:
        self._items: dict[int, Any] = {}
        self.place = self._items.__setitem__
        self.take = self._items.pop

    def drop(self, entry: int, /) -> None:
        self._items.pop(entry, None)
