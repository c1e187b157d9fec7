"""A session with an environment server of OpenEnv: its protocol over a WebSocket, and the schema of its actions.

::

    {"type": "reset", "data": {"seed": 1}}          ──▶  {"type": "observation", "data": {"observation": {...},
    {"type": "step", "data": {"message": "hello"}}  ──▶   "reward": 0.5, "done": false}}
                                                    or   {"type": "error", "data": {"message": ..., "code": ...}}

Source of the protocol: openenv 0.10, `openenv.core.env_server`. The library itself is not needed, since the server runs
elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplace.json_text import parsed_object

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

# Code of the server for a session that it has no room for
_FULL = "CAPACITY_REACHED"
# Codes of the server for an action that the environment does not accept
_REFUSED = ("VALIDATION_ERROR", "EXECUTION_ERROR")
# Bytes of the largest message: observations may have images
_MESSAGE_BYTES = 100 << 20
# Seconds to wait for the server's goodbye
_CLOSE_S = 1.0
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class NoAnswer(OSError):
    """Raised if the server cannot be reached, ends the session, or answers with something else than the protocol."""


class ServerIsFull(NoAnswer):
    """Raised if the server has as many sessions as it allows."""


class RefusedAction(ValueError):
    """Raised for an action that the environment does not accept. The session goes on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the environment returns after a reset or a step.

    `observation`: name -> value, without the key `metadata`. `metadata`: further values. `reward`: None if the
    environment gives none. `is_over`: whether the episode has ended.
    """

    observation: Mapping[str, Any]
    metadata: Mapping[str, Any]
    reward: float | None
    is_over: bool


class Session:
    """An environment on the server, for one episode at a time.

    The connection is closed with `close`, or when the session is no longer used.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect to the server at `url`. `timeout_s`: seconds to wait for each answer. Raises NoAnswer."""
        from websockets.exceptions import InvalidHandshake
        from websockets.sync.client import connect

        self._url = url
        self._timeout_s = timeout_s
        parts = urllib.parse.urlsplit(url)
        address = urllib.parse.urlunsplit(
            (
                _SCHEMES[parts.scheme],
                parts.netloc,
                f"{parts.path.rstrip('/')}/ws",
                "",
                "",
            )
        )
        connecting = connect(
            address,
            open_timeout=timeout_s,
            close_timeout=_CLOSE_S,
            ping_interval=None,
            max_size=_MESSAGE_BYTES,
        )
        opened = contextlib.ExitStack()
        try:
            self._connection: ClientConnection = opened.enter_context(connecting)
        except (OSError, InvalidHandshake) as error:
            raise NoAnswer(f"{url}: {type(error).__name__}: {error}") from error
        self._closing = weakref.finalize(self, opened.close)

    def reset(self, arguments: Mapping[str, Any]) -> Observed:
        """Begin an episode. `arguments`: of the environment's `reset`, such as the seed. Raises as `step` does."""
        return self._ask("reset", arguments)

    def step(self, action: Mapping[str, Any]) -> Observed:
        """Take an action: name of a field -> value. Raises RefusedAction, and NoAnswer."""
        return self._ask("step", action)

    def close(self) -> None:
        """End the session. The server then has room for another."""
        self._closing()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        from websockets.exceptions import ConnectionClosed

        # A server without room tells the reason before it ends the connection
        with contextlib.suppress(ConnectionClosed):
            self._connection.send(json.dumps({"type": kind, "data": data}))
        try:
            text = self._connection.recv(timeout=self._timeout_s)
        except TimeoutError as error:
            # A late answer would be taken for that of the next action
            self.close()
            why = f"{self._url}: no answer to {kind} in {self._timeout_s:g} s"
            raise NoAnswer(why) from error
        except ConnectionClosed as error:
            why = f"{self._url}: the server has ended the session: {error}"
            raise NoAnswer(why) from error
        try:
            answer = parsed_object(text)
            told = dict(answer["data"])
            if answer.get("type") != "error":
                return _observed(told)
        except (LookupError, TypeError, ValueError) as error:
            why = f"{self._url}: the answer to {kind} is not OpenEnv's: {error}"
            raise NoAnswer(why) from error
        raise self._error(told)

    def _error(self, told: Mapping[str, Any]) -> Exception:
        """Return the error that the server has told."""
        code = str(told.get("code"))
        message = str(told.get("message"))
        if told.get("errors"):
            message = f"{message}: {_reasons(told['errors'])}"
        if code in _REFUSED:
            return RefusedAction(message)
        if code == _FULL:
            self.close()
            return ServerIsFull(f"{self._url}: {message}")
        return NoAnswer(f"{self._url}: {message} ({code})")


def action_schema(url: str, timeout_s: float) -> Mapping[str, Any]:
    """Return the JSON schema of the actions of the environment that the server at `url` has. Raises NoAnswer."""
    parts = urllib.parse.urlsplit(url)
    scheme = "https" if _SCHEMES[parts.scheme] == "wss" else "http"
    address = urllib.parse.urlunsplit(
        (scheme, parts.netloc, f"{parts.path.rstrip('/')}/schema", "", "")
    )
    try:
        with urllib.request.urlopen(address, timeout=timeout_s) as answer:
            schema = parsed_object(answer.read())["action"]
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{address}: {type(error).__name__}: {error}") from error
    except (LookupError, ValueError) as error:
        raise NoAnswer(f"{address}: the answer is not OpenEnv's") from error
    if not isinstance(schema, dict):
        raise NoAnswer(f"{address}: the answer is not OpenEnv's")
    return schema


def is_address(url: object) -> bool:
    """Return whether `url` can be the address of a server, such as http://127.0.0.1:8000."""
    if not isinstance(url, str):
        return False
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        # Such as a bracket that is not closed
        return False
    return parts.scheme in _SCHEMES and bool(parts.netloc)


def _observed(told: Mapping[str, Any]) -> Observed:
    """Return what an answer says. Raises TypeError and ValueError for values of other types than OpenEnv's."""
    observation = dict(told.get("observation") or {})
    reward = told.get("reward")
    metadata = observation.pop("metadata", None) or {}
    return Observed(
        observation=observation,
        metadata={**metadata, **(told.get("metadata") or {})},
        reward=None if reward is None else float(reward),
        is_over=bool(told.get("done")),
    )


def _reasons(errors: object) -> str:
    """Return what pydantic says about an action that does not fit its class: field and reason of each error."""
    reasons: list[str] = []
    for error in errors if isinstance(errors, list) else []:
        place = ".".join(str(part) for part in error.get("loc", ()))
        reasons.append(f"{place}: {error.get('msg')}")
    return "; ".join(reasons)
