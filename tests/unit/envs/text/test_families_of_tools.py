"""Calls and results of tools, beside libraries with such models: parsers of vLLM, chat templates in TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlplace.envs.text.contract import Message, MessagesWithTools, ToolCall
from rlplace.envs.text.tool_calls import FORMATS, format_of, read_calls
from rlplace.models.tokenizer import Chat, Tokenizer
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.envs.text.test_tool_calls import (
    ADD,
    CASES,
    SAY,
    TYPED,
    UNREADABLE,
)

pytestmark = pytest.mark.slow
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
VLLM_NAMES = {"qwen3_xml": "qwen3_coder"}
# Answers that vLLM reads otherwise: as a call with arguments that are no JSON
OTHERWISE = [("mistral", "[TOOL_CALLS]add[ARGS]{")]
# Form of calls of a family, by the name of its template in TRL
FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen3_xml",
    "qwen3_5_nothink": "qwen3_xml",
    "qwen3_6": "qwen3_xml",
    "nemotron_3_nano": "qwen3_xml",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    # Forms that are not known here
    "glm4moe": None,
    "lfm2_2_5": None,
    "gemma4_v2": None,
}


def value_of(arguments: str) -> object:
    """Return the value of a call's arguments; the text if it is no JSON."""
    try:
        value: object = json.loads(arguments)
    except ValueError:
        return arguments
    return value


@pytest.mark.vllm
def test_calls_are_those_that_vllm_reads(tmp_path: Path) -> None:
    """An answer is a call in training if it is one when the policy is served."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # For vLLM, older models of Mistral are those without the token [ARGS]
    older = [token for token in SPECIAL if token != "[ARGS]"]
    folders = {
        "new": tiny_tokenizer(tmp_path / "new", special=SPECIAL),
        "old": tiny_tokenizer(tmp_path / "old", special=older),
    }
    tokenizers = {n: AutoTokenizer.from_pretrained(f) for n, f in folders.items()}
    request = ChatCompletionRequest(
        model="policy", messages=[{"role": "user", "content": "?"}], tools=[ADD, SAY]
    )
    cases = [(name, text) for name, text, _, _ in CASES] + UNREADABLE
    differ: list[tuple[str, str]] = []
    compared = 0
    for name, text in cases:
        # Nested too deeply for any parser
        if len(text) > 10_000:
            continue
        of_vllm = ToolParserManager.get_tool_parser(VLLM_NAMES.get(name, name))
        fitting = tokenizers["new" if "[ARGS]" in text else "old"]
        told = of_vllm(fitting, request.tools).extract_tool_calls(text, request)
        ours = read_calls(FORMATS[name], text, [ADD, SAY])
        of_vllm_read = [call.function for call in told.tool_calls]
        found = [(call.name, value_of(call.arguments)) for call in ours.calls]
        expected = [(call.name, value_of(call.arguments)) for call in of_vllm_read]
        content = (told.content or "").strip()
        if found != expected or (ours.calls and ours.content != content):
            differ.append((name, text))
        compared += 1
    assert compared > 15
    # Types of arguments in XML
    of_vllm = ToolParserManager.get_tool_parser(VLLM_NAMES["qwen3_xml"])
    for schema, written, value in TYPED:
        tool = json.loads(json.dumps(SAY))
        tool["function"]["parameters"]["properties"] = {"a": schema} if schema else {}
        asked = request.model_copy(
            update={"tools": [type(request.tools[0]).model_validate(tool)]}
        )
        text = f"<tool_call>\n<function=say>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
        parser = of_vllm(tokenizers["new"], asked.tools)
        (call,) = parser.extract_tool_calls(text, asked).tool_calls
        assert json.loads(call.function.arguments) == {"a": value}, schema
    assert differ == OTHERWISE


@pytest.mark.parametrize("family", FAMILIES)
def test_results_follow_an_answer_as_the_template_of_the_family_writes_them(
    family: str, tmp_path: Path
) -> None:
    import trl

    templates = Path(trl.__file__).parent / "chat_templates"
    template = (templates / f"{family}.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path, chat=template))
    chat = Chat(tokenizer, system=None)
    assert format_of(chat.example_call()) == FAMILIES[family]
    tool: dict[str, Any] = json.loads(json.dumps(ADD))
    tool["function"]["description"] = "a + b"
    tool["function"]["parameters"]["type"] = "object"
    calls = [ToolCall("add", '{"a": 1, "b": 2}', "abcdefghi")]
    # Llama's template writes one call
    if not family.startswith("llama"):
        calls.append(ToolCall("add", '{"a": 3, "b": 4}', "abcdefghj"))
    results = [
        Message("tool", f"{3 + 4 * number}", call_id=call.id, name="add")
        for number, call in enumerate(calls)
    ]
    asked = [Message("user", "what?")]
    whole = tokenizer.render(
        [*asked, Message("assistant", "", tuple(calls)), *results],
        arguments={"tools": [tool]},
    )
    reply = chat.reply(tokenizer.encode("x"), results)
    text = tokenizer.decode(reply, special=True)
    assert all(result.text in text for result in results)
    assert whole.endswith(text)
    # The answer itself is what is left between the prompt and the results
    first = chat.text(MessagesWithTools.of(asked, [tool]))
    if whole.startswith(first):
        answer = whole[len(first) : len(whole) - len(text)]
        form = FAMILIES[family]
        if form is not None:
            found = read_calls(FORMATS[form], answer, [tool]).calls
            assert [call.name for call in found] == ["add"] * len(calls)
