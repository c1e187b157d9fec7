"""The rollout worker alone: every observation is put before `generate` begins, so the test is the only thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from torch import Tensor

from rlplace.comm.ends import LocalChannel
from rlplace.comm.weights.host_sync import WeightSender
from rlplace.errors import ChannelBroken
from rlplace.models.policy_networks import build_policy
from rlplace.placement.flow import Delivery
from rlplace.placement.schedule import Residency
from rlplace.trajectory import ActionChunk, Observation
from rlplace.workers.arguments import ACTIONS, OBSERVATIONS, WEIGHTS
from rlplace.workers.roles.rollout import RowNoise, VectorRolloutWorker
from tests.contract.weight_ends import shards_of
from tests.rollout_stage import Layout, channels_of, context_of, env_block, plan_of


def push(
    channel: LocalChannel, rank: int, version: int, weights: Mapping[str, Tensor]
) -> None:
    sender = WeightSender(channel, deliveries=[Delivery(readers=(rank,))])
    sender.push(version, shards_of(weights))
    sender.close()


GROUPS = [(0, 0), (0, 1), (1, 0), (1, 1)]  # stage group, env rank


class OneRolloutRank:
    """One rollout worker of a job of 12 environments, FULL but without weights, with the far ends of its channels."""

    def __init__(
        self,
        layout: Layout,
        *,
        rank: int = 0,
        steps: int = 1,
        gym: str = "discrete",
        merge: bool = False,
    ) -> None:
        self.plan, job = plan_of(
            layout, env_block("Script-v0", action_space=gym), steps
        )
        rollout = dataclasses.replace(job.config.rollout, merge_requests=merge)
        self.job = dataclasses.replace(
            job, config=dataclasses.replace(job.config, rollout=rollout)
        )
        self.channels = channels_of(self.plan, capacity_items=1000)
        self.worker = VectorRolloutWorker(
            self.job, context_of(self.plan, "rollout", rank, self.channels)
        )
        self.rank = rank
        self.worker.setup()
        self.worker.move(Residency.FULL)

    def load(self, seed: int = 1, version: int = 3) -> None:
        config = self.job.config
        weights = build_policy(
            self.job.spaces, config.actor, config.algorithm, seed
        ).state_dict()
        push(self.channels[WEIGHTS], self.rank, version, weights)
        self.worker.pull_weights(version)

    def ask(
        self, first: int, stop: int, *, env_rank: int = 0, group: int = 0, step: int = 0
    ) -> None:
        rows = np.arange(first, stop, dtype=np.float32)
        piece = Observation(
            env_rank=env_rank,
            stage_group=group,
            step=step,
            first_row=first,
            observations=np.stack([rows, rows + step, rows * 0, rows * 0 + 1], axis=1),
        )
        self.channels[OBSERVATIONS].put_nowait(
            piece, key=str(self.rank), weight=piece.weight
        )

    def answer(self, env_rank: int = 0, group: int = 0) -> ActionChunk:
        return self.channels[ACTIONS].get_nowait(key=f"{env_rank}/{group}")


def test_each_observation_is_answered_to_whom_it_came_from() -> None:
    rank = OneRolloutRank(Layout(env=2, stage_groups=2), steps=1)
    rank.load(version=3)
    rows = {(0, 0): 0, (1, 1): 9, (1, 0): 6, (0, 1): 3}
    for (env_rank, group), first in rows.items():
        rank.ask(first, first + 3, env_rank=env_rank, group=group)
    metrics = rank.worker.generate(0)
    for (env_rank, group), first in rows.items():
        chunk = rank.answer(env_rank, group)
        assert (chunk.stage_group, chunk.step, chunk.first_row, chunk.version) == (
            group,
            0,
            first,
            3,
        )
        assert (len(chunk.actions), len(chunk.logprobs), len(chunk.values)) == (3, 3, 3)
    assert metrics["rollout/batches"].value == 4
    assert {n for n in metrics if n.endswith("_s")} == {
        "rollout/policy_s",
        "rollout/wait_s",
        "rollout/put_s",
    }


@pytest.mark.parametrize("gym", ["discrete", "box"])
def test_merged_requests_get_the_answers_they_would_get_alone(gym: str) -> None:
    layout = Layout(env=2, stage_groups=2)
    alone, merged = (
        OneRolloutRank(layout, gym=gym, steps=2, merge=merge) for merge in (False, True)
    )
    requests = [
        (env_rank, 6 * env_rank + 3 * group, group, step)
        for step in (0, 1)
        for group, env_rank in GROUPS
    ]
    for rank in (alone, merged):
        rank.load()
        for env_rank, first, group, step in requests:
            rank.ask(first, first + 3, env_rank=env_rank, group=group, step=step)
    assert alone.worker.generate(5)["rollout/batches"].value == 8
    assert merged.worker.generate(5)["rollout/batches"].value == 1
    for env_rank, _, group, _ in requests:
        expected, got = alone.answer(env_rank, group), merged.answer(env_rank, group)
        assert (got.stage_group, got.step, got.first_row, got.version) == (
            group,
            expected.step,
            expected.first_row,
            3,
        )
        assert np.allclose(got.actions, expected.actions, atol=1e-6)
        assert np.allclose(got.logprobs, expected.logprobs, atol=1e-5)
        assert np.allclose(got.values, expected.values, atol=1e-5)


def test_a_merged_batch_takes_this_iterations_requests_only() -> None:
    rank = OneRolloutRank(Layout(env=2), steps=1, merge=True)
    rank.load()
    for step in (0, 1):
        for env_rank in (0, 1):
            rank.ask(env_rank * 6, env_rank * 6 + 6, env_rank=env_rank, step=step)
    rank.worker.generate(0)
    assert [rank.channels[OBSERVATIONS].get_nowait(key="0").step for _ in range(2)] == [
        1,
        1,
    ]
    assert rank.channels[OBSERVATIONS].stats().depth_items == 0


def test_a_merged_batch_waits_for_nobody() -> None:
    """Env rank 1 asks only after env rank 0 has its answer."""
    rank = OneRolloutRank(Layout(env=2), merge=True)
    rank.load()
    with ThreadPoolExecutor(1) as threads:
        generating = threads.submit(rank.worker.generate, 0)
        for env_rank in (0, 1):
            rank.ask(env_rank * 6, env_rank * 6 + 6, env_rank=env_rank)
            assert (
                rank.channels[ACTIONS].get(key=f"{env_rank}/0").first_row
                == env_rank * 6
            )
        assert generating.result()["rollout/batches"].value == 2


def test_each_iteration_samples_anew() -> None:
    rank = OneRolloutRank(Layout(), gym="box")
    rank.load()
    actions = []
    for iteration in (0, 1, 1):
        rank.ask(0, 12)
        rank.worker.generate(iteration)
        actions.append(rank.answer().actions)
    assert not np.array_equal(actions[0], actions[1])
    assert np.array_equal(actions[1], actions[2])


def test_a_cancelled_worker_takes_no_further_observation() -> None:
    rank = OneRolloutRank(Layout())
    rank.load()
    rank.ask(0, 12)
    rank.worker.context.cancelled.set()
    with pytest.raises(ChannelBroken) as caught:
        rank.worker.generate(0)
    assert caught.value.code == "cancelled"
    assert rank.channels[OBSERVATIONS].stats().depth_items == 1


# ── noise ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def noise(seed: int = 0, rows: int = 6, *, uniform: bool = False) -> RowNoise:
    return RowNoise(seed=seed, rows=rows, shape=(2,), uniform=uniform)


def test_a_part_of_the_rows_is_a_part_of_the_noise_and_cannot_be_changed() -> None:
    whole = noise().rows(3, 5, 0, 6)
    assert (whole.shape, whole.dtype) == ((6, 2), np.float32)
    assert np.array_equal(noise().rows(3, 5, 2, 2), whole[2:4])
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 0.0


def test_the_order_of_asking_does_not_matter() -> None:
    forwards, backwards = noise(), noise()
    steps = range(40)  # more than are kept
    a = {t: forwards.rows(0, t, 0, 6).copy() for t in steps}
    b = {t: backwards.rows(0, t, 0, 6).copy() for t in reversed(steps)}
    assert all(np.array_equal(a[t], b[t]) for t in steps)
    assert np.array_equal(forwards.rows(0, 0, 0, 6), a[0])


def test_no_noise_comes_twice() -> None:
    drawn = [
        noise(seed).rows(i, t, 0, 6)
        for seed in (0, 1)
        for i in (0, 1, 2)
        for t in (0, 1, 2)
    ]
    values = np.concatenate(drawn).ravel()
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize(
    ("uniform", "mean", "std"), [(False, 0.0, 1.0), (True, 0.5, 12**-0.5)]
)
def test_the_distribution(uniform: bool, mean: float, std: float) -> None:
    drawn = noise(rows=20_000, uniform=uniform).rows(1, 1, 0, 20_000)
    assert drawn.mean() == pytest.approx(mean, abs=0.02)
    assert drawn.std() == pytest.approx(std, abs=0.02)
    assert not uniform or 0.0 <= drawn.min() <= drawn.max() < 1.0
