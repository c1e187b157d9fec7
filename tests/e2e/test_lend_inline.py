"""Whole runs, in threads of this process, in which the actor lends its accelerators to rollout while it waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.language import INLINE, tiny
from tests.e2e.training import placed, train

LEND = "cluster.lend={actor: rollout}"
APART = (*INLINE, *placed("0", "1", "2-3"))


def test_the_numbers_are_those_of_as_many_ranks_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    """Ranks on lent accelerators answer with the weights, seeds and numbers that any other ranks would."""
    asked = (
        "runner.total_iterations=2",
        "runner.eval_every=0",
        "rollout.seed=0",
        "rollout.step_sequences=4",
    )
    lent = train(
        "disaggregated_grpo_llm", tmp_path / "lent", *tiny(model), *APART, LEND, *asked
    )
    assert lent.code == 0, lent.err
    own = train(
        "disaggregated_grpo_llm",
        tmp_path / "own",
        *tiny(model),
        *INLINE,
        *placed("0", "1", "[0,2-3]"),
        *asked,
    )
    assert own.code == 0, own.err
    for metric in ("actor/reward", "actor/loss", "actor/entropy", "rollout/tokens"):
        first = [line[metric] for line in lent.metrics() if metric in line]
        assert first
        assert first == pytest.approx(
            [line[metric] for line in own.metrics() if metric in line], rel=1e-4
        ), metric
    memory = lent.summary()["memory"]
    for component, rows in memory.items():
        for residency, size in rows.items():
            assert size["measured"] == pytest.approx(size["predicted"], rel=0.05), (
                component,
                residency,
            )


@pytest.mark.slow
def test_lent_accelerators_help_the_iteration_that_is_under_way(
    model: Path, tmp_path: Path
) -> None:
    """Generation goes on while the actor learns; ranks on its accelerators join in when it waits."""
    run = train(
        "disaggregated_grpo_llm",
        tmp_path,
        *tiny(model),
        *APART,
        LEND,
        "algorithm.max_staleness=1",
        "runner.total_iterations=5",
        "runner.eval_every=2",
        "runner.eval_prompts=4",
        "checkpoint.every=2",
        "rollout.step_sequences=4",
    )
    assert run.code == 0, run.err
    lines = run.metrics()[1:]
    assert [line["actor/samples"] for line in lines] == [32] * 5
    assert [line["rollout/answers"] for line in lines] == [32] * 5
    assert max(line["actor/age_max"] for line in lines) <= 1
    assert list(run.summary()["evaluations"]) == ["0", "2", "4", "5"]
