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
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, Protocol

from rlplace.codes import config_error, problem
from rlplace.envs.registry import named
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
from rlplace.envs.text.rows import Epochs, each, mixed
from rlplace.envs.text.stored_rows import Row
from rlplace.envs.text.tool_calls import FORMATS, Parser, format_of, read_calls
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


def _parser(name: str) -> Parser:
    """Return the reader of calls with this name. Raises ConfigError if there is none."""
    shipped = {each: f"rlplace.envs.text.tool_calls:{each}" for each in FORMATS}
    found: Parser = named(
        name,
        shipped,
        key="env.kwargs.tool_format",
        code="unknown-task",
        noun="form of calls",
    )
    return found


class AgentTask:
    """A task with episodes that are led by the user's function `agent`, written as `package.module:function`.

    With `path`, each row of a data set is an episode. `tool_format`: how the model writes calls of tools: a key of
    FORMATS, or a function of the user's, (answer, tools) -> Parsed; None: the chat template tells it. Wherever a prompt
    is needed, also in the check of a config, the agent is started, and its first request is the prompt.
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
        tool_format: str | None = None,
    ) -> None:
        self._parser = None if tool_format is None else _parser(tool_format)
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
        self._first: dict[int, Prompt] = {}
        self._endpoint = _Endpoint()

    def read_example_call(self, written: str) -> None:
        """Find out how the model writes calls of tools, by the text that its chat template makes of EXAMPLE_CALL."""
        form = format_of(written)
        if self._parser is None and form is not None:
            self._parser = FORMATS[form]

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
        begun = [
            AgentEpisode(self._agent, row, self._endpoint, self._parser)
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

    def _row(self, number: int) -> Mapping[str, Any]:
        """Return the row of the data set for the episode `number`; {} without a data set.

        Each epoch has all rows as often as the weights of their data sets say, in a random order of its own.
        """
        if not self._rows:
            return {}
        return self._rows[self._epochs.row(number)][0]


class _Said(NamedTuple):
    """A conversation up to an answer of the policy.

    `asked`: the request that was answered. `answer`: the message that the agent got.
    """

    asked: Asked
    answer: Message


class AgentEpisode:
    """An episode with its running agent. When this object is garbage-collected, the agent gets no more answers."""

    prompt: Prompt = ()

    def __init__(
        self,
        agent: Agent,
        row: Mapping[str, Any],
        endpoint: _Endpoint,
        parser: Parser | None,
    ) -> None:
        # The thread and the endpoint hold `_line`, not this object, so that it can be collected
        self._line = _Line(may_call=parser is not None)
        self._row = row
        self._parser = parser
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
        # The request that is being answered, its answers so far, and what the policy answers next
        self._asked = Asked(prompt=())
        self._choices: list[Choice] = []
        self._turn = NextTurn(messages=())
        # All conversations up to each answer, in the order of the answers
        self._said: list[_Said] = []
        # The next answer, as it was sampled
        self._sampled: Sampled | None = None

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
        self._ask(asked)
        self.prompt = self._turn.messages
        return None

    def sampled(self, answer: Sampled) -> None:
        """Keep the tokens of the answer that `reply` gets next. Without this call, the answer has its text alone."""
        self._sampled = answer

    def reply(self, answer: str) -> NextTurn | None:
        """Give the policy's answer to the agent, and return what its next request asks.

        A request for several answers is asked again until it has them. Return None if the agent has returned. Raises
        the agent's exception if the agent has raised one.
        """
        if self._failed is not None:
            raise self._failed
        choice = self._choice(answer)
        self._said.append(_Said(self._asked, choice.message))
        self._choices.append(choice)
        if len(self._choices) < self._asked.choices:
            return self._turn
        self._line.answers.put(self._choices)
        asked = self._line.asked.get()
        if isinstance(asked, _End):
            if asked.error is not None:
                raise asked.error
            return None
        self._ask(asked)
        return self._turn

    def _ask(self, asked: Asked) -> None:
        """Begin a request: find the answer that it follows, which is the one with the longest equal conversation."""
        self._asked = asked
        self._choices = []
        self._turn = NextTurn(messages=_prompt(asked))
        longest = 0
        for number, said in enumerate(self._said):
            more = _behind(said, asked)
            if more is not None and len(said.asked.prompt) >= longest:
                self._turn = NextTurn(messages=more, after=number)
                longest = len(said.asked.prompt)

    def _choice(self, answer: str) -> Choice:
        """Return an answer of the policy as the agent gets it. `answer`: its text without special tokens."""
        asked = self._asked
        sampled = self._sampled
        self._sampled = None
        content = answer
        calls: Sequence[ToolCall] = ()
        if asked.tools and self._parser is not None:
            # Some families write calls with special tokens
            text = answer if sampled is None else sampled.text
            found = read_calls(self._parser, text, asked.tools)
            if found.calls:
                content, calls = found
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


class _Line:
    """The queues between an agent's thread, the endpoint and the episode.

    It has no reference to the episode, so that the episode can be garbage-collected.
    """

    def __init__(self, *, may_call: bool) -> None:
        # Requests of the agent, then its end
        self.asked: queue.SimpleQueue[Asked | _End] = queue.SimpleQueue()
        # Answers to the agent; None: there are no more
        self.answers: queue.SimpleQueue[Sequence[Choice] | None] = queue.SimpleQueue()
        self.result: float | Mapping[str, Any] | None = None
        # Whether calls of tools can be read from answers
        self.may_call = may_call
        self.closed = False
        # Why the latest wrong request was refused; "" without one
        self.refused = ""
        # Why there are no more answers
        self.why = _OVER[""]
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

    def ask(self, asked: Asked) -> Sequence[Choice] | None:
        """Pass a request of the agent to the episode, and return the answers; None if there are no more answers.

        A request waits until those before it have their answers.
        """
        with self._asking:
            if self.closed:
                return None
            self.asked.put(asked)
            return self.answers.get()

    def close(self, why: str = "") -> None:
        """Give no more answers: to a request that waits now, and to all later requests. `why`: a key of _OVER."""
        self.why = _OVER.get(why, self.why)
        self.closed = True
        self.answers.put(None)


class _Server(JsonServer):
    """The HTTP server that answers the agents. The key of a request names the episode and so its queues."""

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
