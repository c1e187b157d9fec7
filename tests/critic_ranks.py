"""Ranks of a language model's critic in processes of their own: real FSDP and gloo, made-up samples and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.comm.local import LocalChannel
from rlplace.config import read_config
from rlplace.metrics import Metric
from rlplace.placement.schedule import Residency
from rlplace.tokens import Returns, Sample, Scores
from rlplace.workers.arguments import RETURNS, WorkerArguments, samples_for, scores_of
from rlplace.workers.launch.devices import Device
from rlplace.workers.roles.critic import Critic
from rlplace.workers.worker import Rendezvous
from tests.lm_ranks import ADAM, PROMPTS, SAMPLES_PER_PROMPT, made_up_samples
from tests.worker_ranks import context_of, in_processes, spec_of

SAMPLES, SCORES = samples_for("critic"), scores_of("critic")
Groups = Sequence[Sequence[Sample]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticScenario:
    """Iterations on the same samples and returns for every number of ranks."""

    model: Path
    ranks: int = 1
    iterations: int = 1
    algorithm: Mapping[str, object] = dataclasses.field(default_factory=dict)
    critic: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def job(self) -> WorkerArguments:
        config = read_config(
            {
                "cluster": {"component_placement": {"actor": 0, "rollout": 0, "env": 0, "critic": 0}},
                "actor": {"model": {"path": str(self.model)}},
                "algorithm": {"name": "ppo", "prompts": PROMPTS, "samples_per_prompt": SAMPLES_PER_PROMPT}
                | dict(self.algorithm),
                "critic": {"compute": "fp32", "token_budget": 48, "optimizer": ADAM, **self.critic},
                "env": {"task": "arithmetic"},
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )
        return WorkerArguments(config=config, ranks=dict.fromkeys(("actor", "env", "rollout", "critic"), 1))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Criticised:
    """What one rank has to show at the end."""

    values: list[NDArray[np.float32]]  # by iteration, of all samples; empty but on rank 0
    metrics: list[dict[str, Metric]]
    digest: str
    weights: dict[str, NDArray[Any]]


def make_critic(scenario: CriticScenario, rank: int, rendezvous: Rendezvous, *, device: Device | None = None) -> Critic:
    """One rank that is set up; without a device on an emulated accelerator of a GiB. A collective."""
    channels = {name: LocalChannel(spec_of(name)) for name in (SAMPLES, SCORES, RETURNS)}
    context = context_of("critic", rank, scenario.ranks, rendezvous, channels, device=device)
    critic = Critic(scenario.job, context)
    critic.setup()
    return critic


def give_samples(critic: Critic, groups: Groups) -> None:
    if critic.context.rank == 0:
        for group in reversed(groups):  # in another order than they are numbered
            critic.context.channels[SAMPLES].put(tuple(group), key="")


def give_returns(critic: Critic, groups: Groups, iteration: int = 0) -> None:
    if critic.context.rank == 0:
        for group in reversed(groups):
            told = tuple(Returns(group=s.group, sample=s.sample, returns=returns_of(s, iteration)) for s in group)
            critic.context.channels[RETURNS].put(told, key="")


def returns_of(sample: Sample, iteration: int = 0) -> NDArray[np.float32]:
    """Made up, [N]."""
    rng = np.random.default_rng([5, iteration, sample.group, sample.sample])
    return (sample.reward + rng.normal(0.0, 0.5, sample.response_tokens)).astype(np.float32)


def scores(critic: Critic) -> list[Scores]:
    """All that it has put since last asked, in the order of samples."""
    channel = critic.context.channels[SCORES]
    said = [one for _ in range(channel.stats().depth_items) for one in channel.get_nowait()]
    return sorted(said, key=lambda s: (s.group, s.sample))


def iterate(critic: Critic, iteration: int = 0, groups: Groups | None = None) -> dict[str, Metric]:
    """Infer and learn as the loop has them, off the accelerator in between; the metrics of both."""
    groups = groups or made_up_samples(iteration)
    give_samples(critic, groups)
    critic.move(Residency.FULL)
    inferred = critic.infer(iteration, iteration)
    critic.move(Residency.OFF)
    give_returns(critic, groups, iteration)
    critic.move(Residency.FULL)
    return {**inferred, **critic.learn(iteration, iteration)}


def whole_weights(critic: Critic) -> dict[str, torch.Tensor]:
    """A collective."""
    return {name: tensor.cpu().clone() for name, tensor in critic._model.whole_weights()}


def follow(scenario: CriticScenario, critic: Critic) -> Criticised:
    metrics, values = [], []
    for index in range(scenario.iterations):
        metrics.append(iterate(critic, index))
        values.append(np.concatenate([s.values for s in scores(critic)]) if critic.context.rank == 0 else np.zeros(0))
    weights = {name: tensor.numpy() for name, tensor in whole_weights(critic).items()}
    return Criticised(values=values, metrics=metrics, digest=critic.digest(), weights=weights)


def _rank(scenario: CriticScenario, rank: int, rendezvous: Rendezvous, folder: Path) -> Criticised:
    critic = make_critic(scenario, rank, rendezvous)
    try:
        return follow(scenario, critic)
    finally:
        critic.close()


def run_critic_ranks(scenario: CriticScenario) -> list[Criticised]:
    """The scenario in one process per rank."""
    return in_processes(_rank, scenario, scenario.ranks)
