"""A vLLM server that runs by itself, as an engine: the suite of all engines but for what it asks of memory and laps."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.errors import EngineError
from rlplace.workers.engines.contract import EngineSettings
from rlplace.workers.engines.vllm_server import VllmServer
from tests.contract.test_text_engine import (  # noqa: F401  # they are tests here too, of this file's bench
    CLOSE,
    OPEN,
    PLAIN,
    SLOTS,
    Bench,
    run,
    test_a_greedy_answer_is_the_likeliest_one,
    test_a_prompt_that_fills_the_context_is_refused,
    test_an_answer_ends_where_the_context_does,
    test_an_answer_ends_with_a_stop_token_or_at_its_length,
    test_an_answer_ends_with_the_token_that_completes_a_text,
    test_dropped_answers_never_come_and_leave_their_room,
    test_factors_are_added_in_loading_to_weights_that_stay_as_they_are,
    test_held_out_answers_are_drawn_as_evaluation_says,
    test_loaded_weights_are_those_of_the_model,
    test_loading_copies,
    test_logprobs_are_those_of_the_distribution_that_was_drawn_from,
    test_moving_away_from_answers_in_flight_is_refused,
    test_samples_of_a_prompt_are_numbered_and_differ,
    test_temperature_zero_is_greedy,
    test_tokens_come_as_often_as_they_are_likely,
    test_weights_that_do_not_fit_are_refused_and_change_nothing,
    test_what_is_asked_too_early_is_refused,
    test_what_is_drawn_follows_from_the_seed_and_not_from_the_batch,
)
from tests.e2e.language import INLINE, tiny
from tests.e2e.training import train
from tests.tiny_lm import Kind, request_of, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE = "rlplace.workers.engines.vllm_server:VllmServer"
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def served(folder: Path, log: Path, *more: str) -> Iterator[str]:
    """A vLLM server of its own on this machine; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--port",
        port,
        *more,
    ]
    words += [
        "--host",
        "127.0.0.1",
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
    ]
    words += [
        "--max-model-len",
        128,
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        SLOTS,
    ]
    words += ["--max-num-batched-tokens", 256, "--kv-cache-memory-bytes", 16 << 20]
    variables = {**os.environ, **VARIABLES, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (
        log.open("w") as out,
        subprocess.Popen(
            map(str, words), env=variables, stdout=out, stderr=out
        ) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


class ServerBench(Bench):
    """Engines of one server after the other."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        super().__init__("vllm", kind, folder)
        self.url = ""

    def _build(self, settings: EngineSettings) -> Any:
        folder = str(self._folder.parent / "sent")
        return VllmServer(
            settings,
            device=self.device,
            owner="rollout rank 0",
            url=self.url,
            folder=folder,
            start_s=120,
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerBench]:
    folder = tmp_path_factory.mktemp("models")
    bench = ServerBench("qwen3", folder)
    with served(bench._folder, folder / "server.txt") as bench.url:
        yield bench
        bench.close()


def test_a_run_learns_by_a_server(bench: ServerBench, tmp_path: Path) -> None:
    bench.close()
    model = tiny_model(tmp_path / "model", "qwen3")
    asked = (
        "runner.total_iterations=3",
        "actor.sync.verify=logprobs",
        "actor.sync.verify_every=1",
    )
    where = (
        f"+rollout.engine_args.url={bench.url}",
        f"+rollout.engine_args.folder={tmp_path / 'sent'}",
    )
    placed = ("cluster.component_placement.rollout=cpu", "rollout.step_sequences=6")
    done = train(
        "hybrid_grpo_llm",
        tmp_path / "runs",
        *INLINE,
        *tiny(model, ENGINE),
        *asked,
        *where,
        *placed,
    )
    assert done.code == 0, done.err
    lines = done.metrics()
    assert len({line["actor/reward"] for line in lines}) > 1
    for line in lines:
        assert line["actor/tokens_learned"] == line["rollout/tokens"]
        assert max(line["actor/mismatch_max"], line["sync/verify_max_diff"]) < 1e-3


def test_a_load_between_the_tokens_of_an_answer_keeps_them(bench: ServerBench) -> None:
    """The server goes on by itself, so it is tried until the load falls between two tokens."""
    engine = bench.ready(OPEN)
    asked, mixed = request_of(0, samples=SLOTS, longest=50), 0
    for new in (2, 1, 2, 1, 2, 1, 2, 1):
        engine.submit(asked)
        answers = list(engine.step())
        old = engine.version
        assert old is not None
        engine.load(bench.weights(new), new)
        answers += run(engine)
        assert len(answers) == SLOTS
        for answer in answers:
            prompt, tokens, at = (
                asked.tokens.tolist(),
                answer.tokens.tolist(),
                int((answer.versions == old).sum()),
            )
            assert answer.versions.tolist() == [old] * at + [new] * (50 - at)
            expected = [
                bench.logprobs(version, prompt, tokens, PLAIN).numpy()
                for version in (old, new)
            ]
            assert (
                np.abs(
                    answer.logprobs
                    - np.concatenate([expected[0][:at], expected[1][at:]])
                ).max()
                < CLOSE
            )
            mixed += 0 < at < 50
        if mixed:
            return
    raise AssertionError("no load fell between two tokens")


def test_a_second_engine_for_the_same_folder_is_refused(bench: ServerBench) -> None:
    bench.ready()
    with pytest.raises(EngineError, match="its folder is in use"):
        bench._build(bench.engine._settings)
