"""What the ledger says that scorers, engines and simulator policies hold at work is what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.memory_kinds import (
    FrozenJob,
    PolicyJob,
    Reading,
    engine_readings,
    language_model,
    policy_readings,
    reward_model,
    scorer_readings,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_model(tmp_path_factory.mktemp("model"))


def assert_foreseen(ranks: Sequence[Sequence[Reading]], *stages: str) -> None:
    for readings in ranks:
        assert [reading.stage for reading in readings] == list(stages)
        for reading in readings:
            assert reading.measured <= reading.predicted <= 1.05 * reading.measured, (reading.ratio, reading)


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"block": {"on_host": True, "dtype": "bf16"}},
        {"ranks": 2, "block": {"sharded": True}},
        {"block": {"token_budget": 4096}, "wide": True},
    ],
    ids=["whole", "on-host", "sharded", "layers"],
)
def test_a_reference_holds_what_the_plan_says(model: Path, tmp_path: Path, job: dict[str, object]) -> None:
    if job.pop("wide", False):  # its layers hold more than its scores
        model = language_model(tmp_path, hidden_size=64, intermediate_size=4096, num_hidden_layers=2)
    assert_foreseen(scorer_readings(FrozenJob(model=model, **job)), "infer")  # type: ignore[arg-type]  # of a table


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_model_holds_what_the_plan_says(tmp_path: Path, ranks: int) -> None:
    job = FrozenJob(model=reward_model(tmp_path), component="reward", ranks=ranks, block={"token_budget": 2048})
    assert_foreseen(scorer_readings(job), "infer")


@pytest.mark.parametrize("cache", [{"kv_cache_memory": 40_000_000}, {"gpu_memory_utilization": 0.04}])
def test_the_transformers_engine_holds_what_the_plan_says(tmp_path: Path, cache: dict[str, object]) -> None:
    model = language_model(tmp_path, tie_word_embeddings="kv_cache_memory" in cache)
    job = FrozenJob(model=model, component="rollout", block=cache)
    assert_foreseen(engine_readings(job), "sync", "rollout")


@pytest.mark.parametrize(
    "job",
    [
        PolicyJob(),
        PolicyJob(ranks=2, hidden=(1500, 1400), blocks={"actor": {"compute": "bf16"}}),
        PolicyJob(hidden=(512, 256), blocks={"algorithm": {"normalize_observations": False}}),
    ],
    ids=["one", "two", "as-observed"],
)
def test_a_policy_of_simulators_holds_what_the_plan_says(job: PolicyJob) -> None:
    assert_foreseen(policy_readings(job), "sync", "learn", "sync", "rollout")
