"""Whole runs whose engines have the actor's weights in every placement: all of them, or factors, verified by both."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.workers.engines.contract import NO_FACTORS, FactorsOf, Weights
from rlplace.workers.engines.transformers import TransformersEngine
from tests.e2e.language import INLINE, PLACEMENTS, check_alike, in_all_placements, tiny
from tests.e2e.training import Finished, placed, train

PROBED = ("actor.sync.verify=logprobs", "actor.sync.verify_every=1")
FACTORS = ("actor.lora_rank=4", "actor.sync.mode=lora")
BESIDE = ("actor.lora_rank=4", "actor.sync.mode=adapter")
MODES = pytest.mark.parametrize("mode", [FACTORS, BESIDE], ids=["lora", "adapter"])


def check_synced(run: Finished, *, agree: float = 1e-3) -> None:
    assert run.code == 0, run.err
    for line in run.metrics():
        assert line["sync/verify_max_diff"] < agree
        assert line["actor/mismatch_max"] < agree


@pytest.mark.slow
@MODES
def test_factors_alone_teach_an_engine_that_drops_its_weights_in_between(
    model: Path, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    asked = (
        *PROBED,
        *mode,
        "actor.optimizer.lr=2.0e-2",
        "runner.total_iterations=20",
        "rollout.seed=1",
    )
    run = train(
        "collocated_grpo_llm",
        tmp_path,
        "cluster.launcher=inline",
        *placed("0", "0", "0"),
        *tiny(model),
        *asked,
    )
    check_synced(run)
    lines = run.metrics()
    assert lines[-1]["actor/reward"] > lines[0]["actor/reward"] + 0.2
    assert 10 * lines[1]["actor/pushed_bytes"] < lines[0]["actor/pushed_bytes"]


def test_an_engine_that_keeps_old_weights_under_a_new_version_is_far_from_the_actor(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TransformersEngine.load

    def keep(
        engine: TransformersEngine,
        weights: Weights,
        version: int,
        factors: FactorsOf = NO_FACTORS,
    ) -> None:
        if version < 2:
            load(engine, weights, version, factors)
        engine.version = version

    monkeypatch.setattr(TransformersEngine, "load", keep)
    run = train(
        "hybrid_grpo_llm",
        tmp_path,
        *INLINE,
        *tiny(model),
        "runner.total_iterations=4",
        "rollout.seed=1",
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert all(line["actor/age_max"] == 0 for line in lines)  # as far as versions say
    assert all(line["actor/mismatch_max"] < 1e-3 for line in lines[:2])
    assert all(line["actor/mismatch"] > 1e-2 for line in lines[2:])


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_has_the_actors_weights_in_every_placement_and_samples_alike(
    model: Path, tmp_path: Path
) -> None:
    runs = in_all_placements(
        tmp_path,
        *tiny(model, "vllm"),
        *PROBED,
        "rollout.seed=1",
        "runner.total_iterations=2",
    )
    for run in runs.values():
        check_synced(run)
    check_alike(runs, iterations=2)


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@MODES
def test_vllm_applies_factors_to_the_weights_of_the_first_sync(
    model: Path, tmp_path: Path, mode: tuple[str, ...]
) -> None:
    asked = (
        *PROBED,
        *mode,
        "runner.total_iterations=4",
        *placed(*PLACEMENTS["hybrid_grpo_llm"]),
    )
    run = train("hybrid_grpo_llm", tmp_path, *tiny(model, "vllm"), *asked)
    check_synced(run)
    lines = run.metrics()
    assert 10 * lines[1]["actor/pushed_bytes"] < lines[0]["actor/pushed_bytes"]


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "agree", "rest"),
    [("fp32", 1e-2, ()), ("bf16", 0.5, ()), ("bf16", 0.5, FACTORS)],
    ids=["fp32", "bf16", "factors"],
)
def test_on_a_gpu_an_engine_takes_what_the_actor_beside_it_lends(
    model: Path, tmp_path: Path, dtype: str, agree: float, rest: tuple[str, ...]
) -> None:
    where = (
        "cluster.accelerators_per_node=1",
        "cluster.accelerator.kind=cuda",
        *placed("0", "0", "0"),
    )
    types = (
        f"rollout.dtype={dtype}",
        "rollout.cache_dtype=null",
        f"actor.compute={dtype}",
    )
    asked = (
        *PROBED,
        *rest,
        "runner.total_iterations=3",
        "rollout.kv_cache_memory=256MiB",
    )
    run = train(
        "collocated_grpo_llm", tmp_path, *tiny(model, "vllm"), *where, *types, *asked
    )
    check_synced(run, agree=agree)
    assert all(
        ("actor/pushed_cuda_ipc_bytes" in line) == (not rest) for line in run.metrics()
    )
