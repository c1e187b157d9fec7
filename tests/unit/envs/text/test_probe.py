"""Reward functions are tried with one row of the task before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.config.blocks.language_model import (
    RewardConfig,
    RewardFunctionConfig,
    TextEnvConfig,
)
from rlplace.envs.registry import check_task, make_task
from rlplace.envs.text import Message, Split, TextEpisode
from rlplace.envs.text.probe import probe_problems
from rlplace.envs.text.rewards import find_rewards
from rlplace.errors import Problem

ODD = "tests.odd_rewards"
FOREIGN = "tests.foreign_rewards"


def rows(folder: Path, **columns: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2?", "answer": "4"} | columns))
    return {"path": str(file)}


def found(
    folder: Path, name: str, columns: Mapping[str, Any] | None = None, **kwargs: Any
) -> list[Problem]:
    config = TextEnvConfig(
        task="prompts",
        kwargs=rows(folder, **(columns or {})),
        rewards=(RewardFunctionConfig(name=name, kwargs=kwargs),),
    )
    return check_task(config, seed=0, evaluated=False)


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        ("matches", {"pattern": "("}, "missing ), unterminated subpattern"),
        (
            "length_penalty",
            {"free_tokens": 20, "longest_tokens": 10},
            "longest_tokens must be above free_tokens, got 10 and 20",
        ),
        ("length_penalty", {}, "TypeError: length_penalty() missing 2 required"),
        ("score", {}, "the task gives no fact 'score'; its facts: answer"),
        ("reasoning_score", {}, "KeyError: 'entry'"),
    ],
)
def test_wrong_arguments_and_missing_facts_of_shipped_functions(
    tmp_path: Path, name: str, kwargs: dict[str, Any], why: str
) -> None:
    (problem,) = found(tmp_path, name, **kwargs)
    assert (problem.code, problem.key) == ("reward-probe", "env.rewards[0].name")
    assert why in str(problem.why)
    assert "facts of the first row: answer" in str(problem.fix)


def test_a_text_in_place_of_a_number(tmp_path: Path) -> None:
    given = {"free_tokens": "a", "longest_tokens": 10}
    (problem,) = found(tmp_path, "length_penalty", **given)
    assert problem.code == "bad-reward-kwargs"
    assert problem.key == "env.rewards[0].kwargs.free_tokens"
    assert problem.fix == "free_tokens: <a whole number>"


def test_a_right_answer_that_is_a_mapping(tmp_path: Path) -> None:
    columns = {"answer": {"target": 4, "numbers": [2, 2]}}
    for name in ("math_answer", "math_verify", "exact_match", "contains"):
        (problem,) = found(tmp_path, name, columns)
        assert "the right answer is a mapping with target, numbers" in str(problem.why)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{ODD}:raises", "for the answer '4': KeyError: '4'"),
        (f"{ODD}:text", "for the answer '4', it returned 'very good'"),
        (f"{ODD}:nothing", "for the answer '4': ValueError: a NoneType for 2 answers"),
        (
            f"{ODD}:always_one",
            "for the answer '4': ValueError: 1 rewards for 2 answers",
        ),
        (f"{FOREIGN}:trl_columns", "missing 1 required positional argument: 'sol"),
        (f"{ODD}:changes_facts", "for the answer '4': KeyError: 'hints'"),
    ],
)
def test_functions_of_a_user_that_fail_with_each_answer(
    tmp_path: Path, name: str, why: str
) -> None:
    (problem,) = found(tmp_path, name)
    assert (problem.code, problem.key) == ("reward-probe", "env.rewards[0].name")
    assert why in str(problem.why)


@pytest.mark.parametrize(
    "name",
    [
        "exact_match",
        "math_answer",
        "math_verify",
        f"{ODD}:length",
        # Perhaps only here, or only with this answer
        f"{ODD}:exits",
        f"{ODD}:not_a_number",
        f"{ODD}:raises_anything_else",
        f"{ODD}:raises_alike",
        f"{ODD}:raises_derived",
        f"{FOREIGN}:trl_texts",
        f"{FOREIGN}:reward_func",
        f"{FOREIGN}:a_coroutine",
    ],
)
def test_what_may_work_is_no_problem(tmp_path: Path, name: str) -> None:
    config = TextEnvConfig(
        task="prompts",
        kwargs=rows(tmp_path),
        chat=False,
        rewards=(RewardFunctionConfig(name=name),),
    )
    assert check_task(config, seed=0, evaluated=False) == []


def test_functions_of_reward_components_are_tried_too(tmp_path: Path) -> None:
    config = TextEnvConfig(task="prompts", kwargs=rows(tmp_path))
    components = {
        "reward.a": RewardConfig(function=f"{ODD}:raises"),
        "reward.b": RewardConfig(function="matches", kwargs={"pattern": "("}),
        "reward.c": RewardConfig(function="no_such"),
    }
    keys = [
        problem.key
        for problem in check_task(
            config, seed=0, evaluated=False, components=components
        )
    ]
    assert keys == ["reward.a.function", "reward.b.function"]
    (problem,) = check_task(
        config, seed=0, evaluated=False, components=components, own=False
    )
    assert problem.key == "reward.b.function"


class Played:
    """Its episodes have several turns, or cannot begin."""

    rewards: ClassVar[Sequence[str]] = (f"{ODD}:raises",)
    size: int | None = None

    def __init__(self, *, seed: int, split: Split, begins: bool = True) -> None:
        self._begins = begins

    def episode(self, number: int) -> TextEpisode:
        if not self._begins:
            raise OSError("no server")
        return Several()


class Several:
    prompt: Sequence[Message] = ()

    def reply(self, answer: str) -> str | None:
        return None

    def facts(self) -> Mapping[str, Any]:
        raise AssertionError("it was not played")


class Long(Played):
    """Its episodes take long to begin."""

    def episodes(self, number: int, samples: int) -> list[TextEpisode]:
        raise AssertionError("it was begun")


def test_tasks_that_must_be_played_are_not() -> None:
    for name in ("Played", "Long"):
        config = TextEnvConfig(task=f"{__name__}:{name}")
        assert check_task(config, seed=0, evaluated=False) == []
    config = TextEnvConfig(task=f"{__name__}:Played", kwargs={"begins": False})
    assert check_task(config, seed=0, evaluated=False) == []


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (None, "NoneType"),
        ("f(1)", "assert nothing"),
        ("", "empty"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs"),
    ],
)
def test_tests_of_every_row_are_read(tmp_path: Path, tests: str, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"prompt": "?", "answer": "a", "tests": "assert f(1) == 2"}
    lines = [good, good, {**good, "tests": tests}, good]
    file.write_text("\n".join(map(json.dumps, lines)))
    config = TextEnvConfig(
        task="prompts",
        kwargs={"path": str(file)},
        rewards=[RewardFunctionConfig(name="unit_tests")],
    )
    (problem,) = check_task(config, seed=0, evaluated=False)
    assert problem.code == "bad-row"
    assert reason in (problem.why or "")
    assert problem.source is not None
    assert problem.source.line == 3


def test_right_answers_of_every_row_are_read(tmp_path: Path) -> None:
    config = TextEnvConfig(
        task="prompts",
        kwargs=written(tmp_path, [{"answer": "4"}, {"answer": {"x": 1}}]),
        rewards=[RewardFunctionConfig(name="exact_match")],
    )
    (problem,) = check_task(config, seed=0, evaluated=False)
    assert problem.code == "bad-row"
    assert problem.source is not None
    assert problem.source.line == 2
    null = {"answer": ["4", None]}
    empty = dataclasses.replace(
        config, kwargs=written(tmp_path, [{"answer": "4"}, null])
    )
    (problem,) = check_task(empty, seed=0, evaluated=False)
    assert "empty right answer" in problem.what


def written(folder: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write rows of a data set, and return the arguments of its task."""
    file = folder / "written.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "?", **line}) for line in lines))
    return {"path": str(file)}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("relative_length", True),
        ("RelativeLength", True),
        ("own_length", False),
        ("drawn", False),
        ("compared", True),
    ],
)
def test_a_function_that_compares_answers_is_told(
    tmp_path: Path, name: str, told: bool
) -> None:
    """Where each prompt has one answer, such a reward is the same for every answer."""
    problems = found(tmp_path, f"{ODD}:{name}")
    keys = [(problem.code, problem.key) for problem in problems]
    assert keys == [("reward-sees-one-answer", "env.rewards[0].name")] * told


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("reward_list", "solution", False),
        ("reward_list", None, True),
        ("length_of_solution", None, False),
        ("own_length", None, False),
    ],
)
def test_a_function_that_gets_no_right_answers_is_told(
    tmp_path: Path, name: str, answer: str | None, told: bool
) -> None:
    """It compares each answer with None, and all rewards are equal."""
    module = ODD if name == "own_length" else FOREIGN
    config = TextEnvConfig(
        task="prompts",
        kwargs={**written(tmp_path, [{"solution": "4"}]), "answer": answer},
        rewards=(RewardFunctionConfig(name=f"{module}:{name}"),),
        chat=False,
    )
    problems = check_task(config, seed=0, evaluated=False, samples_per_prompt=2)
    assert [problem.code for problem in problems] == ["reward-without-labels"] * told


@pytest.mark.parametrize(
    ("samples", "eval_samples", "fix"),
    [
        (4, None, ""),
        (4, 4, ""),
        (4, 1, "runner.eval_samples: <2 or more>"),
        (1, None, "algorithm.samples_per_prompt: <2 or more>"),
    ],
)
def test_a_function_that_compares_answers_is_told_where_there_is_one(
    tmp_path: Path, samples: int, eval_samples: int | None, fix: str
) -> None:
    config = TextEnvConfig(
        task="prompts",
        kwargs=rows(tmp_path),
        rewards=(RewardFunctionConfig(name=f"{ODD}:relative_length"),),
    )
    task = make_task(config, seed=0, split="train")
    problems = probe_problems(
        find_rewards(config.rewards, task, chat=config.chat),
        task,
        timeout_s=20,
        memory_bytes=4 << 30,
        samples=samples,
        eval_samples=eval_samples,
    )
    assert [problem.code for problem in problems] == ["reward-sees-one-answer"] * bool(
        fix
    )
    assert all(fix in str(problem.fix) for problem in problems)


def test_a_function_that_compares_answers_hides_no_other_warning(
    tmp_path: Path,
) -> None:
    config = TextEnvConfig(
        task="prompts",
        kwargs=rows(tmp_path),
        eval_kwargs=rows(tmp_path),
        rewards=(RewardFunctionConfig(name=f"{ODD}:relative_length"),),
    )
    codes = [problem.code for problem in check_task(config, seed=0, evaluated=True)]
    assert codes == ["reward-sees-one-answer", "held-out-in-training"]


@pytest.mark.parametrize(
    ("answer", "prompt", "system", "told"),
    [
        ("B", "Which one?", None, True),
        ("(1, 2)", "Where?", None, True),
        ("B", "Which one? Write \\\\boxed{...}.", None, False),
        ("B", "Which one?", "Put it within \\\\boxed{}.", False),
        ("B", "Which one? Write it in a box.", None, False),
        ("B", "Which of the boxes?", None, True),
        ("4", "2 + 2?", None, False),
        ("It is so. #### 4", "2 + 2?", None, False),
    ],
)
def test_a_right_answer_that_counts_in_a_box_alone_is_told(
    tmp_path: Path, answer: str, prompt: str, system: str | None, told: bool
) -> None:
    config = TextEnvConfig(
        task="prompts",
        kwargs=rows(tmp_path, answer=answer, prompt=prompt),
        system=system,
    )
    problems = check_task(config, seed=0, evaluated=False)
    assert [problem.code for problem in problems] == ["box-not-asked"] * told


def test_what_the_chat_template_says_belongs_to_the_prompt(tmp_path: Path) -> None:
    """As that of Qwen2.5-Math, which asks for a box in a system message of its own."""
    written = {"answer": "B", "prompt": "Which?", "system": "Be brief."}
    config = TextEnvConfig(task="prompts", kwargs=rows(tmp_path, **written))
    problems = check_task(
        config,
        seed=0,
        evaluated=False,
        rendered=lambda prompt: f"Be  brief. Answer in \\boxed{{}}. {prompt}",
    )
    assert problems == []


def test_a_system_column_that_env_system_says_too_is_no_news(tmp_path: Path) -> None:
    kwargs = rows(tmp_path, system_prompt="Be brief.\n")
    config = TextEnvConfig(task="prompts", kwargs=kwargs, system="Be brief.")
    assert check_task(config, seed=0, evaluated=False) == []


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"system_prompt": "Be brief.", "input": ""}, ["system_prompt"]),
        ({"input": "Hallo", "level": "hard"}, ["input"]),
        # It is in the prompt, or the answer
        ({"context": "2 + 2"}, []),
        ({"input": "4"}, []),
        ({}, []),
    ],
)
def test_columns_that_belong_to_the_prompt_are_told(
    tmp_path: Path, columns: Mapping[str, str], names: list[str]
) -> None:
    config = TextEnvConfig(task="prompts", kwargs=rows(tmp_path, **columns))
    problems = check_task(config, seed=0, evaluated=False)
    assert [problem.code for problem in problems] == ["column-not-in-prompt"] * len(
        names
    )
    for problem, name in zip(problems, names, strict=True):
        assert problem.got is not None
        assert problem.got.startswith(name)
