"""Warnings of runs that learn nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlplace.checks.rule import broken
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.jobs.language_model.job import LanguageModelJob
from rlplace.jobs.language_model.rules import signal
from rlplace.report.learning import IN_A_ROW, SIGNS, LearningWatch, Name

ALL: tuple[Name, ...] = tuple(sign.name for sign in SIGNS)
LEARNS = {
    "actor/truncated_share": 0.5,
    "actor/groups_with_signal": 0.25,
    "actor/grad_norm": 0.1,
    "actor/kl_stop": 0.0,
    "actor/optimizer_steps": 16.0,
}


def told(*iterations: Mapping[str, float], first: int = 1) -> list[str]:
    """The signs that a watch tells of these metrics, in order."""
    watch = LearningWatch(ALL)
    for number, numbers in enumerate(iterations, start=first):
        warning = watch.add(numbers, number)
        assert warning is None or warning.code == "learns-nothing"
    return [str(entry["sign"]) for entry in watch.warnings]


def test_a_run_that_learns_is_not_warned_of() -> None:
    assert told(*[LEARNS] * 5) == []


@pytest.mark.parametrize(
    ("numbers", "sign"),
    [
        ({"actor/groups_with_signal": 0.0, "actor/grad_norm": 0.0}, "equal-groups"),
        ({"actor/grad_norm": 0.0}, "no-gradient"),
        (
            {"actor/truncated_share": 1.0, "actor/groups_with_signal": 0.0},
            "all-cut",
        ),
        ({"env/action_range": 0.001}, "narrow-actions"),
        ({"actor/kl_stop": 1.0, "actor/optimizer_steps": 1.0}, "kl-stops"),
    ],
)
def test_a_sign_is_told_once_of_several_iterations_in_a_row(
    numbers: Mapping[str, float], sign: str
) -> None:
    bad = {**LEARNS, **numbers}
    assert told(*[bad] * (IN_A_ROW - 1)) == []
    assert told(*[bad] * (IN_A_ROW + 3)) == [sign]
    apart = [bad, {**LEARNS, "env/action_range": 1.0}] * 3
    assert told(*apart) == []


def test_answers_of_a_fixed_length_may_all_be_cut() -> None:
    assert told(*[{**LEARNS, "actor/truncated_share": 1.0}] * 5) == []


def test_a_kl_that_ends_updates_later_is_no_sign() -> None:
    stopped = {**LEARNS, "actor/kl_stop": 1.0, "actor/optimizer_steps": 9.0}
    assert told(*[stopped] * 5) == []
    # All of a single update
    whole = {**LEARNS, "actor/kl_stop": 0.0, "actor/optimizer_steps": 1.0}
    assert told(*[whole] * 5) == []


def test_a_policy_that_goes_on_may_act_within_a_narrow_range() -> None:
    narrow = {**LEARNS, "env/action_range": 0.001}
    assert told(*[narrow] * 5, first=100) == []
    wide = {**LEARNS, "env/action_range": 0.9}
    assert told(wide, *[narrow] * 5) == []


def test_warnings_go_on_after_a_resume() -> None:
    watch = LearningWatch(ALL)
    for iteration in range(1, IN_A_ROW + 1):
        watch.add({"actor/grad_norm": 0.0}, iteration)
    again = LearningWatch(ALL)
    again.restore(watch.warnings)
    for iteration in range(10, 20):
        assert again.add({"actor/grad_norm": 0.0}, iteration) is None
    assert again.warnings == watch.warnings


# ── what is certain before a run ─────────────────────────────────────────────────────────────────────────────────────


def config_of(
    algorithm: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
) -> Config:
    of_algorithm = {
        "name": "grpo",
        "prompts": 4,
        "samples_per_prompt": 8,
        "max_prompt_length": 8,
        "max_new_tokens": 8,
        **(algorithm or {}),
    }
    config: Config = read_config(
        {
            "cluster": {"component_placement": {"env": "0"}},
            "actor": {"model": {"path": "model"}},
            "algorithm": of_algorithm,
            "rollout": dict(rollout or {}),
            "env": {"task": "arithmetic", **(env or {})},
        }
    )
    return config


def keys(config: Config) -> list[str]:
    return [problem.key for problem in broken(signal.RULES, config)]


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp_baseline"]
)
def test_a_group_of_one_answer_is_refused(name: str) -> None:
    one = {"name": name, "samples_per_prompt": 1}
    assert keys(config_of(one)) == ["algorithm.samples_per_prompt"]
    assert keys(config_of({"name": name})) == []


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_answers_that_are_compared_with_all_others_may_be_one_of_a_prompt(
    name: str,
) -> None:
    one = config_of({"name": name, "samples_per_prompt": 1})
    assert keys(one) == []
    assert "equal-groups" not in LanguageModelJob().measures(one).signs


def test_answers_that_are_not_drawn_are_refused() -> None:
    greedy = {"temperature": 0}
    assert keys(config_of(rollout=greedy)) == ["rollout.temperature"]
    assert keys(config_of(rollout=greedy, env={"max_turns": 2})) == []
    assert "equal-groups" in LanguageModelJob().measures(config_of()).signs


def test_groups_are_compared_by_a_reward_that_exists() -> None:
    def compared(by: str | None, name: str = "dapo") -> list[str]:
        rewards = [{"name": "math_answer"}, {"name": "tests.odd_rewards:length"}]
        algorithm = {"name": name, "dynamic_sampling_by": by}
        return keys(config_of(algorithm, env={"rewards": rewards}))

    assert compared("math_answer") == compared("length") == compared(None) == []
    key = "algorithm.dynamic_sampling_by"
    assert compared("acc") == compared("tests.odd_rewards:length") == [key]
    assert compared("math_answer", "grpo") == [key]
    config = config_of({"name": "dapo", "dynamic_sampling_by": "score"})
    (problem,) = broken(signal.RULES, config)
    assert (problem.code, problem.key) == ("bad-comparison", key)


def test_rewards_without_weight_are_refused() -> None:
    def rewarded(*weights: float) -> list[str]:
        rewards = [{"name": "math_answer", "weight": weight} for weight in weights]
        return keys(config_of(env={"rewards": rewards}))

    assert rewarded(0.0, 0.0) == ["env.rewards"]
    assert rewarded(0.0, 0.5) == []
    assert rewarded() == []
