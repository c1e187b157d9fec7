"""The endpoint of agents by the client of OpenAI: requests, errors, streams, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.absent import needs
from tests.unit.envs.text.test_agent_requests import (
    ADD,
    TWO_CALLS,
    Met,
    sampled,
    scripted,
    stage,
)

pytestmark = [pytest.mark.slow, needs("openai")]


def with_client(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Calls tools twice, once in a stream, and completes a text."""
    import openai

    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [{"role": "user", "content": "1 + 2 and 3 + 4?"}]
    asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [ADD]}
    answer = client.chat.completions.create(**asked, logprobs=True)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.logprobs.content[0].logprob == -1.0
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    messages.append(choice.message)
    for call in choice.message.tool_calls:
        values = json.loads(call.function.arguments)
        text = f"{values['a'] + values['b']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    Met.answers.append("".join(delta.content or "" for delta in deltas))
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls] == ["add", "add"]
    text = client.completions.create(model="policy", prompt="what", n=2)
    Met.answers.append([one.text for one in text.choices])
    response = client.responses.create(model="policy", input="1 + 2?")
    Met.answers.append(response.output_text)
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**asked, tool_choice="required")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").chat.completions.create(**asked)
    try:
        while True:
            client.chat.completions.create(**asked)
    except openai.APIStatusError as error:
        Met.answers.append((error.status_code, error.body["message"]))
    return 1.0


def test_the_client_of_openai_is_answered(tmp_path: Path) -> None:
    texts = [
        TWO_CALLS,
        "3 and 7<eos>",
        TWO_CALLS,
        " is<eos>",
        " it<eos>",
        "3<eos>",
        "x<eos>",
    ]
    job = {"env": {"max_turns": 7}, "algorithm": {"sequence_length": 4000}}
    sample, made = stage(tmp_path, with_client, scripted(*texts), **job)
    text, completed, response, (status, why) = Met.answers
    assert (text, completed, response) == ("3 and 7", [" is", " it"], "3")
    assert (status, "env.max_turns" in why) == (410, True)
    assert (sample.reward, sample.turns) == (1.0, 7)
    # Each answer is learned once, in one of the conversations
    learned = sorted(sample.tokens[sample.mask].tolist())
    assert learned == sorted(token for answer in sampled(made) for token in answer)
    assert len(sample.parts) == 6
