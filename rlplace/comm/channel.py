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

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """What a channel is; fixed when it is made."""

    name: str
    capacity_items: int
    keys: tuple[str, ...] | None = None  # declared keys; any other is an error. None: any key, `participants` at most
    participants: int = 1024  # names that may use it, and requests that may wait in it at a time
    timeout_s: float = 120.0  # deadline of a put or get that names none

    def __post_init__(self) -> None:
        for least in ("capacity_items", "participants"):
            if getattr(self, least) < 1:
                raise ValueError(f"channel {self.name}: {least} must be at least 1, got {getattr(self, least)}")


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
    oldest_version: int | None = None  # of the versions that were given with the items inside
    staleness_max: int = 0  # largest (newest version put so far - version of the item) when an item was taken

    @property
    def waiting_producers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants == "credit")

    @property
    def waiting_consumers(self) -> tuple[str, ...]:
        return tuple(wait.owner for wait in self.waits if wait.wants == "item")


@runtime_checkable
class Channel(Protocol):
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

    def get(self, *, key: str = "", timeout_s: float | None = None) -> Any: ...

    def get_nowait(self, *, key: str = "") -> Any:
        """Raises ChannelEmpty instead of waiting."""
        ...

    def get_batch(self, weight: float, *, key: str = "", timeout_s: float | None = None) -> list[Any]:
        """Wait for one item, then take what is there while the summed weight stays within `weight`, atomically.

        The first item always comes, whatever it weighs.
        """
        ...

    def get_batch_nowait(self, weight: float, *, key: str = "") -> list[Any]: ...

    def close(self) -> None:
        """End the stream. Puts that wait fail. Idempotent."""
        ...

    def break_(self, why: str) -> None:
        """End every wait with ChannelBroken and drop what is inside. Idempotent; the first reason stays."""
        ...

    def stats(self) -> ChannelStats: ...
