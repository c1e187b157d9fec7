"""Finds the reward functions that a config names, and says what is wrong with one that gives no number."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.envs.text.naming import named, unknown_arguments
from rlplace.errors import ConfigError, Problem, RewardError

if TYPE_CHECKING:
    from rlplace.config import RewardFunctionConfig
    from rlplace.envs.text.contract import TextTask, Transcript

RewardFunction = Callable[..., float]  # (transcript, **kwargs); may be called in another process
REWARDS: Mapping[str, str] = {
    name: f"rlplace.envs.text.verifiers:{name}"
    for name in (
        "exact_match",
        "contains",
        "math_answer",
        "matches",
        "score",
        "length_penalty",
        "unit_tests",
        "unscored",
    )
} | {"reasoning_score": "rlplace.envs.text.reasoning:reasoning_score"}
_APART = {"matches", "reasoning_score", "unit_tests"}  # patterns, libraries and code that may never come to an end
_SHOWN = 400  # characters of an answer in an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function of a run; a value that travels to other processes, the function by its name."""

    name: str  # of the metric: what stands behind the colon of a long name
    written: str  # as the config names it
    weight: float = 1.0
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def trusted(self) -> bool:
        """Shipped and quick: it neither hangs nor eats memory."""
        return self.written in REWARDS and self.written not in _APART

    def function(self) -> Callable[[Transcript], float]:
        return functools.partial(find_reward(self.written), **self.kwargs)


def find_reward(name: str) -> RewardFunction:
    """The function called `name`: a shipped one, or `package.module:function` of your own. Raises ConfigError."""
    function: RewardFunction = named(name, REWARDS, key="env.rewards", code="unknown-reward", noun="reward function")
    return function


def find_rewards(written: Sequence[RewardFunctionConfig], task: TextTask) -> tuple[Reward, ...]:
    """The rewards of a config, or the task's own. Raises ConfigError: unknown, twice the same, wrong arguments."""
    chosen = [Reward(name=_short(w.name), written=w.name, weight=w.weight, kwargs=w.kwargs) for w in written]
    chosen = chosen or [Reward(name=_short(name), written=name) for name in task.rewards]
    problems = [] if chosen else [_none()]
    for index, reward in enumerate(chosen):
        key = f"env.rewards[{index}]"
        try:
            function = find_reward(reward.written)
        except ConfigError as error:
            problems += [dataclasses.replace(p, key=f"{key}.name") for p in error.problems]
            continue
        given = ("transcript",)
        problems += unknown_arguments(
            function, reward.kwargs, given=given, key=f"{key}.kwargs", code="bad-reward-kwargs"
        )
        if reward.name in [r.name for r in chosen[:index]]:
            problems.append(_twice(reward, key))
    if problems:
        raise ConfigError(problems)
    return tuple(chosen)


def _short(name: str) -> str:
    return name.rpartition(":")[2]


def _none() -> Problem:
    return Problem(
        code="no-reward",
        key="env.rewards",
        what="nothing says what an answer is worth",
        got="[]",
        why="the task names no reward functions of its own",
        fix="rewards: [{name: math_answer}]",
    )


def _twice(reward: Reward, key: str) -> Problem:
    return Problem(
        code="duplicate-reward",
        key=f"{key}.name",
        what=f"there is another reward function called {reward.name}",
        got=reward.written,
        why="each is a metric of its own, by this name",
        fix="give your function another name, or leave one out",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One episode to be graded."""

    group: int
    sample: int
    transcript: Transcript


def number_of(reward: Reward, case: Case, value: Any) -> float:
    """What a reward function returned, as a number. Raises RewardError unless it is a finite one."""
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
    return RewardError(
        Problem(
            code=code,
            key=f"reward function {reward.written}",
            what=f"{what}, for sample {case.sample} of group {case.group}",
            got=repr(shown),
            why=why,
            fix=_FIXES[code],
        )
    )


_FIXES = {
    "reward-not-finite": "return a finite number for every answer, 0.0 for a useless one",
    "reward-raised": "catch in the function what an answer can cause, and return 0.0",
    "reward-timeout": "env.reward_timeout_s=<longer>, or give up earlier in the function and return 0.0",
    "reward-died": "give up in the function before it takes so much memory, and return 0.0",
}
