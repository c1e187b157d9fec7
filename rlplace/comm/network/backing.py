"""What a gate asks of the channel behind it beyond the contract: packed items, and promises to peers that may vanish.

A gate never opens an item: it needs nothing that items are made of, and one that cannot be opened harms its taker only.
"""

from __future__ import annotations

from typing import Protocol

from rlplace.comm.channel import BatchPolicy, Channel
from rlplace.comm.codec import Packed


class Reservation(Protocol):
    """Credit that was granted for an item whose data is still on its way. Ends with one of the two calls."""

    def fill(self, packed: Packed) -> None:
        """The item is here and stands in its line. Ignored once the channel is broken."""
        ...

    def withdraw(self) -> None:
        """It will never come; its credit is free."""
        ...


class Taking(Protocol):
    """Items that were taken for a peer that may never receive them."""

    @property
    def packed(self) -> list[Packed]: ...

    def restore(self) -> None:
        """Nobody received them: they go back to the front of their line."""
        ...


class Backing(Channel, Protocol):
    """A channel that a gate can open to other nodes. `patience_s=None` does not wait: ChannelFull, ChannelEmpty."""

    def named(self, owner: str) -> Backing: ...

    async def put_packed(
        self,
        packed: bytes,
        size_bytes: int,
        *,
        key: str,
        weight: float,
        version: int | None,
        patience_s: float | None,
    ) -> None:
        """A small item; `size_bytes` is its credit."""
        ...

    async def reserve(
        self, size_bytes: int, *, key: str, weight: float, version: int | None, patience_s: float | None
    ) -> Reservation: ...

    async def take(self, batch: tuple[float, BatchPolicy] | None, *, key: str, patience_s: float | None) -> Taking: ...

    def died(self, owner: str) -> None:
        """The process of `owner` has ended or cannot be reached any more; all that it waited for was withdrawn."""
        ...
