"""Asks a reward model behind HTTP for the scores of a batch, again where asking again may help, and not for ever.

::

    POST url   {"query": [text], "prompts": [text], "labels": [anything]}      a text is a whole episode
    200        {"rewards": [number]}                                           one for each query, in their order

`query` and `prompts` are texts with special tokens, as the policy saw them; `labels` what the task says is right. This
is what OpenRLHF asks its remote reward models (`--remote_rm_url`).
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from rlplace.errors import ConfigError, Problem, RewardError
from rlplace.workers.worker import cancelled

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CHUNK = 1 << 16
_SHOWN = 300  # characters of an answer in an error
_NOBODY_BEHIND = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)

Said = TypeVar("Said")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask and how patiently."""

    url: str
    timeout_s: float  # longest that one answer may take, all of it
    retries: int
    key: str  # of the config's block, in errors
    api_key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address without what nobody else should read."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _Again(Exception):
    """What went wrong may go right the next time."""


class _Stay(urllib.request.HTTPRedirectHandler):
    """Goes nowhere else: a post would lose its body on the way, and the token is for the host that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class RewardClient:
    """Stateless but for the event that ends its waits; used by several threads."""

    def __init__(self, endpoint: Endpoint, ended: threading.Event) -> None:
        self._endpoint, self._ended = endpoint, ended
        self._opener = urllib.request.build_opener(_Stay)

    def scores(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[object]) -> list[float]:
        """Raises RewardError: refused, unreachable after all tries, or an answer that is no list of finite numbers."""
        body = json.dumps({"query": list(queries), "prompts": list(prompts), "labels": list(labels)}, default=str)
        answer = self._patiently(lambda: self._ask(body.encode()))
        return self._numbers(answer, len(queries))

    def reach(self) -> None:
        """Whether anybody is there, by a GET, whatever it says to that. Raises RewardError."""
        self._patiently(self._knock)

    def _patiently(self, attempt: Callable[[], Said]) -> Said:
        pause_s, tries = _FIRST_PAUSE_S, self._endpoint.retries + 1
        for number in range(1, tries + 1):
            try:
                return attempt()
            except _Again as failure:
                last = str(failure)
            if number < tries and self._ended.wait(pause_s):
                raise cancelled(self._endpoint.key, "asking the endpoint")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise self._failed(
            "reward-endpoint-down",
            f"the endpoint gave no answer in {number} {'try' if number == 1 else 'tries'}",
            f"the last time: {last}",
            f"start it, or correct the address; more patience: {self._endpoint.key}.retries, .timeout_s",
        )

    def _knock(self) -> None:
        try:
            self._send(None)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in _NOBODY_BEHIND:
                    raise _Again(f"HTTP {error.code}") from error

    def _ask(self, body: bytes) -> bytes:
        try:
            return self._send(body)
        except urllib.error.HTTPError as error:
            said = _reason(error)
            if error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code == HTTPStatus.TOO_MANY_REQUESTS:
                raise _Again(f"HTTP {error.code}: {_short(said)}") from error
            fix = f"post there what it expects; {self._endpoint.key}.api_key_env, if it wants a key"
            raise self._failed(
                "reward-endpoint-refused", f"the endpoint refused with HTTP {error.code}", _short(said), fix
            ) from error

    def _send(self, body: bytes | None) -> bytes:
        """Posts `body`; of None, gets. Raises HTTPError, or _Again where nobody answered in time."""
        endpoint = self._endpoint
        headers = {"Content-Type": "application/json"}
        if endpoint.api_key is not None:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        request = urllib.request.Request(endpoint.url, data=body, headers=headers)
        deadline = time.monotonic() + endpoint.timeout_s
        try:
            with self._opener.open(request, timeout=endpoint.timeout_s) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError as error:
            raise _Again(str(error.reason)) from error
        except TimeoutError as error:
            raise _Again(f"no whole answer within {endpoint.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:  # it hung up in the middle
            raise _Again(f"{type(error).__name__}: {error}") from error

    def _numbers(self, answer: bytes, expected: int) -> list[float]:
        said = answer.decode(errors="replace")
        try:
            rewards = json.loads(said)["rewards"]
            numbers = [float(reward) for reward in rewards]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._answer(said, 'it is not {"rewards": [number, ...]}') from error
        if len(numbers) != expected:
            raise self._answer(said, f"it has {len(numbers)} rewards for {expected} queries")
        if not all(map(math.isfinite, numbers)):
            raise self._answer(said, "a reward is a finite number")
        return numbers

    def _answer(self, said: str, why: str) -> RewardError:
        fix = 'answer {"rewards": [...]} with one finite number for each query, in their order'
        return self._failed("reward-endpoint-answer", f"it answered {_short(said)}", why, fix)

    def _failed(self, code: str, what: str, why: str, fix: str) -> RewardError:
        endpoint = self._endpoint
        return RewardError(
            Problem(code=code, key=f"{endpoint.key}.url", what=what, got=endpoint.shown, why=why, fix=fix)
        )


def _read(response: Any, deadline: float) -> bytes:
    """All of it; a socket's own timeout begins anew with every byte."""
    pieces: list[bytes] = []
    while piece := response.read1(_CHUNK):
        pieces.append(piece)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(pieces)


def _reason(error: urllib.error.HTTPError) -> str:
    """What was said with a refusal, if it comes."""
    with error:
        try:
            return error.read(_CHUNK).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + f" ... ({len(text)} characters)")


def endpoint_of(
    url: str, *, key: str, timeout_s: float, retries: int, api_key_env: str | None, environ: Mapping[str, str]
) -> Endpoint:
    """Raises ConfigError for what is no address, and where there is no such environment variable."""
    parts = urllib.parse.urlsplit(url)
    problems: list[Problem] = []
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
        problems.append(
            Problem(
                code="bad-reward-url",
                key=f"{key}.url",
                what="this is no address of an HTTP endpoint",
                got=url,
                why="batches are posted there",
                fix="url: http://<host>:<port>/get_reward",
            )
        )
    if api_key_env is not None and not environ.get(api_key_env):
        problems.append(
            Problem(
                code="no-api-key",
                key=f"{key}.api_key_env",
                what="there is no such environment variable, or it is empty",
                got=api_key_env,
                why="its value is sent with every request as a bearer token",
                fix=f"export {api_key_env}=<token>        (where the workers start)",
            )
        )
    if problems:
        raise ConfigError(problems)
    api_key = None if api_key_env is None else environ[api_key_env]
    return Endpoint(url=url, timeout_s=timeout_s, retries=retries, key=key, api_key=api_key)


def _has_port(parts: urllib.parse.SplitResult) -> bool:
    """Or none is named."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False
