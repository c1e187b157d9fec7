"""Finds and makes the text task that a config names; the one place that knows which tasks are shipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rlplace.envs.text.naming import named, unknown_arguments
from rlplace.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlplace.config import TextEnvConfig
    from rlplace.envs.text.contract import Split, TextTask

TASKS: Mapping[str, str] = {
    "arithmetic": "rlplace.envs.text.arithmetic:Arithmetic",
    "prompts": "rlplace.envs.text.prompts:PromptSet",
    "reasoning_gym": "rlplace.envs.text.reasoning:ReasoningGym",
    "guess_number": "rlplace.envs.text.guess_number:GuessNumber",
    "toy_text": "rlplace.envs.text.toy_text:ToyText",
    "text_arena": "rlplace.envs.text.text_arena:TextArena",
}


def find_task(name: str) -> type[TextTask]:
    """The class called `name`: a shipped one, or `package.module:Class` of your own. Raises ConfigError."""
    return cast("type[TextTask]", named(name, TASKS, key="env.task", code="unknown-task", noun="text task"))


def make_task(config: TextEnvConfig, *, seed: int, split: Split) -> TextTask:
    """The task of one split. Raises ConfigError: unknown, wrong arguments, a broken or empty data set."""
    assert config.task is not None, "a run has a task"
    kind = find_task(config.task)
    kwargs = {**config.kwargs, **(config.eval_kwargs if split == "held_out" else {})}
    problems = unknown_arguments(kind, kwargs, given=("seed", "split"), key="env.kwargs", code="bad-task-kwargs")
    if problems:
        raise ConfigError(problems)
    try:
        task = kind(seed=seed, split=split, **kwargs)  # type: ignore[call-arg]  # a Protocol says nothing of this
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError([_refused(config.task, kwargs, str(error))]) from error
    if task.size == 0:
        raise ConfigError([_empty(config.task, kwargs)])
    if split == "held_out" and task.size is not None and not config.eval_kwargs:
        raise ConfigError([_not_held_out(config.task, task.size)])
    return task


def check(config: TextEnvConfig, *, seed: int, evaluated: bool) -> tuple[Problem, ...]:
    """What is wrong with the task and its rewards, by making them; `evaluated`: held-out prompts are needed too."""
    from rlplace.envs.text.rewards import find_rewards

    problems: list[Problem] = []
    splits: tuple[Split, ...] = ("train", "held_out") if evaluated else ("train",)
    for split in splits:
        try:
            task = make_task(config, seed=seed, split=split)
            find_rewards(config.rewards, task)
        except ConfigError as error:
            problems += [p for p in error.problems if p not in problems]
    return tuple(problems)


def _shown(kwargs: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in kwargs.items()) or "none"


def _refused(task: str, kwargs: Mapping[str, object], why: str) -> Problem:
    return Problem(
        code="bad-task-kwargs",
        key="env.kwargs",
        what="the task does not take these arguments",
        got=_shown(kwargs),
        why=f"{task} says: {why}",
        fix="correct what it names, or kwargs: {}",
    )


def _empty(task: str, kwargs: Mapping[str, object]) -> Problem:
    return Problem(
        code="empty-dataset",
        key="env.kwargs",
        what="there is no prompt in it",
        got=_shown(kwargs),
        why=f"{task} has to ask something",
        fix="path: <a file or folder with at least one row>",
    )


def _not_held_out(task: str, size: int) -> Problem:
    return Problem(
        code="nothing-held-out",
        key="env.eval_kwargs",
        what="the held-out prompts would be those that are trained on",
        got="{}",
        why=f"{task} has {size} prompts, and nothing says which of them, or which others, to evaluate on",
        fix="eval_kwargs: {path: <other prompts>}        (or: runner.eval_every: 0)",
    )
