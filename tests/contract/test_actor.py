"""One actor rank of a simulator policy: on-policy at first, stopped by KL, and what it pushes and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlplace.comm.weights.host_sync import CopyReceiver
from rlplace.metrics import Metric
from rlplace.models.policy_networks import build_policy
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory
from rlplace.workers.arguments import TRAJECTORIES, WEIGHTS
from rlplace.workers.roles.actor import PolicyActor
from tests.actor_ranks import (
    THREE_CHOICES,
    Scenario,
    first_iteration,
    iteration,
    learn,
    make_actor,
    state_digest,
)
from tests.worker_ranks import listen, rendezvous_at

MakeActor = Callable[[Scenario], PolicyActor]
ALONE = Scenario(split=(6,))


@pytest.fixture
def actor_of() -> Iterator[MakeActor]:
    """Makes an actor of one rank, ready to learn; one at a time, since a process has one default process group."""
    made: list[PolicyActor] = []

    def make(scenario: Scenario) -> PolicyActor:
        made.append(make_actor(scenario, 0, rendezvous_at(listen())))
        made[-1].move(Residency.FULL)
        return made[-1]

    yield make
    for actor in made:
        actor.close()


@pytest.mark.parametrize(
    "actions", [ALONE.actions, THREE_CHOICES], ids=["continuous", "discrete"]
)
def test_the_first_minibatch_is_on_policy(actor_of: MakeActor, actions: object) -> None:
    algorithm = {"epochs": 1, "num_minibatches": 1, "normalize_advantages": False}
    scenario = dataclasses.replace(ALONE, actions=actions, algorithm=algorithm)
    actor = actor_of(scenario)
    for index in range(2):  # the second after the observation statistics have changed
        actor.push_weights(index)
        policy = build_policy(
            scenario.spaces, scenario.config.actor, scenario.config.algorithm, seed=1
        )
        policy.load_state_dict(
            CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(index).tensors
        )
        metrics = learn(actor, iteration(scenario, policy, index), index)
        assert metrics["actor/approx_kl"].value < 1e-9
        assert metrics["actor/clip_fraction"].value == 0.0


def test_nothing_is_learned_from_a_poisoned_step(actor_of: MakeActor) -> None:
    """The action and its probability do not matter; the steps before are as if cut there."""
    scenario = dataclasses.replace(ALONE, algorithm={"normalize_rewards": True})
    good, at, row = first_iteration(scenario), 3, 2
    ends = good.terminated.copy(), good.truncated.copy(), good.rewards.copy()
    before = int(good.truncated[: at - 1].sum() + good.truncated[at - 1, :row].sum())
    for step in (at - 1, at):
        assert not good.truncated[step, row], "else there are other final observations"
    ends[0][at - 1 : at + 1, row], ends[2][at, row] = [False, True], np.nan
    poisoned = dataclasses.replace(good, terminated=ends[0], rewards=ends[2])
    digests, divisors = [], list[int]()

    def noted(step: Callable[..., object]) -> Callable[..., object]:
        return lambda passes, given, mine, count: (
            divisors.append(count) or step(passes, given, mine, count)
        )

    for far in (0.0, 3.0):
        actions, logprobs = good.actions.copy(), good.logprobs.copy()
        actions[at, row], logprobs[at, row] = far, -far
        actor = actor_of(scenario)
        actor._learner._differentiate = noted(actor._learner._differentiate)
        learn(actor, dataclasses.replace(poisoned, actions=actions, logprobs=logprobs))
        digests.append(actor.digest())
    assert (
        sum(divisors)
        == 2 * (good.rewards.size - 1) * actor.config.config.algorithm.epochs
    )
    learn(actor := actor_of(scenario), good)
    assert digests[0] == digests[1] != actor.digest()
    ends[1][at - 1, row] = True
    finals = np.insert(
        good.final_observations, before, good.observations[at, row], axis=0
    )
    rewards = np.where(np.isnan(ends[2]), 0.0, ends[2])
    cut = dataclasses.replace(
        poisoned, rewards=rewards, truncated=ends[1], final_observations=finals
    )
    advantages = []
    for trajectory in (poisoned, cut):
        of_rows = (
            actor_of(ALONE)
            ._learner._samples(trajectory)
            .advantages.view(good.rewards.shape)
        )
        advantages.append(of_rows[:at, row])
    torch.testing.assert_close(advantages[0], advantages[1])


def test_metrics_describe_the_rows(actor_of: MakeActor) -> None:
    actor = actor_of(ALONE)
    stale = dataclasses.replace(first_iteration(ALONE), version_min=0, version_max=0)
    actor.context.channels[TRAJECTORIES].put(stale, key="0")
    metrics = actor.learn(2, 2)
    assert metrics["actor/version_lag"] == Metric(2, "max")
    assert metrics["actor/samples"] == Metric(48, "sum")
    assert metrics["actor/learn_s"].value > 0.0
    assert (
        metrics["actor/explained_variance"].value < 0.5
    )  # an untrained critic explains little


def notes_of(actor: Any, trajectory: Trajectory, code: str) -> list[str]:
    notes = learn(actor, trajectory)["actor/kl_stop"].notes
    return [note for note in notes if code in note]


@pytest.mark.parametrize(
    ("clip", "factor", "said"), [(0.2, 1.0, 0), (0.2, 100.0, 1), (None, 100.0, 0)]
)
def test_values_that_their_clip_keeps_far_from_the_returns_are_said(
    actor_of: MakeActor, clip: float | None, factor: float, said: int
) -> None:
    scenario = dataclasses.replace(ALONE, algorithm={"value_clip": clip})
    good = first_iteration(scenario)
    scaled = dataclasses.replace(good, rewards=factor * good.rewards)
    about = "value_clip: is 0.2, and the mean of the returns differs"
    assert len(notes_of(actor_of(scenario), scaled, about)) == said
    # Returns that differ by chance, around right values, say nothing
    signs = np.where(np.arange(good.rewards.size) % 2, 1.0, -1.0)
    noise = 40.0 * signs.reshape(good.rewards.shape).astype(np.float32)
    noisy = dataclasses.replace(good, rewards=noise)
    assert notes_of(actor_of(scenario), noisy, about) == []


@pytest.mark.parametrize(("log_std", "said"), [(0.0, 0), (1.0, 0), (3.0, 1)])
def test_actions_that_are_mostly_clipped_are_said(
    actor_of: MakeActor, log_std: float, said: int
) -> None:
    actor = actor_of(ALONE)
    with torch.no_grad():
        actor._model.module.log_std.fill_(log_std)
    about = "are clipped to a bound"
    assert len(notes_of(actor, first_iteration(ALONE), about)) == said


@pytest.mark.parametrize(
    ("factor", "count", "said"), [(1.0, 1e7, 0), (1e3, 1e7, 1), (1e3, 1e2, 0)]
)
def test_observations_that_old_statistics_clip_are_said(
    actor_of: MakeActor, factor: float, count: float, said: int
) -> None:
    """Statistics of many steps of another environment, as of a policy that is taken over; few steps change soon."""
    actor = actor_of(ALONE)
    normalizer = actor._model.module.normalizer
    about = "is beyond 10 standard deviations"
    good = first_iteration(ALONE)
    far = dataclasses.replace(good, observations=factor * (1.0 + good.observations))
    # Without statistics, the first iteration says nothing
    assert notes_of(actor, far, about) == []
    with torch.no_grad():
        normalizer.mean.fill_(0.0)
        normalizer.var.fill_(1.0)
        normalizer.count.fill_(count)
    assert len(notes_of(actor, far, about)) == said


def test_half_precision_learns_and_pushes_what_it_computes_with(
    actor_of: MakeActor,
) -> None:
    scenario = dataclasses.replace(
        ALONE, actor={"compute": "bf16", "optimizer": {"lr": 1e-2}}
    )
    actor = actor_of(scenario)
    before = state_digest(actor)
    learn(actor, first_iteration(scenario))
    assert state_digest(actor) != before
    actor.push_weights(1)
    weights = CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(1).tensors
    rounded = weights["policy.0.weight"]
    assert (
        rounded.dtype == torch.bfloat16
    )  # as it travels: half the bytes, and the receivers' float32 holds all of it
    assert weights["normalizer.mean"].dtype == torch.float64


def test_the_saved_policy_is_the_pushed_one(
    actor_of: MakeActor, tmp_path: Path
) -> None:
    actor = actor_of(ALONE)
    learn(actor, first_iteration(ALONE))
    file = tmp_path / "policy.safetensors"
    file.write_bytes(b"an older one")
    actor.save_model(str(file))
    actor.push_weights(1)
    pushed = CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(1).tensors
    saved = load_file(file)
    assert saved.keys() == pushed.keys()
    assert all(torch.equal(saved[name], pushed[name]) for name in saved)
    assert [p.name for p in tmp_path.iterdir()] == ["policy.safetensors"]
    build_policy(
        ALONE.spaces, ALONE.config.actor, ALONE.config.algorithm, seed=5
    ).load_state_dict(saved)
