"""Reward workers without a model: score whole episodes by a Python function, or by an HTTP endpoint.

The requests to an endpoint follow the protocol of OpenRLHF's remote reward models (`--remote_rm_url`)::

    POST url   {"query": [text], "prompts": [text], "labels": [anything]}      a text is a whole episode
    200        {"rewards": [number]}                                           one for each query, in their order

`query` and `prompts` are texts with special tokens, as the policy saw them; `labels` are the task's right answers.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import ClassVar

import numpy as np

from rlplace.codes import problem
from rlplace.config.blocks.language_model import RewardConfig
from rlplace.envs.text.failures import NO_USE, Failures
from rlplace.envs.text.graders import grader_of
from rlplace.envs.text.rewards import Case, named_reward
from rlplace.errors import ConfigError, RewardError
from rlplace.json_text import parsed
from rlplace.metrics import Metrics
from rlplace.models.tokenizer import Tokenizer
from rlplace.tokens import Sample
from rlplace.units import with_length
from rlplace.workers.roles.endpoint import endpoint_problems
from rlplace.workers.roles.scorer import Samples, Scorer, Scoring, queries
from rlplace.workers.roles.unconfined import unconfined
from rlplace.workers.worker import cancelled

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_FIRST_TRIES = 4  # first requests at the start, when the address may be wrong
_LONGEST_ASKED_S = 60.0  # longest pause that a Retry-After header may ask for
_DOWN = "reward-endpoint-down"
_CHUNK = 1 << 16
_LARGEST = 64 << 20  # largest size of an answer in bytes
_SHOWN = 300  # characters of an answer that an error shows
_NO_SERVER_BEHIND = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# Interval at which a wait for the endpoint checks for cancellation and new samples
_POLL_S = 0.5


class RewardFunctionWorker(Scorer):
    """Scores samples with a Python function that comes with rlplace or is written by the user.

    A user's function runs in separate processes with limited time and memory. The worker owns these processes, and uses
    no accelerator. Scoring raises RewardError with the sample's number if the function raises, hangs, dies or returns a
    non-finite number.
    """

    follows_plans: ClassVar[bool] = True

    def setup(self) -> None:
        config, block = self.config.config, self.config.config.reward_of(self.component)
        assert block.function is not None, "this worker is for functions"
        self._failures = Failures(config.faults)
        self._reward = named_reward(
            block.function,
            block.kwargs,
            key=config.key_of(self.component),
            chat=config.env.chat,
        )
        self._grader = grader_of(
            [self._reward],
            timeout_s=block.timeout_s,
            memory_bytes=config.env.reward_memory,
            processes=config.env.reward_processes,
            on_poison=config.faults.on_poison,
            failures=self._failures,
        )
        self._opened.callback(self._grader.close)

    def begin_again(self, iteration: int) -> Metrics:
        self._grader.close()
        return super().begin_again(iteration)

    def infer(self, iteration: int, version: int) -> Metrics:
        self._failures.begin()
        # Random numbers of the function follow from it
        seed = self.config.config.runner.seed
        self._seed = f"{seed}/{self.component}/{iteration}"
        return {
            **super().infer(iteration, version),
            **self._failures.metrics(self.component),
            **unconfined(self.component, [self._reward]),
        }

    def _score(self, scoring: Scoring) -> None:
        grading: dict[tuple[int, int], Sample] = {}
        while scoring.due or grading:
            taken = scoring.take(wait=not grading)
            for sample in taken:
                grading[sample.group, sample.sample] = sample
                case = Case(
                    group=sample.group,
                    sample=sample.sample,
                    transcript=sample.transcript,
                    seed=f"{self._seed}/{sample.group}/{sample.sample}",
                )
                self._grader.submit(case)
            # Groups arrive as a whole
            for group in dict.fromkeys(sample.group for sample in taken):
                self._grader.whole(group)
            graded = self._grader.done(wait=True)
            samples = [grading.pop((case.group, case.sample)) for case, _ in graded]
            # An episode to which the function does not apply has no score
            scores = [
                np.array([*rewards.values()], np.float32) for _, rewards in graded
            ]
            scoring.put(samples, scores)


class RewardEndpointWorker(Scorer):
    """Sends batches of samples to an HTTP endpoint, which scores them; several requests run at the same time.

    Owns one thread for each concurrent request, and uses no accelerator. Scoring raises RewardError if the endpoint
    refuses a request or does not answer.
    """

    follows_plans: ClassVar[bool] = True

    def setup(self) -> None:
        """Create the client of the endpoint, and check that a server answers at the endpoint's address.

        Raises ConfigError for a malformed address, RewardError if no server answers.
        """
        config, block = self.config.config, self.config.config.reward_of(self.component)
        self._batch = block.batch
        self._failures = Failures(config.faults)
        self._client = RewardClient(
            block,
            config.key_of(self.component),
            self.context.cancelled,
            skip=config.skips_poison,
        )
        self._tokenizer = Tokenizer.load(self.config.model)
        # Detects an endpoint that is down now, not after an hour of sampling.
        self._client.reach()
        self._threads = ThreadPoolExecutor(
            block.concurrency, thread_name_prefix=self.context.owner
        )
        self._opened.callback(self._threads.shutdown, wait=False, cancel_futures=True)

    def infer(self, iteration: int, version: int) -> Metrics:
        self._failures.begin()
        return {
            **super().infer(iteration, version),
            **self._failures.metrics(self.component),
        }

    def _score(self, scoring: Scoring) -> None:
        # Samples of each request, and how many tries it had
        asked: dict[Future[list[float]], tuple[Samples, int]] = {}

        def ask(batch: Samples, tries: int) -> None:
            texts, prompts = queries(batch, self._tokenizer)
            labels = [sample.transcript.facts.get("answer") for sample in batch]
            asked[self._threads.submit(self._client.scores, texts, prompts, labels)] = (
                batch,
                tries,
            )

        while scoring.due or asked:
            arrived = scoring.take(wait=not asked)
            for batch in (
                arrived[i : i + self._batch]
                for i in range(0, len(arrived), self._batch)
            ):
                ask(batch, 0)
            done, _ = concurrent.futures.wait(
                asked, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            for request in done:
                samples, tries = asked.pop(request)
                try:
                    scores = request.result()
                except RewardError as error:
                    # The client has already retried for long enough.
                    asked_again = NO_USE if error.code == _DOWN else tries
                    if self._failures.again(error, asked_again, episodes=len(samples)):
                        ask(samples, tries + 1)
                        continue
                    scores = [math.nan] * len(samples)
                scoring.put(
                    samples, [np.array([score], np.float32) for score in scores]
                )


# ── the endpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _TransientError(Exception):
    """A failed request that may succeed if it is repeated after at least `after_s` seconds."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


class RewardClient:
    """An HTTP client for one reward endpoint; it keeps connections open. Several threads may use it at the same
    time.
    """

    def __init__(
        self,
        block: RewardConfig,
        key: str,
        ended: threading.Event,
        *,
        skip: bool = False,
    ) -> None:
        """Check the endpoint's config and prepare the client; no request is sent.

        `block`: config of the reward. `key`: key of this block in the config, for errors. `ended`: event that ends the
        pauses between tries when the run ends. `skip`: whether to accept non-finite rewards. Raises ConfigError for the
        problems that `endpoint_problems` yields.
        """
        if problems := list(endpoint_problems(block, key)):
            raise ConfigError(problems)
        self._url = str(block.url)
        self._timeout_s = block.timeout_s
        self._tries = block.retries + 1
        self._key = key
        self._ended = ended
        self._skip = skip
        self._headers = {"Content-Type": "application/json"}
        if block.api_key_env is not None:
            self._headers["Authorization"] = f"Bearer {os.environ[block.api_key_env]}"
        # Imported here: jobs without an endpoint do not need it.
        import urllib3

        self._pool = urllib3.PoolManager(retries=False, maxsize=64)

    def scores(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[object]
    ) -> list[float]:
        """Return the endpoint's score of each query, in order.

        `queries`: texts of whole episodes. `prompts`: texts of the episodes' prompts. `labels`: the task's right answer
        for each episode, or None. Raises RewardError if the endpoint refuses the request, cannot be reached, or does
        not return one finite number for each query.
        """
        body = json.dumps(
            {"query": list(queries), "prompts": list(prompts), "labels": list(labels)},
            default=str,
        )
        answer = self._retried(body.encode(), self._tries)
        try:
            rewards = parsed(answer)["rewards"]
            if not isinstance(rewards, list):
                raise TypeError
            numbers = list(map(_number, rewards))
        except (ValueError, KeyError, TypeError, OverflowError):
            numbers = []
            error = "no-rewards"
        else:
            finite = self._skip or all(map(math.isfinite, numbers))
            if len(numbers) != len(queries):
                error = "another-number"
            elif not finite:
                error = "not-finite"
            else:
                return numbers
        wrong = problem(
            "reward-endpoint-answer",
            f"{self._key}.url",
            self._shown_url,
            error=error,
            answer=_short(answer),
            rewards=len(numbers),
            queries=len(queries),
        )
        raise RewardError(wrong)

    def reach(self) -> None:
        """Check that a server answers: send a GET request, and accept any status but 502, 503 and 504.

        Raises RewardError if no server answers after several tries.
        """
        self._retried(None, min(self._tries, _FIRST_TRIES))

    def _retried(self, body: bytes | None, tries: int) -> str:
        """Send a request up to `tries` times, with growing pauses in between, and return the endpoint's answer.

        `body`: content of a POST request; None: send a GET request. Raises RewardError after the last try, and
        ChannelBroken if the run ends during a pause.
        """
        pause_s = _FIRST_PAUSE_S
        for number in range(1, tries + 1):
            try:
                return self._once(body)
            except _TransientError as failure:
                last = str(failure)
                asked_s = failure.after_s
            if number < tries and self._ended.wait(max(pause_s, asked_s)):
                raise cancelled(self._key, "asking the endpoint")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        error = "tries"
        if tries == 1:
            error = "one-try"
        down = problem(
            "reward-endpoint-down",
            f"{self._key}.url",
            self._shown_url,
            error=error,
            tries=tries,
            last=last,
            block=self._key,
        )
        raise RewardError(down)

    def _once(self, body: bytes | None) -> str:
        """Send one request, and return the text of the answer.

        `body`: content of a POST request; None: send a GET request. Raises _TransientError if another try may succeed,
        and RewardError if the endpoint refuses the request or its answer is too large. Redirects are not followed,
        because a POST would lose its body, and the access token is meant only for the configured host.
        """
        import urllib3

        deadline = time.monotonic() + self._timeout_s
        pieces = list[bytes]()
        status = 0
        size = 0
        try:
            response = self._pool.request(
                "GET" if body is None else "POST",
                self._url,
                body=body,
                headers=self._headers,
                redirect=False,
                timeout=urllib3.Timeout(total=self._timeout_s),
                preload_content=False,
            )
            status = response.status
            with contextlib.closing(response):
                while piece := response.read1(_CHUNK):
                    pieces.append(piece)
                    if (size := size + len(piece)) > _LARGEST:
                        endless = problem(
                            "reward-endpoint-answer",
                            f"{self._key}.url",
                            self._shown_url,
                            error="endless",
                            most=_LARGEST,
                            answer=_short(pieces[0].decode(errors="replace")),
                        )
                        raise RewardError(endless)
                    # The socket's timeout starts anew with every received byte, so the total is checked here.
                    if time.monotonic() > deadline:
                        raise urllib3.exceptions.TimeoutError
        except urllib3.exceptions.HTTPError as error:
            if status in (0, HTTPStatus.OK):
                timeout = urllib3.exceptions.TimeoutError
                refused = urllib3.exceptions.NewConnectionError
                late = isinstance(error, timeout) and not isinstance(error, refused)
                why = (
                    f"no whole answer within {self._timeout_s:g} s"
                    if late
                    else f"{type(error).__name__}: {error}"
                )
                raise _TransientError(why) from error
        # If the endpoint refuses, keep the part of its answer that has arrived.
        text = b"".join(pieces).decode(errors="replace")
        overloaded = (
            status >= HTTPStatus.INTERNAL_SERVER_ERROR
            or status == HTTPStatus.TOO_MANY_REQUESTS
        )
        if (status in _NO_SERVER_BEHIND) if body is None else overloaded:
            raise _TransientError(
                f"HTTP {status}: {_short(text)}", _retry_after_s(response.headers)
            )
        if body is not None and status >= HTTPStatus.MULTIPLE_CHOICES:
            rejected = problem(
                "reward-endpoint-refused",
                f"{self._key}.url",
                self._shown_url,
                status=status,
                answer=_short(text),
                block=self._key,
            )
            raise RewardError(rejected)
        return text

    @property
    def _shown_url(self) -> str:
        """The address of the endpoint without user, password and query."""
        parts = urllib.parse.urlsplit(self._url)
        host = parts.netloc.rpartition("@")[2]
        return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def _number(reward: object) -> float:
    """Return a reward of an endpoint's answer. Raises TypeError if it is no number, such as `true` or a text."""
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise TypeError(f"{reward!r} is no number")
    return float(reward)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the pause that the header Retry-After asks for, in seconds, but at most `_LONGEST_ASKED_S`.

    Return 0 if the header is missing or is not a whole number.
    """
    asked = headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        return min(float(asked), _LONGEST_ASKED_S)
    return 0.0


def _short(text: str) -> str:
    return repr(with_length(text, _SHOWN))
