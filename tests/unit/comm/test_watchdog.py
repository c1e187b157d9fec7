"""The watchdog over real channels of this process: what it says, and when it keeps quiet."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.local import LocalChannel
from rlplace.comm.watchdog import Watchdog

PATIENCE_S = 60.0
Start = Callable[..., Future[Any]]


@pytest.fixture
def channels() -> dict[str, LocalChannel]:
    return {
        name: LocalChannel(ChannelSpec(name=name, capacity_items=2, timeout_s=PATIENCE_S))
        for name in ("observations", "actions")
    }


@pytest.fixture
def start(channels: dict[str, LocalChannel]) -> Iterator[Start]:
    with ThreadPoolExecutor(max_workers=4) as threads:
        yield threads.submit
        for channel in channels.values():
            channel.break_("the test is over")


def both_have_met(channels: dict[str, LocalChannel]) -> tuple[LocalChannel, LocalChannel]:
    """The end of env at the actions and that of rollout at the observations, once each has put something there."""
    for channel, producer, consumer in (("observations", "env", "rollout"), ("actions", "rollout", "env")):
        channels[channel].named(f"{producer} rank 0").put(0)
        channels[channel].named(f"{consumer} rank 0").get()
    return channels["actions"].named("env rank 0"), channels["observations"].named("rollout rank 0")


def wait_for(channels: dict[str, LocalChannel], name: str) -> None:
    while not channels[name].stats().waits:
        pass


def test_a_deadlock_is_said_once_with_its_circle(channels: dict[str, LocalChannel], start: Start) -> None:
    actions, observations = both_have_met(channels)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    start(actions.get)
    start(observations.get)
    with Watchdog(channels, stall_s=0.02, say=said.put):
        text = said.get(timeout=PATIENCE_S)
        while "deadlock" not in text:  # the second may not have begun to wait at the first look
            text = said.get(timeout=PATIENCE_S)
    assert "deadlock: env rank 0 -> rollout rank 0 -> env rank 0" in text
    assert "env rank 0: " in text
    assert "s for an item, from rollout rank 0" in text
    assert said.empty()


def test_a_slow_peer_is_named_and_said_again_only_after_it_moved(
    channels: dict[str, LocalChannel], start: Start
) -> None:
    actions, _ = both_have_met(channels)
    dog, rollout = Watchdog(channels, stall_s=30), channels["actions"].named("rollout rank 0")
    for begin in (0.0, 1000.0):
        assert dog.look(begin) is None
        taken = start(actions.get)
        wait_for(channels, "actions")
        assert dog.look(begin + 29) is None
        text = dog.look(begin + 30)
        assert text is not None
        assert "slow, busy or gone: rollout rank 0" in text
        assert dog.look(begin + 60) is None
        rollout.put("late")
        assert taken.result(PATIENCE_S) == "late"
        assert dog.look(begin + 61) is None


def test_an_idle_job_and_a_busy_one_say_nothing(channels: dict[str, LocalChannel], start: Start) -> None:
    actions, _ = both_have_met(channels)
    dog = Watchdog(channels, stall_s=10)
    assert [dog.look(now) for now in (0.0, 10.0, 1000.0)] == [None, None, None]
    for now in range(1000, 1050, 5):  # somebody waits at every look, but never in vain
        taken = start(actions.get)
        wait_for(channels, "actions")
        assert dog.look(float(now)) is None
        channels["actions"].named("rollout rank 0").put("item")
        taken.result(PATIENCE_S)


def test_a_deadlock_beside_a_channel_that_moves_is_found(channels: dict[str, LocalChannel], start: Start) -> None:
    actions, observations = both_have_met(channels)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    start(functools.partial(actions.get, key="0"))
    start(functools.partial(observations.get, key="0"))
    with Watchdog(channels, stall_s=0.02, say=said.put):
        text = ""
        while "deadlock" not in text:  # the other keys of both channels are never still
            for channel, producer, consumer in (("observations", "env", "rollout"), ("actions", "rollout", "env")):
                channels[channel].named(f"{producer} rank 0").put(0, key="1")
                channels[channel].named(f"{consumer} rank 0").get(key="1")
            text = "" if said.empty() else said.get()
    assert "deadlock: env rank 0 -> rollout rank 0 -> env rank 0" in text


def test_channels_that_are_gone_are_not_watched(channels: dict[str, LocalChannel]) -> None:
    channels["actions"].break_("over")
    assert Watchdog(channels, stall_s=1).look(0.0) is None


def test_a_stall_has_a_length(channels: dict[str, LocalChannel]) -> None:
    with pytest.raises(ValueError, match="stall_s"):
        Watchdog(channels, stall_s=0)
