"""Workers that die or stand still in a run: they are replaced, and the run ends with the samples it would have had."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.workers.roles.prompts import Prompts
from tests.e2e.recorded import of_prompt, read
from tests.e2e.training import (
    INLINE_LAUNCHER,
    LIMIT_S,
    ROOT,
    SHARED,
    SMALL,
    Finished,
    finish,
    placed,
    train,
)

pytestmark = pytest.mark.ray

SIMULATED = (
    "cluster.accelerators_per_node=4",
    "cluster.accelerator.kind=emulated",
    "env.total_num_envs=16",
    "algorithm.rollout_steps=256",
    "algorithm.epochs=2",
)
TEXT = (
    "cluster.accelerators_per_node=4",
    "algorithm.prompts=8",
    "algorithm.max_new_tokens=24",
    "critic.warmup_iterations=0",
    *placed("0", "0", "0-1"),
    "cluster.component_placement.critic=1",
    "cluster.component_placement.reference=2",
    "cluster.component_placement.reward=3",
)
APART = (
    *TEXT[:4],
    *placed("0", "1", "1"),
    *(
        f"cluster.component_placement.{name}"
        for name in ("critic=2", "reference=2", "reward=3")
    ),
)
# Component, rank, iteration, seconds after it began (None: before its work there can end), signal
Hurt = tuple[str, int, int, float | None, str]


def hurt(
    config: str, output: Path, *overrides: str, faults: Sequence[Hurt]
) -> Finished:
    asked = {
        "config": config,
        "overrides": [f"runner.output_dir={output}", *overrides],
        "faults": faults,
    }
    command = [sys.executable, "-u", "-m", "tests.e2e.faulty_run", json.dumps(asked)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run = finish(process, output, limit_s=LIMIT_S + 15.0 * len(faults))
    assert run.out.count("sent SIG") == len(faults), run.out + run.err
    return run


def test_workers_that_are_replaced_lose_no_sample(tmp_path: Path) -> None:
    """Not even a number changes: episodes go on from where the iteration began, and the first began them all.

    The actor goes back to a checkpoint, and all others with it.
    """
    short = (
        "runner.total_iterations=4",
        "checkpoint.every=1",
        "algorithm.rollout_steps=128",
    )
    where = placed("0", "0", "1")
    faults = [
        ("env", 0, 0, None, "SIGKILL"),
        ("rollout", 0, 2, None, "SIGKILL"),
        ("actor", 0, 3, None, "SIGKILL"),
    ]
    run = hurt(
        "hybrid_ppo", tmp_path / "hurt", *SIMULATED, *where, *short, faults=faults
    )
    whole = train(
        "hybrid_ppo", tmp_path / "whole", *SIMULATED, *where, *short, INLINE_LAUNCHER
    )
    assert run.code == whole.code == 0, run.err + whole.err
    lines = run.metrics()
    assert (
        [line["env/steps"] for line in lines]
        == [line["actor/samples"] for line in lines]
        == [2048.0] * 4
    )
    assert [line["faults/restarts"] for line in lines if "faults/restarts" in line] == [
        1.0,
        1.0,
        1.0,
    ]
    assert not any(line.get("env/episodes_cut") for line in lines)
    for number in ("env/return", "actor/entropy", "actor/grad_norm"):
        assert [line[number] for line in lines] == [
            line[number] for line in whole.metrics()
        ]
    recorded = run.summary()["faults"]
    replaced = [["env rank 0"], ["rollout rank 0"], ["actor rank 0"]]
    assert [event["replaced"] for event in recorded["events"]] == replaced
    assert [event["went_back"] for event in recorded["events"]] == [False, False, True]
    assert "continues after iteration 3" in run.out
    assert 0 < recorded["effective_share"] < 1
    assert (
        "fault in rollout of iteration 1: env rank 0 in run: the worker process died"
        in run.out
    )


@pytest.mark.slow  # the way of the test above, on an accelerator with room for one
def test_others_leave_the_accelerator_on_which_a_rank_is_set_up_again(
    tmp_path: Path,
) -> None:
    """Env is whole there when the actor, which has to be set up, turns out to be gone: it has no room beside env."""
    size = 64 << 20
    turns = [f"{name}.enable_offload=true" for name in ("actor", "env", "rollout")]
    tight = (
        f"cluster.accelerator.memory={size}",
        f"env.accelerator_memory={size - 700_000}",
        "memory.reserve=0 %",
    )
    where = (
        "cluster.accelerators_per_node=1",
        "cluster.accelerator.kind=emulated",
        *placed("0", "0", "0"),
    )
    short = (
        "algorithm.rollout_steps=1024",
        "algorithm.epochs=1",
        "runner.total_iterations=4",
        "checkpoint.every=1",
    )
    sizes = (
        "actor.model.hidden=[256,256]",
        "env.total_num_envs=8",
        "rollout.workspace_memory=0",
    )
    # In the third iteration: the first checkpoint is whole then, since the second one has waited for it. A rank that is
    # killed while it writes the only checkpoint takes the run back to its start, and env with it.
    faults = [("actor", 0, 2, 0.1, "SIGKILL"), ("rollout", 0, 2, 0.3, "SIGKILL")]
    run = hurt(
        "collocated_ppo",
        tmp_path,
        *where,
        *tight,
        *turns,
        *short,
        *sizes,
        faults=faults,
    )
    assert run.code == 0, run.err
    # One event, unless it is slow to be found that the actor is gone.
    events = run.summary()["faults"]["events"]
    assert {owner for event in events for owner in event["replaced"]} == {
        "actor rank 0",
        "rollout rank 0",
    }


@pytest.mark.slow
def test_a_process_killed_while_its_env_rank_decides_loses_no_sample(
    tmp_path: Path,
) -> None:
    """Its ranks call each other; what they sample is what ranks that nothing happens to sample through channels."""
    once = tmp_path / "killed"
    asked = (
        *SMALL,
        "env.id=tests.gyms:Killer-v0",
        f"+env.kwargs.once={once}",
        "runner.total_iterations=3",
    )
    run = train("hybrid_ppo", tmp_path / "hurt", *asked, *SHARED)
    assert once.exists()
    whole = train(
        "hybrid_ppo",
        tmp_path / "whole",
        *asked,
        *placed("1", "0", "2"),
        INLINE_LAUNCHER,
    )
    assert run.code == whole.code == 0, run.err + whole.err
    (event,) = run.summary()["faults"]["events"]
    assert "of iteration 1: " in run.out
    assert sorted(event["replaced"]) == ["env rank 0", "rollout rank 0"]
    for ours, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        assert ours["env/steps"] == ours["actor/samples"] == 256.0
        for number in (
            "env/return",
            "actor/entropy",
            "actor/value_loss",
            "actor/grad_norm",
        ):
            assert ours[number] == theirs[number], number


@pytest.mark.slow
def test_a_language_model_learns_from_the_same_answers(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    short = ("runner.total_iterations=3", *models)
    faults = [
        ("rollout", 1, 0, 0.1, "SIGKILL"),
        ("env", 0, 1, 0.05, "SIGKILL"),
        ("reward", 0, 1, 0.05, "SIGKILL"),
    ]
    run = hurt("rlhf_tiny", tmp_path / "hurt", *TEXT, *short, faults=faults)
    whole = train("rlhf_tiny", tmp_path / "whole", *TEXT, *short, INLINE_LAUNCHER)
    assert run.code == 0, run.err
    assert whole.code == 0, whole.err
    same_curve(run, whole, faulty=2)


def same_curve(run: Finished, whole: Finished, faulty: int) -> None:
    """The first `faulty` iterations have the same answers, whose sums are rounded as their batches come.

    With weights that were rounded otherwise, a later one may draw another token here and there.
    """
    for index, (ours, theirs) in enumerate(
        zip(run.metrics(), whole.metrics(), strict=True)
    ):
        assert ours["actor/samples"] == 64.0
        for number in (
            "actor/reward",
            "actor/tokens_learned",
            "actor/grad_norm",
            "critic/value",
        ):
            near = pytest.approx(
                theirs[number], rel=1e-3 if index < faulty else 1e-2, abs=1e-5
            )
            assert ours[number] == near, number


@pytest.mark.slow
def test_without_a_checkpoint_what_trains_starts_again(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    short = ("runner.total_iterations=2", "checkpoint.every=0", *models)
    run = hurt(
        "rlhf_tiny",
        tmp_path / "hurt",
        *TEXT,
        *short,
        faults=[("critic", 0, 1, 0.1, "SIGKILL")],
    )
    whole = train("rlhf_tiny", tmp_path / "whole", *TEXT, *short, INLINE_LAUNCHER)
    assert run.code == whole.code == 0, run.err + whole.err
    assert "continues after iteration 0" in run.out
    (event,) = run.summary()["faults"]["events"]
    assert set(event["replaced"]) == {"actor rank 0", "critic rank 0"}
    assert event["redone_s"] > run.metrics()[0]["time/iteration_s"] / 2
    same_curve(run, whole, faulty=2)


@pytest.mark.slow
def test_what_runs_ahead_goes_back_with_all_others(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    ahead = (
        "+algorithm.max_staleness=1",
        "checkpoint.every=2",
        "runner.total_iterations=7",
        *models,
    )
    faults = [
        ("rollout", 0, 2, 0.1, "SIGKILL"),
        ("env", 0, 4, 0.1, "SIGKILL"),
        ("actor", 0, 5, 0.1, "SIGKILL"),
    ]
    run = hurt("rlhf_tiny", tmp_path, *APART, *ahead, faults=faults)
    assert run.code == 0, run.err
    lines = run.metrics()
    assert [line["policy/version"] for line in lines] == list(range(1, 8))
    assert {line["actor/samples"] for line in lines} == {64.0}
    assert max(line["actor/age_max"] for line in lines) <= 1
    events = run.summary()["faults"]["events"]
    assert [event["went_back"] for event in events] == [True] * 3
    assert "groups that were generated ahead are learned next" in run.out


MOMENTS = 20
NUMBERED = (*SIMULATED, *placed("0-1", "0-1", "2-3"), "env.id=tests.gyms:Numbered-v0")
KINDS = {
    "env": ("hybrid_ppo", NUMBERED, 2),
    "rollout": ("hybrid_ppo", NUMBERED, 2),
    "actor": ("hybrid_ppo", NUMBERED, 2),
    "text actor": ("rlhf_tiny", TEXT, 1),
    "critic": ("rlhf_tiny", TEXT, 1),
    "text env": ("rlhf_tiny", TEXT, 1),
    "text rollout": ("rlhf_tiny", TEXT, 2),
    "reference": ("rlhf_tiny", TEXT, 1),
    "reward": ("rlhf_tiny", TEXT, 1),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_worker_may_be_killed_at_any_moment(
    kind: str, models: tuple[str, ...], tmp_path: Path
) -> None:
    """The actor writes down the ids of what it learns: none is missing and none is there twice."""
    config, overrides, ranks = KINDS[kind]
    moments, component = random.Random(kind), kind.rpartition(" ")[2]
    within_s = (
        1.2 if config == "hybrid_ppo" else 0.25
    )  # about an iteration: later ones would meet the next ones
    faults = [
        (
            component,
            moments.randrange(ranks),
            at + 1,
            round(moments.uniform(0.0, within_s), 3),
            "SIGKILL",
        )
        for at in range(MOMENTS)
    ]
    lasting = (
        f"runner.total_iterations={MOMENTS + 3}",
        "faults.restarts=100",
        "checkpoint.every=2",
    )
    run = hurt(
        config,
        tmp_path,
        *overrides,
        *lasting,
        *(models if config == "rlhf_tiny" else ()),
        faults=faults,
    )
    assert run.code == 0, run.err
    lines = run.metrics()
    assert [line["policy/version"] for line in lines] == list(range(1, MOMENTS + 4))
    assert {line["actor/samples"] for line in lines} == {
        4096.0 if config == "hybrid_ppo" else 64.0
    }
    learned = read(tmp_path)
    if config == "hybrid_ppo":
        check_steps(learned, cut=sum(line.get("env/episodes_cut", 0) for line in lines))
    else:
        assert run.folder is not None
        check_answers(
            learned,
            read_config(
                yaml.safe_load((run.folder / "config.yaml").read_text(encoding="utf-8"))
            ),
        )
    events = run.summary()["faults"]["events"]
    assert all(event["recovery_s"] < 60 for event in events)
    print(kind, [round(event["recovery_s"], 1) for event in events])


def check_steps(learned: list[dict[str, Any]], cut: float) -> None:
    """Each row has 256 steps of each iteration, each the next of its episode, but where a new worker begins anew."""
    assert [(line["iteration"], line["rank"]) for line in learned] == [
        *itertools.product(range(MOMENTS + 3), range(2))
    ]
    breaks = 0
    for rank in range(2):
        parts = [np.array(line["ids"]) for line in learned if line["rank"] == rank]
        assert {part.shape for part in parts} == {(256, 8, 3)}
        episode, step, luck = np.concatenate(parts).transpose(
            2, 1, 0
        )  # each [row, step of the run]
        goes_on = (np.diff(step) == 1) & (np.diff(episode) == 0) & (np.diff(luck) == 0)
        goes_on |= (step[:, 1:] == 0) & (step[:, :-1] == 39) & (np.diff(episode) == 1)
        rows, places = np.nonzero(~goes_on)
        assert not ((places + 1) % 256).any(), "within an iteration, nothing is cut"
        assert not step[rows, places + 1].any()
        breaks += len(rows)
        for row in zip(episode, step, luck, strict=True):
            assert (
                len({*zip(*map(np.ndarray.tolist, row), strict=True)}) == step.shape[1]
            ), "no step is learned twice"
    assert breaks == cut


def check_answers(learned: list[dict[str, Any]], config: Config) -> None:
    """Each iteration has 8 samples of each of its 8 prompts, whose numbers go on from iteration to iteration."""
    assert [line["iteration"] for line in learned] == [*range(MOMENTS + 3)]
    prompts = Prompts(config, Path(config.actor.model["path"]), "train")
    for line in learned:
        asked = [
            of_prompt(prompts.episodes(8 * line["iteration"] + group, 1)[0])
            for group in range(8)
        ]
        expected = [
            [group, sample, asked[group]]
            for group, sample in itertools.product(range(8), range(8))
        ]
        assert line["ids"] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("component", "limit"),
    [("env", "runner.channel_timeout_s=5"), ("rollout", "runner.stage_timeout_s=15")],
)
def test_a_worker_that_stands_still_is_replaced_when_it_is_late(
    component: str, limit: str, tmp_path: Path
) -> None:
    limits = (limit, "runner.total_iterations=3")
    faults = [(component, 0, 1, 0.4, "SIGSTOP")]
    run = hurt(
        "hybrid_ppo",
        tmp_path,
        *SIMULATED,
        *placed("0-1", "0-1", "2-3"),
        *limits,
        faults=faults,
    )
    assert run.code == 0, run.err
    assert f"{component} rank 0 stood still" in run.out
    assert {line["actor/samples"] for line in run.metrics()} == {4096.0}


@pytest.mark.slow
def test_a_worker_that_answers_nothing_is_replaced_long_before_it_is_late(
    tmp_path: Path,
) -> None:
    """What limits a stage and a channel here is longer than the test may take."""
    limits = (
        "faults.heartbeat_s=5",
        "runner.stage_timeout_s=900",
        "runner.channel_timeout_s=900",
    )
    faults = [("env", 0, 1, 0.4, "SIGSTOP"), ("rollout", 1, 2, 0.4, "SIGSTOP")]
    longer = (
        "algorithm.rollout_steps=1024"  # so that both are at work when they are stopped
    )
    where = placed("0-1", "0-1", "2-3")
    run = hurt(
        "hybrid_ppo",
        tmp_path,
        *SIMULATED,
        *where,
        *limits,
        "runner.total_iterations=4",
        longer,
        faults=faults,
    )
    assert run.code == 0, run.err
    assert {line["actor/samples"] for line in run.metrics()} == {16384.0}
    events = run.summary()["faults"]["events"]
    assert [event["what"] for event in events] == [
        "env rank 0 in run",
        "rollout rank 1 in generate",
    ]
    assert all(
        event["why"].startswith("has not answered for 5 s, since") for event in events
    )
    assert [event["replaced"] for event in events] == [
        ["env rank 0"],
        ["rollout rank 1"],
    ]


@pytest.mark.slow
def test_an_error_that_comes_again_ends_the_run(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    asked = (
        "env.rewards=[{name: tests.odd_rewards:raises_of_wrong_answers}]",
        "runner.total_iterations=2",
    )
    run = train("rlhf_tiny", tmp_path, *TEXT, *asked, *models)
    assert run.code == 1
    assert run.out.count("fault in rollout of iteration 1") == 1
    assert "the same again after iteration 1 was begun anew" in run.err


@pytest.mark.slow
def test_more_faults_than_are_allowed_end_the_run(tmp_path: Path) -> None:
    faults = [("env", 0, 1, None, "SIGKILL"), ("env", 1, 2, None, "SIGKILL")]
    allowed = ("faults.restarts=1", "runner.total_iterations=4")
    run = hurt(
        "hybrid_ppo",
        tmp_path,
        *SIMULATED,
        *placed("0-1", "0-1", "2-3"),
        *allowed,
        faults=faults,
    )
    assert run.code == 1
    assert "after 1 restart within an hour; faults.restarts: 1" in run.err
    assert [len(line) > 0 for line in run.metrics()] == [True, True]
