"""What the engine over a vLLM server says of one that is not there, was started otherwise, or goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import EngineError
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.vllm_server import VllmServer
from tests.rollout_stage import Ledger
from tests.served import in_a_thread
from tests.tiny_lm import request_of

ANSWER: dict[str, Any] = {
    "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
    "choices": [
        {
            "token_ids": [7, 8],
            "finish_reason": "length",
            "weight_versions": [{"version": "as sent", "start": 0, "end": 2}],
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        }
    ],
}


def started(**otherwise: Any) -> dict[str, Any]:
    """What a server says that was started as it has to be, or otherwise."""
    model = {"logprobs_mode": "processed_logprobs", "max_model_len": 64, **otherwise}
    return {"vllm_config": {"model_config": model, "device_config": {"device": "cpu"}}}


class FakeServer(ThreadingHTTPServer):
    """Answers as vLLM does; `answers` has what it says by path, a status alone or text that is no JSON among it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, Any] = {
            "/health": {},
            "/server_info": started(),
            "/inference/v1/generate": ANSWER,
            "/reset_prefix_cache": {"success": True},
            "/weight_info": {"weight_version": "as sent"},
        }
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()
        self.version = "default"
        self.hangs = threading.Event()
        self.released = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        text = self.rfile.read(size)
        self.server.asked.append((self.path, json.loads(text) if text else None))
        self.server.keys.add(self.headers.get("authorization"))
        if self.path == "/update_weight_version":
            self.server.version = self.server.asked[-1][1]["new_version"]
        if self.server.hangs.is_set():
            self.server.released.wait(10)
            return
        self._answer()

    def _answer(self) -> None:
        answer = self.server.answers.get(self.path.partition("?")[0], {})
        status = answer if isinstance(answer, int) else 200
        body = json.dumps(answer).replace("as sent", self.server.version).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with in_a_thread(FakeServer()) as server:
        yield server
        server.released.set()


@pytest.fixture
def build(server: FakeServer, tmp_path: Path) -> Iterator[Callable[..., VllmServer]]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    save_file({"weight": torch.zeros(2, 2)}, model / "model.safetensors")
    built: list[VllmServer] = []

    def make(**others: Any) -> VllmServer:
        rollout = TextRolloutConfig(
            step_sequences=4, temperature=0.5, seed=3, **others.pop("rollout", {})
        )
        settings = EngineSettings(rollout=rollout, model=model, context=64)
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        given = {
            "url": url,
            "folder": str(tmp_path / "sent"),
            **others,
        }
        built.append(
            VllmServer(settings, device=Ledger(), owner="rollout rank 0", **given)
        )
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def loaded(engine: VllmServer) -> VllmServer:
    engine.move(Residency.FULL)
    engine.load({"weight": torch.ones(2, 2)}, 4)
    return engine


def finished(engine: VllmServer) -> list[Any]:
    found: list[Any] = []
    for _ in range(500):
        found += engine.step()
        if not engine.in_flight:
            return found
    raise AssertionError("an engine without an end")


def test_weights_go_through_the_folder_while_the_server_pauses(
    server: FakeServer, build: Callable[..., VllmServer], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    engine = loaded(build())
    paths = [path for path, _ in server.asked]
    reset = "/reset_prefix_cache?reset_running_requests=true"
    called = "/update_weight_version"
    assert paths == [
        called,
        "/resume",
        "/pause?mode=keep",
        called,
        "/collective_rpc",
        reset,
        "/resume",
    ]
    there = tmp_path / "sent" / "model"
    assert server.asked[4][1] == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(there)},
    }
    assert server.asked[3][1]["new_version"].endswith(".4")
    assert torch.equal(
        load_file(there / "model.safetensors")["weight"], torch.ones(2, 2)
    )
    assert engine.version == 4


def test_an_answer_comes_with_its_versions(
    server: FakeServer, build: Callable[..., VllmServer]
) -> None:
    engine = loaded(build())
    engine.submit(request_of(2, length=5, samples=2, longest=9))
    assert (engine.in_flight, engine.room) == (2, 2)
    first, second = finished(engine)
    assert {first.sample, second.sample} == {0, 1}
    assert (
        first.tokens.tolist(),
        first.logprobs.tolist(),
        first.versions.tolist(),
    ) == ([7, 8], [-1, -2], [4, 4])
    assert (first.tokens.dtype, first.logprobs.dtype, first.finish) == (
        np.int32,
        np.float32,
        "length",
    )
    assert engine.cached_tokens == 6
    asked = [
        body["sampling_params"]
        for path, body in server.asked
        if path == "/inference/v1/generate"
    ]
    assert asked[0]["seed"] != asked[1]["seed"]
    assert {
        (a["temperature"], a["max_tokens"], a["ignore_eos"], a["detokenize"])
        for a in asked
    } == {(0.5, 9, True, False)}


@pytest.mark.parametrize(
    ("path", "answer", "given", "said"),
    [
        ("/health", 503, {"start_s": 0.1}, "no server is up after 0.1 s"),
        ("/server_info", 404, {}, "its development endpoints are off"),
        ("/inference/v1/generate", 404, {}, "takes no token ids"),
        (
            "/server_info",
            started(logprobs_mode="raw_logprobs"),
            {},
            "gives other log-probabilities",
        ),
        (
            "/server_info",
            started(max_model_len=63),
            {},
            "takes shorter sequences",
        ),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_with_how_to_start_it(
    server: FakeServer,
    build: Callable[..., VllmServer],
    path: str,
    answer: Any,
    given: Mapping[str, float],
    said: str,
) -> None:
    server.answers[path] = answer
    with pytest.raises(EngineError) as caught:
        build(**given)
    assert caught.value.code == "engine-server"
    assert said in str(caught.value)
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve" in str(caught.value)
    assert "--max-model-len 64" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("default", "has other weights"),
        ("4", "has other weights"),
        ("cafe.4", "has other weights"),
        (None, "does not say by which weights"),
    ],
)
def test_answers_by_other_weights_are_noticed(
    server: FakeServer, build: Callable[..., VllmServer], version: str | None, said: str
) -> None:
    engine = loaded(build())
    spans = [{"version": version, "start": 0, "end": 2}] if version else None
    server.answers["/inference/v1/generate"] = {
        **ANSWER,
        "choices": [{**ANSWER["choices"][0], "weight_versions": spans}],
    }
    engine.submit(request_of(0))
    with pytest.raises(EngineError, match=said):
        finished(engine)


def test_a_server_that_hangs_refuses_or_keeps_its_cache_is_named(
    server: FakeServer,
    build: Callable[..., VllmServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = loaded(build())
    server.answers["/collective_rpc"] = 500
    with pytest.raises(EngineError, match="refused /collective_rpc"):
        engine.load({"weight": torch.ones(2, 2)}, 5)
    assert engine.version is None
    server.answers |= {"/collective_rpc": {}, "/reset_prefix_cache": {"success": False}}
    with pytest.raises(EngineError, match="keeps what it computed by the old weights"):
        engine.load({"weight": torch.ones(2, 2)}, 5)
    server.answers["/reset_prefix_cache"] = {"success": True}
    loaded(engine).submit(request_of(0))
    monkeypatch.setattr(engine, "_timeout_s", 0.2)  # what comes before is answered
    server.hangs.set()
    engine.submit(request_of(1))
    with pytest.raises(EngineError, match=r"gave no answer within 0\.2 s"):
        finished(engine)
    server.hangs.clear()  # else it would not be told to forget


def test_a_folder_without_flock_is_named_and_used(
    build: Callable[..., VllmServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    loaded(build())
    assert caplog.text.count("has no flock: No locks available") == 1


def test_weights_that_another_engine_has_sent_are_noticed(
    build: Callable[..., VllmServer], tmp_path: Path
) -> None:
    first = loaded(build())
    loaded(
        build(folder=str(tmp_path / "other"))
    )  # by a folder of its own, the lock lets it
    first.submit(request_of(0))
    with pytest.raises(EngineError, match="has other weights"):
        finished(first)


def test_an_engine_does_not_load_over_weights_of_another(
    build: Callable[..., VllmServer], tmp_path: Path
) -> None:
    first = loaded(build())
    second = loaded(build(folder=str(tmp_path / "other")))
    with pytest.raises(EngineError, match="is not this engine's alone"):
        first.load({"weight": torch.ones(2, 2)}, 5)
    assert first.version is None
    second.load({"weight": torch.ones(2, 2)}, 5)
    second.submit(request_of(0))
    assert [answer.versions.tolist() for answer in finished(second)] == [[5, 5]]


class Turns:
    """Lets two threads ask a server in turns: so often the first, so often the second, and each to its end."""

    def __init__(self, server: FakeServer, first: int, second: int) -> None:
        self._server, self._moved = server, threading.Condition()
        self._order = [0] * first + [1] * second + [0] * 99 + [1] * 99
        self.read = ""  # folder of the weights that the server has

    def send(self, number: int, path: str, body: Any) -> tuple[int, Any]:
        with self._moved:
            assert self._moved.wait_for(lambda: self._order[0] == number, 10)
            if path == "/collective_rpc":
                self.read = body["kwargs"]["weights_path"]
            if path == "/update_weight_version":
                self._server.version = body["new_version"]
            del self._order[0]
            self._moved.notify_all()
            found = self._server.answers.get(path.partition("?")[0], {})
            return 200, {
                "weight_version": self._server.version
            } if path == "/weight_info" else found

    def leave(self, number: int) -> None:
        with self._moved:
            self._order = [each for each in self._order if each != number] or [-1]
            self._moved.notify_all()


@pytest.mark.parametrize("first", range(3, 13))
def test_of_two_engines_that_load_in_the_same_instant_none_takes_the_others_weights_for_its_own(
    first: int,
    build: Callable[..., VllmServer],
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = threading.local()

    def send(
        engine: VllmServer,
        method: str,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
    ) -> Any:
        return turns.send(mine.number, path, body)

    def run(number: int) -> str | None:
        """Return what it called its weights, if it took them for loaded."""
        mine.number, called = number, None
        with contextlib.suppress(EngineError):
            called = loaded(build(folder=str(tmp_path / f"{second}-{number}")))._called
        turns.leave(number)
        return called

    monkeypatch.setattr(VllmServer, "_send", send)
    with ThreadPoolExecutor(2) as threads:
        for second in range(3, 13):
            turns = Turns(server, first, second)
            names = list(threads.map(run, range(2)))
            for number, name in enumerate(
                names
            ):  # answers by weights of another name are refused
                assert name != server.version or turns.read == str(
                    tmp_path / f"{second}-{number}" / "model"
                )


def test_answers_are_drawn_as_the_config_says(
    server: FakeServer, build: Callable[..., VllmServer]
) -> None:
    penalties = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }
    engine = loaded(
        build(rollout={"min_tokens": 3, "top_p": 0.9, "top_k": 7, **penalties})
    )
    for greedy in (False, True):
        engine.submit(dataclasses.replace(request_of(0), greedy=greedy))
        finished(engine)
    drawn, surest = (
        body["sampling_params"]
        for path, body in server.asked
        if path == "/inference/v1/generate"
    )
    assert penalties | {
        "min_tokens": 3,
        "top_p": 0.9,
        "top_k": 7,
        "temperature": 0.5,
    } == {
        name: drawn[name]
        for name in (*penalties, "min_tokens", "top_p", "top_k", "temperature")
    }
    assert surest["temperature"] == 0


def test_the_server_is_shown_its_key(
    server: FakeServer,
    build: Callable[..., VllmServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_THE_SERVER", "secret")
    loaded(build(api_key_env="KEY_OF_THE_SERVER"))
    assert server.keys == {"Bearer secret"}


def begun(engine: VllmServer, server: FakeServer) -> None:
    """Have the server be asked for an answer, which does not end."""
    server.hangs.set()
    engine.submit(request_of(0))
    until = time.monotonic() + 10
    while server.asked[-1][0] != "/inference/v1/generate":
        assert time.monotonic() < until
        time.sleep(0.01)
    server.hangs.clear()


@pytest.mark.parametrize("forget", [VllmServer.drop, VllmServer.close])
def test_the_server_is_told_to_forget_what_it_was_asked(
    forget: Callable[[VllmServer], None],
    server: FakeServer,
    build: Callable[..., VllmServer],
) -> None:
    engine = loaded(build(timeout_s=2.0))
    begun(engine, server)
    forget(engine)
    assert (server.asked[-1][0], engine.in_flight) == ("/abort_requests", 0)


def test_experts_are_refused_on_a_cpu(
    build: Callable[..., VllmServer], tmp_path: Path
) -> None:
    save_file(
        {"layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)},
        tmp_path / "model" / "model.safetensors",
    )
    with pytest.raises(EngineError, match="answers wrongly with experts on a CPU"):
        build()


def test_one_rank_sends_weights_through_a_folder(
    build: Callable[..., VllmServer],
) -> None:
    first = build()
    with pytest.raises(EngineError, match="its folder is in use"):
        build()
    first.close()
    build()
