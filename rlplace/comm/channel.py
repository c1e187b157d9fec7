"""The Channel contract: a bounded, keyed queue between workers, the same on every way.

::

    producers ── put ──▶ [ key "0": item item item ]  ── get ──▶ consumers
                         [ key "1": item           ]
              credits: capacity_items, capacity_bytes (over all keys); admission by policy version

Three endings are three different things: *closed* (no more puts; what is inside can still be taken, then EndOfStream),
*broken* (a peer died or the run was cancelled; everybody wakes with ChannelBroken at once), and a *deadline*
(ChannelTimeout).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

BatchPolicy = Literal["at_most", "at_least", "exact"]
Serving = Literal["first_come", "least_loaded"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Bounds staleness where work enters: nothing is dropped, work that would come too early waits.

    Of all that was ever put, at most `weight_per_version * (version + 1 + max_staleness)` is admitted while the policy
    is at `version` (Channel.advance). With one update per `weight_per_version`, what is consumed is then at most
    `max_staleness` versions old; 0 is exactly on-policy.
    """

    weight_per_version: float  # what one update of the policy consumes
    max_staleness: int  # in versions

    def __post_init__(self) -> None:
        if not self.weight_per_version > 0 or self.max_staleness < 0:
            raise ValueError(f"weight_per_version must be above 0 and max_staleness at least 0, got {self}")

    def limit(self, version: int) -> float:
        """Summed weight of all puts that may be admitted while the policy is at `version`."""
        return self.weight_per_version * (version + 1 + self.max_staleness)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """What a channel is; fixed at its birth."""

    name: str
    capacity_items: int
    capacity_bytes: int | None = None  # None: items alone bound it
    keys: tuple[str, ...] | None = None  # declared keys; any other is an error. None: any key
    participants: int = 1024  # names that may use it, and requests that may wait in it at a time
    producers: int | None = None  # the stream ends when this many have left; None: only close() ends it
    serving: Serving = "first_come"  # of those that wait at a key; least_loaded: who took the least weight so far
    admission: Admission | None = None  # None: any version may be put
    timeout_s: float = 120.0  # deadline of a put or get that names none

    def __post_init__(self) -> None:
        for least in ("capacity_items", "participants"):
            if getattr(self, least) < 1:
                raise ValueError(f"channel {self.name}: {least} must be at least 1, got {getattr(self, least)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Somebody who waits in a channel at this moment."""

    owner: str  # "env rank 2"
    key: str
    wants: Literal["credit", "admission", "item"]
    seconds: float  # so far


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """A moment of a channel. Counts are since birth."""

    depth_items: int
    depth_bytes: int
    high_water_items: int
    high_water_bytes: int
    puts: int
    gets: int
    producer_wait_s: float  # summed time puts waited for credit
    consumer_wait_s: float  # summed time gets waited for items
    waits: tuple[Wait, ...]  # puts in the order they will be granted, then gets by key
    depth_by_key: dict[str, int]
    producers: tuple[str, ...] = ()  # everyone who ever put, in order of appearance
    consumers: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()  # of these, whose process is known to have ended
    version: int = 0  # of `advance`
    oldest_version: int | None = None  # of the versions that were given with the items inside
    staleness_max: int = 0  # largest `version - item's version` at which an item was taken

    @property
    def waiting_producers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants != "item")

    @property
    def waiting_consumers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants == "item")


class Lease(Protocol):
    """An item whose arrays may lie in memory that is lent to this end alone until `release`.

    Writing into the arrays is allowed and seen by nobody. `with channel.get_lease() as lease: use(lease.item)` gives
    the memory back at the end of the block.
    """

    @property
    def item(self) -> Any: ...

    def release(self) -> None:
        """Gives the memory back. Idempotent. ChannelMisuse while an array of the item is referred to elsewhere."""
        ...

    def __enter__(self) -> Lease: ...

    def __exit__(self, kind: type[BaseException] | None, /, *rest: object) -> None: ...


@runtime_checkable
class Channel(Protocol):
    """FIFO per key, any number of producers and consumers. Ends may be pickled to other workers.

    Errors: ChannelTimeout, ChannelClosed (put), EndOfStream (get), ChannelBroken; ChannelMisuse, a ValueError, for an
    undeclared key or an item larger than the capacity. `timeout_s=None` means the channel's own deadline; there is no
    infinite wait. Who waits first is served first, or with `serving="least_loaded"` who of the waiting took the least
    weight so far: a `_nowait` never overtakes a waiter. A cancelled wait takes nothing. What `get` returns is the
    caller's own and writable, except between threads of one process, where an item passes by reference.

    A process that dies holds up nobody: its waits and its unfinished puts vanish. The channel breaks only where the
    death may have left it wrong: in the middle of a change, or a producer that was counted (`spec.producers`) and had
    not left.
    """

    @property
    def spec(self) -> ChannelSpec: ...

    def named(self, owner: str) -> Channel:
        """The same channel seen from `owner` ("env rank 2"), the name used in errors and statistics."""
        ...

    def put(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Blocks until credit is granted; data moves only then. `version`: of the policy that made the item."""
        ...

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0, version: int | None = None) -> None:
        """Raises ChannelFull instead of waiting."""
        ...

    async def put_async(
        self,
        item: Any,
        *,
        key: str = "",
        weight: float = 1.0,
        version: int | None = None,
        timeout_s: float | None = None,
    ) -> None: ...

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any: ...

    def get_nowait(self, *, key: str = "") -> Any:
        """Raises ChannelEmpty instead of waiting."""
        ...

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any: ...

    def get_lease(self, *, key: str = "", timeout_s: float | None = None) -> Lease:
        """As `get`, without the copy where the way can map memory."""
        ...

    def get_batch(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]:
        """Several items at once, taken atomically, in order.

        at_most: waits for one item, then takes what is there while the summed weight stays within `weight` (the first
        always comes).
        at_least: waits until the summed weight reaches `weight`; a closed channel gives what is left.
        exact: as at_least, but the prefix must sum to `weight` exactly, else ValueError and nothing is taken.
        """
        ...

    def get_batch_nowait(self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most") -> list[Any]: ...

    async def get_batch_async(
        self, weight: float, *, key: str = "", policy: BatchPolicy = "at_most", timeout_s: float | None = None
    ) -> list[Any]: ...

    def advance(self, version: int) -> None:
        """The policy is at `version` now: puts that admission held back may go on. Never goes back."""
        ...

    def leave(self, producer: str) -> None:
        """`producer` will put no more; the last of `spec.producers` ends the stream. Leaving twice is one leaving."""
        ...

    def close(self) -> None:
        """Ends the stream now. Idempotent."""
        ...

    def break_(self, why: str) -> None:
        """Wakes everyone with ChannelBroken and drops what is inside. Idempotent; the first reason stays."""
        ...

    def stats(self) -> ChannelStats: ...
