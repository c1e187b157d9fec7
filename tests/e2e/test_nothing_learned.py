"""Runs that learn nothing: refused where it is certain, else a warning on the screen and in the summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import language, training
from tests.e2e.training import train

SIMULATOR = (
    *training.INLINE,
    *training.placed("0", "0", "1"),
    "env.id=tests.gyms:Script-v0",
    "+env.kwargs.truncate_at=8",
    "runner.stop_at_return=null",
    "runner.total_iterations=2",
)


@pytest.mark.parametrize(
    ("overrides", "sign"),
    [
        (
            (
                "env.rewards=[{name: 'tests.odd_rewards:same_for_all'}]",
                # Some of the answers end before they are cut
                "rollout.stop=[a,e,i,o,u,t,n,s,r]",
                "rollout.seed=0",
            ),
            "equal-groups",
        ),
        pytest.param(
            (
                "env.rewards=[{name: 'tests.odd_rewards:same_for_all'}]",
                # No answer ends before it is cut
                "rollout.min_tokens=8",
            ),
            "all-cut",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equal_rewards_are_told(
    model: Path, tmp_path: Path, overrides: tuple[str, ...], sign: str
) -> None:
    job = (*language.INLINE, *language.tiny(model), *overrides)
    run = train("hybrid_grpo_llm", tmp_path, *job, "runner.total_iterations=3")
    assert run.code == 0, run.err
    assert [line["actor/grad_norm"] for line in run.metrics()] == [0, 0, 0]
    (warning,) = run.summary()["warnings"]
    assert (warning["sign"], warning["iteration"]) == (sign, 2)
    assert run.out.count("[learns-nothing]") == 1
    assert "\nwarning    in 2 iterations in a row" in run.out


@pytest.mark.parametrize("space", ["box", "wide"])
def test_actions_within_a_small_part_of_their_bounds_are_told(
    tmp_path: Path, space: str
) -> None:
    job = (*SIMULATOR, f"+env.kwargs.action_space={space}")
    run = train("hybrid_ppo", tmp_path, *job)
    assert run.code == 0, run.err
    used = [line["env/action_range"] for line in run.metrics()]
    signs = [warning["sign"] for warning in run.summary()["warnings"]]
    if space == "wide":
        assert 0 < max(used) < 0.01
        assert signs == ["narrow-actions"]
        assert "RescaleAction" in run.out
    else:
        assert min(used) > 0.5
        assert signs == []


@pytest.mark.parametrize(
    "override", ["algorithm.samples_per_prompt=1", "rollout.temperature=0"]
)
def test_what_cannot_learn_is_refused_by_a_dry_run(
    model: Path, tmp_path: Path, override: str
) -> None:
    job = (*language.INLINE, *language.tiny(model), override, "dry_run=true")
    run = train("hybrid_grpo_llm", tmp_path, *job)
    assert run.code == 2
    assert run.err.count("[learns-nothing]") == 1
