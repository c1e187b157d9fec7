"""Whole runs that train a language model as Ray processes: every placement, the same update in each, real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.language import PLACEMENTS, check_alike, in_all_placements, tiny
from tests.e2e.training import Finished, placed, train

pytestmark = pytest.mark.ray


@pytest.fixture(
    scope="module",
    params=[
        (["hybrid_grpo_llm"], ["collocated_grpo_llm"]),
        pytest.param((PLACEMENTS, []), marks=pytest.mark.slow),
    ],
    ids=["one as processes", "all as processes"],
)
def runs(
    request: pytest.FixtureRequest,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Finished]:
    same = (*tiny(model), "rollout.seed=1", "runner.total_iterations=8")
    processes, threads = request.param
    return in_all_placements(
        tmp_path_factory.mktemp("runs"), *same, processes=processes, threads=threads
    )


def test_every_placement_learns(runs: dict[str, Finished]) -> None:
    for config, run in runs.items():
        assert run.code == 0, f"{config}:\n{run.err}"
        rewards = [line["actor/reward"] for line in run.metrics()]
        assert max(rewards[-2:]) > rewards[0] + 0.1, config
        assert all(
            line["actor/mismatch_max"] < 1e-3 for line in run.metrics()
        )  # the engine has the actor's weights
        assert f"plan: {config.removesuffix('_grpo_llm')}" in run.out


def test_placement_does_not_change_the_numbers(runs: dict[str, Finished]) -> None:
    """Answers belong to prompts and seeds, advantages to groups: where ranks sit changes rounding, and nothing else.

    Only the first updates are compared: once rounding makes a single token another one, all that follows differs.
    """
    check_alike(runs, iterations=2)


@pytest.mark.slow
def test_engines_in_other_processes_run_ahead_as_far_as_they_may(
    model: Path, tmp_path: Path
) -> None:
    asked = (
        "algorithm.max_staleness=1",
        "runner.total_iterations=6",
        "runner.eval_every=3",
        "runner.eval_prompts=4",
    )
    longer = ("algorithm.max_new_tokens=32", "algorithm.train_batch=16")
    run = train(
        "disaggregated_grpo_llm",
        tmp_path,
        *tiny(model),
        *placed("0-1", "2", "3"),
        *asked,
        *longer,
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert "eval/reward" in lines.pop(0)
    assert [line["policy/version"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["actor/samples"] == line["rollout/answers"] == 32 for line in lines)
    assert all(line["actor/optimizer_steps"] == 2 for line in lines)
    assert max(line["actor/age_max"] for line in lines) == 1
    assert all(0 <= line["time/overlap_share"] <= 1 for line in lines)
    assert list(run.summary()["evaluations"]) == ["0", "3", "6"]
