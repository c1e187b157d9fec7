"""A channel in several branches: what goes by key, what reaches all of them, and what a lost branch costs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rlplace.comm.address import Branch, SpreadChannel
from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.errors import (
    ChannelBroken,
    ChannelClosed,
    ChannelMisuse,
    EndOfStream,
    Problem,
)

SPEC = ChannelSpec(name="actions", capacity_items=3, keys=("0", "1", "2"))


class Branches:
    """Keys 0 and 1 in one branch with room for two, key 2 in another with room for one."""

    def __init__(self) -> None:
        self.near = LocalChannel(
            ChannelSpec(name="actions", capacity_items=2, keys=("0", "1"))
        )
        self.far = LocalChannel(
            ChannelSpec(name="actions", capacity_items=1, keys=("2",))
        )
        self.connected: set[LocalChannel] = set()
        self.whole = SpreadChannel(
            SPEC, [self.branch(self.near), self.branch(self.far)]
        )

    def branch(self, channel: LocalChannel) -> Branch:
        def connect() -> LocalChannel:
            self.connected.add(channel)
            return channel

        return Branch(channel.spec.keys or (), connect)


def test_each_key_goes_to_its_part_and_only_that_is_connected() -> None:
    branches = Branches()
    end = branches.whole.named("rollout rank 0")
    end.put("a", key="0")
    end.put("b", key="1")
    assert branches.connected == {branches.near}
    assert branches.whole.named("env rank 1").get(key="1") == "b"
    end.put("c", key="2")
    assert (branches.near.stats().depth_by_key, branches.far.stats().depth_by_key) == (
        {"0": 1},
        {"2": 1},
    )
    assert branches.near.stats().producers == ("rollout rank 0",), (
        "the branches know who puts"
    )


def test_a_key_of_no_part_is_refused_in_the_name_of_the_whole() -> None:
    with pytest.raises(ChannelMisuse, match="declared keys: '0', '1', '2'") as refused:
        Branches().whole.get(key="3")
    assert refused.value.code == "unknown-key"


def test_endings_reach_every_part() -> None:
    closed = Branches()
    closed.whole.close()
    for branch in (closed.near, closed.far):
        with pytest.raises(EndOfStream):
            branch.get_nowait(key=(branch.spec.keys or ())[0])
    with pytest.raises(ChannelClosed):
        closed.whole.put("late", key="2")


def test_a_lost_part_does_not_keep_the_others_from_being_broken() -> None:
    near = LocalChannel(ChannelSpec(name="actions", capacity_items=1, keys=("0",)))

    def lost() -> LocalChannel:
        raise ChannelBroken(
            Problem(
                code="channel-broken", key="channel actions", what="its node is gone"
            )
        )

    spec = ChannelSpec(name="actions", capacity_items=2, keys=("0", "1"))
    whole = SpreadChannel(spec, [Branch(("1",), lost), Branch(("0",), lambda: near)])
    with pytest.raises(ChannelBroken, match="its node is gone"):
        whole.break_("env rank 3 died")
    with pytest.raises(ChannelBroken, match="env rank 3 died"):
        near.get(key="0")


def test_statistics_are_those_of_one_channel() -> None:
    branches = Branches()
    env = branches.whole.named("env rank 0")
    env.put(b"four", key="0", version=3)
    env.put(b"two", key="2", version=2)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(env.put, "late", key="2")
        threads.submit(branches.whole.named("rollout rank 1").get, key="1")
        while len((stats := branches.whole.stats()).waits) < 2:
            pass
        assert (stats.waiting_producers, stats.waiting_consumers) == (
            ("env rank 0",),
            ("rollout rank 1",),
        )
        assert [wait.wants for wait in stats.waits] == ["credit", "item"], (
            "puts come first"
        )
        branches.whole.close()
    stats = branches.whole.stats()
    assert (stats.depth_items, stats.puts, stats.gets, stats.high_water_items) == (
        2,
        2,
        0,
        2,
    )
    assert stats.depth_by_key == {"0": 1, "2": 1}
    assert (stats.producers, stats.consumers) == (("env rank 0",), ("rollout rank 1",))
