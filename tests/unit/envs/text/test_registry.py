"""Tasks and reward functions by name, and what is said of names and arguments that mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.config import RewardFunctionConfig, TextEnvConfig
from rlplace.envs.registry import TASKS, check_task, find_task, make_task
from rlplace.envs.text import OneTurn, Transcript
from rlplace.envs.text.rewards import REWARDS, Reward, find_reward, find_rewards
from rlplace.errors import ConfigError, Problem


class Echo:
    """A task of a user's."""

    rewards: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, seed: int, split: str, word: str = "yes", size: int | None = None) -> None:
        if not word:
            raise ValueError("word must not be empty")
        self.word, self.size = f"{word}/{split}", size

    def episode(self, number: int) -> OneTurn:
        return OneTurn(prompt=self.word)


def shout(transcript: Transcript, *, loud: float = 1.0) -> float:
    return loud


ECHO, SHOUT = f"{__name__}:Echo", f"{__name__}:shout"


def block(
    task: str = ECHO, *, rewards: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name=SHOUT),), **kwargs: Any
) -> TextEnvConfig:
    return TextEnvConfig(task=task, kwargs=kwargs, rewards=rewards)


def problems(config: TextEnvConfig, *, evaluated: bool = False) -> list[tuple[str, str]]:
    return [(p.code, p.key) for p in check_task(config, seed=0, evaluated=evaluated)]


def only(config: TextEnvConfig) -> Problem:
    (problem,) = check_task(config, seed=0, evaluated=False)
    return problem


@pytest.mark.parametrize("name", TASKS)
def test_every_shipped_task_is_there(name: str) -> None:
    assert callable(find_task(name).episode)
    assert all(reward in REWARDS for reward in find_task(name).rewards)


@pytest.mark.parametrize("name", REWARDS)
def test_every_shipped_reward_function_is_there(name: str) -> None:
    assert find_reward(name).__name__ == name


def test_tasks_and_rewards_of_your_own() -> None:
    task = make_task(block(word="no"), seed=0, split="train")
    assert task.episode(0).prompt == "no/train"
    (reward,) = find_rewards([RewardFunctionConfig(name=SHOUT, weight=2.0, kwargs={"loud": 3})], task)
    assert (reward.name, reward.weight, reward.trusted) == ("shout", 2.0, False)
    transcript = Transcript(prompt="", answers=(), replies=(), facts={}, tokens=0, truncated=False)
    assert reward.function()(transcript) == 3


def test_without_rewards_the_task_s_own_count() -> None:
    config = TextEnvConfig(task="arithmetic")
    assert find_rewards((), make_task(config, seed=0, split="train")) == (
        Reward(name="math_answer", written="math_answer"),
    )
    assert problems(config) == []


def test_an_unknown_task() -> None:
    problem = only(block("arithmetics"))
    assert (problem.code, problem.key, problem.fix) == ("unknown-task", "env.task", "task: arithmetic")
    assert "did you mean 'arithmetic'?" in problem.what


@pytest.mark.parametrize("name", [f"{__name__}:Ech", "no.such.module:Echo"])
def test_a_task_that_is_not_where_it_should_be(name: str) -> None:
    assert only(block(name)).code == "unknown-task"


def test_arguments_that_a_task_does_not_take() -> None:
    problem = only(block(wrd="no"))
    assert (problem.code, problem.key, problem.fix) == ("bad-task-kwargs", "env.kwargs.wrd", "word: no")
    assert only(block(seed=3)).key == "env.kwargs.seed"
    refused = only(block(word=""))
    assert (refused.code, refused.key) == ("bad-task-kwargs", "env.kwargs")
    assert "word must not be empty" in (refused.why or "")


def test_a_task_without_prompts() -> None:
    assert problems(block(size=0)) == [("empty-dataset", "env.kwargs")]


def test_an_empty_file_is_an_empty_data_set(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    config = TextEnvConfig(task="prompts", kwargs={"path": str(tmp_path / "train.jsonl")})
    assert problems(config) == [("empty-dataset", "env.kwargs")]


def test_a_task_with_an_end_says_what_is_held_out() -> None:
    assert problems(block(size=3), evaluated=True) == [("nothing-held-out", "env.eval_kwargs")]
    config = TextEnvConfig(
        task=ECHO, kwargs={"size": 3}, eval_kwargs={"word": "other"}, rewards=(RewardFunctionConfig(name=SHOUT),)
    )
    assert problems(config, evaluated=True) == []
    assert make_task(config, seed=0, split="held_out").episode(0).prompt == "other/held_out"
    assert problems(block(), evaluated=True) == []


def test_rewards_that_mean_nothing() -> None:
    written: Mapping[str, RewardFunctionConfig] = {
        "unknown": RewardFunctionConfig(name="math_anwser"),
        "fine": RewardFunctionConfig(name=SHOUT),
        "twice": RewardFunctionConfig(name="other.module:shout"),
        "argument": RewardFunctionConfig(name="exact_match", kwargs={"ignore": True}),
    }
    found = problems(block(rewards=tuple(written.values())))
    assert found == [
        ("unknown-reward", "env.rewards[0].name"),
        ("unknown-reward", "env.rewards[2].name"),
        ("bad-reward-kwargs", "env.rewards[3].kwargs.ignore"),
    ]
    assert problems(block(rewards=(written["fine"], written["fine"]))) == [("duplicate-reward", "env.rewards[1].name")]
    assert problems(block(rewards=())) == [("no-reward", "env.rewards")]


def test_problems_are_told_once() -> None:
    with pytest.raises(ConfigError):
        make_task(block("nothing"), seed=0, split="train")
    assert problems(block("nothing"), evaluated=True) == [("unknown-task", "env.task")]
