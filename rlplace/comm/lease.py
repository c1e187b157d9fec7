"""An item that was taken, and the memory it lies in: the taker's own, or lent as long as the item is used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rlplace.errors import ChannelMisuse, Problem


class OwnedLease:
    """Implements Lease for an item that is the taker's own: there is nothing to give back."""

    def __init__(self, item: Any) -> None:
        self._items = [item]

    @property
    def item(self) -> Any:
        return _still_here(self._items)

    def release(self) -> None:
        self._items.clear()

    def __enter__(self) -> OwnedLease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class SlabLease:
    """Implements Lease for an item that `decode` makes of `memory`, arrays of bytes, and that aliases them.

    `free` is called once, in whichever thread drops the last array that lies in `memory`: in `release`, or without it
    when the item is forgotten. It must take no lock. Where decode fails, `free` is called and the error travels.
    """

    def __init__(self, memory: Sequence[Any], decode: Callable[[Sequence[Any]], Any], free: Callable[[], None]) -> None:
        # an array keeps alive the buffer object it was made of, whoever made it; counting exports would miss torch's
        self._used: list[Callable[[], None] | None] = [free, *[None] * (len(memory) - 1)]
        for buffer in memory:
            assert type(buffer.base) is not type(buffer), "of a view of an array, what is made keeps that array alive"
            weakref.finalize(buffer, _drop, self._used).atexit = False
        self._items = [decode(memory)]

    @property
    def item(self) -> Any:
        return _still_here(self._items)

    def release(self) -> None:
        """Drops the item; the arrays that make this fail stay valid, and the memory goes back with the last of them."""
        self._forget()
        if self._used:
            raise ChannelMisuse(
                Problem(
                    code="lease-in-use",
                    key="lease.release()",
                    what=f"{len(self._used)} of the item's buffers are still used by arrays",
                    why="their memory is lent: the next item would be written over them",
                    fix="drop them before, or keep a copy: array.copy(), tensor.clone(); or take with get()",
                )
            )

    def __enter__(self) -> SlabLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.release()
        else:  # the frames of the exception still refer to the item; it must not be masked
            self._items.clear()

    def _forget(self) -> None:
        self._items.clear()
        if self._used:
            gc.collect()  # arrays that only a cycle refers to


def _drop(used: list[Callable[[], None] | None]) -> None:
    free = used.pop()  # atomic, so exactly one of the finalizers gets the first element
    if free is not None:
        free()


def _still_here(items: list[Any]) -> Any:
    if not items:
        raise ChannelMisuse(
            Problem(
                code="lease-released",
                key="lease.item",
                what="the lease was released",
                why="what it lent belongs to another item now",
                fix="use the item before, or take with get()",
            )
        )
    return items[0]
