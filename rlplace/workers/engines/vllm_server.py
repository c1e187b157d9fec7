"""A TextEngine by a vLLM server that runs outside the job: answers by HTTP, weights through a folder that both can
read.

::

    submit ──▶ POST /inference/v1/generate, once for each answer ──▶ Completion, each token with its version
    load   ──▶ FOLDER/model ──▶ pause ▸ version ▸ reload_weights ▸ forget the cache ▸ still this version? ▸ resume

A server has no lock, so a second engine could load its own weights at the same time. Therefore the version name
begins with a random mark of the engine that sent it. The version is set before the weights are read, and checked
afterwards: an engine whose weights may have been replaced finds another engine's version, or a withdrawn one, and
raises an error.

The server batches concurrent requests by itself, so `step` advances nothing: it waits briefly for finished answers.
Source: vLLM 0.32, entrypoints/scale_out/token_in_token_out, entrypoints/rl/online, entrypoints/serve/dev.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import urllib3

from rlplace.checkpoints.locks import lock_file
from rlplace.codes import problem
from rlplace.errors import EngineError
from rlplace.models.checkpoint import as_stored, write_model
from rlplace.placement.schedule import Residency
from rlplace.stopwatch import Stopwatch
from rlplace.tokens import Completion, Request
from rlplace.units import clipped
from rlplace.workers.engines.contract import (
    NO_FACTORS,
    EngineSettings,
    FactorsOf,
    Weights,
    answer_seed,
    check_length,
    engine_busy,
    require,
)
from rlplace.workers.engines.weights import ExpectedWeights, check_fit, merged

if TYPE_CHECKING:
    from rlplace.workers.launch.devices import Device

_POLL_S = 0.02  # longest wait of a step for an answer
_PAUSE_S = 0.5  # between two checks of a server that is starting
_SHOWN = 300  # characters of a server's response in an error
_LAST_WORD_S = 5.0  # longest wait of `close` for the server to abort requests
_START = "VLLM_SERVER_DEV_MODE=1 vllm serve {} --enable-scale-out --logprobs-mode processed_logprobs --max-model-len {}"

RequestedAnswer = tuple[Request, int]  # a request, and the number of one of its samples


class VllmServer:
    """A TextEngine that uses a vLLM server outside the job. Owns its answers in flight, and the folder for weights.

    A lock in the folder ensures that only one rank sends weights to a server.

    `url`: address of the server. `folder`: folder for weights; it must have the same path on the server's machine.
    `timeout_s`: longest wait for one answer, or for one step of a load. `start_s`: longest wait for a server that is
    still starting. `api_key_env`: environment variable with the server's key; None: the server needs no key. Raises
    EngineError if the folder is in use, or the server is absent or was started with unsuitable options.
    """

    host_bytes = 0

    def __init__(
        self,
        settings: EngineSettings,
        *,
        device: Device,
        owner: str,
        url: str,
        folder: str,
        timeout_s: float = 300.0,
        start_s: float = 60.0,
        api_key_env: str | None = None,
    ) -> None:
        self._settings = settings
        self._owner = owner
        self._url = url.rstrip("/")
        self._folder = Path(folder).absolute()
        self._timeout_s = timeout_s
        self._expected = ExpectedWeights.of_folder(settings.model)
        self.version: int | None = None
        # Begins the version names of this engine
        self._mark = secrets.token_hex(4)
        self.residency = Residency.OFF
        self.cached_tokens = 0
        self._most = settings.rollout.step_sequences
        self._running: dict[concurrent.futures.Future[Any], RequestedAnswer] = {}
        # A connection and a thread for each answer in flight, and one connection for control
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else None
        self._pool = urllib3.PoolManager(
            retries=False, maxsize=self._most + 1, headers=headers
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(
            self._most, "rlplace vLLM server"
        )
        # The lock keeps a second engine out of the folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / "lock").open("w")
        try:
            without = lock_file(self._lock)
        except BlockingIOError:
            self._lock.close()
            lock = self._folder / "lock"
            raise self._failed("in-use", lock=lock) from None
        if without is not None:
            lock = self._folder / "lock"
            warning = self._failed("not-locked", lock=lock, reason=without.strerror)
            logging.getLogger("rlplace").warning("%s", warning)
        try:
            self._check(start_s)
            self._call_weights("none yet")
            # A run that ended while it sent weights has left the server paused
            self._post("/resume")
        except BaseException:
            self._lock.close()
            raise

    def _check(self, start_s: float) -> None:
        """Wait up to `start_s` seconds until the server answers, and check that it was started with suitable options.

        Raises EngineError if it does not answer in time, or if an option is unsuitable.
        """
        until = time.monotonic() + start_s
        start = _START.format(self._settings.model, self._settings.context)
        while True:
            try:
                if self._send("GET", "/health", timeout_s=start_s)[0] == HTTPStatus.OK:
                    break
                error = "unhealthy"
                reason = ""
            except urllib3.exceptions.HTTPError as raised:
                error = "down"
                reason = f"{type(raised).__name__}: {raised}"
            if time.monotonic() > until:
                raise self._failed(error, start_s=start_s, reason=reason, start=start)
            time.sleep(_PAUSE_S)
        # Each endpoint that is used must be there
        status, info = self._send("GET", "/server_info?config_format=json")
        if status != HTTPStatus.OK:
            raise self._failed("no-endpoints", status=status, start=start)
        if self._send("GET", "/inference/v1/generate")[0] == HTTPStatus.NOT_FOUND:
            raise self._failed("no-token-ids", start=start)
        # The server's settings must be those of the contract
        model: Mapping[str, Any] = info["vllm_config"]["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            mode = model["logprobs_mode"]
            raise self._failed("other-logprobs", mode=mode, start=start)
        on_cpu = info["vllm_config"]["device_config"]["device"] == "cpu"
        if on_cpu and any(".experts." in name for name in self._expected.shapes):
            raise self._failed("experts-on-cpu")
        if model["max_model_len"] < self._settings.context:
            raise self._failed(
                "short-sequences",
                longest=model["max_model_len"],
                context=self._settings.context,
                start=start,
            )

    # ── memory: the server's own, which no plan counts ───────────────────────────────────────────────────────────────

    def move(self, to: Residency) -> int:
        if to < Residency.FULL and self.in_flight:
            raise engine_busy(self._owner, self.in_flight, to)
        if to == Residency.OFF:
            self.version = None
        self.residency = to
        return 0

    def load(
        self, weights: Weights, version: int, factors: FactorsOf = NO_FACTORS
    ) -> None:
        require(
            self, self._owner, "pull_weights", needs=Residency.WEIGHTS, loaded=False
        )
        named = self._expected.complete(weights)
        stored = self._expected.shapes
        check_fit(
            dict(as_stored(named.items(), stored)),
            stored,
            owner=self._owner,
            version=version,
        )
        # Until the server has all weights, there is no version
        self.version = None
        folder = self._folder / "model"
        write_model(
            folder,
            self._settings.model,
            as_stored(merged(named, factors, torch.device("cpu")), stored),
        )
        # Name the new version, then have the server read the weights, then check that the name is still there
        self._check_alone()
        self._post("/pause?mode=keep")
        self._call_weights(str(version))
        self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
        )
        reset = self._post("/reset_prefix_cache?reset_running_requests=true")
        if not reset.get("success"):
            raise self._failed("old-cache")
        try:
            self._check_alone()
        except EngineError:
            # The server may now have this engine's weights under the other engine's version name
            self._post(
                "/update_weight_version", {"new_version": f"taken back by {self._mark}"}
            )
            raise
        finally:
            self._post("/resume")
        self.version = version

    def _call_weights(self, version: str) -> None:
        """Store `<mark of this engine>.<version>` on the server, as the name of the weights that it has."""
        self._called = f"{self._mark}.{version}"
        self._post("/update_weight_version", {"new_version": self._called})

    def _check_alone(self) -> None:
        """Raise EngineError if the server's weights no longer have the name that this engine has set.

        Another engine has then sent weights to the same server.
        """
        found = self._answer("GET", "/weight_info")["weight_version"]
        if found != self._called:
            raise self._failed("shared", found=found, called=self._called)

    def close(self) -> None:
        """Abort the answers in flight, and unlock the folder."""
        # Without the abort the process could not end before these answers
        if self._running:
            with contextlib.suppress(urllib3.exceptions.HTTPError):
                self._send("POST", "/abort_requests", {}, timeout_s=_LAST_WORD_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._running.clear()
        self._pool.clear()
        self._lock.close()
        self.version = None
        self.residency = Residency.OFF

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @property
    def room(self) -> int:
        return max(0, self._most - self.in_flight)

    def submit(self, request: Request) -> None:
        require(self, self._owner, "generate", needs=Residency.FULL)
        check_length(self._owner, len(request.tokens), self._settings.context)
        drawn = self._settings.drawn(request)
        stop_token_ids, stop_texts = self._settings.stops(request)
        tokens = request.tokens.tolist()
        first = request.first_sample
        seed = drawn.seed
        room = self._settings.context - len(tokens)
        for sample in range(first, first + request.samples):
            own_seed = None if seed is None else answer_seed(seed, request, sample)
            # The same parameters as of an engine in this process
            parameters = {
                "temperature": 0.0 if request.greedy else drawn.temperature,
                "top_p": drawn.top_p,
                "top_k": drawn.top_k,
                "seed": own_seed,
                "stop_token_ids": list(stop_token_ids),
                "stop": list(stop_texts),
                "detokenize": bool(stop_texts),
                "max_tokens": min(request.max_new_tokens, room),
                "min_tokens": min(drawn.min_tokens, request.max_new_tokens),
                "repetition_penalty": drawn.repetition_penalty,
                "presence_penalty": drawn.presence_penalty,
                "frequency_penalty": drawn.frequency_penalty,
                "logprobs": 0,
                "ignore_eos": True,
            }
            future = self._threads.submit(self._generate, tokens, parameters)
            self._running[future] = (request, sample)

    def _generate(
        self, tokens: list[int], parameters: Mapping[str, object]
    ) -> Mapping[str, Any]:
        """Request one answer, wait for it, and return the server's response. Runs in a thread of its own.

        `tokens`: token ids of the prompt. `parameters`: sampling parameters of vLLM.
        """
        return self._post(
            "/inference/v1/generate",
            {"token_ids": tokens, "sampling_params": parameters},
        )

    def step(self, watch: Stopwatch | None = None) -> Sequence[Completion]:
        if not self._running:
            return []
        require(self, self._owner, "generate", needs=Residency.FULL)
        running = len(self._running)
        # Wait for the first answer that finishes, but not for long
        done, _ = concurrent.futures.wait(
            self._running, _POLL_S, concurrent.futures.FIRST_COMPLETED
        )
        if watch is not None:
            watch.lap("decode", running)
        return [
            self._completion(*self._running.pop(future), future.result())
            for future in done
        ]

    def _completion(
        self, request: Request, sample: int, answer: Mapping[str, Any]
    ) -> Completion:
        """Return the server's response as a Completion, with the version of the weights for each token.

        `sample`: index of the answer in its group. `answer`: decoded body of the response. Raises EngineError if tokens
        were sampled with the weights of another engine.
        """
        details = answer["usage"].get("prompt_tokens_details") or {}
        self.cached_tokens += details.get("cached_tokens") or 0
        (choice,) = answer["choices"]
        tokens = choice["token_ids"]
        finish = choice["finish_reason"]
        if finish not in ("stop", "length"):
            raise self._failed("ended", finish=finish)
        # Versions of the weights, by spans of tokens; -1 where the server names none
        versions = np.full(len(tokens), -1, np.int32)
        for span in choice["weight_versions"] or ():
            mark, _, version = str(span["version"]).partition(".")
            if mark != self._mark:
                sent = f"{self._mark}.{self.version}"
                raise self._failed("other-weights", version=span["version"], sent=sent)
            versions[span["start"] : span["end"]] = int(version)
        if (versions < 0).any():
            raise self._failed("no-versions")
        scores = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Completion(
            env_rank=request.env_rank,
            iteration=request.iteration,
            held_out=request.held_out,
            group=request.group,
            sample=sample,
            turn=request.turn,
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.asarray(scores, np.float32),
            versions=versions,
            finish=finish,
        )

    def drop(self) -> None:
        """Abort all answers in flight on the server, and wait until the server has ended them."""
        # Requests that no thread has begun never reach the server
        for future in list(self._running):
            if future.cancel():
                del self._running[future]
        if self._running:
            self._post("/abort_requests", {})
            concurrent.futures.wait(self._running, self._timeout_s)
        self._running.clear()

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        require(self, self._owner, "logprobs", needs=Residency.WEIGHTS)
        check_length(self._owner, len(tokens), self._settings.context)
        given = [int(token) for token in tokens]
        answer = self._generate(
            given, {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        )
        scores = zip(answer["prompt_logprobs"][1:], given[1:], strict=True)
        return [float(at[str(token)]["logprob"]) for at, token in scores]

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _post(
        self, path: str, body: Mapping[str, object] | None = None
    ) -> Mapping[str, Any]:
        """Send a POST request, and return the decoded body of the response. Raise the errors of `_answer`.

        `path`: path and query of the endpoint. `body`: sent as JSON; None: no body.
        """
        return self._answer("POST", path, body)

    def _answer(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> Mapping[str, Any]:
        """Send one request, and return the decoded body of the response.

        `method`: HTTP method. `path`: path and query of the endpoint. `body`: sent as JSON; None: no body. Raises
        EngineError if no response comes in time, or if the server refuses the request.
        """
        name = path.partition("?")[0]
        try:
            status, answer = self._send(method, path, body)
        except urllib3.exceptions.HTTPError as error:
            raise self._failed(
                "late",
                timeout_s=self._timeout_s,
                method=method,
                path=name,
                reason=f"{type(error).__name__}: {error}",
            ) from error
        if status >= HTTPStatus.MULTIPLE_CHOICES:
            shown = clipped(str(answer), _SHOWN)
            raise self._failed("refused", path=name, status=status, answer=shown)
        return answer

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, Any]:
        """Send one request; return the HTTP status and the decoded body of the response. Raises errors of urllib3.

        `method`: HTTP method. `path`: path and query of the endpoint. `body`: sent as JSON; None: no body. `timeout_s`:
        deadline in seconds; None: the engine's `timeout_s`.
        """
        timeout = urllib3.Timeout(total=timeout_s or self._timeout_s)
        response = self._pool.request(
            method, self._url + path, json=body, timeout=timeout, redirect=False
        )
        kind = response.headers.get("Content-Type", "")
        if kind.startswith("application/json"):
            return response.status, response.json()
        return response.status, response.data.decode()

    def _failed(self, error: str, **facts: Any) -> EngineError:
        """Return an EngineError about the server.

        `error`: name of the cause, which selects the error's text. `facts`: values that the text shows.
        """
        return EngineError(
            problem("engine-server", self._owner, self._url, error=error, **facts)
        )
