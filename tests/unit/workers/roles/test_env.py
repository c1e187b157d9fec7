"""The env worker alone: every answer is put before `run` begins, so the test is the only thread."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rlplace.comm.ends import LocalChannel
from rlplace.envs.registry import own_global_numbers, seed_global_numbers
from rlplace.errors import ChannelBroken, ChannelMisuse, NotResident, SimulatorError
from rlplace.metrics import Metrics
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation, Trajectory
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS, TRAJECTORIES
from rlplace.workers.roles.env import VectorEnvWorker
from tests.rollout_stage import (
    Layout,
    Ledger,
    channels_of,
    context_of,
    env_block,
    plan_of,
)


class OneEnvRank:
    """One env worker of a job of 12 environments, with the far ends of its channels."""

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        steps: int = 3,
        env: dict[str, object] | None = None,
        on_poison: str = "stop",
    ) -> None:
        self.plan, self.job = plan_of(
            layout, env or env_block("Script-v0"), steps, on_poison=on_poison
        )
        self.channels: dict[str, LocalChannel] = channels_of(
            self.plan, capacity_items=1000
        )
        self.worker = VectorEnvWorker(
            self.job, context_of(self.plan, "env", rank, self.channels)
        )
        self.rank, self.steps, self.groups = rank, steps, layout.stage_groups
        self.worker.setup()
        self.worker.move(Residency.FULL)

    @property
    def held(self) -> dict[str, int]:
        assert isinstance(self.worker.context.device, Ledger)
        return self.worker.context.device.held

    def pieces(self, group: int) -> Iterator[tuple[int, int]]:
        """(first row, rows) of each answer a step of the group waits for."""
        rows = 12 // self.worker.context.world_size // self.groups
        for share in self.job.routes.observations.sends(self.rank):
            first = (
                (self.rank * self.groups + group) * rows
                + share.start
                - self.rank * rows
            )
            yield first, share.stop - share.start

    def answer(self, *, version: int = 0, newest_first: bool = False) -> None:
        """Answers all steps. Action of a row: (row + step) % 3; value: the row; log-probability: minus the step."""
        for group in range(self.groups):
            for step in range(self.steps):
                pieces = list(self.pieces(group))
                for first, rows in reversed(pieces) if newest_first else pieces:
                    self.put(group, step, first, rows, version=version)

    def put(
        self,
        group: int,
        step: int,
        first: int,
        rows: int,
        *,
        version: int = 0,
        key: str | None = None,
    ) -> None:
        numbers = np.arange(first, first + rows)
        chunk = ActionChunk(
            stage_group=group,
            step=step,
            first_row=first,
            actions=(numbers + step) % 3,
            logprobs=np.full(rows, -step, np.float32),
            values=numbers.astype(np.float32),
            version=version,
        )
        self.channels[ACTIONS].put_nowait(chunk, key=key or f"{self.rank}/{group}")

    def asked(self, rollout_rank: int = 0) -> list[Observation]:
        channel, key = self.channels[OBSERVATIONS], str(rollout_rank)
        return [
            channel.get_nowait(key=key)
            for _ in range(channel.stats().depth_by_key.get(key, 0))
        ]

    def sent(self, actor_rank: int = 0) -> Trajectory:
        return self.channels[TRAJECTORIES].get_nowait(key=str(actor_rank))

    def run(self, iteration: int = 0) -> Metrics:
        self.answer()
        return self.worker.run(iteration)


def test_it_asks_for_each_group_and_step_in_turn() -> None:
    env = OneEnvRank(Layout(stage_groups=2), steps=2)
    env.run()
    asked = [
        (o.env_rank, o.stage_group, o.step, o.first_row, o.weight) for o in env.asked()
    ]
    assert asked == [(0, 0, 0, 0, 6), (0, 1, 0, 6, 6), (0, 0, 1, 0, 6), (0, 1, 1, 6, 6)]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(
    "layout", [Layout(rollout=3), Layout(rollout=3, stage_groups=2)], ids=str
)
def test_the_trajectory_holds_what_was_answered_and_what_came_of_it(
    layout: Layout, newest_first: bool
) -> None:
    env = OneEnvRank(layout, steps=4, env=env_block("Script-v0", terminate_at=3))
    env.answer(newest_first=newest_first)
    env.worker.run(0)
    rows, steps = np.arange(12), np.arange(4)
    trajectory = env.sent()
    assert np.array_equal(trajectory.actions, (rows[None] + steps[:, None]) % 3)
    assert trajectory.actions.dtype == np.int64
    assert np.array_equal(trajectory.values, np.tile(rows, (4, 1)))
    assert np.array_equal(trajectory.logprobs, np.tile(-steps[:, None], (1, 12)))
    assert np.array_equal(trajectory.rewards, np.tile([[1], [2], [3], [1]], (1, 12)))
    assert np.array_equal(
        trajectory.terminated, np.tile([[False], [False], [True], [False]], (1, 12))
    )
    assert not trajectory.truncated.any()
    # [episode, step, luck, action before]
    assert np.array_equal(
        trajectory.observations[:, :, 1], np.tile([[0], [1], [2], [0]], (1, 12))
    )
    assert np.array_equal(trajectory.observations[1:3, :, 3], trajectory.actions[:2])
    assert np.array_equal(trajectory.last_observations[:, :2], np.tile([2, 1], (12, 1)))


def test_final_observations_of_all_groups_are_in_the_order_of_the_cuts() -> None:
    env = OneEnvRank(
        Layout(stage_groups=3), steps=4, env=env_block("Script-v0", truncate_at=2)
    )
    env.run()
    trajectory = env.sent()
    cuts = np.argwhere(trajectory.truncated)
    assert len(cuts) == 24
    luck = trajectory.observations[cuts[:, 0], cuts[:, 1], 2]
    assert np.array_equal(trajectory.final_observations[:, 2], luck)
    assert len(np.unique(luck)) > 12


def test_versions_are_stamped() -> None:
    env = OneEnvRank(Layout(rollout=2), steps=1)
    (first, rows), (second, more) = env.pieces(0)
    env.put(0, 0, first, rows, version=7)
    env.put(0, 0, second, more, version=8)
    env.worker.run(0)
    assert ((sent := env.sent()).version_min, sent.version_max) == (7, 8)


def test_episodes_go_on_over_iterations_and_offloads() -> None:
    env = OneEnvRank(Layout(stage_groups=2), steps=2)
    env.run(0)
    last = env.sent().last_observations
    env.worker.offload()
    env.worker.onload()
    env.run(1)
    following = env.sent()
    assert np.array_equal(following.observations[0], last)
    assert following.observations[:, 0, 1].tolist() == [2, 3]


def test_episodes_that_cannot_be_restored_begin_anew_and_are_counted(
    tmp_path: Path,
) -> None:
    saved = OneEnvRank(Layout(), steps=5, env=env_block("Script-v0", terminate_at=3))
    saved.run(0)
    saved.worker.write_state(str(tmp_path))
    saved.worker.close()  # waits until it is written
    env = OneEnvRank(
        Layout(stage_groups=2), steps=2, env=env_block("Script-v0", terminate_at=3)
    )
    lost = env.worker.read_state(str(tmp_path))
    assert (lost["env/steps_lost"].value, lost["env/episodes_cut"].value) == (
        12 * 2,
        12,
    )
    env.run(1)
    assert env.sent().observations[:, 0, 1].tolist() == [0, 1]


def test_a_trajectory_stays_as_it_is_in_the_next_iteration() -> None:
    env = OneEnvRank(Layout())
    env.run(0)
    trajectory = env.sent()
    before = trajectory.observations.copy()
    env.run(1)
    assert np.array_equal(trajectory.observations, before)


def test_the_numbers_of_an_iteration() -> None:
    metrics = OneEnvRank(
        Layout(stage_groups=2), steps=5, env=env_block("Script-v0", terminate_at=2)
    ).run()
    assert {
        name: (m.value, m.reduce, m.weight)
        for name, m in metrics.items()
        if not name.endswith("_s")
    } == {
        "env/return": (3.0, "mean", 24),
        "env/episode_length": (2.0, "mean", 24),
        "env/episodes": (24, "sum", 1.0),
        "env/steps": (60, "sum", 1.0),
    }
    assert {name for name in metrics if name.endswith("_s")} == {
        "env/sim_s",
        "env/wait_s",
        "env/put_s",
    }


def test_without_a_finished_episode_there_is_no_return() -> None:
    assert OneEnvRank(Layout()).run()["env/return"].weight == 0


def test_moves_account_for_the_simulator() -> None:
    env = OneEnvRank(
        Layout(), env=env_block("Script-v0") | {"accelerator_memory": 1 << 20}
    )
    assert env.held == {"simulator": 1 << 20}
    assert env.worker.offload().accelerator_bytes == 0
    assert env.held == {}
    env.worker.context.device.limit = 999
    with pytest.raises(MemoryError):
        env.worker.onload()
    with pytest.raises(NotResident):  # it is still off
        env.worker.run(0)
    env.worker.context.device.limit = None
    report = env.worker.onload()
    assert (report.residency, report.accelerator_bytes, report.host_bytes) == (
        Residency.FULL,
        1 << 20,
        0,
    )
    env.worker.close()
    assert env.held == {}


@pytest.mark.parametrize("residency", [Residency.OFF, Residency.WEIGHTS])
def test_stepping_while_offloaded_is_refused(residency: Residency) -> None:
    env = OneEnvRank(Layout())
    env.worker.move(residency)
    with pytest.raises(NotResident) as caught:
        env.run()
    assert caught.value.code == "not-resident"
    assert env.asked() == []


def test_a_cancelled_worker_stops_before_its_next_step() -> None:
    env = OneEnvRank(Layout())
    env.worker.context.cancelled.set()
    with pytest.raises(ChannelBroken) as caught:
        env.run()
    assert caught.value.code == "cancelled"
    assert env.channels[ACTIONS].stats().gets == 0


@pytest.mark.parametrize(
    "answers",
    [
        [(0, 1, 0, 6)],
        [(1, 0, 0, 6)],
        [(0, 0, 3, 6)],
        [(0, 0, 0, 5)],
        [(0, 0, 0, 6), (0, 0, 0, 6)],
    ],
    ids=["step", "group", "row", "rows", "twice"],
)
def test_an_answer_to_something_else_is_refused(
    answers: list[tuple[int, int, int, int]],
) -> None:
    env = OneEnvRank(Layout(rollout=2))
    for group, step, first, rows in answers:
        env.put(group, step, first, rows, key="0/0")
    with pytest.raises(ChannelMisuse) as caught:
        env.worker.run(0)
    assert caught.value.code == "out-of-step"
    assert str(caught.value.problem.got).startswith(
        f"stage group {group}, step {step}, rows from {first}"
    )


# ── environments that draw from the random numbers of the process ────────────────────────────────────────────────────


def lucky(
    *iterations: int, rank: int = 0, name: str = "Lucky-v0"
) -> list[list[list[float]]]:
    """Return the rewards and the luck of each of these iterations."""
    env = OneEnvRank(Layout(env=2), rank=rank, env=env_block(name))
    found = []
    for iteration in iterations:
        # Other parts of the process draw too
        random.random()
        np.random.uniform()
        torch.rand(())
        env.run(iteration)
        sent = env.sent()
        found.append([sent.rewards.tolist(), sent.observations[1:, :, 2].tolist()])
    return found


@pytest.mark.parametrize("name", ["Lucky-v0", "TorchLucky-v0"])
def test_the_random_numbers_of_the_process_follow_from_seed_rank_and_iteration(
    name: str,
) -> None:
    whole = lucky(0, 1, 2, name=name)
    assert lucky(0, 1, 2, name=name) == whole
    # Later iterations of a resumed run are those of an uninterrupted one
    assert lucky(2, name=name) == whole[2:]
    assert whole[0] != whole[1]
    assert lucky(0, rank=1, name=name) != whole[:1]


def test_an_evaluation_leaves_the_random_numbers_of_the_process_as_they_were() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.uniform(), float(torch.rand(()))

    seed_global_numbers(0, 0)
    undisturbed = drawn()
    seed_global_numbers(0, 0)
    with own_global_numbers(0, 0, -1):
        assert drawn() != undisturbed
    assert drawn() == undisturbed


def test_actions_stay_as_they_were_decided_whatever_a_simulator_makes_of_them() -> None:
    """A user's own simulator may change the array that it is given."""
    rank = OneEnvRank(Layout(), env={"kind": "tests.own_adapter:Adapter"})
    rank.run()
    rows, steps = np.arange(12), np.arange(3)
    assert np.array_equal(rank.sent().actions, (rows[None] + steps[:, None]) % 3)


# ── remarks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_remark_about_environments_goes_with_the_metrics() -> None:
    quiet = OneEnvRank(Layout(), env=env_block("Script-v0")).run()
    assert quiet["env/steps"].notes == ()
    far = OneEnvRank(
        Layout(), env=env_block("Poisoned-v0", at=1, value="300", what="observation")
    )
    (remark,) = far.run()["env/steps"].notes
    assert "outside of its observation_space" in remark


# ── numbers that are not finite ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("what", "got"),
    [
        ("reward", "reward {}, observation [1. 2. "),
        ("end", "reward {}, observation [2. 0. "),
        ("observation", "reward 2.0, observation [ 1.  2. "),
        ("cut", "reward 2.0, observation [ 1.  2. "),
    ],
)
def test_poison_stops_and_is_named(what: str, got: str, value: str) -> None:
    env = OneEnvRank(
        Layout(env=2, stage_groups=3),
        rank=1,
        steps=3,
        env=env_block("Poisoned-v0", what=what, value=value),
    )
    with pytest.raises(SimulatorError) as caught:
        env.run(iteration=5)
    problem = caught.value.problem
    assert (problem.code, problem.key) == ("simulator-not-finite", "env rank 1")
    assert (
        problem.what
        == "step 1 of iteration 6 of tests.gyms:Poisoned-v0 in row 6 is not finite"
    )
    assert problem.got is not None
    assert got.format(value).replace(" ", "") in problem.got.replace(" ", "")
    assert value in problem.got


@pytest.mark.parametrize("what", ["reward", "observation", "end", "cut"])
def test_a_poisoned_step_that_is_skipped_ends_its_episode(what: str) -> None:
    """Of each row it is step 1, of 8; the episode after it is cut after 6 steps, in time."""
    env = OneEnvRank(
        Layout(), steps=8, env=env_block("Poisoned-v0", what=what), on_poison="skip"
    )
    metrics = env.run()
    trajectory = env.sent()
    assert np.array_equal(np.isnan(trajectory.rewards[:, 0]), np.arange(8) == 1)
    assert np.array_equal(trajectory.terminated, np.isnan(trajectory.rewards))
    assert np.array_equal(trajectory.truncated[:, 0], np.arange(8) == 7)
    for array in (
        trajectory.observations,
        trajectory.last_observations,
        trajectory.final_observations,
    ):
        assert np.isfinite(array).all()
    # [episode, step]: each poisoned row begins a new one, once
    assert trajectory.observations[:, 0, :2].tolist() == [
        [1, 0],
        [1, 1],
        *([2, step] for step in range(6)),
    ]
    assert trajectory.last_observations[0, :2].tolist() == [3, 0]
    assert (metrics["env/poisoned"].value, metrics["env/steps"].value) == (12, 96)
    counted = (
        2 if what == "cut" else 1
    )  # what led to the cut was a whole episode; the others are no returns
    assert metrics["env/episodes"].value == 12 * counted
    assert metrics["env/return"].value == pytest.approx(
        (21 + 3 * (counted - 1)) / counted
    )
    assert "env/poisoned" not in env.run(1)
    assert not np.isnan(env.sent().rewards).any()


def test_nothing_but_poison_stops_also_where_it_is_skipped() -> None:
    first = env_block("Poisoned-v0", what="observation", at=0)
    with pytest.raises(
        SimulatorError,
        match=r"the first observation of tests\.gyms:Poisoned-v0 in row 0 is not finite",
    ):
        OneEnvRank(Layout(), env=first, on_poison="skip")
    always = OneEnvRank(
        Layout(), env=env_block("Poisoned-v0", at=1, always=True), on_poison="skip"
    )
    with pytest.raises(
        SimulatorError, match=r"every step of iteration 4 of .* in row 0 is not finite"
    ):
        always.run(3)


def test_an_iteration_that_begins_anew_is_the_same_again() -> None:
    env = OneEnvRank(Layout(stage_groups=2), steps=3, env=env_block("CartPole-v1"))

    def run(iteration: int) -> Trajectory:
        for group in range(2):
            for step in range(3):
                for first, rows in env.pieces(group):
                    chunk = ActionChunk(
                        stage_group=group,
                        step=step,
                        first_row=first,
                        actions=np.arange(first, first + rows) % 2,
                        logprobs=np.zeros(rows, np.float32),
                        values=np.zeros(rows, np.float32),
                        version=0,
                    )
                    env.channels[ACTIONS].put_nowait(chunk, key=f"0/{group}")
        env.worker.run(iteration)
        env.asked()
        return env.sent()

    run(0)
    first = run(1)
    assert env.worker.begin_again(1)["env/episodes_cut"].value == 0
    again = run(1)
    assert np.array_equal(first.observations, again.observations)
    assert np.array_equal(first.last_observations, again.last_observations)


def test_a_new_rank_begins_all_episodes_anew_and_counts_them() -> None:
    old, new = (OneEnvRank(Layout(), env=env_block("CartPole-v1")) for _ in range(2))
    at_the_start = new.worker._groups[0].observations.copy()
    assert np.array_equal(at_the_start, old.worker._groups[0].observations)
    assert new.worker.begin_again(3)["env/episodes_cut"].value == 12
    assert not np.array_equal(
        new.worker._groups[0].observations, at_the_start
    )  # not those of the run's start again
