"""The sleep of a vLLM engine: legal orders, the account of its accelerators, and how each platform frees memory."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlplace.placement.schedule import Residency
from rlplace.workers.engines.vllm_memory import (
    KV_CACHE,
    LEGAL,
    WEIGHTS,
    CpuMemory,
    CudaMemory,
    Level,
    Order,
    Sleep,
    Sleeper,
    SleepReport,
    orders,
)
from tests.rollout_stage import Ledger

OFF, WEIGHTS_ONLY, FULL = Residency.OFF, Residency.WEIGHTS, Residency.FULL
WEIGHT_BYTES, CACHE_BYTES, RESIDUE = 1000, 300, 7


class Memory:
    """An engine's memory that writes down its orders, and what the account held when each one came."""

    def __init__(self, device: Ledger) -> None:
        self.device = device
        self.state = Sleep.AWAKE
        self.log: list[tuple[Order, dict[str, int]]] = []

    def carry_out(self, order: Order) -> None:
        self.log.append((order, dict(self.device.held)))
        self.state = LEGAL[self.state, order]

    def weight_bytes(self) -> int:
        return WEIGHT_BYTES if self.state.residency >= WEIGHTS_ONLY else 0

    def cache_bytes(self) -> int:
        return CACHE_BYTES if self.state is Sleep.AWAKE else 0

    def held_bytes(self) -> int:
        return self.weight_bytes() + self.cache_bytes() + RESIDUE

    def host_bytes(self) -> int:
        return WEIGHT_BYTES if self.state is Sleep.LEVEL_1 else 0


def asleep(level: Level = 2, limit: int | None = None) -> tuple[Sleeper, Memory]:
    """A sleeper as an engine has it after it was built."""
    memory = Memory(Ledger(limit))
    sleeper = Sleeper(memory, memory.device, level)
    sleeper.fall_asleep()
    memory.log.clear()
    return sleeper, memory


def test_every_order_is_legal_where_it_can_be_carried_out_and_nowhere_else() -> None:
    assert {(state.name, order.name): after.name for (state, order), after in LEGAL.items()} == {
        ("AWAKE", "DROP_CACHE"): "WEIGHTS_ONLY",
        ("WEIGHTS_ONLY", "WAKE_CACHE"): "AWAKE",
        ("WEIGHTS_ONLY", "SLEEP_1"): "LEVEL_1",
        ("WEIGHTS_ONLY", "SLEEP_2"): "LEVEL_2",
        ("LEVEL_1", "WAKE_WEIGHTS"): "WEIGHTS_ONLY",
        ("LEVEL_2", "WAKE_WEIGHTS"): "WEIGHTS_ONLY",
    }


@pytest.mark.parametrize(("state", "to", "level"), [*itertools.product(Sleep, Residency, (1, 2))])
def test_from_everywhere_to_everywhere_by_legal_orders(state: Sleep, to: Residency, level: Level) -> None:
    given = list(orders(state, to, level))
    assert bool(given) == (state.residency != to)
    for order in given:
        state = LEGAL[state, order]
    assert state.residency == to
    if given and to is OFF:
        assert state is (Sleep.LEVEL_1 if level == 1 else Sleep.LEVEL_2)


def test_a_new_engine_falls_asleep_without_copying_what_means_nothing() -> None:
    memory = Memory(Ledger())
    sleeper = Sleeper(memory, memory.device, 1)
    assert sleeper.state is Sleep.AWAKE
    sleeper.fall_asleep()
    assert [order for order, _ in memory.log] == [Order.DROP_CACHE, Order.SLEEP_2]
    assert sleeper.state is Sleep.LEVEL_2
    assert memory.device.held == {}


def test_room_is_asked_for_before_it_is_taken_and_given_back_after_it_is_free() -> None:
    sleeper, memory = asleep()
    sleeper.move(FULL)
    sleeper.move(OFF)
    both = {WEIGHTS: WEIGHT_BYTES, KV_CACHE: CACHE_BYTES}
    assert memory.log == [
        (Order.WAKE_WEIGHTS, {WEIGHTS: WEIGHT_BYTES}),
        (Order.WAKE_CACHE, both),
        (Order.DROP_CACHE, both),
        (Order.SLEEP_2, {WEIGHTS: WEIGHT_BYTES}),
    ]
    assert memory.device.held == {}


def test_a_move_reports_what_it_freed_and_what_stays() -> None:
    sleeper, _ = asleep(level=1)
    woke = sleeper.move(FULL)
    assert (woke.before, woke.after, woke.freed_bytes) == (OFF, FULL, -(WEIGHT_BYTES + CACHE_BYTES))
    assert woke.held_bytes == WEIGHT_BYTES + CACHE_BYTES + RESIDUE
    slept = sleeper.move(OFF)
    assert (slept.freed_bytes, slept.held_bytes) == (WEIGHT_BYTES + CACHE_BYTES, RESIDUE)
    assert sleeper.state is Sleep.LEVEL_1
    assert sleeper.move(OFF).freed_bytes == 0


def test_what_does_not_fit_leaves_the_last_state_that_was_reached() -> None:
    sleeper, memory = asleep(limit=WEIGHT_BYTES + CACHE_BYTES - 1)
    with pytest.raises(MemoryError):
        sleeper.move(FULL)
    assert sleeper.state is Sleep.WEIGHTS_ONLY
    assert memory.device.held == {WEIGHTS: WEIGHT_BYTES}
    memory.device.limit = None
    assert sleeper.move(FULL).after is FULL
    assert [order for order, _ in memory.log] == [Order.WAKE_WEIGHTS, Order.WAKE_CACHE]


def test_closing_gives_everything_back() -> None:
    sleeper, memory = asleep()
    sleeper.move(FULL)
    sleeper.close()
    assert memory.device.held == {}


def test_a_report_reads_well() -> None:
    report = SleepReport(before=FULL, after=OFF, held_bytes=7, freed_bytes=1300, seconds=0.25)
    assert str(report) == "engine full -> off: freed 1,300 bytes in 0.250 s, 7 are held"
    report = SleepReport(before=OFF, after=FULL, held_bytes=1307, freed_bytes=-1300, seconds=0.25)
    assert str(report) == "engine off -> full: took 1,300 bytes in 0.250 s, 1,307 are held"


# ── platforms ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Gpu:
    """Writes down what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def collective_rpc(self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()) -> list[Any]:
        raise AssertionError("nothing is asked of the workers themselves")

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def release_kv_cache_memory(self) -> None:
        self.calls.append(("release_kv_cache_memory",))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", *(tags or ())))
        return True


@pytest.mark.parametrize(
    ("order", "calls"),
    [
        (Order.DROP_CACHE, [("sleep", 0), ("release_kv_cache_memory",)]),
        (Order.SLEEP_1, [("sleep", 1)]),
        (Order.SLEEP_2, [("sleep", 2)]),
        (Order.WAKE_WEIGHTS, [("wake_up", "weights")]),
        (Order.WAKE_CACHE, [("wake_up", "kv_cache")]),
    ],
)
def test_on_a_gpu_orders_are_vllms_own(order: Order, calls: list[tuple[object, ...]]) -> None:
    gpu = Gpu()
    CudaMemory(gpu).carry_out(order)
    assert gpu.calls == calls


class Packed(nn.Linear):
    """A linear layer whose product is a function of its own, as vLLM makes it on a CPU."""

    def __init__(self) -> None:
        super().__init__(4, 3, bias=False)
        self.cpu_linear: Any = nn.functional.linear


class Cpu(Gpu):
    """One worker: two layers with views of one cache of 4 KiB, and a model of 12 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()
        whole = torch.ones(1024)
        self.caches = [whole[:512].view(8, 64), whole[512:].view(8, 64)]
        runner = types.SimpleNamespace(kv_caches=self.caches, get_model=lambda: self.model)
        self.worker = types.SimpleNamespace(model_runner=runner)

    def collective_rpc(self, method: Callable[..., Any], /, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return [method(self.worker, *args)]


def test_the_cache_is_emptied_in_place_and_comes_back_as_zeros() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    assert memory.cache_bytes() == 4096
    memory.carry_out(Order.DROP_CACHE)
    assert memory.cache_bytes() == 0
    memory.carry_out(Order.WAKE_CACHE)
    assert memory.cache_bytes() == 4096
    assert [int(cache.count_nonzero()) for cache in cpu.caches] == [0, 0]
    cpu.caches[1].fill_(1)
    assert int(cpu.caches[0].count_nonzero()) == 0


def test_at_level_2_weights_and_what_was_packed_of_them_are_dropped() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    memory.carry_out(Order.SLEEP_2)
    assert cpu.model.cpu_linear is None
    assert cpu.model.weight.untyped_storage().nbytes() == 0
    memory.carry_out(Order.WAKE_WEIGHTS)
    assert cpu.model.cpu_linear is not None
    assert cpu.model.weight.untyped_storage().nbytes() == 48


def test_at_level_1_weights_stay_on_the_host() -> None:
    cpu = Cpu()
    memory = CpuMemory(cpu)
    before = cpu.model.weight.clone()
    memory.carry_out(Order.SLEEP_1)
    memory.carry_out(Order.WAKE_WEIGHTS)
    assert torch.equal(cpu.model.weight, before)
    assert cpu.model.cpu_linear is not None
