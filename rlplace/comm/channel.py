"""The Channel contract: a bounded, keyed queue between workers, the same on every transport.

::

    producers ── put ──▶ [ key "0": item item item ]  ── get ──▶ consumers
                         [ key "1": item           ]
                         credit: capacity_items over all keys

A channel ends in one of two ways. *Closed*: no more puts; what is inside can still be taken, then EndOfStream.
*Broken*: a process died or the run was cancelled; every wait ends with ChannelBroken at once. A *deadline* ends one
call only (ChannelTimeout).
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Self

from rlplace.comm import channel_errors
from rlplace.comm.work import Lanes, Work
from rlplace.errors import ChannelMisuse

if TYPE_CHECKING:
    from rlplace.comm.network import Connection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """What a channel is; fixed when it is made."""

    name: str
    capacity_items: int
    # Declared keys; any other is an error. None: any key, `participants` at most
    keys: tuple[str, ...] | None = None
    # Names that may use it, and requests that may wait in it at a time
    participants: int = 1024
    timeout_s: float = 120.0  # deadline of a put or get that names none
    source: str = ""  # the component that puts, where a plan says so
    target: str = ""  # and the one that takes

    def __post_init__(self) -> None:
        for least in ("capacity_items", "participants"):
            if getattr(self, least) < 1:
                raise ValueError(
                    f"channel {self.name}: {least} must be at least 1, got {getattr(self, least)}"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A put or get that waits at this moment."""

    owner: str  # "env rank 2"
    key: str
    wants: Literal["credit", "item"]
    seconds: float  # so far


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """A moment of a channel. Counts are since it was made."""

    capacity_items: int
    depth_items: int
    high_water_items: int
    puts: int
    gets: int
    producer_wait_s: float  # summed time puts waited for credit
    consumer_wait_s: float  # summed time gets waited for items
    waits: tuple[Wait, ...]  # puts in the order they will be granted, then gets by key
    depth_by_key: dict[str, int]
    producers: tuple[str, ...] = ()  # every name that ever put
    consumers: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()  # of these, whose process is known to have ended
    # Of all items that were put; between threads of a process nothing is copied
    bytes: int = 0
    staleness_max: int = 0  # largest (newest version put so far - version of the item) when an item was taken

    @property
    def waiting_producers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants == "credit")

    @property
    def waiting_consumers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants == "item")

    def could_end(self, wait: Wait) -> tuple[str, ...]:
        """The workers that could end `wait`, as far as is known: over all keys, those that were seen so far."""
        seen = self.producers if wait.wants == "item" else self.consumers
        return tuple(name for name in seen if name != wait.owner)


class Channel(abc.ABC):
    """FIFO per key, any number of producers and consumers. Ends may be pickled to other workers.

    Errors: ChannelTimeout, ChannelClosed (put), EndOfStream (get), ChannelBroken; ChannelMisuse, a ValueError, for a
    wrong argument, which changes nothing for other callers. `timeout_s=None` means the channel's own deadline; there
    is no infinite wait. Puts and gets are served in the order in which they began to wait: a call that does not wait
    never overtakes a running waiter, but a process that was woken and does not run (stopped) loses its place. What
    `get` returns is the caller's own and writable, except between threads of one process, where an item passes by
    reference. An item that cannot be unpickled raises in the `get` that took it; in a batch the others are returned,
    and the next get of this end at this key raises.

    A process that dies holds up no other: its waits and its unfinished puts vanish. The channel breaks only where the
    death may have left its state wrong, in the middle of a change.
    """

    def __init__(self, spec: ChannelSpec, owner: str = "an unnamed worker") -> None:
        self.spec = spec
        self.owner = owner
        # By key: why items of a batch could not be opened
        self._failed: dict[str, deque[Exception]] = {}
        # Of what goes on beside the caller
        self._lanes = Lanes()

    def named(self, owner: str) -> Self:
        """The same channel seen from `owner` ("env rank 2"), the name used in errors and statistics."""
        end = object.__new__(type(self))
        end.__dict__.update(self.__dict__, owner=owner, _failed={}, _lanes=Lanes())
        return end

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Block until credit is granted; data moves only then. `version`: of the policy that made the item."""
        self._check_put(key, weight, version)
        self._put(
            item,
            key,
            weight,
            version,
            self.spec.timeout_s if timeout_s is None else self._patience(timeout_s),
        )

    def put_nowait(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
    ) -> None:
        """Raise ChannelFull instead of waiting."""
        self._check_put(key, weight, version)
        self._put(item, key, weight, version, None)

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._items(
            None,
            key,
            self.spec.timeout_s if timeout_s is None else self._patience(timeout_s),
        )[0]

    def get_nowait(self, *, key: str = "") -> Any:
        """Raise ChannelEmpty instead of waiting."""
        return self._items(None, key, None)[0]

    def get_batch(
        self, weight: float, *, key: str = "", timeout_s: float | None = None
    ) -> list[Any]:
        """Take one item, whatever it weighs, and what else is there within a summed `weight`, atomically."""
        patience_s = (
            self.spec.timeout_s if timeout_s is None else self._patience(timeout_s)
        )
        return self._items(self._limit(weight), key, patience_s)

    # ── beside the caller ────────────────────────────────────────────────────────────────────────────────────────────

    def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Begin a `put`, and return at once: `await` the result in an `async def`, else call its `wait()`.

        The item must not change until then. Puts of this end at one key enter in the order in which they were begun;
        the deadline of each counts from the end of the one before.
        """
        self._check_put(key, weight, version)
        patience_s = self._patience_of(timeout_s)
        return self._lanes.begin(
            ("put", key),
            lambda: self._put(item, key, weight, version, patience_s),
            lambda: self._put(item, key, weight, version, None),
        )

    def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Work:
        """Begin a `get`, and return at once: `await` the item in an `async def`, else call `wait()` of the result.

        Gets of this end at one key are served in the order in which they were begun; the deadline of each counts from
        the end of the one before. The item of a get that nothing waits for is lost.
        """
        patience_s = self._patience_of(timeout_s)
        return self._lanes.begin(
            ("get", key),
            lambda: self._items(None, key, patience_s)[0],
            lambda: self._items(None, key, None)[0],
        )

    def get_batch_async(
        self, weight: float, *, key: str = "", timeout_s: float | None = None
    ) -> Work:
        """Begin a `get_batch`, as `get_async`."""
        limit = self._limit(weight)
        patience_s = self._patience_of(timeout_s)
        return self._lanes.begin(
            ("get", key),
            lambda: self._items(limit, key, patience_s),
            lambda: self._items(limit, key, None),
        )

    def qsize(self, key: str | None = None) -> int:
        """Return the items that are inside at this moment, at one key or at all."""
        stats = self.stats()
        if key is None:
            return stats.depth_items
        return stats.depth_by_key.get(key, 0)

    @abc.abstractmethod
    def close(self) -> None:
        """End the stream. Puts that wait fail. Idempotent."""

    @abc.abstractmethod
    def break_(self, why: str) -> None:
        """End every wait with ChannelBroken and drop what is inside. Idempotent; the first reason stays."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop what is inside and serve again, broken or not; puts and gets that still wait end with ChannelBroken.

        For the owner of the channel, once all who used it have given up: which ones did is not asked.
        """

    @abc.abstractmethod
    def stats(self) -> ChannelStats: ...

    def link(self, key: str) -> Connection | None:
        """Return the connection to the node of what is put at `key`; None where that is this one."""
        return None

    @abc.abstractmethod
    def _put(
        self,
        item: Any,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        """`patience_s` None: at once or not at all."""

    @abc.abstractmethod
    def _get(
        self, limit: float | None, key: str, patience_s: float | None
    ) -> list[Any]:
        """One item for `limit` None, else a batch up to this weight."""

    def _open_all(
        self, payloads: Iterable[Any], open_: Callable[[Any], Any], key: str
    ) -> list[Any]:
        """The items that can be opened. Why others cannot is raised now if there is none, else by the next get."""
        items = []
        for payload in payloads:
            try:
                items.append(open_(payload))
            except Exception as error:  # noqa: BLE001 -- whatever unpickling raises must not lose the rest of the batch
                self._failed.setdefault(key, deque()).append(error)
        if not items:
            self._raise_failed(key)
        return items

    def _items(
        self, limit: float | None, key: str, patience_s: float | None
    ) -> list[Any]:
        if type(key) is not str:
            raise self._misuse("key", key)
        if self._failed:
            self._raise_failed(key)
        return self._get(limit, key, patience_s)

    def _raise_failed(self, key: str) -> None:
        """Raise what an earlier batch at `key` could not open, if anything."""
        errors = self._failed.get(key)
        if errors:
            error = errors.popleft()
            if not errors:
                del self._failed[key]
            raise error

    def _check_put(self, key: str, weight: float, version: int | None) -> None:
        if type(key) is not str:
            raise self._misuse("key", key)
        if not (
            (type(weight) is float or _is_number(weight)) and 0 <= weight < math.inf
        ):
            raise self._misuse("weight", weight)
        if version is not None and not (
            _is_number(version) and version % 1 == 0 and 0 <= version < 1 << 62
        ):
            raise self._misuse("version", version)

    def _limit(self, weight: float) -> float:
        if not (_is_number(weight) and 0 < weight < math.inf):
            raise self._misuse("limit", weight)
        return weight

    def _patience_of(self, timeout_s: float | None) -> float:
        """Return the deadline of a call; None is that of the channel."""
        return self.spec.timeout_s if timeout_s is None else self._patience(timeout_s)

    def _patience(self, timeout_s: float) -> float:
        if not (_is_number(timeout_s) and timeout_s < math.inf):
            raise self._misuse("timeout_s", timeout_s)
        return timeout_s

    def _misuse(self, name: str, got: object) -> ChannelMisuse:
        return channel_errors.bad_argument(self.spec, self.owner, name, got)


def _is_number(given: object) -> bool:
    return not isinstance(given, bool) and isinstance(given, Real)
