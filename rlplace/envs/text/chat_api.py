"""The form of requests and answers of the OpenAI API, of which the endpoint for agents offers a part.

::

    body of POST /v1/chat/completions ── chat_request ──┐
    body of POST /v1/completions ── completion_request ─┴▶ Asked ──▶ the policy ──▶ Choice, n times
    JSON, or events of a stream ◀─────────────────── answer_of, events_of ──────────────────┘

How answers are drawn is decided by the config of the run, so `temperature`, `max_tokens`, `stop` and the like have no
effect, and the run says which of them agents set. What would change the meaning of an answer and is not offered is
refused.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from rlplace.envs.text.contract import Message, RawText, ToolCall
from rlplace.json_text import parsed

Finish = Literal["stop", "length", "tool_calls"]
# Most answers to one request, as in the OpenAI API
_MOST_CHOICES = 128
# Options of a request that would change the meaning of its answer
_NOT_HERE = ("functions", "function_call", "audio", "web_search_options")
# Options of a request that say how its answer is drawn, and have no effect
_UNHEEDED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "reasoning",
    "reasoning_effort",
    "chat_template_kwargs",
)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LETTERS = string.ascii_letters + string.digits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of an agent.

    `prompt`: messages, or a text that the model reads as it is. `tools`: definitions of functions that the chat
    template shows. `calls`: whether the answer may have calls: there are tools, and the agent wants calls. `choices`:
    number of answers. `one_call`: whether only the first call of an answer is wanted. `logprobs`: whether those of the
    tokens are wanted. `ids`: whether the ids of tokens are wanted. `is_stream`: whether the answer is a stream of
    events. `usage`: whether the stream tells the numbers of tokens at its end. `unheeded`: options that have no effect,
    by name.
    """

    prompt: Sequence[Message] | RawText
    tools: Sequence[Mapping[str, Any]] = ()
    choices: int = 1
    one_call: bool = False
    logprobs: bool = False
    ids: bool = False
    is_stream: bool = False
    usage: bool = False
    unheeded: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, RawText)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token of an answer, as `logprobs` tells it."""

    text: str
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a request.

    `message`: the answer, with its calls. `finish`: why it ended. `prompt_tokens`, `tokens`: numbers of tokens before
    the answer and of the answer. `logprobs`: of each token of the answer, if they are wanted. `prompt_ids`, `ids`: ids
    of these tokens, if they are wanted.
    """

    message: Message
    finish: Finish
    prompt_tokens: int
    tokens: int
    logprobs: Sequence[Token] | None = None
    prompt_ids: Sequence[int] | None = None
    ids: Sequence[int] | None = None


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat_request(body: bytes) -> Asked:
    """Return the request in a body for /v1/chat/completions. Raises ValueError if it is wrong or not offered."""
    asked = object_in(body)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("a request is an object with a list of messages")
    if asked.get("top_logprobs"):
        raise ValueError(
            "not offered here: top_logprobs; only the sampled tokens have one"
        )
    form = asked.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise ValueError("not offered here: response_format")
    return Asked(
        prompt=with_names([message_of(message) for message in messages]),
        tools=chosen_tools(asked.get("tool_choice"), asked.get("tools")),
        one_call=asked.get("parallel_tool_calls") is False,
        logprobs=asked.get("logprobs") is True,
        **_options_of(asked),
    )


def completion_request(body: bytes) -> Asked:
    """Return the request in a body for /v1/completions. Raises ValueError if it is wrong or not offered."""
    asked = object_in(body)
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("the prompt of a request is one text; lists of ids are none")
    for name in ("echo", "suffix"):
        if asked.get(name):
            raise ValueError(f"not offered here: {name}")
    if asked.get("best_of") not in (None, 1):
        raise ValueError("not offered here: best_of")
    wanted = asked.get("logprobs")
    if wanted not in (None, False, True, 0, 1):
        raise ValueError(
            "not offered here: logprobs above 1; only the sampled tokens have one"
        )
    return Asked(
        prompt=RawText(_whole(prompt)),
        logprobs=wanted is not None and wanted is not False,
        **_options_of(asked),
    )


def object_in(body: bytes) -> dict[str, Any]:
    """Return the object in the body of a request. Raises ValueError if there is none, or for options not offered."""
    try:
        asked = parsed(body)
    except ValueError as error:
        raise ValueError(f"the request is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ValueError("a request is an object with a list of messages")
    odd = [name for name in _NOT_HERE if asked.get(name)]
    if odd:
        raise ValueError(f"not offered here: {', '.join(odd)}")
    return asked


def _options_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what requests of both kinds have, by the names of Asked."""
    choices = asked.get("n")
    if choices is None:
        choices = 1
    whole = isinstance(choices, int) and not isinstance(choices, bool)
    if not whole or not 1 <= choices <= _MOST_CHOICES:
        raise ValueError(f"n is a number from 1 to {_MOST_CHOICES}")
    options = asked.get("stream_options")
    return {
        "choices": choices,
        "ids": asked.get("return_token_ids") is True,
        "is_stream": asked.get("stream") is True,
        "usage": isinstance(options, dict) and options.get("include_usage") is True,
        "unheeded": unheeded_in(asked),
    }


def unheeded_in(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a request that have no effect: name -> value."""
    given = {name: asked.get(name) for name in _UNHEEDED}
    return {name: value for name, value in given.items() if value not in (None, [], {})}


def chosen_tools(choice: object, given: object) -> Sequence[Mapping[str, Any]]:
    """Return the definitions of the tools that a request shows to the policy.

    `choice`: its `tool_choice`. `given`: its `tools`. Raises ValueError for tools that are no functions, and if a call
    is required.
    """
    if choice not in (None, "auto", "none"):
        raise ValueError(
            f"not offered here: tool_choice {json.dumps(choice)}; a policy that is trained decides what it calls"
        )
    if choice == "none":
        return ()
    if not given:
        return ()
    if not isinstance(given, list):
        raise ValueError("the tools of a request are a list")
    for tool in given:
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type", "function") != "function":
            raise ValueError(
                'a tool is {"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
    return given


def message_of(message: Any) -> Message:
    """Return one message of a chat request. Raises ValueError if it is not a text with a known role."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ValueError(
            f"a message has a role ({', '.join(_ROLES)}) and a text as its content"
        )
    role = message["role"]
    content = message.get("content")
    # A list of text parts is one text
    if isinstance(content, list):
        plain = [isinstance(p, dict) and p.get("type") == "text" for p in content]
        if all(plain):
            content = "".join(str(part.get("text", "")) for part in content)
    calls = _calls(message) if role == "assistant" else ()
    # A message that only calls tools has no content
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(
            f"a message has a role ({', '.join(_ROLES)}) and a text as its content"
        )
    if role == "developer":
        role = "system"
    call_id = message.get("tool_call_id") if role == "tool" else None
    name = message.get("name")
    return Message(
        cast("Any", role),
        _whole(content),
        calls,
        call_id=call_id if isinstance(call_id, str) else "",
        name=name if isinstance(name, str) else "",
    )


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which results of tools have the names of their tools, which some templates show."""
    called: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        called |= {call.id: call.name for call in message.calls}
        if message.role == "tool" and not message.name:
            name = called.get(message.call_id, "")
            message = dataclasses.replace(message, name=name)
        found.append(message)
    return found


def _calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """Return the calls of a message of the assistant. Raises ValueError for other forms than those of answers."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError("a call of a tool has a function")
        name = function.get("name")
        arguments = function.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ValueError("a called function has a name and arguments as texts")
        found.append(ToolCall(name, arguments, str(call.get("id", ""))))
    return tuple(found)


def _whole(text: str) -> str:
    """Return `text`. Raises ValueError if it has half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a message has half of a character, at {error.start} of its content"
        ) from None
    return text


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def call_id() -> str:
    """Return a new id for a call: nine letters and digits, the only form that the templates of Mistral take."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def answer_of(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the answer to a request that is no stream."""
    told = []
    for index, choice in enumerate(choices):
        one: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
        if asked.is_chat:
            one |= {
                "message": _told(choice.message),
                "logprobs": _chat_logprobs(choice),
            }
        else:
            one |= {
                "text": choice.message.text,
                "logprobs": _completion_logprobs(choice),
            }
        if choice.ids is not None:
            one |= {"token_ids": choice.ids, "prompt_token_ids": choice.prompt_ids}
        told.append(one)
    kind = "chat.completion" if asked.is_chat else "text_completion"
    answer = {**_head(asked, kind), "choices": told, "usage": _usage(choices)}
    if choices[0].prompt_ids is not None:
        answer["prompt_token_ids"] = choices[0].prompt_ids
    return answer


def events_of(asked: Asked, choices: Sequence[Choice]) -> Iterator[str]:
    """Yield the data of each event of a stream: for each choice its text, its calls and its end."""
    kind = "chat.completion.chunk" if asked.is_chat else "text_completion"
    head = _head(asked, kind)

    def event(index: int, told: Mapping[str, Any], finish: Finish | None = None) -> str:
        one = {"index": index, "finish_reason": finish, "logprobs": None, **told}
        return json.dumps({**head, "choices": [one]})

    for index, choice in enumerate(choices):
        if not asked.is_chat:
            logprobs = _completion_logprobs(choice)
            yield event(
                index,
                {"text": choice.message.text, "logprobs": logprobs},
                choice.finish,
            )
            continue
        yield event(index, {"delta": {"role": "assistant", "content": ""}})
        if choice.message.text:
            told = {"delta": {"content": choice.message.text}}
            yield event(index, {**told, "logprobs": _chat_logprobs(choice)})
        for number, call in enumerate(_told(choice.message).get("tool_calls", ())):
            yield event(index, {"delta": {"tool_calls": [{"index": number, **call}]}})
        yield event(index, {"delta": {}}, choice.finish)
    if asked.usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(choices)})
    yield "[DONE]"


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    name = "chatcmpl" if asked.is_chat else "cmpl"
    return {
        "id": f"{name}-{secrets.token_hex(8)}",
        "object": kind,
        "model": "policy",
        "created": int(time.time()),
    }


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens. As in the OpenAI API, the prompt of several choices counts once."""
    before = choices[0].prompt_tokens
    sampled = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": before,
        "completion_tokens": sampled,
        "total_tokens": before + sampled,
    }


def _told(message: Message) -> dict[str, Any]:
    """Return a message of the policy. A message that only calls tools has no content."""
    told: dict[str, Any] = {"role": "assistant", "content": message.text}
    if message.calls:
        told["content"] = message.text or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return told


def _chat_logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in choice.logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(choice: Choice) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    offsets = [0]
    for token in choice.logprobs:
        offsets.append(offsets[-1] + len(token.text))
    return {
        "tokens": [token.text for token in choice.logprobs],
        "token_logprobs": [token.logprob for token in choice.logprobs],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }
