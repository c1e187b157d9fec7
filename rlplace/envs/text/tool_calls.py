"""Calls of tools in answers of a policy: how the families of models write them, and which family a model belongs to.

::

    hermes        It is <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>          Qwen, Hermes, SmolLM3
    llama3_json   {"name": "add", "parameters": {"a": 1}}; {"name": ...}                       Llama 3
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                         Mistral
                  [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]...                                 Mistral, since 2025
    qwen3_xml     <tool_call><function=add><parameter=a>1</parameter></function></tool_call>   Qwen3-Coder

An answer with a call that cannot be read has no calls, and is a text, as for most parsers of vLLM: what a policy is
trained with is what it meets when it is served.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlplace.envs.text.contract import ToolCall
from rlplace.json_text import parsed

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(
    r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(.*)", re.DOTALL
)
_XML_FUNCTION = re.compile(r"<function=(.*?)>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(
    r"<parameter=(.*?)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL
)


# Definitions of functions, as a request has them
Tools = Sequence[Mapping[str, Any]]
# A call, by which it is found out how a chat template writes calls. Some templates want ids of nine letters and digits,
# and descriptions of all there is
EXAMPLE_CALL = ToolCall("example_tool", '{"text": "a"}', "example01")
EXAMPLE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "example_tool",
        "description": "an example",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "a text"}},
            "required": ["text"],
        },
    },
}
_EXAMPLE = [(EXAMPLE_CALL.name, parsed(EXAMPLE_CALL.arguments))]


class Parsed(NamedTuple):
    """An answer, taken apart. `content`: its text without the calls. `calls`: in their order, without ids."""

    content: str
    calls: Sequence[ToolCall] = ()


class _Unreadable(ValueError):
    """Raised for a call that is not in the form of its family."""


def hermes(text: str, tools: Tools = ()) -> Parsed:
    """Read calls between <tool_call> and </tool_call>. The text behind the first call is no part of the content."""
    found: list[ToolCall] = []
    for closed, unclosed in _HERMES.findall(text):
        found.append(_call(_value(closed or unclosed)))
    return Parsed(text[: text.index("<tool_call>")] if found else text, found)


def llama3_json(text: str, tools: Tools = ()) -> Parsed:
    """Read each JSON object in the answer as a call. An answer with calls has no other content."""
    decoder = json.JSONDecoder()
    found: list[ToolCall] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _Unreadable("it is no JSON") from error
        found.append(_call(value))
        at = text.find("{", stop)
    return Parsed("" if found else text, found)


def mistral(text: str, tools: Tools = ()) -> Parsed:
    """Read calls after [TOOL_CALLS]: a list in JSON, or a name and its arguments for each of them."""
    content, *written = text.split(_MISTRAL)
    found: list[ToolCall] = []
    for each in written:
        if each.lstrip().startswith("["):
            listed = _value(each)
            if not isinstance(listed, list):
                raise _Unreadable("it is no list of calls")
            found += map(_call, listed)
            continue
        named = _MISTRAL_CALL.fullmatch(each)
        if named is None:
            raise _Unreadable("it has no name")
        found.append(_call({"name": named[1], "arguments": _value(named[2])}))
    return Parsed(content if found else text, found)


def qwen3_xml(text: str, tools: Tools = ()) -> Parsed:
    """Read calls in the form of XML.

    The definition of the tool says which arguments are texts; any other is a value in JSON, and a text if it is none.
    """
    found: list[ToolCall] = []
    for name, inside in _XML_FUNCTION.findall(text):
        texts = _texts_of(name, tools)
        arguments: dict[str, object] = {}
        for argument, written in _XML_PARAMETER.findall(inside):
            # A line break stands around the value
            value = written.removeprefix("\n").removesuffix("\n")
            arguments[argument] = value
            if argument not in texts:
                with contextlib.suppress(ValueError):
                    arguments[argument] = parsed(value)
        found.append(_call({"name": name, "arguments": arguments}))
    content = text
    if found:
        content = text[: text.index("<function=")].rstrip()
        content = content.removesuffix("<tool_call>")
    return Parsed(content, found)


def _texts_of(name: str, tools: Tools) -> set[str]:
    """Return the arguments of the tool `name` that are texts, by its definition."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                argument
                for argument, schema in properties.items()
                if isinstance(schema, dict) and schema.get("type") == "string"
            }
    return set()


Parser = Callable[[str, Tools], Parsed]
FORMATS: Mapping[str, Parser] = {
    "hermes": hermes,
    "qwen3_xml": qwen3_xml,
    "mistral": mistral,
    # The last one, since it reads the JSON of the others
    "llama3_json": llama3_json,
}


def read_calls(parser: Parser, text: str, tools: Tools) -> Parsed:
    """Return an answer, taken apart by the form of a family. An answer with an unreadable call is content only.

    `text`: with special tokens, since some families write calls with them, but without those that end the answer.
    `tools`: that the policy may call.
    """
    try:
        found = parser(text, tools)
    except _Unreadable:
        return Parsed(text)
    if not found.calls:
        return found
    return Parsed(found.content.strip(), found.calls)


def format_of(written: str) -> str | None:
    """Return the name of the form in which a chat template writes calls; None if it is none of FORMATS.

    `written`: the text that the template makes of EXAMPLE_CALL.
    """
    for name, parser in FORMATS.items():
        calls = read_calls(parser, written, [EXAMPLE_TOOL]).calls
        if [(call.name, parsed(call.arguments)) for call in calls] == _EXAMPLE:
            return name
    return None


def _value(text: str) -> object:
    """Return the value of a JSON text. Raises _Unreadable."""
    try:
        value: object = parsed(text.strip())
    except ValueError as error:
        raise _Unreadable("it is no JSON") from error
    return value


def _call(value: object) -> ToolCall:
    """Return the call that a JSON object names. Raises _Unreadable for other values."""
    if not isinstance(value, dict):
        raise _Unreadable("it is no object")
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or arguments is None:
        raise _Unreadable("it has no name, or no arguments")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
