"""Calls a reward function for one episode, in the form of its signature: that of rlplace, TRL, OpenRLHF or verl.

::

    f(transcript, **kwargs)                                              a number
    f(prompts, answers, labels, **kwargs)                                a list of numbers
    f(prompts, completions, <columns of the data set>, **kwargs)         TRL: a list of numbers
    f(queries, prompts, labels, **kwargs)                                OpenRLHF: a list or a tensor, {"rewards": ...}
    f(data_source, solution_str, ground_truth, extra_info, **kwargs)     verl: a number, {"score": ...}

A function over lists is called with lists of length one, so that limits apply to each episode. So a function that
compares the answers of a list gets only one answer; `depends_on_others` finds such functions. A function may be async.
A class is instantiated with the arguments of the config; its instance is then called.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from rlplace.envs.text.contract import Message, Transcript

Form = Literal["transcript", "lists", "trl", "openrlhf", "verl", "verl_lists"]
# Parameters that rlplace gives to a function, by form; TRL's columns are given, too
GIVEN: Mapping[Form, tuple[str, ...]] = {
    "transcript": ("transcript",),
    "lists": ("prompts", "answers", "labels"),
    "trl": ("prompts", "completions"),
    "openrlhf": ("queries", "prompts", "labels"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "verl_lists": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}
# The entry of a mapping that is the reward
_SCORES = ("score", "rewards", "reward")


def form_of(function: Callable[..., Any]) -> Form:
    """Return the form of a reward function, by the names of its parameters. `function`: may be a class."""
    names = parameters_of(function)
    if "completions" in names:
        return "trl"
    if "queries" in names:
        return "openrlhf"
    if "solution_str" in names:
        return "verl"
    if "solution_strs" in names:
        return "verl_lists"
    if "prompts" in names:
        return "lists"
    return "transcript"


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters with which a reward function is called, by name; of a class, those of its instances."""
    if inspect.isclass(function):
        parameters = dict(inspect.signature(function.__call__).parameters)
        # The instance itself
        parameters.pop(next(iter(parameters), ""), None)
        return parameters
    return inspect.signature(function).parameters


def adapted(
    function: Callable[..., Any], kwargs: Mapping[str, object], *, chat: bool
) -> Callable[[Transcript], Any]:
    """Return a reward function, or a class of reward functions, as a function of a transcript.

    `kwargs`: arguments of the config. `chat`: whether prompts are messages of a chat.
    """
    arguments = kwargs
    called = function
    if inspect.isclass(function):
        made: Any = function(**copy.deepcopy(dict(kwargs)))
        called = made
        arguments = {}
    form = form_of(called)
    parameters = parameters_of(called)

    def reward(transcript: Transcript) -> Any:
        # A function that changes its arguments changes only its own copy
        own = copy.deepcopy(dict(arguments))
        if form == "transcript":
            return _number_in(_awaited(called(transcript, **own)))
        given = _given(form, transcript, chat) | own
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        value = _awaited(called(**given))
        if form == "verl":
            return _number_in(value)
        return _only_one(value, form)

    return reward


def depends_on_others(
    function: Callable[..., Any],
    kwargs: Mapping[str, object],
    transcripts: Sequence[Transcript],
    *,
    chat: bool,
) -> bool:
    """Return whether a function over lists gives an answer another reward in a list with other answers than alone.

    Return False for functions of one answer, and for functions whose rewards differ between equal calls. `transcripts`:
    answers to one prompt. `kwargs`, `chat`: as for `adapted`. Raises the exceptions of the function.
    """
    alone = adapted(function, kwargs, chat=chat)
    called = function
    arguments = kwargs
    if inspect.isclass(function):
        made: Any = function(**copy.deepcopy(dict(kwargs)))
        called = made
        arguments = {}
    form = form_of(called)
    if form in ("transcript", "verl"):
        return False
    each = [alone(transcript) for transcript in transcripts]
    # Join the lists of length one to one list
    given: dict[str, Any] = {}
    for transcript in transcripts:
        for name, values in _given(form, transcript, chat).items():
            given.setdefault(name, []).extend(values)
    given |= copy.deepcopy(dict(arguments))
    parameters = parameters_of(called)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    values = _number_in(_awaited(called(**given)))
    if not hasattr(values, "__len__") or len(values) != len(transcripts):
        return False
    together = [_number_in(value) for value in values]
    # In TRL, a reward None means that the function does not apply to the answer
    together = [0.0 if value is None else value for value in together]
    again = [alone(transcript) for transcript in transcripts]
    return _numbers(each) == _numbers(again) != _numbers(together)


def _numbers(values: Sequence[Any]) -> list[str]:
    """Return numbers as rounded texts: texts of nearly equal numbers are equal, also those of nan."""
    return [f"{float(value):.4g}" for value in values]


def _given(form: Form, transcript: Transcript, chat: bool) -> dict[str, Any]:
    """Return the arguments of a function of this form, by name. `chat`: whether prompts are messages of a chat."""
    facts = transcript.facts
    prompt = prompt_text(transcript)
    answer = answer_text(transcript)
    right = facts.get("answer")
    if form == "trl":
        columns = {str(name): [value] for name, value in facts.items()}
        if chat or not isinstance(transcript.prompt, str):
            return columns | {
                "prompts": [_messages(transcript)],
                "completions": [_turns(transcript)],
            }
        return columns | {"prompts": [prompt], "completions": [answer]}
    if form == "openrlhf":
        return {"queries": [prompt + answer], "prompts": [prompt], "labels": [right]}
    if form == "lists":
        return {"prompts": [prompt], "answers": [answer], "labels": [right]}
    # verl
    given = {
        "data_source": facts.get("data_source", facts.get("data_set")),
        "solution_str": answer,
        "ground_truth": right,
        "extra_info": facts.get("extra_info") or {},
    }
    if form == "verl":
        return given
    return {f"{name}s": [value] for name, value in given.items()}


def _messages(transcript: Transcript) -> list[dict[str, str]]:
    """Return the prompt as messages with role and content."""
    prompt = transcript.prompt
    if isinstance(prompt, str):
        prompt = [Message("user", prompt)]
    return [{"role": message.role, "content": message.text} for message in prompt]


def _turns(transcript: Transcript) -> list[dict[str, str]]:
    """Return the answers of the policy, and the replies between them, as messages with role and content."""
    turns = []
    for answer, reply in itertools.zip_longest(transcript.answers, transcript.replies):
        turns.append({"role": "assistant", "content": answer or ""})
        if reply:
            turns.append({"role": "user", "content": reply})
    return turns


def _awaited(value: Any) -> Any:
    """Return a value; of an async function, the value that it returns in the end."""
    if not inspect.isawaitable(value):
        return value

    async def ended(awaited: Awaitable[Any]) -> Any:
        return await awaited

    # Slow to import, and rarely needed
    import asyncio

    return asyncio.run(ended(value))


def _number_in(value: Any) -> Any:
    """Return the reward in a mapping, such as {"score": 1.0}; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    for name in _SCORES:
        if name in value:
            return value[name]
    return value


def _only_one(values: Any, form: Form) -> Any:
    """Return the reward in a list, an array or a tensor with one reward. Raises ValueError if it does not have one.

    In TRL, None means that a function does not apply to an answer, which then adds nothing to its reward.
    """
    values = _number_in(values)
    if not hasattr(values, "__len__") or len(values) != 1:
        many = f"a {type(values).__name__}"
        if hasattr(values, "__len__"):
            many = f"{len(values)} rewards"
        raise ValueError(
            f"{many} for 1 answer: a function over lists returns a list, with a number for each"
        )
    value = _number_in(next(iter(values)))
    if value is None and form == "trl":
        return 0.0
    return value


# ── a transcript as text ─────────────────────────────────────────────────────────────────────────────────────────────


def prompt_text(transcript: Transcript) -> str:
    """Return the text of the prompt; of several messages, their texts without roles, joined by line breaks."""
    prompt = transcript.prompt
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message.text for message in prompt)


def answer_text(transcript: Transcript) -> str:
    """Return the text after the prompt: all answers and the replies between them, joined by line breaks."""
    turns = itertools.zip_longest(transcript.answers, transcript.replies, fillvalue="")
    return "\n".join(part for turn in turns for part in turn if part)
