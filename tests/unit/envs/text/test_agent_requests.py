"""What agents may ask: tools, several answers, log-probabilities, streams, plain texts and further conversations.

Episodes are led over the endpoint, and a rollout rank of the test answers. What is learned is what was sampled.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Request, Sample
from rlplace.workers.arguments import REQUESTS
from tests.text_stage import Puppet, TextStage
from tests.tiny_tokenizer import CHAT, END, tiny_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a + b",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
# Shows tools and calls in the form of Hermes and Qwen, and results of tools by their names
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<turn>{{ m.role }}{% if m.role == 'tool' %} {{ m.name }}{% endif %}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)
LENGTHS = {"max_prompt_length": 400, "max_new_tokens": 900}


class Met:
    """What agents of a test have met, in the order of their requests."""

    answers: ClassVar[list[Any]] = []


def post(
    url: str, key: str, path: str = "chat/completions", **body: object
) -> dict[str, Any]:
    """Raises HTTPError."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as found:
        content = found.read()
        if found.headers["Content-Type"] == "text/event-stream":
            lines = content.decode().split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            told = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            answer: dict[str, Any] = {"events": told}
        else:
            answer = json.loads(content)
    Met.answers.append(answer)
    return answer


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": f"{text}"}


def result(call: Mapping[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def text_of(answer: Mapping[str, Any], index: int = 0) -> str:
    text: str = answer["choices"][index]["message"]["content"]
    return text


def stage(folder: Path, agent: Any, says: Any, **job: Any) -> tuple[Sample, TextStage]:
    """Run one prompt with an agent. Return the first sample, and the stage."""
    Met.answers.clear()
    tiny_tokenizer(folder, chat=job.pop("chat", TEMPLATE))
    kwargs = {"agent": f"{agent.__module__}:{agent.__name__}"}
    env = {"task": "agent", "kwargs": kwargs, "max_turns": 8} | job.pop("env", {})
    algorithm = LENGTHS | job.pop("algorithm", {})
    with TextStage(
        folder, says, env=env, prompts=1, samples=1, algorithm=algorithm
    ) as made:
        Met.answers.clear()
        made.metrics = made.run()[0]
        ((sample,),) = made.groups()
    return sample, made


def scripted(*texts: str) -> Callable[[Request, int], str]:
    """Answer the turns of an episode with these texts."""
    return lambda request, sample: texts[request.turn]


def sampled(made: TextStage) -> list[list[int]]:
    """Return the tokens of each answer of the first sample, in their order."""
    return [
        made.puppet.answered[place].tokens.tolist()
        for place in sorted(made.puppet.answered)
    ]


def parts_of(sample: Sample) -> list[np.ndarray[Any, Any]]:
    return np.split(np.arange(len(sample.tokens)), np.cumsum(sample.parts)[:-1])


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def calling(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Calls its tool as often as the policy asks for it. The score is whether the last answer is the sum."""
    messages = [user("1 + 2 and 3 + 4?")]
    while True:
        choice = post(url, key, messages=messages, tools=[ADD])["choices"][0]
        message = choice["message"]
        if choice["finish_reason"] != "tool_calls":
            return float(message["content"] == "3 and 7")
        messages.append(message)
        for call in message["tool_calls"]:
            values = json.loads(call["function"]["arguments"])
            messages.append(result(call, f"{values['a'] + values['b']}<eos>"))


CALL = '<tool_call>{{"name": "add", "arguments": {{"a": {}, "b": {}}}}}</tool_call>'
TWO_CALLS = f"Well. {CALL.format(1, 2)} {CALL.format(3, 4)}<eos>"


def test_what_is_learned_of_a_conversation_with_tools_is_what_was_sampled(
    tmp_path: Path,
) -> None:
    sample, made = stage(tmp_path, calling, scripted(TWO_CALLS, "3 and 7<eos>"))
    first, last = Met.answers
    message = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert message["content"] == "Well."
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"name": "add", "arguments": '{"a": 3, "b": 4}'},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert last["choices"][0]["finish_reason"] == "stop"
    # Tokens: each answer as it was sampled, though the template would write its calls in another way
    answers = sampled(made)
    assert (sample.reward, sample.turns, sample.parts) == (1.0, 2, ())
    assert sample.tokens[sample.mask].tolist() == [t for each in answers for t in each]
    tokenizer = Tokenizer.load(tmp_path)
    text = tokenizer.decode(sample.tokens, special=True)
    assert text.startswith(f"<tools>{json.dumps(ADD)}</tools><turn>user: 1 + 2 and")
    results = "<turn>tool add: 3<eos><eos>\n<turn>tool add: 7<eos><eos>\n"
    behind = f"{TWO_CALLS}\n{results}<turn>assistant: 3 and 7<eos>"
    assert text.endswith(f"<turn>assistant: {behind}")
    # The special token that a tool has written ends no turn
    assert sample.tokens.tolist().count(END) == 5
    usage = {"prompt_tokens": int(sample.mask.argmax())}
    usage["completion_tokens"] = len(answers[0])
    usage["total_tokens"] = sum(usage.values())
    assert first["usage"] == usage
    assert last["usage"]["prompt_tokens"] == len(sample.tokens) - len(answers[1])
    assert made.metrics["env/conversations"].value == 1.0


@pytest.mark.parametrize(
    ("text", "calls"), [("<tool_call>{", 0), (f"{CALL.format(1, 2)} and <tool", 1)]
)
def test_an_answer_that_is_cut_has_the_reason_length_with_calls_too(
    tmp_path: Path, text: str, calls: int
) -> None:
    sample, made = stage(tmp_path, calling, scripted(text))
    (answer,) = Met.answers
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"].get("tool_calls", ())) == calls
    assert made.metrics["env/unread_calls"].value == 0.0
    assert (sample.truncated, sample.ended, sample.reward) == (True, "cut_answer", 0.0)
    assert made.metrics["env/cut_answers"].value == 1.0


def with_options(url: str, key: str, row: Mapping[str, Any]) -> float:
    """As an agent of the ReAct form, which cuts an answer before the observation that it has made up."""
    options = {"stop": ["Observation:"], "temperature": 1.0, "max_tokens": 7}
    post(url, key, messages=[user("?")], **options, seed=3, top_p=None)
    return 1.0


def with_usual_options(url: str, key: str, row: Mapping[str, Any]) -> float:
    """As libraries of agents set them whether or not they change an answer."""
    options = {"stop": "<eos>", "max_tokens": 4096, "min_p": 0, "top_k": -1}
    post(url, key, messages=[user("?")], **options, chat_template_kwargs={})
    return 1.0


def test_options_of_requests_without_effect_are_said(tmp_path: Path) -> None:
    _, made = stage(tmp_path, with_options, scripted("3<eos>"))
    (note,) = made.metrics["env/unread_calls"].notes
    # The temperature is that of the run
    assert note.startswith("requests of agents set max_tokens, stop to other values")
    _, made = stage(tmp_path, with_usual_options, scripted("3<eos>"))
    assert made.metrics["env/unread_calls"].notes == ()
    _, made = stage(tmp_path, one_call, scripted(TWO_CALLS, TWO_CALLS))
    assert made.metrics["env/unread_calls"].notes == ()


def one_call(url: str, key: str, row: Mapping[str, Any]) -> float:
    asked = {"messages": [user("?")], "tools": [ADD], "parallel_tool_calls": False}
    calls = post(url, key, **asked)["choices"][0]["message"]["tool_calls"]
    asked["tool_choice"] = "none"
    without = post(url, key, **asked)["choices"][0]
    return float(len(calls) == 1 and without["finish_reason"] == "stop")


def test_calls_that_cannot_be_read_are_counted_and_said(tmp_path: Path) -> None:
    """The agent gets such an answer as a text, and takes it for the last one."""
    for text, share in (('<tool_call>{"name": "add", <eos>', 1.0), ("3<eos>", 0.0)):
        sample, made = stage(tmp_path, calling, scripted(text))
        assert sample.reward == 0.0
        unread = made.metrics["env/unread_calls"]
        assert unread.value == share
        assert len(unread.notes) == int(share)
        assert all("tool_format" in note for note in unread.notes)


def test_one_call_and_no_call_are_options(tmp_path: Path) -> None:
    sample, _ = stage(tmp_path, one_call, scripted(TWO_CALLS, TWO_CALLS))
    assert sample.reward == 1.0
    # Other tools are another prompt
    assert len(sample.parts) == 2


# ── several answers, log-probabilities, streams ──────────────────────────────────────────────────────────────────────


def several(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Asks for three answers, goes on from the second, and from the first."""
    first = [user("guess")]
    answers = post(url, key, messages=first, n=3)
    for index in (1, 0):
        said = {"role": "assistant", "content": text_of(answers, index)}
        post(url, key, messages=[*first, said, user("more")])
    return 1.0


def test_several_answers_are_conversations_and_each_is_learned_once(
    tmp_path: Path,
) -> None:
    texts = ("a<eos>", "b<eos>", "c<eos>", "after b<eos>", "after a<eos>")
    sample, made = stage(tmp_path, several, scripted(*texts))
    answers = Met.answers[0]
    assert [text_of(answers, index) for index in range(3)] == ["a", "b", "c"]
    assert [choice["index"] for choice in answers["choices"]] == [0, 1, 2]
    assert answers["usage"]["completion_tokens"] == 6
    tokenizer = Tokenizer.load(tmp_path)
    whole = [
        tokenizer.decode(sample.tokens[part], special=True) for part in parts_of(sample)
    ]
    asked = "<turn>user: guess<eos>\n<turn>assistant: "
    more = "<eos>\n<turn>user: more<eos>\n<turn>assistant: after"
    assert whole == [
        f"{asked}a{more} a<eos>",
        f"{asked}b{more} b<eos>",
        f"{asked}c<eos>",
    ]
    learned = [sample.tokens[part][sample.mask[part]] for part in parts_of(sample)]
    expected = [
        tokenizer.encode(text).tolist()
        for text in ("a<eos>after a<eos>", "b<eos>after b<eos>", "c<eos>")
    ]
    assert sorted(len(each) for each in learned) == sorted(map(len, expected))
    assert sum(map(len, sampled(made))) == sample.response_tokens
    # Each answer was sampled behind just the tokens that stand before it
    for request in made.puppet.asked:
        length = len(request.tokens)
        parts = [sample.tokens[part] for part in parts_of(sample)]
        assert any(np.array_equal(part[:length], request.tokens) for part in parts)


def test_answers_to_one_request_are_drawn_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Puppet._answer

    def both_first(puppet: Puppet, request: Request, sample: int) -> None:
        """Answer turn 1 when turn 2 has been asked too, which therefore must not wait for it."""
        if request.turn == 1 and all(each.turn != 2 for each in puppet.asked):
            other = puppet._channels[REQUESTS].get(timeout_s=20.0)
            puppet.asked.append(other)
            answer(puppet, other, sample)
        answer(puppet, request, sample)

    monkeypatch.setattr(Puppet, "_answer", both_first)
    texts = ("a<eos>", "b<eos>", "c<eos>", "after b<eos>", "after a<eos>")
    room = {"sequence_length": 4000}
    sample, made = stage(tmp_path, several, scripted(*texts), algorithm=room)
    answers = Met.answers[0]
    assert [text_of(answers, index) for index in range(3)] == ["a", "b", "c"]
    assert sum(map(len, sampled(made))) == sample.response_tokens


def telling(url: str, key: str, row: Mapping[str, Any]) -> float:
    post(url, key, messages=[user("x")], logprobs=True, return_token_ids=True)
    return 1.0


def test_log_probabilities_and_ids_are_those_of_the_engine(tmp_path: Path) -> None:
    _, made = stage(tmp_path, telling, scripted("what is 7<eos>"))
    (answer,) = Met.answers
    (choice,) = answer["choices"]
    told = choice["logprobs"]["content"]
    completion = made.puppet.answered[0, 0, 0]
    assert [each["logprob"] for each in told] == completion.logprobs.tolist()
    assert "".join(each["token"] for each in told) == "what is 7<eos>"
    assert bytes(told[0]["bytes"]).decode() == told[0]["token"]
    assert choice["token_ids"] == completion.tokens.tolist()
    assert answer["prompt_token_ids"] == made.puppet.asked[0].tokens.tolist()


def streaming(url: str, key: str, row: Mapping[str, Any]) -> float:
    asked = {"messages": [user("x")], "tools": [ADD], "n": 2, "stream": True}
    post(url, key, **asked, stream_options={"include_usage": True})
    return 1.0


def test_a_stream_has_the_parts_of_each_answer(tmp_path: Path) -> None:
    stage(tmp_path, streaming, scripted(TWO_CALLS, "no<eos>"))
    *events, last = Met.answers[0]["events"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 2
    of_first = [e["choices"][0] for e in events if e["choices"][0]["index"] == 0]
    role, content, *calls, end = [choice["delta"] for choice in of_first]
    assert (role, content) == (
        {"role": "assistant", "content": ""},
        {"content": "Well."},
    )
    assert [call["tool_calls"][0]["index"] for call in calls] == [0, 1]
    assert calls[1]["tool_calls"][0]["function"]["name"] == "add"
    assert (end, of_first[-1]["finish_reason"]) == ({}, "tool_calls")
    ends = [e["choices"][0]["finish_reason"] for e in events]
    assert [end for end in ends if end] == ["tool_calls", "stop"]
    assert len({event["id"] for event in events}) == 1


# ── further conversations ────────────────────────────────────────────────────────────────────────────────────────────


def editing(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Goes on, goes on otherwise, edits an answer, begins anew, and goes on with the first conversation."""
    said = [user("one")]
    said.append(
        {"role": "assistant", "content": text_of(post(url, key, messages=said))}
    )
    longer = [*said, user("two")]
    answer = text_of(post(url, key, messages=longer))
    post(url, key, messages=[*said, user("other")])
    edited = {"role": "assistant", "content": "edited"}
    post(url, key, messages=[user("one"), edited, user("two")])
    post(url, key, messages=[user("new")])
    longer += [{"role": "assistant", "content": f" {answer}\n"}, user("three")]
    post(url, key, messages=longer)
    return 1.0


def test_history_that_is_edited_is_a_further_conversation(tmp_path: Path) -> None:
    texts = [f"{number}<eos>" for number in range(6)]
    sample, made = stage(tmp_path, editing, scripted(*texts))
    tokenizer = Tokenizer.load(tmp_path)
    whole = []
    learned = []
    for part in parts_of(sample):
        whole.append(tokenizer.decode(sample.tokens[part], special=True))
        learned.append(tokenizer.decode(sample.tokens[part][sample.mask[part]]))

    def chat(*texts: str) -> str:
        roles = ("user", "assistant") * len(texts)
        turns = [f"<turn>{r}: {t}<eos>\n" for r, t in zip(roles, texts, strict=False)]
        return "".join(turns).removesuffix("\n")

    assert whole == [
        chat("one", "0", "two", "1", "three", "5"),
        chat("one", "0", "other", "2"),
        chat("one", "edited", "two", "3"),
        chat("new", "4"),
    ]
    assert learned == ["015", "2", "3", "4"]
    assert (sample.turns, sample.ended) == (6, "task")
    assert made.metrics["env/conversations"].value == 4.0


def at_once(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Asks four times at once, after a first answer."""
    post(url, key, messages=[user("first")])
    threads = []
    for number in range(4):
        asked = {"messages": [user(number)]}
        threads.append(threading.Thread(target=post, args=(url, key), kwargs=asked))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1.0


def test_requests_at_once_are_answered_one_after_the_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "other"))

    def repeats(request: Request, sample: int) -> str:
        asked = tokenizer.decode(request.tokens)
        return f"{asked.split('user: ')[1].split(chr(10))[0]}!<eos>"

    sample, _ = stage(tmp_path / "model", at_once, repeats)
    assert {text_of(answer) for answer in Met.answers} == {
        "first!",
        *(f"{number}!" for number in range(4)),
    }
    assert (sample.turns, len(sample.parts)) == (5, 5)


def too_much(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Asks for the same again and again."""
    try:
        while True:
            post(url, key, messages=[user("x")])
    except urllib.error.HTTPError as error:
        Met.answers.append((error.code, json.load(error)["error"]["message"]))
        return 0.5


@pytest.mark.parametrize(
    ("limits", "ended", "reason"),
    [
        ({"env": {"max_turns": 2}}, "max_turns", "env.max_turns"),
        (
            {"algorithm": {"max_prompt_length": 90, "sequence_length": 100}},
            "sequence_length",
            "algorithm.sequence_length",
        ),
    ],
)
def test_all_conversations_together_have_the_limits_of_an_episode(
    tmp_path: Path, limits: dict[str, Any], ended: str, reason: str
) -> None:
    sample, made = stage(
        tmp_path, too_much, lambda request, sample: "what is this<eos>", **limits
    )
    assert Met.answers[-1][0] == 410
    assert reason in Met.answers[-1][1]
    assert (sample.ended, sample.reward) == (ended, 0.5)
    assert len(sample.tokens) <= 1300
    if ended == "sequence_length":
        assert 50 < len(sample.tokens) <= 100
    assert made.metrics["env/refused_agents"].value == 1.0


def after_a_cut(url: str, key: str, row: Mapping[str, Any]) -> float:
    said = [user("x")]
    said.append(
        {"role": "assistant", "content": text_of(post(url, key, messages=said))}
    )
    return float(text_of(post(url, key, messages=[*said, user("and?")])) == "yes")


def test_an_agent_goes_on_after_an_answer_that_was_cut(tmp_path: Path) -> None:
    sample, made = stage(
        tmp_path,
        after_a_cut,
        scripted("a long one", "yes<eos>"),
        algorithm={"max_new_tokens": 4},
    )
    reasons = [answer["choices"][0]["finish_reason"] for answer in Met.answers]
    assert reasons == ["length", "stop"]
    assert (sample.reward, sample.turns, sample.truncated) == (1.0, 2, False)
    assert made.metrics["env/cut_answers"].value == 0.5
    # The answer has no end of its own, so the template's end follows it
    cut = len(made.puppet.asked[0].tokens) + 4
    assert sample.tokens[cut] == END
    assert not sample.mask[cut]


# ── plain texts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def completing(url: str, key: str, row: Mapping[str, Any]) -> float:
    first = post(url, key, "completions", prompt="what is", logprobs=1)["choices"][0]
    text = f"what is{first['text']}\nand"
    post(url, key, "completions", prompt=[text], stream=True)
    for wrong in ({"prompt": [1, 2]}, {"echo": True}, {"logprobs": 5}, {"best_of": 3}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url, key, "completions", **{"prompt": "x", **wrong})
        assert refused.value.code == 400
    return 1.0


def test_a_text_is_completed_as_it_is(tmp_path: Path) -> None:
    sample, made = stage(tmp_path, completing, scripted(" 7", " 8<eos>"))
    first, second = Met.answers
    assert first["object"] == "text_completion"
    assert first["choices"][0]["text"] == " 7"
    assert first["choices"][0]["logprobs"]["text_offset"] == [0, 1]
    assert second["events"][0]["choices"][0]["text"] == " 8"
    tokenizer = Tokenizer.load(tmp_path)
    whole = tokenizer.decode(sample.tokens, special=True)
    assert whole == "what is 7\nand 8<eos>"
    assert sample.tokens[sample.mask].tolist() == [
        t for each in sampled(made) for t in each
    ]
    assert sample.parts == ()
    assert sample.reward == 1.0


# ── the Responses API ────────────────────────────────────────────────────────────────────────────────────────────────


def responding(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Calls tools by /v1/responses, and goes on by /v1/chat/completions."""
    function = ADD["function"]
    asked: dict[str, Any] = {
        "tools": [{"type": "function", **function, "strict": True}]
    }
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}
    ]
    answer = post(url, key, "responses", input=items, instructions="Add.", **asked)
    items += answer["output"]
    for call in answer["output"][1:]:
        values = json.loads(call["arguments"])
        told = {"type": "function_call_output", "call_id": call["call_id"]}
        items.append({**told, "output": f"{values['a'] + values['b']}"})
    answer = post(url, key, "responses", input=items, instructions="Add.", **asked)
    for wrong in (
        {"input": []},
        {"input": "x", "stream": True},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": [{"type": "computer_call"}]},
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        {"input": "x", "tools": [{"type": "web_search"}]},
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url, key, "responses", **wrong)
        assert refused.value.code == 400
    return float(answer["output"][0]["content"][0]["text"] == "3 and")


def test_responses_are_the_same_conversations(tmp_path: Path) -> None:
    sample, made = stage(tmp_path, responding, scripted(TWO_CALLS, "3 and"))
    first, last = Met.answers
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["message", "function_call", "function_call"]
    assert first["output"][0]["content"][0]["text"] == "Well."
    assert (first["status"], last["status"]) == ("completed", "incomplete")
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["usage"]["output_tokens"] == len(sampled(made)[1])
    assert (sample.reward, sample.turns, sample.parts) == (1.0, 2, ())
    text = Tokenizer.load(tmp_path).decode(sample.tokens, special=True)
    behind = "<turn>tool add: 3<eos>\n<turn>tool add: 7<eos>\n<turn>assistant: 3 and"
    assert text.endswith(f"{TWO_CALLS}\n{behind}")


# ── forms of other families ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_template_without_a_known_form_refuses_tools(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="tool_format"):
        stage(tmp_path, calling, scripted("x<eos>"), chat=CHAT)


def own_form(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    from rlplace.envs.text.contract import ToolCall
    from rlplace.envs.text.tool_calls import Parsed

    assert tools == [ADD]
    if not text.startswith("CALL"):
        return Parsed(text)
    return Parsed("", [ToolCall("add", text.removeprefix("CALL"))])


def test_the_form_of_calls_may_be_ones_own(tmp_path: Path) -> None:
    kwargs = {
        "agent": f"{__name__}:{calling.__name__}",
        "tool_format": f"{__name__}:{own_form.__name__}",
    }
    sample, _ = stage(
        tmp_path,
        calling,
        scripted('CALL{"a": 1, "b": 2}<eos>', "3 and 7<eos>"),
        env={"kwargs": kwargs},
    )
    assert (sample.reward, sample.turns) == (1.0, 2)
