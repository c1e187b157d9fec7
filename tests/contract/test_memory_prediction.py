"""The ledger against what workers report: real shards of real ranks, a real engine, the account of real devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.config.schema import Config
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.models.policy_networks import build_policy
from rlplace.models.sharding import own
from rlplace.placement.memory.demands import (
    Footprint,
    HostPart,
    Placed,
    TrainingDemand,
)
from rlplace.placement.memory.model import read_model
from rlplace.placement.memory.policies import PolicyShape, policy_shape
from rlplace.placement.memory.policy_demands import (
    PolicyRolloutDemand,
    PolicyTrainingDemand,
)
from rlplace.placement.schedule import Residency
from rlplace.workers.engines.torch import TorchEngine
from rlplace.workers.launch.devices import EmulatedDevice, MemoryAccount
from rlplace.workers.worker import Rendezvous
from tests.actor_ranks import THREE_CHOICES, Scenario, make_actor
from tests.lm_ranks import LmScenario, make_lm_worker
from tests.open_calls import slot_of
from tests.worker_ranks import in_processes, listen, rendezvous_at

Sizes = dict[Residency, tuple[int, int]]  # bytes on the accelerator, bytes on the host
CONTINUOUS = ContinuousActions(shape=(3, 2), low=(-1.0,) * 6, high=(1.0,) * 6)


def shape(config: Config, spaces: Spaces) -> PolicyShape:
    return policy_shape(
        config.actor.model,
        spaces,
        normalize_observations=config.algorithm.normalize_observations,
    )


def predicted(footprint: Footprint) -> Sizes:
    return {
        r: (footprint.reported_bytes(r), footprint.host_bytes(r)) for r in Residency
    }


def placed(ranks: int) -> Placed:
    return Placed(
        ranks=ranks, accelerators_per_rank=1, memory_bytes=1 << 30, kind="emulated"
    )


@pytest.mark.parametrize(
    "actions", [DiscreteActions(n=5), CONTINUOUS], ids=["discrete", "continuous"]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_every_weight_is_counted(
    actions: DiscreteActions | ContinuousActions, normalize: bool
) -> None:
    config = Scenario(
        split=(1,), algorithm={"normalize_observations": normalize}
    ).config
    spaces = Spaces(observation_shape=(3, 4), actions=actions)
    policy, counted = (
        build_policy(spaces, config.actor, config.algorithm, seed=0),
        shape(config, spaces),
    )
    assert {w.name: w.shape for w in counted.weights} == {
        n: tuple(p.shape) for n, p in policy.named_parameters()
    }
    assert counted.buffer_bytes == sum(
        b.numel() * b.element_size() for b in policy.buffers()
    )


def test_an_engine_holds_what_was_predicted() -> None:
    scenario = Scenario(split=(1,))
    config, spaces = (
        scenario.config,
        Spaces(observation_shape=(3, 4), actions=CONTINUOUS),
    )
    device = EmulatedDevice(MemoryAccount([1 << 30]), slot_of("rollout"))
    policy = build_policy(spaces, config.actor, config.algorithm, seed=0)
    engine = TorchEngine(
        policy, device=device, owner="rollout rank 0", workspace_bytes=1000
    )
    footprint = PolicyRolloutDemand(
        policy=shape(config, spaces), workspace_bytes=1000
    ).footprint(placed(1))
    for residency in (Residency.WEIGHTS, Residency.FULL, Residency.OFF):
        assert (
            engine.move(residency)
            == device.held_bytes()
            == footprint.reported_bytes(residency)
        )


def _moves(scenario: Scenario, rank: int, rendezvous: Rendezvous, _: Path) -> Sizes:
    actor = make_actor(scenario, rank, rendezvous)
    try:
        reports = {residency: actor.move(residency) for residency in Residency}
        return {
            r: (report.accelerator_bytes, report.host_bytes)
            for r, report in reports.items()
        }
    finally:
        actor.close()


@pytest.mark.parametrize(
    "trained",
    [
        {"ema_decay": 0.9},
        {"lora_rank": 3},
        {"weights": "bf16", "compute": "bf16"},
        {"weights": "bf16", "compute": "bf16", "optimizer": {"on_host": True}},
        {"optimizer": {"kind": "adamw_8bit"}},
    ],
    ids=lambda trained: " ".join(trained),
)
def test_a_copy_for_a_checkpoint_is_what_was_predicted(
    trained: dict[str, object], qwen: Path
) -> None:
    scenario = LmScenario(model=qwen, trained=trained)
    actor = make_lm_worker(scenario, 0, rendezvous_at(listen()))
    moments = actor._trainer.optimizer.moments.read(actor._where)
    copied = sum(own(tensor).nbytes for tensor in actor._state(moments).values())
    actor.close()
    model = read_model(json.loads((qwen / "config.json").read_text()))
    demand = TrainingDemand(
        model=model, block=scenario.job.config.actor, sequence_length=8, copied=True
    )
    host = demand.footprint(placed(1)).host
    assert {kept[HostPart.CHECKPOINT] for kept in host.values()} == {
        3 * (copied - 8)
    }  # a small state is one file


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_of_two_ranks_holds_what_was_predicted(precision: str) -> None:
    scenario = Scenario(
        split=(1, 1),
        actions=THREE_CHOICES,
        actor={"model": {"hidden": [16, 16]}, "compute": precision},
    )
    footprint = PolicyTrainingDemand(
        policy=shape(scenario.config, scenario.spaces)
    ).footprint(placed(2))
    assert in_processes(_moves, scenario, 2) == [predicted(footprint)] * 2
