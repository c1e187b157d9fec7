"""A task whose episodes are those of an environment on a server of OpenEnv: the policy's answers are its actions.

::

    reset(seed, ...) ──▶ observation ──▶ prompt ──▶ answer ──▶ action, or calls of tools ── step ──▶ observation ──▶ ...
                                                                                             └────▶ reward
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rlplace.codes import config_error, problem
from rlplace.envs.registry import needs, unknown_choice
from rlplace.envs.text.call_format import CallFormat
from rlplace.envs.text.contract import (
    Message,
    MessagesWithTools,
    NextTurn,
    NoPrompt,
    Prompt,
    Sampled,
    Split,
    ToolCall,
    prompt_identity,
    text_of,
)
from rlplace.envs.text.openenv_client import (
    NoAnswer,
    Observed,
    RefusedAction,
    ServerIsFull,
    Session,
    action_schema,
    is_address,
)
from rlplace.envs.text.rows import RowsOfEpochs
from rlplace.envs.text.tool_calls import read_calls
from rlplace.json_text import parsed, parsed_object
from rlplace.units import clipped

_URL = "env.kwargs.url"
# A server ends a session a little after its connection: seconds to wait for room
_ROOM_S = 5.0
_LOOK_S = 0.1
# Resets at the same time
_TOGETHER = 16
# A hyphen behind a word or a digit is no sign; a comma before three digits separates thousands
_SIGN = r"(?:(?<![\w)\]])[-+])?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(rf"{_SIGN}(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# Characters of an observation that an error shows
_SHOWN = 200


class OpenEnv:
    """A task: the episodes of an environment that a server of OpenEnv has. The score is the sum of the rewards.

    `url`: address of the server, or of several servers with the same environment. `action`: name of the field of an
    action that gets the policy's answer: the text, or its last number if the field is a number; None: the only field
    that an action must have; if there are several, the answer is the whole action in JSON. `fields`: values of other
    fields of each action. If the actions of the environment are calls of tools, the policy gets the tools with the
    prompt, and calls them; an answer without a call ends the episode.

    `observation`: names of the fields of an observation that the policy reads; None: all that are not empty. `prompt`:
    a text before the first observation. `reset`: arguments of the environment's reset. `path`: data sets; the columns
    of a row are arguments of reset too. Each prompt has a seed of its own, which reset gets as `seed`. `timeout_s`:
    seconds to wait for each answer of the server. `tool_format`: how the model writes calls of tools: a key of FORMATS,
    or a function of the user's; None: the chat template tells it.

    An action that the environment refuses is told to the policy as a text; the fact `parts` has the share of such
    actions. Raises ConfigError if the server does not answer, and for names that its actions do not have.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    # Endless even with rows: asking each row for its prompt would begin all episodes at once
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        url: str | Sequence[str],
        action: str | None = None,
        fields: Mapping[str, Any] | None = None,
        observation: str | Sequence[str] | None = None,
        prompt: str = "",
        reset: Mapping[str, Any] | None = None,
        path: str | Sequence[str] | Mapping[str, float] | None = None,
        timeout_s: float = 60.0,
        tool_format: str | None = None,
    ) -> None:
        with needs("websockets", got="openenv", extra="openenv"):
            import websockets  # noqa: F401
        self._urls = [url] if isinstance(url, str) else list(url)
        if not self._urls or not all(map(is_address, self._urls)):
            raise config_error("environment-server", _URL, str(url), error="no-address")
        self._name = f"{seed}/{split}"
        self._fields = dict(fields or {})
        self._shown = [observation] if isinstance(observation, str) else observation
        self._before = prompt
        self._reset = dict(reset or {})
        self._timeout_s = timeout_s
        # Rows that are arguments of reset
        self._rows = RowsOfEpochs(path, seed)
        # What an action is: calls of tools, or fields of which one has the answer
        try:
            schema = action_schema(self._urls[0], timeout_s)
        except NoAnswer as error:
            raise _server_problem(error, self._urls[0]) from error
        self.calls_tools = _is_call(schema)
        self._action = action
        self._types: Sequence[str] = ()
        if not self.calls_tools:
            self._read_schema(schema)
        self.calls = CallFormat(tool_format)

    def read_example_call(self, written: str) -> None:
        """Find out how the model writes calls of tools, by the text that its chat template makes of EXAMPLE_CALL."""
        self.calls.read_example(written)

    def identity(self, number: int) -> str:
        """Return a text that is equal for equal episodes: the arguments of reset."""
        index = self._rows.index(number)
        if index is None:
            return str(self._seed(number))
        return f"row {index}"

    def episode(self, number: int) -> OpenEnvEpisode:
        """Begin an episode, and return it. Raises as `episodes` does."""
        return self.episodes(number, 1)[0]

    def episodes(self, number: int, samples: int) -> list[OpenEnvEpisode]:
        """Begin an episode for each of `samples` samples of the prompt with this number, and return the episodes.

        Raises NoPrompt if the server does not begin one, and ConfigError if two of them begin with different
        observations.
        """
        row = self._rows.row(number)
        arguments = {"seed": self._seed(number), **self._reset, **row}
        url = self._urls[number % len(self._urls)]
        with concurrent.futures.ThreadPoolExecutor(min(samples, _TOGETHER)) as threads:
            begun = [
                threads.submit(self._begun, url, arguments, row) for _ in range(samples)
            ]
            concurrent.futures.wait(begun)
        episodes = [episode.result() for episode in begun]
        first = prompt_identity(episodes[0].prompt)
        for episode in episodes:
            if prompt_identity(episode.prompt) != first:
                raise config_error(
                    "environment-server",
                    _URL,
                    clipped(repr(text_of(episodes[0].prompt)), _SHOWN),
                    error="another-observation",
                    other=clipped(repr(text_of(episode.prompt)), _SHOWN),
                )
        return episodes

    def action_of(self, answer: str) -> dict[str, Any]:
        """Return the action that an answer of the policy means: name of a field -> value. Raises RefusedAction."""
        answer = answer.strip()
        if self._action is None:
            try:
                return {**self._fields, **parsed_object(answer)}
            except ValueError as error:
                why = f"the answer must be a JSON object with the fields of an action: {error}"
                raise RefusedAction(why) from error
        return {**self._fields, self._action: _value(answer, self._types)}

    def read(self, observed: Observed) -> str:
        """Return what the policy reads of an observation."""
        values = observed.observation
        if self._shown is not None:
            values = {name: values.get(name) for name in self._shown}
        told = _told(values)
        if not told and self._shown is None:
            # Some environments have only metadata to tell
            told = _told(observed.metadata)
        return told

    def _seed(self, number: int) -> int:
        return random.Random(f"{self._name}/{number}").getrandbits(31)

    def _begun(
        self, url: str, arguments: Mapping[str, Any], row: Mapping[str, Any]
    ) -> OpenEnvEpisode:
        """Begin an episode on the server at `url`, and return it. Raises NoPrompt."""
        until_s = time.monotonic() + _ROOM_S
        while True:
            try:
                session = Session(url, self._timeout_s)
                tools = _tools(session) if self.calls_tools else []
                observed = session.reset(arguments)
                break
            except ServerIsFull as error:
                if time.monotonic() > until_s:
                    raise _server_problem(error, url) from error
                time.sleep(_LOOK_S)
            except (NoAnswer, RefusedAction) as error:
                raise _server_problem(error, url) from error
        parts = [part for part in (self._before, self.read(observed)) if part]
        text = "\n\n".join(parts)
        prompt: Prompt = text
        if tools:
            prompt = MessagesWithTools.of([Message("user", text)], tools)
        return OpenEnvEpisode(self, session, prompt, observed, tools, row)

    def _read_schema(self, schema: Mapping[str, Any]) -> None:
        """Find the field of an action that gets the answer, and its types. Raises ConfigError for unknown fields."""
        properties: dict[str, Any] = dict(schema.get("properties") or {})
        properties.pop("metadata", None)
        names = [*properties]
        for argument, given in [("action", [self._action]), ("fields", self._fields)]:
            for name in given:
                if name is not None and names and name not in names:
                    why = f"an action of the environment has the fields {', '.join(names)}"
                    raise unknown_choice(argument, name, names, why=why)
        if self._action is None:
            needed = [*schema.get("required", ())] or names
            left = [name for name in needed if name not in self._fields]
            if len(left) == 1:
                self._action = left[0]
        if self._action is not None:
            self._types = _types(properties.get(self._action))


class OpenEnvEpisode:
    """An episode of OpenEnv in progress, with a session of its own."""

    def __init__(
        self,
        task: OpenEnv,
        session: Session,
        prompt: Prompt,
        observed: Observed,
        tools: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any],
    ) -> None:
        self._task = task
        self._session = session
        self.prompt = prompt
        self._tools = tools
        self._row = row
        # All rewards that the environment has given, and whether the last action got one
        self._rewards: list[float] = []
        self._is_rewarded = False
        self._count(observed)
        self._sampled: Sampled | None = None
        self._answers = 0
        # Actions and calls that the policy has tried, those that were refused, and those that reached the environment
        self._tried = 0
        self._refused = 0
        self._steps = 0

    def sampled(self, answer: Sampled) -> None:
        """Keep the tokens of the answer that `reply` gets next: some models write calls with special tokens."""
        self._sampled = answer

    def reply(self, answer: str) -> str | NextTurn | None:
        """Take the action that an answer means, and return the observation; None if the episode is over.

        Raises NoAnswer if the server does not answer.
        """
        self._answers += 1
        following: str | NextTurn | None = None
        if self._is_over:
            pass
        elif self._tools:
            following = self._after_calls(answer)
        else:
            following = self._after_action(answer)
        if following is None:
            self._session.close()
        return following

    def facts(self) -> Mapping[str, Any]:
        """Return the columns of the row, and what has happened, for reward functions.

        `score`: sum of the rewards. `last_reward`: that of the last action. Both are missing if the environment has
        ended the episode and has given no reward, as if its verification has failed. `steps`: actions that the
        environment has taken. `parts`: the share of refused actions.
        """
        self._session.close()
        refused = self._refused / max(1, self._tried)
        rewards: dict[str, float] = {}
        if self._rewards or not self._is_over:
            last = self._rewards[-1] if self._is_rewarded else 0.0
            rewards = {"score": sum(self._rewards), "last_reward": last}
        return {
            **self._row,
            **rewards,
            "steps": self._steps,
            "parts": {"refused_actions": refused},
        }

    def _after_action(self, answer: str) -> str | None:
        """Return what the policy reads after the action `answer`; None if the episode is over."""
        self._tried += 1
        try:
            observed = self._stepped(self._task.action_of(answer))
        except RefusedAction as error:
            self._refused += 1
            return f"The environment refuses the action: {error}"
        if self._is_over:
            return None
        # A template would leave out an empty message
        return self._task.read(observed) or "(nothing)"

    def _after_calls(self, answer: str) -> NextTurn | None:
        """Make the calls in an answer, one after the other. Return their results; None if the episode is over."""
        # Some families write calls with special tokens
        text = answer if self._sampled is None else self._sampled.text
        calls: Sequence[ToolCall] = ()
        parser = self._task.calls.parser
        if parser is not None:
            calls = read_calls(parser, text, self._tools).calls
        results: list[Message] = []
        for number, call in enumerate(calls):
            # Ids of nine letters and digits, as some templates want them
            call_id = f"call{self._answers % 1000:03}{number % 100:02}"
            result = self._called(call)
            results.append(Message("tool", result, call_id=call_id, name=call.name))
            if self._is_over:
                return None
        if not results:
            return None
        return NextTurn(messages=tuple(results), after=self._answers - 1)

    def _called(self, call: ToolCall) -> str:
        """Call a tool, and return its result as a text."""
        self._tried += 1
        try:
            arguments = parsed_object(call.arguments)
            action = {
                "type": "call_tool",
                "tool_name": call.name,
                "arguments": arguments,
            }
            observed = self._stepped(action)
        except ValueError as error:
            # RefusedAction is one of them
            self._refused += 1
            return f"Error: {error}"
        wrong = observed.observation.get("error")
        if wrong:
            self._refused += 1
            return f"Error: {_message(wrong)}"
        if "result" in observed.observation:
            return _result(observed.observation["result"])
        return self._task.read(observed)

    def _stepped(self, action: Mapping[str, Any]) -> Observed:
        """Take an action, and count its reward."""
        observed = self._session.step(action)
        self._steps += 1
        self._count(observed)
        return observed

    def _count(self, observed: Observed) -> None:
        self._is_over = observed.is_over
        self._is_rewarded = observed.reward is not None
        if observed.reward is not None:
            self._rewards.append(observed.reward)


def _server_problem(error: Exception, url: str) -> NoPrompt:
    """Return the error that the server at `url` does not begin an episode."""
    kind = "silent"
    if isinstance(error, ServerIsFull):
        kind = "full"
    elif isinstance(error, RefusedAction):
        kind = "no-reset"
    told = problem("environment-server", _URL, url, error=kind, reason=str(error))
    return NoPrompt([told])


def _is_call(schema: Mapping[str, Any]) -> bool:
    """Return whether an action with this schema is a call of a tool. The library's general class may be one."""
    properties = schema.get("properties") or {}
    if not [name for name in properties if name != "metadata"]:
        return True
    return "tool_name" in properties and "arguments" in properties


def _tools(session: Session) -> list[Mapping[str, Any]]:
    """Return the definitions of the environment's tools, as chat templates take them. Raises RefusedAction."""
    listed = session.step({"type": "list_tools"}).observation.get("tools")
    if not listed:
        raise RefusedAction("its actions are calls of tools, and it has no tools")
    tools: list[Mapping[str, Any]] = []
    for tool in listed:
        if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
            raise RefusedAction(f"one of its tools has no name: {_text(tool)}")
        function = {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object"},
        }
        tools.append({"type": "function", "function": function})
    return tools


def _types(schema: object) -> Sequence[str]:
    """Return the types that a field may have, as JSON Schema names them; () if its schema tells none."""
    if not isinstance(schema, dict):
        return ()
    types = schema.get("type") or ()
    found = [types] if isinstance(types, str) else [*types]
    for one in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        found += _types(one)
    return found


def _value(answer: str, types: Sequence[str]) -> Any:
    """Return the value of a field that an answer means. Raises RefusedAction if there is none.

    `types`: of the field. A text is the whole answer, a number the last one in it. Other values are JSON.
    """
    if not types or "string" in types:
        return answer
    if "number" in types or "integer" in types:
        return _last_number(answer, types)
    try:
        return parsed(answer)
    except ValueError as error:
        raise RefusedAction(f"the answer must be JSON: {error}") from error


def _last_number(answer: str, types: Sequence[str]) -> int | float:
    """Return the last number in an answer. Raises RefusedAction without one, and for one that does not fit.

    `types`: of the field. If it takes whole numbers only, 3.0 is one.
    """
    found = _NUMBER.findall(answer)
    if not found:
        raise RefusedAction("the answer has no number")
    text = found[-1].replace(",", "")
    number = float(text)
    if not math.isfinite(number):
        raise RefusedAction("the last number in the answer is too large")
    if "integer" in types and text.lstrip("+-").isdigit():
        return int(text)
    if "number" in types:
        return number
    if not number.is_integer():
        raise RefusedAction(f"the last number in the answer, {text}, is not whole")
    return int(number)


def _told(values: Mapping[str, Any]) -> str:
    """Return the values of an observation that are not empty: one alone as it is, several with their names."""
    kept = {
        name: value for name, value in values.items() if value not in (None, "", [], {})
    }
    if len(kept) == 1:
        (value,) = kept.values()
        return _text(value)
    return "\n".join(f"{name}: {_text(value)}" for name, value in kept.items())


def _text(value: object) -> str:
    """Return a value as a text: texts as they are, others in JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _message(error: object) -> str:
    """Return what the error of a call says."""
    if isinstance(error, Mapping) and "message" in error:
        return str(error["message"])
    return _text(error)


def _result(result: object) -> str:
    """Return the result of a call as a text: its data, or the texts that it has."""
    if not isinstance(result, Mapping):
        return _text(result)
    data = result.get("data")
    if data is not None:
        return _text(data)
    content = result.get("content")
    if not isinstance(content, list):
        return _text(dict(result))
    texts = [str(part["text"]) for part in content if "text" in part]
    return "\n".join(texts)
