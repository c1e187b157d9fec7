"""This process' hold on one channel: its mapping, its turn at the lock, and how its threads and tasks wait.

::

    run     lock ──▶ mark the change ──▶ one step on the queue ──▶ unmark ──▶ unlock ──▶ ring
    wait    run(attempt) ──▶ asleep on a bell, a second at most ──▶ run(attempt) ──▶ ... until done or too late

Whoever finds a change marked when it has the lock knows that its author died in the middle, and breaks the channel.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlplace.comm.channel import ChannelStats
from rlplace.comm.shared import census, endings, limits, liveness
from rlplace.comm.shared.doorbell import Bell, LoopBell, Ringer
from rlplace.comm.shared.layout import CHANGING, CHECKED, P_DEAD, P_PROCESS
from rlplace.comm.shared.lock import FileLock
from rlplace.comm.shared.memory import ChannelMemory
from rlplace.comm.shared.payload import Slabs
from rlplace.comm.shared.queue import SharedQueue
from rlplace.comm.shared.requests import Request
from rlplace.errors import ChannelError, ChannelTimeout

T = TypeVar("T")

_TICK_S = 1.0  # a sleeper looks this often for processes that died, and whether a ring was lost with one
_LOCK_PATIENCE_S = 10.0  # least time to wait for the lock: a holder that is only slow must not fail a short deadline


class Attachment:
    """Shared by all ends of a process that came from one. A forked child gets its own lock, bells and slabs."""

    def __init__(self, path: Path) -> None:
        self.memory = ChannelMemory(path)
        self.spec = self.memory.spec
        self._begin(self.memory.descriptor)

    def _begin(self, descriptor: int) -> None:
        self._pid = os.getpid()
        self._process = liveness.this_process()
        self._lock = FileLock(descriptor)
        self._ringer = Ringer()
        self._bells: list[Bell] = []  # at rest
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBell] = weakref.WeakKeyDictionary()
        self._abandoned: list[Request] = []
        self.slabs = Slabs.of(self.memory.path.parent)
        self.queue = SharedQueue(self.memory, self._process, self.slabs)

    def fork_safe(self) -> None:
        """To be called before a request is made: in a forked child everything begins anew."""
        if os.getpid() != self._pid:
            self._begin(os.open(f"/proc/self/fd/{self._lock.descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def detach(self) -> None:
        """Gives back the mapping and all descriptors; the attachment is not to be used again."""
        self._lock.close()
        self._ringer.close()
        for bell in self._bells:
            bell.close()
        for loop_bell in self._loops.values():
            loop_bell.close()
        self.memory.detach()

    # ── one change ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, step: Callable[..., T], *arguments: object, patience_s: float = 0.0) -> T:
        """The step under the lock. Anything but a ChannelError leaves the change marked: the state may be half made."""
        words = self.memory.words
        if not self._lock.acquire(max(patience_s, _LOCK_PATIENCE_S)):
            raise self._held(patience_s)
        try:
            if words[CHANGING]:
                self._break_after(words[CHANGING])
            words[CHANGING] = self._process
            if self._abandoned:
                self._withdraw_abandoned()
            result = step(*arguments)
            words[CHANGING] = 0
            return result
        except ChannelError:
            words[CHANGING] = 0
            raise
        finally:
            rings = self.queue.rings
            if rings:
                self.queue.rings = []
            self._lock.release()
            for bell in {*rings}:  # tasks of one loop share theirs
                self._ringer.ring(bell)

    def look_for_dead(self, now: float) -> None:
        """Lets go of what dead processes left in the channel; one process of all looks, once a second."""
        dead = [process for process in self.run(self._suspects, now) if not liveness.alive(process)]
        if dead:
            self.run(endings.end_of_processes, self.queue, dead, now)

    def stats(self) -> ChannelStats:
        self.look_for_dead(time.monotonic())
        return self.run(lambda: census.stats(self.queue, time.monotonic()))  # the time after whoever came before

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def at_once(self, request: Request) -> None:
        now = time.monotonic()
        if not self.run(request.attempt, 0, now):
            raise self.run(request.refused, now)

    def wait(self, request: Request, timeout_s: float) -> None:
        try:
            bell = self._bells.pop()
        except IndexError:
            bell = Bell()
        now = time.monotonic()
        try:
            if not self.run(request.attempt, bell.number, now, patience_s=timeout_s):
                self._sleep(request, bell, now + timeout_s)
        finally:
            if request.waiter:  # interrupted
                self._withdraw(request)
            self._bells.append(bell)

    def _sleep(self, request: Request, bell: Bell, deadline: float) -> None:
        left = deadline - time.monotonic()
        while left > 0:
            if not bell.wait(min(left, _TICK_S)):
                self.look_for_dead(time.monotonic())
            now = time.monotonic()
            if self.run(request.attempt, bell.number, now):
                return
            left = deadline - now
        raise self.run(request.expired, time.monotonic())

    async def wait_async(self, request: Request, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        bell = self._loops.get(loop)
        if bell is None:
            bell = self._loops[loop] = LoopBell()
        now = time.monotonic()
        try:
            if not self.run(request.attempt, bell.number, now, patience_s=timeout_s):
                await self._sleep_async(request, bell, now + timeout_s)
        finally:
            if request.waiter:  # cancelled
                self._withdraw(request)

    async def _sleep_async(self, request: Request, bell: LoopBell, deadline: float) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def rung() -> None:
            if request.rung:
                woken.set()

        bell.add(loop, request, rung)
        try:
            left = deadline - time.monotonic()
            while left > 0:
                try:
                    async with asyncio.timeout(min(left, _TICK_S)):
                        await woken.wait()
                except TimeoutError:
                    self.look_for_dead(time.monotonic())
                woken.clear()
                now = time.monotonic()
                if self.run(request.attempt, bell.number, now):
                    return
                left = deadline - now
        finally:
            bell.remove(loop, request)
        raise self.run(request.expired, time.monotonic())

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _suspects(self, now: float) -> set[int]:
        """The processes that use the channel, if nobody has looked at them lately."""
        words, reals = self.memory.words, self.memory.reals
        if 0 <= now - reals[CHECKED] < 0.9 * _TICK_S:
            return set()
        reals[CHECKED] = now
        others = {words[p + P_PROCESS] for p in self.queue.participants.all() if not words[p + P_DEAD]}
        return others - {self._process}

    def _withdraw(self, request: Request) -> None:
        try:
            self.run(request.withdraw, time.monotonic())
        except ChannelTimeout:  # somebody sits on the lock; it must not stay in line for ever
            self._abandoned.append(request)

    def _withdraw_abandoned(self) -> None:
        while self._abandoned:
            self._abandoned.pop().withdraw(time.monotonic())

    def _break_after(self, process: int) -> None:
        who = self.queue.participants.names_of(process) or f"process {liveness.pid_of(process)}"
        endings.break_(self.queue, f"{who} died or was interrupted in the middle of a change")

    def _held(self, waited_s: float) -> ChannelTimeout:
        process = self.memory.words[CHANGING]
        who = self.queue.participants.names_of(process) if process else ""
        holder = who or (f"process {liveness.pid_of(process)}" if process else "somebody")
        return limits.held(self.spec, "this process", max(waited_s, _LOCK_PATIENCE_S), holder)
