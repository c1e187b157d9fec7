"""Calls a reward function for episodes, in the form of its signature: that of rlplace, TRL, OpenRLHF or verl.

::

    f(transcript, **kwargs)                                              a number
    f(prompts, answers, labels, **kwargs)                                a list of numbers
    f(prompts, completions, <columns of the data set>, **kwargs)         TRL: a list of numbers
    f(queries, prompts, labels, **kwargs)                                OpenRLHF: a list or a tensor, {"rewards": ...}
    f(data_source, solution_str, ground_truth, extra_info, **kwargs)     verl: a number, {"score": ...}

A function over lists is called once for all samples of a prompt, so it can compare them. `depends_on_others` finds
functions that do: their rewards mean nothing where a prompt has one sample. A function may be async. A class is
instantiated with the arguments of the config; its instance is then called.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from rlplace.envs.text.contract import Message, Transcript
from rlplace.units import counted

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
# Forms of functions that take lists, with an entry for each answer
LISTS: frozenset[Form] = frozenset({"lists", "trl", "openrlhf", "verl_lists"})
# Parameters that get the right answer of a row
_RIGHT = ("labels", "ground_truth", "ground_truths")
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


def wants_right_answer(function: Callable[..., Any]) -> bool:
    """Return whether a reward function has a parameter that gets the right answer of a row."""
    if form_of(function) in ("transcript", "trl"):
        return False
    return any(name in _RIGHT for name in parameters_of(function))


def adapted(
    function: Callable[..., Any], kwargs: Mapping[str, object], *, chat: bool
) -> Callable[[Sequence[Transcript]], list[Any]]:
    """Return a reward function, or a class of reward functions, as a function of transcripts.

    The returned function returns the rewards of the transcripts, in their order. It calls a function over lists once,
    with all transcripts, and any other function once for each of them. `kwargs`: arguments of the config. `chat`:
    whether prompts are messages of a chat.
    """
    arguments = kwargs
    called = function
    if inspect.isclass(function):
        made: Any = function(**copy.deepcopy(dict(kwargs)))
        called = made
        arguments = {}
    form = form_of(called)
    parameters = parameters_of(called)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(given: Mapping[str, Any]) -> Any:
        # A function that changes its arguments changes only its own copy
        all_given = {**given, **copy.deepcopy(dict(arguments))}
        if not takes_any:
            all_given = {
                name: value for name, value in all_given.items() if name in parameters
            }
        return _awaited(called(**all_given))

    def one(transcript: Transcript) -> Any:
        if form == "transcript":
            own = copy.deepcopy(dict(arguments))
            return _number_in(_awaited(called(transcript, **own)))
        return _number_in(call(_given(form, transcript, chat)))

    def rewards(transcripts: Sequence[Transcript]) -> list[Any]:
        if form not in LISTS:
            return [one(transcript) for transcript in transcripts]
        each = [_given(form, transcript, chat) for transcript in transcripts]
        return _listed(call(_joined(each)), len(transcripts))

    return rewards


def _joined(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the arguments of several answers: a list of one entry per answer becomes a list of all entries.

    An answer without an argument that another answer has, such as a column, gets None there.
    """
    names = dict.fromkeys(name for given in each for name in given)
    return {
        name: [entry for given in each for entry in given.get(name, (None,))]
        for name in names
    }


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
    if form_of(function) not in LISTS:
        return False
    rewards = adapted(function, kwargs, chat=chat)
    each = [rewards([transcript])[0] for transcript in transcripts]
    together = rewards(transcripts)
    again = [rewards([transcript])[0] for transcript in transcripts]
    return _numbers(each) == _numbers(again) != _numbers(together)


def _numbers(values: Sequence[Any]) -> list[str]:
    """Return numbers as rounded texts: texts of nearly equal numbers are equal, also those of nan.

    None, for an answer to which a function does not apply, becomes an empty text.
    """
    return ["" if value is None else f"{float(value):.4g}" for value in values]


def _given(form: Form, transcript: Transcript, chat: bool) -> dict[str, Any]:
    """Return the arguments of a function of this form, by name. `chat`: whether prompts are messages of a chat."""
    facts = transcript.facts
    prompt = prompt_text(transcript)
    # What tools and environments have replied is no answer of the policy
    answer = "\n".join(transcript.answers)
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
        query = prompt + answer_text(transcript)
        return {"queries": [query], "prompts": [prompt], "labels": [right]}
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


def _listed(values: Any, answers: int) -> list[Any]:
    """Return the rewards in a list, an array or a tensor. Raises ValueError unless it has one for each answer.

    `answers`: number of answers. An entry of None stays None: in TRL it means that a function does not apply to an
    answer.
    """
    values = _number_in(values)
    if not hasattr(values, "__len__") or len(values) != answers:
        many = f"a {type(values).__name__}"
        if hasattr(values, "__len__"):
            many = f"{len(values)} rewards"
        raise ValueError(
            f"{many} for {counted(answers, 'answer')}: a function over lists returns a list, with a number for each"
        )
    return [_number_in(value) for value in values]


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
