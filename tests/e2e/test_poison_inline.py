"""Whole runs in which numbers are not finite: they stop and say where, or learn nothing from these and go on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e import language, training
from tests.e2e.training import train

SIMULATOR = (
    *training.INLINE,
    *training.placed("0", "0", "1"),
    "env.id=tests.gyms:Poisoned-v0",
)
SKIP = "faults.on_poison=skip"
WEIGHTS_AND_LOSSES = (
    "actor/policy_loss",
    "actor/value_loss",
    "actor/grad_norm",
    "actor/explained_variance",
)
THIRD = "tests.odd_rewards:not_a_number_for_a_third"


@pytest.mark.parametrize("what", ["reward", "observation"])
def test_a_simulator(tmp_path: Path, what: str) -> None:
    poisoned = (
        *SIMULATOR,
        f"+env.kwargs.what={what}",
        "+env.kwargs.at=5",
        "runner.total_iterations=3",
    )
    stopped = train("hybrid_ppo", tmp_path / "stop", *poisoned)
    assert stopped.code == 1
    assert (
        "step 4 of iteration 1 of tests.gyms:Poisoned-v0 in row 0 is not finite"
        in stopped.err
    )
    assert "[simulator-not-finite]" in stopped.err
    run = train(
        "hybrid_ppo",
        tmp_path / "skip",
        *poisoned,
        SKIP,
        "algorithm.normalize_rewards=true",
    )
    assert run.code == 0, run.err
    first, *others = run.metrics()
    assert first["env/poisoned"] == 16
    skipped = run.summary()["skipped"]
    assert skipped["counts"] == {"env/poisoned": 16}
    assert {(event["iteration"], event["metric"]) for event in skipped["events"]} == {
        (1, "env/poisoned")
    }
    assert len({event["what"] for event in skipped["events"]}) == 16, (
        "each row is named"
    )
    assert (
        "env rank 0: step 4 of iteration 1 of tests.gyms:Poisoned-v0 in row 3 is"
        in skipped["events"][3]["what"]
    )
    assert "skipped    env/poisoned 16" in run.out
    assert not any("env/poisoned" in line for line in others), (
        "only the first episode is"
    )
    for line in run.metrics():
        assert all(math.isfinite(line[name]) for name in WEIGHTS_AND_LOSSES), line
        assert line["env/return"] == 21, "of whole episodes"


def test_skipping_changes_nothing_where_nothing_is_poisoned(tmp_path: Path) -> None:
    asked = (
        *training.INLINE,
        *training.placed("0", "0", "1"),
        "runner.total_iterations=2",
    )
    runs = [
        train("hybrid_ppo", tmp_path / word, *asked, f"faults.on_poison={word}")
        for word in ("stop", "skip")
    ]
    one, other = (
        [{name: line[name] for name in WEIGHTS_AND_LOSSES} for line in run.metrics()]
        for run in runs
    )
    assert one == other


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_reward_function(model: Path, tmp_path: Path, ahead: int) -> None:
    asked = (
        *language.INLINE,
        *language.tiny(model),
        f"env.rewards=[{{name: {THIRD}}}]",
        "rollout.seed=0",
    )
    where = language.placed("0", "1", "2") if ahead else ()
    steps = (
        (f"algorithm.max_staleness={ahead}", "algorithm.train_batch=16")
        if ahead
        else ()
    )
    once = ("runner.total_iterations=2", "runner.eval_every=1", "runner.eval_prompts=4")
    stopped = train(
        "disaggregated_grpo_llm", tmp_path / "stop", *asked, *where, *steps, *once
    )
    assert stopped.code == 1
    assert "[reward-not-finite]" in stopped.err
    run = train(
        "disaggregated_grpo_llm", tmp_path / "skip", *asked, *where, *steps, *once, SKIP
    )
    assert run.code == 0, run.err
    for line in run.metrics()[1:]:
        assert (
            0
            < line["actor/poisoned"]
            == line["rollout/answers"] - line["actor/samples"]
        )
        assert math.isfinite(
            line["actor/reward"] + line["actor/grad_norm"] + line["env/reward"]
        )
        assert line["env/episodes"] == line["actor/samples"]
    skipped = run.summary()["skipped"]
    assert skipped["counts"] == {
        "actor/poisoned": sum(line["actor/poisoned"] for line in run.metrics()[1:])
    }
    assert len(skipped["events"]) == skipped["counts"]["actor/poisoned"]
    assert all(
        "actor rank 0: sample " in event["what"] and " of prompt " in event["what"]
        for event in skipped["events"]
    )


def test_a_component_that_scores_beside_a_critic(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    small = (
        "cluster.launcher=inline",
        "cluster.component_placement.reward=cpu",
        "runner.total_iterations=2",
    )
    everybody = [
        f"cluster.component_placement.{name}=0"
        for name in ("actor", "critic", "reference", "rollout", "env")
    ]
    asked = (
        *small,
        *everybody,
        f"reward.function={THIRD}",
        models[0],
        "critic.warmup_iterations=0",
    )
    run = train("rlhf_tiny", tmp_path, *asked, SKIP)
    assert run.code == 0, run.err
    for line in run.metrics():
        assert (
            0
            < line["actor/poisoned"]
            == line["rollout/answers"] - line["actor/samples"]
        )
        numbers = (
            "actor/reward",
            "actor/grad_norm",
            "critic/value_loss",
            "critic/grad_norm",
            "critic/return",
        )
        assert all(math.isfinite(line[name]) for name in numbers), line
