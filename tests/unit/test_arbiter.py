"""The rule by which runs use accelerators in turns: who has what, who waits, fair shares, priorities, no deadlock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.execution.arbiter import Arbiter, Refused, Share


def two(a: Share | None = None, b: Share | None = None) -> Arbiter:
    return Arbiter({"a": a or Share(), "b": b or Share()})


def test_a_run_waits_until_the_other_gives_back() -> None:
    arbiter = two()
    arbiter.ask("a", [0, 1], "rollout", 0.0)
    arbiter.ask("b", [1, 2], "learn", 0.0)
    assert arbiter.granted(0.0) == ["a"]
    assert arbiter.holds("b") == frozenset()
    assert arbiter.explain("b", 3.0) == (
        "b waits for accelerators 1, 2 to enter learn: a has accelerators 1 in rollout for 3 s"
    )
    arbiter.ask("a", [0], "learn", 4.0)
    assert arbiter.granted(4.0) == ["b", "a"]
    assert (arbiter.holds("a"), arbiter.holds("b")) == ({0}, {1, 2})


def test_stages_on_different_accelerators_work_at_once() -> None:
    arbiter = two()
    arbiter.ask("a", [0], "rollout", 0.0)
    arbiter.ask("b", [1], "learn", 0.0)
    assert sorted(arbiter.granted(0.0)) == ["a", "b"]


def test_a_run_that_waits_keeps_later_ones_off_what_it_waits_for() -> None:
    arbiter = Arbiter({name: Share() for name in "abc"})
    arbiter.ask("a", [0], "work", 0.0)
    assert arbiter.granted(0.0) == ["a"]
    arbiter.ask("b", [0, 1], "work", 1.0)
    arbiter.ask("c", [1], "work", 2.0)
    assert arbiter.granted(2.0) == []
    arbiter.leave("a", 3.0)
    assert arbiter.granted(3.0) == ["b"]


def turns(arbiter: Arbiter, seconds: dict[str, float], count: int) -> list[str]:
    """Return the order of turns of runs that always want the same accelerator."""
    now_s = 0.0
    found = []
    for name in seconds:
        arbiter.ask(name, [0], "work", now_s)
    for _ in range(count):
        (name,) = arbiter.granted(now_s)
        found.append(name)
        now_s += seconds[name]
        arbiter.ask(name, [0], "work", now_s)
    return found


def test_equal_runs_take_turns() -> None:
    assert turns(two(), {"a": 1.0, "b": 1.0}, 6) == ["a", "b", "a", "b", "a", "b"]


def test_a_weight_is_a_share_of_accelerator_seconds() -> None:
    order = turns(two(Share(weight=3.0)), {"a": 1.0, "b": 1.0}, 40)
    assert order.count("a") == 30
    # A run with long stages has fewer of them
    order = turns(two(), {"a": 3.0, "b": 1.0}, 40)
    assert order.count("a") == 10


def test_a_higher_priority_goes_first() -> None:
    assert turns(two(b=Share(priority=1)), {"a": 1.0, "b": 1.0}, 4) == ["b"] * 4


def test_a_run_that_replaces_workers_keeps_what_it_has_and_goes_first() -> None:
    arbiter = two(b=Share(priority=1))
    arbiter.ask("a", [0], "learn", 0.0)
    arbiter.ask("b", [1], "rollout", 0.0)
    arbiter.granted(0.0)
    arbiter.ask("a", [0, 1], "recovery", 1.0, keeping=True)
    assert arbiter.granted(1.0) == []
    assert arbiter.holds("a") == {0}
    arbiter.ask("b", [0], "learn", 2.0)
    assert arbiter.granted(2.0) == ["a"]
    assert arbiter.holds("a") == {0, 1}


def test_two_runs_that_replace_workers_do_not_wait_for_each_other() -> None:
    arbiter = two()
    arbiter.ask("a", [0], "learn", 0.0)
    arbiter.ask("b", [1], "rollout", 0.0)
    arbiter.granted(0.0)
    arbiter.ask("a", [0, 1], "recovery", 1.0, keeping=True)
    with pytest.raises(Refused, match="a replaces lost workers too"):
        arbiter.ask("b", [0, 1], "recovery", 1.0, keeping=True)
    arbiter.leave("b", 2.0)
    assert arbiter.granted(2.0) == ["a"]


def test_a_run_keeps_a_part_and_withdraws() -> None:
    arbiter = two()
    arbiter.ask("a", [0, 1], "start", 0.0)
    arbiter.granted(0.0)
    arbiter.ask("b", [1], "work", 0.0)
    arbiter.keep("a", [0], 2.0)
    arbiter.withdraw("b")
    assert arbiter.granted(2.0) == []
    assert arbiter.waiting_s("b", 2.0) is None
    assert arbiter.used_s("a", 3.0) == 2 * 2.0 + 1.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 3))), max_size=60)
)
def test_no_accelerator_has_two_runs_and_no_run_waits_for_ever(
    requests: list[tuple[str, set[int]]],
) -> None:
    arbiter = Arbiter({name: Share() for name in "abc"})
    now_s = 0.0
    waiting: set[str] = set()
    for name, wanted in requests:
        now_s += 1.0
        if name not in waiting:
            arbiter.ask(name, wanted, "work", now_s)
            waiting.add(name)
        waiting -= set(arbiter.granted(now_s))
        held = [n for run in "abc" for n in arbiter.holds(run)]
        assert len(held) == len(set(held))
    # Whoever has something gives it back: in the end all have had their turn
    for _ in range(len("abc")):
        for name in set("abc") - waiting:
            arbiter.leave(name, now_s)
        waiting -= set(arbiter.granted(now_s))
    assert not waiting
