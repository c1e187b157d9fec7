"""An agent with a tool: the policy learns which drawer is full.

    scripts/get_model tiny                                              once: a model with random weights
    python -m rlplace.train --config-dir recipes/agents --config-name drawers

`env/reward` rises from about 0.05 to above 0.9 within minutes on two cores. A model with random weights writes no
JSON, so the form of calls is one of its own here: each digit in an answer opens a drawer. With a model that calls tools
already, leave `tool_format` out: its chat template tells the form.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openai import OpenAI

from rlplace.envs.text import ToolCall
from rlplace.envs.text.tool_calls import Parsed

FULL = ("3", "8")  # the full drawer of each day
MOST_CALLS = 3
OPEN = {
    "type": "function",
    "function": {
        "name": "open",
        "description": "Opens a drawer.",
        "parameters": {
            "type": "object",
            "properties": {"drawer": {"type": "string"}},
            "required": ["drawer"],
        },
    },
}


@functools.cache
def endpoint(base_url: str) -> OpenAI:
    """Return one client for all episodes: making one takes much longer than a request."""
    return OpenAI(base_url=base_url, api_key="of the episode", max_retries=0)


def solve(base_url: str, api_key: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Lead one episode. The score is higher the fewer drawers were opened before the full one."""
    client = endpoint(base_url).with_options(api_key=api_key)
    day = row["number"] % len(FULL)
    messages: list[Any] = [{"role": "user", "content": f"day {day}"}]
    opened = 0
    while opened < MOST_CALLS:
        choice = client.chat.completions.create(
            model="policy", messages=messages, tools=[OPEN]
        ).choices[0]
        if not choice.message.tool_calls:
            # An answer without a call ends the search
            return {"score": 0.1 * (opened > 0), "opened": opened}
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            opened += 1
            drawer = json.loads(call.function.arguments)["drawer"]
            if drawer == FULL[day]:
                return {"score": 1.0 - 0.2 * (opened - 1), "opened": opened}
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": "empty"}
            )
    return {"score": 0.2, "opened": opened}


def digits(text: str, tools: Sequence[Mapping[str, Any]]) -> Parsed:
    """Read each digit of an answer as a call."""
    calls = [
        ToolCall("open", json.dumps({"drawer": d})) for d in text if d in "0123456789"
    ]
    return Parsed("", calls) if calls else Parsed(text)
