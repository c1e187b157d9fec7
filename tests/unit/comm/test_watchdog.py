"""The watchdog: deadlocks, slow peers and dead ones, each reported as such and once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rlplace.comm.channel import ChannelSpec, ChannelStats, Wait
from rlplace.comm.ends import LocalChannel
from rlplace.comm.watchdog import WaitForGraph, Watchdog, report

PATIENCE_S = 60.0
Start = Callable[..., Future[Any]]


@pytest.fixture
def channels() -> dict[str, LocalChannel]:
    return {
        name: LocalChannel(
            ChannelSpec(name=name, capacity_items=2, timeout_s=PATIENCE_S)
        )
        for name in ("observations", "actions")
    }


@pytest.fixture
def start(channels: dict[str, LocalChannel]) -> Iterator[Start]:
    with ThreadPoolExecutor(max_workers=4) as threads:
        yield threads.submit
        for channel in channels.values():
            channel.break_("the test is over")


def both_have_met(
    channels: dict[str, LocalChannel],
) -> tuple[LocalChannel, LocalChannel]:
    """The end of env at the actions and that of rollout at the observations, once each has put something there."""
    for channel, producer, consumer in (
        ("observations", "env", "rollout"),
        ("actions", "rollout", "env"),
    ):
        channels[channel].named(f"{producer} rank 0").put(0)
        channels[channel].named(f"{consumer} rank 0").get()
    return channels["actions"].named("env rank 0"), channels["observations"].named(
        "rollout rank 0"
    )


def wait_for(channels: dict[str, LocalChannel], name: str) -> None:
    while not channels[name].stats().waits:
        pass


def test_a_slow_peer_is_named_and_reported_again_only_after_it_moved(
    channels: dict[str, LocalChannel], start: Start
) -> None:
    actions, _ = both_have_met(channels)
    dog, rollout = (
        Watchdog(channels, stall_s=30),
        channels["actions"].named("rollout rank 0"),
    )
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


def test_an_idle_job_and_a_busy_one_are_not_reported(
    channels: dict[str, LocalChannel], start: Start
) -> None:
    actions, _ = both_have_met(channels)
    channels["gone"] = LocalChannel(ChannelSpec(name="gone", capacity_items=1))
    channels["gone"].break_("over")
    dog = Watchdog(channels, stall_s=10)
    assert [dog.look(now) for now in (0.0, 10.0, 1000.0)] == [None, None, None]
    for now in range(1000, 1050, 5):  # a worker waits at every look, but never in vain
        taken = start(actions.get)
        wait_for(channels, "actions")
        assert dog.look(float(now)) is None
        channels["actions"].named("rollout rank 0").put("item")
        taken.result(PATIENCE_S)


def test_a_deadlock_beside_a_channel_that_moves_is_found(
    channels: dict[str, LocalChannel], start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    actions, observations = both_have_met(channels)
    start(functools.partial(actions.get, key="0"))
    start(functools.partial(observations.get, key="0"))
    with caplog.at_level(logging.WARNING, "rlplace"), Watchdog(channels, stall_s=0.02):
        while (
            "deadlock" not in caplog.text
        ):  # the other keys of both channels are never still
            for channel, producer, consumer in (
                ("observations", "env", "rollout"),
                ("actions", "rollout", "env"),
            ):
                channels[channel].named(f"{producer} rank 0").put(0, key="1")
                channels[channel].named(f"{consumer} rank 0").get(key="1")
    text = caplog.messages[-1]
    assert "deadlock: env rank 0 -> rollout rank 0 -> env rank 0" in text
    assert "s for an item, at key '0', from rollout rank 0" in text.replace(
        " at key", ", at key"
    )


# ── the report of a moment ───────────────────────────────────────────────────────────────────────────────────────────


def wait(owner: str, wants: str = "item", key: str = "", seconds: float = 5.0) -> Wait:
    return Wait(owner=owner, key=key, wants=wants, seconds=seconds)


def seen(
    *waits: Wait,
    producers: str = "",
    consumers: str = "",
    dead: str = "",
    depth: int = 0,
) -> ChannelStats:
    """Names by their letters."""
    return ChannelStats(
        capacity_items=4,
        depth_items=depth,
        high_water_items=depth,
        puts=depth,
        gets=0,
        producer_wait_s=0.0,
        consumer_wait_s=0.0,
        waits=waits,
        depth_by_key={"": depth},
        producers=tuple(producers),
        consumers=tuple(consumers),
        dead=tuple(dead),
    )


@pytest.mark.parametrize(
    ("views", "stuck", "cycle", "awaited"),
    [
        ([], "", "", ""),
        ([seen(wait("a"), producers="b")], "", "", "b"),
        (
            [seen(wait("a"), producers="b"), seen(wait("b"), producers="a")],
            "ab",
            "aba",
            "",
        ),
        (
            [seen(wait("a"), producers="b"), seen(wait("b", "credit"), consumers="a")],
            "ab",
            "aba",
            "",
        ),
        # c could still serve a
        (
            [seen(wait("a"), producers="bc"), seen(wait("b"), producers="a")],
            "",
            "",
            "c",
        ),
        # and cannot once it waits for a as well
        (
            [
                seen(wait("a"), producers="bc"),
                seen(wait("b"), wait("c"), producers="a"),
            ],
            "abc",
            "aba",
            "",
        ),
        # none has put yet: the next may help
        ([seen(wait("a")), seen(wait("b"), producers="a")], "", "", ""),
        # d waits behind a deadlock of others
        (
            [
                seen(wait("d"), producers="a"),
                seen(wait("a"), wait("b"), producers="ab"),
            ],
            "abd",
            "aba",
            "",
        ),
        # one's own puts do not help
        ([seen(wait("a"), producers="ab", dead="b")], "a", "", ""),
        # a is stuck in one place and not in the other
        (
            [seen(wait("a"), producers="b", dead="b"), seen(wait("a"), producers="c")],
            "",
            "",
            "c",
        ),
    ],
)
def test_who_is_stuck_and_in_which_circle(
    views: list[ChannelStats], stuck: str, cycle: str, awaited: str
) -> None:
    graph = WaitForGraph(views)
    assert (graph.stuck, "".join(graph.cycle()), graph.slow()) == (
        set(stuck),
        cycle,
        list(awaited),
    )


def test_a_report_says_it_all() -> None:
    assert report({"x": seen(producers="a", consumers="b", depth=3)}) is None
    views = {
        "actions": seen(
            wait("env rank 0", key="0"),
            wait("env rank 1", key="1", seconds=7.25),
            producers="r",
            depth=1,
        ),
        "observations": seen(wait("r", "credit", seconds=6), consumers="e", depth=4),
        "quiet": seen(producers="q"),
    }
    assert report(views) == "\n".join(
        [
            "slow, busy or gone: e; others wait for them, and they wait for none here",
            "channel actions: 1 of 4 items, 1 put and 0 taken so far",
            "    env rank 0, env rank 1: 7.2 s for an item at key '0', '1', from r",
            "channel observations: 4 of 4 items, 4 put and 0 taken so far",
            "    r: 6.0 s for credit, from e",
        ]
    )


def test_the_dead_and_those_behind_a_deadlock_are_named() -> None:
    text = report({"x": seen(wait("a"), producers="b", dead="b")}) or ""
    assert text.startswith("dead: b\n")
    assert "a: 5.0 s for an item, from b (dead)" in text
    text = (
        report(
            {
                "x": seen(wait("d"), producers="a"),
                "y": seen(wait("a"), wait("b"), producers="ab"),
            }
        )
        or ""
    )
    assert text.startswith("deadlock: a -> b -> a\nbehind it: d\n")
    many = (
        report(
            {
                "x": seen(
                    *(wait(f"env rank {i}", key=str(i)) for i in range(3000)),
                    producers="r",
                )
            }
        )
        or ""
    )
    assert "and 2992 more" in many
    assert len(many) < 1000
