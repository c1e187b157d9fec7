"""Episodes of environments on a server of OpenEnv."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.envs.text.contract import MessagesWithTools, NextTurn
from rlplace.envs.text.openenv_client import NoAnswer, RefusedAction
from rlplace.envs.text.openenv_tasks import OpenEnv, OpenEnvEpisode
from rlplace.errors import ConfigError, Problem
from tests.openenv_server import (
    Adding,
    Deaf,
    Guess,
    Silent,
    Unsteady,
    Unverified,
    Vague,
    serving,
)


def task(url: str | list[str], **kwargs: Any) -> OpenEnv:
    return OpenEnv(seed=0, split="train", url=url, **kwargs)


def problem_of(error: pytest.ExceptionInfo[ConfigError]) -> Problem:
    (problem,) = error.value.problems
    return problem


def played(episode: OpenEnvEpisode) -> list[str]:
    """What the environment says to a policy that halves the numbers that are left."""
    low, high = 1, 9
    said = [str(episode.prompt)]
    while True:
        guess = (low + high) // 2
        answer = episode.reply(f"Not 3, so I take {guess}")
        if answer is None:
            return said
        assert isinstance(answer, str)
        said.append(answer)
        if answer == "higher":
            low = guess + 1
        else:
            high = guess - 1


def test_the_last_number_of_an_answer_is_the_action_and_rewards_are_added() -> None:
    with serving(Guess) as url:
        for number in range(6):
            episode = task(url).episode(number)
            said = played(episode)
            wrong = len(said) - 1
            assert said[0] == "Guess a number from 1 to 9."
            assert episode.facts() == {
                "score": 1.0 - 0.125 * wrong,
                "last_reward": 1.0,
                "steps": wrong + 1,
                "parts": {"refused_actions": 0.0},
            }


def test_an_episode_that_ends_without_any_reward_has_no_score() -> None:
    """A verification that has failed is no answer that is worth 0."""
    with serving(Unverified) as url:
        episode = task(url).episode(0)
        # A turn limit may end it before there is a reward
        assert episode.facts()["score"] == 0.0
        episode = task(url).episode(0)
        assert episode.reply("5") is None
        facts = episode.facts()
        assert "score" not in facts
        assert facts["steps"] == 1


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("I take 3.0", 3),
        ("1,000", 1000),
        ("(100, 200)", 200),
        ("rows 1-3", 3),
        ("x = -2", -2),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_the_last_whole_number_of_an_answer(answer: str, number: int) -> None:
    with serving(Guess) as url:
        assert task(url).action_of(answer) == {"guess": number}


@pytest.mark.parametrize(
    ("answer", "why"),
    [("2.7", "2.7, is not whole"), ("7" * 5000, "too large"), ("none", "no number")],
)
def test_an_answer_without_a_whole_number_is_refused(answer: str, why: str) -> None:
    with serving(Guess) as url, pytest.raises(RefusedAction, match=why):
        task(url).action_of(answer)


def test_samples_of_a_prompt_are_equal_and_prompts_differ() -> None:
    with serving(Guess) as url:
        one, other = task(url).episodes(3, 2)
        assert played(one) == played(other)
        several = [tuple(played(task(url).episode(number))) for number in range(9)]
        assert len(set(several)) > 1
        assert len({task(url).identity(number) for number in range(9)}) == 9


def test_a_refused_action_is_told_to_the_policy_and_the_episode_goes_on() -> None:
    with serving(Guess) as url:
        episode = task(url).episode(0)
        assert episode.reply("ten") == (
            "The environment refuses the action: the answer has no number"
        )
        refused = episode.reply("10")
        assert isinstance(refused, str)
        assert "less than or equal to 9" in refused
        assert len(played(episode)) > 0
        facts = episode.facts()
        assert facts["last_reward"] == 1.0
        assert facts["parts"] == {"refused_actions": 2 / (2 + facts["steps"])}


def test_fields_prompt_and_arguments_of_reset() -> None:
    with serving(Guess) as url:
        told = task(
            url, fields={"remark": "x"}, prompt="A game.", reset={"highest": 1}
        ).episode(0)
        assert told.prompt == "A game.\n\nGuess a number from 1 to 1."
        assert told.reply("1") is None
        assert told.facts()["score"] == 1.0


def test_rows_are_arguments_of_reset_and_facts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"highest": 2}, {"highest": 5}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with serving(Guess) as url:
        of_rows = task(url, path=str(file))
        for number in range(4):
            episode = of_rows.episode(number)
            highest = episode.facts()["highest"]
            assert episode.prompt == f"Guess a number from 1 to {highest}."
        assert len({of_rows.identity(number) for number in range(4)}) == 2


def test_without_one_field_that_is_needed_the_answer_is_the_action_in_json() -> None:
    class Pair(Guess):
        action: ClassVar[Mapping[str, Any]] = {
            "properties": {"guess": {"type": "integer"}, "remark": {"type": "string"}},
            "required": ["guess", "remark"],
        }

    with serving(Pair) as url:
        episode = task(url, reset={"highest": 1}).episode(0)
        refused = episode.reply("1")
        assert isinstance(refused, str)
        assert "JSON object" in refused
        assert episode.reply('{"guess": 1, "remark": "sure"}') is None


def called(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def test_a_policy_calls_the_tools_of_an_environment() -> None:
    with serving(Adding) as url:
        episode = task(url, tool_format="hermes").episode(0)
        prompt = episode.prompt
        assert isinstance(prompt, MessagesWithTools)
        assert [tool["function"]["name"] for tool in prompt.tools] == ["add"]
        question = prompt[0].text
        assert question.startswith("What is ")
        turn = episode.reply(f"{called('add', a=50, b=1)} {called('sub', a=1)}")
        assert isinstance(turn, NextTurn)
        assert turn.after == 0
        results = turn.messages
        assert not isinstance(results, str)
        assert [(each.role, each.name, each.text) for each in results] == [
            ("tool", "add", "51"),
            ("tool", "sub", "Error: no such tool"),
        ]
        a, b = (int(word) for word in question.strip("?").split() if word.isdigit())
        assert episode.reply(called("add", a=a, b=b)) is None
        facts = episode.facts()
        assert facts["score"] == 1.0
        assert facts["parts"] == {"refused_actions": 1 / 3}


def test_an_answer_without_a_call_ends_an_episode_with_tools() -> None:
    with serving(Adding) as url:
        episode = task(url, tool_format="hermes").episode(0)
        assert episode.reply("I give up.") is None
        assert episode.facts()["score"] == 0.0


def test_an_ended_episode_leaves_room_for_another() -> None:
    with serving(Guess, sessions=1) as url:
        for number in range(3):
            played(task(url).episode(number))
        # The last one was not played, and is no longer used
        task(url).episode(3)
        episode = task(url).episode(4)
        with pytest.raises(ConfigError) as error:
            task(url).episode(5)
        problem = problem_of(error)
        assert problem.code == "environment-server"
        assert "1 sessions" in str(problem.why)
        assert "max_concurrent_envs" in str(problem.fix)
        played(episode)


def test_a_server_that_is_not_there_is_told_before_the_start() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigError) as error:
            task(url)
    problem = problem_of(error)
    assert problem.code == "environment-server"
    assert problem.got == url
    assert "refused" in str(problem.why)


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://[::1", "", []])
def test_what_is_no_address(url: Any) -> None:
    with pytest.raises(ConfigError) as error:
        task(url)
    assert "http://127.0.0.1:8000" in str(problem_of(error).fix)


def test_an_unknown_field_gets_the_nearest_one() -> None:
    with serving(Guess) as url:
        with pytest.raises(ConfigError) as error:
            task(url, action="gues")
        assert problem_of(error).fix == "action: guess"
        with pytest.raises(ConfigError) as error:
            task(url, fields={"remarks": 1})
        assert problem_of(error).fix == "fields: remark"


def test_a_tool_without_a_name_is_refused() -> None:
    class Nameless(Adding):
        def step(self, action: Mapping[str, Any]) -> dict[str, Any]:
            return {"observation": {"tools": [{"description": "Adds."}]}}

    with serving(Nameless) as url, pytest.raises(ConfigError) as error:
        task(url).episode(0)
    assert "has no name" in str(problem_of(error).why)


def test_different_first_observations_of_one_prompt_are_refused() -> None:
    with serving(Unsteady) as url, pytest.raises(ConfigError) as error:
        task(url).episodes(0, 2)
    assert "same seed" in problem_of(error).what


def test_a_refused_reset_has_the_reason() -> None:
    with serving(Deaf) as url, pytest.raises(ConfigError) as error:
        task(url).episode(0)
    assert "no such difficulty" in str(problem_of(error).why)


def test_a_server_that_does_not_answer_a_step_is_named() -> None:
    with serving(Silent) as url:
        episode = task(url, timeout_s=2.0).episode(0)
        try:
            with pytest.raises(NoAnswer, match=f"{url}: no answer to step in 2 s"):
                episode.reply("1")
        finally:
            Silent.free.set()


def test_a_reward_that_is_no_number_is_not_taken_for_a_refused_action() -> None:
    with serving(Vague) as url:
        episode = task(url, tool_format="hermes").episode(0)
        with pytest.raises(NoAnswer, match="the answer to step is not OpenEnv's"):
            episode.reply(called("add", a=1))
