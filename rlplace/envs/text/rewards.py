"""Reward functions: the shipped ones, how the functions of a config are found, and checks of the values they return.

::

    def shipped(transcript: Transcript, **kwargs) -> float: ...
    def brevity(prompts: list[str], answers: list[str], labels: list[object]) -> list[float]: ...    over lists
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace import codes
from rlplace.config.blocks.engine import OnPoison
from rlplace.config.blocks.language_model import RewardFunctionConfig
from rlplace.envs.registry import named, needs, unknown_arguments
from rlplace.envs.text.contract import Transcript
from rlplace.envs.text.right_answers import (
    after_thoughts,
    alike,
    written_answers,
)
from rlplace.envs.text.signatures import GIVEN, LISTS, adapted, form_of
from rlplace.envs.text.signatures import answer_text as answer_text
from rlplace.envs.text.signatures import prompt_text as prompt_text
from rlplace.envs.text.time_limit import TooLong, limited
from rlplace.errors import ConfigError, Problem, RewardError
from rlplace.units import with_length

if TYPE_CHECKING:
    from rlplace.envs.text.contract import TextTask


_LOG = logging.getLogger(__name__)
# Called as (transcript, **kwargs), perhaps in another process
RewardFunction = Callable[..., float]
_HERE = (
    "exact_match",
    "contains",
    "matches",
    "score",
    "length_penalty",
    "unit_tests",
    "unscored",
    "reasoning_score",
)
# Shipped functions, by the name in a config
REWARDS: Mapping[str, str] = {
    **{name: f"rlplace.envs.text.rewards:{name}" for name in _HERE},
    "math_answer": "rlplace.envs.text.math_answers:math_answer",
    "math_verify": "rlplace.envs.text.math_answers:math_verify",
}
# Shipped, but run in processes with limits: patterns, libraries and code may run forever
_APART = {
    "matches",
    "math_verify",
    "reasoning_score",
    "unit_tests",
}
# Shipped functions that are quick up to this number of characters; longer answers are graded in processes
QUICK_UP_TO = 2_000
_QUICK_IF_SHORT = {"math_answer"}
# <think>.*?</think>\s*<answer>.*?</answer>, in time in proportion to the length of the answer
_THOUGHT_AND_ANSWERED = (
    r"<think>(?:(?!</think>\s*<answer>).)*+</think>\s*+<answer>.*(?<=</answer>)"
)
# Processor time of a pattern with one episode
_PATTERN_S = 5.0
# Characters of an answer that an error shows
_SHOWN = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward function of a run, with its weight and arguments.

    The object is sent to other processes, and they find the function by its name.

    `name`: name of the metric, the part of `written` after the colon. `written`: name of the function in the config.
    `key`: config key of the reward component with this function; "" for a reward of the environment.
    `chat`: whether prompts are messages of a chat; functions of TRL's form then get messages.
    """

    name: str
    written: str
    key: str = ""
    weight: float = 1.0
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    chat: bool = False

    @property
    def shipped(self) -> bool:
        """Whether the function comes with rlplace."""
        return self.written in REWARDS

    @property
    def trusted(self) -> bool:
        """Whether the function is shipped and quick: it cannot hang and does not use much memory."""
        return self.shipped and self.written not in _APART

    def quick(self, transcript: Transcript) -> bool:
        """Return whether the function is `trusted`, and the episode is short enough for it to be quick."""
        short = len(transcript.answer) <= QUICK_UP_TO
        return self.always_quick or (self.trusted and short)

    @property
    def always_quick(self) -> bool:
        """Whether the function is `trusted`, and quick with answers of any length."""
        return self.trusted and self.written not in _QUICK_IF_SHORT

    @property
    def takes_lists(self) -> bool:
        """Whether one call of the function takes all samples of a prompt, in lists.

        Raises ConfigError if the function cannot be found.
        """
        return not self.shipped and form_of(find_reward(self.written)) in LISTS

    @property
    def may_not_apply(self) -> bool:
        """Whether the function may return None for an answer to which it does not apply, as functions of TRL's form.

        Raises ConfigError if the function cannot be found.
        """
        return not self.shipped and form_of(find_reward(self.written)) == "trl"

    def function(self) -> Callable[[Transcript], Any]:
        """Return the reward function with its arguments filled in, so that it takes only a transcript.

        A function over lists gets lists of length one. Raises ConfigError if the function cannot be found.
        """
        if self.trusted:
            return functools.partial(find_reward(self.written), **self.kwargs)
        several = self.function_of_several()
        return lambda transcript: several([transcript])[0]

    def function_of_several(self) -> Callable[[Sequence[Transcript]], list[Any]]:
        """Return the reward function with its arguments filled in, as a function of transcripts, one value for each.

        A function over lists is called once for all of them, any other function once for each. Raises ConfigError if
        the function cannot be found.
        """
        function = find_reward(self.written)
        return adapted(function, self.kwargs, chat=self.chat)


def find_reward(name: str, key: str = "env.rewards") -> RewardFunction:
    """Return a reward function. `name`: a shipped name, or `package.module:function`. Raises ConfigError.

    `key`: config key, for the error.
    """
    function: RewardFunction = named(
        name,
        REWARDS,
        key=key,
        code="unknown-reward",
        noun="reward function",
        absent="no-reward-module",
    )
    return function


def named_reward(
    written: str,
    kwargs: Mapping[str, object],
    *,
    key: str,
    leaf: str = "function",
    weight: float = 1.0,
    chat: bool = False,
) -> Reward:
    """Return the reward that a block of the config describes.

    `written`: name of the function. `kwargs`: arguments of the function. `key`: config key of the block. `leaf`: the
    key in the block that holds the name. `weight`: weight of the reward. `chat`: whether prompts are messages of a
    chat. Raises ConfigError for an unknown name or wrong arguments.
    """
    function = find_reward(written, f"{key}.{leaf}")
    if written == "math_verify":
        with needs(
            "math_verify",
            got=written,
            extra="math",
            key=f"{key}.{leaf}",
            of="the reward",
        ):
            import math_verify as math_verify
    if not callable(function):
        raise codes.config_error(
            "unknown-reward",
            f"{key}.{leaf}",
            written,
            error="not-callable",
            kind=type(function).__name__,
            given="a transcript",
        )
    # Check the arguments; a class takes them when it is instantiated
    form = form_of(function)
    problems = unknown_arguments(
        function,
        kwargs,
        given=() if inspect.isclass(function) else GIVEN[form],
        key=f"{key}.kwargs",
        code="bad-reward-kwargs",
    )
    if problems:
        raise ConfigError(problems)
    own = key if leaf == "function" else ""
    return Reward(
        name=written.rpartition(":")[2],
        written=written,
        key=own,
        weight=weight,
        kwargs=kwargs,
        chat=chat,
    )


def find_rewards(
    written: Sequence[RewardFunctionConfig], task: TextTask, *, chat: bool = False
) -> tuple[Reward, ...]:
    """Return the rewards that the config names in `written`; if there are none, the rewards of the task.

    `chat`: whether prompts are messages of a chat. Raises ConfigError for unknown or repeated names, for wrong
    arguments, and if the task has no rewards either.
    """
    chosen = written or [RewardFunctionConfig(name=name) for name in task.rewards]
    if not chosen:
        raise codes.config_error("no-reward", "env.rewards", "[]")
    rewards: list[Reward] = []
    problems: list[Problem] = []
    for index, block in enumerate(chosen):
        key = f"env.rewards[{index}]"
        try:
            reward = named_reward(
                block.name,
                block.kwargs,
                key=key,
                leaf="name",
                weight=block.weight,
                chat=chat,
            )
        except ConfigError as error:
            problems += error.problems
            continue
        if reward.name in [other.name for other in rewards]:
            problems += codes.config_error(
                "duplicate-reward", f"{key}.name", block.name, name=reward.name
            ).problems
        rewards.append(reward)
    if problems:
        raise ConfigError(problems)
    return tuple(rewards)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A finished episode that is to be graded.

    `group`: number of the group, which holds the samples of one prompt. `sample`: number of the episode within the
    group. `seed`: text from which the random numbers of reward functions follow; "": they are not seeded.
    """

    group: int
    sample: int
    transcript: Transcript
    seed: str = ""


def number_of(
    reward: Reward, case: Case, value: Any, on_poison: OnPoison = "stop"
) -> float:
    """Return a value from a reward function as a float.

    `case`: the episode, for errors. Raises RewardError if the value cannot be converted to a float. If the float is nan
    or infinite, raises RewardError too, unless `on_poison` is "skip": then return nan.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise reward_failed(reward, case, "reward-no-number", value=value) from error
    if not math.isfinite(number):
        non_finite = reward_failed(reward, case, "reward-not-finite", number=number)
        if on_poison == "stop":
            raise non_finite
        problem = non_finite.problem
        _LOG.warning("skipped: %s: %s, %s", problem.key, problem.what, problem.got)
        return math.nan
    return number


def reward_failed(
    reward: Reward,
    case: Case,
    code: str,
    *,
    error: str = "",
    samples: int = 1,
    **facts: Any,
) -> RewardError:
    """Return the error that a reward function failed for one episode, or for several episodes of a group.

    `case`: the episode, or the first of the episodes. `code`: code of the error. `error`: name of the variant of the
    code's texts. `samples`: number of episodes. `facts`: values for the texts.
    """
    episodes = f"sample {case.sample} of group {case.group}"
    if samples > 1:
        episodes = f"the {samples} samples of group {case.group}"
    shown = with_length(case.transcript.answer, _SHOWN)
    key = f"reward function {reward.written}"
    timeout = "env.reward_timeout_s"
    if reward.key:
        key = f"{reward.key}.function"
        timeout = f"{reward.key}.timeout_s"
    failed = codes.problem(
        code,
        key,
        repr(shown),
        error=error,
        episodes=episodes,
        timeout=timeout,
        **facts,
    )
    return RewardError(failed)


# ── shipped functions ────────────────────────────────────────────────────────────────────────────────────────────────


def fact(transcript: Transcript, name: str) -> str:
    """Return `transcript.facts[name]` as text: a value that the task gives to reward functions.

    Raises ValueError if the task does not give a value with this name.
    """
    if name not in transcript.facts:
        known = ", ".join(transcript.facts) or "none"
        raise ValueError(f"the task gives no fact {name!r}; its facts: {known}")
    return str(transcript.facts[name])


def right_answers(transcript: Transcript) -> list[str]:
    """Return the right answers, `transcript.facts["answer"]`, as texts: several, if that is a list.

    Raises ValueError if the task does not give a fact `answer`, or one that is no text, number or list of them.
    """
    fact(transcript, "answer")
    return written_answers(transcript.facts["answer"])


def final_answer(transcript: Transcript) -> str:
    """Return the last answer without its thoughts; "" if they have begun and not ended."""
    if after_thoughts(transcript.opened):
        # The template has opened another tag
        return after_thoughts(transcript.answer)
    return after_thoughts(transcript.opened + transcript.answer)


def exact_match(transcript: Transcript, *, ignore_case: bool = False) -> float:
    """Return 1 if the last answer equals the right answer, `transcript.facts["answer"]`, or one of them; else 0.

    Thoughts before </think> are no part of the answer. Blanks at the begin and end of both texts are ignored, and so
    are differences in how a character is written: NFC and NFD, curly and straight quotes, kinds of blanks.
    `ignore_case`: whether upper and lower case are equal.
    """
    given = alike(final_answer(transcript))
    rights = [alike(right) for right in right_answers(transcript)]
    if ignore_case:
        given = given.casefold()
        rights = [right.casefold() for right in rights]
    return float(given in rights)


def contains(transcript: Transcript) -> float:
    """Return 1 if the last answer contains the right answer, `transcript.facts["answer"]`, or one of them; else 0.

    Answers are read as by `exact_match`. Raises ValueError for an empty right answer, which is a part of each answer.
    """
    given = alike(final_answer(transcript))
    rights = [alike(right) for right in right_answers(transcript)]
    if "" in rights:
        raise ValueError("the right answer is empty, so that each answer contains it")
    return float(any(right in given for right in rights))


def matches(
    transcript: Transcript,
    *,
    pattern: str = _THOUGHT_AND_ANSWERED,
) -> float:
    """Return 1 if each answer of the episode, as a whole, matches the regular expression `pattern`; else 0.

    The default is <think>...</think> and then <answer>...</answer>.
    A tag that the chat template has opened for the answer, such as <think>, belongs to the answer here. An answer with
    which the pattern takes too long does not match.
    """
    form = re.compile(pattern, re.DOTALL)
    answers = [f"{transcript.opened}{answer}" for answer in transcript.answers]
    try:
        with limited(_PATTERN_S):
            return float(all(form.fullmatch(answer.strip()) for answer in answers))
    except TooLong:
        _LOG.warning(
            "an answer of %d characters scores 0: the pattern %r takes too long with it",
            len(transcript.answer),
            pattern,
        )
        return 0.0


def score(transcript: Transcript) -> float:
    """Return the score that the task gives to the episode, `transcript.facts["score"]`."""
    return float(fact(transcript, "score"))


def length_penalty(
    transcript: Transcript, *, free_tokens: int, longest_tokens: int
) -> float:
    """Return a penalty for long answers, from 0 to -1 (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13).

    The penalty is 0 up to `free_tokens` sampled tokens, and falls linearly to -1 at `longest_tokens`.
    """
    if longest_tokens <= free_tokens:
        raise ValueError(
            f"longest_tokens must be above free_tokens, got {longest_tokens} and {free_tokens}"
        )
    over = (transcript.tokens - free_tokens) / (longest_tokens - free_tokens)
    return -min(1.0, max(0.0, over))


def unscored(transcript: Transcript) -> float:
    """Return 0, for jobs in which the scores come from reward components."""
    return 0.0


def unit_tests(
    transcript: Transcript, *, timeout_s: float = 10.0, memory_bytes: int = 512 << 20
) -> float:
    """Return the share of unit tests, from 0 to 1, that the code in the last answer passes.

    `transcript.facts["tests"]` has the tests, in a form of `rlplace.envs.text.code.forms`. The code runs in a confined
    process of its own, limited to `timeout_s` and `memory_bytes`. Raises ValueError for tests in another form.
    """
    from rlplace.envs.text.code import fences, forms, runner

    fact(transcript, "tests")
    prompt = prompt_text(transcript)
    entry = str(transcript.facts.get("entry_point") or "")
    prompted = fences.given_functions(prompt, entry)
    checks = forms.read(transcript.facts["tests"], transcript.facts, prompted=prompted)
    code = fences.code_block(final_answer(transcript))
    program = fences.completed(code, prompt, entry)
    if prompted:
        program = fences.with_functions(program, prompted)
    passed = runner.run_checks(
        program,
        checks,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
    )
    return passed / len(checks)


def reasoning_score(transcript: Transcript) -> float:
    """Return the score of the last answer by reasoning-gym's verifier.

    If the answer has <answer></answer>, only the text in the last one is scored.
    """
    from reasoning_gym import get_score_answer_fn

    entry = transcript.facts["entry"]
    verify = get_score_answer_fn(entry["metadata"]["source_dataset"])
    said = final_answer(transcript)
    before, ended, _ = said.rpartition("</answer>")
    _, began, tagged = before.rpartition("<answer>")
    answer = said.strip()
    if ended and began:
        answer = tagged.strip()
    try:
        return float(verify(answer=answer, entry=entry))
    except Exception as error:  # noqa: BLE001  # any of the library's many verifiers may fail
        _LOG.warning(
            "an answer scores 0: the verifier of %s raised %r",
            entry["metadata"]["source_dataset"],
            error,
        )
        return 0.0
