"""Reward functions at work: here, in processes with limits, and with everything that can be wrong with them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from rlplace.envs.text import Transcript
from rlplace.envs.text.graders import Grader, InlineGrader, ProcessGrader, grader_of
from rlplace.envs.text.rewards import Case, Reward
from rlplace.errors import Problem, RewardError

ODD = "tests.odd_rewards"


def reward(name: str, **kwargs: Any) -> Reward:
    return Reward(name=name, written=f"{ODD}:{name}", kwargs=kwargs)


def case(answer: str = "yes", sample: int = 1) -> Case:
    transcript = Transcript(prompt="?", answers=(answer,), replies=(), facts={}, tokens=1, truncated=False)
    return Case(group=4, sample=sample, transcript=transcript)


def in_process(
    *rewards: Reward, timeout_s: float = 60, memory_bytes: int = 4 << 30, processes: int = 1
) -> ProcessGrader:
    return ProcessGrader(rewards, timeout_s=timeout_s, memory_bytes=memory_bytes, processes=processes)


def all_of(grader: Grader, cases: int) -> dict[int, dict[str, float]]:
    """Rewards by sample."""
    graded: dict[int, dict[str, float]] = {}
    while len(graded) < cases:
        graded |= {case.sample: values for case, values in grader.done(wait=True)}
    return graded


def failure(grader: Grader, answer: str = "yes") -> Problem:
    def graded() -> None:
        grader.submit(case(answer))
        grader.done(wait=True)

    with closing(grader), pytest.raises(RewardError) as caught:
        graded()
    return caught.value.problem


@pytest.fixture(params=["inline", "process"])
def grader(request: pytest.FixtureRequest) -> Iterator[Grader]:
    rewards = [reward("length"), Reward(name="twice", written=f"{ODD}:length", kwargs={"times": 2})]
    with closing(InlineGrader(rewards) if request.param == "inline" else in_process(*rewards)) as grader:
        yield grader


def test_every_case_gets_every_reward(grader: Grader) -> None:
    for sample in range(5):
        grader.submit(case("a" * sample, sample))
    assert all_of(grader, 5) == {n: {"length": n, "twice": 2 * n} for n in range(5)}
    assert grader.done(wait=True) == []  # nothing is under way, so there is nothing to wait for


def test_shipped_functions_run_here_and_all_others_in_processes() -> None:
    shipped = Reward(name="exact_match", written="exact_match")
    for rewards, kind in (
        ([shipped], InlineGrader),
        ([shipped, reward("length")], ProcessGrader),
        ([Reward(name="unit_tests", written="unit_tests")], ProcessGrader),
        ([Reward(name="matches", written="matches", kwargs={"pattern": "(a+)+"})], ProcessGrader),
    ):
        assert type(grader_of(rewards, timeout_s=1)) is kind


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
        ([reward("text")], "reward-not-finite", "it returned 'very good'"),
        ([reward("length"), reward("raises")], "reward-raised", "KeyError: 'yes'\n"),
        ([reward("exits")], "reward-died", "its process ended with 3"),
    ],
)
def test_a_failure_in_a_process_names_its_function(rewards: list[Reward], code: str, why: str) -> None:
    problem = failure(in_process(*rewards))
    assert (problem.code, problem.key) == (code, f"reward function {rewards[-1].written}")
    assert (problem.why or "").startswith(why)


def test_a_failure_here_shows_the_sample_and_its_answer() -> None:
    problem = failure(InlineGrader([reward("not_a_number")]), "a" * 5000)
    assert (problem.code, problem.what) == ("reward-not-finite", "returned nan, for sample 1 of group 4")
    assert (problem.got or "").endswith("(5000 characters)'")
    problem = failure(InlineGrader([Reward(name="score", written="score")]))
    assert (problem.code, problem.why) == ("reward-raised", "the task gives no fact 'score'; its facts: none")


def test_a_reward_function_that_hangs_is_killed() -> None:
    grader = in_process(reward("hangs_on_x"), timeout_s=0.5)
    with closing(grader):
        grader.submit(case("x", sample=9))
        (process,) = grader._processes
        with pytest.raises(RewardError) as caught:
            grader.done(wait=True)
        assert caught.value.code == "reward-timeout"
        assert caught.value.problem.what == "did not end within 0.5 s, for sample 9 of group 4"
        assert process.popen.returncode == -9


def test_a_reward_function_that_eats_memory_is_stopped() -> None:
    problem = failure(in_process(reward("eats_memory"), memory_bytes=1 << 30))
    assert (problem.code, (problem.why or "").split("\n")[0]) == ("reward-raised", "MemoryError")


@pytest.mark.parametrize("grade", [InlineGrader, ProcessGrader])
def test_where_poison_is_skipped_it_is_nan_and_other_failures_stay_errors(grade: type[Grader]) -> None:
    limits: dict[str, Any] = {} if grade is InlineGrader else {"timeout_s": 60, "memory_bytes": 4 << 30, "processes": 1}
    with closing(grade([reward("length"), reward("not_a_number")], on_poison="skip", **limits)) as grader:
        grader.submit(case("yes"))
        (values,) = all_of(grader, 1).values()
    assert values["length"] == 3
    assert math.isnan(values["not_a_number"])
    with closing(grade([reward("text")], on_poison="skip", **limits)) as grader:
        assert failure(grader).code == "reward-not-finite"
