"""A training API in threads of this process: its protocol over plain HTTP, and its numbers beside the job sft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import rlplace
from rlplace.workers.roles.answered_rows import AnsweredRows
from tests.e2e.serving import PlainClient, Refusal, run_with
from tests.e2e.training import train

FIRST = {"tokens": [50, 60, 70, 80, 90], "weights": [0.0, 1.0, 1.0, 1.0]}
SECOND = {"tokens": [51, 61, 71], "weights": [1.0, 0.5]}
DATA = [FIRST, SECOND]
ADAM = {"learning_rate": 1e-2}
COLLOCATED = (
    "cluster.component_placement.actor=0",
    "cluster.component_placement.rollout=0",
    "actor.enable_offload=true",
    "rollout.enable_offload=true",
)


def weighted(logprobs: list[Any], data: list[dict[str, Any]]) -> float:
    return -sum(
        float(np.dot(each, datum["weights"]))
        for each, datum in zip(logprobs, data, strict=True)
    )


def test_a_client_trains_saves_and_samples(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(url: str) -> None:
        with pytest.raises(Refusal, match="known bearer token") as refused:
            PlainClient(url, "tml-wrong").ask("healthz", None)
        assert refused.value.status == 401
        plain = PlainClient(url)
        assert plain.ask("healthz", None) == {"status": "ok"}
        with pytest.raises(Refusal, match="writes models for other"):
            plain.ask("save_weights_external", {})
        assert "not 'another'" in plain.begin("another")["error"]
        assert plain.begin() == {"model_id": plain.model, "type": "create_model"}
        info = plain.ask("get_info", {"model_id": plain.model})
        assert (info["is_lora"], info["model_data"]["tokenizer_id"]) == (
            False,
            str(model),
        )

        # Passes add up, and may arrive in any order
        second = plain.next_number() + 1
        plain.next_number()
        later = plain.promise_pass([SECOND], "cross_entropy", second)
        earlier = plain.promise_pass([FIRST], "cross_entropy", second - 1)
        assert isinstance(plain.result(earlier), bytes)
        assert isinstance(plain.result(later), bytes)
        before, loss = plain.run_pass(DATA, "cross_entropy", forward=True)
        assert loss == pytest.approx(weighted(before, DATA), rel=1e-5)
        assert [len(each) for each in before] == [4, 2]

        # A sample between passes and step: the gradients stay, also where the actor leaves its accelerator
        base = plain.ask(
            "create_sampling_session",
            {"session_id": plain.session, "base_model": "a-model"},
        )
        (answer,), scores = plain.sample(
            base["sampling_session_id"],
            FIRST["tokens"],
            1,
            prompt_logprobs=True,
            sampling_params={"max_tokens": 3, "temperature": 0.7, "seed": 5},
        )
        assert np.allclose(scores[1:], before[0], atol=1e-4)
        assert math.isnan(scores[0])
        assert len(answer[0]) == 3
        (again,), _ = plain.sample(
            base["sampling_session_id"],
            FIRST["tokens"],
            2,
            sampling_params={"max_tokens": 3, "temperature": 0.7, "seed": 5},
        )
        assert again[0] == answer[0]
        stepped = plain.train("optim_step", adam_params=ADAM)
        assert stepped["metrics"]["grad_norm"] > 1
        after, lower = plain.run_pass(DATA, "cross_entropy", forward=True)
        assert lower < loss
        assert "no gradients" in plain.train("optim_step", adam_params=ADAM)["error"]

        # Importance weights of the present policy are 1
        drawn = [
            {
                "tokens": FIRST["tokens"],
                "logprobs": after[0],
                "advantages": [1.0, 2.0, 3.0, 4.0],
            }
        ]
        for name in ("importance_sampling", "ppo"):
            _, surrogate = plain.run_pass(drawn, name, forward=True)
            assert surrogate == pytest.approx(-10.0, abs=1e-4)
        assert "there is no 'gspo'" in plain.run_pass(drawn, "gspo")["error"]

        # Saved weights are those of their moment
        sampler = plain.train("save_weights_for_sampler")["sampling_session_id"]
        state = plain.train("save_weights", path="one")["path"]
        assert state == f"tinker://{plain.model}/weights/one"
        plain.run_pass(DATA, "cross_entropy")
        plain.train("optim_step", adam_params=ADAM)
        lowest = plain.run_pass(DATA, "cross_entropy", forward=True)[1]
        assert lowest < lower
        _, kept = plain.sample(sampler, FIRST["tokens"], 1, prompt_logprobs=True)
        assert np.allclose(kept[1:], after[0], atol=1e-4)
        named = plain.train("save_weights_for_sampler", path="two")["path"]
        asked = {"session_id": plain.session, "model_path": named}
        newest = plain.ask("create_sampling_session", asked)["sampling_session_id"]
        _, new = plain.sample(newest, FIRST["tokens"], 1, prompt_logprobs=True)
        assert new[1:].sum() > kept[1:].sum()

        # A second model takes turns with the first one
        loaded = PlainClient(url)
        loaded.session = plain.session
        loading = {
            "session_id": plain.session,
            "model_seq_id": 1,
            "path": state,
            "optimizer": True,
        }
        loaded.model = loaded.result(loaded.ask("load_weights", loading))["model_id"]
        assert loaded.run_pass(DATA, "cross_entropy", forward=True)[1] == pytest.approx(
            lower, rel=1e-6
        )
        assert plain.run_pass(DATA, "cross_entropy", forward=True)[1] == pytest.approx(
            lowest, rel=1e-6
        )
        other = PlainClient(url)
        other.begin()
        assert other.run_pass(DATA, "cross_entropy", forward=True)[1] == pytest.approx(
            loss, rel=1e-6
        )
        plain.ask("unload_model", {"model_id": plain.model})
        with pytest.raises(Refusal, match="there is no model"):
            plain.train("optim_step", adam_params=ADAM)

        # Ruined weights fail the requests of their client alone
        other.run_pass(DATA, "cross_entropy")
        other.train("optim_step", adam_params={"learning_rate": 1e38})
        ruined = other.train("save_weights_for_sampler")["sampling_session_id"]
        told = other.sample(ruined, FIRST["tokens"], 1)
        assert "not finite" in told["error"]
        other.run_pass(DATA, "cross_entropy")
        assert "not finite" in other.train("optim_step", adam_params=ADAM)["error"]
        assert loaded.run_pass(DATA, "cross_entropy", forward=True)[1] == pytest.approx(
            lower, rel=1e-6
        )

    run_with(model, tmp_path, client, *COLLOCATED, monkeypatch=monkeypatch)


def test_one_update_is_that_of_the_sft_job(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "cluster.launcher=inline",
        "cluster.accelerator.kind=emulated",
        "cluster.component_placement.actor=0",
        f"actor.model.path={model}",
        "algorithm.prompts=16",
        "actor.optimizer.schedule=constant",
        "actor.optimizer.warmup_steps=0",
        "runner.eval_every=0",
        "runner.total_iterations=1",
    )
    found = train("sft_tiny", tmp_path / "sft", *words)
    assert found.code == 0, found.err
    assert found.folder is not None
    expected = load_file(found.folder / "policy" / "model.safetensors")
    rows = AnsweredRows(rlplace.plan("sft_tiny", words).config, model, "train")
    batch = [rows.row(number) for number in range(16)]
    learned = sum(int(row.mask.sum()) for row in batch)
    data = [
        {"tokens": row.tokens, "weights": row.mask[1:].astype(np.float32) / learned}
        for row in batch
    ]
    adam = {
        "learning_rate": 3e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 1.0,
    }

    def client(url: str) -> tuple[float, float, str]:
        plain = PlainClient(url)
        plain.begin()
        _, loss = plain.run_pass(data, "cross_entropy")
        stepped = plain.train("optim_step", adam_params=adam)
        plain.train("save_weights_for_sampler", path="after")
        return loss, stepped["metrics"]["grad_norm"], plain.model

    output = tmp_path / "served"
    loss, norm, name = run_with(model, output, client, monkeypatch=monkeypatch)
    (line,) = found.metrics()
    assert loss == pytest.approx(line["actor/loss"], abs=1e-6)
    assert norm == pytest.approx(line["actor/grad_norm"], rel=1e-5)
    folder = (
        output
        / "served"
        / name.replace(":", "-")
        / "sampler_weights"
        / "after"
        / "model"
    )
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected.keys()
    moved = load_file(model / "model.safetensors")
    largest = max(np.abs(weights[n] - moved[n]).max() for n in weights)
    assert largest > 1e-3
    for each, found_of in weights.items():
        assert np.abs(found_of - expected[each]).max() < 1e-6, each
