"""Actor ranks in processes of their own, without a launcher: real FSDP and gloo, synthetic simulators, local channels.

Each rank builds the same global iteration from the weights it was pushed, and learns from its own rows of it. Weights
of different runs can therefore differ only by how rows were split.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.weights.host_sync import CopyReceiver
from rlplace.config.read import read_config
from rlplace.config.schema import Config
from rlplace.envs.contract import ContinuousActions, DiscreteActions, Spaces
from rlplace.metrics import Metric
from rlplace.models.mlp import noise_shape, sample
from rlplace.models.policy_networks import PolicyNetwork, build_policy
from rlplace.models.sharding import digest
from rlplace.placement.flow import Delivery, Route, Routes
from rlplace.placement.language.spec import RankLocations
from rlplace.placement.schedule import Residency
from rlplace.trajectory import Trajectory
from rlplace.workers.arguments import TRAJECTORIES, WEIGHTS, SimulatorArguments
from rlplace.workers.launch.devices import Device
from rlplace.workers.roles.actor import PolicyActor
from rlplace.workers.training.worker import TrainedWorker
from rlplace.workers.worker import Rendezvous
from tests.worker_ranks import (
    WHOLE,
    WORKING,
    Session,
    attached,
    context_of,
    in_processes,
    spec_of,
)

TWO_JOINTS = ContinuousActions(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
THREE_CHOICES = DiscreteActions(n=3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Iterations of learning whose rows are split over actor ranks as `split` says."""

    split: tuple[int, ...]  # rows of each rank; 0 is allowed
    actions: ContinuousActions | DiscreteActions = TWO_JOINTS
    algorithm: Mapping[str, object] = dataclasses.field(default_factory=dict)
    actor: Mapping[str, object] = dataclasses.field(default_factory=dict)
    iterations: int = 2
    shape: tuple[int, ...] = (5,)  # of observations; of more axes: images
    offload: bool = False  # leave the accelerator between all stages
    session: Session = WHOLE

    @property
    def config(self) -> Config:
        return read_config(
            {
                "cluster": {"component_placement": {}},
                "env": {"id": "synthetic", "total_num_envs": sum(self.split)},
                "actor": {"model": {"hidden": [16, 16]}, **self.actor},
                "algorithm": {
                    "rollout_steps": 8,
                    "epochs": 2,
                    "num_minibatches": 3,
                    **self.algorithm,
                },
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )

    @property
    def spaces(self) -> Spaces:
        dtype: Literal["float32", "uint8"] = (
            "uint8" if len(self.shape) > 1 else "float32"
        )
        spaces = Spaces(
            observation_shape=self.shape, observation_dtype=dtype, actions=self.actions
        )
        return spaces.remembering(self.config.actor.policy.remembered)

    @property
    def job(self) -> SimulatorArguments:
        targets = [rank for rank, count in enumerate(self.split) if count]
        trajectories = Route(
            source="env",
            target="actor",
            sources=[0] * len(targets),
            targets=targets,
            edges=[0, *itertools.accumulate(self.split[rank] for rank in targets)],
            origin=_anywhere(1),
            destination=_anywhere(len(self.split)),
        )
        routes = Routes(observations=trajectories, trajectories=trajectories)
        everyone = tuple(range(len(self.split)))
        deliveries = (Delivery(readers=everyone, near=everyone),)
        ranks = {"actor": len(self.split), "env": 1, "rollout": len(everyone)}
        return SimulatorArguments(
            config=self.config,
            ranks=ranks,
            deliveries=deliveries,
            working={"actor": WORKING},
            spaces=self.spaces,
            routes=routes,
        )


def _anywhere(ranks: int) -> RankLocations:
    """On one node, none of them with an accelerator."""
    node, first, count = (array("l", [number] * ranks) for number in (0, -1, 0))
    return RankLocations(node=node, first=first, count=count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has at the end."""

    weights: dict[str, NDArray[Any]]
    metrics: list[dict[str, Metric]]  # per iteration
    weights_digest: str
    state_digest: str


def iteration(scenario: Scenario, policy: PolicyNetwork, index: int) -> Trajectory:
    """All rows of iteration `index` as `policy` would have sampled them in a simulator that is a random process."""
    config, rows = scenario.config, sum(scenario.split)
    steps = config.algorithm.rollout_steps
    rng = np.random.default_rng([3, index])
    observations = observed(scenario, rng, steps + 1, rows)
    shape = (steps, rows, *noise_shape(scenario.actions))
    discrete = isinstance(scenario.actions, DiscreteActions)
    noise = (rng.random(shape) if discrete else rng.standard_normal(shape)).astype(
        np.float32
    )
    terminated = rng.random((steps, rows)) < 0.1
    truncated = (rng.random((steps, rows)) < 0.15) & ~terminated
    finals = observed(scenario, rng, int(truncated.sum()))
    if scenario.spaces.memory:
        observations, finals = remembered(
            policy, observations, finals, terminated, truncated
        )
    with torch.no_grad():
        output = policy(torch.tensor(observations[:-1]).flatten(0, 1))
        actions, logprobs = sample(output, torch.tensor(noise).flatten(0, 1))
    actions_of_rows = actions.numpy().reshape(steps, rows, *actions.shape[1:])
    pull = actions_of_rows if discrete else actions_of_rows.sum(axis=-1)
    seen = observations[:-1].reshape(steps, rows, -1)[:, :, scenario.spaces.memory]
    return Trajectory(
        first_row=0,
        env_rank=0,
        version_min=index,
        version_max=index,
        observations=observations[:-1],
        actions=actions_of_rows,
        logprobs=logprobs.numpy().reshape(steps, rows),
        values=output.values.numpy().reshape(steps, rows),
        rewards=(seen * pull + 3.0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        last_observations=observations[-1],
        final_observations=finals,
    )


def remembered(
    policy: PolicyNetwork,
    observations: NDArray[Any],
    finals: NDArray[Any],
    terminated: NDArray[Any],
    truncated: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Observations [T + 1, B, O] and final ones with what a policy remembers of the steps before, at first 0.5."""
    memory, rows, last = (
        np.full((observations.shape[1], policy.remembered), 0.5, np.float32),
        [],
        [],
    )
    for step, shown in enumerate(observations):
        rows.append(np.concatenate([memory, shown], axis=1))
        if step < len(terminated):
            with torch.no_grad():
                memory = policy.decide(torch.tensor(rows[-1]))[1].numpy()
            last.append(memory[truncated[step]])
            memory = np.where(
                (terminated[step] | truncated[step])[:, None], np.float32(0), memory
            )
    return np.stack(rows), np.concatenate([np.concatenate(last), finals], axis=1)


def observed(scenario: Scenario, rng: np.random.Generator, *count: int) -> NDArray[Any]:
    """Observations [*count, *O], elements of which differ in mean and deviation."""
    if len(scenario.shape) > 1:
        return rng.integers(0, 256, (*count, *scenario.shape), np.uint8)
    normal = rng.standard_normal((*count, *scenario.shape))
    return (normal * [1, 2, 3, 4, 5] + [0, 1, 2, 3, 4]).astype(np.float32)


def first_iteration(scenario: Scenario, index: int = 0) -> Trajectory:
    """An iteration sampled by the weights that every rank starts with."""
    config = scenario.config
    return iteration(
        scenario,
        build_policy(
            scenario.spaces, config.actor, config.algorithm, config.runner.seed
        ),
        index,
    )


def make_actor(
    scenario: Scenario,
    rank: int,
    rendezvous: Rendezvous,
    *,
    folder: Path | None = None,
    device: Device | None = None,
) -> PolicyActor:
    """One rank that is set up; the weights channel is the one in `folder`, else the rank's own. A collective."""
    channels: dict[str, Channel] = {
        name: LocalChannel(spec_of(name)) for name in (TRAJECTORIES, WEIGHTS)
    }
    if folder is not None:
        channels[WEIGHTS] = attached(WEIGHTS, folder, f"actor rank {rank}")
    context = context_of(
        "actor",
        rank,
        len(scenario.split),
        rendezvous,
        channels,
        folder=folder,
        device=device,
    )
    actor = PolicyActor(scenario.job, context)
    actor.setup()
    return actor


def learn(
    actor: PolicyActor, trajectory: Trajectory, index: int = 0
) -> dict[str, Metric]:
    """Learn from whole rows on the only rank."""
    actor.context.channels[TRAJECTORIES].put(trajectory, key="0")
    return dict(actor.learn(index, index))


def follow(scenario: Scenario, actor: PolicyActor) -> Outcome:
    """Iterations as the loop runs them: sync, roll out, learn."""
    rank = actor.context.rank
    policy = build_policy(
        scenario.spaces, scenario.config.actor, scenario.config.algorithm, seed=99
    )
    receiver = CopyReceiver(
        actor.context.channels[WEIGHTS], rank, folder=actor.context.folder
    )
    metrics = []
    scenario.session.begin(actor)
    for index in range(scenario.session.first, scenario.iterations):
        _sync(scenario, actor, receiver, policy, index)
        for share in actor.config.routes.trajectories.receives(rank):
            piece = iteration(scenario, policy, index).split(share.start, share.stop)
            actor.context.channels[TRAJECTORIES].put(
                piece, key=str(rank), weight=piece.weight
            )
        actor.move(Residency.FULL)
        metrics.append(dict(actor.learn(index, index)))
        if scenario.offload:
            actor.move(Residency.OFF)
        scenario.session.end(actor, index)
    _sync(scenario, actor, receiver, policy, scenario.iterations)
    actor.move(Residency.FULL)
    return Outcome(
        weights={name: tensor.numpy() for name, tensor in policy.state_dict().items()},
        metrics=metrics,
        weights_digest=actor.digest(),
        state_digest=state_digest(actor),
    )


def state_digest(actor: TrainedWorker) -> str:
    """Of the whole weights and of this rank's optimizer state."""
    states = ((str(at), tensor) for at, tensor in enumerate(optimizer_tensors(actor)))
    return digest([*actor._model.whole_weights(), *states])


def optimizer_tensors(actor: TrainedWorker) -> list[torch.Tensor]:
    return [
        tensor
        for there in (False, True)
        for tensor in actor._trainer.optimizer.tensors(on_host=there)
    ]


def _sync(
    scenario: Scenario,
    actor: PolicyActor,
    receiver: CopyReceiver,
    policy: PolicyNetwork,
    version: int,
) -> None:
    actor.move(Residency.WEIGHTS if scenario.offload else Residency.FULL)
    actor.push_weights(version)
    with receiver.pull(version) as received:
        policy.load_state_dict(received.tensors)
    if scenario.offload:
        actor.move(Residency.OFF)


def _rank(
    scenario: Scenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> Outcome:
    actor = make_actor(scenario, rank, rendezvous, folder=folder)
    try:
        return follow(scenario, actor)
    finally:
        actor.close()


def run_ranks(scenario: Scenario) -> list[Outcome]:
    """The scenario in one process per rank."""
    return in_processes(
        _rank, scenario, len(scenario.split), channels=(spec_of(WEIGHTS),)
    )
