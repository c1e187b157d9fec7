"""A task in which a program leads the conversations. It calls an OpenAI-compatible endpoint for answers of the policy.

::

    agent (a function of the user's)              env rank                                rollout
    POST /v1/chat/completions ──────────────▶ prompt, or the reply to the answer before ─▶ request
                              ◀────────────── answer ◀────────────────────────────────── completion
    returns ────────────────────────────────▶ score and other facts

Each episode has a thread for its agent, and a key by which the endpoint finds the episode. The policy learns from the
tokens that it has sampled itself: a request that repeats an answer is recognised by its messages, and the sampled
tokens are in its place. Of the request, only the messages behind the answer become tokens. A request that continues no
answer begins a conversation of its own.
"""

from __future__ import annotations

import dataclasses
import hmac
import queue
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from email.message import Message as EmailMessage
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, Protocol

from rlplace.codes import config_error, problem
from rlplace.envs.registry import named
from rlplace.envs.text.call_format import CallFormat
from rlplace.envs.text.chat_api import (
    Asked,
    Choice,
    Finish,
    Token,
    answer_of,
    call_id,
    chat_request,
    completion_request,
    events_of,
)
from rlplace.envs.text.contract import (
    Message,
    MessagesWithTools,
    NextTurn,
    NoPrompt,
    Prompt,
    RawText,
    Sampled,
    Split,
    ToolCall,
    prompt_identity,
)
from rlplace.envs.text.responses_api import response_of, response_request
from rlplace.envs.text.rows import RowsOfEpochs
from rlplace.envs.text.tool_calls import FORMATS, Parser, read_calls
from rlplace.http_server import Events, JsonServer, Limits, Refused
from rlplace.json_text import parsed
from rlplace.units import clipped

# Reachable from this machine only; requests without an episode's key are rejected as well
_HOST = "127.0.0.1"
# Path -> the function that reads its requests, and the one that writes its answers
_REQUESTS = {
    "/v1/chat/completions": (chat_request, answer_of),
    "/v1/completions": (completion_request, answer_of),
    "/v1/responses": (response_request, response_of),
}
# Limits for agents: each has one or several connections, and may compute for a while between two requests
_LIMITS = Limits(connections=4096, silent_s=120.0)
# Seconds that an agent may take to return after its last answer
_END_S = 10.0
# Key of programs that tell the episode of a request by the header X-Session-ID: they have one client for all episodes
SHARED_KEY = secrets.token_urlsafe(24)
# Seconds in which further requests of an agent count as asked at the same time
_TOGETHER_S = 0.005
# First requests kept for comparing the samples of a prompt
_KEPT = 64
# Key of the errors about an agent
_KEY = "env.kwargs.agent"
# End of an episode -> why a further request gets no answer
_OVER = {
    "": "the episode is over: as many turns, or tokens, as it may have",
    "max_turns": "the episode is over: it has as many answers as env.max_turns allows",
    "sequence_length": (
        "the episode is over: its conversations would have more tokens than algorithm.sequence_length allows"
    ),
}


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


class LedEpisodes:
    """Episodes that are led by an agent each: the part that all tasks of this kind have.

    `agent`: leads an episode. `tool_format`: how the model writes calls of tools: a key of FORMATS, or a function of
    the user's, (answer, tools) -> Parsed; None: the chat template tells it. `first_request_s`: seconds that an agent
    may take to its first request. Wherever a prompt is needed, also in the check of a config, the agent is started,
    and its first request is the prompt.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    # Endless even with rows: asking each row for its prompt would start all agents at once
    size: int | None = None

    def __init__(
        self,
        agent: Agent,
        *,
        seed: int,
        split: Split,
        first_request_s: float,
        tool_format: str | None,
    ) -> None:
        self._calls = CallFormat(tool_format)
        self._agent = agent
        self._seed = seed
        self._split = split
        self._first_request_s = first_request_s
        # First requests by episode number, the oldest first
        self._first: dict[int, Prompt] = {}
        self.endpoint = Endpoint()

    def row(self, number: int) -> Mapping[str, Any]:
        """Return what the agent of the episode `number` gets of a data set. Subclasses implement it."""
        raise NotImplementedError

    def read_example_call(self, written: str) -> None:
        """Find out how the model writes calls of tools, by the text that its chat template makes of EXAMPLE_CALL."""
        self._calls.read_example(written)

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
            **self.row(number),
            "number": number,
            "split": self._split,
            "seed": self._seed,
        }
        # All agents start before the first wait
        begun = [
            AgentEpisode(self._agent, row, self.endpoint, self._calls.parser)
            for _ in range(samples)
        ]
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
        identity = prompt_identity(first)
        others = [prompt for prompt in prompts if prompt_identity(prompt) != identity]
        if others:
            got = clipped(repr(others[0]), 200)
            raise config_error("agent-refused", _KEY, got, error="another-request")
        for episode in begun:
            episode.prompt = first
        # Forget the oldest
        while len(self._first) > _KEPT:
            del self._first[next(iter(self._first))]
        return begun


class AgentTask(LedEpisodes):
    """A task with episodes that are led by the user's function `agent`, written as `package.module:function`.

    With `path`, each row of a data set is an episode.
    """

    def __init__(
        self,
        *,
        seed: int,
        split: Split,
        agent: str,
        path: str | Sequence[str] | Mapping[str, float] | None = None,
        first_request_s: float = 60.0,
        tool_format: str | None = None,
    ) -> None:
        found: Agent = named(
            agent, {}, key="env.kwargs.agent", code="unknown-task", noun="agent"
        )
        super().__init__(
            found,
            seed=seed,
            split=split,
            first_request_s=first_request_s,
            tool_format=tool_format,
        )
        self._rows = RowsOfEpochs(path, seed)

    def row(self, number: int) -> Mapping[str, Any]:
        """Return the row of the data set for the episode `number`; {} without a data set.

        Each epoch has all rows as often as the weights of their data sets say, in a random order of its own.
        """
        return self._rows.row(number)


class _Said(NamedTuple):
    """A conversation up to an answer of the policy.

    `asked`: the request that was answered. `answer`: the message that the agent got.
    """

    asked: Asked
    answer: Message


class AgentEpisode:
    """An episode with its running agent. When this object is garbage-collected, the agent gets no more answers.

    `unread_calls`: answers so far with a call of a tool that could not be read, which the agent got as text.
    `unheeded`: options of requests so far that have no effect, name -> its values.
    """

    prompt: Prompt = ()

    def __init__(
        self,
        agent: Agent,
        row: Mapping[str, Any],
        endpoint: Endpoint,
        parser: Parser | None,
    ) -> None:
        # The thread and the endpoint hold `_line`, not this object, so that it can be collected
        self._line = _Line(may_call=parser is not None)
        self._row = row
        self._parser = parser
        # Answers with a call of a tool that could not be read
        self.unread_calls = 0
        self.unheeded: dict[str, list[Any]] = {}
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
        # For each answer that is due, in the order in which the policy is asked: the request that gets it
        self._due: deque[_Waiting] = deque()
        # Turns that are asked but not returned yet: of the first request, and of callers with one answer at a time
        self._left: deque[NextTurn] = deque()
        # How the agent has ended
        self._end: _End | None = None
        # All conversations up to each answer, in the order of the answers
        self._said: list[_Said] = []
        # The next answer, as it was sampled
        self._next: Sampled | None = None

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
        if isinstance(asked, _End):
            got = "it returned"
            if asked.error is not None:
                got = f"{type(asked.error).__name__}: {asked.error}"
            if self._line.refused:
                got = (
                    f"{got}; the endpoint has refused its request: {self._line.refused}"
                )
            self._failed = NoPrompt(
                [problem("agent-refused", _KEY, got, error="ended")]
            )
            self._failed.__cause__ = asked.error
            return self._failed
        self._due += [asked] * asked.asked.choices
        self.prompt = _prompt(asked.asked)
        # The first answer is asked as the prompt
        self._left += [NextTurn(messages=self.prompt)] * (asked.asked.choices - 1)
        return None

    def sampled(self, answer: Sampled) -> None:
        """Keep the tokens of the answer that `reply` gets next. Without this call, the answer has its text alone."""
        self._next = answer

    def reply(self, answer: str) -> NextTurn | None:
        """Give the policy's answer to the agent, and return the next turn; None if the agent has returned.

        This is `replies` for callers with one answer at a time.
        """
        sampled = self._next
        self._next = None
        turns = self.replies([(answer, sampled)])
        if turns is None:
            return None
        self._left += turns
        return self._left.popleft()

    def replies(
        self, answers: Sequence[tuple[str, Sampled | None]]
    ) -> Sequence[NextTurn] | None:
        """Give answers of the policy to the agent, in the order of their turns, and return further turns.

        A request for several answers is several turns. While answers are due, return the turns that are asked already,
        perhaps none; else wait for the agent, and return all that it asks at the same time. Return None if the agent
        has returned. Raises the agent's exception if the agent has raised one.
        """
        if self._failed is not None:
            raise self._failed
        for answer, sampled in answers:
            waiting = self._due.popleft()
            for name, value in waiting.asked.unheeded.items():
                values = self.unheeded.setdefault(name, [])
                if value not in values:
                    values.append(value)
            choice = self._choice(waiting.asked, answer, sampled)
            self._said.append(_Said(waiting.asked, choice.message))
            waiting.choices.append(choice)
            if len(waiting.choices) == waiting.asked.choices:
                self._line.answer(waiting)
        asked: list[_Waiting] = []
        if not self._due and self._end is None:
            self._take(asked, None)
        # Requests at the same time arrive one after the other
        while self._end is None and self._take(asked, _TOGETHER_S if asked else 0.0):
            pass
        # An agent that has ended may have left requests behind
        if self._end is not None:
            if self._end.error is not None:
                raise self._end.error
            return None
        turns = [*self._left]
        self._left.clear()
        for waiting in asked:
            self._due += [waiting] * waiting.asked.choices
            turns += [self._turn(waiting.asked)] * waiting.asked.choices
        return turns

    def _take(self, asked: list[_Waiting], wait_s: float | None) -> bool:
        """Append the agent's next request to `asked`, or keep its end. Return whether there was one of them.

        `wait_s`: seconds to wait; None: without an end.
        """
        try:
            found = self._line.asked.get(block=wait_s != 0.0, timeout=wait_s)
        except queue.Empty:
            return False
        if isinstance(found, _End):
            self._end = found
        else:
            asked.append(found)
        return True

    def _turn(self, asked: Asked) -> NextTurn:
        """Return what a request asks of the policy: behind the answer with the longest equal conversation."""
        turn = NextTurn(messages=_prompt(asked))
        longest = 0
        for number, said in enumerate(self._said):
            more = _behind(said, asked)
            if more is not None and len(said.asked.prompt) >= longest:
                turn = NextTurn(messages=more, after=number)
                longest = len(said.asked.prompt)
        return turn

    def _choice(self, asked: Asked, answer: str, sampled: Sampled | None) -> Choice:
        """Return an answer of the policy as the agent gets it. `answer`: its text without special tokens."""
        content = answer
        calls: Sequence[ToolCall] = ()
        if asked.tools and self._parser is not None:
            # Some families write calls with special tokens
            text = answer if sampled is None else sampled.text
            found = read_calls(self._parser, text, asked.tools)
            # A call that is cut has the reason `length`
            if not (sampled is not None and sampled.is_cut):
                self.unread_calls += found.is_unread
            if found.calls:
                content = found.content
                calls = found.calls
            if asked.one_call:
                calls = calls[:1]
        with_ids = [dataclasses.replace(call, id=call_id()) for call in calls]
        message = Message("assistant", content, tuple(with_ids))
        finish: Finish = "tool_calls" if calls else "stop"
        if sampled is None:
            return Choice(message=message, finish=finish, prompt_tokens=0, tokens=0)
        if sampled.is_cut:
            finish = "length"
        choice = Choice(
            message=message,
            finish=finish,
            prompt_tokens=len(sampled.prompt),
            tokens=len(sampled.tokens),
        )
        if asked.logprobs:
            tokens = [
                Token(text=sampled.decode([token]), logprob=logprob)
                for token, logprob in zip(sampled.tokens, sampled.logprobs, strict=True)
            ]
            choice = dataclasses.replace(choice, logprobs=tokens)
        if asked.ids:
            choice = dataclasses.replace(
                choice,
                prompt_ids=sampled.prompt,
                ids=sampled.tokens,
            )
        return choice

    def end(self, why: str = "") -> None:
        """Tell the agent that the episode is over.

        The caller does so for all episodes before it calls `facts` of any of them, so that the agents end at the same
        time. `why`: one of ENDS, for the error that a further request gets.
        """
        if self._until_s is None:
            self._line.close(why)
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


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Waiting:
    """A request of the agent that waits for its answers.

    `choices`: the answers so far. `answers`: takes all of them; None: there are no more answers.
    """

    asked: Asked
    choices: list[Choice] = dataclasses.field(default_factory=list)
    answers: queue.SimpleQueue[Sequence[Choice] | None] = dataclasses.field(
        default_factory=queue.SimpleQueue
    )


class _Line:
    """The queues between an agent's thread, the endpoint and the episode.

    It has no reference to the episode, so that the episode can be garbage-collected.
    """

    def __init__(self, *, may_call: bool) -> None:
        # Requests of the agent, then its end
        self.asked: queue.SimpleQueue[_Waiting | _End] = queue.SimpleQueue()
        self.result: float | Mapping[str, Any] | None = None
        # Whether calls of tools can be read from answers
        self.may_call = may_call
        self.closed = False
        # Why the latest wrong request was refused; "" without one
        self.refused = ""
        # Why there are no more answers
        self.why = _OVER[""]
        # Requests without an answer, and whether there are no more answers
        self._waiting: set[_Waiting] = set()
        self._lock = threading.Lock()

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

    def ask(self, asked: Asked) -> Sequence[Choice] | None:
        """Pass a request of the agent to the episode, and return the answers; None if there are no more answers."""
        waiting = _Waiting(asked)
        with self._lock:
            if self.closed:
                return None
            self._waiting.add(waiting)
        self.asked.put(waiting)
        return waiting.answers.get()

    def answer(self, waiting: _Waiting) -> None:
        """Give a request its answers."""
        with self._lock:
            self._waiting.discard(waiting)
        waiting.answers.put(waiting.choices)

    def close(self, why: str = "") -> None:
        """Give no more answers: to requests that wait now, and to all later requests. `why`: a key of _OVER."""
        self.why = _OVER.get(why, self.why)
        with self._lock:
            self.closed = True
            left = self._waiting
            self._waiting = set()
        for waiting in left:
            waiting.answers.put(None)


class _Server(JsonServer):
    """The HTTP server that answers the agents. The key of a request names the episode and so its queues."""

    def authorization(self, headers: EmailMessage) -> str:
        """Return the key of a request. With the shared key, the session of the request is a part of it."""
        given = super().authorization(headers)
        session = headers.get("X-Session-ID")
        if session and hmac.compare_digest(
            given.encode("latin1", "replace"), f"Bearer {SHARED_KEY}".encode()
        ):
            return f"{given}.{session}"
        return given

    def get(self, path: str) -> object:
        """Return the list of models. Raises Refused for other requests."""
        if path != "/v1/models":
            raise Refused(HTTPStatus.NOT_FOUND, f"there is {', '.join(_REQUESTS)}")
        model = {"id": "policy", "object": "model", "owned_by": "rlplace"}
        return {"object": "list", "data": [model]}

    def post(self, path: str, owner: _Line, body: bytes) -> object:
        """Wait for the policy's answers to a request of an agent, and return them. Raises Refused."""
        if path not in _REQUESTS:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is {', '.join(_REQUESTS)}")
        read, written = _REQUESTS[path]
        try:
            asked = read(body)
        except ValueError as error:
            owner.refused = str(error)
            raise Refused(HTTPStatus.BAD_REQUEST, owner.refused) from error
        if asked.tools and not owner.may_call:
            owner.refused = (
                "the chat template of the model shows no form of calls that is known here: name one by tool_format in "
                f"env.kwargs ({', '.join(FORMATS)}, or a function of yours)"
            )
            raise Refused(HTTPStatus.BAD_REQUEST, owner.refused)
        choices = owner.ask(asked)
        if choices is None:
            raise Refused(HTTPStatus.GONE, owner.why)
        if asked.is_stream:
            return Events(events_of(asked, choices))
        return written(asked, choices)

    def refusal(self, status: int, why: str) -> object:
        """Return the content of an error, in the form of the OpenAI API."""
        if status == HTTPStatus.UNAUTHORIZED:
            why = "the key is of no episode, or of one that is over"
        error = {"message": why, "type": "invalid_request_error", "code": int(status)}
        return {"error": error}


class Endpoint:
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

    def join(self, key: str, session: str) -> None:
        """Let requests with the shared key and this session be of the episode with this key.

        If the episode is over, they are refused.
        """
        line = self._lines.get(key)
        if line is not None:
            self._lines[f"{SHARED_KEY}.{session}"] = line

    def leave(self, sessions: Iterable[str]) -> None:
        """Refuse requests of these sessions from now on."""
        for session in sessions:
            self._lines.pop(f"{SHARED_KEY}.{session}", None)

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


def _prompt(asked: Asked) -> Prompt:
    """Return the prompt of a request, with its tools."""
    if isinstance(asked.prompt, RawText):
        return asked.prompt
    if asked.tools:
        return MessagesWithTools.of(asked.prompt, asked.tools)
    return tuple(asked.prompt)


def _behind(said: _Said, asked: Asked) -> Prompt | None:
    """Return what a request has behind an earlier conversation; None if it does not continue this conversation."""
    before = said.asked.prompt
    if isinstance(asked.prompt, RawText) or isinstance(before, RawText):
        if not isinstance(asked.prompt, RawText) or not isinstance(before, RawText):
            return None
        whole = before + said.answer.text
        if asked.prompt.startswith(whole) and len(asked.prompt) > len(whole):
            return RawText(asked.prompt[len(whole) :])
        return None
    expected = [*before, said.answer]
    more = asked.prompt[len(expected) :]
    # An answer that continues a last message of the assistant has no tokens between the two
    if not more or more[-1].role == "assistant" or asked.tools != said.asked.tools:
        return None
    if all(map(_equal, expected, asked.prompt)):
        return tuple(more)
    return None


def _equal(one: Message, other: Message) -> bool:
    """Return whether two messages say the same. Clients cut blanks, and write the arguments of calls anew."""
    if one.role != other.role or one.text.strip() != other.text.strip():
        return False
    return [*map(_call, one.calls)] == [*map(_call, other.calls)]


def _call(call: ToolCall) -> tuple[str, object]:
    """Return the name and the arguments of a call, for comparisons."""
    try:
        return call.name, parsed(call.arguments)
    except ValueError:
        return call.name, call.arguments
