"""Reward functions with signatures of other libraries, and functions that are async, return mappings or are classes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest

from rlplace.envs.text import Message, Transcript
from rlplace.envs.text.graders import ProcessGrader
from rlplace.envs.text.rewards import Case, Reward, named_reward
from rlplace.errors import ConfigError

MODULE = "tests.foreign_rewards"
TOLD = Transcript(
    prompt="2 + 2?",
    answers=("4",),
    replies=(),
    facts={
        "answer": "4",
        "solution": "4",
        "data_source": "openai/gsm8k",
        "extra_info": {"index": 7},
    },
    tokens=1,
    truncated=False,
)


def value(
    name: str, told: Transcript = TOLD, *, chat: bool = False, **kwargs: Any
) -> Any:
    reward = named_reward(f"{MODULE}:{name}", kwargs, key="env.rewards[0]", chat=chat)
    return reward.function()(told)


def test_functions_over_lists_get_several_answers_in_one_call() -> None:
    """An answer that lacks a column which another has gets None there."""
    reward = named_reward(f"{MODULE}:trl_columns_seen", {}, key="env.rewards[0]")
    other = dataclasses.replace(TOLD, answers=("5",), facts={"answer": "4"})
    assert reward.takes_lists
    assert reward.function_of_several()([TOLD, other]) == [1.0, 0.0]
    for name in ("reward_func", "compute_scores", "BriefInLists"):
        reward = named_reward(f"{MODULE}:{name}", {}, key="env.rewards[0]")
        assert reward.takes_lists
        wrong = dataclasses.replace(TOLD, answers=("no",))
        assert reward.function_of_several()([wrong, TOLD])[0] == 0
        assert reward.function_of_several()([TOLD, wrong])[1] == 0
    for name in ("compute_score", "a_mapping", "Brief"):
        assert not named_reward(f"{MODULE}:{name}", {}, key="x").takes_lists


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("trl_texts", 1.0),
        ("trl_columns", 1.0),
        ("trl_async", 2.0),
        ("reward_func", 1.0),
        ("reward_list", 3.0),
        ("compute_score", 1.0),
        ("compute_dict", 1.0),
        ("compute_async", 1.0),
        ("compute_scores", 1.0),
        ("a_mapping", 1.0),
        ("a_coroutine", 1.0),
        ("Brief", 1.0),
        ("BriefInLists", 1.0),
        ("brief", 1.0),
    ],
)
def test_functions_work_as_they_are(name: str, right: float) -> None:
    assert value(name) == right


@pytest.mark.parametrize("name", ["in_completions", "in_solution", "in_answers"])
def test_a_reply_of_the_environment_is_no_answer(name: str) -> None:
    """A tool that returns the right answer earns nothing."""
    told = dataclasses.replace(TOLD, answers=("ask", "no"), replies=("4",))
    assert value(name, told) == 0
    assert value(name, dataclasses.replace(told, answers=("ask", "4"))) == 1


@pytest.mark.parametrize(
    "name",
    [
        "trl_columns",
        "reward_func",
        "compute_score",
        "compute_dict",
        "compute_async",
        "compute_scores",
        "a_coroutine",
        "Brief",
        "BriefInLists",
        "brief",
    ],
)
def test_they_see_the_answer(name: str) -> None:
    assert value(name, dataclasses.replace(TOLD, answers=("no",))) == 0


def test_a_chat_is_shown_to_functions_of_trl_as_messages() -> None:
    assert value("trl_messages", chat=True) == 1
    messages = dataclasses.replace(TOLD, prompt=[Message("user", "2 + 2?")])
    assert value("trl_messages", messages) == 1
    assert value("trl_messages", dataclasses.replace(messages, answers=("5",))) == 0
    # None: the function does not apply to this answer
    told = dataclasses.replace(messages, answers=("?",))
    assert value("trl_messages", told) is None


def test_arguments_of_the_config_are_given() -> None:
    assert value("compute_dict", bonus=0.5) == 1.5
    long = dataclasses.replace(TOLD, answers=("four",))
    assert value("Brief", long, most=4) == 1
    assert value("Brief", long, most=3) == 0


@pytest.mark.parametrize(
    ("name", "kwargs", "code"),
    [
        ("compute_dict", {"bonsu": 1}, "bad-reward-kwargs"),
        ("trl_columns", {"most": 1}, "bad-reward-kwargs"),
        ("Brief", {"mots": 1}, "bad-reward-kwargs"),
        ("brief", {"most": 1}, "bad-reward-kwargs"),
        ("NOT_CALLABLE", {}, "unknown-reward"),
    ],
)
def test_what_is_wrong_with_them_is_found_before_the_start(
    name: str, kwargs: dict[str, Any], code: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        named_reward(f"{MODULE}:{name}", kwargs, key="env.rewards[0]")
    assert caught.value.codes == (code,)


def test_several_of_them_grade_one_answer_in_a_process() -> None:
    names = ["trl_columns", "trl_async", "reward_func", "compute_dict", "Brief"]
    rewards = [
        named_reward(f"{MODULE}:{name}", {}, key=f"env.rewards[{at}]")
        for at, name in enumerate(names)
    ]
    assert list(graded(rewards, TOLD).values()) == [1.0, 2.0, 1.0, 1.0, 1.0]


def graded(rewards: list[Reward], told: Transcript) -> dict[str, float]:
    grader = ProcessGrader(rewards, timeout_s=60, memory_bytes=4 << 30, processes=1)
    with contextlib.closing(grader):
        grader.submit(Case(group=0, sample=0, transcript=told))
        grader.whole(0)
        done: list[Any] = []
        while not done:
            done = grader.done(wait=True)
    ((_, values),) = done
    return dict(values)


def test_a_function_of_trl_that_does_not_apply_gives_no_reward() -> None:
    """Its None is no 0: the mean of its rewards is of the other answers."""
    names = ("trl_even", "trl_async")
    rewards = [named_reward(f"{MODULE}:{name}", {}, key="x") for name in names]
    assert graded(rewards, TOLD) == {"trl_async": 2.0}
    even = dataclasses.replace(TOLD, answers=("44",))
    assert graded(rewards, even) == {"trl_even": 1.0, "trl_async": 2.0}
