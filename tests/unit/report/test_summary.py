"""The end of a run in numbers and in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.comm.channel import ChannelSpec
from rlplace.comm.ends import LocalChannel
from rlplace.comm.watchdog import view
from rlplace.errors import ChannelTimeout
from rlplace.report.summary import (
    SIMULATED,
    TEXT,
    Measures,
    Progress,
    _elastic_rows,
    _predicted_rows,
    summary,
    summary_text,
    waits_of,
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_a_summary_says_who_waited_for_whom_in_each_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actions, idle = (
        LocalChannel(ChannelSpec(name=name, capacity_items=4))
        for name in ("actions", "idle")
    )
    for rank in (0, 1):
        actions.named(f"rollout rank {rank}").put("x", version=2)
    actions.named("rollout rank 1").put("newer", version=3)
    actions.named("env rank 0").get()
    with pytest.raises(ChannelTimeout):
        actions.named("env rank 1").get(key="never", timeout_s=0.001)
    waits = waits_of(view({"actions": actions, "idle": idle}))
    assert (waits["actions"]["producers"], waits["actions"]["consumers"]) == (
        ["rollout"],
        ["env"],
    )
    assert (
        waits["actions"]["consumer_wait_s"] > 0 == waits["actions"]["producer_wait_s"]
    )
    assert (waits["actions"]["items"], waits["actions"]["staleness_max"]) == (3, 1)
    waits["actions"] |= {"consumer_wait_s": 12.34, "producer_wait_s": 0.5}
    report = summary(
        Progress(measures=SIMULATED, began=0.0), Path("runs/" + "x" * 90)
    ) | {"waits": waits}
    text = summary_text(report)
    assert (
        "waited     actions: env 12.3 s for rollout, rollout 0.5 s for env   summed over ranks"
        in text
    )
    monkeypatch.setenv("COLUMNS", "60")
    narrow = summary_text(report)
    assert [line for line in narrow.splitlines() if len(line) > 60] == [
        f"files      {report['folder']}"
    ]
    assert narrow.split() == text.split()
    assert "idle" not in text


def iteration(reward: float, **more: float) -> dict[str, float]:
    stages = {
        "time/rollout_s": 2.0,
        "time/learn_s": 3.0,
        "time/iteration_s": 6.0,
        "time/overhead_s": 1.5,
    }
    return {
        "actor/reward": reward,
        "rollout/tokens": 100.0,
        "actor/tokens_learned": 90.0,
        **stages,
        **more,
    }


def test_rewards_held_out_prompts_and_tokens_are_summed_up() -> None:
    progress = Progress(measures=TEXT, began=0.0, start_s=4.0)
    progress.add_evaluation({"eval/reward": 0.05, "time/evaluate_s": 1.0}, version=0)
    progress.add(iteration(0.1, **{"eval/reward": 0.3}), 64)
    progress.add(iteration(0.4), 64)
    progress.add_evaluation({"eval/reward": 0.5, "time/evaluate_s": 1.0}, version=2)
    report = summary(progress, Path("runs/x"))
    assert (report["return_first"], report["return_last"]) == (0.1, 0.4)
    assert report["evaluations"] == {"0": 0.05, "2": 0.5}
    assert (
        report["tokens_generated"],
        report["tokens_learned"],
        report["iterations"],
    ) == (200, 180, 2)
    assert report["seconds"]["evaluate"] == 2.0
    assert report["overhead_share"] == 3.0 / 14.0
    text = summary_text(report)
    assert "reward     0.100 -> 0.400" in text
    assert (
        "held out   0.050 -> 0.500   (mean reward of the answers, after 0 and 2 iterations)"
        in text
    )
    assert (
        "200 generated, 50 per second; 180 learned, 30 per second; 2 iterations" in text
    )
    assert "rollout 4.0, learn 6.0, evaluate 2.0" in text


def test_a_busy_machine_is_named_beside_what_was_predicted_and_measured() -> None:
    seconds = {"iteration": {"predicted": 0.29, "measured": 0.567}}
    told = []
    for others in (0.63, None):
        predicted = {"from": "this run's own profile", "seconds": seconds}
        rows = _predicted_rows(predicted | {"others": others})
        told.append("\n".join(text for _, text in rows))
    assert told[0].startswith(told[1])
    assert "iteration 0.29 (0.567)" in told[1]
    assert "other processes" not in told[1]
    assert "other processes used 63% of this machine's processors" in told[0]


def test_decisions_about_the_placement_are_told_and_repeated_advice_once() -> None:
    moves = {"moved": {"env": ["0-3", "0-7"]}, "why": "for a test"}
    seconds = {"measured": {"before": 1.2}, "expected_s": 0.84}
    advice = {"decision": "advise", "words": "env=0-7", **moves, **seconds}
    elastic = {
        "searches": 3,
        "search_s": 4.56,
        "stayed": "no other placement is predicted to be faster",
        "failed": None,
        "events": [],
    }
    assert list(_elastic_rows({})) == []
    (stays,) = _elastic_rows(elastic)
    assert stays == (
        "elastic",
        "3 searches beside the run, 4.6 s; no other placement is predicted to be faster",
    )
    events = [
        {"iteration": 10, **advice},
        {"iteration": 20, **advice},
        {"iteration": 30, **moves, **seconds, "decision": "change"},
        {"iteration": 39, **moves, "decision": "back"},
    ]
    rows = _elastic_rows({**elastic, "events": events, "failed": "it took too long"})
    assert [text for _, text in rows] == [
        "3 searches beside the run, 4.6 s; the last failure: it took too long",
        "after 20: advise: env 0-3 -> 0-7; 1.2 s -> 0.84 s predicted; env=0-7",
        "after 30: change: env 0-3 -> 0-7; 1.2 s -> 0.84 s predicted",
        "after 39: back: for a test",
    ]


def test_a_run_that_never_learned_has_no_lines_about_it() -> None:
    text = summary_text(summary(Progress(measures=TEXT, began=0.0), Path("runs/x")))
    assert "reward     none -> none" in text
    assert not {"held out", "waited", "memory", "at work"} & {
        line[:11].strip() for line in text.splitlines()
    }


@pytest.mark.parametrize(
    ("goal", "reached"), [(None, False), (0.4, True), (0.41, False)]
)
def test_the_last_iteration_decides_whether_the_goal_is_reached(
    goal: float | None, reached: bool
) -> None:
    progress = Progress(measures=TEXT, began=0.0)
    assert not progress.reached(goal)
    progress.add(iteration(0.9), 64)
    progress.add(iteration(0.4), 64)
    assert progress.reached(goal) == reached


def episodes(score: float, number: float) -> dict[str, float]:
    return {
        "env/return": score,
        "env/episodes": number,
        "time/iteration_s": 1.0,
        "time/overhead_s": 0.0,
    }


def test_the_first_episodes_to_end_are_no_score() -> None:
    """Those that end early are not typical: a score is of a full window of 100."""
    progress = Progress(measures=SIMULATED, began=0.0)
    progress.add(episodes(-0.5, 3.0), 64)
    assert progress.score is None
    assert progress.mean_return == -0.5
    progress.add(episodes(-10.0, 97.0), 64)
    assert progress.score == progress.mean_return
    assert progress.score == pytest.approx(-9.715)


def test_a_score_is_of_the_evaluation_of_the_same_version() -> None:
    progress = Progress(measures=TEXT, began=0.0)
    progress.add_evaluation({"eval/reward": 0.9}, version=0)
    progress.add(iteration(0.1), 64)
    assert progress.score is None
    progress.add(iteration(0.1), 64)
    progress.add_evaluation({"eval/reward": 0.5}, version=2)
    assert progress.score == 0.5
    assert progress.best_version == 0
    assert progress.evaluations_without_gain() == 1
    assert progress.reached_eval(0.5)
    assert not progress.reached_eval(0.6)
    assert not progress.reached_eval(None)
    # No answer has a reward.
    progress.add_evaluation({}, version=3)
    assert progress.evaluations_without_gain() == 2
    assert not progress.reached_eval(0.0)
    report = summary(progress, Path("runs/x"))
    assert report["evaluations"] == {"0": 0.9, "2": 0.5, "3": None}
    assert (report["eval_best"], report["eval_best_version"]) == (0.9, 0)


def test_a_run_that_goes_back_counts_nothing_twice_however_often() -> None:
    progress = Progress(measures=TEXT, began=0.0)
    poisoned, notes = (
        {"actor/poisoned": 2.0},
        {"actor/poisoned": ["sample 1 of prompt 3", "sample 2 of prompt 3"]},
    )
    before = progress.state()
    for _ in range(3):
        progress.go_back(before)
        progress.add_evaluation({"eval/reward": 0.05}, version=0)
        progress.add(iteration(0.1, **poisoned), 64)
        progress.add_skipped(poisoned, notes, iteration=0)
    report = summary(progress, Path("runs/x"))
    assert (report["iterations"], report["tokens_generated"], report["train_s"]) == (
        1,
        100,
        6.0,
    )
    assert report["skipped"]["counts"] == {"actor/poisoned": 2}
    assert [event["what"] for event in report["skipped"]["events"]] == notes[
        "actor/poisoned"
    ]
    assert "skipped    actor/poisoned 2" in summary_text(report)


def test_the_seconds_of_a_custom_job_are_those_of_its_stages() -> None:
    measures = Measures(score="", steps="iterations")
    progress = Progress(measures=measures, began=0.0)
    numbers = {
        "time/moves_s": 0.1,
        "time/send_weights_s": 0.2,
        "time/send_s": 0.5,
        "time/play_2_s": 1.0,
        "time/iteration_s": 2.0,
        "time/overhead_s": 0.1,
        "time/start_cluster_s": 3.0,
    }
    progress.add(numbers, 1)
    report = summary(progress, Path("runs/x")) | {"stages": ["play 2", "send"]}
    text = summary_text(report)
    assert "training 2.0 (play 2 1.0, send weights 0.2, send 0.5, moves 0.1)" in text


def test_what_was_learned_comes_before_the_seconds() -> None:
    progress = Progress(measures=TEXT, began=0.0)
    progress.add(iteration(0.1, **{"actor/entropy": 1.5, "actor/grad_norm": 2.0}), 64)
    progress.add(iteration(0.2, **{"actor/entropy": 1.25}), 64)
    saved = json.loads(json.dumps(progress.state()))
    progress.add(iteration(0.3, **{"actor/entropy": 0.75}), 64)
    report = summary(progress, Path("runs/x"))
    assert report["learned"] == {
        "actor/entropy": [1.5, 0.75],
        "actor/grad_norm": [2.0, 2.0],
    }
    report["warnings"] = [{"text": "nothing is learned"}]
    heads = [line.split()[0] for line in summary_text(report).splitlines() if line]
    assert heads[:5] == ["reward", "tokens", "learning", "warning", "seconds"]
    line = "learning   entropy 1.50 -> 0.75, gradient norm 2 -> 2   (first, last iteration)"
    assert line in summary_text(report)
    # A run that goes on from a checkpoint keeps the first values.
    resumed = Progress(measures=TEXT, began=0.0)
    resumed.resume(saved)
    resumed.add(iteration(0.3, **{"actor/entropy": 0.5}), 64)
    assert resumed.learned["actor/entropy"] == [1.5, 0.5]
