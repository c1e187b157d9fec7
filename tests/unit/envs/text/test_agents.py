"""Conversations that a program leads over the endpoint, as any client of the OpenAI API would."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlplace.config.blocks.language_model import TextEnvConfig
from rlplace.envs.registry import make_task
from rlplace.envs.text import agents
from rlplace.envs.text.agents import AgentTask
from rlplace.envs.text.contract import Message, NextTurn, NoPrompt
from rlplace.errors import ConfigError
from rlplace.http_server import Limits
from tests.text_stage import TextStage
from tests.tiny_tokenizer import tiny_tokenizer

PATIENCE_S = 20.0


def call(url: str, key: str, messages: list[dict[str, Any]], **others: object) -> str:
    """Raises HTTPError."""
    said: str = choice(url, key, messages, **others)["message"]["content"]
    return said


def choice(
    url: str, key: str, messages: list[dict[str, Any]], **others: object
) -> dict[str, Any]:
    """Raises HTTPError."""
    content = json.dumps(
        {"model": "policy", "messages": messages, "temperature": 0.7, **others}
    ).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/chat/completions", content, headers)
    ) as found:
        chosen: dict[str, Any] = json.load(found)["choices"][0]
        return chosen


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": f"{text}"}


def adder(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Asks twice; the score is how often the answer was the number."""
    messages, right = [{"role": "system", "content": "Add."}, user(row["number"])], 0
    for _ in range(2):
        answer = call(url, key, messages)
        right += answer.strip() == str(row["number"])
        messages += [{"role": "assistant", "content": answer.strip()}, user("again")]
    return right / 2


def seeing_the_end(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Asks once; the score is 1 if the answer is whole."""
    answer = choice(url, key, [user(row["number"])])
    return float(answer["finish_reason"] == "stop")


class Told:
    """What agents of a test have met."""

    refused: ClassVar[list[tuple[int, str]]] = []
    ended: ClassVar[threading.Semaphore] = threading.Semaphore(0)
    met: ClassVar[threading.Event] = threading.Event()


def endless(url: str, key: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Asks until nothing answers any more."""
    messages = [user(row["number"])]
    try:
        while True:
            messages += [
                {"role": "assistant", "content": call(url, key, messages)},
                user("more"),
            ]
    except urllib.error.HTTPError as error:
        Told.refused.append((error.code, json.load(error)["error"]["message"]))
        return {"score": 0.25, "turns": len(messages) // 2}
    finally:
        Told.ended.release()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"n": 0}, "n is a number"),
    ({"n": True}, "n is a number"),
    ({"tools": [{}]}, "a tool is"),
    ({"tools": [ADD]}, "tool_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"messages": []}, "list of m"),
    ({"messages": [{"role": "function"}]}, "role"),
    ({"messages": [user("\ud83d")]}, "half"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "function"),
)


def bad_client(url: str, key: str, row: Mapping[str, Any]) -> None:
    """Asks for what is not offered, then properly."""
    for wrong, _ in WRONG:
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(url, key, **{"messages": [user("x")], **wrong})
        Told.refused.append(
            (refused.value.code, json.load(refused.value)["error"]["message"])
        )
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(url, "another", [user("x")])
    Told.refused.append((refused.value.code, ""))
    call(url, key, [user([{"type": "text"}] and "go")])


def silent(url: str, key: str, row: Mapping[str, Any]) -> float:
    return 1.0


def broken(url: str, key: str, row: Mapping[str, Any]) -> float:
    call(url, key, [user(row["question"])])
    raise OSError("no such tool")


def leaves(url: str, key: str, row: Mapping[str, Any]) -> float:
    call(url, key, [user(row["number"])])
    sys.exit(3)


def impatient(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Goes while it is answered, and asks again over another connection."""
    host = url.removeprefix("http://").removesuffix("/v1")
    body = json.dumps({"messages": [user("x")]})
    first = http.client.HTTPConnection(host)
    first.request(
        "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"}
    )
    Told.ended.acquire()
    first.sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )  # with a reset
    first.close()
    Told.met.set()
    return 1.0


def rude(url: str, key: str, row: Mapping[str, Any]) -> float:
    """Sends what no client sends, each time over a connection of its own."""
    host = url.removeprefix("http://").removesuffix("/v1")
    known = {"Authorization": f"Bearer {key}"}
    for headers in (
        {**known, "Content-Length": str((64 << 20) + 1)},
        {**known, "Content-Length": "9" * 5000},
        {**known, "Transfer-Encoding": "chunked"},
        {"Authorization": "Bearer another", "Content-Length": str((1 << 20) + 1)},
    ):
        connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        connection.putrequest("POST", "/v1/chat/completions")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        Told.refused.append((answer.status, f"{answer.getheader('Connection')}"))
        connection.close()
    nested = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    nested.request("POST", "/v1/chat/completions", "[" * 200000, known)
    Told.refused.append((nested.getresponse().status, "nested"))
    call(url, key, [user("go")])
    return 1.0


counter = iter(range(1000))


def fickle(url: str, key: str, row: Mapping[str, Any]) -> float:
    call(url, key, [user(next(counter))])
    return 1.0


def waits(url: str, key: str, row: Mapping[str, Any]) -> float:
    Told.ended.acquire()
    return 0.0


meeting = threading.Barrier(3, timeout=PATIENCE_S)


def meets(url: str, key: str, row: Mapping[str, Any]) -> float:
    meeting.wait()
    call(url, key, [user(row["number"])])
    return 1.0


def every_second(url: str, key: str, row: Mapping[str, Any]) -> float:
    if next(counter) % 2:
        raise OSError("no sandbox")
    call(url, key, [user(row["number"])])
    return 1.0


def not_the_second(url: str, key: str, row: Mapping[str, Any]) -> float:
    if row["number"] == 1:
        raise OSError("no sandbox")
    call(url, key, [user(row["number"])])
    return 1.0


def hangs(url: str, key: str, row: Mapping[str, Any]) -> float:
    try:
        call(url, key, [user(row["number"])])
    except urllib.error.HTTPError:
        Told.ended.acquire()
    return 1.0


def user_said(text: str) -> Message:
    return Message("user", text)


def fails(episode: Any) -> bool:
    try:
        episode.reply("a")
    except NoPrompt:
        return True
    return False


def says_no(request: Any, sample: int) -> str:
    return "no<eos>"


@pytest.fixture
def task() -> Callable[..., AgentTask]:
    Told.refused.clear()
    while Told.ended.acquire(blocking=False):
        pass

    def make(agent: Any, **kwargs: Any) -> AgentTask:
        name = f"{__name__}:{agent.__name__}"
        made = make_task(
            TextEnvConfig(task="agent", kwargs={"agent": name, **kwargs}),
            seed=3,
            split="train",
        )
        assert isinstance(made, AgentTask)
        return made

    return make


def test_an_agent_asks_and_is_answered_until_it_returns(
    task: Callable[..., AgentTask],
) -> None:
    episode = task(adder).episode(7)
    assert episode.prompt == (Message("system", "Add."), Message("user", "7"))
    assert episode.reply(" 7 ") == NextTurn(messages=(user_said("again"),), after=0)
    assert episode.prompt == (Message("system", "Add."), Message("user", "7"))
    assert episode.reply("8") is None
    assert episode.facts() == {"number": 7, "split": "train", "seed": 3, "score": 0.5}


def test_an_agent_that_asks_once_more_than_it_may_is_told_and_says_what_it_has(
    task: Callable[..., AgentTask],
) -> None:
    episode = task(endless).episode(0)
    more = (user_said("more"),)
    assert episode.reply("a") == NextTurn(messages=more, after=0)
    assert episode.reply("b") == NextTurn(messages=more, after=1)
    facts = episode.facts()
    assert (facts["score"], facts["turns"]) == (0.25, 2)
    assert [code for code, _ in Told.refused] == [410]


def test_an_agent_whose_episode_is_given_up_ends(
    task: Callable[..., AgentTask],
) -> None:
    made = task(endless)
    episode = made.episode(0)
    episode.reply("a")
    del episode
    gc.collect()
    assert Told.ended.acquire(timeout=PATIENCE_S)
    assert [code for code, _ in Told.refused] == [410]


def test_what_is_not_offered_is_refused_with_a_reason_and_the_episode_goes_on(
    task: Callable[..., AgentTask],
) -> None:
    episode = task(bad_client).episode(0)
    assert episode.prompt == (Message("user", "go"),)
    codes, reasons = zip(*Told.refused, strict=True)
    assert codes == (*[400] * len(WRONG), 401)
    for (_, expected), reason in zip(WRONG, reasons, strict=False):
        assert expected in reason


def test_what_cannot_be_read_is_refused_and_its_connection_ends(
    task: Callable[..., AgentTask],
) -> None:
    assert task(rude).episode(0).prompt == (Message("user", "go"),)
    assert [code for code, _ in Told.refused] == [413, 411, 411, 401, 400]
    assert [told for _, told in Told.refused[:4]] == ["close"] * 4


def test_a_connection_on_which_nothing_comes_is_closed(
    task: Callable[..., AgentTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_LIMITS", Limits(silent_s=0.1))
    made = task(endless)
    episode = made.episode(0)
    place = made.endpoint.url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection(
        (place[0], int(place[1])), timeout=PATIENCE_S
    ) as silent:
        assert silent.recv(1) == b""
    assert episode.reply("a") is not None  # an answer may take longer than that


def test_an_agent_that_ends_by_exit_says_so(task: Callable[..., AgentTask]) -> None:
    episode = task(leaves).episode(0)
    with pytest.raises(RuntimeError, match="the agent ended with SystemExit: 3"):
        episode.reply("because")


def test_a_client_that_has_gone_is_told_of_nowhere(
    task: Callable[..., AgentTask], capfd: pytest.CaptureFixture[str]
) -> None:
    before = {*threading.enumerate()}
    episode = task(impatient).episode(0)
    Told.met.clear()
    Told.ended.release()
    assert Told.met.wait(PATIENCE_S)
    assert episode.reply("x" * 10_000_000) is None
    for thread in {*threading.enumerate()} - before:
        if "process_request" in thread.name:
            thread.join(PATIENCE_S)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("agent", "what"),
    [
        (silent, "ended without a request"),
        (waits, "made no request in time"),
        (fickle, "another for the same episode"),
    ],
)
def test_an_agent_that_does_not_begin_a_conversation_is_refused(
    task: Callable[..., AgentTask], agent: Any, what: str
) -> None:
    # An agent whose request comes too late has that of an earlier one
    made = task(agent, first_request_s=0.2 if agent is waits else PATIENCE_S)
    begun = [made.episode(0)] if agent is fickle else []
    with pytest.raises(ConfigError, match=what) as caught:
        made.episode(0)
    assert len(begun) == (agent is fickle)
    assert caught.value.codes == ("agent-refused",)
    Told.ended.release()


def test_agents_of_a_prompt_begin_together(task: Callable[..., AgentTask]) -> None:
    assert {episode.prompt for episode in task(meets).episodes(5, 3)} == {
        (Message("user", "5"),)
    }


def test_one_that_does_not_begin_fails_with_its_first_reply(
    task: Callable[..., AgentTask],
) -> None:
    made = task(every_second)
    episodes = made.episodes(0, 2)
    assert {episode.prompt for episode in episodes} == {(Message("user", "0"),)}
    failed = [episode for episode in episodes if fails(episode)]
    assert len(failed) == 1
    with pytest.raises(NoPrompt, match="ended without a request"):
        failed[0].reply("again")


def at_once(url: str, key: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Asks three times at once; the answers are told in the order of the letters."""
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(call, url, key, [user("go")]) for _ in range(3)]
    return {"score": 1.0, "said": sorted(each.result() for each in asked)}


def test_requests_at_the_same_time_are_turns_at_the_same_time(
    task: Callable[..., AgentTask],
) -> None:
    episode = task(at_once).episode(0)
    deadline_s = time.monotonic() + PATIENCE_S
    while episode._line.asked.qsize() < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    turn = NextTurn(messages=(user_said("go"),))
    assert episode.replies([("a", None)]) == [turn, turn]
    assert episode.replies([("b", None), ("c", None)]) is None
    assert episode.facts()["said"] == ["a", "b", "c"]


def test_a_request_may_come_while_others_have_no_answer(
    task: Callable[..., AgentTask],
) -> None:
    episode = task(at_once).episode(0)
    deadline_s = time.monotonic() + PATIENCE_S
    while episode._line.asked.qsize() < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert len(episode.replies([("a", None)]) or ()) == 2
    # One of the two was left for later
    assert episode.replies([("b", None)]) == []
    assert episode.replies([("c", None)]) is None


def test_agents_that_are_over_have_one_deadline(
    task: Callable[..., AgentTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_END_S", 0.3)
    first, second = task(hangs).episodes(0, 2)
    first.end()
    second.end()
    assert first.facts()["score"] == 0.0
    waited: list[float] = []
    join = second._thread.join
    monkeypatch.setattr(
        second._thread, "join", lambda timeout: (waited.append(timeout), join(timeout))
    )
    assert second.facts()["score"] == 0.0
    assert waited[0] < 0.1, "the deadline of the first was its own, too"
    Told.ended.release(2)


def test_a_prompt_whose_agents_do_not_begin_gives_way_to_another(
    tmp_path: Path,
) -> None:
    folder = tiny_tokenizer(tmp_path / "model")
    env = {"task": "agent", "kwargs": {"agent": f"{__name__}:not_the_second"}}
    job = {"env": env, "algorithm": {"max_prompt_length": 90, "max_new_tokens": 200}}
    with (
        pytest.raises(ConfigError, match="ended without a request"),
        TextStage(folder, says_no, **job) as stage,
    ):
        stage.run()
    job["faults"] = {"on_error": "skip", "error_budget": 10}
    with TextStage(folder, says_no, **job) as stage:
        stage.run()
        assert len(stage.groups()) == 3
        assert not any(sample.poisoned for group in stage.groups() for sample in group)


def test_what_an_agent_raises_is_raised_by_the_reply(
    task: Callable[..., AgentTask], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "why?", "answer": "1"}\n{"question": "how?", "answer": "2"}\n'
    )
    made = task(broken, path=str(tmp_path / "rows.jsonl"))
    asked = [made.episode(number).prompt[0].content for number in range(8)]
    assert all({*asked[at : at + 2]} == {"why?", "how?"} for at in range(0, 8, 2))
    with pytest.raises(OSError, match="no such tool"):
        made.episode(0).reply("because")


def test_a_stage_learns_what_the_policy_said_to_agents(tmp_path: Path) -> None:
    """Tokens are those that were sampled; rewards are the agents' scores."""
    folder = tiny_tokenizer(tmp_path / "model")
    env = {"task": "agent", "kwargs": {"agent": f"{__name__}:adder"}, "max_turns": 3}
    job = {"env": env, "algorithm": {"max_prompt_length": 90, "max_new_tokens": 200}}
    with TextStage(
        folder,
        lambda request, sample: f"{request.group if sample else 'no'}<eos>",
        **job,
    ) as stage:
        stage.run()
        groups = stage.groups()
    assert len(groups) == 3
    for group in groups:
        for sample in group:
            assert sample.turns == 2
            assert sample.reward == (1.0 if sample.sample else 0.0)


def test_an_agent_is_told_that_its_answer_was_cut(tmp_path: Path) -> None:
    folder = tiny_tokenizer(tmp_path / "model")
    env = {"task": "agent", "kwargs": {"agent": f"{__name__}:seeing_the_end"}}
    job = {"env": env, "algorithm": {"max_prompt_length": 90, "max_new_tokens": 2}}
    with TextStage(
        folder, lambda request, sample: "yes" if sample else "n<eos>", **job
    ) as stage:
        stage.run()
        samples = [sample for group in stage.groups() for sample in group]
    assert {sample.truncated for sample in samples} == {True, False}
    assert all(sample.reward == float(not sample.truncated) for sample in samples)
