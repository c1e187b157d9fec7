"""Messages under way between two workers: in order, without blocking who starts them.

A send that finds credit is done at once; without credit it and those after it go to one thread, in order: putters wait
in one line anyway. A receive needs no thread: what was sent lies in the channel until somebody waits for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from rlplace.comm import refusals
from rlplace.comm.channel import Channel
from rlplace.errors import ChannelEmpty, ChannelFull, ChannelTimeout

T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol[T_co]):
    """An operation under way. Whoever starts one waits for it; until then its values must not be changed."""

    def done(self) -> bool:
        """Whether `wait` would return at once. Does not block; raises what `wait` would raise."""
        ...

    def wait(self, timeout_s: float | None = None) -> T_co:
        """Blocks until it is done. After a ChannelTimeout it is still under way and can be waited for again."""
        ...


class Outbox:
    """Owns what one worker has started to send and the channel has not taken yet."""

    def __init__(self, channel: Channel, owner: str) -> None:
        self._channel = channel
        self._owner = owner
        self._lock = threading.Lock()
        self._behind: Future[None] | None = None  # the last send that found no credit
        self._thread: ThreadPoolExecutor | None = None

    def send(self, value: Any, key: str, timeout_s: float | None) -> None:
        if self._free():
            self._channel.put(value, key=key, timeout_s=timeout_s)
        else:
            self.start(value, key).wait(timeout_s)

    def start(self, value: Any, key: str) -> Send:
        with self._lock:
            if self._free():
                try:
                    self._channel.put_nowait(value, key=key)
                    return Send(self._channel, self._owner, key, None)
                except ChannelFull:
                    pass
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._owner} sends")
            self._behind = self._thread.submit(self._channel.put, value, key=key)
            return Send(self._channel, self._owner, key, self._behind)

    def close(self) -> None:
        """Forgets what has not begun to be sent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _free(self) -> bool:
        return self._behind is None or self._behind.done()


class Send:
    """A send under way; `put` is None when it was done at once."""

    def __init__(self, channel: Channel, owner: str, key: str, put: Future[None] | None) -> None:
        self._channel = channel
        self._owner = owner
        self._key = key
        self._put = put
        self._since = time.monotonic()

    def done(self) -> bool:
        if self._put is None or not self._put.done():
            return self._put is None
        self._put.result()
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if self._put is None:
            return
        spec = self._channel.spec
        concurrent.futures.wait([self._put], spec.timeout_s if timeout_s is None else timeout_s)
        if not self._put.done():
            waited_s = time.monotonic() - self._since
            raise refusals.put_timeout(spec, self._owner, self._key, waited_s, self._channel.stats())
        self._put.result()


class Box(Protocol):
    """Where receives get their messages from."""

    def bring(self, wanted: Receive, timeout_s: float | None) -> None:
        """Blocks until `wanted` has arrived, and with it whatever was asked for before it."""
        ...


class Inbox:
    """Who asked for the next messages of one sender, in the order they asked. For one thread at a time."""

    def __init__(self, channel: Channel, key: str, forget: Callable[[], object]) -> None:
        """`forget` is called when nothing that was asked for is left."""
        self._channel = channel
        self._key = key
        self._forget = forget
        self._asked: deque[tuple[Receive, Callable[..., Any]]] = deque()

    def receive(self, get: Callable[..., Any], timeout_s: float | None) -> Any:
        """The next message; a wait in vain takes nothing."""
        receive = self.start(get)
        try:
            return receive.wait(timeout_s)
        finally:
            if not receive.arrived:
                self._asked.remove((receive, get))

    def start(self, get: Callable[..., Any]) -> Receive:
        """Asks for the next message, to be taken by `get`: the channel's `get` or `get_lease`."""
        receive = Receive(self)
        self._asked.append((receive, get))
        return receive

    def bring(self, wanted: Receive, timeout_s: float | None) -> None:
        deadline_s = time.monotonic() + (self._channel.spec.timeout_s if timeout_s is None else timeout_s)
        while not wanted.arrived:
            first, get = self._asked[0]
            first.arrive(get(key=self._key, timeout_s=max(0.0, deadline_s - time.monotonic())))
            self._asked.popleft()
        if not self._asked:
            self._forget()


class Mailbox:
    """Takes whatever is sent to one key, from many senders; for one thread at a time.

    What nobody has asked for yet is kept here, so that a member that is behind never holds back the credit that the
    members it waits for need: collectives go on however small the channel is.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel = channel
        self._key = key
        self._asked: dict[Hashable, deque[Receive]] = {}  # by sender, in the order they asked
        self._early: dict[Hashable, deque[Any]] = {}

    def start(self, sender: Hashable) -> Receive:
        """Asks for the next message of `sender`."""
        receive, early = Receive(self), self._early.get(sender)
        if early:
            receive.arrive(early.popleft())
        else:
            self._asked.setdefault(sender, deque()).append(receive)
        return receive

    def bring(self, wanted: Receive, timeout_s: float | None) -> None:
        deadline_s = time.monotonic() + (self._channel.spec.timeout_s if timeout_s is None else timeout_s)
        while not wanted.arrived:
            self._deliver(self._channel.get(key=self._key, timeout_s=max(0.0, deadline_s - time.monotonic())))

    def drain(self) -> None:
        """Takes all that is there."""
        with contextlib.suppress(ChannelEmpty):
            while True:
                self._deliver(self._channel.get_nowait(key=self._key))

    def _deliver(self, item: tuple[Hashable, Any]) -> None:
        sender, message = item
        asked = self._asked.get(sender)
        if asked:
            asked.popleft().arrive(message)
        else:
            self._early.setdefault(sender, deque()).append(message)


class Receive:
    """A receive under way."""

    def __init__(self, box: Box) -> None:
        self.arrived = False
        self._value: Any = None
        self._box = box

    def arrive(self, value: Any) -> None:
        self._value = value
        self.arrived = True

    def done(self) -> bool:
        if not self.arrived:
            with contextlib.suppress(ChannelTimeout):
                self._box.bring(self, 0.0)
        return self.arrived

    def wait(self, timeout_s: float | None = None) -> Any:
        if not self.arrived:
            self._box.bring(self, timeout_s)
        return self._value
