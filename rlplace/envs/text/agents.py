"""A task in which a program leads the conversations. It calls an OpenAI-compatible endpoint for answers of the policy.

::

    agent (a function of the user's)              env rank                                rollout
    POST /v1/chat/completions ──────────────▶ prompt, or the reply to the answer before ─▶ request
                              ◀────────────── answer ◀────────────────────────────────── completion
    returns ────────────────────────────────▶ score and other facts

Each episode has a thread for its agent, and a key by which the endpoint finds the episode. The policy learns from the
tokens that it has sampled itself. From the agent's requests only the next message of the user is taken.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Protocol, cast

from rlplace.codes import config_error, problem
from rlplace.envs.registry import named
from rlplace.envs.text.contract import Message, NoPrompt, Split
from rlplace.envs.text.rows import Epochs, each, mixed
from rlplace.envs.text.stored_rows import Row
from rlplace.http_server import JsonServer, Limits, Refused
from rlplace.json_text import parsed
from rlplace.units import clipped

# Reachable from this machine only; requests without an episode's key are rejected as well
_HOST = "127.0.0.1"
_PATH = "/v1/chat/completions"
# Limits for agents: each has one or several connections, and may compute for a while between two requests
_LIMITS = Limits(connections=4096, silent_s=120.0)
# Seconds that an agent may take to return after its last answer
_END_S = 10.0
# First requests kept for comparing the samples of a prompt
_KEPT = 64
# Key of the errors about an agent
_KEY = "env.kwargs.agent"
# Options that a request must not use
_NOT_HERE = (
    "stream",
    "tools",
    "functions",
    "response_format",
    "logprobs",
)


class Agent(Protocol):
    """A function of the user that leads the conversation of one episode.

    `base_url`, `api_key`: arguments for any client of the OpenAI API. `row`: a row of the data set, with the episode's
    `number`, the `split` and the run's `seed`. The function returns the score of the episode, or a mapping of values by
    name ("facts") for reward functions. It is called in many threads at once. Its first request must depend on `row`
    alone.
    """

    def __call__(
        self, base_url: str, api_key: str, row: Mapping[str, Any], /
    ) -> float | Mapping[str, Any] | None: ...


class AgentTask:
    """A task with episodes that are led by the user's function `agent`, written as `package.module:function`.

    With `path`, each row of a data set is an episode. Wherever a prompt is needed, also in the check of a config, the
    agent is started, and its first request is the prompt.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    # Endless even with rows: asking each row for its prompt would start all agents at once
    size: int | None = None

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        agent: str,
        path: str | Sequence[str] | Mapping[str, float] | None = None,
        first_request_s: float = 60.0,
    ) -> None:
        self._agent: Agent = named(
            agent, {}, key="env.kwargs.agent", code="unknown-task", noun="agent"
        )
        self._rows: Sequence[Row] = []
        self._epochs = Epochs([], seed)
        if path is not None:
            self._rows, shares = mixed(path, None, None)
            self._epochs = Epochs(shares, seed)
            # Find bad rows now, before anything starts
            each(range(len(self._rows)), self._rows.__getitem__)
        self._seed = seed
        self._split = split
        self._first_request_s = first_request_s
        # First requests by episode number, the oldest first
        self._first: dict[int, Sequence[Message]] = {}
        self._endpoint = _Endpoint()

    def episode(self, number: int) -> AgentEpisode:
        """Start one agent for the prompt with this number, and return its episode. Raises as `episodes` does."""
        return self.episodes(number, 1)[0]

    def episodes(self, number: int, samples: int) -> list[AgentEpisode]:
        """Start an agent for each of `samples` samples of the prompt with this number, and return their episodes.

        All samples get the same prompt: the first request of any of the agents. An agent that makes no request fails at
        its first reply. Raises NoPrompt if no agent makes a request, and ConfigError if two agents make different first
        requests.
        """
        row = {
            **self._row(number),
            "number": number,
            "split": self._split,
            "seed": self._seed,
        }
        # All agents start before the first wait
        begun = [AgentEpisode(self._agent, row, self._endpoint) for _ in range(samples)]
        deadline_s = time.monotonic() + self._first_request_s
        failed = [episode.begin(deadline_s) for episode in begun]
        prompts = [
            episode.prompt
            for episode, error in zip(begun, failed, strict=True)
            if error is None
        ]
        # The prompt is the first request of any sample, or of an earlier time
        if number not in self._first and not prompts:
            assert failed[0] is not None, "an agent without an error has a prompt"
            raise failed[0]
        if prompts:
            self._first.setdefault(number, prompts[0])
        first = self._first[number]
        if others := [prompt for prompt in prompts if prompt != first]:
            got = clipped(repr(others[0]), 200)
            raise config_error("agent-refused", _KEY, got, error="another-request")
        for episode in begun:
            episode.prompt = first
        # Forget the oldest
        while len(self._first) > _KEPT:
            del self._first[next(iter(self._first))]
        return begun

    def _row(self, number: int) -> Mapping[str, Any]:
        """Return the row of the data set for the episode `number`; {} without a data set.

        Each epoch has all rows as often as the weights of their data sets say, in a random order of its own.
        """
        if not self._rows:
            return {}
        return self._rows[self._epochs.row(number)][0]


class AgentEpisode:
    """An episode with its running agent. When this object is garbage-collected, the agent gets no more answers."""

    prompt: Sequence[Message] = ()

    def __init__(
        self, agent: Agent, row: Mapping[str, Any], endpoint: _Endpoint
    ) -> None:
        # The thread and the endpoint hold `_line`, not this object, so that it can be collected
        self._line = _Line()
        self._row = row
        key = endpoint.open(self._line)
        weakref.finalize(self, endpoint.shut, key).atexit = False
        work = (agent, endpoint.url, key, dict(row))
        self._thread = threading.Thread(
            target=self._line.run, args=work, name="agent", daemon=True
        )
        self._thread.start()
        # Why there was no first request
        self._failed: NoPrompt | None = None
        # Deadline (monotonic clock) for the agent to return after its last answer
        self._until_s: float | None = None

    def begin(self, deadline_s: float) -> NoPrompt | None:
        """Wait for the agent's first request, and keep it as the prompt. Return None, or the error if no request comes.

        `deadline_s`: when to give up, in seconds of the monotonic clock.
        """
        number = f"{self._row['number']}"
        try:
            asked = self._line.asked.get(
                timeout=max(0.0, deadline_s - time.monotonic())
            )
        except queue.Empty:
            self._failed = NoPrompt(
                [problem("agent-refused", _KEY, number, error="late")]
            )
            return self._failed
        # The agent returned or raised instead
        if not isinstance(asked, list):
            got = "it returned"
            if asked.error is not None:
                got = f"{type(asked.error).__name__}: {asked.error}"
            self._failed = NoPrompt(
                [problem("agent-refused", _KEY, got, error="ended")]
            )
            self._failed.__cause__ = asked.error
            return self._failed
        self.prompt = tuple(asked)
        self._said = asked
        return None

    def reply(self, answer: str) -> str | None:
        """Give the policy's answer to the agent, and return the new message in its next request.

        Return None if the agent has returned. Raises the agent's exception if the agent has raised one. Raises
        ValueError if the request is not the conversation so far with one new message of the user.
        """
        if self._failed is not None:
            raise self._failed
        self._line.answers.put(answer)
        asked = self._line.asked.get()
        if not isinstance(asked, list):
            if asked.error is not None:
                raise asked.error
            return None
        # The request must repeat the conversation and add one message of the user
        said = self._said
        expected = [*said, Message("assistant", answer)]
        before = asked[: len(expected)]
        added = asked[len(expected) :]
        same = before[:-1] == said and before[-1:] and before[-1].role == "assistant"
        if (
            not same
            or before[-1].text.strip() != answer.strip()
            or [m.role for m in added] != ["user"]
        ):
            raise ValueError(
                "an agent's next request has the messages of the one before, the answer to it and one message of the "
                f"user more, since an episode is one conversation; its roles are {[m.role for m in asked]}"
            )
        self._said = asked
        return added[0].text

    def cut(self) -> None:
        """Note that the next answer was cut at a length limit: the agent gets it with finish_reason "length"."""
        self._line.cut = True

    def end(self) -> None:
        """Tell the agent that the episode is over.

        The caller does so for all episodes before it calls `facts` of any of them, so that the agents end at the same
        time.
        """
        if self._until_s is None:
            self._line.close()
            self._until_s = time.monotonic() + _END_S

    def facts(self) -> Mapping[str, Any]:
        """Return name -> value, for reward functions: the row, and the score or the values that the agent returned.

        If the agent still waits for an answer, it gets none, and the score is 0.
        """
        self.end()
        assert self._until_s is not None, "`end` has set it"
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        result = self._line.result
        if result is None:
            found: Mapping[str, Any] = {"score": 0.0}
        elif isinstance(result, Mapping):
            found = result
        else:
            found = {"score": float(result)}
        return {**self._row, **found}


# ── between an agent and its episode ──────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """A message that an agent has ended. `error`: the exception that it raised; None if it returned."""

    error: Exception | None = None


class _Line:
    """The queues between an agent's thread, the endpoint and the episode.

    It has no reference to the episode, so that the episode can be garbage-collected.
    """

    def __init__(self) -> None:
        # Requests of the agent, then its end
        self.asked: queue.SimpleQueue[list[Message] | _End] = queue.SimpleQueue()
        # Answers to the agent; None: there are no more
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.result: float | Mapping[str, Any] | None = None
        # Whether the next answer was cut at a length limit; then it is the last one
        self.cut = False
        self.closed = False
        # Held by the request that waits for an answer
        self._asking = threading.Lock()

    def run(self, agent: Agent, url: str, key: str, row: Mapping[str, Any]) -> None:
        """Call the agent and store its result; then put an `_End` into `asked`. This is run in the agent's thread.

        `url`, `key`: base URL and API key of the endpoint.
        """
        try:
            self.result = agent(url, key, row)
            self.asked.put(_End())
        except Exception as error:  # noqa: BLE001  # the waiting `reply` raises it again
            self.asked.put(_End(error))
        except BaseException as error:  # noqa: BLE001  # sys.exit, or a task that asyncio has cancelled
            ended = RuntimeError(
                f"the agent ended with {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
            self.asked.put(_End(ended))

    def ask(self, messages: list[Message]) -> str | None:
        """Pass a request of the agent to the episode, and return the answer; None if there are no more answers.

        Raises ValueError if another request of the agent is already waiting.
        """
        if not self._asking.acquire(blocking=False):
            raise ValueError(
                "the request before has no answer yet: an episode is one conversation"
            )
        try:
            if self.closed:
                return None
            self.asked.put(messages)
            return self.answers.get()
        finally:
            self._asking.release()

    def close(self) -> None:
        """Give no more answers: to a request that waits now, and to all later requests."""
        self.closed = True
        self.answers.put(None)


class _Server(JsonServer):
    """The HTTP server that answers the agents. The key of a request names the episode and so its queues."""

    def get(self, path: str) -> object:
        """Return the list of models. Raises Refused for other requests."""
        if path != "/v1/models":
            raise Refused(HTTPStatus.NOT_FOUND, f"there is {_PATH}")
        model = {"id": "policy", "object": "model", "owned_by": "rlplace"}
        return {"object": "list", "data": [model]}

    def post(self, path: str, owner: _Line, body: bytes) -> object:
        """Wait for the policy's answer to a chat request of an agent, and return it. Raises Refused."""
        if path != _PATH:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is {_PATH}")
        try:
            answer = owner.ask(_messages(body))
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
        if answer is None:
            why = "the episode is over: as many turns, or tokens, as it may have"
            raise Refused(HTTPStatus.GONE, why)
        # An answer in the form of the OpenAI API
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer},
            "finish_reason": "length" if owner.cut else "stop",
            "logprobs": None,
        }
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "model": "policy",
            "created": int(time.time()),
            "choices": [choice],
            "usage": None,
        }

    def refusal(self, status: int, why: str) -> object:
        """Return the content of an error, in the form of the OpenAI API."""
        if status == HTTPStatus.UNAUTHORIZED:
            why = "the key is of no episode, or of one that is over"
        error = {"message": why, "type": "invalid_request_error", "code": int(status)}
        return {"error": error}


class _Endpoint:
    """The endpoint that answers the agents of all episodes of a task: an HTTP server on this machine."""

    def __init__(self) -> None:
        # Open episodes by key
        self._lines: dict[str, _Line] = {}
        self._server: _Server | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The base URL of the endpoint, for clients of the OpenAI API."""
        assert self._server is not None, "an episode is open"
        return f"http://{_HOST}:{self._server.server_port}/v1"

    def open(self, line: _Line) -> str:
        """Return the key of a new episode. Start the server before the first episode.

        `line`: the queues of the episode.
        """
        with self._lock:
            if self._server is None:
                self._server = _Server((_HOST, 0), owners=self._lines, limits=_LIMITS)
                # Its threads end with the process
                weakref.finalize(self, _end, self._server).atexit = False
                serving = threading.Thread(
                    target=_serve, args=(self._server,), name="agents", daemon=True
                )
                serving.start()
            key = secrets.token_urlsafe(24)
            self._lines[key] = line
        return key

    def shut(self, key: str) -> None:
        """End the episode with this key: its agent gets no more answers."""
        self._lines.pop(key).close()


def _serve(server: _Server) -> None:
    """Serve requests until `server.shutdown` is called."""
    with server:
        server.serve_forever()


def _end(server: _Server) -> None:
    """Shut the server down, in a separate thread, because `shutdown` blocks until the serving thread has stopped."""
    threading.Thread(target=server.shutdown, name="ends agents", daemon=True).start()


def _messages(body: bytes) -> list[Message]:
    """Return the messages in the body of a chat request. Raises ValueError if the request is wrong or not supported."""
    try:
        asked = parsed(body)
    except ValueError as error:
        raise ValueError(f"the request is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ValueError("a request is an object with a list of messages")
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("a request is an object with a list of messages")
    # Options that the run's config decides, or that are not supported
    odd = [name for name in _NOT_HERE if asked.get(name)]
    if asked.get("n") not in (None, 1):
        odd.append("n")
    if odd:
        raise ValueError(
            f"not offered here: {', '.join(odd)}; how answers are drawn is decided by the run's config"
        )
    return [_message(message) for message in asked["messages"]]


def _message(message: Any) -> Message:
    """Return one message of a chat request. Raises ValueError if it is not a text with a known role."""
    role = None
    content = None
    if isinstance(message, dict):
        role = message.get("role")
        content = message.get("content")
    # A list of text parts is one text
    if isinstance(content, list):
        plain = [isinstance(p, dict) and p.get("type") == "text" for p in content]
        if all(plain):
            content = "".join(str(part.get("text", "")) for part in content)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise ValueError(
            "a message has a role (system, user, assistant) and a text as its content"
        )
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a message has half of a character, at {error.start} of its content"
        ) from None
    return Message(cast("Any", role), content)
