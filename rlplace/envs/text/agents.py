"""A task whose conversations a program leads: it calls an OpenAI-compatible endpoint before the run's engines.

::

    agent (a function of the user's)              env rank                                rollout
    POST /v1/chat/completions ──────────────▶ prompt, or the reply to the answer before ─▶ request
                              ◀────────────── answer ◀────────────────────────────────── completion
    returns ────────────────────────────────▶ score and other facts

Each episode has a thread for its agent and a key, by which the endpoint knows it. What the policy wrote is learned as
it was sampled: the agent's messages only say what comes next.
"""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import json
import queue
import random
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

from rlplace.envs.registry import named
from rlplace.envs.text.contract import Message, NoPrompt, Split
from rlplace.envs.text.rows import Row, mixed
from rlplace.errors import ConfigError

_HOST = "127.0.0.1"  # of this machine alone: who has no key of an episode is refused as well
_PATH = "/v1/chat/completions"
_MOST_BYTES = 64 << 20
_MOST_UNKNOWN = 1 << 20  # of a request; of one without a key of an episode
_SILENT_S = 120.0  # after which a connection is closed on which nothing comes
_END_S = 10.0  # that an agent may take to return once nothing answers it any more
_KEPT = 64  # first requests, to compare those of the samples of one prompt
# That a request may not ask for
_NOT_HERE = (
    "stream",
    "tools",
    "functions",
    "response_format",
    "logprobs",
)


class Agent(Protocol):
    """The user's function.

    `base_url` and `api_key` are for any client of the OpenAI API; `row` is a row of the data set, with the episode's
    number as `number`, the `split`, and the run's `seed`. Returns the score, or facts for reward functions. Called in
    threads, many at a time. Its first request follows from `row` alone.
    """

    def __call__(
        self, base_url: str, api_key: str, row: Mapping[str, Any], /
    ) -> float | Mapping[str, Any] | None: ...


class AgentTask:
    """Episodes of a program, by `agent: package.module:function`; with `path`, one for each row of a data set.

    An agent is asked for its first request wherever a prompt is needed, also to check a config.
    """

    rewards: ClassVar[Sequence[str]] = ("score",)
    # Rows are not asked for their prompts before they come: that would begin all agents
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
        self._rows: list[Row] = [] if path is None else mixed(path, None, None, seed)
        self._seed = seed
        self._split = split
        self._first_request_s = first_request_s
        self._first: dict[int, Sequence[Message]] = {}
        self._endpoint = _Endpoint()

    def episode(self, number: int) -> AgentEpisode:
        """Begin an agent; see `episodes`."""
        return self.episodes(number, 1)[0]

    def episodes(self, number: int, samples: int) -> list[AgentEpisode]:
        """Begin the agents of a prompt together.

        One that does not make its first request fails with its first reply, as others make the prompt known. NoPrompt
        where none does; ConfigError where one makes another than the others.
        """
        row = {
            **self._row(number),
            "number": number,
            "split": self._split,
            "seed": self._seed,
        }
        begun = [AgentEpisode(self._agent, row, self._endpoint) for _ in range(samples)]
        deadline_s = time.monotonic() + self._first_request_s
        failed = [episode.begin(deadline_s) for episode in begun]
        prompts = [
            episode.prompt
            for episode, error in zip(begun, failed, strict=True)
            if error is None
        ]
        if number not in self._first and not prompts:
            assert failed[0] is not None, "one that does not fail has a prompt"
            raise failed[0]
        first = (
            self._first.setdefault(number, prompts[0])
            if prompts
            else self._first[number]
        )
        if others := [prompt for prompt in prompts if prompt != first]:
            why = (
                "all samples of a prompt answer the same one; the engine reads it once"
            )
            raise _refused(
                "its first request is another for the same episode",
                repr(others[0])[:200],
                why,
            )
        for episode in begun:
            episode.prompt = first
        self._first = dict(
            itertools.islice(
                self._first.items(), max(0, len(self._first) - _KEPT), None
            )
        )
        return begun

    def _row(self, number: int) -> Mapping[str, Any]:
        """Return all rows in each epoch, each time in another order."""
        if not self._rows:
            return {}
        epoch, place = divmod(number, len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return self._rows[order[place]][0]


class AgentEpisode:
    """One agent at work. Nobody holds it but its user: once that lets go of it, the agent gets no more answers."""

    prompt: Sequence[Message] = ()

    def __init__(
        self, agent: Agent, row: Mapping[str, Any], endpoint: _Endpoint
    ) -> None:
        self._line = _Line()
        self._row = row
        key = endpoint.open(self._line)
        weakref.finalize(self, endpoint.shut, key).atexit = False
        work = (agent, endpoint.url, key, dict(row))
        self._thread = threading.Thread(
            target=self._line.run, args=work, name="agent", daemon=True
        )
        self._thread.start()
        self._failed: NoPrompt | None = None  # why there was no first request
        # How long the agent may take to return, once it is over
        self._until_s: float | None = None

    def begin(self, deadline_s: float) -> NoPrompt | None:
        """Wait for the first request, until a time of the monotonic clock; return why there is none."""
        number = f"{self._row['number']}"
        try:
            asked = self._line.asked.get(
                timeout=max(0.0, deadline_s - time.monotonic())
            )
        except queue.Empty:
            why = "it waits for something else"
            fix = "kwargs: {first_request_s: <longer>}"
            self._failed = _no_prompt(
                "it has made no request in time", number, why, fix
            )
            return self._failed
        if not isinstance(asked, list):
            got = (
                "it returned"
                if asked.error is None
                else f"{type(asked.error).__name__}: {asked.error}"
            )
            self._failed = _no_prompt(
                "it ended without a request", got, "an episode begins with one"
            )
            self._failed.__cause__ = asked.error
            return self._failed
        self.prompt = tuple(asked)
        self._said = asked
        return None

    def reply(self, answer: str) -> str | None:
        """Hand the answer to the agent; return what its next request adds. ValueError: that is no single message."""
        if self._failed is not None:
            raise self._failed
        self._line.answers.put(answer)
        asked = self._line.asked.get()
        if not isinstance(asked, list):
            if asked.error is not None:
                raise asked.error
            return None
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

    def end(self) -> None:
        """Tell the agent that it is over; several are told before their facts are asked for, and end together."""
        if self._until_s is None:
            self._line.close()
            self._until_s = time.monotonic() + _END_S

    def facts(self) -> Mapping[str, Any]:
        """Return the row with what the agent returned; one that has asked once more, and gets no answer, scores 0."""
        self.end()
        assert self._until_s is not None, "it is told"
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        result = self._line.result
        found = (
            {"score": 0.0}
            if result is None
            else result
            if isinstance(result, Mapping)
            else {"score": float(result)}
        )
        return {**self._row, **found}


def _no_prompt(
    what: str, got: str, why: str, fix: str = "correct the agent"
) -> NoPrompt:
    return NoPrompt.of("agent-refused", "env.kwargs.agent", what, got, why, fix)


def _refused(
    what: str, got: str, why: str, fix: str = "correct the agent"
) -> ConfigError:
    return ConfigError.of("agent-refused", "env.kwargs.agent", what, got, why, fix)


# ── between an agent and its episode ──────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """The agent has returned, or raised."""

    error: Exception | None = None


class _Line:
    """What the agent's thread, the endpoint and the episode share; it does not hold the episode."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[list[Message] | _End] = queue.SimpleQueue()
        # None: there will be no more
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.result: float | Mapping[str, Any] | None = None
        self.closed = False
        self._asking = threading.Lock()

    def run(self, agent: Agent, url: str, key: str, row: Mapping[str, Any]) -> None:
        """Run the agent, in a thread of its own."""
        try:
            self.result = agent(url, key, row)
            self.asked.put(_End())
        except Exception as error:  # noqa: BLE001  # raised by the reply that waits for the agent
            self.asked.put(_End(error))
        except BaseException as error:  # noqa: BLE001  # sys.exit, or a task that asyncio has cancelled
            ended = RuntimeError(
                f"the agent ended with {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
            self.asked.put(_End(ended))

    def ask(self, messages: list[Message]) -> str | None:
        """Wait for the answer; None where there are no more. ValueError beside another request of the agent."""
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
        self.closed = True
        self.answers.put(None)


class _Server(http.server.ThreadingHTTPServer):
    """Takes the requests of many agents at once: one that finds no place in the queue tries again after a second."""

    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent where a client has gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Endpoint:
    """An HTTP server of this machine for all episodes of a task, from the first to the last."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}  # by key
        self._server: _Server | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        assert self._server is not None, "an episode is open"
        return f"http://{_HOST}:{self._server.server_port}/v1"

    def open(self, line: _Line) -> str:
        """Return the key of a new episode."""
        with self._lock:
            if self._server is None:
                self._server = _Server((_HOST, 0), _requests_of(self._lines.get))
                # Its threads end with the process
                weakref.finalize(self, _end, self._server).atexit = False
                threading.Thread(
                    target=_serve, args=(self._server,), name="agents", daemon=True
                ).start()
            key = secrets.token_urlsafe(24)
            self._lines[key] = line
        return key

    def shut(self, key: str) -> None:
        self._lines.pop(key).close()


def _serve(server: _Server) -> None:
    with server:
        server.serve_forever()


def _end(server: _Server) -> None:
    """End it, from any thread: its own would wait for itself."""
    threading.Thread(target=server.shutdown, name="ends agents", daemon=True).start()


def _requests_of(
    find: Callable[[str], _Line | None],
) -> type[http.server.BaseHTTPRequestHandler]:
    class Requests(http.server.BaseHTTPRequestHandler):
        """Answers the requests of agents."""

        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # an answer is sent at once
        timeout = _SILENT_S

        def do_GET(self) -> None:  # named by http.server
            if self.path == "/v1/models":
                self._send(
                    200,
                    {
                        "object": "list",
                        "data": [
                            {"id": "policy", "object": "model", "owned_by": "rlplace"}
                        ],
                    },
                )
            else:
                self._refuse(404, f"there is {_PATH}")

        def do_POST(self) -> None:
            line = find(
                self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            )
            size = self.headers.get("Content-Length", "")
            whole = int(size) if re.fullmatch(r"[0-9]{1,18}", size) else None
            if whole is None or whole > (
                most := _MOST_UNKNOWN if line is None else _MOST_BYTES
            ):
                self.close_connection = True  # the body stays unread: where the next request begins is not known
                if whole is None:
                    return self._refuse(
                        411,
                        "a request has a Content-Length: bodies in chunks are not read",
                    )
                return self._refuse(
                    413, f"a request has at most {most} bytes, this one {whole}"
                )
            body = self.rfile.read(whole)
            if self.path != _PATH:
                return self._refuse(404, f"there is {_PATH}")
            if line is None:
                return self._refuse(
                    401, "the key is of no episode, or of one that is over"
                )
            try:
                answer = line.ask(_messages(body))
            except ValueError as error:
                return self._refuse(400, str(error))
            if answer is None:
                return self._refuse(
                    410, "the episode is over: as many turns, or tokens, as it may have"
                )
            message = {"role": "assistant", "content": answer}
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "stop",
                "logprobs": None,
            }
            which = {
                "id": f"chatcmpl-{secrets.token_hex(8)}",
                "object": "chat.completion",
                "model": "policy",
            }
            return self._send(
                200,
                {
                    **which,
                    "created": int(time.time()),
                    "choices": [choice],
                    "usage": None,
                },
            )

        def _refuse(self, status: int, why: str) -> None:
            self._send(
                status,
                {
                    "error": {
                        "message": why,
                        "type": "invalid_request_error",
                        "code": status,
                    }
                },
            )

        def _send(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Be silent: the run has a log of its own."""

    return Requests


def _messages(body: bytes) -> list[Message]:
    """Read a request. ValueError says what is wrong with it, or not offered here."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON: {error}") from None
    if (
        not isinstance(asked, dict)
        or not isinstance(asked.get("messages"), list)
        or not asked["messages"]
    ):
        raise ValueError("a request is an object with a list of messages")
    if odd := [name for name in _NOT_HERE if asked.get(name)] + ["n"] * (
        asked.get("n") not in (None, 1)
    ):
        raise ValueError(
            f"not offered here: {', '.join(odd)}; how answers are drawn is decided by the run's config"
        )
    return [_message(message) for message in asked["messages"]]


def _message(message: Any) -> Message:
    role, content = (
        (message.get("role"), message.get("content"))
        if isinstance(message, dict)
        else (None, None)
    )
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
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
