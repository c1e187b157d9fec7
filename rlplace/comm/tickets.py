"""What a producer or consumer asks of a channel's queue, and how many items satisfy it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rlplace.comm.channel import BatchPolicy
from rlplace.errors import ChannelError


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """One request until it is settled. The queue writes the outcome; `wake` belongs to whoever drives the queue."""

    owner: str
    key: str
    since: float = 0.0  # when it arrived, on the driver's clock
    settled: bool = False
    error: ChannelError | None = None
    wake: Callable[[], None] | None = None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Put(Ticket):
    """An item that asks for credit; once granted it is itself the entry in the key's line."""

    size_bytes: int
    weight: float = 1.0
    version: int | None = None  # of the policy that made the item
    item: Any = None
    taker: str | None = None  # who has taken it out


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Reserve(Put):
    """Credit for an item that is not here yet; `ChannelQueue.fill` puts it in its line."""


class Weighed(Protocol):
    """All that a batch policy sees of an item."""

    @property
    def weight(self) -> float: ...


class Line(Protocol):
    """The items of a key, oldest first."""

    def __iter__(self) -> Iterator[Weighed]: ...

    def __len__(self) -> int: ...


class NeverExact(Exception):
    """The items in order sum to these weights and can no longer sum to the one that was asked for."""

    def __init__(self, sums: Sequence[float]) -> None:
        super().__init__(sums)
        self.sums = tuple(sums)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Get(Ticket):
    """Asks for one item."""

    taken: list[Put] = dataclasses.field(default_factory=list)

    def count(self, line: Line, ended: bool) -> int:
        """How many of the head of `line` (never empty) to take now; 0 waits for more. `ended`: nothing will follow."""
        return 1


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class GetBatch(Get):
    """Asks for several items at once. `count` raises NeverExact where the policy is exact and the items cannot be."""

    weight: float
    policy: BatchPolicy = "at_most"

    def count(self, line: Line, ended: bool) -> int:
        return _COUNTS[self.policy](self.weight, line, ended)


def _at_most(weight: float, line: Line, ended: bool) -> int:
    total, count = 0.0, 0
    for entry in line:
        total += entry.weight
        if count and not reaches(weight, total):
            break
        count += 1
    return count


def _at_least(weight: float, line: Line, ended: bool) -> int:
    total = 0.0
    for count, entry in enumerate(line, start=1):
        total += entry.weight
        if reaches(total, weight):
            return count
    return len(line) if ended else 0


def _exact(weight: float, line: Line, ended: bool) -> int:
    sums: list[float] = []
    for count, entry in enumerate(line, start=1):
        sums.append((sums[-1] if sums else 0.0) + entry.weight)
        if reaches(sums[-1], weight):
            if reaches(weight, sums[-1]):
                return count
            raise NeverExact(sums)
    if ended:
        raise NeverExact(sums)
    return 0


def reaches(total: float, weight: float) -> bool:
    """Whether a summed weight is at least `weight`, up to rounding: ten times 0.1 reaches 1.0."""
    return total >= weight or math.isclose(total, weight, rel_tol=1e-9)


_COUNTS: dict[BatchPolicy, Callable[[float, Line, bool], int]] = {
    "at_most": _at_most,
    "at_least": _at_least,
    "exact": _exact,
}
