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
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Self

from rlplace.comm import channel_errors
from rlplace.comm.work import Lanes, Work
from rlplace.errors import ChannelMisuse

if TYPE_CHECKING:
    from rlplace.comm.network import Connection


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """Properties of a channel, which do not change after the creation of the channel.

    `capacity_items`: the most items in the channel, over all keys. `keys`: the keys that may be used; None: any keys,
    at most as many as `participants`. `participants`: the most workers that may use the channel, and the most requests
    that may wait in it at a time. `timeout_s`: deadline of a put or get that gives none. `source`, `target`: names of
    the components that put and get, or "" if no plan says so.
    """

    name: str
    capacity_items: int
    # Declared keys; any other key is an error. None: any keys, at most `participants` of them
    keys: tuple[str, ...] | None = None
    # The most workers that may use the channel, and the most requests that may wait in it at a time
    participants: int = 1024
    timeout_s: float = 120.0  # deadline of a put or get without one of its own
    source: str = ""  # component that puts, if a plan says so
    target: str = ""  # component that gets, if a plan says so

    def __post_init__(self) -> None:
        for least in ("capacity_items", "participants"):
            if getattr(self, least) < 1:
                raise ValueError(
                    f"channel {self.name}: {least} must be at least 1, got {getattr(self, least)}"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A put or get that waits in a channel at the moment of a snapshot.

    `owner`: name of the waiting worker. `wants`: "credit" (room for one more item) for a put, "item" for a get.
    `seconds`: how long the call has waited so far.
    """

    owner: str  # "env rank 2"
    key: str
    wants: Literal["credit", "item"]
    seconds: float  # so far


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """Snapshot of a channel: contents, waits, users, and counts since the channel was made.

    `depth_items`, `depth_by_key`: items in the channel now, and key -> items of the key. `high_water_items`: the most
    items so far. `producer_wait_s`, `consumer_wait_s`: summed waiting time of puts and of gets. `producers`,
    `consumers`: names of all workers that have called put, or get. `dead`: names of those workers whose processes are
    known to have ended. `bytes`: bytes of all items that were put; 0 between threads, where items are not copied.
    `staleness_max`: the largest age of an item when it was taken, in policy versions: the newest version put so far
    minus the item's version.
    """

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
    # Name -> items that it has put, and items that it has taken, since the channel was made or reset
    put_by: Mapping[str, int] = dataclasses.field(default_factory=dict)
    taken_by: Mapping[str, int] = dataclasses.field(default_factory=dict)
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
        """Return the names of the workers that could end `wait`: producers if it is a get, consumers if it is a put.

        Producers are all workers that have called `put` so far, at any key; consumers are all workers that have called
        `get`. The waiting worker is left out.
        """
        seen = self.producers if wait.wants == "item" else self.consumers
        return tuple(name for name in seen if name != wait.owner)


class Channel(abc.ABC):
    """One end of a bounded queue with keys, for any number of producers and consumers. FIFO per key. Can be pickled.

    Errors: a put into a closed channel raises ChannelClosed, a get after the last item of a closed channel raises
    EndOfStream. Any call may raise ChannelTimeout or ChannelBroken. A wrong argument raises ChannelMisuse (a
    ValueError), and does not affect other callers. `timeout_s=None` means the channel's own deadline; no call waits for
    ever.

    Order: puts and gets are served in the order in which they began to wait. A new call never overtakes a waiting call,
    unless the process of the waiting call is stopped.

    Items: an item from `get` belongs to the caller and is writable. Between threads of one process, however, items pass
    by reference. If an item cannot be unpickled, the `get` that took it raises the error. In a batch, all other items
    are returned, and the next get of this end at this key raises the error.

    If a process dies, its waits and its unfinished puts are removed within a second or two of waiting or polling, and
    other processes continue. The channel breaks only if the process dies in the middle of a change of the channel's
    state. Each item is taken once. What a process has taken when it dies is lost with it, except that a consumer on
    another node may die before its confirmation has arrived: the item is then taken once more, by another consumer.
    """

    def __init__(self, spec: ChannelSpec, owner: str = "an unnamed worker") -> None:
        self.spec = spec
        self.owner = owner
        # By key: errors of items of a batch that could not be unpickled
        self._failed: dict[str, deque[Exception]] = {}
        # Puts and gets that run in the background
        self._lanes = Lanes()

    def named(self, owner: str) -> Self:
        """Return an end of the same channel for another worker.

        `owner`: name of the worker in errors, such as "env rank 2".
        """
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
        """Put an item at the end of the line of `key`; wait for credit (free room), at most `timeout_s` seconds.

        `weight`: weight of the item; `get_batch` limits the sum of the weights in a batch. `version`: version of the
        policy that made the item; None: no version. `timeout_s`: None means the channel's deadline. The item's data is
        sent only after credit was granted.
        """
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
        """Put an item at the end of the line of `key`, but raise ChannelFull instead of waiting for free room.

        `weight`: weight of the item; `get_batch` limits the sum of the weights in a batch. `version`: version of the
        policy that made the item; None: no version.
        """
        self._check_put(key, weight, version)
        self._put(item, key, weight, version, None)

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any:
        return self._items(
            None,
            key,
            self.spec.timeout_s if timeout_s is None else self._patience(timeout_s),
        )[0]

    def get_nowait(self, *, key: str = "") -> Any:
        """Take and return the first item of `key`, but raise ChannelEmpty instead of waiting."""
        return self._items(None, key, None)[0]

    def get_batch(
        self, weight: float, *, key: str = "", timeout_s: float | None = None
    ) -> list[Any]:
        """Take and return the first items of `key` whose weights together are at most `weight`.

        At least the first item is taken, even if it weighs more than `weight`. Wait for the first item, at most
        `timeout_s` seconds (None: the channel's deadline); do not wait for further items. All items are taken in one
        atomic step.
        """
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
        """Begin a put in the background, and return the running put. The arguments mean the same as in `put`.

        To wait for the put, `await` it in an `async def`, else call its `wait()`.

        The item must not change before the put has ended. Puts of this end at one key enter the channel in the order in
        which they were begun; the deadline of a put counts from the end of the put before.
        """
        self._check_put(key, weight, version)
        patience_s = self._patience_of(timeout_s)
        return self._lanes.begin(
            ("put", key),
            lambda: self._put(item, key, weight, version, patience_s),
            lambda: self._put(item, key, weight, version, None),
        )

    def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Work:
        """Begin a get in the background, and return the running get.

        To get the item, `await` the running get in an `async def`, else call its `wait()`. `timeout_s`: the most
        seconds to wait for an item; None: the channel's deadline. Gets of this end at one key are served in the order
        in which they were begun; the deadline of a get counts from the end of the get before. If the caller never waits
        for the get, its item is lost.
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
        """Begin a `get_batch` in the background, and return the running call. The arguments are those of `get_batch`.

        To get the items, `await` the running call in an `async def`, else call its `wait()`. Calls of this end at one
        key are served in the order in which they were begun; the deadline of a call counts from the end of the call
        before. If the caller never waits for the call, its items are lost.
        """
        limit = self._limit(weight)
        patience_s = self._patience_of(timeout_s)
        return self._lanes.begin(
            ("get", key),
            lambda: self._items(limit, key, patience_s),
            lambda: self._items(limit, key, None),
        )

    def qsize(self, key: str | None = None) -> int:
        """Return the number of items in the channel now. `key`: None means all keys."""
        stats = self.stats()
        if key is None:
            return stats.depth_items
        return stats.depth_by_key.get(key, 0)

    @abc.abstractmethod
    def close(self) -> None:
        """Close the channel. Idempotent.

        Puts fail from now on, waiting puts too. Gets can still take the items that are left.
        """

    @abc.abstractmethod
    def break_(self, why: str) -> None:
        """Break the channel: end every wait with ChannelBroken and drop all items. Idempotent.

        `why`: the reason, for errors. If the channel is broken already, its first reason stays.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop all items and open the channel again, whether it was broken or not.

        Waiting puts and gets raise ChannelBroken. Only the owner of the channel may call this, after all users have
        stopped using the channel.
        """

    @abc.abstractmethod
    def stats(self) -> ChannelStats: ...

    def link(self, key: str) -> Connection | None:
        """Return the connection to the node where the items of `key` are stored, or None if it is this node."""
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
        """Put an item. `patience_s`: the most seconds to wait; None: raise ChannelFull instead of waiting."""

    @abc.abstractmethod
    def _get(
        self, limit: float | None, key: str, patience_s: float | None
    ) -> list[Any]:
        """Take and return items.

        `limit`: take a batch in which the sum of the items' weights is at most `limit`; None: take one item.
        `patience_s`: the most seconds to wait; None: raise ChannelEmpty instead of waiting.
        """

    def _open_all(
        self, payloads: Iterable[Any], open_: Callable[[Any], Any], key: str
    ) -> list[Any]:
        """Return `open_(payload)` for all payloads, except the payloads for which `open_` raises an error.

        The errors are kept and are raised by the next gets at `key`. If `open_` fails for all payloads, raise the first
        error.
        """
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
        """Raise the next error that `_open_all` has kept from an earlier batch at `key`, if there is one."""
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
        """Return the deadline of a call in seconds. `timeout_s`: None means the channel's deadline."""
        return self.spec.timeout_s if timeout_s is None else self._patience(timeout_s)

    def _patience(self, timeout_s: float) -> float:
        if not (_is_number(timeout_s) and timeout_s < math.inf):
            raise self._misuse("timeout_s", timeout_s)
        return timeout_s

    def _misuse(self, name: str, got: object) -> ChannelMisuse:
        return channel_errors.bad_argument(self.spec, self.owner, name, got)


def _is_number(given: object) -> bool:
    return not isinstance(given, bool) and isinstance(given, Real)
