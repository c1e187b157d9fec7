"""Ask a reward model behind HTTP for the scores of a batch; retry what may succeed, a limited number of times.

::

    POST url   {"query": [text], "prompts": [text], "labels": [anything]}      a text is a whole episode
    200        {"rewards": [number]}                                           one for each query, in their order

`query` and `prompts` are texts with special tokens, as the policy saw them; `labels` are the task's right answers. It
is the protocol of OpenRLHF's remote reward models (`--remote_rm_url`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from rlplace.errors import ConfigError, Problem, RewardError
from rlplace.workers.worker import cancelled

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CHUNK = 1 << 16
_SHOWN = 300  # characters of an answer in an error
_NO_SERVER_BEHIND = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of a scoring server, and how long to wait and how often to retry."""

    url: str
    timeout_s: float  # longest that one answer may take, all of it
    retries: int
    key: str  # of the config's block, in errors
    api_key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address without user, password and query."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class _TransientError(Exception):
    """A failure after which another try may succeed."""


class RewardClient:
    """Stateless but for its connections and the event that ends its waits; used by several threads."""

    def __init__(self, endpoint: Endpoint, ended: threading.Event) -> None:
        self._endpoint, self._ended = endpoint, ended
        import urllib3  # here: a plan reads this module and asks no endpoint

        self._pool = urllib3.PoolManager(retries=False, maxsize=64)

    def scores(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[object]) -> list[float]:
        """Return one score for each query.

        Raises RewardError: refused, unreachable after all tries, or an answer that is no list of finite numbers.
        """
        body = json.dumps({"query": list(queries), "prompts": list(prompts), "labels": list(labels)}, default=str)
        answer = self._retried(body.encode())
        try:
            numbers = [float(reward) for reward in json.loads(answer)["rewards"]]
            short = len(numbers) != len(queries)
            why = (
                f"it has {len(numbers)} rewards for {len(queries)} queries" if short else "a reward is a finite number"
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            numbers, why = [], 'it is not {"rewards": [number, ...]}'
        if len(numbers) == len(queries) and all(map(math.isfinite, numbers)):
            return numbers
        fix = 'answer {"rewards": [...]} with one finite number for each query, in their order'
        raise self._failed("reward-endpoint-answer", f"it answered {_short(answer)}", why, fix)

    def reach(self) -> None:
        """Check by a GET that a server answers, whatever its answer. Raises RewardError."""
        self._retried(None)

    def _retried(self, body: bytes | None) -> str:
        """Try until an answer comes, with growing pauses that end with the run."""
        pause_s, tries = _FIRST_PAUSE_S, self._endpoint.retries + 1
        for number in range(1, tries + 1):
            try:
                return self._once(body)
            except _TransientError as failure:
                last = str(failure)
            if number < tries and self._ended.wait(pause_s):
                raise cancelled(self._endpoint.key, "asking the endpoint")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise self._failed(
            "reward-endpoint-down",
            f"the endpoint gave no answer in {tries} {'try' if tries == 1 else 'tries'}",
            f"the last time: {last}",
            f"start it, or correct the address; more patience: {self._endpoint.key}.retries, .timeout_s",
        )

    def _once(self, body: bytes | None) -> str:
        """Post `body` and return the answer; without one, GET. Raises _TransientError; RewardError when refused.

        Redirects are not followed: a post would lose its body, and the token is for the host that was named.
        """
        import urllib3

        endpoint = self._endpoint
        headers = {"Content-Type": "application/json"}
        if endpoint.api_key is not None:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        deadline, pieces = time.monotonic() + endpoint.timeout_s, list[bytes]()
        status: int | None = None
        try:
            response = self._pool.request(
                "GET" if body is None else "POST",
                endpoint.url,
                body=body,
                headers=headers,
                redirect=False,
                timeout=urllib3.Timeout(total=endpoint.timeout_s),
                preload_content=False,
            )
            status = response.status
            try:
                while piece := response.read1(_CHUNK):
                    pieces.append(piece)
                    if time.monotonic() > deadline:  # a socket's own timeout begins anew with every byte
                        raise urllib3.exceptions.TimeoutError
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            if status is None or status == HTTPStatus.OK:
                timeout, refused = urllib3.exceptions.TimeoutError, urllib3.exceptions.NewConnectionError
                late = isinstance(error, timeout) and not isinstance(error, refused)
                why = f"no whole answer within {endpoint.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
                raise _TransientError(why) from error
        text = b"".join(pieces).decode(errors="replace")  # of a refusal, as much as came
        if body is None:
            if status in _NO_SERVER_BEHIND:
                raise _TransientError(f"HTTP {status}")
        elif status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise _TransientError(f"HTTP {status}: {_short(text)}")
        elif status >= HTTPStatus.MULTIPLE_CHOICES:
            fix = f"post there what it expects; {endpoint.key}.api_key_env, if it needs a key"
            raise self._failed("reward-endpoint-refused", f"the endpoint refused with HTTP {status}", _short(text), fix)
        return text

    def _failed(self, code: str, what: str, why: str, fix: str) -> RewardError:
        key, got = f"{self._endpoint.key}.url", self._endpoint.shown
        return RewardError(Problem(code=code, key=key, what=what, got=got, why=why, fix=fix))


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + f" ... ({len(text)} characters)")


def endpoint_of(
    url: str, *, key: str, timeout_s: float, retries: int, api_key_env: str | None, environ: Mapping[str, str]
) -> Endpoint:
    """Raises ConfigError for a malformed address, and for an environment variable that does not exist."""
    problems: list[Problem] = []
    try:
        parts = urllib.parse.urlsplit(url)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        well_formed = False
    if not well_formed:
        what, why = "this is no address of an HTTP endpoint", "batches are posted there"
        fix = "url: http://<host>:<port>/get_reward"
        problems.append(Problem(code="bad-reward-url", key=f"{key}.url", what=what, got=url, why=why, fix=fix))
    if api_key_env is not None and not environ.get(api_key_env):
        what = "there is no such environment variable, or it is empty"
        why = "its value is sent with every request as a bearer token"
        fix = f"export {api_key_env}=<token>        (where the workers start)"
        problems.append(
            Problem(code="no-api-key", key=f"{key}.api_key_env", what=what, got=api_key_env, why=why, fix=fix)
        )
    if problems:
        raise ConfigError(problems)
    api_key = None if api_key_env is None else environ[api_key_env]
    return Endpoint(url=url, timeout_s=timeout_s, retries=retries, key=key, api_key=api_key)
