"""What is the transformers engine's own: its cache, the models it refuses, and how it draws tokens."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplace.config.blocks.language_model import TextRolloutConfig
from rlplace.errors import ConfigError
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.contract import EngineSettings, answer_seed
from rlplace.workers.engines.transformers import TransformersEngine, choose, draw
from tests.rollout_stage import Ledger
from tests.tiny_lm import request_of, tiny_model

CONTEXT = 32
ROW_BYTES = (
    2 * 2 * 2 * CONTEXT * 32 * 4
)  # keys and values, layers, heads, tokens, head size, bytes of fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, memory: int = 0, **settings: Any) -> TransformersEngine:
    rollout = TextRolloutConfig(dtype="fp32", step_sequences=4, **settings)
    built = EngineSettings(
        rollout=rollout, model=folder, context=CONTEXT, emulated_memory=memory
    )
    return TransformersEngine(built, device=Ledger(), owner="rollout rank 0")


@pytest.mark.parametrize(("rows", "room"), [(1, 1), (3, 3), (9, 4)])
def test_the_cache_is_all_that_was_given_in_whole_rows(
    folder: Path, rows: int, room: int
) -> None:
    engine = engine_of(folder, kv_cache_memory=rows * ROW_BYTES + ROW_BYTES - 1)
    weights = engine.move(Residency.WEIGHTS)
    assert engine.move(Residency.FULL) - weights == rows * ROW_BYTES
    assert engine.room == room


def test_a_share_of_an_emulated_accelerator_is_for_the_weights_too(
    folder: Path,
) -> None:
    weights = engine_of(folder, kv_cache_memory=ROW_BYTES).move(Residency.WEIGHTS)
    engine = engine_of(
        folder, gpu_memory_utilization=0.5, memory=2 * (weights + 2 * ROW_BYTES)
    )
    assert engine.move(Residency.FULL) == weights + 2 * ROW_BYTES


@pytest.mark.parametrize(
    "memory",
    [
        {"kv_cache_memory": ROW_BYTES - 1},
        {"gpu_memory_utilization": 0.5, "memory": ROW_BYTES},
    ],
)
def test_a_cache_without_a_row_is_refused_with_what_a_row_takes(
    folder: Path, memory: dict[str, float]
) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_of(folder, **memory)
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix) == (
        "kv-cache-too-small",
        f"rollout.kv_cache_memory: {ROW_BYTES}",
    )


def test_a_tied_head_is_stored_once(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = []
    for tied in (False, True):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"tie_word_embeddings": tied}), encoding="utf-8"
        )
        sizes.append(
            engine_of(tmp_path, kv_cache_memory=ROW_BYTES).move(Residency.WEIGHTS)
        )
    assert sizes[0] - sizes[1] == config["vocab_size"] * config["hidden_size"] * 4


def test_a_model_with_sliding_windows_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rollout\.engine: vllm") as caught:
        engine_of(tmp_path, kv_cache_memory=ROW_BYTES)
    assert caught.value.codes == ("attention-not-full",)


# ── drawing tokens, against distributions small enough to work out by hand ───────────────────────────────────────────


HALF_THIRD_SIXTH = torch.tensor([math.log(p) for p in (1 / 6, 1 / 2, 1 / 3)])


@pytest.mark.parametrize(
    ("sampling", "uniform", "token", "probability"),
    [
        # The distribution stands in the order of the vocabulary: 1/6, 1/2, 1/3.
        (TextRolloutConfig(), 0.0, 0, 1 / 6),
        (TextRolloutConfig(), 0.166, 0, 1 / 6),
        (TextRolloutConfig(), 0.167, 1, 1 / 2),
        (TextRolloutConfig(), 0.667, 2, 1 / 3),
        (TextRolloutConfig(), 1 - 2**-53, 2, 1 / 3),
        # Squared and renormalised: 1/14, 9/14, 4/14.
        (TextRolloutConfig(temperature=0.5), 0.07, 0, 1 / 14),
        (TextRolloutConfig(temperature=0.5), 0.71, 1, 9 / 14),
        (TextRolloutConfig(temperature=0.5), 0.72, 2, 4 / 14),
        # What is cut off: the likeliest stand first, 3/5 and 2/5.
        (TextRolloutConfig(top_k=2), 0.59, 1, 3 / 5),
        (TextRolloutConfig(top_k=2), 0.61, 2, 2 / 5),
        (TextRolloutConfig(top_k=1), 0.99, 1, 1.0),
        (TextRolloutConfig(top_k=50), 0.99, 2, 1 / 3),
        (TextRolloutConfig(top_p=0.6), 0.99, 2, 2 / 5),
        (TextRolloutConfig(top_p=0.4), 0.99, 1, 1.0),
        (TextRolloutConfig(top_p=1e-9), 0.99, 1, 1.0),
        # First top_k, then the nucleus of what it left: 3/5 alone is above 0.55.
        (TextRolloutConfig(top_k=2, top_p=0.55), 0.99, 1, 1.0),
    ],
)
def test_the_token_at_a_point_of_the_distribution(
    sampling: TextRolloutConfig, uniform: float, token: int, probability: float
) -> None:
    tokens, logprobs = draw(HALF_THIRD_SIXTH[None], sampling, [uniform])
    assert tokens.tolist() == [token]
    assert logprobs.tolist() == pytest.approx([math.log(probability)], abs=1e-6)


def test_rows_are_drawn_by_their_own_numbers() -> None:
    tokens, logprobs = choose(
        HALF_THIRD_SIXTH.expand(3, -1), TextRolloutConfig(), [0.9, None, 0.1]
    )
    assert tokens.tolist() == [2, 1, 0]
    assert logprobs.exp().tolist() == pytest.approx([1 / 3, 1 / 2, 1 / 6])


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    impossible = float("-inf")
    logits = torch.tensor([[impossible, 0.0, impossible, 0.0, impossible]])
    drawn = {int(draw(logits, TextRolloutConfig(), [k / 97])[0]) for k in range(97)} | {
        int(draw(logits, TextRolloutConfig(), [0.5])[0])
    }
    assert drawn == {1, 3}


def test_a_greedy_row_keeps_the_logprob_of_the_model_where_others_are_cut_off() -> None:
    _, logprobs = choose(
        HALF_THIRD_SIXTH.expand(2, -1),
        TextRolloutConfig(temperature=0.1, top_k=1),
        [None, 0.5],
    )
    assert logprobs.exp().tolist() == pytest.approx([1 / 2, 1.0])


def test_every_answer_has_a_seed_of_its_own() -> None:
    seeds = {
        answer_seed(seed, request_of(group, iteration=iteration, turn=turn), sample)
        for seed, group, iteration, turn, sample in itertools.product(
            range(3), repeat=5
        )
    }
    assert len(seeds) == 3**5
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert answer_seed(0, request_of(0), 0) == answer_seed(
        0, request_of(0, env_rank=1, longest=9), 0
    )
