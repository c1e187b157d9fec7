"""Grades one row of a task before the start, to find what is wrong with reward functions and their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rlplace import codes
from rlplace.envs.text.code import forms
from rlplace.envs.text.contract import (
    HasPlaces,
    OneTurn,
    Prompt,
    TextTask,
    Transcript,
    place_of,
    text_of,
)
from rlplace.envs.text.graders import Graded, ProcessGrader
from rlplace.envs.text.rewards import Case, Reward, find_reward
from rlplace.envs.text.right_answers import written_answers
from rlplace.envs.text.rows import bad_row
from rlplace.envs.text.signatures import depends_on_others, wants_right_answer
from rlplace.errors import ConfigError, Problem, RewardError
from rlplace.units import clipped

# Codes of the warnings about a function that compares the answers of a list, and gets one; about a function that gets
# no right answers; about answers that count in a box alone; and about columns that no prompt has
_SEES_ONE = "reward-sees-one-answer"
_NO_LABELS = "reward-without-labels"
_BOX_ALONE = "box-not-asked"
_NO_PROMPT = "column-not-in-prompt"
WARNINGS = (_SEES_ONE, _NO_LABELS, _BOX_ALONE, _NO_PROMPT)
# Columns that many data sets have beside the one with the question, and that belong to the prompt
_OF_PROMPTS = (
    "system",
    "system_prompt",
    "instruction",
    "instructions",
    "input",
    "context",
    "history",
)
# Rows that are looked at for warnings
_WARNED_ROWS = 20
# Words of prompts that ask for an answer in a form of its own: \boxed{}, "in a box", "after ####"
_ASKS_FOR_BOX = re.compile(r"box(?:ed)?\s*\{|boxed|\bbox around|\bin an? box|####")
# Suffixes that make answers of the probe's answer: equal ones and others, of different lengths, right and wrong
_OTHERS = ("", "", " ", " and so on, with some more words", "!" * 200)
# Equal answers in the list that a function over lists gets: it returns a reward for each
_EQUAL = 2
# Most rows that are read before the start
_MOST_ROWS = 20_000
# Longest time of one function
_LONGEST_S = 20.0
# Characters of an answer that an error shows
_SHOWN = 200


def probe_problems(
    rewards: Sequence[Reward],
    task: TextTask,
    *,
    timeout_s: float,
    memory_bytes: int,
    own: bool = True,
    samples: int = 1,
    eval_samples: int | None = None,
) -> list[Problem]:
    """Call each reward function for one row of the task, with the right answer of the row. Return the problems.

    A function has a problem if it refuses its arguments or facts, raises an error, or returns no number: each run would
    end. Two problems do not prevent a run (`WARNINGS`): a function compares the answers of a list, and its lists have
    one answer; a function has a parameter for right answers, and the task has none. Functions of the user are called in
    a process with the limits `timeout_s` and `memory_bytes`. `own`: whether functions of the user are called at all.
    `samples`: number of answers to a prompt.
    `eval_samples`: the same in an evaluation, which has no reward components; None: there is no evaluation.
    """
    told = _probe(task)
    if told is None:
        return []
    found: list[Problem] = []
    for index, reward in enumerate(rewards):
        key = reward.key or f"env.rewards[{index}]"
        if reward.shipped:
            found += _of_shipped(reward, told, key)
        elif own:
            limit_s = min(timeout_s, _LONGEST_S)
            problems = _of_own(reward, told, key, limit_s, memory_bytes)
            found += problems
            leaf = "function" if reward.key else "name"
            if not problems and _lacks_right_answer(reward, told):
                where = f"{key}.{leaf}"
                found.append(codes.problem(_NO_LABELS, where, reward.written))
            # Where the lists of the function have one answer
            error = ""
            if samples == 1:
                error = "training"
            elif eval_samples == 1 and not reward.key:
                error = "evaluation"
            if not error or problems:
                continue
            if _compares_answers(reward, told, limit_s, memory_bytes):
                where = f"{key}.{leaf}"
                found.append(
                    codes.problem(_SEES_ONE, where, reward.written, error=error)
                )
    return found


def form_warnings(
    rewards: Sequence[Reward], task: TextTask, read: Callable[[Prompt], str]
) -> Iterator[Problem]:
    """Yield a warning for each `math_answer` that reads the right answer of a row in a box alone, as letters.

    A prompt that speaks of a box, or of ####, asks for this form. `read`: returns a prompt as the model reads it.
    """
    places = [place_of(task, number) for number in range(_rows_of(task))]
    for index, reward in enumerate(rewards):
        if reward.written != "math_answer":
            continue
        grade = reward.function()
        for number, place in enumerate(places):
            told = _told(task, number)
            if _ASKS_FOR_BOX.search(read(told.prompt).lower()):
                continue
            boxed = f"\\boxed{{{told.answer}}}"
            if grade(told) == 0 and grade(dataclasses.replace(told, answers=(boxed,))):
                yield codes.problem(
                    _BOX_ALONE,
                    reward.key or f"env.rewards[{index}].name",
                    clipped(repr(told.answer), _SHOWN),
                    source=place,
                    boxed=boxed,
                )
                break


def column_warnings(task: TextTask, read: Callable[[Prompt], str]) -> Iterator[Problem]:
    """Yield a warning for each column whose name says that it belongs to the prompt, and which no prompt has.

    `read`: returns a prompt as the model reads it. Blanks and line breaks may be others than those of the column.
    """
    left = dict.fromkeys(_OF_PROMPTS)
    for number in range(_rows_of(task)):
        episode = task.episode(number)
        facts = episode.facts()
        shown = _words(read(episode.prompt))
        for name in list(left):
            value = facts.get(name)
            if not isinstance(value, str) or not value.strip():
                continue
            if _words(value) not in shown and value != facts.get("answer"):
                del left[name]
                yield codes.problem(
                    _NO_PROMPT,
                    "env.kwargs.prompt",
                    clipped(f"{name}: {value!r}", _SHOWN),
                    source=place_of(task, number),
                    name=name,
                )


def reader(
    rendered: Callable[[Prompt], str] | None, system: str | None
) -> Callable[[Prompt], str]:
    """Return a function that returns a prompt as the model reads it.

    `rendered`: the same, or it raises ConfigError for a prompt; None: it is not known. Then the result is the text of
    the messages. `system`: text before all prompts.
    """

    def read(prompt: Prompt) -> str:
        texts = f"{system or ''}\n{text_of(prompt)}"
        if rendered is None:
            return texts
        # Other checks report a prompt that the chat template refuses
        with contextlib.suppress(ConfigError):
            return f"{texts}\n{rendered(prompt)}"
        return texts

    return read


def _words(text: str) -> str:
    """Return a text with single blanks between its words."""
    return " ".join(text.split())


def _rows_of(task: TextTask) -> int:
    """Return how many rows of a data set are looked at; 0 for tasks without a data set."""
    if task.size is None or not isinstance(task, HasPlaces):
        return 0
    return min(task.size, _WARNED_ROWS)


def _told(task: TextTask, number: int) -> Transcript:
    """Return a transcript of a row, with its right answer as the answer; "1" for a row without one."""
    episode = task.episode(number)
    facts = dict(episode.facts())
    answer = "1"
    with contextlib.suppress(ValueError):  # no text, number or list of them
        answer = written_answers(facts.get("answer", answer))[0]
    return Transcript(
        prompt=episode.prompt,
        answers=(answer,),
        replies=(),
        facts=facts,
        tokens=1,
        truncated=False,
    )


def row_problems(rewards: Sequence[Reward], task: TextTask) -> list[Problem]:
    """Return the problem of the first row that a shipped reward function cannot read; an empty list if there is none.

    At most `_MOST_ROWS` rows are read. `probe_problems` reports facts that row 0 lacks.
    """
    size = task.size
    readers = [
        (fact, error, read)
        for fact, error, functions, read in _READERS
        if any(reward.written in functions for reward in rewards)
    ]
    if not readers or not isinstance(task, HasPlaces) or size is None:
        return []
    lacking = {fact for fact, _, _ in readers} - task.episode(0).facts().keys()
    for number in range(min(size, _MOST_ROWS)):
        facts = task.episode(number).facts()
        for fact, error, read in readers:
            if fact in lacking:
                continue
            try:
                read(facts)
            except ValueError as reason:
                shown = repr(facts.get(fact))
                place = task.place(number)
                bad = bad_row(error, shown, place, reason=str(reason))
                return list(bad.problems)
    return []


def _tests(facts: Mapping[str, Any]) -> None:
    """Check the tests of a row. Raises ValueError for tests that cannot be run."""
    forms.read(facts.get("tests"), facts)


def _right_answers(facts: Mapping[str, Any]) -> None:
    """Check the right answer of a row. Raises ValueError unless it is a text, a number, or a list of these."""
    written_answers(facts.get("answer"))


# (fact, name of the error texts, reward functions that use the fact, function that checks the fact)
_READERS: Sequence[tuple[str, str, Sequence[str], Callable[[Any], None]]] = (
    ("tests", "no-tests", ("unit_tests",), _tests),
    (
        "answer",
        "no-answer",
        ("exact_match", "contains", "math_answer", "math_verify"),
        _right_answers,
    ),
)


def _probe(task: TextTask) -> Transcript | None:
    """Return a transcript of the first row, with its right answer as the answer.

    Return None for tasks whose episodes must be played, or take long to begin.
    """
    if hasattr(task, "episodes"):
        return None
    try:
        episode = task.episode(0)
    except Exception:  # noqa: BLE001  # whatever a task raises is told by the check of prompts
        return None
    if not isinstance(episode, OneTurn):
        return None
    return _told(task, 0)


def _of_shipped(reward: Reward, told: Transcript, key: str) -> list[Problem]:
    """Return the problem that a shipped function has with its arguments or with the facts of a row."""
    # The library of math_verify needs seconds to load, and takes no arguments
    if reward.written == "math_verify":
        reward = Reward(name="math_answer", written="math_answer")
    try:
        reward.function()(told)
    except re.error as error:
        reason = f"no regular expression: {error}"
        return [_problem(reward, told, key, "shipped", reason=reason)]
    # Wrong arguments may raise what they like
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError):
            reason = str(error)
        return [_problem(reward, told, key, "shipped", reason=reason)]
    return []


def _of_own(
    reward: Reward, told: Transcript, key: str, timeout_s: float, memory_bytes: int
) -> list[Problem]:
    """Return the problem that a user's function has with a row. One that takes too long, or dies, has none here."""
    grader = ProcessGrader(
        [reward], timeout_s=timeout_s, memory_bytes=memory_bytes, processes=1
    )
    with closing(grader):
        try:
            answers = _EQUAL if reward.takes_lists else 1
            for sample in range(answers):
                grader.submit(Case(group=0, sample=sample, transcript=told))
            grader.whole(0)
            graded = 0
            while graded < answers:
                graded += len(grader.done(wait=True))
        except RewardError as error:
            why = error.problem.why or ""
            if error.code == "reward-no-number":
                return [_problem(reward, told, key, "no-number", reason=why)]
            if error.code == "reward-raised" and error.own:
                return [_problem(reward, told, key, "raised", reason=why)]
    return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DependsOnOthers(Reward):
    """A test in the form of a reward: whether a reward function gives rewards that depend on other answers."""

    @property
    def takes_lists(self) -> bool:
        """False: the test makes the list of answers itself."""
        return False

    def function_of_several(self) -> Callable[[Sequence[Transcript]], list[Any]]:
        """Return a function of transcripts, with 1 for each of them if a reward depends on other answers, else 0."""
        function = find_reward(self.written)

        def depends(told: Transcript) -> float:
            transcripts = [
                dataclasses.replace(told, answers=(f"{told.answer}{more}",))
                for more in _OTHERS
            ]
            return float(
                depends_on_others(function, self.kwargs, transcripts, chat=self.chat)
            )

        return lambda transcripts: [depends(told) for told in transcripts]


def _compares_answers(
    reward: Reward, told: Transcript, timeout_s: float, memory_bytes: int
) -> bool:
    """Return whether a user's function compares the answers of a list with each other. Return False if it fails."""
    if not reward.takes_lists:
        return False
    names = [field.name for field in dataclasses.fields(Reward)]
    asked = _DependsOnOthers(**{name: getattr(reward, name) for name in names})
    grader = ProcessGrader(
        [asked], timeout_s=timeout_s, memory_bytes=memory_bytes, processes=1
    )
    with closing(grader):
        try:
            grader.submit(Case(group=0, sample=0, transcript=told))
            done: list[Graded] = []
            while not done:
                done = grader.done(wait=True)
        except RewardError:
            return False
    return done[0][1][reward.name] == 1.0


def _lacks_right_answer(reward: Reward, told: Transcript) -> bool:
    """Return whether a function has a parameter for the right answers, and the task has none."""
    if told.facts.get("answer") is not None:
        return False
    return wants_right_answer(find_reward(reward.written))


def _problem(
    reward: Reward, told: Transcript, key: str, error: str, *, reason: str
) -> Problem:
    """Return the problem with a function. `error`: variant of the texts. `reason`: what the function said."""
    leaf = "function" if reward.key else "name"
    shown = clipped(told.answer, _SHOWN)
    return codes.problem(
        "reward-probe",
        f"{key}.{leaf}",
        reward.written,
        error=error,
        answer=repr(shown),
        facts=", ".join(told.facts) or "none",
        reason=reason,
    )
