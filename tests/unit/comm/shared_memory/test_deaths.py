"""Processes that are killed at every possible moment: none hangs, and the others get what the contract promises."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.comm import ends
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.shared_memory.arena import Arena
from rlplace.comm.shared_memory.channel import SharedChannel
from rlplace.comm.table import CHANGING, ITEMS
from rlplace.errors import (
    ChannelBroken,
    ChannelEmpty,
    ChannelFull,
    ChannelTimeout,
    EndOfStream,
)
from tests.channel_peer import PATIENCE_S, held_bytes, until

LARGE = np.zeros(3000)  # too large for an entry


class FatalWords:
    """The words of a channel, whose `last`-th store is the end of the process."""

    def __init__(self, words: memoryview, last: int) -> None:
        self._words = words
        self._left = last

    def __getitem__(self, place: int) -> int:
        return int(self._words[place])

    def __setitem__(self, place: int, value: int) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._words[place] = value


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "TICK_S", 0.05)
    monkeypatch.setattr(ends, "LOOK_S", 0.05)


def end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def test_a_killed_consumer_loses_nothing(
    make: Callable, start: Callable[..., BaseProcess]
) -> None:
    channel = make()
    consumer = start(channel.named("rollout rank 0").get)
    until(channel, lambda s: s.waiting_consumers == ("rollout rank 0",))
    os.kill(consumer.pid, signal.SIGSTOP)  # it cannot take what it is woken for
    channel.put("a")
    end(consumer)
    assert (
        channel.named("rollout rank 1").get() == "a"
    )  # waits behind the dead, until a process looks
    assert until(channel, lambda s: not s.waits).dead == ("rollout rank 0",)


def test_a_killed_producer_leaves_the_line(
    make: Callable, start: Callable[..., BaseProcess]
) -> None:
    channel = make(capacity_items=1)
    channel.put("first")
    producer = start(channel.named("env rank 3").put, "never")
    until(channel, lambda s: s.waiting_producers == ("env rank 3",))
    os.kill(producer.pid, signal.SIGSTOP)
    assert channel.get() == "first"
    end(producer)
    channel.put("second")
    assert channel.get() == "second"


def stops_between(channel: SharedChannel) -> None:
    """Takes credit for a large item and never delivers it."""
    channel._attachment.store.write = lambda *_: signal.pause()
    channel.put(np.zeros(100_000))


def test_the_credit_of_an_unfinished_put_comes_back(
    make: Callable, start: Callable[..., BaseProcess]
) -> None:
    channel = make(capacity_items=1)
    producer = start(stops_between, channel.named("env rank 1"))
    assert until(channel, lambda s: s.depth_items == 1).puts == 0
    end(producer)
    channel.put("credit")
    assert channel.get() == "credit"
    assert channel.stats().depth_items == 0


def dies_at(
    channel: SharedChannel, store: int, work: Callable[[SharedChannel], Any]
) -> None:
    attachment = channel._attachment
    words = FatalWords(attachment.table.words, store)
    attachment.table.words = attachment.queue.words = (
        channel._attachment.store._words
    ) = words
    work(channel)


def put_and_get(channel: SharedChannel) -> None:
    channel.put("x" * 1000, key="other")
    channel.put(LARGE, key="other")
    channel.get()


def test_a_death_in_the_middle_of_a_change_breaks_the_channel_and_nothing_else(
    tmp_path: Path, start: Callable[..., BaseProcess]
) -> None:
    broken = whole = 0
    for store in range(200):
        spec = ChannelSpec(name=f"test {store}", capacity_items=4, timeout_s=PATIENCE_S)
        channel = SharedChannel.create(tmp_path, spec)
        channel.put(LARGE)
        victim = start(dies_at, channel.named("env rank 2"), store, put_and_get)
        victim.join()
        try:
            channel.put("mine", key="mine")
            assert channel.get(key="mine") == "mine"
        except ChannelBroken as error:
            unnamed = f"process {victim.pid} died"  # it had no name yet
            broken += "env rank 2 died" in str(error) or unnamed in str(error)
        else:  # between two changes
            stats = channel.stats()
            assert stats.depth_items == sum(stats.depth_by_key.values())
            whole += 1
        channel.destroy()
        channel.detach()
        if victim.exitcode == 0:
            break
    assert (
        victim.exitcode == 0
    )  # it outlived its work: every store was the last of a process
    assert broken > 10
    assert whole >= 2


def stops_in_a_change(channel: SharedChannel) -> None:
    channel._attachment.run(os.kill, os.getpid(), signal.SIGSTOP)


def test_a_stopped_process_in_a_change_is_named(
    make: Callable, start: Callable[..., BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = make()
    monkeypatch.setattr(ends, "LOCK_PATIENCE_S", 0.02)
    stopped = start(stops_in_a_change, channel)
    assert stopped.pid is not None
    while b") T " not in Path(f"/proc/{stopped.pid}/stat").read_bytes():
        pass
    with pytest.raises(
        ChannelTimeout, match=f"process {stopped.pid} is in the middle of a change"
    ):
        channel.put_nowait("a")
    os.kill(stopped.pid, signal.SIGCONT)
    stopped.join()
    channel.put("a")
    assert channel.get() == "a"


def dies_with_a_segment(channel: SharedChannel) -> None:
    """Between writing a large item and putting it into its line."""
    write = channel._attachment.store.write

    def write_and_die(packed: Any) -> Any:
        write(packed)
        os.kill(os.getpid(), signal.SIGKILL)

    channel._attachment.store.write = write_and_die
    channel.put(LARGE)


def test_a_segment_whose_producer_died_before_it_was_in_line_is_used_again(
    make: Callable,
    start: Callable[..., BaseProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlplace.comm.shared_memory.arena._LOOK_S", 0.0)
    channel = make()
    start(dies_with_a_segment, channel.named("env rank 1")).join()
    arena = Arena(tmp_path)
    in_use, idle = held_bytes(arena)
    assert (in_use > 0, idle) == (True, 0)
    channel.put(LARGE)  # finds no free segment: it looks for what the dead have left
    assert held_bytes(arena) == (in_use, 0)
    assert channel.get().nbytes == LARGE.nbytes
    assert held_bytes(arena) == (0, in_use)


def test_a_stopped_process_that_waits_holds_up_no_other(
    make: Callable, start: Callable[..., BaseProcess]
) -> None:
    channel = make(capacity_items=1)
    channel.put("first")
    producer = start(channel.named("env rank 3").put, "late")
    until(channel, lambda s: s.waiting_producers == ("env rank 3",))
    os.kill(producer.pid, signal.SIGSTOP)
    assert channel.get() == "first"
    for i in range(3):  # the channel is empty, and the stopped one is first in line
        channel.put(i, timeout_s=5.0)
        assert channel.get(timeout_s=5.0) == i
    os.kill(producer.pid, signal.SIGCONT)
    assert channel.get() == "late"


def stops_with_credit(channel: SharedChannel) -> None:
    """Takes credit for a small item and stays."""
    channel._attachment.store.write = lambda *_: signal.pause()
    channel.put(LARGE)


@pytest.mark.parametrize("polls", [0.0, 0.01, None])
def test_puts_with_short_deadlines_find_the_dead(
    make: Callable,
    start: Callable[..., BaseProcess],
    monkeypatch: pytest.MonkeyPatch,
    polls: float | None,
) -> None:
    """The deadline of each call is shorter than the time between two looks."""
    monkeypatch.setattr(ends, "LOOK_S", 0.5)
    channel = make(capacity_items=1)
    producer = start(stops_with_credit, channel.named("env rank 1"))
    until_held(channel)
    end(producer)
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            if polls is None:
                channel.put_nowait("a")
            else:
                channel.put("a", timeout_s=polls)
            break
        except (ChannelTimeout, ChannelFull):
            pass
    else:
        pytest.fail("the credit of the dead never came back")
    assert channel.get() == "a"


@pytest.mark.parametrize("polls", [0.01, None])
def test_gets_with_short_deadlines_see_the_end_after_a_death(
    make: Callable,
    start: Callable[..., BaseProcess],
    monkeypatch: pytest.MonkeyPatch,
    polls: float | None,
) -> None:
    monkeypatch.setattr(ends, "LOOK_S", 0.5)
    channel = make()
    producer = start(stops_with_credit, channel.named("env rank 1"))
    until_held(channel)
    end(producer)
    channel.close()
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            if polls is None:
                channel.get_nowait()
            else:
                channel.get(timeout_s=polls)
        except EndOfStream:
            return
        except (ChannelTimeout, ChannelEmpty):
            pass
    pytest.fail("the stream never ended")


def until_held(channel: SharedChannel) -> None:
    """Wait until another process has taken credit and has left the queue, without a look for the dead.

    A process that is killed in the middle of a change breaks the channel, which is another case.
    """
    words = channel._attachment.table.words
    while not words[ITEMS] or words[CHANGING]:
        pass
