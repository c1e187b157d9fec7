"""Runs whose rows are the agents of parallel environments."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.training import INLINE, placed, train

PUSHING = (
    *INLINE,
    *placed("0", "0", "1"),
    "env.kind=pettingzoo",
    "env.id=tests.parallel_envs:Pushing",
    "env.total_num_envs=8",
    "rollout.pipeline_stage_num=2",
    "algorithm.rollout_steps=20",
    "actor.optimizer.lr=1e-2",
    "runner.stop_at_return=null",
)


def test_agents_learn_with_one_policy(tmp_path: Path) -> None:
    more = ("runner.total_iterations=30", "+runner.eval_every=30")
    run = train("hybrid_ppo", tmp_path, *PUSHING, *more)
    assert run.code == 0, run.err
    lines = run.metrics()
    # Each of 8 agents has one episode of 20 steps in an iteration
    assert [line["env/episodes"] for line in lines[1:]] == [8] * 30
    # A random agent is right in a third of the steps; each agent has an action of its own to learn
    assert lines[1]["env/return"] < 12
    assert lines[-1]["env/return"] > lines[1]["env/return"] + 3
    assert lines[-1]["eval/return"] > lines[0]["eval/return"]


def test_rows_that_are_no_whole_environments_are_refused(tmp_path: Path) -> None:
    run = train(
        "hybrid_ppo", tmp_path, *PUSHING, "env.total_num_envs=6", "dry_run=true"
    )
    assert run.code == 2
    assert "[agents-misfit]" in run.err
    assert "fix: env.total_num_envs=8" in run.err
