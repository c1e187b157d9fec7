"""Env and rollout ranks of one process: env ranks call the policy, in their thread, and sample as through channels."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlplace.errors import ChannelBroken
from rlplace.metrics import Metrics
from rlplace.trajectory import Trajectory
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS
from rlplace.workers.engines.torch import TorchEngine
from rlplace.workers.roles.rollout import VectorRolloutWorker
from tests.e2e.training import INLINE, SHARED, placed, train
from tests.gyms import Script
from tests.rollout_stage import Layout, RolloutStage, env_block

STEPS, ROWS = 10, 12
PENDULUM = {"id": "InvertedPendulum-v5", "max_episode_steps": 8, "total_num_envs": ROWS}
CARTPOLE = {"id": "CartPole-v1", "max_episode_steps": 12, "total_num_envs": ROWS}
LEARNED = (
    "env/return",
    "env/steps",
    "actor/policy_loss",
    "actor/value_loss",
    "actor/grad_norm",
    "actor/entropy",
)


def sampled(layout: Layout, env: dict[str, object]) -> list[Trajectory]:
    """What all actor ranks are sent in three iterations, by row."""
    stage, pieces = RolloutStage(layout, env, steps=STEPS), []
    assert stage.job.routes.direct == layout.shared
    assert {OBSERVATIONS, ACTIONS}.isdisjoint(stage.channels) == layout.shared
    for iteration in range(3):
        stage.load(seed=iteration, version=iteration)
        stage.run(iteration)
        sent = [piece for rank in stage.trajectories().values() for piece in rank]
        pieces += sorted(sent, key=lambda piece: piece.first_row)
    stage.close()
    return pieces


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(stage_groups=2),
        Layout(env=2, rollout=2, actor=3, stage_groups=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("env", [PENDULUM, CARTPOLE], ids=["continuous", "discrete"])
def test_a_call_samples_the_bits_that_channels_give(
    layout: Layout, env: dict[str, object]
) -> None:
    ours, theirs = (
        sampled(dataclasses.replace(layout, shared=True), env),
        sampled(layout, env),
    )
    assert len(ours) == len(theirs)
    for called, sent in zip(ours, theirs, strict=True):
        for field in dataclasses.fields(Trajectory):
            one, other = (
                np.asarray(getattr(piece, field.name)) for piece in (called, sent)
            )
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes(), field.name


@pytest.mark.parametrize("groups", [1, 2])
def test_a_whole_run_learns_the_same_numbers(groups: int, tmp_path: Path) -> None:
    asked = (
        *INLINE,
        f"rollout.pipeline_stage_num={groups}",
        "runner.total_iterations=3",
        "runner.seed=5",
    )
    runs = [
        train("hybrid_ppo", tmp_path / name, *asked, *where)
        for name, where in (("called", SHARED), ("sent", placed("1", "0", "2")))
    ]
    assert [run.code for run in runs] == [0, 0], runs[0].err + runs[1].err
    one, other = (
        [[line.get(name) for name in LEARNED] for line in run.metrics()] for run in runs
    )
    assert one == other
    assert None not in one[0][2:]


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def stage() -> RolloutStage:
    return RolloutStage(
        Layout(shared=True), env_block("Script-v0", truncate_at=4), steps=STEPS
    )


def ends(stage: RolloutStage) -> tuple[BaseException | None, BaseException | None]:
    """How the env and the rollout rank of iteration 0 end, None where well."""
    calls: list[Callable[[int], Metrics]] = [
        stage.env[0].run,
        stage.rollout[0].generate,
    ]
    with ThreadPoolExecutor(2) as threads:
        env, rollout = (threads.submit(call, 0) for call in calls)
        return env.exception(20), rollout.exception(20)


def at_third(
    decide: Callable[..., Any], do: Callable[[], object]
) -> Callable[..., Any]:
    """`decide`, which does something else first when it is called for the third time."""
    calls = []

    def counting(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            do()
        return decide(*arguments)

    return counting


def fail() -> None:
    raise ValueError("a bug")


def test_a_failure_of_the_policy_is_the_rollout_ranks(
    stage: RolloutStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stage.rollout[0].engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "decide", at_third(engine.decide, fail))
        env, rollout = ends(stage)
    assert isinstance(env, ChannelBroken)
    assert env.problem.code == "cancelled"
    assert isinstance(rollout, ValueError)
    stage.env[0].begin_again(0)
    stage.rollout[0].begin_again(0)
    assert ends(stage) == (None, None), "nothing is left of the failure"
    stage.close()


def test_a_failure_of_the_simulator_is_the_env_ranks(
    stage: RolloutStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Script, "step", at_third(Script.step, fail))
        env, rollout = ends(stage)
    assert env is not None
    assert "a bug" in f"{env!r} {env.__cause__!r}"
    assert rollout is None
    stage.env[0].begin_again(0)
    assert ends(stage) == (None, None)
    stage.close()


@pytest.mark.parametrize("who", ["env", "rollout", "both"])
def test_who_is_cancelled_leaves_the_decision(
    stage: RolloutStage, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {
        "env": stage.env,
        "rollout": stage.rollout,
        "both": [*stage.env, *stage.rollout],
    }[who]

    def cancel() -> None:
        for worker in workers:
            worker.context.cancelled.set()

    decided: list[object] = []
    engine = stage.rollout[0].engine
    slow = at_third(engine.decide, cancel)
    monkeypatch.setattr(
        engine, "decide", lambda *arguments: decided.append(0) or slow(*arguments)
    )
    env, rollout = ends(stage)
    assert isinstance(env, ChannelBroken), "it has no samples of this iteration"
    assert (rollout is None) == (who != "rollout") or isinstance(rollout, ChannelBroken)
    assert len(decided) == 3
    stage.close()


@pytest.mark.parametrize("who", ["env", "rollout"])
def test_who_waits_for_the_other_can_be_cancelled(
    stage: RolloutStage, who: str
) -> None:
    worker = {"env": stage.env, "rollout": stage.rollout}[who][0]
    call = stage.env[0].run if who == "env" else stage.rollout[0].generate
    with ThreadPoolExecutor(1) as threads:
        alone = threads.submit(call, 0)
        time.sleep(0.05)
        assert not alone.done()
        worker.context.cancelled.set()
        assert isinstance(alone.exception(10), ChannelBroken)
    stage.close()


@pytest.mark.parametrize("component", ["env", "rollout"])
def test_a_run_names_the_rank_that_failed(
    component: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = (Script, "step") if component == "env" else (TorchEngine, "decide")
    monkeypatch.setattr(owner, name, at_third(getattr(owner, name), fail))
    run = train(
        "hybrid_ppo",
        tmp_path,
        *INLINE,
        *SHARED,
        "env.id=tests.gyms:Script-v0",
        "+env.kwargs.truncate_at=4",
        "runner.total_iterations=2",
    )
    assert run.code == 1
    other = {"env": "rollout", "rollout": "env"}[component]
    assert f"{component} rank 0" in run.err
    assert "a bug" in run.err
    assert f"{other} rank 0" not in run.err


def test_a_run_can_be_stopped_within_a_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, cancelled = VectorRolloutWorker._decide, []

    def stopping(self: VectorRolloutWorker, *arguments: Any) -> Any:
        signal.pthread_kill(
            threading.get_ident(), signal.SIGTERM
        )  # wakes no other thread
        cancelled.append(self.context.cancelled.wait(20))
        return decide(self, *arguments)

    monkeypatch.setattr(VectorRolloutWorker, "_decide", stopping)
    run = train("hybrid_ppo", tmp_path, *INLINE, *SHARED, "checkpoint.grace_s=4")
    assert run.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in run.err
    assert cancelled == [True], "nothing is decided after it"


# ── the thread ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_observations_that_may_not_be_written_do_not_warn(stage: RolloutStage) -> None:
    """Torch warns once in a process, of tensors that share memory with what may not be written."""
    for group in stage.env[0]._groups:
        group.observations.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ends(stage) == (None, None)
    finally:
        torch.set_warn_always(False)
    stage.close()


def test_the_policy_computes_with_one_thread_in_the_env_ranks_too(
    stage: RolloutStage,
) -> None:
    """How many threads compute is asked for in each thread; this one has asked for more."""

    def run() -> tuple[int, int]:
        torch.set_num_threads(2)
        before = torch.get_num_threads()
        stage.env[0].run(0)
        return before, torch.get_num_threads()

    with ThreadPoolExecutor(2) as threads:
        env, rollout = threads.submit(run), threads.submit(stage.rollout[0].generate, 0)
        assert env.result(20) == (2, 1)
        assert rollout.result(20)["rollout/batches"].value == STEPS
    stage.close()
