"""Calls of tools in answers: the forms of the families, and what cannot be read is a text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlplace.envs.text.tool_calls import FORMATS, format_of, read_calls

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "properties": {"a": {"type": "integer"}, "b": {"type": "object"}}
        },
    },
}
SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {"properties": {"a": {"type": "string"}}},
    },
}
TWO = [("add", {"a": 1, "b": {"c": "}"}}), ("say", {"a": "7"})]
ONE = TWO[:1]
HERMES = (
    'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}"}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "say", "arguments": {"a": "7"}}\n</tool_call>'
)
LLAMA = (
    '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": {"c": "}"}}}; '
    '{"name": "say", "parameters": {"a": "7"}}'
)
MISTRAL = (
    'Well. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": {"c": "}"}}, "id": "abcdefghi"}, '
    '{"name": "say", "arguments": {"a": "7"}}]'
)
MISTRAL_NAMED = (
    '[TOOL_CALLS]add[ARGS]{"a": 1, "b": {"c": "}"}}[TOOL_CALLS]say{"a": "7"}'
)
XML = (
    "Well.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
    '{"c": "}"}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=say>\n<parameter=a>\n7\n'
    "</parameter>\n</function>\n</tool_call>"
)
# Name of the form, answer, its content, its calls
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", HERMES, "Well.", TWO),
    ("llama3_json", LLAMA, "", TWO),
    ("mistral", MISTRAL, "Well.", TWO),
    ("mistral", MISTRAL_NAMED, "", TWO),
    ("qwen3_xml", XML, "Well.", TWO),
    # The end is missing, but the call is whole
    ("hermes", HERMES[: HERMES.index("\n</tool_call>")], "Well.", ONE),
    *((name, " It is 7. ", " It is 7. ", []) for name in FORMATS),
]
UNREADABLE = [
    ("hermes", '<tool_call>{"name": "add", "argu'),
    ("hermes", HERMES.replace('"say"', "say")),
    ("hermes", '<tool_call>["add"]</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
    ("llama3_json", '{"name": "add"}'),
    ("llama3_json", '{"a": 1}; {'),
    ("llama3_json", '{"a":' * 100_000),
    ("mistral", '[TOOL_CALLS] [{"name": "add"'),
    ("mistral", '[TOOL_CALLS] {"a": 1}'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_read(name: str, text: str, content: str, calls: list[Any]) -> None:
    found = read_calls(FORMATS[name], text, [ADD, SAY])
    assert found.content == content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls


@pytest.mark.parametrize(("name", "text"), UNREADABLE)
def test_an_answer_with_a_call_that_cannot_be_read_is_a_text(
    name: str, text: str
) -> None:
    found = read_calls(FORMATS[name], text, [ADD])
    assert (found.content, found.calls, found.is_unread) == (text, (), True)


def test_braces_in_an_answer_are_no_call_that_cannot_be_read() -> None:
    found = read_calls(FORMATS["llama3_json"], r"so \boxed{3} it is", [ADD])
    assert not found.calls
    assert not found.is_unread


TYPED: list[tuple[Any, str, Any]] = [
    (None, "7", "7"),
    ({}, "7", "7"),
    ({"type": "string"}, "7", "7"),
    ({"type": "integer"}, "7", 7),
    ({"type": "integer"}, "seven", "seven"),
    ({"type": "number"}, "7.5", 7.5),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1, 2]", [1, 2]),
    ({"type": "object"}, '{"c": 1', '{"c": 1'),
]


@pytest.mark.parametrize(("schema", "written", "value"), TYPED)
def test_an_argument_in_xml_has_the_type_of_its_definition(
    schema: Any, written: str, value: Any
) -> None:
    properties = {} if schema is None else {"a": schema}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    text = f"<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>"
    (call,) = read_calls(FORMATS["qwen3_xml"], text, [tool]).calls
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("", None),
        ("<turn>assistant: <eos>", None),
        (
            '<tool_call>{"name": "example_tool", "arguments": {"text": "a"}}</tool_call><eos>',
            "hermes",
        ),
        (
            "<tool_call>\n<function=example_tool>\n<parameter=text>\na\n</parameter>\n</function>",
            "qwen3_xml",
        ),
        (
            '[TOOL_CALLS] [{"name": "example_tool", "arguments": {"text": "a"}, "id": "example01"}]',
            "mistral",
        ),
        ('[TOOL_CALLS]example_tool[ARGS]{"text": "a"}', "mistral"),
        (
            '{"name": "example_tool", "parameters": {"text": "a"}}<|eot_id|>',
            "llama3_json",
        ),
        (
            "<tool_call>example_tool\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
            None,
        ),
        ("<tool_call>[example_tool(text='a')]</tool_call>", None),
    ],
)
def test_what_the_template_makes_of_a_call_tells_the_form(
    written: str, form: str | None
) -> None:
    assert format_of(written) == form
