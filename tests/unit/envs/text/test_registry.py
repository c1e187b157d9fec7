"""Tasks and reward functions by name, and what is said of names and arguments that mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.config.blocks.language_model import RewardFunctionConfig, TextEnvConfig
from rlplace.envs.registry import TASKS, check_task, find_task, make_task
from rlplace.envs.text import OneTurn, Transcript
from rlplace.envs.text.rewards import REWARDS, Reward, find_rewards


class Echo:
    """A task of a user's."""

    rewards: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, seed: int, split: str, word: str = "yes", size: int | None = None
    ) -> None:
        if not word:
            raise ValueError("word must not be empty")
        self.word, self.size = f"{word}/{split}", size

    def episode(self, number: int) -> OneTurn:
        return OneTurn(prompt=self.word)


def shout(transcript: Transcript, *, loud: float = 1.0) -> float:
    return loud


def brevity(prompts: list[str], answers: list[str]) -> list[float]:
    return [-float(len(answer)) for answer in answers]


ECHO, SHOUT = f"{__name__}:Echo", f"{__name__}:shout"


def block(
    task: str = ECHO,
    *,
    rewards: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name=SHOUT),),
    **kwargs: Any,
) -> TextEnvConfig:
    return TextEnvConfig(task=task, kwargs=kwargs, rewards=rewards)


def problems(
    config: TextEnvConfig, *, evaluated: bool = False
) -> list[tuple[str, str]]:
    return [(p.code, p.key) for p in check_task(config, seed=0, evaluated=evaluated)]


@pytest.mark.parametrize("name", TASKS)
def test_every_shipped_task_is_there(name: str) -> None:
    assert callable(find_task(name).episode)
    assert all(reward in REWARDS for reward in find_task(name).rewards)


def test_tasks_and_rewards_of_your_own() -> None:
    task = make_task(block(word="no"), seed=0, split="train")
    assert task.episode(0).prompt == "no/train"
    (reward,) = find_rewards(
        [RewardFunctionConfig(name=SHOUT, weight=2.0, kwargs={"loud": 3})], task
    )
    assert (reward.name, reward.weight, reward.trusted) == ("shout", 2.0, False)
    transcript = Transcript(
        prompt="", answers=("yes",), replies=(), facts={}, tokens=0, truncated=False
    )
    assert reward.function()(transcript) == 3
    (reward,) = find_rewards([RewardFunctionConfig(name=f"{__name__}:brevity")], task)
    assert (reward.trusted, reward.function()(transcript)) == (False, -3)


def test_without_rewards_the_task_s_own_count() -> None:
    config = TextEnvConfig(task="arithmetic")
    assert find_rewards((), make_task(config, seed=0, split="train")) == (
        Reward(name="math_answer", written="math_answer"),
    )
    assert problems(config) == []


@pytest.mark.parametrize(
    ("config", "code", "key", "fix"),
    [
        (block("arithmetics"), "unknown-task", "env.task", "task: arithmetic"),
        (block(f"{__name__}:Ech"), "unknown-task", "env.task", None),
        (block("no.such.module:Echo"), "unknown-task", "env.task", None),
        (block(wrd="no"), "bad-task-kwargs", "env.kwargs.wrd", "word: no"),
        (block(seed=3), "bad-task-kwargs", "env.kwargs.seed", None),
        (block(word=""), "bad-task-kwargs", "env.kwargs", None),
        (block(size=0), "empty-dataset", "env.kwargs", None),
        (
            block(rewards=()),
            "no-reward",
            "env.rewards",
            "rewards: [{name: math_answer}]",
        ),
    ],
)
def test_what_is_wrong_with_a_task(
    config: TextEnvConfig, code: str, key: str, fix: str | None
) -> None:
    (problem,) = check_task(config, seed=0, evaluated=True)
    assert (problem.code, problem.key) == (code, key)
    assert fix in (None, problem.fix)


def test_an_empty_file_is_an_empty_data_set(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    config = TextEnvConfig(
        task="prompts", kwargs={"path": str(tmp_path / "train.jsonl")}
    )
    assert problems(config) == [("empty-dataset", "env.kwargs")]


def test_what_is_wrong_with_held_out_prompts_is_told_by_their_own_key(
    tmp_path: Path,
) -> None:
    paths = {
        name: tmp_path / f"{name}.jsonl"
        for name in ("whole", "empty", "bad", "nowhere")
    }
    for name, text in {
        "whole": '{"prompt": "1 + 1?", "answer": "2"}',
        "empty": "",
        "bad": "{}",
    }.items():
        paths[name].write_text(text)
    for name, found in {
        "empty": ("empty-dataset", "env.eval_kwargs"),
        "bad": ("bad-row", "env.eval_kwargs.path"),
        "nowhere": ("no-dataset", "env.eval_kwargs.path"),
    }.items():
        own = {"path": str(paths[name])}
        config = TextEnvConfig(
            task="prompts", kwargs={"path": str(paths["whole"])}, eval_kwargs=own
        )
        (problem,) = check_task(config, seed=0, evaluated=True)
        assert (problem.code, problem.key) == found
        assert "env.kwargs" not in str(problem.fix)
    twice = TextEnvConfig(
        task="prompts", kwargs={"path": str(paths["bad"])}, eval_kwargs={"rows": [0, 1]}
    )
    assert [p.key for p in check_task(twice, seed=0, evaluated=True)] == [
        "env.kwargs.path"
    ]


def test_a_task_with_an_end_says_what_is_held_out() -> None:
    assert problems(block(size=3), evaluated=True) == [
        ("nothing-held-out", "env.eval_kwargs")
    ]
    config = TextEnvConfig(
        task=ECHO,
        kwargs={"size": 3},
        eval_kwargs={"word": "other"},
        rewards=(RewardFunctionConfig(name=SHOUT),),
    )
    assert problems(config, evaluated=True) == []
    assert (
        make_task(config, seed=0, split="held_out").episode(0).prompt
        == "other/held_out"
    )
    assert problems(block(), evaluated=True) == []


def test_rewards_that_mean_nothing() -> None:
    written: Mapping[str, RewardFunctionConfig] = {
        "unknown": RewardFunctionConfig(name="math_anwser"),
        "fine": RewardFunctionConfig(name=SHOUT),
        "twice": RewardFunctionConfig(name="other.module:shout"),
        "argument": RewardFunctionConfig(name="exact_match", kwargs={"ignore": True}),
    }
    assert problems(block(rewards=tuple(written.values()))) == [
        ("unknown-reward", "env.rewards[0].name"),
        ("no-reward-module", "env.rewards[2].name"),
        ("bad-reward-kwargs", "env.rewards[3].kwargs.ignore"),
    ]
    assert problems(block(rewards=(written["fine"], written["fine"]))) == [
        ("duplicate-reward", "env.rewards[1].name")
    ]
