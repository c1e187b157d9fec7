"""An end of a channel: checks arguments, packs items, and waits. The one implementation for threads and processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from rlplace.comm import channel_errors
from rlplace.comm.attachment import Attachment
from rlplace.comm.channel import ChannelSpec, ChannelStats
from rlplace.comm.queue import Get, Payloads, Put
from rlplace.comm.table import NO_VERSION
from rlplace.errors import ChannelError


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
