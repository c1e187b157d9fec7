"""One actor rank in this process: what it refuses, what its moves release, and what it leaves behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlplace.comm.weights.receiver import CopyReceiver
from rlplace.errors import AcceleratorOutOfMemory, DivergedError, NotResident, OutputError
from rlplace.metrics import Metric
from rlplace.models.mlp import build_policy
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory
from rlplace.workers.arguments import TRAJECTORIES, WEIGHTS
from rlplace.workers.roles.actor import PolicyActor
from tests.actor_ranks import THREE_CHOICES, Scenario, iteration, make_actor, state_digest
from tests.worker_ranks import listen, rendezvous_at

MakeActor = Callable[..., PolicyActor]
ALONE = Scenario(split=(6,))


@pytest.fixture
def actor_of() -> Iterator[MakeActor]:
    """Makes an actor of one rank; one at a time, since a process has one default process group."""
    made: list[PolicyActor] = []

    def make(scenario: Scenario, capacity: int = 1 << 30) -> PolicyActor:
        made.append(make_actor(scenario, 0, rendezvous_at(listen()), capacity))
        return made[-1]

    yield make
    for actor in made:
        actor.close()


def batch(scenario: Scenario, index: int = 0) -> Trajectory:
    """An iteration sampled by the weights every rank starts with."""
    config = scenario.config
    return iteration(scenario, build_policy(scenario.spaces, config.actor, config.algorithm, config.runner.seed), index)


def learn(actor: PolicyActor, trajectory: Trajectory, index: int = 0) -> dict[str, Metric]:
    actor.context.channels[TRAJECTORIES].put(trajectory, key="0")
    return dict(actor.learn(index, index))


def move_and_learn(actor: PolicyActor) -> dict[str, Metric]:
    actor.move(Residency.FULL)
    return learn(actor, batch(ALONE))


def test_it_is_born_off_and_refuses_to_compute(actor_of: MakeActor, tmp_path: Path) -> None:
    actor = actor_of(ALONE)
    refused = {
        "learn": lambda: actor.learn(0, 0),
        "push_weights": lambda: actor.push_weights(0),
        "save_policy": lambda: actor.save_policy(str(tmp_path / "policy.safetensors")),
        "digest": actor.digest,
    }
    for method, call in refused.items():
        with pytest.raises(NotResident, match=f"actor rank 0: {method} was called while the worker is off") as caught:
            call()
        assert caught.value.code == "not-resident"
    actor.move(Residency.WEIGHTS)
    actor.push_weights(0)
    with pytest.raises(NotResident, match="learn needs residency full"):
        actor.learn(0, 0)


def test_moves_release_what_they_say(actor_of: MakeActor) -> None:
    actor = actor_of(ALONE)
    parameters = sum(
        p.numel() for p in build_policy(ALONE.spaces, ALONE.config.actor, ALONE.config.algorithm, 0).parameters()
    )
    buffers = 8 * (1 + 5 + 5)  # count, mean and variance of the observations, float64
    weights, adam = 4 * parameters + buffers, 2 * 4 * parameters + 4 * 13  # 13 parameters, each with a step count
    everything = weights + adam
    held = actor.context.device.held_bytes
    expected = {
        Residency.FULL: (everything, 0),
        Residency.WEIGHTS: (weights, adam),
        Residency.OFF: (0, everything),
    }
    assert held() == 0
    for residency in (
        Residency.FULL,
        Residency.WEIGHTS,
        Residency.OFF,
        Residency.WEIGHTS,
        Residency.FULL,
        Residency.OFF,
    ):
        for _ in range(2):  # the second is free
            report = actor.move(residency)
            assert report.residency == residency == actor.residency
            assert (report.accelerator_bytes, report.host_bytes) == expected[residency]
            assert held() == report.accelerator_bytes
    assert actor.offload().residency == Residency.OFF
    assert actor.onload().residency == Residency.FULL


def test_learning_leaves_nothing_gathered(actor_of: MakeActor) -> None:
    actor = actor_of(ALONE)
    full = actor.move(Residency.FULL).accelerator_bytes
    learn(actor, batch(ALONE))
    assert actor.context.device.held_bytes() == full
    assert actor.move(Residency.FULL).accelerator_bytes == full


@pytest.mark.parametrize("missing", ["optimizer state", "gathered weights and gradients"])
def test_out_of_memory_names_what_did_not_fit(actor_of: MakeActor, missing: str) -> None:
    actor = actor_of(ALONE)
    weights = actor.move(Residency.WEIGHTS).accelerator_bytes
    full = actor.move(Residency.FULL).accelerator_bytes
    actor.move(Residency.OFF)
    room = {"optimizer state": weights, "gathered weights and gradients": full}[missing]
    actor.context.device.acquire((1 << 30) - room - 8, "somebody else")
    with pytest.raises(AcceleratorOutOfMemory, match=missing):
        move_and_learn(actor)
    assert actor.residency == (Residency.WEIGHTS if missing == "optimizer state" else Residency.FULL)
    actor.context.device.release("somebody else")
    assert move_and_learn(actor)["actor/samples"].value == 48


@pytest.mark.parametrize("actions", [ALONE.actions, THREE_CHOICES], ids=["continuous", "discrete"])
def test_the_first_minibatch_is_on_policy(actor_of: MakeActor, actions: object) -> None:
    algorithm = {"epochs": 1, "num_minibatches": 1, "normalize_advantages": False}
    scenario = dataclasses.replace(ALONE, actions=actions, algorithm=algorithm)
    actor = actor_of(scenario)
    actor.move(Residency.FULL)
    for index in range(2):  # the second after the observation statistics have changed
        actor.push_weights(index)
        policy = build_policy(scenario.spaces, scenario.config.actor, scenario.config.algorithm, seed=1)
        policy.load_state_dict(CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(index).tensors)
        metrics = learn(actor, iteration(scenario, policy, index), index)
        assert metrics["actor/approx_kl"].value < 1e-9
        assert metrics["actor/clip_fraction"].value == 0.0


def test_the_divergence_stops_the_updates(actor_of: MakeActor) -> None:
    scenario = dataclasses.replace(ALONE, algorithm={"target_kl": 1e-6, "epochs": 4})
    actor = actor_of(scenario)
    actor.move(Residency.FULL)
    metrics = learn(actor, batch(scenario))
    assert metrics["actor/kl_stop"].value == 1.0
    assert metrics["actor/optimizer_steps"].value == 1  # the first minibatch is on-policy, the second is not
    assert metrics["actor/approx_kl"].value > 0.0


def test_the_learning_rate_falls_with_the_iterations(actor_of: MakeActor) -> None:
    scenario = dataclasses.replace(ALONE, actor={"optimizer": {"lr": 4e-3, "schedule": "linear"}})
    actor = actor_of(scenario)
    actor.move(Residency.FULL)
    rates = [learn(actor, batch(scenario, i), i)["actor/lr"].value for i in range(4)]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_metrics_say_what_was_learned_from(actor_of: MakeActor) -> None:
    actor = actor_of(ALONE)
    actor.move(Residency.FULL)
    stale = dataclasses.replace(batch(ALONE), version_min=0, version_max=0)
    actor.context.channels[TRAJECTORIES].put(stale, key="0")
    metrics = actor.learn(2, 2)
    assert metrics["actor/version_lag"] == Metric(2, "max")
    assert metrics["actor/samples"] == Metric(48, "sum")
    assert metrics["actor/learn_s"].value > 0.0
    assert metrics["actor/explained_variance"].value < 0.5  # a critic that has not learned explains little


def test_numbers_that_are_none_are_an_error(actor_of: MakeActor) -> None:
    actor = actor_of(ALONE)
    actor.move(Residency.FULL)
    before = state_digest(actor)
    good = batch(ALONE)
    with pytest.raises(DivergedError, match="iteration 0 is not a finite number") as caught:
        learn(actor, dataclasses.replace(good, rewards=np.full_like(good.rewards, np.nan)))
    assert caught.value.code == "diverged"
    assert state_digest(actor) == before


def test_half_precision_learns_and_pushes_what_it_computes_with(actor_of: MakeActor) -> None:
    scenario = dataclasses.replace(ALONE, actor={"compute": "bf16", "optimizer": {"lr": 1e-2}})
    actor = actor_of(scenario)
    actor.move(Residency.FULL)
    before = state_digest(actor)
    learn(actor, batch(scenario))
    assert state_digest(actor) != before
    actor.push_weights(1)
    weights = CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(1).tensors
    rounded = weights["policy.0.weight"]
    assert rounded.dtype == torch.bfloat16  # as it travels: half the bytes, and the receivers' float32 holds all of it
    assert weights["normalizer.mean"].dtype == torch.float64


def test_the_saved_policy_is_the_pushed_one(actor_of: MakeActor, tmp_path: Path) -> None:
    actor = actor_of(ALONE)
    actor.move(Residency.FULL)
    learn(actor, batch(ALONE))
    file = tmp_path / "policy.safetensors"
    file.write_bytes(b"an older one")
    actor.save_policy(str(file))
    actor.push_weights(1)
    pushed = CopyReceiver(actor.context.channels[WEIGHTS], 0).pull(1).tensors
    saved = load_file(file)
    assert saved.keys() == pushed.keys()
    assert all(torch.equal(saved[name], pushed[name]) for name in saved)
    assert [p.name for p in tmp_path.iterdir()] == ["policy.safetensors"]
    policy = build_policy(ALONE.spaces, ALONE.config.actor, ALONE.config.algorithm, seed=5)
    policy.load_state_dict(saved)


def test_a_full_disk_keeps_the_older_policy(actor_of: MakeActor, tmp_path: Path) -> None:
    actor = actor_of(ALONE)
    actor.move(Residency.WEIGHTS)
    file = tmp_path / "policy.safetensors"
    file.write_bytes(b"an older one")
    (tmp_path / "policy.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(OutputError) as caught:
        actor.save_policy(str(file))
    assert caught.value.code == "disk-full"
    assert file.read_bytes() == b"an older one"
    assert [p.name for p in tmp_path.iterdir()] == ["policy.safetensors"]
