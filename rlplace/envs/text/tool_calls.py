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

import json
import math
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
    """An answer, taken apart.

    `content`: its text without the calls. `calls`: in their order, without ids. `is_unread`: whether it has a call that
    cannot be read.
    """

    content: str
    calls: Sequence[ToolCall] = ()
    is_unread: bool = False


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

    An argument is a text, unless the definition of the tool gives it another type, of which the text is a value in
    JSON.
    """
    found: list[ToolCall] = []
    for name, inside in _XML_FUNCTION.findall(text):
        schemas = _schemas_of(name, tools)
        arguments: dict[str, object] = {}
        for argument, written in _XML_PARAMETER.findall(inside):
            # A line break stands around the value
            value = written.removeprefix("\n").removesuffix("\n")
            arguments[argument] = _typed(value, _types_in(schemas.get(argument)))
        found.append(_call({"name": name, "arguments": arguments}))
    content = text
    if found:
        content = text[: text.index("<function=")].rstrip()
        content = content.removesuffix("<tool_call>")
    return Parsed(content, found)


def _schemas_of(name: str, tools: Tools) -> Mapping[str, object]:
    """Return argument of the tool `name` -> its schema; empty if the tool is not known."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _types_in(schema: object) -> set[str]:
    """Return the types that a schema allows, as JSON Schema names them."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given or ())
    for several in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(several) or ():
            types |= _types_in(one)
    return types


def _typed(value: str, types: set[str]) -> object:
    """Return the value in JSON that is written in `value`, if it is one of `types`; otherwise the text."""
    written = value.strip()
    if written.lower() in ("true", "false", "null"):
        written = written.lower()
    try:
        found: object = parsed(written)
    except ValueError:
        return value
    number = isinstance(found, float) and math.isfinite(found)
    whole = isinstance(found, int) and not isinstance(found, bool)
    kinds = {
        "null": found is None,
        "boolean": isinstance(found, bool),
        "integer": whole,
        "number": number or whole,
        "object": isinstance(found, dict),
        "array": isinstance(found, list),
    }
    if any(kinds.get(kind, False) for kind in types):
        return found
    return value


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
        # Calls of Llama 3 have no mark: braces within an answer need not be one
        is_call = parser is not llama3_json or text.lstrip().startswith("{")
        return Parsed(text, is_unread=is_call)
    if not found.calls:
        return found
    return Parsed(found.content.strip(), found.calls)


def format_of(written: str) -> str | None:
    """Return the name of the form in which a chat template writes calls; None if FORMATS does not have this form.

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
