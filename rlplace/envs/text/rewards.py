"""Reward functions: finds those that a config names, checks what they return, and adapts those over lists.

::

    def shipped(transcript: Transcript, **kwargs) -> float: ...
    def brevity(prompts: list[str], answers: list[str], labels: list[object]) -> list[float]: ...    as other libraries
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.envs.registry import named, unknown_arguments
from rlplace.envs.text.contract import Transcript
from rlplace.errors import ConfigError, Problem, RewardError

if TYPE_CHECKING:
    from rlplace.config.schema import RewardFunctionConfig
    from rlplace.envs.text.contract import TextTask

RewardFunction = Callable[..., float]  # (transcript, **kwargs); may be called in another process
REWARDS: Mapping[str, str] = {
    name: f"rlplace.envs.text.verifiers:{name}"
    for name in (
        *("exact_match", "contains", "math_answer", "matches", "score"),
        *("length_penalty", "unit_tests", "unscored", "reasoning_score"),
    )
}
_APART = {"matches", "reasoning_score", "unit_tests"}  # patterns, libraries and code that may never come to an end
_SHOWN = 400  # characters of an answer in an error
_LISTS = ("prompts", "answers", "labels")
_FIXES = {
    "reward-not-finite": "return a finite number for every answer, 0.0 for a useless one",
    "reward-raised": "catch in the function what an answer can cause, and return 0.0",
    "reward-timeout": "env.reward_timeout_s=<longer>, or give up earlier in the function and return 0.0",
    "reward-died": "give up in the function before it takes so much memory, and return 0.0",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function of a run; a value that travels to other processes with the function by its name."""

    name: str  # of the metric: the part behind the colon of a long name
    written: str  # as the config names it
    weight: float = 1.0
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    lists: bool = False  # a function over lists, called with lists of one: each episode has limits of its own

    @property
    def trusted(self) -> bool:
        """Shipped and quick: it neither hangs nor takes much memory."""
        return not self.lists and self.written in REWARDS and self.written not in _APART

    def function(self) -> Callable[[Transcript], float]:
        function = find_reward(self.written)
        if self.lists:
            return functools.partial(_of_one, function, self.kwargs)
        return functools.partial(function, **self.kwargs)


def find_reward(name: str) -> RewardFunction:
    """Return the function called `name`: shipped, or `package.module:function` of your own. Raises ConfigError."""
    function: RewardFunction = named(name, REWARDS, key="env.rewards", code="unknown-reward", noun="reward function")
    return function


def find_rewards(written: Sequence[RewardFunctionConfig], task: TextTask) -> tuple[Reward, ...]:
    """Return the rewards of a config, or the task's own. Raises ConfigError: unknown, duplicate, wrong arguments."""
    chosen = [Reward(name=_short(w.name), written=w.name, weight=w.weight, kwargs=w.kwargs) for w in written]
    chosen = chosen or [Reward(name=_short(name), written=name) for name in task.rewards]
    if not chosen:
        what, why = "no function scores the answers", "the task names no reward functions of its own"
        raise ConfigError.of("no-reward", "env.rewards", what, "[]", why, "rewards: [{name: math_answer}]")
    problems: list[Problem] = []
    for index, reward in enumerate(chosen):
        key = f"env.rewards[{index}]"
        try:
            function = find_reward(reward.written)
        except ConfigError as error:
            problems += [dataclasses.replace(p, key=f"{key}.name") for p in error.problems]
            continue
        given, code = ("transcript",), "bad-reward-kwargs"
        problems += unknown_arguments(function, reward.kwargs, given=given, key=f"{key}.kwargs", code=code)
        if reward.name in [r.name for r in chosen[:index]]:
            what = f"there is another reward function called {reward.name}"
            why, fix = "each is a metric of its own, by this name", "give your function another name, or leave one out"
            problems += ConfigError.of("duplicate-reward", f"{key}.name", what, reward.written, why, fix).problems
    if problems:
        raise ConfigError(problems)
    return tuple(chosen)


def _short(name: str) -> str:
    return name.rpartition(":")[2]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One episode to be graded."""

    group: int
    sample: int
    transcript: Transcript


def number_of(reward: Reward, case: Case, value: Any) -> float:
    """Return the value of a reward function as a number. Raises RewardError unless it is a finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise reward_failed(reward, case, "reward-not-finite", "returned no number", f"it returned {value}") from error
    if not math.isfinite(number):
        raise reward_failed(reward, case, "reward-not-finite", f"returned {number}", "a reward is a finite number")
    return number


def reward_failed(reward: Reward, case: Case, code: str, what: str, why: str) -> RewardError:
    answer = case.transcript.answer
    shown = answer if len(answer) <= _SHOWN else f"{answer[:_SHOWN]} ... ({len(answer)} characters)"
    key, what = f"reward function {reward.written}", f"{what}, for sample {case.sample} of group {case.group}"
    return RewardError(Problem(code=code, key=key, what=what, got=repr(shown), why=why, fix=_FIXES[code]))


# ── functions over lists ─────────────────────────────────────────────────────────────────────────────────────────────


def _of_one(function: Callable[..., Any], kwargs: Mapping[str, object], transcript: Transcript) -> float:
    given = {"prompts": [prompt_text(transcript)], "answers": [answer_text(transcript)], **kwargs}
    if "labels" in inspect.signature(function).parameters:
        given["labels"] = [label_of(transcript)]
    values: Sequence[float] = list(function(**given))
    if len(values) != 1:
        raise ValueError(f"{len(values)} rewards for 1 answer")
    return values[0]


def reward_of_config(written: str, kwargs: Mapping[str, object], *, key: str) -> Reward:
    """Return a shipped reward or a function of the user's; its parameters tell which kind it is. Raises ConfigError.

    `key`: of the block that names it, such as reward.brevity.
    """
    try:
        function: Callable[..., Any] = find_reward(written)
    except ConfigError as error:
        problems = [
            dataclasses.replace(p, key=f"{key}.function", fix=(p.fix or "").replace("rewards:", "function:"))
            for p in error.problems
        ]
        raise ConfigError(problems) from error
    takes = inspect.signature(function).parameters
    lists = "prompts" in takes
    given = _LISTS if lists else ("transcript",)
    problems = unknown_arguments(function, kwargs, given=given, key=f"{key}.kwargs", code="bad-reward-kwargs")
    if problems:
        raise ConfigError(problems)
    return Reward(name=_short(written), written=written, kwargs=kwargs, lists=lists)


# ── a transcript as text ─────────────────────────────────────────────────────────────────────────────────────────────


def prompt_text(transcript: Transcript) -> str:
    """Return the prompt without a chat template."""
    prompt = transcript.prompt
    return prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)


def answer_text(transcript: Transcript) -> str:
    """Return all text after the prompt: the answer, or in a conversation answers and replies."""
    turns = itertools.zip_longest(transcript.answers, transcript.replies, fillvalue="")
    return "\n".join(part for turn in turns for part in turn if part)


def label_of(transcript: Transcript) -> Any:
    """Return the right answer; None where the task gives none."""
    return transcript.facts.get("answer")
