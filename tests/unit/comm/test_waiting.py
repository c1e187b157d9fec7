"""Who waits for whom: deadlocks, slow peers and dead ones told apart from what channels say of a moment."""

from __future__ import annotations

import pytest

from rlplace.comm.channel import ChannelSpec, ChannelStats, Wait
from rlplace.comm.watchdog import ChannelView, WaitForGraph, report


def wait(owner: str, wants: str = "item", key: str = "", seconds: float = 5.0) -> Wait:
    return Wait(owner=owner, key=key, wants=wants, seconds=seconds)  # type: ignore[arg-type]


def seen(*waits: Wait, producers: str = "", consumers: str = "", dead: str = "", depth: int = 0) -> ChannelView:
    """Names by their letters."""
    stats = ChannelStats(
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
    return ChannelView(spec=ChannelSpec(name="c", capacity_items=4), stats=stats)


@pytest.mark.parametrize(
    ("views", "stuck", "cycle", "awaited"),
    [
        ([], "", "", ""),
        ([seen(wait("a"), producers="b")], "", "", "b"),
        ([seen(wait("a"), producers="b"), seen(wait("b"), producers="a")], "ab", "aba", ""),
        ([seen(wait("a"), producers="b"), seen(wait("b", "credit"), consumers="a")], "ab", "aba", ""),
        # c could still serve a
        ([seen(wait("a"), producers="bc"), seen(wait("b"), producers="a")], "", "", "c"),
        # and cannot once it waits for a as well
        ([seen(wait("a"), producers="bc"), seen(wait("b"), wait("c"), producers="a")], "abc", "aba", ""),
        # nobody has put yet: whoever comes may help
        ([seen(wait("a")), seen(wait("b"), producers="a")], "", "", ""),
        # d waits behind a deadlock of others
        ([seen(wait("d"), producers="a"), seen(wait("a"), wait("b"), producers="ab")], "abd", "aba", ""),
        # one's own puts do not help
        ([seen(wait("a"), producers="ab", dead="b")], "a", "", ""),
        # a is stuck in one place and not in the other
        ([seen(wait("a"), producers="b", dead="b"), seen(wait("a"), producers="c")], "", "", "c"),
    ],
)
def test_who_is_stuck_and_in_which_circle(views: list[ChannelView], stuck: str, cycle: str, awaited: str) -> None:
    graph = WaitForGraph(views)
    assert (graph.stuck, "".join(graph.cycle()), graph.awaited()) == (set(stuck), cycle, list(awaited))


def test_nobody_waits_is_no_report() -> None:
    assert report({}) is None
    assert report({"x": seen(producers="a", consumers="b", depth=3)}) is None


def test_a_report_says_it_all() -> None:
    views = {
        "actions": seen(wait("env rank 0", key="0"), wait("env rank 1", key="1", seconds=7.25), producers="r", depth=1),
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
    text = report({"x": seen(wait("a"), producers="b", dead="b")})
    assert text is not None
    assert text.splitlines()[0] == "dead: b"
    assert "a: 5.0 s for an item, from b (dead)" in text
    text = report({"x": seen(wait("d"), producers="a"), "y": seen(wait("a"), wait("b"), producers="ab")})
    assert text is not None
    assert text.splitlines()[:2] == ["deadlock: a -> b -> a", "behind it: d"]


def test_thousands_of_waits_make_a_short_report() -> None:
    waits = [wait(f"env rank {i}", key=str(i)) for i in range(3000)]
    text = report({"actions": seen(*waits, producers="r")})
    assert text is not None
    assert "and 2992 more" in text
    assert len(text) < 1000
