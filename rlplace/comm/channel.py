"""The Channel contract: a bounded, keyed queue between workers, the same on every way.

::

    producers ── put ──▶ [ key "0": item item item ]  ── get ──▶ consumers
                         [ key "1": item           ]
              credits: capacity_items, capacity_bytes (over all keys)

Three endings are three different things: *closed* (no more puts; what is inside can still be taken, then EndOfStream),
*broken* (a peer died or the run was cancelled; everybody wakes with ChannelBroken at once), and a *deadline*
(ChannelTimeout).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

BatchPolicy = Literal["at_most", "at_least", "exact"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """What a channel is; fixed at its birth."""

    name: str
    capacity_items: int
    capacity_bytes: int | None = None  # None: items alone bound it
    keys: tuple[str, ...] | None = None  # declared keys; any other is an error. None: any key
    producers: int | None = None  # the stream ends when this many have left; None: only close() ends it
    timeout_s: float = 120.0  # deadline of a put or get that names none

    def __post_init__(self) -> None:
        if self.capacity_items < 1:
            raise ValueError(f"channel {self.name}: capacity_items must be at least 1, got {self.capacity_items}")


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
    waiting_producers: tuple[str, ...]  # who waits now, as "env rank 2"
    waiting_consumers: tuple[str, ...]
    depth_by_key: dict[str, int]


@runtime_checkable
class Channel(Protocol):
    """FIFO per key, any number of producers and consumers. Ends may be pickled to other workers.

    Errors: ChannelTimeout, ChannelClosed (put), EndOfStream (get), ChannelBroken; ChannelMisuse, a ValueError, for an
    undeclared key or an item larger than the capacity. `timeout_s=None` means the channel's own deadline; there is no
    infinite wait. Who waits first is served first: a `_nowait` never overtakes a waiter. A cancelled wait
    takes nothing.
    """

    @property
    def spec(self) -> ChannelSpec: ...

    def named(self, owner: str) -> Channel:
        """The same channel seen from `owner` ("env rank 2"), the name used in errors and statistics."""
        ...

    def put(self, item: Any, *, key: str = "", weight: float = 1.0, timeout_s: float | None = None) -> None:
        """Blocks until credit is granted; data moves only then."""
        ...

    def put_nowait(self, item: Any, *, key: str = "", weight: float = 1.0) -> None:
        """Raises ChannelFull instead of waiting."""
        ...

    async def put_async(
        self, item: Any, *, key: str = "", weight: float = 1.0, timeout_s: float | None = None
    ) -> None: ...

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any: ...

    def get_nowait(self, *, key: str = "") -> Any:
        """Raises ChannelEmpty instead of waiting."""
        ...

    async def get_async(self, *, key: str = "", timeout_s: float | None = None) -> Any: ...

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
