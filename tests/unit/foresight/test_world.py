"""The logical clock: who computes when, who waits for whom."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rlplace.foresight.world import (
    TURN_S,
    Barrier,
    Channel,
    Cores,
    Process,
    Sleep,
    Work,
    World,
)


@pytest.fixture
def world() -> World:
    return World()


def computing(
    world: World,
    cores: Cores,
    name: str,
    seconds: float,
    log: dict[str, float],
    process: str = "",
) -> Process:
    yield Work(cores, process or name, seconds)
    log[name] = round(world.now, 6)


def ended(world: World) -> float:
    world.run(lambda: False)
    return round(world.now, 6)


def test_laps_shorter_than_a_turn_run_one_after_another_on_the_processors_there_are(
    world: World,
) -> None:
    cores, log = Cores(world, 2), dict[str, float]()
    for name, seconds in (("a", 0.001), ("b", 0.0005), ("c", 0.001), ("d", 0.0005)):
        world.spawn(computing(world, cores, name, seconds, log))
    assert ended(world) == 0.0015
    assert log == {"b": 0.0005, "a": 0.001, "c": 0.0015, "d": 0.0015}
    assert cores.busy_s == pytest.approx(0.003)


def test_several_processors_that_more_want_are_at_work_for_a_share_of_the_time(
    world: World,
) -> None:
    def process(cores: Cores, name: int) -> Process:
        for _ in range(20):
            yield Work(cores, name, 0.001)

    for count, processes, share in ((2, 6, 0.8), (2, 2, 1.0), (1, 3, 1.0)):
        cores, began = Cores(world, count, 0.8), world.now
        for name in range(processes):
            world.spawn(process(cores, name))
        seconds = ended(world) - began
        assert cores.busy_s == pytest.approx(processes * 0.020)
        assert cores.busy_s / count / seconds == pytest.approx(
            share, rel=0.03
        )  # the last ones are alone


def test_long_work_shares_a_processor_turn_by_turn(world: World) -> None:
    cores, log = Cores(world, 1), dict[str, float]()
    world.spawn(computing(world, cores, "long", 10 * TURN_S, log))
    world.spawn(computing(world, cores, "short", 2 * TURN_S, log))
    ended(world)
    assert log == {
        "short": pytest.approx(4 * TURN_S),
        "long": pytest.approx(12 * TURN_S),
    }


class TurnByTurn(Cores):
    """Processors that skip no turn."""

    def _skip_turns(self) -> None:
        """Skip nothing."""


def taking_turns(
    works: list[list[tuple[float, float]]], kind: type[Cores]
) -> tuple[list[tuple[str, float]], float]:
    """Return (process, time) for each end of its work on one processor, and the seconds in which the processor is busy.

    `works`: for each process, the pause before each piece of work, and the seconds of the work.
    """
    world = World()
    cores = kind(world, 1)
    log: list[tuple[str, float]] = []

    def thread(name: str, laps: list[tuple[float, float]]) -> Process:
        for pause_s, seconds in laps:
            yield Sleep(pause_s)
            yield Work(cores, name, seconds)
            log.append((name, world.now))

    for number, laps in enumerate(works):
        world.spawn(thread(f"p{number}", laps))
    world.run(lambda: False)
    return sorted(log), cores.busy_s


@pytest.mark.parametrize("seed", range(40))
def test_skipped_turns_end_as_if_each_was_simulated(seed: int) -> None:
    rng = random.Random(seed)
    works = [
        [(rng.choice((0.0, 0.01, 0.5)), 10 ** rng.uniform(-4, 0)) for _ in range(3)]
        for _ in range(rng.randint(2, 4))
    ]
    each, busy_s = taking_turns(works, TurnByTurn)
    skipped, busy_skipped_s = taking_turns(works, Cores)
    assert [name for name, _ in skipped] == [name for name, _ in each]
    assert [s for _, s in skipped] == pytest.approx([s for _, s in each], rel=1e-9)
    assert busy_skipped_s == pytest.approx(busy_s)


def test_who_comes_into_a_long_turn_waits_for_its_end_only(world: World) -> None:
    cores, log = Cores(world, 1), dict[str, float]()

    def late() -> Process:
        yield Sleep(1.0)
        yield from computing(world, cores, "late", 0.001, log)

    world.spawn(computing(world, cores, "long", 2.0, log))
    world.spawn(late())
    assert ended(world) == 2.001
    assert log == {"late": 1.001, "long": 2.001}


def test_threads_of_one_process_never_compute_at_once(world: World) -> None:
    cores, log = Cores(world, 4), dict[str, float]()
    for name in ("a", "b"):
        world.spawn(computing(world, cores, name, 0.001, log, process="one"))
    world.spawn(computing(world, cores, "c", 0.001, log))
    ended(world)
    assert log == {"a": 0.001, "c": 0.001, "b": 0.002}


def test_a_process_with_a_processor_of_its_own_never_waits(world: World) -> None:
    cores, log = Cores(world, 3), dict[str, float]()
    cores.give(["own", "idle"])
    for name in ("a", "b", "own"):
        world.spawn(computing(world, cores, name, 0.001, log))
    ended(world)
    assert log == {"a": 0.001, "own": 0.001, "b": 0.002}
    assert cores.busy_s == pytest.approx(0.003)


def test_items_are_put_and_taken_together(world: World) -> None:
    channel = Channel(world, 3)
    log = list[object]()

    def taker() -> Process:
        log.append((yield from channel.get()))

    world.spawn(taker())
    ended(world)
    channel.put_all([1, 2, 3])
    ended(world)
    assert channel.take_all(3) == []
    assert channel.take_all(2) == [2, 3]
    assert log == [1]
    assert channel.most == 3


def test_a_barrier_lets_all_go_with_the_last(world: World) -> None:
    barrier, log = Barrier(world, 3), list[tuple[int, float]]()

    def party(number: int) -> Process:
        for _ in range(2):
            yield Sleep(number)
            yield from barrier.meet()
            log.append((number, world.now))

    for number in (1, 2, 3):
        world.spawn(party(number))
    ended(world)
    assert sorted(log) == [(n, when) for n in (1, 2, 3) for when in (3.0, 6.0)]


def test_a_channel_holds_its_capacity_and_keeps_the_order_of_a_key(
    world: World,
) -> None:
    channel, taken = Channel(world, 2), list[tuple[Any, float]]()

    def source() -> Process:
        for item in range(5):
            yield from channel.put(item, "k")

    def sink() -> Process:
        for _ in range(5):
            yield Sleep(1.0)
            item = yield from channel.get("k")
            taken.append((item, world.now))

    world.spawn(source())
    world.spawn(sink())
    ended(world)
    assert taken == [(item, item + 1.0) for item in range(5)]
    assert channel.most == 2
    assert channel.get_nowait("k") is None


def test_a_world_in_which_nothing_is_due_says_so_and_one_that_is_late_stops_at_the_deadline(
    world: World,
) -> None:
    channel = Channel(world, 1)
    world.spawn(channel.get("nothing"))
    assert not world.run(lambda: False)

    def sleeper() -> Process:
        yield Sleep(10.0)

    world.spawn(sleeper())
    assert not world.run(lambda: False, until=4.0)
    assert world.now == 4.0
    assert not world.run(lambda: False)
    assert world.now == 10.0


def test_a_thread_with_more_to_do_keeps_its_processor_for_its_turn(
    world: World,
) -> None:
    cores, log = Cores(world, 1), dict[str, float]()

    def talkative() -> Process:
        for lap in range(6):
            yield from computing(world, cores, "many", TURN_S / 4, log)
            log[f"lap {lap}"] = round(world.now, 6)

    world.spawn(talkative())
    world.spawn(computing(world, cores, "other", TURN_S, log))
    ended(world)
    assert log["lap 3"] == TURN_S
    assert log["other"] == 2 * TURN_S
    assert log["lap 4"] == pytest.approx(2 * TURN_S + TURN_S / 4, abs=1e-6)


def test_processes_that_wait_end_where_they_are(world: World) -> None:
    ended_at = list[float]()

    def waiting(channel: Channel) -> Process:
        try:
            yield from channel.get()
        finally:
            ended_at.append(world.now)

    world.spawn(waiting(Channel(world, 1)))
    assert not world.run(lambda: False)
    assert not ended_at
    world.close()
    assert ended_at == [0.0]
