"""Reward functions at work: here, in processes with limits, and with everything that can be wrong with them."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlplace.config.blocks.engine import FaultsConfig, OnError
from rlplace.envs.text import Transcript
from rlplace.envs.text.failures import Failures
from rlplace.envs.text.graders import (
    Grader,
    InlineGrader,
    ProcessGrader,
    SplitGrader,
    grader_of,
)
from rlplace.envs.text.rewards import Case, Reward
from rlplace.errors import Problem, RewardError

ODD = "tests.odd_rewards"


def reward(name: str, **kwargs: Any) -> Reward:
    return Reward(name=name, written=f"{ODD}:{name}", kwargs=kwargs)


def case(answer: str = "yes", sample: int = 1) -> Case:
    transcript = Transcript(
        prompt="?", answers=(answer,), replies=(), facts={}, tokens=1, truncated=False
    )
    return Case(group=4, sample=sample, transcript=transcript)


def in_process(
    *rewards: Reward,
    timeout_s: float = 60,
    memory_bytes: int = 4 << 30,
    processes: int = 1,
) -> ProcessGrader:
    return ProcessGrader(
        rewards, timeout_s=timeout_s, memory_bytes=memory_bytes, processes=processes
    )


def all_of(grader: Grader, cases: int) -> dict[int, dict[str, float]]:
    """Rewards by sample."""
    graded: dict[int, dict[str, float]] = {}
    while len(graded) < cases:
        graded |= {case.sample: values for case, values in grader.done(wait=True)}
    return graded


def graded(grader: Grader, one: Case) -> None:
    grader.submit(one)
    grader.whole(one.group)
    grader.done(wait=True)


def failure(grader: Grader, answer: str = "yes") -> Problem:
    with closing(grader), pytest.raises(RewardError) as caught:
        graded(grader, case(answer))
    return caught.value.problem


@pytest.fixture(params=["inline", "process"])
def grader(request: pytest.FixtureRequest) -> Iterator[Grader]:
    rewards = [
        reward("length"),
        Reward(name="twice", written=f"{ODD}:length", kwargs={"times": 2}),
    ]
    with closing(
        InlineGrader(rewards) if request.param == "inline" else in_process(*rewards)
    ) as grader:
        yield grader


def test_every_case_gets_every_reward(grader: Grader) -> None:
    for sample in range(5):
        grader.submit(case("a" * sample, sample))
    assert all_of(grader, 5) == {n: {"length": n, "twice": 2 * n} for n in range(5)}
    assert (
        grader.done(wait=True) == []
    )  # nothing is under way, so there is nothing to wait for


def test_shipped_functions_run_here_and_all_others_in_processes() -> None:
    shipped = Reward(name="exact_match", written="exact_match")
    for rewards, kind in (
        ([shipped], InlineGrader),
        ([shipped, reward("length")], ProcessGrader),
        ([Reward(name="unit_tests", written="unit_tests")], ProcessGrader),
        (
            [Reward(name="matches", written="matches", kwargs={"pattern": "(a+)+"})],
            ProcessGrader,
        ),
    ):
        assert type(grader_of(rewards, timeout_s=1)) is kind


def solved(answer: str, sample: int = 1) -> Case:
    transcript = Transcript(
        prompt="?",
        answers=(answer,),
        replies=(),
        facts={"answer": "42"},
        tokens=1,
        truncated=False,
    )
    return Case(group=4, sample=sample, transcript=transcript)


def test_a_long_answer_does_not_hold_up_who_has_it_graded() -> None:
    """Minus signs of Unicode are written in ASCII one by one, so that three million of them take a second and more."""
    rewards = [
        Reward(name="math_answer", written="math_answer"),
        Reward(name="unscored", written="unscored"),
    ]
    with closing(grader_of(rewards, timeout_s=60)) as grader:
        assert isinstance(grader, SplitGrader)
        # Short answers need no process.
        grader.submit(solved("so it is 42"))
        ((_, values),) = grader.done(wait=False)
        assert values == {"math_answer": 1.0, "unscored": 0.0}
        assert grader._apart._processes == []
        # A short answer is graded before a long one that was there first.
        grader.submit(solved("\u2212" * 3_000_000, sample=2))
        grader.submit(solved("it is 42", sample=3))
        assert [each.sample for each, _ in grader.done(wait=True)] == [3]
        assert all_of(grader, 1) == {2: {"math_answer": 0.0, "unscored": 0.0}}
        # A long one has the same value there.
        grader.submit(solved("one and one is two. " * 200 + "so it is 42", sample=4))
        assert all_of(grader, 1) == {4: {"math_answer": 1.0, "unscored": 0.0}}


def test_failures_of_short_and_of_long_answers_count_together() -> None:
    failures = Failures(FaultsConfig(on_error="skip", error_budget=2))
    rewards = [Reward(name="math_answer", written="math_answer")]
    with closing(grader_of(rewards, timeout_s=60, failures=failures)) as grader:
        for sample, answer in enumerate(("short", "long " * 1_000)):
            grader.submit(case(answer, sample))
        assert all_of(grader, 2).keys() == {0, 1}
    assert failures.metrics("env")["env/failures"].value == 2


def test_a_function_that_changes_facts_changes_its_own_copy() -> None:
    told = Transcript(
        prompt="?",
        answers=("yes",),
        replies=(),
        facts={"answer": "yes", "hints": []},
        tokens=1,
        truncated=False,
    )
    rewards = [
        reward("changes_facts"),
        Reward(name="again", written=f"{ODD}:changes_facts"),
        Reward(name="exact_match", written="exact_match"),
    ]
    with closing(in_process(*rewards)) as grader:
        for sample in range(2):
            grader.submit(Case(group=4, sample=sample, transcript=told))
        graded = all_of(grader, 2)
    assert graded[0] == {"changes_facts": 1, "again": 1, "exact_match": 1}
    assert graded[1] == graded[0]


def test_a_function_that_changes_its_arguments_begins_anew_with_each_answer() -> None:
    with closing(in_process(reward("counts_calls", calls=[]))) as grader:
        for sample in range(3):
            grader.submit(case(sample=sample))
        assert {v["counts_calls"] for v in all_of(grader, 3).values()} == {1}


def test_processes_work_beside_each_other() -> None:
    with closing(in_process(reward("process"), processes=2)) as grader:
        for sample in range(4):
            grader.submit(case(sample=sample))
        used = {values["process"] for values in all_of(grader, 4).values()}
    assert len(used) == 2
    assert os.getpid() not in used


@pytest.mark.parametrize(
    ("rewards", "code", "why"),
    [
        ([reward("text")], "reward-no-number", "it returned 'very good'"),
        ([reward("too_large")], "reward-not-finite", "a reward is a finite number"),
        (
            [reward("raises_anything")],
            "reward-no-number",
            "it returned a Odd, whose repr() raises RuntimeError",
        ),
        (
            [reward("long_text")],
            "reward-no-number",
            "it returned '" + 1_999 * "x" + " ... (50002 characters)",
        ),
        (
            [reward("raises_long")],
            "reward-raised",
            "ValueError: " + 1_988 * "x" + " ... (50012 characters)",
        ),
        ([reward("leaves")], "reward-raised", "SystemExit: 0\n"),
        (
            [Reward(name="nothing", written=f"{ODD}:nothing")],
            "reward-raised",
            "ValueError: a NoneType for 1",
        ),
        (
            [Reward(name="too_many", written=f"{ODD}:too_many")],
            "reward-raised",
            "ValueError: 2 rewards for",
        ),
        ([reward("closes_its_pipe")], "reward-died", "its process ended with 1"),
        ([reward("length"), reward("raises")], "reward-raised", "KeyError: 'yes'\n"),
        ([reward("exits")], "reward-died", "its process ended with 3"),
    ],
)
def test_a_failure_in_a_process_names_its_function(
    rewards: list[Reward], code: str, why: str
) -> None:
    problem = failure(in_process(*rewards))
    assert (problem.code, problem.key) == (
        code,
        f"reward function {rewards[-1].written}",
    )
    assert (problem.why or "").startswith(why)


def test_a_failure_here_shows_the_sample_and_its_answer() -> None:
    problem = failure(InlineGrader([reward("not_a_number")]), "a" * 5000)
    assert (problem.code, problem.what) == (
        "reward-not-finite",
        "returned nan, for sample 1 of group 4",
    )
    assert (problem.got or "").endswith("(5000 characters)'")
    problem = failure(InlineGrader([Reward(name="score", written="score")]))
    assert (problem.code, problem.why) == (
        "reward-raised",
        "the task gives no fact 'score'; its facts: none",
    )


def test_a_reward_function_that_hangs_is_killed() -> None:
    grader = in_process(reward("hangs_on_x"), timeout_s=0.5)
    with closing(grader):
        grader.submit(case("x", sample=9))
        (process,) = grader._processes
        with pytest.raises(RewardError) as caught:
            grader.done(wait=True)
        assert caught.value.code == "reward-timeout"
        assert (
            caught.value.problem.what
            == "did not end within 0.5 s, for sample 9 of group 4"
        )
        assert process.popen.returncode == -9


def test_a_process_that_stands_still_holds_up_no_long_answer() -> None:
    """The answer is longer than what the system keeps for a process that does not read."""
    with closing(in_process(reward("length"), timeout_s=3.0)) as grader:
        grader.submit(case("first"))
        assert all_of(grader, 1) == {1: {"length": 5.0}}
        (process,) = grader._processes
        process.popen.send_signal(signal.SIGSTOP)
        with pytest.raises(RewardError) as caught:
            graded(grader, case("a" * 8_000_000))
        assert caught.value.code == "reward-timeout"
        assert process.popen.returncode == -9


def test_a_process_that_is_killed_while_it_has_nothing_to_do_is_replaced() -> None:
    with closing(in_process(reward("length"))) as grader:
        for sample in range(2):
            grader.submit(case(sample=sample))
            assert all_of(grader, 1) == {sample: {"length": 3.0}}
            grader._processes[0].popen.kill()
            grader._processes[0].popen.wait()


def test_a_reward_function_that_eats_memory_is_stopped() -> None:
    problem = failure(in_process(reward("eats_memory"), memory_bytes=1 << 30))
    assert (problem.code, (problem.why or "").split("\n")[0]) == (
        "reward-raised",
        "MemoryError",
    )


@pytest.mark.parametrize("grade", [InlineGrader, ProcessGrader])
def test_where_poison_is_skipped_it_is_nan_and_other_failures_stay_errors(
    grade: type[Grader],
) -> None:
    limits: dict[str, Any] = (
        {}
        if grade is InlineGrader
        else {"timeout_s": 60, "memory_bytes": 4 << 30, "processes": 1}
    )
    with closing(
        grade([reward("length"), reward("not_a_number")], on_poison="skip", **limits)
    ) as grader:
        grader.submit(case("yes"))
        (values,) = all_of(grader, 1).values()
    assert values["length"] == 3
    assert math.isnan(values["not_a_number"])
    with closing(grade([reward("text")], on_poison="skip", **limits)) as grader:
        assert failure(grader).code == "reward-no-number"


# ── functions over lists ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_function_over_lists_gets_all_answers_of_a_group_in_one_call() -> None:
    rewards = [reward("compared"), reward("length"), reward("how_many")]
    with closing(in_process(*rewards)) as grader:
        for sample, answer in ((2, "no"), (0, "yes"), (1, "yes")):
            grader.submit(case(answer, sample))
        # Functions of one answer do not wait for the others
        assert grader.done(wait=True) == []
        grader.whole(4)
        found = all_of(grader, 3)
        assert found == {
            0: {"compared": pytest.approx(2 / 3), "length": 3, "how_many": 3},
            1: {"compared": pytest.approx(2 / 3), "length": 3, "how_many": 3},
            2: {"compared": pytest.approx(1 / 3), "length": 2, "how_many": 3},
        }
        # One sample of the next group is left out
        grader.submit(case("yes", 0))
        grader.whole(4)
        assert all_of(grader, 1)[0]["how_many"] == 1
        # Nothing is left of a group
        grader.whole(4)
        assert grader.done(wait=True) == []


def test_answers_are_in_the_order_of_their_samples(tmp_path: Path) -> None:
    with closing(in_process(reward("places"))) as grader:
        for sample in (3, 0, 2, 1):
            grader.submit(case("a", sample))
        grader.whole(4)
        assert all_of(grader, 4) == {n: {"places": n} for n in range(4)}


def test_groups_are_graded_beside_each_other() -> None:
    with closing(in_process(reward("process_of_all"), processes=2)) as grader:
        for group in range(2):
            for sample in range(2):
                one = dataclasses.replace(case(sample=2 * group + sample), group=group)
                grader.submit(one)
            grader.whole(group)
        used = [values["process_of_all"] for values in all_of(grader, 4).values()]
    assert len(set(used)) == 2


def test_a_function_over_lists_that_fails_leaves_out_its_group() -> None:
    failures = tolerant("skip")
    graders = ProcessGrader(
        [reward("length"), reward("fails_on_x")],
        timeout_s=60,
        memory_bytes=4 << 30,
        processes=1,
        failures=failures,
    )
    with closing(graders) as grader:
        for group, answers in ((4, ("x", "yes")), (5, ("no", "yes"))):
            for sample, answer in enumerate(answers):
                one = case(answer, 10 * group + sample)
                grader.submit(dataclasses.replace(one, group=group))
            grader.whole(group)
        found = all_of(grader, 4)
    nan = pytest.approx(math.nan, nan_ok=True)
    assert found == {
        40: {"length": 1, "fails_on_x": nan},
        41: {"length": 3, "fails_on_x": nan},
        50: {"length": 2, "fails_on_x": 2},
        51: {"length": 3, "fails_on_x": 3},
    }
    assert failures.metrics("env")["env/failures"].value == 1


@pytest.mark.parametrize(
    ("name", "code", "what"),
    [
        ("fails_on_x", "reward-raised", "raised, for the 2 samples of group 4"),
        (
            "all_hang",
            "reward-timeout",
            "did not end within 1 s, for the 2 samples of group 4",
        ),
        ("all_exit", "reward-died", "died, for the 2 samples of group 4"),
        ("always_one", "reward-raised", "raised, for the 2 samples of group 4"),
        ("second_is_text", "reward-no-number", "returned no number, for sample 1 of"),
    ],
)
def test_a_failure_with_several_answers_names_their_group(
    name: str, code: str, what: str
) -> None:
    # Only a timeout is waited for
    limit_s = 0.5 if code == "reward-timeout" else 20.0
    with closing(in_process(reward(name), timeout_s=limit_s)) as grader:
        for sample, answer in enumerate(("x", "yes")):
            grader.submit(case(answer, sample))
        grader.whole(4)
        with pytest.raises(RewardError) as caught:
            all_of(grader, 2)
    assert caught.value.code == code
    assert caught.value.problem.what.startswith(what)


# ── what goes on ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tolerant(on_error: OnError, budget: int = 9) -> Failures:
    return Failures(FaultsConfig(on_error=on_error, error_budget=budget))


@pytest.mark.parametrize("name", ["raises", "text", "not_a_number", "exits"])
def test_an_episode_whose_reward_fails_is_left_out_and_the_next_is_graded(
    name: str,
) -> None:
    failures = tolerant("skip")
    rewards = [
        reward("length"),
        reward(name),
        Reward(name="twice", written=f"{ODD}:length", kwargs={"times": 2}),
    ]
    with closing(
        ProcessGrader(
            rewards, timeout_s=60, memory_bytes=4 << 30, processes=1, failures=failures
        )
    ) as grader:
        for sample in (1, 2):
            grader.submit(case(sample=sample))
        found = all_of(grader, 2)
    assert found.keys() == {1, 2}
    assert all(
        math.isnan(value) for values in found.values() for value in values.values()
    )
    assert failures.metrics("env")["env/failures"].value == 2


def test_a_reward_that_hangs_is_left_out() -> None:
    failures = tolerant("skip")
    graders = ProcessGrader(
        [reward("hangs_on_x")],
        timeout_s=3.0,
        memory_bytes=4 << 30,
        processes=1,
        failures=failures,
    )
    with closing(graders) as grader:
        grader.submit(case("x"))
        grader.submit(case("y", sample=2))
        found = all_of(grader, 2)
    assert math.isnan(found[1]["hangs_on_x"])
    assert found[2] == {"hangs_on_x": 1.0}


@pytest.mark.parametrize(("on_error", "value"), [("retry", 1.0), ("skip", math.nan)])
def test_a_reward_that_fails_once_is_tried_again(
    tmp_path: Path, on_error: OnError, value: float
) -> None:
    failures = tolerant(on_error)
    once = [reward("raises_once", folder=str(tmp_path))]
    with closing(
        ProcessGrader(
            once, timeout_s=60, memory_bytes=4 << 30, processes=1, failures=failures
        )
    ) as grader:
        grader.submit(case())
        assert all_of(grader, 1) == {
            1: {"raises_once": pytest.approx(value, nan_ok=True)}
        }
    assert failures.metrics("env")["env/failures"].value == 1


def test_more_failures_than_the_budget_stop_the_run() -> None:
    failures = tolerant("retry", budget=1)
    fact_is_missing = Reward(name="exact_match", written="exact_match")
    grader = InlineGrader([fact_is_missing], failures=failures)
    grader.submit(case())
    with pytest.raises(RewardError, match="refused"):
        grader.submit(case(sample=2))
    failures.begin()
    grader.submit(case(sample=3))
    assert [graded.sample for graded, _ in grader.done(wait=False)] == [1, 3]


def test_random_numbers_of_rewards_follow_from_the_seed_of_the_case() -> None:
    """Whichever process grades it, and whatever that process has graded before."""

    def drawn(*seeds: str) -> list[float]:
        with closing(in_process(reward("lucky"), processes=1)) as grader:
            for sample, seed in enumerate(seeds):
                grader.submit(dataclasses.replace(case(sample=sample), seed=seed))
            values = all_of(grader, len(seeds))
        return [values[sample]["lucky"] for sample in range(len(seeds))]

    first, second, again = drawn("a", "b", "a")
    assert first == again != second
    assert drawn("b") == [second]
