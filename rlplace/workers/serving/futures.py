"""Promised results of requests: a client asks for the result of a request until it is there."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

# Results that were not fetched are kept for so long
_KEPT_S = 1800.0
# A fetched result is kept for clients whose connection broke meanwhile
_KEPT_FETCHED_S = 60.0
_PROTOBUF = "application/x-protobuf"

Blame = Literal["user", "server"]


@dataclasses.dataclass(slots=True)
class Future:
    """The result of one request. `content`: JSON object, or bytes of protobuf; None: it is not there yet."""

    name: str
    content: Mapping[str, Any] | bytes | None = None
    # Seconds of the monotonic clock at which it is forgotten; None while there is no result
    ends_s: float | None = None

    @property
    def done(self) -> bool:
        return self.content is not None


class Futures:
    """The futures of a server, by name. `changed` is notified when a result arrives; it guards the futures."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._futures: dict[str, Future] = {}
        # Names in the order of their results
        self._ended: collections.deque[str] = collections.deque()

    def get(self, name: str) -> Future | None:
        return self._futures.get(name)

    def promise(self, name: str) -> Future:
        """Return a new future."""
        future = Future(name)
        self._futures[name] = future
        return future

    def finish(self, future: Future, content: Mapping[str, Any] | bytes) -> None:
        """Set the result of a future, unless it has one, and forget old results."""
        if future.done:
            return
        future.content = content
        now = time.monotonic()
        future.ends_s = now + _KEPT_S
        self._ended.append(future.name)
        self._forget(now)
        self._changed.notify_all()

    def fail(self, future: Future, why: str, blame: Blame = "user") -> None:
        """Set the result of a future to an error. `why`: what the client is told. `blame`: whose error it is."""
        self.finish(future, {"error": why, "category": blame})

    def fail_all(self, why: str) -> None:
        """Fail all futures without a result, by an error of the server."""
        for future in list(self._futures.values()):
            self.fail(future, why, "server")

    def wait(self, name: str, timeout_s: float) -> Future | None:
        """Wait for the result of a future, and return the future; None if there is no future of this name.

        After `timeout_s` seconds, the future is returned without a result. The caller holds `changed`.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            future = self._futures.get(name)
            if future is None or future.done:
                break
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            self._changed.wait(left_s)
        if future is not None and future.done:
            future.ends_s = min(
                future.ends_s or 0.0, time.monotonic() + _KEPT_FETCHED_S
            )
        return future

    def _forget(self, now: float) -> None:
        """Forget old results. A fetched result behind one that was not fetched waits for it."""
        while self._ended:
            future = self._futures.get(self._ended[0])
            if future is not None and (future.ends_s or 0.0) > now:
                return
            self._futures.pop(self._ended.popleft(), None)
