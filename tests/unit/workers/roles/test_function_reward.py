"""A Python function as a reward component: shipped, over lists, failing, hanging."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rlplace.errors import ConfigError, NotResident, RewardError
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.roles.reward import RewardFunctionWorker
from tests.lm_ranks import made_up_samples
from tests.scorer_ranks import Said, ScorerScenario, scored_by, sole_scorer, with_text


def scored(block: Mapping[str, object], groups: list[tuple[Sample, ...]]) -> Said:
    scenario = ScorerScenario(model=Path("unused"), component="reward", block=block)
    return scored_by(scenario, groups, kind=RewardFunctionWorker)


def right_in_even_samples() -> list[tuple[Sample, ...]]:
    """The label of a group is its number."""
    return with_text(made_up_samples(), lambda s: f"it is {s.group if s.sample % 2 == 0 else 99}")


def test_a_shipped_reward_scores_each_episode() -> None:
    found = scored({"function": "math_answer"}, right_in_even_samples())
    assert found == {(g, s): [float(s % 2 == 0)] for g in range(3) for s in range(4)}


def test_a_function_of_lists_is_given_prompts_answers_labels_and_its_arguments() -> None:
    found = scored(
        {"function": "tests.odd_rewards:spelled", "kwargs": {"bonus": 0.5}},
        with_text(made_up_samples(), lambda s: "x" * s.sample),
    )
    assert found == {(g, s): [100 * g + s + 0.5] for g in range(3) for s in range(4)}


def test_a_function_that_raises_is_named_with_the_sample() -> None:
    with pytest.raises(RewardError, match="raised, for sample 0 of group 0") as caught:
        scored({"function": "tests.odd_rewards:raises"}, with_text(made_up_samples()))
    assert (caught.value.code, caught.value.problem.key) == ("reward-raised", "reward.function")


def test_a_function_that_hangs_is_ended_and_the_fix_names_its_own_limit() -> None:
    with pytest.raises(RewardError) as caught:
        scored({"function": "tests.odd_rewards:hangs", "timeout_s": 0.2}, with_text(made_up_samples()))
    assert caught.value.code == "reward-timeout"
    assert "reward.timeout_s=<longer>" in str(caught.value.problem.fix)


@pytest.mark.parametrize(
    ("block", "key", "code"),
    [
        ({"function": "math_anser"}, "reward.function", "unknown-reward"),
        ({"function": "tests.odd_rewards:nowhere"}, "reward.function", "unknown-reward"),
        ({"function": "tests.odd_rewards:spelled", "kwargs": {"bnus": 1}}, "reward.kwargs.bnus", "bad-reward-kwargs"),
    ],
)
def test_what_is_no_function_is_refused(block: Mapping[str, object], key: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scored(block, [])
    assert [(p.key, p.code) for p in caught.value.problems] == [(key, code)]


def test_nothing_is_scored_while_offloaded() -> None:
    scenario = ScorerScenario(model=Path("unused"), component="reward", block={"function": "math_answer"})
    with sole_scorer(scenario, kind=RewardFunctionWorker) as (judge, _):
        judge.move(Residency.OFF)
        with pytest.raises(NotResident):
            judge.infer(0, 0)  # type: ignore[attr-defined]
