"""An end of a channel: checks arguments, packs items, takes its turn at the lock, and waits.

::

    run     lock ──▶ mark the change ──▶ one step of the queue machine ──▶ unmark ──▶ unlock ──▶ wake
    wait    run(attempt) ──▶ asleep on a waker, for a tick at most ──▶ run(attempt) ──▶ ... until done or too late

A process that finds a change marked when it has the lock knows that its author died in the middle, and breaks the
channel. Threads of one process and processes of one node differ only in the memory, the lock, the wakers and the store
of items that an end is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar

from rlplace.comm import channel_errors
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.comm.names import Memory
from rlplace.comm.queue import Get, Payloads, Put, QueueMachine
from rlplace.comm.table import BROKEN, CHANGING, CHECKED, CLOSED, COUNT, ITEMS, K_ITEMS, NO_VERSION, P_DEAD, P_PROCESS
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


class Store(Payloads, Protocol):
    """Payloads, and what is done with them outside of the lock."""

    def pack(self, item: Any) -> Any: ...

    def goes_along(self, packed: Any) -> bool:
        """Whether it is small enough to go with the request itself; else `write` comes once credit was granted."""
        ...

    def write(self, packed: Any) -> Any:
        """A payload that lies outside of the table."""
        ...

    def release(self, payload: Any) -> None:
        """The payload of `write` is not wanted."""
        ...

    def open(self, payload: Any) -> Any:
        """The item of a payload that was taken."""
        ...


class QueueEnd:
    """Implements Channel on a queue machine. Ends of one process share its attachment."""

    def __init__(self, attachment: Attachment, store: Store, owner: str = "an unnamed worker") -> None:
        self._attachment = attachment
        self._store = store
        self._spec = attachment.spec
        self._owner = owner
        self._failed: dict[str, deque[Exception]] = {}  # by key: why items of a batch could not be opened

    @property
    def spec(self) -> ChannelSpec:
        return self._spec

    def named(self, owner: str) -> Self:
        end = type(self).__new__(type(self))
        QueueEnd.__init__(end, self._attachment, self._store, owner)
        return end

    # ── putting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._put(item, key, weight, version, self._patience(timeout_s))

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        self._put(item, key, weight, version, None)

    def _put(self, item: Any, key: str, weight: float, version: int | None, patience_s: float | None) -> None:
        packed = self._store.pack(item)
        put = self._put_request(packed, key, weight, version)
        self._attachment.attempt(put, patience_s)
        if put.entry:
            self._fill(put, packed)

    def _put_request(self, packed: Any, key: str, weight: float, version: int | None) -> Put:
        channel_errors.check_put(self._spec, self._owner, key, weight, version)
        payload = packed if packed is not None and self._store.goes_along(packed) else None
        return Put(self._owner, key, weight, NO_VERSION if version is None else version, payload)

    def _fill(self, put: Put, packed: Any) -> None:
        """Data moves, once credit was granted."""
        attachment, store = self._attachment, self._store
        try:
            payload = packed if store.goes_along(packed) else store.write(packed)
            try:
                attachment.run(attachment.queue.fill, put, payload, time.monotonic())
            except ChannelError:
                store.release(payload)
                raise
        finally:
            if put.entry:  # the data never came
                attachment.run(attachment.queue.cancel, put, time.monotonic())

    # ── getting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._get(None, key, self._patience(timeout_s))[0]

    def get_nowait(self, *, key: str = "") -> Any:
        return self._get(None, key, None)[0]

    def get_batch(self, weight: float, *, key: str = "", timeout_s: float | None = None) -> list[Any]:
        return self._get(weight, key, self._patience(timeout_s))

    def get_batch_nowait(self, weight: float, *, key: str = "") -> list[Any]:
        return self._get(weight, key, None)

    def _get(self, limit: float | None, key: str, patience_s: float | None) -> list[Any]:
        get = self._get_request(limit, key)
        if self._failed:
            raise_failed(self._failed, key)
        self._attachment.attempt(get, patience_s)
        return open_all([taken.payload for taken in get.taken], self._store.open, self._failed, key)

    def _get_request(self, limit: float | None, key: str) -> Get:
        channel_errors.check_get(self._spec, self._owner, key, limit)
        return Get(self._owner, key, limit)

    # ── endings and statistics ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self._attachment.run(self._attachment.queue.close)

    def break_(self, why: str) -> None:
        self._attachment.run(self._attachment.queue.break_, why)

    def stats(self) -> ChannelStats:
        return self._attachment.stats()

    def _patience(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._spec.timeout_s
        channel_errors.check_timeout(self._spec, self._owner, timeout_s)
        return timeout_s


def open_all(
    payloads: Sequence[Any], open_: Callable[[Any], Any], failed: dict[str, deque[Exception]], key: str
) -> list[Any]:
    """The items that can be opened. Why others cannot is raised now if there is none, else by the next get at `key`."""
    items = []
    for payload in payloads:
        try:
            items.append(open_(payload))
        except Exception as error:  # noqa: BLE001 -- whatever unpickling raises must not lose the rest of the batch
            failed.setdefault(key, deque()).append(error)
    if not items:
        raise_failed(failed, key)
    return items


def raise_failed(failed: dict[str, deque[Exception]], key: str) -> None:
    """Raise what an earlier batch at `key` could not open, if anything."""
    errors = failed.get(key)
    if errors:
        error = errors.popleft()
        if not errors:
            del failed[key]
        raise error
