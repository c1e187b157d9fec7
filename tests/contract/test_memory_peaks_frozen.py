"""What the ledger says that scorers, engines and simulator policies hold at work is what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.memory_kinds import (
    PACKED,
    FrozenJob,
    PolicyJob,
    Reading,
    engine_readings,
    language_model,
    policy_readings,
    reward_model,
    scorer_readings,
    vllm_block,
)

FEW = 1 << 10  # bytes of single numbers
NEAR = 2 << 20  # bytes of what is no tensor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("model"))


def assert_foreseen(ranks: Sequence[Sequence[Reading]], *stages: str) -> None:
    for readings in ranks:
        assert [reading.stage for reading in readings] == list(stages)
        for reading in readings:
            assert (
                reading.measured - FEW <= reading.predicted <= 1.05 * reading.measured
            ), (reading.ratio, reading)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"block": {"on_host": True, "dtype": "bf16"}}, marks=pytest.mark.slow
        ),
        {"ranks": 2, "block": {"sharded": True}},
        pytest.param(
            {"block": {"token_budget": 4096}, "wide": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["whole", "on-host", "sharded", "layers"],
)
def test_a_reference_holds_what_the_plan_says(
    model: Path, tmp_path: Path, job: dict[str, object]
) -> None:
    if job.pop("wide", False):  # its layers hold more than its scores
        model = language_model(
            tmp_path, hidden_size=64, intermediate_size=4096, num_hidden_layers=2
        )
    made: Any = FrozenJob
    assert_foreseen(scorer_readings(made(model=model, **job)), "infer")


def test_a_reference_takes_new_weights_in_place(model: Path) -> None:
    job = FrozenJob(
        model=model, prompts=1, block={"refresh_every": 1, "token_budget": 1024}
    )
    assert_foreseen(scorer_readings(job), "infer", "refresh")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reward_model_holds_what_the_plan_says(tmp_path: Path, ranks: int) -> None:
    job = FrozenJob(
        model=reward_model(tmp_path),
        component="reward",
        ranks=ranks,
        block={"token_budget": 2048},
    )
    assert_foreseen(scorer_readings(job), "infer")


def assert_allocated(
    held: Sequence[Reading], *, packed: int = 0, stays: bool = False
) -> None:
    """`packed`: bytes beside the weights. `stays`: the weights do, when the engine is off."""
    weights, full, off = held
    assert [reading.stage for reading in held] == ["weights", "full", "off"]
    assert [reading.resident for reading in held] == [
        reading.predicted for reading in held
    ]
    assert abs(off.measured) < NEAR
    assert (
        abs(full.measured - weights.measured - (full.predicted - weights.predicted))
        < NEAR
    )
    assert abs(weights.measured - (0 if stays else weights.predicted + packed)) < NEAR


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param({"kv_cache_memory": 40_000_000}, marks=pytest.mark.slow),
        {"gpu_memory_utilization": 0.04},
    ],
)
def test_the_transformers_engine_holds_what_the_plan_says(
    tmp_path: Path, cache: dict[str, object]
) -> None:
    model = language_model(tmp_path, tie_word_embeddings="kv_cache_memory" in cache)
    (readings,) = engine_readings(
        FrozenJob(model=model, component="rollout", longest=48, block=cache)
    )
    assert_foreseen([readings[:2]], "sync", "rollout")
    assert_allocated(readings[2:])


@pytest.mark.vllm
@pytest.mark.slow  # each builds vLLM with a recorder of memory; the transformers engine above stands for engines
@pytest.mark.parametrize("level", [1, 2])
def test_the_vllm_engine_holds_what_the_plan_says(model: Path, level: int) -> None:
    """A real engine of the CPU build: torch's record of a sync and of answers, then the allocator's count at rest.

    Two things are of that build alone. It packs the embedding and the head once more, beside their weights. And its
    sleep at level 1 frees no weights: they are on the host already, where the plan wants a copy of them. Graphs, and
    what a GPU keeps of a sleeping engine, cannot be seen here.
    """
    (readings,) = engine_readings(
        FrozenJob(model=model, component="rollout", answer=8, block=vllm_block(level))
    )
    assert_foreseen([readings[:2]], "sync", "rollout")
    assert_allocated(readings[2:], packed=PACKED, stays=level == 1)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(PolicyJob(), marks=pytest.mark.slow),
        pytest.param(
            PolicyJob(
                ranks=2, hidden=(1000, 900), blocks={"actor": {"compute": "bf16"}}
            ),
            marks=pytest.mark.slow,
        ),
        PolicyJob(
            blocks={
                "actor": {"model": {"hidden": [512, 256], "activation": "silu"}},
                "algorithm": {"normalize_observations": False},
            }
        ),
    ],
    ids=["one", "two", "as-observed"],
)
def test_a_policy_of_simulators_holds_what_the_plan_says(job: PolicyJob) -> None:
    assert_foreseen(policy_readings(job), "sync", "learn", "sync", "rollout")
