"""Runs in processes of their own in which the actor lends its accelerators: a borrowing rank dies, env moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.language import tiny
from tests.e2e.test_faults import hurt
from tests.e2e.training import placed, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

LEND = "cluster.lend={actor: rollout}"
# Rank 0 of rollout is on 2; the actor lends 0 to rank 1.
LENT = 1


def test_a_borrowing_rank_that_dies_is_replaced(model: Path, tmp_path: Path) -> None:
    run = hurt(
        "disaggregated_grpo_llm",
        tmp_path,
        *tiny(model),
        *placed("0", "1", "2"),
        LEND,
        "rollout.seed=0",
        "runner.eval_every=0",
        "algorithm.kl_coef=0",
        "runner.total_iterations=4",
        faults=[("rollout", LENT, 2, None, "SIGKILL")],
    )
    assert run.code == 0, run.err
    (event,) = run.summary()["faults"]["events"]
    assert event["replaced"] == [f"rollout rank {LENT}"]
    assert event["went_back"] is False
    lines = run.metrics()
    assert [line["policy/version"] for line in lines] == [1, 2, 3, 4]
    assert {line["actor/samples"] for line in lines} == {32.0}


def test_workers_with_lent_ranks_stay_when_others_move(
    model: Path, tmp_path: Path
) -> None:
    run = train(
        "disaggregated_grpo_llm",
        tmp_path,
        *tiny(model),
        *placed("0", "1", "2"),
        LEND,
        "cluster.changes=[{after: 2, component_placement: {env: 3}}]",
        "runner.total_iterations=4",
        "runner.eval_every=2",
        "runner.eval_prompts=4",
    )
    assert run.code == 0, run.err
    assert [line["actor/samples"] for line in run.metrics()[1:]] == [32] * 4
    (change,) = run.summary()["changes"]
    assert sorted(change["stayed"]) == ["actor", "rollout"]
