"""A server that speaks the protocol of OpenEnv, with small environments; for tests without the library.

The messages were compared with those of openenv 0.10.0.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ClassVar

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

Answer = dict[str, Any]


class Refused(Exception):
    """The environment refuses an action."""


class Guess:
    """A number is guessed. An action has a whole number from 1 to 9, and may have a remark."""

    action: ClassVar[Mapping[str, Any]] = {
        "title": "GuessAction",
        "properties": {
            "metadata": {"type": "object"},
            "guess": {"type": "integer", "minimum": 1, "maximum": 9},
            "remark": {"type": "string"},
        },
        "required": ["guess"],
    }

    def reset(self, seed: int | None = None, highest: int = 9) -> Answer:
        self.secret = random.Random(seed).randint(1, highest)
        self.guesses = 0
        return answer({"text": f"Guess a number from 1 to {highest}."})

    def step(self, action: Mapping[str, Any]) -> Answer:
        guess = action["guess"]
        if not 1 <= guess <= 9:
            raise Refused("Input should be less than or equal to 9")
        self.guesses += 1
        if guess == self.secret:
            return answer({"text": "Right."}, reward=1.0, done=True)
        text = "higher" if guess < self.secret else "lower"
        return answer({"text": text}, reward=-0.125)


class Unverified(Guess):
    """Ends an episode without a reward, as if its verification had failed."""

    def step(self, action: Mapping[str, Any]) -> Answer:
        return answer({"text": "over"}, done=True)


class Adding:
    """A sum is found with a tool. Actions are calls."""

    action: ClassVar[Mapping[str, Any]] = {
        "title": "CallToolAction",
        "properties": {
            "metadata": {"type": "object"},
            "type": {"const": "call_tool"},
            "tool_name": {"type": "string"},
            "arguments": {"type": "object"},
        },
        "required": ["tool_name"],
    }

    def reset(self, seed: int | None = None) -> Answer:
        draw = random.Random(seed)
        self.numbers = draw.randint(1, 9), draw.randint(1, 9)
        question = f"What is {self.numbers[0]} + {self.numbers[1]}?"
        return answer({}, metadata={"question": question})

    def step(self, action: Mapping[str, Any]) -> Answer:
        if action["type"] == "list_tools":
            parameters = {"type": "object", "properties": {"a": {}, "b": {}}}
            tool = {
                "name": "add",
                "description": "Adds two numbers.",
                "input_schema": parameters,
            }
            return answer({"tools": [tool]})
        if action["tool_name"] != "add":
            error = {"error_type": "tool_not_found", "message": "no such tool"}
            return answer({"tool_name": action["tool_name"], "error": error})
        total = sum(action["arguments"].values())
        result = {"content": [{"type": "text", "text": str(total)}], "data": total}
        right = total == sum(self.numbers)
        told = {"tool_name": "add", "result": result, "error": None}
        return answer(told, reward=float(right), done=right)


class Vague(Adding):
    """The reward of a call is a word."""

    def step(self, action: Mapping[str, Any]) -> Answer:
        told = super().step(action)
        if action["type"] == "call_tool":
            told["reward"] = "good"
        return told


class Unsteady(Guess):
    """Its first observation does not follow from the seed."""

    resets = 0

    def reset(self, seed: int | None = None, highest: int = 9) -> Answer:
        Unsteady.resets += 1
        return answer({"text": f"This is reset {Unsteady.resets}."})


class Silent(Guess):
    """It does not answer a step before `free` is set."""

    free = threading.Event()

    def step(self, action: Mapping[str, Any]) -> Answer:
        self.free.wait()
        return super().step(action)


class Deaf(Guess):
    """It refuses each reset."""

    def reset(self, seed: int | None = None, highest: int = 9) -> Answer:
        raise Refused("no such difficulty")


def answer(
    observation: Mapping[str, Any],
    *,
    reward: float | None = None,
    done: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Answer:
    """Return what the server says of an observation."""
    told: Answer = {"observation": {**observation, "metadata": metadata or {}}}
    return {**told, "reward": reward, "done": done}


@contextmanager
def serving(environment: Callable[[], Any], sessions: int = 64) -> Iterator[str]:
    """Serve environments within the `with` statement, and return the address. `sessions`: most at the same time."""
    room = threading.Semaphore(sessions)

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        body = json.dumps({"action": environment().action}).encode()
        headers = Headers([("Content-Length", str(len(body)))])
        return Response(HTTPStatus.OK, "OK", headers, body)

    def session(connection: ServerConnection) -> None:
        if not room.acquire(blocking=False):
            told = {
                "message": f"Server at capacity: {sessions} sessions",
                "code": "CAPACITY_REACHED",
            }
            connection.send(json.dumps({"type": "error", "data": told}))
            return
        try:
            _talk(connection, environment())
        except ConnectionClosed:
            pass
        finally:
            room.release()

    with serve(session, "127.0.0.1", 0, process_request=schema) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def _talk(connection: ServerConnection, environment: Any) -> None:
    for text in connection:
        message = json.loads(text)
        try:
            if message["type"] == "reset":
                told = environment.reset(**message["data"])
            else:
                told = environment.step(message["data"])
            said = {"type": "observation", "data": told}
        except Refused as error:
            told = {"message": str(error), "code": "VALIDATION_ERROR"}
            said = {"type": "error", "data": told}
        connection.send(json.dumps(said))
