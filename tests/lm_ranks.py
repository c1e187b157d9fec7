"""Ranks of a language model's actor in processes of their own: real FSDP and gloo, no launcher, made-up samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.comm.local import LocalChannel
from rlplace.comm.weights.receiver import CopyReceiver
from rlplace.config import read_config
from rlplace.metrics import Metric
from rlplace.placement.flow import Delivery
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample
from rlplace.workers.arguments import SAMPLES, WEIGHTS, WorkerArguments
from rlplace.workers.launch.devices import Device
from rlplace.workers.roles.actor import LmActor
from rlplace.workers.worker import Rendezvous
from tests.worker_ranks import attached, context_of, in_processes, spec_of

PROMPTS, SAMPLES_PER_PROMPT = 3, 4
# Below eps, Adam would make steps of full size out of rounding errors.
ADAM = {"lr": 1e-3, "eps": 1e-4, "max_grad_norm": 0.5}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmScenario:
    """One iteration or more on the same samples for every number of ranks."""

    model: Path
    ranks: int = 1
    iterations: int = 1
    algorithm: Mapping[str, object] = dataclasses.field(default_factory=dict)
    actor: Mapping[str, object] = dataclasses.field(default_factory=dict)
    rollout: Mapping[str, object] = dataclasses.field(default_factory=dict)
    reference: Mapping[str, object] = dataclasses.field(default_factory=dict)
    deliveries: tuple[Delivery, ...] = ()  # none: one that all ranks read and are near

    @property
    def job(self) -> WorkerArguments:
        config = read_config(
            {
                "cluster": {"component_placement": {}},
                "algorithm": {
                    "name": "grpo",
                    "prompts": PROMPTS,
                    "samples_per_prompt": SAMPLES_PER_PROMPT,
                    "tis_cap": None,
                    "loss": "token",
                    **self.algorithm,
                },
                "actor": {
                    "model": {"path": str(self.model)},
                    "compute": "fp32",
                    "token_budget": 48,
                    "optimizer": ADAM,
                    **self.actor,
                },
                "rollout": self.rollout,
                "reference": self.reference,
                "env": {"task": "arithmetic"},
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )
        everyone = tuple(range(self.ranks))
        return WorkerArguments(
            config=config,
            ranks={"actor": self.ranks, "env": 1, "rollout": self.ranks},
            deliveries=self.deliveries or (Delivery(readers=everyone, near=everyone),),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmLearned:
    """What one rank has to show at the end."""

    pushed: dict[str, NDArray[Any]]
    metrics: list[dict[str, Metric]]
    digest: str
    logprobs: list[float]


def made_up_samples(iteration: int = 0, groups: int = PROMPTS, version: int = 0) -> list[tuple[Sample, ...]]:
    """Groups of episodes of uneven lengths and several turns; log-probabilities of about a tiny model's size."""
    rng = np.random.default_rng([11, iteration])
    made = []
    for group in range(groups):
        prompt = rng.integers(3, 300, rng.integers(2, 9))
        made.append(tuple(_sample(rng, group, number, prompt, version) for number in range(SAMPLES_PER_PROMPT)))
    return made


def _sample(rng: np.random.Generator, group: int, number: int, prompt: np.ndarray, version: int) -> Sample:
    answers, between = rng.integers(1, 12), rng.integers(0, 4)
    mask = np.concatenate([np.zeros(len(prompt)), np.ones(answers), np.zeros(between), np.ones(between)]).astype(bool)
    reward = float(rng.integers(0, 3))
    return Sample(
        group=group,
        sample=number,
        tokens=np.concatenate([prompt, rng.integers(3, 300, answers + 2 * between)]).astype(np.int32),
        mask=mask,
        logprobs=(np.where(mask, rng.normal(-6.0, 0.3, len(mask)), 0.0)).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        rewards={"made up": reward},
        turns=1 + bool(between),
        truncated=False,
    )


def make_lm_actor(
    scenario: LmScenario, rank: int, rendezvous: Rendezvous, *, folder: Path | None = None, device: Device | None = None
) -> LmActor:
    """One rank that is set up; without a device on an emulated accelerator of a GiB. A collective."""
    channels: dict[str, Channel] = {name: LocalChannel(spec_of(name)) for name in (SAMPLES, WEIGHTS)}
    if folder is not None:
        channels[WEIGHTS] = attached(WEIGHTS, folder, f"actor rank {rank}")
    context = context_of("actor", rank, scenario.ranks, rendezvous, channels, folder=folder, device=device)
    actor = LmActor(scenario.job, context)
    actor.setup()
    return actor


def give(actor: LmActor, groups: Sequence[Sequence[Sample]]) -> None:
    if actor.context.rank == 0:
        for group in reversed(groups):  # in another order than they are numbered
            actor.context.channels[SAMPLES].put(tuple(group), key="")


def follow(scenario: LmScenario, actor: LmActor) -> LmLearned:
    """Iterations as the loop runs them, leaving the accelerator in between; then a sync."""
    metrics = []
    for index in range(scenario.iterations):
        give(actor, made_up_samples(index, version=index))
        actor.move(Residency.FULL)
        told = [actor.infer(index, index), actor.compute_advantages(index)] if scenario.job.config.actor_infers else []
        learned = actor.learn(index, index)
        metrics.append({name: metric for part in (*told, learned) for name, metric in part.items()})
        actor.move(Residency.OFF)
    actor.move(Residency.WEIGHTS)
    receiver = CopyReceiver(actor.context.channels[WEIGHTS], actor.context.rank, folder=actor.context.folder)
    actor.push_weights(scenario.iterations)
    with receiver.pull(scenario.iterations) as received:
        pushed = {name: tensor.float().numpy().copy() for name, tensor in received.tensors.items()}
    receiver.close()
    return LmLearned(pushed=pushed, metrics=metrics, digest=actor.digest(), logprobs=actor.logprobs([5, 6, 7, 8]))


def _rank(scenario: LmScenario, rank: int, rendezvous: Rendezvous, folder: Path) -> LmLearned:
    actor = make_lm_actor(scenario, rank, rendezvous, folder=folder)
    try:
        return follow(scenario, actor)
    finally:
        actor.close()


def run_lm_ranks(scenario: LmScenario) -> list[LmLearned]:
    """The scenario in one process per rank."""
    return in_processes(_rank, scenario, scenario.ranks, channels=(WEIGHTS,))
