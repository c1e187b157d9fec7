"""Ranks of a language model's actor or critic: real FSDP and gloo, no launcher, made-up samples and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.comm.channel import Channel
from rlplace.comm.ends import LocalChannel
from rlplace.comm.weights.host_sync import CopyReceiver
from rlplace.config.read import read_config
from rlplace.metrics import Metric
from rlplace.placement.flow import Delivery
from rlplace.placement.language.spec import Parallel
from rlplace.placement.schedule import Residency
from rlplace.tokens import Sample, Scores
from rlplace.workers.arguments import (
    RETURNS,
    SAMPLES,
    WEIGHTS,
    TextArguments,
    samples_for,
    scores_of,
)
from rlplace.workers.launch.devices import Device
from rlplace.workers.roles.actor import Critic, LmActor
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

PROMPTS, SAMPLES_PER_PROMPT = 3, 4
# Below eps, Adam would make steps of full size out of rounding errors.
ADAM = {"lr": 1e-3, "eps": 1e-4, "max_grad_norm": 0.5}
KINDS: Mapping[str, type[LmActor] | type[Critic]] = {"actor": LmActor, "critic": Critic}
Groups = Sequence[Sequence[Sample]]
Block = Mapping[str, object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LmScenario:
    """Iterations of one component on the same samples, and returns, for every number of ranks."""

    model: Path
    component: str = "actor"
    ranks: int = 1
    tensor_parallel: int = 1
    context_parallel: int = 1
    iterations: int = 1
    algorithm: Block = dataclasses.field(default_factory=dict)
    trained: Block = dataclasses.field(default_factory=dict)  # of the component
    rollout: Block = dataclasses.field(default_factory=dict)
    reference: Block = dataclasses.field(default_factory=dict)
    # (routers, experts, experts of a token) whose routes the samples have
    routes: tuple[int, int, int] | None = None
    deliveries: tuple[Delivery, ...] = ()  # none: one that all ranks read and are near
    session: Session = WHOLE

    @property
    def job(self) -> TextArguments:
        rules = {"grpo": {"tis_cap": None, "loss": "token"}, "ppo": {}}
        name = "grpo" if self.component == "actor" else "ppo"
        everyone = tuple(range(self.ranks))
        ranks = {
            "actor": self.ranks,
            "env": 1,
            "rollout": self.ranks,
            self.component: self.ranks,
        }
        blocks: dict[str, Any] = {"actor": {"model": {"path": str(self.model)}}}
        own = {"compute": "fp32", "token_budget": 48, "optimizer": ADAM, **self.trained}
        blocks[self.component] = blocks.get(self.component, {}) | own
        sizes = {"prompts": PROMPTS, "samples_per_prompt": SAMPLES_PER_PROMPT}
        config = read_config(
            {
                "cluster": {"component_placement": dict.fromkeys(ranks, 0)},
                "algorithm": {"name": name, **sizes, **rules[name], **self.algorithm},
                **blocks,
                "rollout": self.rollout,
                "reference": self.reference,
                "env": {"task": "arithmetic"},
                "runner": {"seed": 7, "total_iterations": 4},
            }
        )
        deliveries = self.deliveries or (Delivery(readers=everyone, near=everyone),)
        parallel = Parallel(
            tensor_parallel_size=self.tensor_parallel,
            context_parallel_size=self.context_parallel,
        )
        return TextArguments(
            config=config,
            ranks=ranks,
            deliveries=deliveries,
            working={self.component: WORKING},
            read_again={self.component: 0.25},
            parallel={self.component: parallel},
        )


def made_up_samples(
    iteration: int = 0, groups: int = PROMPTS, version: int = 0
) -> list[tuple[Sample, ...]]:
    """Groups of episodes of uneven lengths and several turns; log-probabilities of about a tiny model's size."""
    rng = np.random.default_rng([11, iteration])
    made = []
    for group in range(groups):
        prompt = rng.integers(3, 300, rng.integers(2, 9))
        made.append(
            tuple(
                _sample(rng, group, number, prompt, version)
                for number in range(SAMPLES_PER_PROMPT)
            )
        )
    return made


def _sample(
    rng: np.random.Generator, group: int, number: int, prompt: np.ndarray, version: int
) -> Sample:
    answers, between = rng.integers(1, 12), rng.integers(0, 4)
    mask = np.concatenate(
        [np.zeros(len(prompt)), np.ones(answers), np.zeros(between), np.ones(between)]
    ).astype(bool)
    reward = float(rng.integers(0, 3))
    return Sample(
        group=group,
        sample=number,
        tokens=np.concatenate(
            [prompt, rng.integers(3, 300, answers + 2 * between)]
        ).astype(np.int32),
        mask=mask,
        logprobs=(np.where(mask, rng.normal(-6.0, 0.3, len(mask)), 0.0)).astype(
            np.float32
        ),
        versions=np.where(mask, version, -1).astype(np.int32),
        reward=reward,
        rewards={"made up": reward},
        turns=1 + bool(between),
        truncated=False,
    )


def with_routes(
    groups: Groups, routers: int, experts: int, chosen: int
) -> list[tuple[Sample, ...]]:
    """Random experts of each token, equal for the prompt of a group; nothing has read the last token."""
    found = []
    for group in groups:
        members = []
        for sample in group:
            drawn = []
            for place in range(sample.weight):
                whose = -1 if place < sample.prompt_tokens else sample.sample
                rng = np.random.default_rng([sample.group, whose + 1, place])
                drawn.append(
                    [rng.permutation(experts)[:chosen] for _ in range(routers)]
                )
            routes = np.array(drawn, np.int8)
            routes[-1] = -1
            members.append(dataclasses.replace(sample, routes=routes))
        found.append(tuple(members))
    return found


def everything(iteration: int = 0) -> list[Sample]:
    return [sample for group in made_up_samples(iteration) for sample in group]


def returns_of(sample: Sample, iteration: int = 0) -> NDArray[np.float32]:
    """Made up, [N]."""
    rng = np.random.default_rng([5, iteration, sample.group, sample.sample])
    return (sample.reward + rng.normal(0.0, 0.5, sample.response_tokens)).astype(
        np.float32
    )


def make_lm_worker(
    scenario: LmScenario,
    rank: int,
    rendezvous: Rendezvous,
    *,
    folder: Path | None = None,
    device: Device | None = None,
) -> Any:
    """One rank that is set up; without a device on an emulated accelerator of a GiB. A collective."""
    component = scenario.component
    names = (
        (SAMPLES, WEIGHTS)
        if component == "actor"
        else (samples_for("critic"), scores_of("critic"), RETURNS)
    )
    channels: dict[str, Channel] = {name: LocalChannel(spec_of(name)) for name in names}
    if folder is not None and component == "actor":
        channels[WEIGHTS] = attached(WEIGHTS, folder, f"actor rank {rank}")
    context = context_of(
        component,
        rank,
        scenario.ranks,
        rendezvous,
        channels,
        folder=folder,
        device=device,
    )
    worker = KINDS[component](scenario.job, context)
    worker.setup()
    return worker


def give(worker: LmActor | Critic, groups: Groups) -> None:
    name = SAMPLES if isinstance(worker, LmActor) else samples_for("critic")
    if worker.context.rank == 0:
        for group in reversed(groups):  # in another order than they are numbered
            worker.context.channels[name].put(tuple(group), key="")


def give_returns(
    critic: Critic, groups: Groups, iteration: int = 0, factor: float = 1.0
) -> None:
    if critic.context.rank == 0:
        for group in reversed(groups):
            found = [
                (s.group, s.sample, factor * returns_of(s, iteration)) for s in group
            ]
            returns = tuple(Scores(group=g, sample=s, values=of) for g, s, of in found)
            critic.context.channels[RETURNS].put(returns, key="")


def iterate(
    worker: LmActor | Critic,
    iteration: int = 0,
    groups: Groups | None = None,
    *,
    returns_factor: float = 1.0,
) -> dict[str, Metric]:
    """One iteration as the loop runs it, a critic off the accelerator in between; the metrics of all its stages."""
    groups = groups or made_up_samples(iteration, version=iteration)
    give(worker, groups)
    worker.move(Residency.FULL)
    parts = []
    if isinstance(worker, Critic):
        parts.append(worker.infer(iteration, iteration))
        worker.move(Residency.OFF)
        give_returns(worker, groups, iteration, returns_factor)
        worker.move(Residency.FULL)
    elif worker.config.config.actor_infers:
        parts += [
            worker.infer(iteration, iteration),
            worker.compute_advantages(iteration),
        ]
    elif worker.config.config.algorithm.accumulate_early:
        parts.append(worker.accumulate(iteration, iteration))
    return {
        name: metric
        for part in (*parts, worker.learn(iteration, iteration))
        for name, metric in part.items()
    }


def scores(critic: Critic) -> list[Scores]:
    """All that it has put since last asked, in the order of samples."""
    channel = critic.context.channels[scores_of("critic")]
    found = [
        one for _ in range(channel.stats().depth_items) for one in channel.get_nowait()
    ]
    return sorted(found, key=lambda s: (s.group, s.sample))


def whole_weights(worker: LmActor | Critic) -> dict[str, torch.Tensor]:
    """A collective."""
    return {
        name: tensor.cpu().clone() for name, tensor in worker._model.whole_weights()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has at the end."""

    weights: dict[str, NDArray[Any]]  # of an actor, as they were pushed
    values: list[
        NDArray[np.float32]
    ]  # of a critic by iteration, on rank 0; of an actor, log-probabilities
    metrics: list[dict[str, Metric]]
    digest: str


def follow(scenario: LmScenario, worker: LmActor | Critic) -> Outcome:
    """Iterations as the loop runs them, leaving the accelerator in between; then a sync of an actor."""
    metrics, values = [], []
    scenario.session.begin(worker)
    for index in range(scenario.session.first, scenario.iterations):
        groups: Groups | None = None
        if scenario.routes is not None:
            made = made_up_samples(index, version=index)
            groups = with_routes(made, *scenario.routes)
        metrics.append(iterate(worker, index, groups))
        worker.move(Residency.OFF)
        scenario.session.end(worker, index)
        if isinstance(worker, Critic):
            values.append(
                np.concatenate(
                    [np.zeros(0, np.float32), *(s.values for s in scores(worker))]
                )
            )
    worker.move(Residency.WEIGHTS)
    if isinstance(worker, Critic):
        weights = {
            name: tensor.numpy() for name, tensor in whole_weights(worker).items()
        }
    else:
        receiver = CopyReceiver(
            worker.context.channels[WEIGHTS],
            worker.context.rank,
            folder=worker.context.folder,
        )
        worker.push_weights(scenario.iterations)
        with receiver.pull(scenario.iterations) as received:
            weights = {
                name: tensor.float().numpy().copy()
                for name, tensor in received.tensors.items()
            }
        receiver.close()
        values.append(np.array(worker.logprobs([5, 6, 7, 8]), np.float32))
    return Outcome(
        weights=weights, values=values, metrics=metrics, digest=worker.digest()
    )


def _rank(
    scenario: LmScenario, rank: int, rendezvous: Rendezvous, folder: Path
) -> Outcome:
    worker = make_lm_worker(scenario, rank, rendezvous, folder=folder)
    try:
        return follow(scenario, worker)
    finally:
        worker.close()


def run_lm_ranks(scenario: LmScenario) -> list[Outcome]:
    """The scenario in one process per rank."""
    return in_processes(_rank, scenario, scenario.ranks, channels=(spec_of(WEIGHTS),))
