"""The form of requests and answers of OpenAI's Responses API, /v1/responses, of which the endpoint offers a part.

::

    items: message, function_call, function_call_output ──▶ messages ──▶ the policy ──▶ items: message, function_call

The whole conversation is in each request; nothing is kept under the id of a response. There are no streams.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.envs.text.chat_api import (
    Asked,
    Choice,
    chosen_tools,
    message_of,
    object_in,
    unheeded_in,
    with_names,
)
from rlplace.envs.text.contract import Message, ToolCall

# Options that would change the meaning of an answer
_NOT_HERE = (
    "background",
    "conversation",
    "previous_response_id",
    "prompt",
    "stream",
)


def response_request(body: bytes) -> Asked:
    """Return the request in a body for /v1/responses. Raises ValueError if it is wrong or not offered."""
    asked = object_in(body)
    odd = [name for name in _NOT_HERE if asked.get(name)]
    form = (asked.get("text") or {}).get("format") or {"type": "text"}
    if form.get("type") != "text":
        odd.append("text.format")
    if odd:
        raise ValueError(
            f"not offered here: {', '.join(odd)}; each request has the whole conversation, and its answer is a text"
        )
    messages: list[Message] = []
    instructions = asked.get("instructions")
    if instructions:
        messages.append(message_of({"role": "system", "content": instructions}))
    given = asked.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError("the input of a request is a text or a list of items")
    for item in given:
        _add(messages, item)
    tools = [_chat_tool(tool) for tool in asked.get("tools") or ()]
    return Asked(
        prompt=with_names(messages),
        tools=chosen_tools(asked.get("tool_choice"), tools),
        one_call=asked.get("parallel_tool_calls") is False,
        unheeded=unheeded_in(asked),
    )


def _chat_tool(tool: Any) -> object:
    """Return the definition of a tool in the form of chat requests, which chat templates take."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def _add(messages: list[Message], item: Any) -> None:
    """Add an item of a request to its messages. Calls are a part of the message of the assistant before them.

    Raises ValueError for items that are not offered.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = [_chat_part(part) for part in content]
        messages.append(message_of({"role": item.get("role"), "content": content}))
    elif kind == "function_call":
        before = (
            messages.pop() if messages and messages[-1].role == "assistant" else None
        )
        call = ToolCall(
            str(item.get("name")), str(item.get("arguments")), str(item.get("call_id"))
        )
        text = before.content if before is not None else ""
        calls = before.calls if before is not None else ()
        messages.append(Message("assistant", text, (*calls, call)))
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_chat_part(part) for part in output]
        result = {
            "role": "tool",
            "content": output,
            "tool_call_id": item.get("call_id"),
        }
        messages.append(message_of(result))
    else:
        raise ValueError(f"not offered here: items of type {kind}")


def _chat_part(part: Any) -> object:
    """Return a part of a content in the form of chat requests."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


def response_of(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the answer to a request of /v1/responses. An answer that was cut is incomplete."""
    (choice,) = choices
    status = "incomplete" if choice.finish == "length" else "completed"
    output: list[Mapping[str, Any]] = []
    if choice.message.text or not choice.message.calls:
        text = {
            "type": "output_text",
            "text": choice.message.text,
            "annotations": [],
            "logprobs": [],
        }
        message = {"type": "message", "role": "assistant", "content": [text]}
        output.append(
            {**message, "id": f"msg_{secrets.token_hex(8)}", "status": status}
        )
    for call in choice.message.calls:
        told = {"type": "function_call", "call_id": call.id, "name": call.name}
        told |= {"arguments": call.arguments, "status": "completed"}
        output.append({**told, "id": f"fc_{secrets.token_hex(8)}"})
    usage = {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": choice.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": choice.prompt_tokens + choice.tokens,
    }
    incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{secrets.token_hex(8)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": "policy",
        "status": status,
        "incomplete_details": incomplete,
        "error": None,
        "output": output,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": not asked.one_call,
        "usage": usage,
    }
