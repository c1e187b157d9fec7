"""The sleep of a generation engine: what of it is on the accelerators, which orders are legal, what each one freed.

::

    AWAKE ── drop cache ──▶ WEIGHTS_ONLY ── sleep 1 ──▶ LEVEL_1   weights go to the host and come back
          ◀── wake cache ──              ── sleep 2 ──▶ LEVEL_2   weights are dropped: a sync must bring new ones
                                         ◀── wake weights ── either

The schedule knows residencies; the config says which level OFF means. A move walks the chain one order at a time, so
that no order can be given in a state that does not know it.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from rlplace.placement.schedule import Residency

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

WEIGHTS, KV_CACHE = "engine weights", "KV cache"  # labels of the device's account

Level = Literal[1, 2]


class Sleep(enum.Enum):
    AWAKE = Residency.FULL, 0
    WEIGHTS_ONLY = Residency.WEIGHTS, 0
    LEVEL_1 = Residency.OFF, 1
    LEVEL_2 = Residency.OFF, 2

    @property
    def residency(self) -> Residency:
        return self.value[0]


class Order(enum.Enum):
    WAKE_WEIGHTS = "wake weights"
    WAKE_CACHE = "wake cache"
    DROP_CACHE = "drop cache"
    SLEEP_1 = "sleep at level 1"
    SLEEP_2 = "sleep at level 2"


LEGAL: Mapping[tuple[Sleep, Order], Sleep] = {
    (Sleep.AWAKE, Order.DROP_CACHE): Sleep.WEIGHTS_ONLY,
    (Sleep.WEIGHTS_ONLY, Order.WAKE_CACHE): Sleep.AWAKE,
    (Sleep.WEIGHTS_ONLY, Order.SLEEP_1): Sleep.LEVEL_1,
    (Sleep.WEIGHTS_ONLY, Order.SLEEP_2): Sleep.LEVEL_2,
    (Sleep.LEVEL_1, Order.WAKE_WEIGHTS): Sleep.WEIGHTS_ONLY,
    (Sleep.LEVEL_2, Order.WAKE_WEIGHTS): Sleep.WEIGHTS_ONLY,
}


def orders(state: Sleep, to: Residency, level: Level) -> Iterator[Order]:
    """What brings an engine from `state` to `to`; nothing when it is there, at whichever level."""
    while state.residency != to:
        order = _next(state, to, level)
        yield order
        state = LEGAL[state, order]


def _next(state: Sleep, to: Residency, level: Level) -> Order:
    if state is Sleep.AWAKE:
        return Order.DROP_CACHE
    if state is not Sleep.WEIGHTS_ONLY:
        return Order.WAKE_WEIGHTS
    if to is Residency.FULL:
        return Order.WAKE_CACHE
    return Order.SLEEP_1 if level == 1 else Order.SLEEP_2


class EngineMemory(Protocol):
    """What carries the orders out on one platform. All bytes are measured, the largest of the engine's accelerators."""

    def obey(self, order: Order) -> None: ...

    def weight_bytes(self) -> int: ...

    def cache_bytes(self) -> int: ...

    def held_bytes(self) -> int:
        """All that is on the accelerator, also what no order frees: the residue of a sleep."""
        ...

    def host_bytes(self) -> int:
        """Copies held on the host."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    """What a move did, measured."""

    before: Residency
    after: Residency
    held_bytes: int  # on each accelerator now; after a sleep, its residue
    freed_bytes: int  # negative when it woke
    seconds: float

    def __str__(self) -> str:
        change = f"freed {self.freed_bytes:,}" if self.freed_bytes >= 0 else f"took {-self.freed_bytes:,}"
        return (
            f"engine {self.before.word} -> {self.after.word}: {change} bytes in {self.seconds:.3f} s, "
            f"{self.held_bytes:,} are held"
        )


class Sleeper:
    """Owns the state of one engine that was just built, so is awake, with weights that mean nothing.

    The device's account follows: room is asked for before it is taken, and given back after it was freed.
    """

    def __init__(self, memory: EngineMemory, device: Device, level: Level) -> None:
        self._memory = memory
        self._device = device
        self._level = level
        self._sizes = {WEIGHTS: memory.weight_bytes(), KV_CACHE: memory.cache_bytes()}
        self.state = Sleep.AWAKE

    def fall_asleep(self) -> None:
        """Off, before anybody loaded weights: there is nothing to copy at whichever level."""
        for order in (Order.DROP_CACHE, Order.SLEEP_2):
            self._memory.obey(order)
            self.state = LEGAL[self.state, order]

    def move(self, to: Residency) -> SleepReport:
        """Raises AcceleratorOutOfMemory; then the state is the last one that was reached, and can be moved again."""
        began, before, held = time.perf_counter(), self.state.residency, self._memory.held_bytes()
        for order in orders(self.state, to, self._level):
            self._follow(order)
        now = self._memory.held_bytes()
        return SleepReport(
            before=before,
            after=to,
            held_bytes=now,
            freed_bytes=held - now,
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        """Gives everything back to the account, after the engine is gone."""
        for label in self._sizes:
            self._device.release(label)
        self.state = Sleep.LEVEL_2

    def _follow(self, order: Order) -> None:
        after = LEGAL[self.state, order]  # a KeyError is our own bug
        label = KV_CACHE if order in (Order.WAKE_CACHE, Order.DROP_CACHE) else WEIGHTS
        if after.residency > self.state.residency:
            self._device.acquire(self._sizes[label], label)
            self._memory.obey(order)
        else:
            self._memory.obey(order)
            self._device.release(label)
        self.state = after
