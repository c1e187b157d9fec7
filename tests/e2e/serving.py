"""A training API in threads of this process, and a client of it that writes the protocol by hand."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlplace
from rlplace.workers.serving.wire import fields_of, message_of

KEY = "tml-a-key-of-tests"
LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def words(model: Path, output: Path, port: int, *more: str) -> tuple[str, ...]:
    return (
        "cluster.launcher=inline",
        "cluster.accelerator.kind=emulated",
        f"actor.model.path={model}",
        f"runner.output_dir={output}",
        f"serve.port={port}",
        "serve.model_name=a-model",
        "serve.turn_s=0.2",
        "runner.sinks=[jsonl]",
        *more,
    )


def run_with(
    model: Path,
    output: Path,
    client: Callable[[str], Any],
    *more: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Serve `model` until `client`, which gets the server's address, has returned; return what it returned."""
    monkeypatch.setenv("RLPLACE_API_KEY", KEY)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def ask() -> Any:
            begun.wait(LIMIT_S)
            return client(url)

        asked = pool.submit(ask)

        def ends(*_: object) -> bool:
            begun.set()
            return asked.done()

        rlplace.train(
            "serve_tiny", words(model, output, port, *more), on_iteration=ends
        )
        return asked.result()


class Refusal(Exception):
    """An HTTP error. `status`: its number; the text is the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class PlainClient:
    """A client of one model, over plain HTTP."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self._url = url
        self._key = key
        self._number = 0
        self.session = ""
        self.model = ""

    def ask(self, name: str, content: Mapping[str, Any] | bytes | None) -> Any:
        """Send a request, and return the answer: an object, or bytes. `content`: None: a GET request."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        request = urllib.request.Request(
            f"{self._url}/api/v1/{name}",
            None if content is None else body,
            {"X-API-Key": self._key},
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                found = answer.read()
                if answer.headers["Content-Type"] == "application/x-protobuf":
                    return found
                return json.loads(found)
        except urllib.error.HTTPError as error:
            told = json.loads(error.read())
            raise Refusal(error.code, str(told.get("error", told))) from error

    def result(self, promised: Mapping[str, Any]) -> Any:
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            try:
                return self.ask(
                    "retrieve_future", {"request_id": promised["request_id"]}
                )
            except Refusal as refusal:
                if refusal.status != 408:
                    raise
        raise AssertionError("no result in time")

    def begin(self, base: str = "a-model", rank: int = 8) -> Any:
        self.session = self.ask("create_session", {"tags": [], "sdk_version": "0"})[
            "session_id"
        ]
        lora = {"rank": rank}
        asked = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": base,
            "lora_config": lora,
        }
        made = self.result(self.ask("create_model", asked))
        self.model = made.get("model_id", "")
        return made

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def train(self, name: str, **more: Any) -> Any:
        asked = {"model_id": self.model, "seq_id": self.next_number(), **more}
        return self.result(self.ask(name, asked))

    def promise_pass(
        self,
        data: Sequence[Mapping[str, Any]],
        loss: str,
        number: int,
        *,
        forward: bool = False,
        **settings: float,
    ) -> Any:
        fields: list[tuple[int, Any]] = [
            (1, self.model),
            (2, number),
            (4, loss),
            (6, int(forward)),
        ]
        fields += [(3, datum(**each)) for each in data]
        for name, value in settings.items():
            fields.append(
                (7, message_of([(1, name), (2, message_of([(1, float(value))]))]))
            )
        return self.ask("forward_backward", message_of(fields))

    def run_pass(
        self, data: Sequence[Mapping[str, Any]], loss: str, **more: Any
    ) -> tuple[list[Any], float] | Any:
        """Return (log-probabilities of each datum, sum of losses), or the object of an error."""
        found = self.result(self.promise_pass(data, loss, self.next_number(), **more))
        return read_output(found) if isinstance(found, bytes) else found

    def sample(
        self, sampler: str, prompt: Sequence[int], number: int, **more: Any
    ) -> Any:
        """Return answers (tokens, log-probabilities, reason) and the prompt's log-probabilities, or an error."""
        parameters = more.pop("sampling_params", {"max_tokens": 4})
        asked = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": parameters,
            **more,
        }
        promised = self.ask("asample", asked)
        found = self.result(promised)
        if not isinstance(found, bytes):
            return found
        answers = []
        scores = None
        for field, value in fields_of(found):
            if field == 1:
                parts = dict(fields_of(value))
                tokens = np.frombuffer(parts[2], "<i4").tolist()
                answers.append((tokens, np.frombuffer(parts[3], "<f4"), parts[1]))
            elif field == 2:
                scores = np.frombuffer(value, "<f4")
        assert len(promised["sample_sequence_ids"]) == len(answers)
        return answers, scores


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> bytes:
    """The message Datum of a sequence: all its tokens but the first are targets."""
    given = np.array(tokens, "<i4")
    chunk = message_of([(1, message_of([(1, given[:-1].tobytes())]))])
    fields: list[tuple[int, Any]] = [(1, chunk)]
    arrays = {"target_tokens": (given[1:].astype("<i8"), 2)}
    arrays |= {name: (np.array(each, "<f4"), 1) for name, each in inputs.items()}
    for name, (array, dtype) in arrays.items():
        tensor = message_of(
            [(1, array.tobytes()), (3, dtype), (4, bytes([len(array)]))]
        )
        fields.append((2, message_of([(1, name), (2, tensor)])))
    return message_of(fields)


def read_output(body: bytes) -> tuple[list[Any], float]:
    logprobs: list[Any] = []
    loss = float("nan")
    for field, value in fields_of(body):
        if field == 2:
            entries = [
                dict(fields_of(each))
                for number, each in fields_of(value)
                if number == 2
            ]
            (batched,) = [dict(fields_of(entry[2])) for entry in entries]
            numbers = np.frombuffer(batched[1], "<f4")
            edges = np.frombuffer(batched[2], "<i8") // 4
            logprobs = [numbers[a:b] for a, b in itertools.pairwise(edges)]
        elif field == 3:
            entry = dict(fields_of(value))
            assert entry[1] == b"loss:sum"
            loss = float(np.frombuffer(entry[2], "<f8")[0])
    return logprobs, loss
