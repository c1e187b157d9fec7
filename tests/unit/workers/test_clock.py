"""The driver's clock: which calls end a wait for one of several groups of calls."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from rlplace.foresight.ranks import LogicalClock, SimulatedCall
from rlplace.foresight.world import World
from rlplace.placement.language.slots import Slot
from rlplace.workers.launch.clock import Clock
from rlplace.workers.launch.group import Call, Pending, WorkerGroup

GROUP = cast(WorkerGroup, None)
PATIENCE_S = 0.05


def slot(rank: int) -> Slot:
    return Slot(
        component="actor",
        rank=rank,
        node=0,
        local_rank=rank,
        accelerators=(),
        local_accelerators=(),
    )


def pending(count: int, kind: type[Call] = Call) -> Pending:
    return Pending(GROUP, [kind(slot(rank), "learn") for rank in range(count)])


def test_a_wait_for_one_of_several_ends_when_all_calls_of_one_have_ended() -> None:
    first = pending(2)
    second = pending(2)
    first.calls[0].set_result(None)
    second.calls[0].set_result(None)
    assert not Clock().wait_any([first, second], PATIENCE_S)
    later = threading.Timer(PATIENCE_S, second.calls[1].set_result, [None])
    later.start()
    assert Clock().wait_any([first, second], 60.0)
    later.join()
    assert second.done()
    assert not first.done()


def test_a_wait_for_one_of_several_ends_when_a_call_fails() -> None:
    first = pending(2)
    first.calls[1].set_exception(ValueError("no more memory"))
    assert Clock().wait_any([first, pending(1)], 60.0)
    assert first.failed()
    assert not first.done()


@pytest.mark.parametrize("ranks", [2, 50])
def test_a_simulated_wait_goes_on_until_all_calls_of_one_have_ended(ranks: int) -> None:
    world = World()
    clock = LogicalClock(world)
    first = pending(ranks, SimulatedCall)
    second = pending(1, SimulatedCall)
    for at, call in enumerate(first.calls):
        world.at(at + 1.0, call.set_result, None)
    world.at(ranks + 7.0, second.calls[0].set_result, None)
    assert clock.wait_any([first, second], 1000.0)
    assert clock.now() == ranks
    assert clock.wait_any([first], 1000.0)
    assert clock.now() == ranks
    assert not clock.wait_any([second], 3.0)
    clock.wait_all([first, second], 1000.0)
    assert clock.now() == ranks + 7.0
