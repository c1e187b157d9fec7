"""What a channel has counted: credit in use, what was admitted, who took how much, how long its users waited."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Literal

from rlplace.comm.channel import ChannelSpec, ChannelStats, Wait
from rlplace.comm.tickets import Get, Put, Reserve, reaches


@dataclasses.dataclass(slots=True, eq=False)
class Tally:
    """Owned by one ChannelQueue. Reservations count as items from the moment their credit was granted."""

    spec: ChannelSpec
    items: int = 0  # credit in use
    size_bytes: int = 0
    high_items: int = 0
    high_bytes: int = 0
    puts: int = 0
    gets: int = 0
    admitted: float = 0.0  # summed weight of all that was ever granted credit
    version: int = 0
    staleness_max: int = 0
    producer_wait_s: float = 0.0
    consumer_wait_s: float = 0.0
    producers: dict[str, None] = dataclasses.field(default_factory=dict)  # in order of appearance
    loads: dict[str, float] = dataclasses.field(default_factory=dict)  # every consumer, and the weight it has taken
    left: dict[str, None] = dataclasses.field(default_factory=dict)
    dead: dict[str, None] = dataclasses.field(default_factory=dict)

    def lacks(self, put: Put) -> Literal["admission", "credit"] | None:
        """What keeps `put` out if nobody waits before it."""
        admission, capacity_bytes = self.spec.admission, self.spec.capacity_bytes
        if admission is not None and not reaches(admission.limit(self.version), self.admitted + put.weight):
            return "admission"
        if self.items >= self.spec.capacity_items:
            return "credit"
        if capacity_bytes is not None and self.size_bytes + put.size_bytes > capacity_bytes:
            return "credit"
        return None

    def wants(self, put: Put) -> Literal["admission", "credit"]:
        """What a waiting `put` waits for; one that waits only for its turn is after credit."""
        return self.lacks(put) or "credit"

    def hold(self, entry: Put) -> None:
        self.items += 1
        self.size_bytes += entry.size_bytes
        self.high_items = max(self.high_items, self.items)
        self.high_bytes = max(self.high_bytes, self.size_bytes)

    def free(self, entry: Put) -> None:
        self.items -= 1
        self.size_bytes -= entry.size_bytes

    def take(self, getter: Get, now: float) -> None:
        """`getter` has taken its entries out."""
        self.consumer_wait_s += now - getter.since
        self.gets += len(getter.taken)
        for entry in getter.taken:
            self.free(entry)
            entry.taker = getter.owner
            self.loads[getter.owner] += entry.weight
            if entry.version is not None:
                self.staleness_max = max(self.staleness_max, self.version - entry.version)

    def restore(self, entry: Put) -> None:
        """`entry` is back, as if it had not been taken."""
        self.hold(entry)
        self.gets -= 1
        if entry.taker is not None:
            self.loads[entry.taker] -= entry.weight

    def stats(
        self,
        now: float,
        putters: Collection[Put],
        getters: Collection[Get],
        lines: Mapping[str, Collection[Put]],
        reserved: Collection[Reserve],
    ) -> ChannelStats:
        """The moment `now` of a channel with these waiters, items by key and unfilled reservations."""
        depths = {key: len(line) for key, line in lines.items()}
        for reservation in reserved:
            depths[reservation.key] = depths.get(reservation.key, 0) + 1
        versions = [e.version for entries in (*lines.values(), reserved) for e in entries if e.version is not None]
        return ChannelStats(
            depth_items=self.items,
            depth_bytes=self.size_bytes,
            high_water_items=self.high_items,
            high_water_bytes=self.high_bytes,
            puts=self.puts,
            gets=self.gets,
            producer_wait_s=self.producer_wait_s + sum(now - p.since for p in putters),
            consumer_wait_s=self.consumer_wait_s + sum(now - g.since for g in getters),
            waits=(
                *(Wait(owner=p.owner, key=p.key, wants=self.wants(p), seconds=now - p.since) for p in putters),
                *(Wait(owner=g.owner, key=g.key, wants="item", seconds=now - g.since) for g in getters),
            ),
            depth_by_key=depths,
            producers=tuple(self.producers),
            consumers=tuple(self.loads),
            dead=tuple(self.dead),
            version=self.version,
            oldest_version=min(versions, default=None),
            staleness_max=self.staleness_max,
        )
